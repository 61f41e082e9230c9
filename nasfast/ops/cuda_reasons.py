"""Why the CUDA kernels of chains do less than they could, in words for the log, once each, and for `nasfast doctor`."""

from __future__ import annotations

import logging
from collections import Counter
from math import isqrt

import torch

from nasfast.ops import cuda_times
from nasfast.ops.plan import Kind, read_plan

_logger = logging.getLogger(__name__)
_logged: set[str] = set()
# kMatrixShared in csrc/gpu/depthwise.h with kReserved in csrc/gpu/portable.h, and kMatrixColumns, kSmallColumns and
# kSmallRows in csrc/gpu/depthwise_matrices.h
_MATRIX_SHARED_KB = 128 + 1
_MATRIX_COLUMNS = 56
_SMALL_COLUMNS, _SMALL_ROWS = 8, 7


def without_tensor_cores(kernel: int, stride: int, size: tuple[int, int], *, recomputed: bool, shared_kb: int) -> str:
    """Why a depthwise stage does not run on tensor cores; empty if it does. This is `on_tensor_cores` of csrc/gpu.

    Args:
        kernel, stride: of the stage.
        size: rows and columns of its input.
        recomputed: whether the expansion in front of it is computed again.
        shared_kb: the most shared memory of a block, in KB.
    """
    if shared_kb < _MATRIX_SHARED_KB:
        return f"blocks of this GPU have {shared_kb} KB of shared memory, and the kernel needs {_MATRIX_SHARED_KB}"
    if recomputed:
        return "the kernel that computes an expansion again has no such stencil"
    if stride > 1:
        return "there is no such stencil for stride 2"
    if kernel < 5:
        return "with kernel 3 it is slower by the model"
    height, width = size
    if width <= _SMALL_COLUMNS and kernel < 7:
        return f"with kernel {kernel} it is slower by the model on maps of at most {_SMALL_COLUMNS} columns"
    if width <= _SMALL_COLUMNS and height > _SMALL_ROWS:
        return f"on maps of at most {_SMALL_COLUMNS} columns the kernel has at most {_SMALL_ROWS} rows"
    if width > _MATRIX_COLUMNS:
        return f"the kernel has maps of at most {_MATRIX_COLUMNS} columns"
    return ""


def shared_kb(device: torch.device | None = None) -> int:
    """The most shared memory of a block of this CUDA device, None for the current one, in KB."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024


def log_stages(numbers: tuple[int, ...], shared_kb: int) -> None:
    """Log why depthwise stages of the chain with these `ChainPlan.numbers` run without tensor cores, each reason once.

    Args:
        shared_kb: as in `without_tensor_cores`.
    """
    chain = read_plan(numbers)
    for i, stage in enumerate(chain.stages):
        if stage.kind == Kind.DEPTHWISE:
            recomputed = chain.recompute and i == 1
            why = without_tensor_cores(
                stage.kernel, stage.stride, stage.size, recomputed=recomputed, shared_kb=shared_kb
            )
            if why and why not in _logged:
                _logged.add(why)
                said = "depthwise convolutions run without tensor cores: %s; the first is in %s"
                _logger.info(said, why, chain.modelled)


def summary(gpu: str, shared_kb: int) -> list[str]:
    """Which depthwise stages of a modelled step run without tensor cores, for people.

    Args:
        gpu: a GPU of `cuda_times`.
        shared_kb: as in `without_tensor_cores`.
    """
    found: Counter[str] = Counter()
    for chain, times in cuda_times.TIMES[gpu].items():
        schedule = times.schedule(chain)
        width = isqrt(chain.pixels // cuda_times.BATCH)
        for i, (kind, kernel, stride) in enumerate(chain.stages):
            if kind == "depthwise":
                recomputed = schedule != "stored" and i == 1
                size = width, width
                found[without_tensor_cores(kernel, stride, size, recomputed=recomputed, shared_kb=shared_kb)] += 1
            width = -(-width // stride)
    served, count = found.pop("", 0), sum(found.values())
    lines = [f"cuda runs {served} of the {served + count} depthwise stages of a mobilenet_v2 step on tensor cores"]
    lines += [f"  not {count}: {why}" for why, count in found.items()]
    return lines
