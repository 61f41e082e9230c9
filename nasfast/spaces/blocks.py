"""The blocks that a layer chooses from, as data, and their closed-form costs; `nasfast.supernet` builds the modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase, nearest
from nasfast.spaces.cost import Cost, conv_bn_cost, output_size

Activation = Literal["identity", "relu", "relu6", "tanh", "hswish", "silu"]
"""The activations that a space can name; `nasfast.ops.reference.ACTIVATIONS` has their functions."""


@dataclass(frozen=True)
class Block(ConfigBase):
    """One candidate operator.

    Kinds of this package: `mbconv` (MobileNetV2 inverted residual), `shuffle` and `shuffle_xception` (ShuffleNetV2
    units), `conv` (dense convolution, BN, activation) and `identity` (nothing on a layer of equal shapes, a strided 1x1
    convolution with BN elsewhere).
    """

    kind: str = "mbconv"
    kernel: int = 3
    expand: int = 1

    def __post_init__(self) -> None:
        check_kind(self.kind)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"block {self.kind}: kernel must be odd and positive, got {self.kernel}")
        if self.expand < 1:
            raise ValueError(f"block {self.kind}: expand must be at least 1, got {self.expand}")

    @property
    def label(self) -> str:
        """Short text for tables and pictures."""
        return {
            "mbconv": f"k{self.kernel} e{self.expand}",
            "shuffle": f"k{self.kernel}",
            "shuffle_xception": "xception",
            "conv": f"conv{self.kernel}",
        }.get(self.kind, self.kind)


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


def cost_of(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    """Cost of one block on a `size` x `size` input."""
    check_kind(block.kind)
    return _BLOCK_COSTS[block.kind](block, in_channels, out_channels, stride, size)


@block_cost("conv")
def _conv(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    return conv_bn_cost(in_channels, out_channels, block.kernel, output_size(size, stride))


@block_cost("mbconv")
def _mbconv(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    hidden, size_out = in_channels * block.expand, output_size(size, stride)
    expand = conv_bn_cost(in_channels, hidden, 1, size) if block.expand > 1 else Cost()
    depthwise = conv_bn_cost(hidden, hidden, block.kernel, size_out, groups=hidden)
    return expand + depthwise + conv_bn_cost(hidden, out_channels, 1, size_out)


@block_cost("identity")
def _identity(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
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
def _shuffle(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    branch_in, mid, branch_out = shuffle_branches(in_channels, out_channels, stride)
    size_out = output_size(size, stride)
    main = (
        conv_bn_cost(branch_in, mid, 1, size)
        + conv_bn_cost(mid, mid, block.kernel, size_out, groups=mid)
        + conv_bn_cost(mid, branch_out, 1, size_out)
    )
    return main + _shuffle_projection(branch_in, block.kernel, stride, size_out)


@block_cost("shuffle_xception")
def _shuffle_xception(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    branch_in, mid, branch_out = shuffle_branches(in_channels, out_channels, stride)
    size_out, k = output_size(size, stride), block.kernel
    main = Cost()
    for depthwise, pointwise in ((branch_in, mid), (mid, mid), (mid, branch_out)):
        main += conv_bn_cost(depthwise, depthwise, k, size_out, groups=depthwise)
        main += conv_bn_cost(depthwise, pointwise, 1, size_out)
    return main + _shuffle_projection(branch_in, k, stride, size_out)
