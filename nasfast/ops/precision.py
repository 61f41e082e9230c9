"""Which number type a training takes by default: bf16 where the CUDA kernels serve it, which have no float32."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Literal

import torch

from nasfast.ops.backends import why_not_cuda_chain
from nasfast.runtime.launcher import environment_size

Resolved = Literal["fp32", "bf16"]
"""float32, or bfloat16 autocast."""

_logger = logging.getLogger(__name__)


def resolve_precision(name: Literal["auto", "fp32", "bf16"], device: str) -> Resolved:
    """The number type that a setting means on a device.

    `auto` is bf16 on a GPU of compute capability 8.0 or later whose CUDA kernels are there, and fp32 elsewhere. What it
    means on a GPU is logged once, with the reason.

    Args:
        name: the setting.
        device: `cpu`, `cuda`, `cuda:N`, the `onnx` of latencies, or `auto`, which is a GPU if torch sees one.
    """
    return _default(device)[0] if name == "auto" else name


def default_precision(device: str) -> tuple[Resolved, str]:
    """What `auto` means on a device, and the reason.

    Args:
        device: see `resolve_precision`.
    """
    kind = device.partition(":")[0]
    if kind not in ("auto", "cuda") or not torch.cuda.is_available():
        return "fp32", "bf16 is the default on GPUs alone"
    index = torch.device(device).index if kind == "cuda" else None
    if index is None and environment_size() > 1:  # each rank asks about its own GPU
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    probe = torch.empty(0, device="cuda" if index is None else f"cuda:{index}", dtype=torch.bfloat16)
    reason = why_not_cuda_chain(probe)
    return ("fp32", reason) if reason else ("bf16", "the CUDA kernels serve it")


@cache
def _default(device: str) -> tuple[Resolved, str]:
    """As `default_precision`; said once, where there was something to decide."""
    precision, reason = default_precision(device)
    if torch.cuda.is_available() and device.partition(":")[0] in ("auto", "cuda"):
        _logger.info("precision auto: %s on the GPU (%s)", precision, reason)
    return precision, reason
