"""Launchers of chains of convolution, BatchNorm and activation on the CUDA kernels of csrc/gpu.

csrc/gpu/chain.h has the order of the kernels. CPU tensors run on their emulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nasfast.ops import _native
from nasfast.ops.arrivals import zeros
from nasfast.ops.chain.plan import KEPT_PLANS, read_plan
from nasfast.ops.registry import define
from nasfast.ops.tensors import aligned


def counters(like: Tensor, plan: Sequence[int]) -> Tensor:
    """Counters for the launches of this plan, which run one after the other and so share them."""
    # the emulated GPU may change from call to call
    count = _count_once(like.device, tuple(plan)) if like.is_cuda else _count(like, plan)
    return zeros(count, like.device)


def _count(like: Tensor, plan: Sequence[int]) -> int:
    return torch.ops.nasfast.conv_bn_act_chain_gpu_counters(like, plan)


@lru_cache(KEPT_PLANS)
def _count_once(device: torch.device, plan: tuple[int, ...]) -> int:
    return _count(torch.empty(0, device=device), list(plan))


def _refuse_running_statistics(batch: list[bool]) -> None:
    if not all(batch):
        raise ValueError(
            "conv_bn_act_chain: the CUDA kernels use the statistics of the batch in every stage, got running "
            f"statistics in stage {batch.index(False)}"
        )


def conv_bn_act_chain_fwd(
    x: Tensor,
    conv_weights: list[Tensor],
    bn_weights: list[Tensor],
    bn_biases: list[Tensor],
    running_means: list[Tensor],
    running_vars: list[Tensor],
    residual: Tensor | None,
    plan: list[int],
    eps: list[float],
    add_input: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, saved, statistics; see csrc/library.cpp."""
    chain = read_plan(plan)
    _refuse_running_statistics([mean.numel() == 0 for mean in running_means])
    x = aligned(x)
    y = torch.empty(chain.out_shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    saved = x.new_empty(chain.saved_size if keep else 0)
    statistics = x.new_empty(chain.statistics_elements("cuda"), dtype=torch.float64)
    torch.ops.nasfast.conv_bn_act_chain_gpu_fwd(
        x=x,
        conv_weights=list(map(aligned, conv_weights)),
        bn_weights=bn_weights,
        bn_biases=bn_biases,
        added=x if add_input else None if residual is None else aligned(residual),
        y=y,
        saved=saved,
        statistics=statistics,
        counters=counters(x, plan),
        deferred_input=[],
        deferred_norm=[],
        plan=plan,
        eps=eps,
    )
    return y, saved, statistics


def conv_bn_act_chain_bwd(
    grad: Tensor,
    x: Tensor | None,
    saved: Tensor,
    statistics: Tensor,
    conv_weights: list[Tensor],
    bn_weights: list[Tensor],
    bn_biases: list[Tensor],
    batch_statistics: list[bool],
    plan: list[int],
    eps: list[float],
    add_input: bool,
    wants: list[bool],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """dx, dweights, dbiases; see csrc/library.cpp."""
    _refuse_running_statistics(batch_statistics)
    dx, dweights, dbiases = read_plan(plan).empty_gradients(saved, bn_weights, bn_biases, wants)
    if any(wants):
        torch.ops.nasfast.conv_bn_act_chain_gpu_bwd(
            grad=aligned(grad),
            saved=saved,
            statistics=statistics,
            conv_weights=list(map(aligned, conv_weights)),
            bn_weights=bn_weights,
            add_input=add_input,
            dx=dx if wants[0] else None,
            dweights=dweights,
            dbiases=dbiases,
            counters=counters(grad, plan),
            input_norm=[],
            deferred_norm=[],
            plan=plan,
            eps=eps,
        )
    return dx, dweights, dbiases


if _native.extension is not None:
    define("cuda", conv_bn_act_chain_fwd, conv_bn_act_chain_bwd)
