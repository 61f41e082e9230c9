"""Search spaces of layers, as data: a stem, stages of searchable layers, a head. No torch.

`nasfast.supernet` builds the modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from nasfast.config import ConfigBase, ConfigError
from nasfast.spaces.arch import SKIP
from nasfast.spaces.arch_space import LayerSpace
from nasfast.spaces.blocks import Activation, Block, refusal
from nasfast.spaces.cost import Cost, Operator, linear_cost, output_size


@dataclass(frozen=True)
class FixedLayer(ConfigBase):
    """A layer outside the search: in the stem or the head.

    Attributes:
        block: its only candidate.
        out: output channels.
        stride: stride of the layer.
        activation: activation of the layer; None takes that of the network.
    """

    block: Block
    out: int
    stride: int = 1
    activation: Activation | None = None


@dataclass(frozen=True)
class Stage(ConfigBase):
    """`layers` searchable layers of `out` channels; the first has the stage's stride.

    Attributes:
        out: output channels.
        layers: number of layers.
        stride: stride of the first layer.
        choices: candidates of every layer of the stage.
        pinned: indices within the stage of layers fixed to the identity (`SKIP`), which must be normal layers.
        activation: activation of the stage's blocks; None takes that of the network.
    """

    out: int
    layers: int
    stride: int
    choices: tuple[Block, ...]
    pinned: tuple[int, ...] = ()
    activation: Activation | None = None


@dataclass(frozen=True)
class Layer:
    """One layer with its shapes resolved.

    Attributes:
        choices: candidates; an Arch value indexes them. Empty when the layer is pinned to the identity.
        size: height (= width) of its input in pixels.
        activation: activation of its blocks; None takes that of the network.
    """

    in_channels: int
    out_channels: int
    stride: int
    size: int
    choices: tuple[Block, ...]
    activation: Activation | None = None

    @property
    def normal(self) -> bool:
        """Stride 1 and equal input and output shape: only such a layer can be skipped (docs/method.md 2)."""
        return self.stride == 1 and self.in_channels == self.out_channels

    @property
    def options(self) -> tuple[int, ...]:
        """The values a search chooses from: the candidates, or the identity where the layer is pinned to it."""
        return tuple(range(len(self.choices))) or (SKIP,)

    @property
    def legal(self) -> tuple[int, ...]:
        """Every value an Arch or a path may have here: the options, and the skip of a normal layer."""
        extra = self.indicator_choice
        return self.options if extra is None or extra in self.options else (*self.options, extra)

    @property
    def indicator_choice(self) -> int | None:
        """The value that means "the layer indicator": `SKIP`, or the index of `identity` where that is a candidate.

        None on reduction and on pinned layers, which have no layer indicator.
        """
        if not self.normal or not self.choices:
            return None
        kinds = [block.kind for block in self.choices]
        return kinds.index("identity") if "identity" in kinds else SKIP

    def cost(self, choice: int) -> Cost:
        if choice == SKIP:
            return Cost()
        return self.choices[choice].cost(self.in_channels, self.out_channels, self.stride, self.size)

    def operator(self, choice: int) -> Operator:
        works = choice != SKIP and self.choices[choice].kind != "identity"
        return Operator(self.cost(choice), (self.in_channels * self.size**2,), works)

    def label(self, choice: int) -> str:
        return "skip" if choice == SKIP else self.choices[choice].label


@dataclass(frozen=True, repr=False)
class SearchSpace(LayerSpace):
    """A whole layer-wise search space; its fields are also the keys of its YAML form (`save`, `load`).

    Attributes:
        name: shown in files and errors.
        resolution: height and width of the input in pixels.
        num_classes: outputs of the classifier.
        activation: activation of the blocks of stages and fixed layers that have none of their own.
        stem, head: fixed layers before and after the searchable stages.
        classifier_bias: whether the final linear layer has a bias.
        in_channels: channels of the input image.
    """

    KEY: ClassVar[str] = "stages"
    NETWORK: ClassVar[str] = "nasfast.supernet.standalone:StandaloneNetwork"

    name: str
    resolution: int
    num_classes: int
    stem: tuple[FixedLayer, ...]
    stages: tuple[Stage, ...]
    head: tuple[FixedLayer, ...]
    activation: Activation = "relu6"
    classifier_bias: bool = True
    in_channels: int = 3

    def _check_values(self) -> None:
        for field in ("resolution", "num_classes", "in_channels"):
            if getattr(self, field) < 1:
                raise ValueError(f"space {self.name!r}: {field} must be positive, got {getattr(self, field)}")
        if not self.stages:
            raise ValueError(f"space {self.name!r} has no stages: there is nothing to search")
        for i, stage in enumerate(self.stages):
            where = f"space {self.name!r}, stage {i}"
            if min(stage.out, stage.layers, stage.stride) < 1:
                raise ValueError(
                    f"{where}: out, layers and stride must be positive, got {stage.out}, {stage.layers}, {stage.stride}"
                )
            outside = [p for p in stage.pinned if not 0 <= p < stage.layers]
            if outside:
                raise ValueError(f"{where}: pinned must be indices from 0 to {stage.layers - 1}, got {outside}")
            if not stage.choices:
                raise ValueError(f"{where} has no choices")
            if len(set(stage.choices)) != len(stage.choices):
                raise ValueError(f"{where} lists the same choice twice")
        for part in ("stem", "head"):
            for i, fixed in enumerate(getattr(self, part)):
                if min(fixed.out, fixed.stride) < 1:
                    raise ValueError(
                        f"space {self.name!r}, {part} layer {i}: out and stride must be positive, "
                        f"got {fixed.out}, {fixed.stride}"
                    )
        for i, layer in enumerate(self.layers):
            if not layer.choices and not layer.normal:
                raise ValueError(f"space {self.name!r}: layer {i} changes shape and cannot be pinned to the identity")
        for part, layers in (("stem ", self.stem_layers), ("", self.layers), ("head ", self.head_layers)):
            for i, layer in enumerate(layers):
                last = part == "head " and i == len(layers) - 1
                for block in layer.choices:
                    if why := refusal(block, layer.in_channels, layer.out_channels, layer.stride, last=last):
                        raise ValueError(f"space {self.name!r}, {part}layer {i}: {why}")

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The searchable layers in order, with their shapes resolved; an Arch has one value for each."""
        channels, size = _output_shape(self.stem_layers, (self.in_channels, self.resolution))
        layers = []
        for stage in self.stages:
            for i in range(stage.layers):
                choices = () if i in stage.pinned else stage.choices
                stride = stage.stride if i == 0 else 1
                layers.append(Layer(channels, stage.out, stride, size, choices, stage.activation))
                channels, size = _output_shape(layers)
        return tuple(layers)

    @cached_property
    def stem_layers(self) -> tuple[Layer, ...]:
        """The layers of the stem with their shapes resolved; each has one choice."""
        return _resolve(self.stem, self.in_channels, self.resolution)

    @cached_property
    def head_layers(self) -> tuple[Layer, ...]:
        """The layers of the head with their shapes resolved; each has one choice."""
        return _resolve(self.head, *_output_shape(self.layers))

    @property
    def own_activations(self) -> set[Activation]:
        """The activations that stages and fixed layers have of their own."""
        parts: tuple[FixedLayer | Stage, ...] = (*self.stem, *self.stages, *self.head)
        return {part.activation for part in parts if part.activation is not None}

    def require_one_activation(self, what: str) -> None:
        """Raise ConfigError if stages or fixed layers have an activation of their own; `what` is what refuses them."""
        if self.own_activations:
            raise ConfigError(
                f"space {self.name!r} has stages or fixed layers with activations of their own "
                f"({', '.join(sorted(self.own_activations))}), and {what} gives all layers one activation: "
                "choose a space with `activation` alone"
            )

    @property
    def features(self) -> int:
        """Channels that reach the classifier."""
        return self.head[-1].out if self.head else self.stages[-1].out

    @cached_property
    def fixed_cost(self) -> Cost:
        """See `ArchSpace`: cost of stem, head and classifier."""
        total = sum((layer.cost(0) for layer in self.stem_layers + self.head_layers), Cost())
        return total + linear_cost(self.features, self.num_classes, bias=self.classifier_bias)


def _output_shape(layers: Sequence[Layer], empty: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Channels and size after `layers`; `empty` when there are none."""
    return (layers[-1].out_channels, output_size(layers[-1].size, layers[-1].stride)) if layers else empty


def _resolve(fixed: Sequence[FixedLayer], channels: int, size: int) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    for layer in fixed:
        layers.append(Layer(channels, layer.out, layer.stride, size, (layer.block,), layer.activation))
        channels, size = _output_shape(layers)
    return tuple(layers)
