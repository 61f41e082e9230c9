"""Latency of the candidates of `nasfast.shrink.find`, as parts that `nasfast.measure.latency` times.

A part is the graph of a choice: its block, or what is between the layers that make its channels and those that read
them. Candidates of equal shapes are one part; of many widths some are timed, and those between are interpolated.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from nasfast.config import ConfigError
from nasfast.measure.latency import Parts, Subject
from nasfast.measure.onnx_graph import UnknownFunction, graph_onnx
from nasfast.runtime.once import log_once
from nasfast.shrink import Found, Place
from nasfast.shrink.channels import RESHAPES
from nasfast.shrink.graph import is_tensor, named_tensors, op_name, shape
from nasfast.spaces import Arch

_LOG = logging.getLogger(__name__)

_TIMED = {1: 4, 2: 3}
"""Widths of a dimension that are timed, by the number of dimensions of a choice."""

_TRIES, _GOLDEN, _JITTER = 50, 0.618, 0.25
"""Draws per architecture; steps by the golden ratio fill the levels evenly; deviation of a choice from its level."""

Kept = tuple[int, ...]


def shrink_subject(found: Found) -> Subject:
    """The parts of what was found in a network, and its networks, whose channels are the first ones."""
    modules: dict[str, tuple[nn.Module, tuple[int, int, int]]] = {}
    names: dict[object, str] = {}
    layers, between = [], {}
    for i, place in enumerate(found.places):
        region = _Region(found, place)
        row: dict[int, str | None] = {}
        timed = dict[Kept, str]()
        for kept in itertools.product(*(_some(widths, len(place.widths)) for widths in place.widths)):
            module, key = region.module(kept)
            name = names.setdefault(key, f"{found.space.place(i)}, {'x'.join(map(str, kept)) or 'kept'}")
            modules.setdefault(name, (module, region.shape))
            timed[kept] = name
        for value, candidate in enumerate(place.candidates):
            if candidate is None:
                row[value] = None
                continue
            ends = _ends(candidate, [_some(widths, len(place.widths)) for widths in place.widths])
            if len(ends) == 1:
                row[value] = timed[ends[0][0]]
                continue
            name = f"{found.space.place(i)}, {'x'.join(map(str, candidate))}, between"
            row[value] = name
            between[name] = tuple((timed[end], share) for end, share in ends)
        layers.append(row)
    return Subject(
        found.space,
        Parts(modules, tuple(layers), between),
        functools.partial(network_graph, found),
        outside=True,
        archs=functools.partial(_spread, found),
        write_onnx=write_graph,
    )


def _spread(found: Found, count: int, seed: int) -> list[Arch]:
    """Different architectures of all costs: the full one and the smallest, then random ones around many levels."""
    space, rng = found.space, random.Random(seed)
    smallest = tuple(min(row, key=lambda v: row[v].macs) for row in space.option_costs())
    archs = dict.fromkeys([smallest, found.full])
    for number in range(_TRIES * count):
        if len(archs) >= count:
            return list(archs)[:count]
        level = (number * _GOLDEN) % 1
        tops = [len(place.candidates) - 1 for place in found.places]
        archs[tuple(min(top, max(0, round(rng.gauss(level, _JITTER) * top))) for top in tops)] = None
    raise ConfigError(f"space {space.name!r} has hardly {count} architectures: lower --calibrate or --validate")


def _some(widths: Sequence[int], dimensions: int) -> list[int]:
    """Widths that are timed, the first and the last among them."""
    count = min(len(widths), _TIMED[dimensions])
    return [widths[i] for i in np.linspace(0, len(widths) - 1, count).round().astype(int).tolist()]


def _ends(kept: Kept, timed: Sequence[Sequence[int]]) -> list[tuple[Kept, float]]:
    """The timed widths around some, with their shares in a linear interpolation in each dimension."""
    sides: list[list[tuple[int, float]]] = []
    for width, known in zip(kept, timed, strict=True):
        low = max(w for w in known if w <= width)
        high = min(w for w in known if w >= width)
        share = (width - low) / (high - low) if high > low else 0.0
        sides.append([(low, 1 - share)] if share == 0 else [(low, 1 - share), (high, share)])
    return [
        (tuple(w for w, _ in corner), float(np.prod([share for _, share in corner])))
        for corner in itertools.product(*sides)
    ]


def write_graph(module: nn.Module) -> bytes | None:
    """The ONNX of a graph; None where it has a function that only torch.onnx.export knows."""
    assert isinstance(module, fx.GraphModule), "the parts and networks here are graphs"
    try:
        return graph_onnx(module)
    except UnknownFunction as error:
        log_once(_LOG, logging.INFO, f"{error}: torch.onnx.export writes the parts, which takes longer")
        return None


def network_graph(found: Found, arch: Arch) -> fx.GraphModule:
    """The graph of the network of an architecture; it computes as fast as the cut network, with other weights."""
    program, widths, replaced = found.program, _Widths(found), dict[fx.Node, tuple[fx.Node, bool]]()
    for place, value in zip(found.places, arch, strict=True):
        kept = place.candidates[value]
        if kept is not None:
            widths.narrow(place, kept)
        elif place.block is not None:
            replaced[place.block.addition] = place.block.shortcut, place.block.relu
    graph, _ = _copy(program.nodes, program.image, program.output, widths, replaced)
    return graph


class _Region:
    """The nodes of a choice, and graphs of them at other widths."""

    def __init__(self, found: Found, place: Place) -> None:
        self._found, self._place = found, place
        program = found.program
        if place.block is not None:
            inside = {*place.block.inside, place.block.addition}
        else:
            inside = _between(
                {layer.node for d in place.dimensions for layer in d.producers},
                {layer.norm.node if layer.norm else layer.node for d in place.dimensions for layer in d.readers},
                program.nodes,
            )
        self._nodes = [node for node in program.nodes if node in inside]
        stored = set(program.names) | set(program.constants)
        reads = [n for node in self._nodes for n in node.all_input_nodes if n not in inside and n not in stored]
        inputs = list(dict.fromkeys(n for n in reads if is_tensor(n)))
        if len(inputs) != 1 or len(shape(inputs[0])) != 3:
            raise ConfigError(
                f"{place.name} reads {len(inputs)} tensors from outside, and a latency of its widths needs one image: "
                "give max_macs in place of max_latency_ms"
            )
        self._input = inputs[0]
        channels, height, width = shape(self._input)
        self.shape = channels, height, width

    def module(self, kept: Kept) -> tuple[nn.Module, object]:
        """The graph at some widths, and what it has in common with equal ones."""
        widths = _Widths(self._found)
        widths.narrow(self._place, kept)
        graph, key = _copy(self._nodes, self._input, self._nodes[-1], widths, {})
        return graph, (self.shape, key)


class _Widths:
    """Parameters and buffers with the first channels of some dimensions, and the groups of convolutions."""

    def __init__(self, found: Found) -> None:
        self._names, self._constants = found.program.names, found.program.constants
        self._tensors = named_tensors(found.model)
        self._rows: dict[str, tuple[int, int]] = {}
        self._columns: dict[str, tuple[int, int]] = {}
        self.groups: dict[fx.Node, int] = {}

    def narrow(self, place: Place, kept: Kept) -> None:
        """Keep so many units of the dimensions of a choice."""
        for d, units in zip(place.dimensions, kept, strict=True):
            share = units, d.units
            self._rows |= {layer.path: share for layer in (*d.producers, *d.tied)}
            self._rows |= {norm.path: share for norm in d.norms}
            self._columns |= {layer.path: share for layer in d.readers}
            self.groups |= {layer.node: layer.groups * units // d.units for layer in d.tied}

    def tensor(self, node: fx.Node) -> Tensor | None:
        """The tensor of a node; None if it has none that is stored."""
        if node in self._constants:
            return self._constants[node]
        if node not in self._names:
            return None
        tensor = self._tensors[self._names[node]]
        path = self._names[node].rpartition(".")[0]
        if tensor.dim() and path in self._rows:
            units, of = self._rows[path]
            tensor = tensor[: len(tensor) * units // of]
        if tensor.dim() > 1 and path in self._columns:
            units, of = self._columns[path]
            tensor = tensor[:, : tensor.shape[1] * units // of]
        return tensor


def _copy(
    nodes: Sequence[fx.Node],
    image: fx.Node,
    output: fx.Node,
    widths: _Widths,
    replaced: Mapping[fx.Node, tuple[fx.Node, bool]],
) -> tuple[fx.GraphModule, object]:
    """A graph of some nodes with narrowed tensors, and what tells it from others: functions, shapes and numbers.

    Args:
        nodes: in order.
        image: its input.
        output: its result.
        widths: gives the tensors.
        replaced: node -> another whose value it gets, and whether through a ReLU.
    """
    root, graph, key = nn.Module(), fx.Graph(), []
    values: dict[fx.Node, fx.Node] = {image: graph.placeholder("x")}

    def value(n: fx.Node) -> fx.Node:
        if n not in values:
            tensor = widths.tensor(n)
            if tensor is None:  # no tensor from outside: the size of the batch
                values[n] = graph.call_function(torch.ops.aten.sym_size.int, (values[image], 0))
            else:
                name = f"t{len(values)}"
                root.register_buffer(name, tensor.clone())
                values[n] = graph.get_attr(name)
        return values[n]

    def describe(n: fx.Node) -> Any:
        tensor = widths.tensor(n)
        return "value" if tensor is None else tuple(tensor.shape)

    needed = _needed(nodes, output, replaced)
    for node in nodes:
        if node not in needed:
            continue
        if node in replaced:
            other, relu = replaced[node]
            values[node] = graph.call_function(torch.ops.aten.relu.default, (value(other),)) if relu else value(other)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        if _writes_channels(node):
            sizes: Any = args[1]
            args = (args[0], [sizes[0], -1, *sizes[2:]], *args[2:])
        if node in widths.groups and len(args) > 6:
            args = (*args[:6], widths.groups[node], *args[7:])
        values[node] = graph.create_node("call_function", node.target, args, dict(kwargs))
        plain = fx.map_arg((node.args, node.kwargs), describe)
        key.append((str(node.target), str(plain), widths.groups.get(node)))
    graph.output(values[output])
    return fx.GraphModule(root, graph).eval(), tuple(key)


def _writes_channels(node: fx.Node) -> bool:
    """Whether a node gives a new shape to each image, with its number of channels, which may be less, as a number."""
    if op_name(node) not in (*RESHAPES, "expand") or len(node.args) < 2 or not isinstance(node.args[1], (list, tuple)):
        return False
    source, sizes = node.args[0], node.args[1]
    return is_tensor(source) and len(sizes) > 1 and isinstance(sizes[0], fx.Node) and -1 not in sizes


def _needed(
    nodes: Sequence[fx.Node], output: fx.Node, replaced: Mapping[fx.Node, tuple[fx.Node, bool]]
) -> set[fx.Node]:
    """The nodes that the result needs: those of dropped blocks are left out.

    fx would keep BatchNorms, because these may change their statistics.
    """
    needed = {output}
    for node in reversed(nodes):
        if node in needed:
            needed |= {replaced[node][0]} if node in replaced else set(node.all_input_nodes)
    return needed


def _between(starts: set[fx.Node], ends: set[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes on ways from some nodes to others, these included."""
    after, before = set(starts), set(ends)
    for node in nodes:
        if any(n in after for n in node.all_input_nodes):
            after.add(node)
    for node in reversed(nodes):
        if any(user in before for user in node.users):
            before.add(node)
    return after & before
