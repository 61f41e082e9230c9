"""The blocks, each defined once for the supernet (fused operators) and the standalone network (plain modules)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nasfast.config import nearest
from nasfast.ops.modules import (
    BNAct2d,
    ConvAct,
    ConvBNAct,
    ConvBNActSequential,
    InvertedResidual,
    SqueezeExcitation,
    activation_module,
)
from nasfast.ops.nhwc import concatenate
from nasfast.spaces import Block, Layer
from nasfast.spaces.blocks import shuffle_branches


@dataclass(frozen=True)
class UnitFactory:
    """Makes the units of a network; it has everything that differs between a supernet and a standalone network.

    Attributes:
        act: activation of the blocks of layers that have none of their own.
        fused: whether to use the operators of `nasfast.ops`; otherwise plain PyTorch modules with the same state dict.
        track_running_stats: whether BatchNorms keep running statistics. Those of a supernet do not, because statistics
            of one path do not fit another.
    """

    act: str
    fused: bool
    track_running_stats: bool

    def conv_bn_act(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        linear: bool = False,
    ) -> ConvBNAct:
        """Convolution, BatchNorm and the factory's activation; none if `linear`."""
        return ConvBNAct(
            in_channels,
            out_channels,
            kernel,
            stride=stride,
            groups=groups,
            act="identity" if linear else self.act,
            track_running_stats=self.track_running_stats,
            fused=self.fused,
        )

    def sequential(self, *units: ConvBNAct) -> ConvBNActSequential:
        """Units that run one after another."""
        return ConvBNActSequential(*units, fused=self.fused)

    def inverted_residual(self, layer: Layer, block: Block) -> InvertedResidual:
        """The inverted residual of a layer, with the block's kernel, expansion and squeeze-and-excitation."""
        se = None
        if block.se is not None:
            hidden, settings = block.hidden_channels(layer.in_channels), block.se
            squeezed = settings.channels(hidden)
            se = SqueezeExcitation(hidden, squeezed, act=settings.activation, gate=settings.gate, fused=self.fused)
        return InvertedResidual(
            layer.in_channels,
            layer.out_channels,
            kernel_size=block.kernel,
            stride=layer.stride,
            expand=block.expand,
            se=se,
            act=self.act,
            track_running_stats=self.track_running_stats,
            fused=self.fused,
        )

    def layer_indicator(self, channels: int) -> nn.BatchNorm2d:
        """The BatchNorm of a layer indicator."""
        if not self.fused:
            return nn.BatchNorm2d(channels, track_running_stats=self.track_running_stats)
        return BNAct2d(channels, act="identity", track_running_stats=self.track_running_stats)


class ShuffleUnit(nn.Module):
    """ShuffleNetV2 unit (Ma et al. 2018; kernel sizes and Xception variant as in Single Path One-Shot).

    At stride 1 the channels are shuffled and split: even ones bypass, odd ones go through the main branch. At stride 2
    both branches get the whole input.
    """

    def __init__(self, main: ConvBNActSequential, projection: ConvBNActSequential | None) -> None:
        super().__init__()
        self.main = main
        self.projection = projection

    @property
    def block_indicator(self) -> nn.BatchNorm2d:
        """The last BatchNorm of the main branch, which scores the block (docs/method.md 2)."""
        return self.linear_paths()["main"][-1].block_indicator

    def linear_paths(self) -> dict[str, list[ConvBNAct]]:
        """The branches as units in order, for `nasfast.supernet.aligned`."""
        paths = {"main": self.main, "projection": self.projection}
        # nn.Sequential does not say which modules it has
        return {role: list(units) for role, units in paths.items() if units is not None}  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        if self.projection is None:
            return self.main(x, shuffle=True)
        branches = self.projection(x), self.main(x)
        return concatenate(*branches) if self.main.fused else torch.cat(branches, dim=1)


class DenseInvertedResidual(nn.Module):
    """EfficientNetV2's fused MBConv (Tan and Le 2021): units in order, and x is added where the shape stays."""

    def __init__(self, units: ConvBNActSequential, *, has_residual: bool) -> None:
        super().__init__()
        self.units = units
        self.has_residual = has_residual

    @property
    def block_indicator(self) -> nn.BatchNorm2d:
        """The last BatchNorm, which scores the block."""
        # nn.Sequential does not say which modules it has
        return self.units[-1].block_indicator  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.units(x, x if self.has_residual else None)


class StridedIdentity(nn.Module):
    """The `identity` candidate of a reduction layer: a strided 1x1 convolution and its BN without activation."""

    def __init__(self, unit: ConvBNAct) -> None:
        super().__init__()
        self.unit = unit

    @property
    def block_indicator(self) -> nn.BatchNorm2d:
        """The BN of the unit, which scores the block."""
        return self.unit.block_indicator

    def linear_paths(self) -> dict[str, list[ConvBNAct]]:
        """The only unit, for `nasfast.supernet.aligned`."""
        return {"": [self.unit]}

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x)


class Hidden(nn.Module):
    """The mean over the pixels, then a linear layer with bias and an activation: (N, C, H, W) -> (N, out, 1, 1)."""

    def __init__(self, unit: ConvAct) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x.mean((2, 3), keepdim=True))


BlockBuilder = Callable[[Block, Layer, UnitFactory], nn.Module]

_BLOCK_BUILDERS: dict[str, BlockBuilder] = {}


def block_builder(kind: str) -> Callable[[BlockBuilder], BlockBuilder]:
    """Decorator of the function that builds the module of a block kind; `nasfast.spaces.block_cost` gives its cost.

    The function gets `(block, layer, units)` and returns a module from (N, layer.in_channels, H, W) to
    (N, layer.out_channels, ceil(H / stride), ceil(W / stride)). The module has an attribute `block_indicator`, the
    `nn.BatchNorm2d` that scores it. Units made by `units` are fused in a supernet and plain in a standalone network.

    Raises:
        KeyError: the kind has a builder already.
    """

    def register(function: BlockBuilder) -> BlockBuilder:
        if kind in _BLOCK_BUILDERS:
            raise KeyError(f"block kind {kind!r} already has a builder: choose another name")
        _BLOCK_BUILDERS[kind] = function
        return function

    return register


def build_block(block: Block, layer: Layer, units: UnitFactory) -> nn.Module:
    """The module of one candidate."""
    if layer.activation is not None:
        units = replace(units, act=layer.activation)
    if block.kind not in _BLOCK_BUILDERS:
        raise ValueError(f"block kind {block.kind!r} has a cost but no module; {nearest(block.kind, _BLOCK_BUILDERS)}")
    module = _BLOCK_BUILDERS[block.kind](block, layer, units)
    block_indicator = getattr(module, "block_indicator", None)
    # the layer indicator scores the identity of a normal layer, and a hidden layer is not searched
    if block.kind not in ("identity", "hidden") and not isinstance(block_indicator, nn.BatchNorm2d):
        raise ValueError(
            f"block kind {block.kind!r}: the block_indicator of its module must be an nn.BatchNorm2d, got "
            f"{type(block_indicator).__name__}: set it to the BatchNorm that scores the block"
        )
    return module


@block_builder("conv")
def _conv(block: Block, layer: Layer, units: UnitFactory) -> nn.Module:
    return units.conv_bn_act(layer.in_channels, layer.out_channels, block.kernel, stride=layer.stride)


@block_builder("mbconv")
def _mbconv(block: Block, layer: Layer, units: UnitFactory) -> nn.Module:
    return units.inverted_residual(layer, block)


@block_builder("fused_mbconv")
def _fused_mbconv(block: Block, layer: Layer, units: UnitFactory) -> nn.Module:
    if block.expand == 1:
        dense = [units.conv_bn_act(layer.in_channels, layer.out_channels, block.kernel, stride=layer.stride)]
    else:
        hidden = block.hidden_channels(layer.in_channels)
        dense = [
            units.conv_bn_act(layer.in_channels, hidden, block.kernel, stride=layer.stride),
            units.conv_bn_act(hidden, layer.out_channels, 1, linear=True),
        ]
    return DenseInvertedResidual(units.sequential(*dense), has_residual=layer.normal)


@block_builder("hidden")
def _hidden(block: Block, layer: Layer, units: UnitFactory) -> nn.Module:
    return Hidden(ConvAct(layer.in_channels, layer.out_channels, activation_module(units.act)))


@block_builder("identity")
def _identity(block: Block, layer: Layer, units: UnitFactory) -> nn.Module:
    if layer.normal:
        return nn.Identity()
    return StridedIdentity(
        units.conv_bn_act(layer.in_channels, layer.out_channels, 1, stride=layer.stride, linear=True)
    )


def _shuffle_projection(layer: Layer, kernel: int, units: UnitFactory) -> ConvBNActSequential | None:
    if layer.stride == 1:
        return None
    channels = layer.in_channels
    return units.sequential(
        units.conv_bn_act(channels, channels, kernel, stride=layer.stride, groups=channels, linear=True),
        units.conv_bn_act(channels, channels, 1),
    )


@block_builder("shuffle")
def _shuffle(block: Block, layer: Layer, units: UnitFactory) -> nn.Module:
    branch_in, mid, branch_out = shuffle_branches(layer.in_channels, layer.out_channels, layer.stride)
    main = units.sequential(
        units.conv_bn_act(branch_in, mid, 1),
        units.conv_bn_act(mid, mid, block.kernel, stride=layer.stride, groups=mid, linear=True),
        units.conv_bn_act(mid, branch_out, 1),
    )
    return ShuffleUnit(main, _shuffle_projection(layer, block.kernel, units))


@block_builder("shuffle_xception")
def _shuffle_xception(block: Block, layer: Layer, units: UnitFactory) -> nn.Module:
    branch_in, mid, branch_out = shuffle_branches(layer.in_channels, layer.out_channels, layer.stride)
    main = []
    for stride, channels, out in ((layer.stride, branch_in, mid), (1, mid, mid), (1, mid, branch_out)):
        main.append(units.conv_bn_act(channels, channels, block.kernel, stride=stride, groups=channels, linear=True))
        main.append(units.conv_bn_act(channels, out, 1))
    return ShuffleUnit(units.sequential(*main), _shuffle_projection(layer, block.kernel, units))
