"""The device a configuration names."""

from __future__ import annotations

import re

import torch

from nasfast.config import ConfigError


def check_device(name: str) -> None:
    """Raise ValueError unless `name` is auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")


def torch_device(name: str) -> str:
    """The device to use; `auto` is the GPU where torch sees one.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no GPU: use --device cpu, or see `nasfast doctor`")
    return name
