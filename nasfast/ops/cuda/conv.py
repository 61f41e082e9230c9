"""Launchers of chains of convolution, BatchNorm and activation on the CUDA kernels of csrc/gpu.

Forward and backward run the same schedule as Triton's (nasfast/ops/triton/conv.py). csrc/gpu/chain.h has the order of
the kernels. CPU tensors run on the emulation of the kernels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nasfast.ops.arrivals import zeros
from nasfast.ops.destinations import current, new_gradients, new_image
from nasfast.ops.plan import KEPT_PLANS, ChainPlan, Kind, read_plan


def _counters(like: Tensor, plan: list[int]) -> Tensor:
    """Counters for the launches of this plan, which run one after the other and so share them."""
    # the emulated GPU may change from call to call
    count = _count_once(like.device, tuple(plan)) if like.is_cuda else _count(like, plan)
    return zeros(count, like.device)


def _count(like: Tensor, plan: list[int]) -> int:
    return torch.ops.nasfast.conv_bn_act_chain_gpu_counters(like, plan)


@lru_cache(KEPT_PLANS)
def _count_once(device: torch.device, plan: tuple[int, ...]) -> int:
    return _count(torch.empty(0, device=device), list(plan))


def _saved_size(chain: ChainPlan, *, left: bool) -> int:
    """Elements that forward keeps; the output of the last convolution is the last of them, if it is not left."""
    last = chain.stages[-1].saved_at
    return last if left and last is not None else chain.saved_size


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it begins between two multiples of 16 bytes, as a slice of a larger one may.

    The kernels read 16 bytes at a time.
    """
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _weights(chain: ChainPlan, weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The weights as the kernels get them: in 16 bits where they would only be rounded, and somebody keeps them so."""
    rounded = [stage.kind == Kind.POINTWISE and stage.saved_at is not None for stage in chain.stages]
    found = zip(weights, rounded, strict=True)
    return [
        _aligned(current().rounded_weight(weight, dtype) if only_rounds else weight) for weight, only_rounds in found
    ]


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
    """y, saved, statistics; see csrc/library.cpp.

    A caller that offers memory for it (nasfast/ops/destinations.py) gets y unmade, and `saved` without the output of
    the last convolution.
    """
    chain = read_plan(plan)
    _refuse_running_statistics([mean.numel() == 0 for mean in running_means])
    y = new_image("result", chain.out_shape, x)
    offer = current()
    before = offer.take_unmade(x)
    left = offer.leave(y, x if add_input else residual) if chain.stages[-1].act == "identity" else None
    saved = x.new_empty(_saved_size(chain, left=left is not None) if keep else 0)
    x = _aligned(x) if before is None else x
    added = None if left is not None else x if add_input else None if residual is None else _aligned(residual)
    statistics = x.new_empty(chain.statistics_elements("cuda"), dtype=torch.float64)
    torch.ops.nasfast.conv_bn_act_chain_gpu_fwd(
        x=x,
        conv_weights=_weights(chain, conv_weights, x.dtype),
        bn_weights=bn_weights,
        bn_biases=bn_biases,
        added=added,
        y=y,
        saved=saved,
        statistics=statistics,
        counters=_counters(x, plan),
        before=[] if before is None else before.tensors(),
        left=[] if left is None else list(left),
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
    chain = read_plan(plan)
    given = None
    if saved.numel() == _saved_size(chain, left=True):
        given = current().left
        if given is None:
            raise RuntimeError("the backward of an operator that left its result needs the offer of its forward")
    _refuse_running_statistics(batch_statistics)
    dx, dweights, dbiases = new_gradients(chain.in_shape, saved, bn_weights, bn_biases, wants)
    if any(wants):
        before = current().begin_backward(dx) if wants[0] else None
        torch.ops.nasfast.conv_bn_act_chain_gpu_bwd(
            grad=_aligned(grad),
            x=None if x is None else _aligned(x),
            saved=saved,
            statistics=statistics,
            conv_weights=_weights(chain, conv_weights, grad.dtype),
            bn_weights=bn_weights,
            add_input=add_input,
            dx=dx if wants[0] else None,
            dweights=dweights,
            dbiases=dbiases,
            counters=_counters(grad, plan),
            before=[] if before is None else list(before),
            left=[] if given is None else list(given.left),
            plan=plan,
            eps=eps,
        )
    return dx, dweights, dbiases
