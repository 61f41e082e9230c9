"""Which channels of a captured network belong together: what produces them, passes them on, and reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nasfast.shrink.graph import Program, is_tensor, op_name, shape

_ACTIVATIONS = frozenset(
    "relu relu6 hardtanh silu hardswish hardsigmoid sigmoid gelu elu leaky_relu tanh mish softplus clamp clamp_min "
    "clamp_max".split()
)
_CHANNELWISE = frozenset(
    "dropout feature_dropout alias detach contiguous clone adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d "
    "max_pool2d upsample_nearest2d upsample_bilinear2d div".split()
)
RESHAPES = frozenset("view reshape flatten unsqueeze squeeze _unsafe_view".split())
"""Functions that give a tensor another shape."""

_STREAM = "an addition reads its output, and the stream between blocks keeps its width"


@dataclass(frozen=True)
class Norm:
    """A BatchNorm in evaluation mode.

    Attributes:
        node: its call.
        path: its module.
        features: its channels.
    """

    node: fx.Node
    path: str
    features: int

    @classmethod
    def of(cls, node: fx.Node, program: Program, model: nn.Module) -> Norm | None:
        """The BatchNorm of a node, if its statistics belong to a module and are used once."""
        if op_name(node) != "batch_norm":
            return None
        tensors = [a for a in node.args[1:5] if isinstance(a, fx.Node)]
        paths = {program.names[t].rpartition(".")[0] for t in tensors if t in program.names}
        if len(paths) != 1 or any(t not in program.names or len(t.users) > 1 for t in tensors):
            return None
        path = paths.pop()
        module = model.get_submodule(path)
        if not isinstance(module, _BatchNorm) or module.running_mean is None or node.args[5] is not False:
            return None
        return cls(node, path, module.num_features)


@dataclass(frozen=True)
class Layer:
    """A convolution or a linear layer that a module owns and that runs once.

    Attributes:
        node: its call.
        path: its module.
        rows: outputs.
        inputs: input channels of one group.
        groups: groups.
        kernel: taps of the kernel.
        pixels: pixels of its result.
        bias: whether it has a bias.
        norm: the BatchNorm that alone reads its result; None if there is none.
    """

    node: fx.Node
    path: str
    rows: int
    inputs: int
    groups: int
    kernel: int
    pixels: int
    bias: bool
    norm: Norm | None

    @classmethod
    def of(cls, node: fx.Node, program: Program, model: nn.Module) -> Layer | None:
        """The layer of a node; None for other functions and for weights that are computed or used more than once."""
        if op_name(node) not in ("conv2d", "linear"):
            return None
        tensors = [a for a in node.args[1:3] if isinstance(a, fx.Node)]
        if any(t not in program.names or len(t.users) > 1 for t in tensors) or any(
            isinstance(a, str) for a in node.args
        ):
            return None
        path, _, name = program.names[tensors[0]].rpartition(".")
        module = model.get_submodule(path)
        if name != "weight" or not isinstance(module, (nn.Conv2d, nn.Linear)):
            return None
        if isinstance(module, nn.Linear) and node.meta["val"].dim() != 2:
            return None
        users = list(node.users)
        norm = Norm.of(users[0], program, model) if len(users) == 1 and users[0].args[0] is node else None
        groups = module.groups if isinstance(module, nn.Conv2d) else 1
        rows, inputs, *kernel = module.weight.shape
        pixels = math.prod(shape(node)[1:])
        return cls(node, path, rows, inputs, groups, math.prod(kernel), pixels, module.bias is not None, norm)

    @property
    def gains_bias(self) -> bool:
        """Whether it gets a bias when its inputs are narrowed, as nothing else can hold the change of its mean."""
        return not self.bias and self.norm is None

    @property
    def macs(self) -> int:
        """MACs for one image."""
        return self.rows * self.columns * self.pixels

    @property
    def columns(self) -> int:
        """Inputs of one output: columns of the weight as a matrix."""
        return self.inputs * self.kernel


@dataclass(frozen=True)
class Dimension:
    """Hidden channels that are kept or removed together, in units of contiguous channels.

    Attributes:
        units: number of units; every tensor of the dimension has the same number of channels in each.
        producers: the layers that compute it: a convolution, and the last layer of squeeze-and-excitation.
        tied: depthwise and grouped convolutions from the dimension to itself.
        norms: its BatchNorms.
        readers: the layers that read it.
    """

    units: int
    producers: tuple[Layer, ...]
    tied: tuple[Layer, ...]
    norms: tuple[Norm, ...]
    readers: tuple[Layer, ...]

    @cached_property
    def main(self) -> Layer:
        """The reader with the most MACs, which decides the order of units."""
        return max(self.readers, key=lambda layer: layer.macs)

    @property
    def name(self) -> str:
        """Path of the main reader."""
        return self.main.path

    @property
    def unit(self) -> int:
        """Channels of a unit in the input of the main reader."""
        return self.main.inputs // self.units

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers whose cost depends on the width."""
        return (*self.producers, *self.tied, *self.readers)

    @property
    def layer_macs(self) -> int:
        """MACs of these layers."""
        return sum(layer.macs for layer in self.layers)

    @cached_property
    def nodes_out(self) -> frozenset[fx.Node]:
        """Layers whose outputs are the dimension."""
        return frozenset(layer.node for layer in (*self.producers, *self.tied))

    @cached_property
    def nodes_in(self) -> frozenset[fx.Node]:
        """Layers whose inputs are the dimension."""
        return frozenset(layer.node for layer in self.readers)


@dataclass
class _Facts:
    """What is known of a dimension while the graph is read."""

    units: int
    producers: list[Layer] = field(default_factory=list)
    tied: list[Layer] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    readers: list[Layer] = field(default_factory=list)
    active: bool = False
    reason: str | None = None

    def absorb(self, other: _Facts) -> None:
        self.units = math.gcd(self.units, other.units)
        for name in ("producers", "tied", "norms", "readers"):
            getattr(self, name).extend(getattr(other, name))
        self.active |= other.active
        self.reason = self.reason or other.reason


class Channels:
    """Reads a captured network from its input to its output, and joins channels that belong together.

    Attributes:
        searched: the hidden dimensions that can be narrowed.
        reasons: path of a layer that produces another dimension -> why this cannot be.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        self._program, self._model = program, model
        self._facts: dict[fx.Node, _Facts] = {}
        self._begin(program.image).reason = "it is the image"
        for node in program.nodes:
            if isinstance(node.meta.get("val"), Tensor):
                self._read(node)
            elif isinstance(node.meta.get("val"), (list, tuple)):
                self._close(node.all_input_nodes, f"{op_name(node)} reads its output")
        self._facts[program.output].reason = self._facts[program.output].reason or "it is the network's output"
        self.searched: list[Dimension] = []
        self.reasons: dict[str, str] = {}
        for facts in {id(f): f for f in self._facts.values()}.values():
            reason = facts.reason or self._why_not(facts)
            if reason is None:
                parts = (facts.producers, facts.tied, facts.norms, facts.readers)
                self.searched.append(Dimension(facts.units, *map(tuple, parts)))  # type: ignore[arg-type]
            else:
                self.reasons |= {layer.path: reason for layer in facts.producers}

    def _why_not(self, facts: _Facts) -> str | None:
        if not facts.producers or not facts.readers:
            return "no layer reads its output"
        if not facts.active:
            return "no activation is between it and the layer that reads it"
        outputs = {id(self._facts[layer.node]) for layer in facts.readers}
        inputs = {id(self._facts[layer.node.args[0]]) for layer in facts.producers}  # type: ignore[index]
        if outputs & inputs and all(layer.pixels == 1 for layer in (*facts.producers, *facts.readers)):
            return "it is the inner width of squeeze-and-excitation, which costs little"
        return None

    def _begin(self, node: fx.Node, reason: str | None = None) -> _Facts:
        sizes = shape(node)
        self._facts[node] = _Facts(sizes[0] if sizes else 1, reason=reason)
        return self._facts[node]

    def _join(self, node: fx.Node, sources: Iterable[fx.Node]) -> _Facts:
        """Give a node the dimension of its sources, which become one."""
        first, *others = sources
        facts = self._facts[first]
        for other in others:
            if (absorbed := self._facts[other]) is not facts:
                facts.absorb(absorbed)
                self._facts |= {n: facts for n, f in self._facts.items() if f is absorbed}
        self._facts[node] = facts
        return facts

    def _close(self, nodes: Iterable[fx.Node], reason: str) -> None:
        for node in nodes:
            if node in self._facts and self._facts[node].reason is None:
                self._facts[node].reason = reason

    def _read(self, node: fx.Node) -> None:
        name = op_name(node)
        sources = [n for n in node.args if isinstance(n, fx.Node) and is_tensor(n) and n in self._facts]
        layer = Layer.of(node, self._program, self._model)
        norm = Norm.of(node, self._program, self._model)
        if layer is not None and sources:
            self._read_layer(layer, sources[0])
        elif norm is not None and sources:
            self._join(node, sources).norms.append(norm)
        elif name in _ACTIVATIONS and len(node.all_input_nodes) == 1:
            self._join(node, sources).active = True
        elif sources and self._keeps_channels(node, name):
            self._join(node, sources[:1])
        elif name in ("add", "sub", "mul", "div", "expand_as") and len(sources) == 2:
            self._combine(node, name, *sources)
        elif name in ("add", "sub", "mul", "div") and sources and len(node.all_input_nodes) == 1:
            self._join(node, sources)
        else:
            self._close(node.all_input_nodes, f"{name} reads its output")
            self._begin(node, f"{name} computes it")

    def _read_layer(self, layer: Layer, source: fx.Node) -> None:
        facts = self._facts[source]
        if layer.groups == 1:
            facts.readers.append(layer)
            self._begin(layer.node).producers.append(layer)
            return
        self._join(layer.node, [source])
        facts.units = math.gcd(facts.units, layer.groups)
        facts.tied.append(layer)

    def _combine(self, node: fx.Node, name: str, first: fx.Node, second: fx.Node) -> None:
        a, b = shape(first), shape(second)
        if a and b and a[0] == b[0]:
            facts = self._join(node, [first, second])
            if name in ("add", "sub"):
                facts.reason = facts.reason or _STREAM
        elif name == "mul" and len(a) == len(b) and 1 in (a[0], b[0]):
            self._join(node, [first if b[0] == 1 else second])  # a factor per pixel
        else:
            self._close([first, second], f"{name} of other shapes reads its output")
            self._begin(node, f"{name} computes it")

    @staticmethod
    def _keeps_channels(node: fx.Node, name: str) -> bool:
        source: Any = node.args[0]
        if not is_tensor(source) or [n for n in node.all_input_nodes if is_tensor(n)] != [source]:
            return False
        before, after = source.meta["val"].shape, node.meta["val"].shape
        if name in RESHAPES:
            same_batch = str(before[0]) == str(after[0]) and len(before) > 1 and len(after) > 1
            return same_batch and int(after[1]) % int(before[1]) == 0
        if name == "expand":
            return len(before) == len(after) and int(before[1]) == int(after[1])
        if name == "mean":
            axes = node.args[1] if len(node.args) > 1 else None
            return isinstance(axes, (list, tuple)) and all(a % len(before) > 1 for a in axes)
        if name in ("pad", "constant_pad_nd"):
            return len(node.args[1]) <= 2 * (len(before) - 2)  # type: ignore[arg-type]
        return name in _CHANNELWISE
