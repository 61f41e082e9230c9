"""Which chains run faster on the operator than on PyTorch, by a rule; nothing is timed while a model runs.

The numbers were measured on one core, for chains of six networks of torchvision and timm at batch 8 and 160 pixels,
and on whole steps of eleven networks. A chain gains by the memory traffic that it saves, so it pays from a number of
results on: elements of the outputs of its convolutions, over all stages. Smaller chains pay less than a call of the
operator costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nasfast.ops.backends import resolve_backend
from nasfast.ops.plan import Kind, stage_kind, storage_dtype
from nasfast.ops.reference import Stage


class _Least(NamedTuple):
    """The least results per thread from which a chain pays.

    Attributes:
        own: of pointwise convolutions without stride and depthwise ones.
        other: of chains with another convolution: the operator gathers patches or pixels for it, or PyTorch runs it.
    """

    own: int
    other: int


# by type and whether a convolution trains
_LEAST = {
    (torch.float32, False): _Least(100_000, 2_000_000),
    (torch.float32, True): _Least(1_200_000, 1_200_000),
    (torch.bfloat16, False): _Least(100_000, 2_000_000),
    (torch.bfloat16, True): _Least(1_000_000, 1_500_000),
}
# Input channels from which PyTorch's pointwise convolution in bfloat16 is as fast as the operator's. A chain of such
# convolutions counts as one of other convolutions, unless a depthwise one, where PyTorch is slow, is in it.
_DEEP = 192
# shapes of which a chain keeps whether it pays
_KEPT_SHAPES = 256


def least_results(x: Tensor, stages: Sequence[Stage], *, trains: bool) -> int | None:
    """The results per thread from which the operator is expected to run these stages faster; None if it never is.

    Args:
        x: a tensor of the type and device of the input; its shape does not count.
        stages: stages that the operator can run on x.
        trains: whether a convolution trains.
    """
    backend = resolve_backend("conv_bn_act_chain", x).name
    if backend != "cpu":
        return _least_elsewhere(backend, x)
    kinds = [stage_kind(s.params.conv_weight.shape, s.stride, s.padding, s.groups) for s in stages]
    dtype = storage_dtype(x)
    # PyTorch's gradient of these takes up to ten times as long as its forward
    strided = any(kind == Kind.DEPTHWISE and s.stride > 1 for kind, s in zip(kinds, stages, strict=True))
    if dtype == torch.bfloat16 and not trains and strided:
        return 0
    least = _LEAST.get((dtype, trains))
    if least is None:
        return None
    own = all(
        kind == Kind.DEPTHWISE or (kind == Kind.POINTWISE and s.stride == 1)
        for kind, s in zip(kinds, stages, strict=True)
    )
    if dtype == torch.bfloat16 and Kind.DEPTHWISE not in kinds:
        own &= all(s.params.conv_weight.shape[1] < _DEEP for s in stages)
    return least.own if own else least.other


def _least_elsewhere(backend: str, x: Tensor) -> int | None:
    """`least_results` on other backends. The reference is PyTorch itself, and on a GPU float32 is left to PyTorch."""
    return None if backend == "reference" or storage_dtype(x) == torch.float32 else 0


def deciding(stages: Sequence[Stage], least: int | None) -> Callable[[torch.Size], bool]:
    """A function that says whether these stages give at least so many results per thread for an input of a shape."""
    sizes = [(s.params.conv_weight.shape[0], *s.params.conv_weight.shape[2:], s.stride, s.padding) for s in stages]
    kept: dict[tuple[torch.Size, int], bool] = {}

    def pays(shape: torch.Size) -> bool:
        if not least:
            return least is not None
        situation = shape, torch.get_num_threads()
        decided = kept.get(situation)
        if decided is None:
            if len(kept) >= _KEPT_SHAPES:
                kept.clear()
            decided = kept[situation] = _results(shape, sizes) >= situation[1] * least
        return decided

    return pays


def _results(shape: Sequence[int], sizes: Sequence[tuple[int, ...]]) -> int:
    batch, _, height, width = shape
    total = 0
    for out, *kernel, stride, padding in sizes:
        height = (height + 2 * padding - kernel[0]) // stride + 1
        width = (width + 2 * padding - kernel[1]) // stride + 1
        total += batch * out * height * width
    return total
