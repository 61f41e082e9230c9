"""Closed-form costs of blocks: MACs (multiply-accumulates of convolutions and classifier, per image) and parameters.

One MAC is one multiply and one add; `torch.utils.flop_counter` reports exactly twice these numbers. BatchNorm,
activations, pooling and additions are not counted as MACs (as in the papers' tables); BatchNorm's gamma and beta are
counted as parameters. Layer indicators exist only in the supernet and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nasfast.config import nearest


class BlockSettings(Protocol):
    """What a cost depends on besides channels, stride and size; `nasfast.spaces.Block` has it."""

    @property
    def kind(self) -> str: ...

    @property
    def kernel(self) -> int: ...

    @property
    def expand(self) -> int: ...


@dataclass(frozen=True)
class Cost:
    """Cost of a part of a network for one image."""

    macs: int = 0
    params: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.macs + other.macs, self.params + other.params)


@dataclass(frozen=True)
class Operator:
    """What one value of an architecture stands for, over all the places where the network has it.

    Attributes:
        cost: of all places together.
        inputs: per place, the elements C * H * W of its input for one image.
        works: whether it is more than an identity, a pooling or nothing. The strided convolution that stands for an
            identity on a layer that changes shapes does not count as work: it has weights and costs, but no depth.
    """

    cost: Cost
    inputs: tuple[int, ...]
    works: bool


BlockCost = Callable[..., Cost]
"""`(block, in_channels, out_channels, stride, size) -> Cost`; `size` is the input's height (= width) in pixels."""

_BLOCK_COSTS: dict[str, BlockCost] = {}


def block_cost(kind: str) -> Callable[[BlockCost], BlockCost]:
    """Decorator that gives a block kind its closed-form cost.

    Users add their own kind with this and `nasfast.supernet.block_builder`.

    Raises:
        KeyError: the kind has a cost already.
    """

    def register(function: BlockCost) -> BlockCost:
        if kind in _BLOCK_COSTS:
            raise KeyError(f"block kind {kind!r} already has a cost: choose another name")
        _BLOCK_COSTS[kind] = function
        return function

    return register


def check_kind(kind: str) -> None:
    """Raise ValueError naming the known kinds unless `kind` has a cost."""
    if kind not in _BLOCK_COSTS:
        raise ValueError(f"unknown block kind {kind!r}; {nearest(kind, _BLOCK_COSTS)}")


def cost_of(block: BlockSettings, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    """Cost of one block on a `size` x `size` input."""
    check_kind(block.kind)
    return _BLOCK_COSTS[block.kind](block, in_channels, out_channels, stride, size)


def output_size(size: int, stride: int) -> int:
    """Height of the output of a padded (k // 2) convolution."""
    return -(-size // stride)


def conv_bn_cost(in_channels: int, out_channels: int, kernel: int, size_out: int, *, groups: int = 1) -> Cost:
    """Biasless convolution followed by BatchNorm; `size_out` is the height of its output."""
    weights = in_channels // groups * out_channels * kernel**2
    return Cost(macs=weights * size_out**2, params=weights + 2 * out_channels)


@block_cost("conv")
def _conv(block: BlockSettings, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    return conv_bn_cost(in_channels, out_channels, block.kernel, output_size(size, stride))


@block_cost("mbconv")
def _mbconv(block: BlockSettings, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    hidden, size_out = in_channels * block.expand, output_size(size, stride)
    expand = conv_bn_cost(in_channels, hidden, 1, size) if block.expand > 1 else Cost()
    depthwise = conv_bn_cost(hidden, hidden, block.kernel, size_out, groups=hidden)
    return expand + depthwise + conv_bn_cost(hidden, out_channels, 1, size_out)


@block_cost("identity")
def _identity(block: BlockSettings, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    if stride == 1 and in_channels == out_channels:
        return Cost()
    return conv_bn_cost(in_channels, out_channels, 1, output_size(size, stride))


def shuffle_branches(in_channels: int, out_channels: int, stride: int) -> tuple[int, int, int]:
    """Channels of a ShuffleNetV2 unit: main branch input, its middle, its output (Single Path One-Shot, appendix)."""
    branch_in = in_channels if stride > 1 else in_channels // 2
    return branch_in, out_channels // 2, out_channels - branch_in


def _shuffle_projection(branch_in: int, kernel: int, stride: int, size_out: int) -> Cost:
    """The second branch of a stride-2 unit: depthwise, then pointwise."""
    if stride == 1:
        return Cost()
    return conv_bn_cost(branch_in, branch_in, kernel, size_out, groups=branch_in) + conv_bn_cost(
        branch_in, branch_in, 1, size_out
    )


@block_cost("shuffle")
def _shuffle(block: BlockSettings, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    branch_in, mid, branch_out = shuffle_branches(in_channels, out_channels, stride)
    size_out = output_size(size, stride)
    main = (
        conv_bn_cost(branch_in, mid, 1, size)
        + conv_bn_cost(mid, mid, block.kernel, size_out, groups=mid)
        + conv_bn_cost(mid, branch_out, 1, size_out)
    )
    return main + _shuffle_projection(branch_in, block.kernel, stride, size_out)


@block_cost("shuffle_xception")
def _shuffle_xception(block: BlockSettings, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    branch_in, mid, branch_out = shuffle_branches(in_channels, out_channels, stride)
    size_out, k = output_size(size, stride), block.kernel
    main = Cost()
    for depthwise, pointwise in ((branch_in, mid), (mid, mid), (mid, branch_out)):
        main += conv_bn_cost(depthwise, depthwise, k, size_out, groups=depthwise)
        main += conv_bn_cost(depthwise, pointwise, 1, size_out)
    return main + _shuffle_projection(branch_in, k, stride, size_out)
