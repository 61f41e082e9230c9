"""A network as the graph of PyTorch's functions that torch.export captures, and a runner that may replace some."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from nasfast.fusion import unfuse
from nasfast.fusion.modules import why_opaque


class ShrinkError(ValueError):
    """A network, images or a choice that cannot be shrunk; the text says what is allowed."""


Values = dict[fx.Node, Any]
"""Node -> what it computed."""


@dataclass(frozen=True)
class Program:
    """The captured forward of a network in evaluation mode.

    Attributes:
        nodes: nodes that compute, in order, without parameters, buffers and the output.
        image: the node of the input.
        output: the node of the result.
        names: node of a parameter or buffer -> its name in the network's state dict.
        constants: node of another tensor -> this tensor.
        last_use: node -> index of the last of `nodes` that reads it.
    """

    nodes: tuple[fx.Node, ...]
    image: fx.Node
    output: fx.Node
    names: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Tensor]
    last_use: Mapping[fx.Node, int]

    def tensors(self, model: nn.Module) -> Values:
        """The parameters and buffers of a network by their nodes, in the layout of `channels_last`."""
        values = named_tensors(model)
        return {**{node: channels_last(values[name]) for node, name in self.names.items()}, **self.constants}

    def index(self, node: fx.Node) -> int:
        """Place of a node in `nodes`."""
        return self.nodes.index(node)

    def run(
        self,
        tensors: Mapping[fx.Node, Any],
        values: Mapping[fx.Node, Any],
        *,
        start: int = 0,
        replace: Mapping[fx.Node, Any] | None = None,
        keep: Mapping[int, Collection[fx.Node]] | None = None,
        see: Mapping[fx.Node, Any] | None = None,
    ) -> tuple[Tensor, dict[int, Values]]:
        """Compute the output from the values that are alive before `nodes[start]`.

        Args:
            tensors: parameters and buffers, from `tensors`.
            values: these values; for `start` 0, the images.
            start: index of the first node that runs.
            replace: node -> (weight, added bias) of a convolution or linear layer, or another node whose value it gets.
            keep: indices -> the nodes whose values right before this index are returned.
            see: node -> a function that gets the first argument of its call.
        """
        replace, keep, see = replace or {}, keep or {}, see or {}
        alive: Values = dict(values)
        kept: dict[int, Values] = {}
        for i in range(start, len(self.nodes)):
            node = self.nodes[i]
            if i in keep:
                kept[i] = {n: alive[n] for n in keep[i]}

            def value(n: fx.Node, alive: Values = alive) -> Any:
                return tensors[n] if n in tensors else alive[n]

            change = replace.get(node)
            if isinstance(change, fx.Node):
                alive[node] = value(change)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), value)
                if node in see:
                    see[node](args[0])
                if change is not None:
                    weight, extra = change
                    bias = args[2] if len(args) > 2 and args[2] is not None else 0.0
                    args = (args[0], weight, bias + extra, *args[3:])
                # in-place functions would change what others still read
                alive[node] = _out_of_place(node)(*args, **kwargs)
            for used in node.all_input_nodes:
                if self.last_use[used] <= i:
                    alive.pop(used, None)
        return alive[self.output], kept

    def live(self, index: int) -> list[fx.Node]:
        """The nodes before `index` whose values the rest still reads; parameters are left out."""
        places = {node: i for i, node in enumerate(self.nodes)}
        before = [self.image, *self.nodes[:index]]
        return [n for n in before if self.last_use.get(n, -1) >= index or (n is self.output and places[n] < index)]


def capture(model: nn.Module, images: Tensor) -> Program:
    """The graph of a copy of the network in evaluation mode, with a free batch size; the network is not changed.

    Raises:
        ShrinkError: torch.export cannot capture it, or its input is not one batch of images.
    """
    twin = copy.deepcopy(model)
    unfuse(twin)
    if (problem := why_opaque(twin)) is not None:
        raise ShrinkError(f"the network is {problem}: give the module as it was before")
    twin.eval().requires_grad_(False)
    # a batch of one would be taken for a constant
    example = torch.cat([images[:1], images[:1]])
    shapes = ({0: torch.export.Dim.AUTO},)
    try:
        with torch.no_grad():
            exported = torch.export.export(twin, (example,), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ShrinkError(
            f"torch.export cannot capture {type(model).__name__} with images {tuple(images.shape)} ({line}): give "
            "images of the size that it takes, and a module without choices in its forward"
        ) from error
    return _program(exported)


def _program(exported: torch.export.ExportedProgram) -> Program:
    signature = exported.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = signature.inputs_to_lifted_tensor_constants
    names: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Tensor] = {}
    images: list[fx.Node] = []
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            if node.name in stored:
                names[node] = stored[node.name]
            elif node.name in lifted:
                constants[node] = exported.constants[lifted[node.name]]
            else:
                images.append(node)
    result = next(node for node in reversed(exported.graph.nodes) if node.op == "output").args[0][-1]
    if len(images) != 1 or not isinstance(result, fx.Node) or len(signature.user_outputs) != 1:
        raise ShrinkError("the network must take one tensor of images and give one tensor of logits")
    nodes = [n for n in exported.graph.nodes if n.op == "call_function"]
    places = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if _is_in_place(node):
            # from here on, the changed tensor is this node's result
            changed, later = node.args[0], places[node]
            changed.replace_all_uses_with(node, delete_user_cb=lambda u, i=later: places.get(u, len(nodes)) > i)
            result = node if result is changed else result
    nodes = [n for n in nodes if n.users or n is result]
    last = {used: i for i, node in enumerate(nodes) for used in node.all_input_nodes}
    last[result] = len(nodes)
    return Program(tuple(nodes), images[0], result, names, constants, last)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name that they have, without gradients."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}


def channels_last(tensor: Tensor) -> Tensor:
    """A tensor of four dimensions in the layout in which PyTorch's convolutions are fastest on a CPU; others as is."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def op_name(node: fx.Node) -> str:
    """Name of a node's function without namespace and overload, such as `conv2d`; in-place functions have no `_`."""
    return _aten_name(node)[0].rstrip("_")


def _aten_name(node: fx.Node) -> tuple[str, str]:
    """Name and overload of a node's function; no overload for functions of Python."""
    target: Any = node.target
    if getattr(target, "namespace", None) is None:
        return getattr(target, "__name__", str(target)), ""
    _, name, overload = str(target).split(".")
    return name, overload


def _is_in_place(node: fx.Node) -> bool:
    name, overload = _aten_name(node)
    return bool(overload) and name.endswith("_")


def _out_of_place(node: fx.Node) -> Any:
    """The function of a node, or that which gives a new tensor in place of changing its argument."""
    name, overload = _aten_name(node)
    if not _is_in_place(node):
        return node.target
    return getattr(getattr(torch.ops.aten, name.rstrip("_")), overload)


def shape(node: fx.Node) -> tuple[int, ...]:
    """Sizes of a node's tensor behind the batch."""
    value = node.meta["val"]
    return tuple(int(size) for size in value.shape[1:])


def is_tensor(value: object) -> bool:
    """Whether an argument is a node with a tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)
