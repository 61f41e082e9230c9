"""The blocks that a layer chooses from, as data, and their closed-form costs; `nasfast.supernet` builds the modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase, nearest
from nasfast.spaces.cost import Cost, conv_bn_cost, linear_cost, output_size

Activation = Literal["identity", "relu", "relu6", "tanh", "hswish", "silu"]
"""The activations that a space can name; `nasfast.ops.reference.ACTIVATIONS` has their functions."""


Gate = Literal["hsigmoid", "sigmoid"]
"""The gates of squeeze-and-excitation: min(max(z + 3, 0), 6) / 6 (MobileNetV3) and 1 / (1 + exp(-z)) (EfficientNet)."""

# channels between the two convolutions of squeeze-and-excitation are a multiple of it, as in torchvision
_SQUEEZE_DIVISOR = 8


@dataclass(frozen=True)
class SqueezeExcite(ConfigBase):
    """Squeeze-and-excitation between the depthwise convolution and the projection of an `mbconv`.

    Every channel is multiplied by a factor: gate(W2 act(W1 mean + b1) + b2), where `mean` are the means of the channels
    over the pixels of an image (Hu et al. 2018, arXiv 1709.01507). The defaults are torchvision's MobileNetV3.

    Attributes:
        ratio: rows of W1 per hidden channel of the block; they are rounded to a multiple of 8.
        activation: act.
        gate: the gate.
    """

    ratio: float = 0.25
    activation: Activation = "relu"
    gate: Gate = "hsigmoid"

    def _check_values(self) -> None:
        if not 0 < self.ratio < math.inf:
            raise ValueError(f"se: ratio must be positive and finite, got {self.ratio}")

    @property
    def label(self) -> str:
        """Short text for tables and pictures; what has its default is left out."""
        names = [name for name in (self.activation, self.gate) if name not in ("relu", "hsigmoid")]
        return " ".join([f"se{self.ratio:g}", *names])

    def channels(self, hidden: int) -> int:
        """Rows of W1: hidden * ratio, rounded to the nearest multiple of 8 that is not less than 90 % of it."""
        exact = hidden * self.ratio
        multiple = max(_SQUEEZE_DIVISOR, int(exact + _SQUEEZE_DIVISOR / 2) // _SQUEEZE_DIVISOR * _SQUEEZE_DIVISOR)
        return multiple if multiple >= 0.9 * exact else multiple + _SQUEEZE_DIVISOR


@dataclass(frozen=True)
class Block(ConfigBase):
    """One candidate operator.

    Kinds of this package: `mbconv` (MobileNetV2 inverted residual), `fused_mbconv` (EfficientNetV2: a dense convolution
    in place of the expansion and the depthwise one; with expand 1 it is the whole block), `shuffle` and
    `shuffle_xception` (ShuffleNetV2 units), `conv` (dense convolution, BN, activation) and `identity` (nothing on a
    layer of equal shapes, a strided 1x1 convolution with BN elsewhere). `hidden` (mean over the pixels, linear layer
    with bias, activation) can only be the last layer of a head: MobileNetV3 has one before the classifier.

    Attributes:
        kind: one of these, or of the user's own.
        kernel: size of the dense or depthwise convolution, odd.
        expand: hidden channels of an `mbconv` or `fused_mbconv` per input channel, at least 1; their number is rounded.
        se: squeeze-and-excitation of an `mbconv`; None has none.
    """

    kind: str = "mbconv"
    kernel: int = 3
    expand: int | float = 1
    se: SqueezeExcite | None = None

    def _check_values(self) -> None:
        if self.kind not in _BLOCK_COSTS:
            own = "a kind of your own needs its module: --import FILE, or import it in Python (docs/spaces.md)"
            raise ValueError(f"unknown block kind {self.kind!r}; {nearest(self.kind, _BLOCK_COSTS)}; {own}")
        if self.se is not None and self.kind in _WITHOUT_SE:
            raise ValueError(f"block {self.kind}: only mbconv has squeeze-and-excitation: leave out se")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"block {self.kind}: kernel must be odd and positive, got {self.kernel}")
        if not 1 <= self.expand < math.inf:
            raise ValueError(f"block {self.kind}: expand must be at least 1 and finite, got {self.expand}")

    def cost(self, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
        """Its cost on a `size` x `size` input."""
        return _BLOCK_COSTS[self.kind](self, in_channels, out_channels, stride, size)

    def hidden_channels(self, in_channels: int) -> int:
        """Channels of the depthwise convolution of an `mbconv`, and of the expansion of a `fused_mbconv`."""
        return round(in_channels * self.expand)

    @property
    def label(self) -> str:
        """Short text for tables and pictures. Candidates that differ have different labels, by which results name them.

        Kinds that have no form of their own here, such as a user's, leave out what has its default.
        """
        kernel, expand, se = f"k{self.kernel}", f"e{self.expand:g}", "" if self.se is None else self.se.label
        parts = {
            "mbconv": (kernel, expand, se),
            "fused_mbconv": ("fused", kernel, expand),
            "shuffle": (kernel,),
            "conv": (f"conv{self.kernel}",),
        }.get(self.kind)
        if parts is None:
            name = "xception" if self.kind == "shuffle_xception" else self.kind
            parts = (name, kernel if self.kernel != 3 else "", expand if self.expand != 1 else "", se)
        return " ".join(filter(None, parts))


BlockCost = Callable[..., Cost]
"""`(block, in_channels, out_channels, stride, size) -> Cost`; `size` is the input's height (= width) in pixels."""

_BLOCK_COSTS: dict[str, BlockCost] = {}
# the kinds of this package that have no squeeze-and-excitation; a kind of a user's own may have one
_WITHOUT_SE = ("fused_mbconv", "shuffle", "shuffle_xception", "conv", "identity", "hidden")


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


def refusal(block: Block, in_channels: int, out_channels: int, stride: int, *, last: bool) -> str | None:
    """Why a layer of these shapes cannot have a block; None if it can. `last` is whether the classifier follows it."""
    if block.kind == "hidden" and not last:
        return "a hidden block takes the mean over all pixels: only the last layer of the head can be one"
    if not block.kind.startswith("shuffle"):
        return None
    if out_channels % 2:
        return f"ShuffleNetV2 units need an even number of channels, got {out_channels}"
    if stride == 1 and in_channels != out_channels:
        return (
            f"a stride-1 ShuffleNetV2 unit cannot change channels, got {in_channels} in and {out_channels} out: give "
            "the layer a stride of 2"
        )
    branch_in, _, branch_out = shuffle_branches(in_channels, out_channels, stride)
    if branch_out < 1:
        return (
            f"a stride-{stride} ShuffleNetV2 unit keeps its {branch_in} input channels beside those of its main "
            f"branch: out must be more than {branch_in}, got {out_channels}"
        )
    return None


@block_cost("conv")
def _conv(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    return conv_bn_cost(in_channels, out_channels, block.kernel, output_size(size, stride))


@block_cost("mbconv")
def _mbconv(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    hidden, size_out = block.hidden_channels(in_channels), output_size(size, stride)
    expand = conv_bn_cost(in_channels, hidden, 1, size) if block.expand > 1 else Cost()
    depthwise = conv_bn_cost(hidden, hidden, block.kernel, size_out, groups=hidden)
    excitation = Cost()
    if block.se is not None:
        squeezed = block.se.channels(hidden)
        excitation = linear_cost(hidden, squeezed) + linear_cost(squeezed, hidden)
    return expand + depthwise + excitation + conv_bn_cost(hidden, out_channels, 1, size_out)


@block_cost("fused_mbconv")
def _fused_mbconv(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    size_out = output_size(size, stride)
    if block.expand == 1:
        return conv_bn_cost(in_channels, out_channels, block.kernel, size_out)
    hidden = block.hidden_channels(in_channels)
    dense = conv_bn_cost(in_channels, hidden, block.kernel, size_out)
    return dense + conv_bn_cost(hidden, out_channels, 1, size_out)


@block_cost("hidden")
def _hidden(block: Block, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    return linear_cost(in_channels, out_channels)


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
