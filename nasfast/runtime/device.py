"""The device that a configuration names."""

from __future__ import annotations

import torch

from nasfast.config import ConfigError


def torch_device(name: str) -> str:
    """The device to use; `auto` takes the GPU if torch sees one, otherwise the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no GPU: use --device cpu, or see `nasfast doctor`")
    return name


def use_threads(count: int) -> None:
    """Let torch use this many CPU threads; 0 leaves its choice."""
    if count:
        torch.set_num_threads(count)
