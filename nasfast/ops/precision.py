"""Which number type a training takes by default: bf16 where the CUDA kernels serve it, which have no float32."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from nasfast.ops.backends import why_not_cuda_chain
from nasfast.runtime.once import log_once

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
    if name != "auto":
        return name
    precision, reason = default_precision(device)
    if _is_gpu(device):
        log_once(_logger, logging.INFO, f"precision auto: {precision} on the GPU ({reason})")
    return precision


def default_precision(device: str) -> tuple[Resolved, str]:
    """What `auto` means on a device, and the reason.

    Args:
        device: see `resolve_precision`.
    """
    if not _is_gpu(device):
        return "fp32", "bf16 is the default on GPUs alone"
    # without an index it is the current GPU, which is a rank's own (`nasfast.runtime.distributed.start`)
    reason = why_not_cuda_chain(torch.empty(0, device=device.replace("auto", "cuda"), dtype=torch.bfloat16))
    return ("fp32", reason) if reason else ("bf16", "the CUDA kernels serve it")


def _is_gpu(device: str) -> bool:
    return device.partition(":")[0] in ("auto", "cuda") and torch.cuda.is_available()
