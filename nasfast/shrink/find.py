"""What can be narrowed and dropped in a network, from its captured graph, and why the rest cannot."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from nasfast.display import Tabular
from nasfast.shrink.channels import Channels, Dimension, Layer
from nasfast.shrink.graph import Program, ShrinkError, capture, op_name, shape
from nasfast.spaces import Arch, Branch, ModuleChoice, ModuleSpace
from nasfast.supernet.macs import count_macs

_COLUMNS = 5000
"""Most inputs of a convolution whose Gram matrix is kept: 200 MB in float64."""

_PRODUCTS = frozenset("conv1d conv2d conv3d linear matmul mm bmm addmm mv".split())
"""Functions that have MACs."""

_SIZES_PER_CHOICE = 2
"""Hidden dimensions that one choice has at most: its candidates are their combinations."""


@dataclass(frozen=True)
class Block:
    """A residual block that may be dropped.

    Attributes:
        path: the module that is replaced.
        addition: the node that adds the branch to the shortcut.
        shortcut: the node that the addition then is.
        inside: nodes of the branch.
        relu: whether what replaces the module is a ReLU and no identity.
    """

    path: str
    addition: fx.Node
    shortcut: fx.Node
    inside: frozenset[fx.Node]
    relu: bool


@dataclass(frozen=True)
class Place:
    """One choice: the hidden dimensions of a part of the network, and the block that may be dropped with them.

    Attributes:
        dimensions: the dimensions.
        widths: for each dimension, the units that may be kept, ascending; the last is all.
        block: the block; None if it must stay.
    """

    dimensions: tuple[Dimension, ...]
    widths: tuple[tuple[int, ...], ...]
    block: Block | None

    @cached_property
    def candidates(self) -> tuple[tuple[int, ...] | None, ...]:
        """What the values of an architecture mean: kept units for each dimension, or None for a dropped block."""
        kept = itertools.product(*self.widths)
        return (*([None] if self.block is not None else []), *kept)

    @property
    def name(self) -> str:
        """Path of the block, or of the layer that reads the first dimension."""
        return self.block.path if self.block is not None else self.dimensions[0].name


@dataclass(frozen=True, repr=False)
class Found(Tabular):
    """What `find` found in a network.

    Attributes:
        model: the network, which is not changed.
        program: its captured forward.
        places: the choices.
        space: these choices with their costs, for `nasfast.search_table`, `nasfast.search.pareto_front` and limits.
        reasons: path of a convolution, a linear layer or a block -> why its output, or it, is not searched.
    """

    model: nn.Module
    program: Program
    places: tuple[Place, ...]
    space: ModuleSpace
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def full(self) -> Arch:
        """The architecture of the network itself."""
        return tuple(len(place.candidates) - 1 for place in self.places)

    @property
    def macs(self) -> int:
        """MACs of the network for one image; a limit of half of them is `max_macs=0.5 * found.macs`."""
        return self.space.cost(self.full).macs

    @property
    def params(self) -> int:
        """Parameters of the network."""
        return self.space.cost(self.full).params

    @property
    def stride(self) -> int:
        """Pixels of the image for a pixel of the smallest maps of a convolution, both along a side; a power of two."""
        maps = [shape(node)[-1] for node in self.program.nodes if op_name(node) == "conv2d"]
        side = shape(self.program.image)[-1]
        # one pixel is that of a squeeze-and-excitation, or of an image that is too small to tell; maps are rounded up,
        # so that 240 pixels with a stride of 32 are 8
        return max((2 ** round(math.log2(side / m)) for m in maps if m > 1), default=1)

    @property
    def caption(self) -> str:
        sizes = sum(len(place.dimensions) for place in self.places)
        blocks = sum(place.block is not None for place in self.places)
        return (
            f"{self.space.name}: {sizes} widths and {blocks} blocks are searched in {len(self.places)} choices, "
            f"{self.space.cardinality:.3g} networks; {len(self.reasons)} parts stay"
        )

    def records(self) -> list[dict[str, Any]]:
        """One row per choice, then one per layer or block that is not searched, with the reason."""
        rows = []
        for place, choice in zip(self.places, self.space.choices, strict=True):
            macs = choice.branches[-1].macs / self.macs
            widths = "; ".join(
                f"{d.name} {', '.join(str(w * d.unit) for w in ws)}"
                for d, ws in zip(place.dimensions, place.widths, strict=True)
            )
            drop = "may be dropped" if place.block is not None else ""
            rows.append(
                {"part": place.name, "macs": f"{macs:.1%}", "searched": "; ".join(filter(None, [drop, widths]))}
            )
        return [*rows, *({"part": path, "macs": "", "searched": f"no: {why}"} for path, why in self.reasons.items())]


def find(model: nn.Module, images: Tensor, *, multiple: int = 8, widths: int = 8, name: str | None = None) -> Found:
    """Find every hidden dimension and every residual block of a network that can be narrowed or dropped.

    A hidden dimension is one that no addition reads: its producers, BatchNorms, activations, depthwise and grouped
    convolutions, squeeze-and-excitation and the layers that read it are narrowed together. The stream between blocks
    keeps its width, so costs add up exactly over the choices of `space`. A block with an identity shortcut may be
    dropped if it is a module of its own. The network is captured by torch.export in evaluation mode; it may be frozen,
    and it is not changed.

    Args:
        model: any module that takes images and gives logits (N, classes).
        images: (N, channels, height, width), of the size that is searched; the first is used.
        multiple: channels that are kept are a multiple of it, where the dimension has more.
        widths: number of widths per dimension, at equal steps.
        name: name of the space; the class of the network by default.

    Raises:
        TypeError: model or images are something else.
        ShrinkError: the network cannot be captured, or nothing in it can be searched.
    """
    if not isinstance(model, nn.Module) or not isinstance(images, Tensor):
        raise TypeError(f"find: expected a module and a tensor, got {type(model).__name__} and {type(images).__name__}")
    if images.dim() != 4 or not len(images):
        raise ShrinkError(f"images must be (N, channels, height, width), got {tuple(images.shape)}: add the batch")
    if min(multiple, widths) < 1:
        raise ShrinkError(f"multiple and widths must be at least 1, got {multiple} and {widths}")
    program = capture(model, images)
    macs = _check_capture(model, program, images[:1])
    channels = Channels(program, model)
    reasons = dict(channels.reasons)
    blocks = _find_blocks(program, model, reasons)
    places = _places(channels.searched, blocks, program, multiple, widths, reasons)
    if not places:
        kinds = Counter(reasons.values()).most_common(2)
        why = "; ".join(f"{count} x {text}" for text, count in kinds) or "it has no convolutions"
        raise ShrinkError(
            f"nothing of {type(model).__name__} can be searched ({why}): give a network of residual blocks with "
            "convolutions and BatchNorms"
        )
    space = _space(name or type(model).__name__, model, program, places, macs)
    return Found(model, program, tuple(places), space, reasons)


def _check_capture(model: nn.Module, program: Program, images: Tensor) -> int:
    """MACs of the network; a graph that computes something else is refused, as of a forward with side effects."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            macs, expected, _ = count_macs(model.eval(), (images,), {})
            got, _ = program.run(program.tensors(model), {program.image: images})
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise ShrinkError(
            f"{type(model).__name__} does not run with one image ({line}): it must with any number"
        ) from error
    finally:
        for module, training in modes:
            module.training = training
    if not isinstance(expected, Tensor) or expected.dim() != 2:
        given = tuple(expected.shape) if isinstance(expected, Tensor) else f"a {type(expected).__name__}"
        raise ShrinkError(f"the network gives {given}, expected logits (N, classes): give a classifier")
    if not bool(expected.isfinite().all()):
        raise ShrinkError("the network gives values that are not finite: look at its weights, and at the images")
    eps = torch.finfo(expected.dtype).eps  # layouts of tensors round differently
    if not torch.allclose(
        got, expected, rtol=max(1e-3, 16 * eps), atol=max(1e-4, 2 * eps) * float(expected.abs().max())
    ):
        raise ShrinkError(
            f"the captured graph of {type(model).__name__} computes something else than its forward: give a network "
            "whose forward has no side effects"
        )
    return macs


def _find_blocks(program: Program, model: nn.Module, reasons: dict[str, str]) -> list[Block]:
    blocks = []
    for node in program.nodes:
        operands = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if op_name(node) != "add" or len(operands) != 2 or shape(operands[0]) != shape(operands[1]):
            continue
        for shortcut, branch in (operands, operands[::-1]):
            inside = _between(shortcut, branch, program)
            if inside and any(op_name(n) == "conv2d" for n in inside):
                block = _module_of(program, node, shortcut, inside)
                if isinstance(block, str):
                    reasons[_path(node) or node.name] = block
                elif len(inspect.signature(model.get_submodule(block.path).forward).parameters) != 1:
                    reasons[block.path] = "its module may be given more than one value, and so cannot be an identity"
                else:
                    blocks.append(block)
    return blocks


def _between(start: fx.Node, end: fx.Node, program: Program) -> frozenset[fx.Node] | None:
    """The nodes that compute `end` from `start` alone; None if something else is needed or nothing is between."""
    inside: set[fx.Node] = set()
    todo, reached = [end], False
    while todo:
        node = todo.pop()
        if node is start:
            reached = True
        elif node not in inside and node not in program.names and node not in program.constants:
            if node is program.image:
                return None
            inside.add(node)
            todo += [n for n in node.all_input_nodes if _carries(n)]
    return frozenset(inside) if reached and inside else None


def _carries(node: fx.Node) -> bool:
    """Whether a node has a tensor, and is no size."""
    return isinstance(node.meta.get("val"), (Tensor, list, tuple))


def _path(node: fx.Node) -> str:
    """Path of the innermost module whose forward has the node."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values()][-1] if stack else ""


def _module_of(program: Program, addition: fx.Node, shortcut: fx.Node, inside: frozenset[fx.Node]) -> Block | str:
    """The block whose module has the branch and the addition and nothing else but a ReLU; else the reason."""
    path = _path(addition)
    if "@" in path:  # how torch.export names the second call of a module
        return "its layers run more than once"
    if not path:
        return "the addition of its block is in no module of its own"
    # a module that only adds has a parent that is the block
    while True:
        members = [n for n in program.nodes if _is_inside(n, path)]
        if inside <= set(members) or "." not in path:
            break
        path = path.rpartition(".")[0]
    extra = [n for n in members if n not in inside and n is not addition and n is not shortcut and _carries(n)]
    relus = [n for n in extra if op_name(n) == "relu" and _through(n.args[0]) is addition]
    rest = [n for n in extra if n not in relus and not _is_identity(n)]
    if not inside <= set(members) or rest or len(relus) > 1 or _is_inside(shortcut, path):
        return "its module does more than one residual block"
    if any(user not in inside and user is not addition for n in inside for user in n.users):
        return "its inner values are read elsewhere"
    weights = {n for node in inside for n in node.all_input_nodes if n in program.names}
    if any(user not in inside for n in weights for user in n.users):
        return "its layers run more than once"
    relu = bool(relus) and not _is_non_negative(shortcut)
    return Block(path, addition, shortcut, inside, relu)


def _is_inside(node: fx.Node, path: str) -> bool:
    return any(p == path for p, _ in (node.meta.get("nn_module_stack") or {}).values())


def _is_identity(node: fx.Node) -> bool:
    return op_name(node) in ("dropout", "alias", "detach", "contiguous", "clone")


def _through(node: Any) -> fx.Node:
    while _is_identity(node):
        node = node.args[0]
    return node


def _is_non_negative(node: fx.Node) -> bool:
    node = _through(node)
    while op_name(node) in ("max_pool2d", "avg_pool2d"):
        node = _through(node.args[0])
    return op_name(node) in ("relu", "relu6")


def _places(
    dimensions: Sequence[Dimension],
    blocks: Sequence[Block],
    program: Program,
    multiple: int,
    steps: int,
    reasons: dict[str, str],
) -> list[Place]:
    """Join what shares a layer or a block, so that costs add up over places."""
    groups: list[tuple[list[Dimension], Block | None]] = [([], block) for block in blocks]
    for dimension in sorted(dimensions, key=lambda d: -d.layer_macs):
        widths = _widths(dimension, multiple, steps)
        if len(widths) < 2:
            reasons[dimension.producers[0].path] = f"{dimension.units * dimension.unit} channels are too few to choose"
            continue
        columns = dimension.main.columns
        if columns > _COLUMNS:
            reasons[dimension.producers[0].path] = (
                f"its reader {dimension.name} has {columns} inputs, more than the {_COLUMNS} of the largest matrix"
            )
            continue
        nodes = {layer.node for layer in dimension.layers}
        near = [
            g
            for g in groups
            if (g[1] is not None and nodes & g[1].inside)
            or any(nodes & {layer.node for layer in d.layers} for d in g[0])
        ]
        joined = [d for g in near for d in g[0]]
        held = [g[1] for g in near if g[1] is not None]
        if len(joined) >= _SIZES_PER_CHOICE or len(held) > 1:
            reasons[dimension.producers[0].path] = "its cost depends on widths of neighbours that are searched"
            continue
        groups = [g for g in groups if g not in near]
        groups.append(([*joined, dimension], held[0] if held else None))
    order = {node: i for i, node in enumerate(program.nodes)}

    def begin(group: tuple[list[Dimension], Block | None]) -> int:
        nodes = [d.main.node for d in group[0]] + ([group[1].addition] if group[1] is not None else [])
        return min(order[n] for n in nodes)

    places = []
    for group in sorted(groups, key=begin):
        ordered = sorted(group[0], key=lambda d: order[d.main.node])
        places.append(Place(tuple(ordered), tuple(_widths(d, multiple, steps) for d in ordered), group[1]))
    return places


def _widths(dimension: Dimension, multiple: int, steps: int) -> tuple[int, ...]:
    """Units that may be kept: `steps` equal steps, rounded to multiples of `multiple` channels."""
    step = math.lcm(multiple, dimension.unit) // dimension.unit
    kept = {max(1, round(dimension.units * i / steps / step)) * step for i in range(1, steps)}
    return (*sorted(k for k in kept if k < dimension.units), dimension.units)


def _space(name: str, model: nn.Module, program: Program, places: Sequence[Place], macs: int) -> ModuleSpace:
    layers = _layers(model, program)
    whole = {"macs": macs, "params": sum(p.numel() for p in model.parameters())}
    choices, fixed = [], dict(whole)
    for place in places:
        nodes = {layer.node for d in place.dimensions for layer in d.layers}
        nodes |= {n for n in (place.block.inside if place.block else ()) if n in layers}
        norms = {n.path for d in place.dimensions for n in d.norms}
        if place.block is not None:
            found = (_path_of_norm(n, program) for n in place.block.inside if op_name(n) == "batch_norm")
            norms |= set(filter(None, found))
        paths = [*(layers[n].path for n in nodes), *norms]
        others = _other_macs(place.block, layers), _other_params(place.block, paths, model)
        branches = []
        for kept in place.candidates:
            label = (
                "drop"
                if kept is None
                else "x".join(str(k * d.unit) for k, d in zip(kept, place.dimensions, strict=True))
            )
            macs = params = 0
            if kept is not None:
                macs, params = _cost(place, kept, [layers[n] for n in nodes], norms, model)
                macs, params = macs + others[0], params + others[1]
            branches.append(Branch(label or "keep", macs, params, kept is None))
        fixed["macs"] -= branches[-1].macs
        fixed["params"] -= branches[-1].params
        first = program.nodes[min(program.index(n) for n in nodes)].args[0] if nodes else place.block.shortcut  # type: ignore[union-attr]
        assert isinstance(first, fx.Node)
        choices.append(ModuleChoice(place.name, tuple(branches), (shape(first),)))
    _, in_channels, height, width = program.image.meta["val"].shape
    resolution = int(height) if int(height) == int(width) else 0
    classes = shape(program.output)[0]
    return ModuleSpace(name, tuple(choices), fixed["macs"], fixed["params"], int(in_channels), resolution, classes)


def _other_macs(block: Block | None, layers: Mapping[fx.Node, Layer]) -> int:
    """MACs of a block besides those of layers, as of a convolution over channels or one whose weight is computed."""
    total = 0
    for node in () if block is None else block.inside:
        if node not in layers and op_name(node) in _PRODUCTS:
            args, kwargs = fx.map_arg((node.args, node.kwargs), _blank)
            total += count_macs(node.target, args, kwargs)[0]  # type: ignore[arg-type]
    return total


def _blank(node: fx.Node) -> Any:
    """A tensor without memory of the shape that a node has for one image; what is no tensor as it is."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    return torch.empty([n if isinstance(n, int) else 1 for n in value.shape], dtype=value.dtype, device="meta")


def _other_params(block: Block | None, paths: Sequence[str], model: nn.Module) -> int:
    """Parameters of a block's module besides those of layers and BatchNorms at some paths, such as a LayerNorm's."""
    if block is None:
        return 0
    counted = [model.get_submodule(path) for path in paths if f"{path}.".startswith(f"{block.path}.")]
    parts = [sum(p.numel() for p in module.parameters()) for module in (model.get_submodule(block.path), *counted)]
    return parts[0] - sum(parts[1:])


def _path_of_norm(node: fx.Node, program: Program) -> str:
    """The module whose parameter scales; "" if none does, or what is computed, as where weights are standardised."""
    scale = node.args[1]
    return program.names.get(scale, "").rpartition(".")[0] if isinstance(scale, fx.Node) else ""


def _layers(model: nn.Module, program: Program) -> dict[fx.Node, Layer]:
    """Every convolution and linear layer with parameters of a module, by its node."""
    found = (Layer.of(node, program, model) for node in program.nodes)
    return {layer.node: layer for layer in found if layer is not None}


def _cost(
    place: Place, kept: Sequence[int], layers: Sequence[Layer], norms: set[str], model: nn.Module
) -> tuple[int, int]:
    """MACs and parameters of the layers and BatchNorms of a place at some widths."""
    macs = params = 0
    for layer in layers:
        rows, columns, bias = layer.rows, layer.inputs, layer.bias
        for dimension, units in zip(place.dimensions, kept, strict=True):
            if layer.node in dimension.nodes_out:
                rows = rows * units // dimension.units
            if layer.node in dimension.nodes_in:
                columns = columns * units // dimension.units
                bias = bias or (units < dimension.units and layer.gains_bias)
        weights = rows * columns * layer.kernel
        macs += weights * layer.pixels
        params += weights + rows * bias
    for path in norms:
        norm = model.get_submodule(path)
        count = sum(p.numel() for p in norm.parameters())
        for dimension, units in zip(place.dimensions, kept, strict=True):
            if path in {n.path for n in dimension.norms}:
                count = count * units // dimension.units
        params += count
    return macs, params
