"""Chains of convolution, BatchNorm, activation and addition in a torch.fx graph of PyTorch's functions.

`dynamo` reads graphs of TorchDynamo with it, and `find` traces of modules. In both of them, parameters and buffers are
nodes, and `meta["example_value"]` is what a node gives, as far as it is known.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from nasfast.fusion.effects import Effects
from nasfast.fusion.nodes import callee, callee_name, example_value, norm_arguments
from nasfast.ops.reference import ConvBNParams, Stage

ADDITIONS: dict[object, bool] = {
    torch.add: False,
    operator.add: False,
    operator.iadd: True,
    Tensor.add: False,
    Tensor.add_: True,
    Tensor.__add__: False,
    Tensor.__iadd__: True,
}
"""The additions that can belong to a chain, and whether they change their first argument."""

ACTIVATION_FUNCTIONS: dict[object, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    Tensor.relu: "relu",
    Tensor.relu_: "relu",
    F.relu6: "relu6",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    Tensor.tanh: "tanh",
    Tensor.tanh_: "tanh",
    F.hardswish: "hswish",
    F.silu: "silu",
}

_CONV_ARGUMENTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_HARDTANH_ARGUMENTS, _PAD_ARGUMENTS = signature(F.hardtanh), signature(F.pad)
_OTHER_CONVOLUTIONS = (
    torch.conv1d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)


@dataclass(frozen=True)
class FusedChain:
    """One chain of a fused model.

    Attributes:
        convolutions, batch_norms: paths of the modules in which its convolutions and BatchNorms are called, one of each
            per stage.
        stages: a description of each stage, such as "dw3x3 s2 144 relu6" or "1x1 24->144 relu6".
        residual: whether the operator also makes the addition to the chain's result.
        runs: when it runs on the operator.
        owner: path of the module whose forward is captured with it, "" for the model itself.
    """

    convolutions: tuple[str, ...]
    batch_norms: tuple[str, ...]
    stages: tuple[str, ...]
    residual: bool
    runs: str
    owner: str = ""

    def with_owner(self, owner: str) -> FusedChain:
        """The chain with its paths below the module at `owner`, which is captured with it."""
        convs, norms = (tuple(join(owner, path) for path in paths) for paths in (self.convolutions, self.batch_norms))
        return replace(self, convolutions=convs, batch_norms=norms, owner=owner)

    def __str__(self) -> str:
        return ", ".join([*self.stages, *(["+ residual"] if self.residual else [])])


def module_path(node: fx.Node) -> str:
    """The path of the module in whose forward the node is, below the module that was captured or traced."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0] if stack else ""
    names = [dotted or key for dotted, key in re.findall(r"\.([^.\[\]()]+)|\['?([^'\]]+)'?\]", f".{path}")]
    # TorchDynamo begins with the argument that is the module: L['module']
    names = [name for name in names[2 * path.startswith("L[") :] if name not in ("_modules", "_parameters")]
    # a fused module inside is called by what `fuse` put on it, which refers to it
    return ".".join(names).replace("forward._module.", "").removesuffix(".forward._module")


def join(*paths: str) -> str:
    """One path of these, of which some may be empty."""
    return ".".join(filter(None, paths))


def match_activation(node: fx.Node) -> str | None:
    """The value of `Stage.act` for a call of a function or a method; None if no stage has this activation."""
    function = callee(node)
    if function is None or len(node.all_input_nodes) != 1:
        return None
    if function is F.hardtanh:
        call = _HARDTANH_ARGUMENTS.bind(*node.args, **node.kwargs)
        call.apply_defaults()
        return "relu6" if (call.arguments["min_val"], call.arguments["max_val"]) == (0, 6) else None
    return ACTIVATION_FUNCTIONS.get(function)


class Conv(NamedTuple):
    """The arguments of a convolution that a stage can have, with nodes for tensors; its dilation is 1."""

    x: Any
    weight: Any
    bias: Any
    stride: int
    padding: int
    groups: int


def match_conv(conv: fx.Node) -> Conv | str:
    """The arguments of a convolution, or why no stage can have it."""
    if conv.target is not torch.conv2d:
        return f"is a {callee_name(conv)}, not a conv2d"
    names = ("input", "weight", *_CONV_ARGUMENTS)
    arguments: dict[str, Any] = {**_CONV_ARGUMENTS, **dict(zip(names, conv.args, strict=False)), **conv.kwargs}
    numbers: list[Any] = []
    for name in ("stride", "padding", "dilation"):
        value = arguments[name]
        number, *others = {value} if isinstance(value, (int, str, fx.Node)) else set(value)
        # a number that has changed before is a node
        if others or not isinstance(number, int) or (name == "dilation" and number != 1):
            return f"has {name}={value!r}"
        numbers.append(number)
    x, weight, bias, groups = (arguments[name] for name in ("input", "weight", "bias", "groups"))
    if not isinstance(groups, int):
        return f"has groups={groups!r}"
    return Conv(x, weight, bias, numbers[0], numbers[1], groups)


# columns to the left and right, and rows above and below, as F.pad has them; numbers or nodes
Widths = tuple[Any, Any, Any, Any]


def match_pad(node: Any) -> Widths | None:
    """How many zeros a node puts around images; None if it does something else."""
    if not isinstance(node, fx.Node) or callee(node) not in (F.pad, torch._C._nn.pad):
        return None
    call = _PAD_ARGUMENTS.bind(*node.args, **node.kwargs)
    call.apply_defaults()
    _, widths, mode, value = call.args
    return tuple(widths) if mode == "constant" and not value and len(widths) == 4 else None


def describe_stage(stage: Stage) -> str:
    """A stage in words, such as "dw3x3 s2 144 relu6" or "1x1 24->144"; its tensors are nodes."""
    out_channels, per_group, *kernel = example_value(stage.params.conv_weight).shape
    depthwise = per_group == 1 and stage.groups == out_channels > 1
    parts = [
        f"{'dw' if depthwise else ''}{kernel[0]}x{kernel[1]}",
        f"s{stage.stride}" if stage.stride > 1 else "",
        f"g{stage.groups}" if stage.groups > 1 and not depthwise else "",
        f"{out_channels}" if depthwise else f"{per_group * stage.groups}->{out_channels}",
        "" if stage.act == "identity" else stage.act,
    ]
    return " ".join(filter(None, parts))


class TracedStage(NamedTuple):
    """One stage in a graph.

    Attributes:
        conv, norm: the nodes of its convolution and BatchNorm.
        nodes: all of its nodes, in order: these, an activation, and what pads its input.
        x: its input.
        stage: it with nodes for tensors; with `widths`, its padding is the one that keeps the size of images.
        widths: what its input is padded with, where that is not `stage.padding` in all directions.
    """

    conv: fx.Node
    norm: fx.Node
    nodes: list[fx.Node]
    x: Any
    stage: Stage
    widths: Widths | None


class GraphChain(NamedTuple):
    """A chain in a graph.

    Attributes:
        x, residual: the nodes of its input, and of what is added to its result, or None.
        stages, widths: its stages, with nodes for tensors and numbers, as in `TracedStage`.
        in_place: whether the addition keeps the type of the chain's result.
        nodes: all of its nodes, in order.
        convolutions, batch_norms: paths of the modules in which they are called.
        first: its first convolution.
    """

    x: fx.Node
    residual: fx.Node | None
    stages: tuple[Stage, ...]
    widths: tuple[Widths | None, ...]
    in_place: bool
    nodes: tuple[fx.Node, ...]
    convolutions: tuple[str, ...]
    batch_norms: tuple[str, ...]
    first: fx.Node

    @classmethod
    def build(cls, traced: Sequence[TracedStage], add: fx.Node | None) -> GraphChain:
        """The chain of these stages, and of the addition behind them if PyTorch does not broadcast it."""
        nodes = [node for stage in traced for node in stage.nodes]
        residual, in_place = None, False
        if add is not None:
            other: Any = add.args[1 if add.args[0] is nodes[-1] else 0]
            shapes = [getattr(example_value(node), "shape", None) for node in (other, nodes[-1])]
            if shapes[0] == shapes[1]:
                residual, in_place = other, ADDITIONS[callee(add)]
                nodes.append(add)
        convs, norms = (
            tuple(map(module_path, calls)) for calls in zip(*((t.conv, t.norm) for t in traced), strict=True)
        )
        stages, widths = tuple(part.stage for part in traced), tuple(part.widths for part in traced)
        return cls(traced[0].x, residual, stages, widths, in_place, tuple(nodes), convs, norms, traced[0].conv)

    def sizes(self) -> list[fx.Node]:
        """Nodes that ask for the size of a value between its stages, which is that of its input but for channels."""
        return [user for node in self.nodes[:-1] for user in node.users if user not in self.nodes]

    def describe(self, runs: str) -> FusedChain:
        """It in words; `runs` is when it runs on the operator."""
        stages = tuple(map(describe_stage, self.stages))
        return FusedChain(self.convolutions, self.batch_norms, stages, self.residual is not None, runs)


class Matcher:
    """The chains of one graph.

    Attributes:
        effects: what its nodes read and write.
        reasons: why no chain begins with a convolution that `chains` reached.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.reasons: dict[fx.Node, str] = {}
        self.effects = Effects(graph)
        self._nodes = list(graph.nodes)
        # an addition belongs to one chain, even if it adds the results of two
        self._additions: set[fx.Node] = set()
        # the convolutions inside of each module, by their paths in the stacks of modules; "" is around all others
        self._inside: dict[str, set[str]] = {"": set()}
        for conv in filter(is_conv, self._nodes):
            for path in ("", *(path for _, path in module_stack(conv))):
                self._inside.setdefault(path, set()).add(module_path(conv))

    def chains(self) -> Iterator[GraphChain]:
        """Every chain."""
        done: set[fx.Node] = set()
        for node in self._nodes:
            if node in done or not is_conv(node):
                continue
            first = self.stage(node)
            if isinstance(first, str):
                self.reasons[node] = first
                continue
            stages, add = self.grow(first)
            done.update(n for stage in stages for n in stage.nodes)
            yield GraphChain.build(stages, add)

    def stage(self, conv: fx.Node) -> TracedStage | str:
        """The stage that begins with this convolution, or why none does."""
        matched = match_conv(conv)
        if isinstance(matched, str):
            return matched
        if example_value(matched.weight).dim() != 4:
            return "its weight is computed by the forward"
        norm = self._reader(conv)
        if norm is None:
            return "its result is used more than once" if conv.users else "its result is not used"
        problem = _norm_problem(norm)
        if problem is not None:
            return problem
        if not self._together(conv, norm):
            return "its BatchNorm is in another block"
        nodes, act, reader = [conv, norm], None, self._reader(norm)
        if self.effects.interrupted(nodes):
            return "what it reads changes before its BatchNorm"
        if reader is not None and self._together(norm, reader) and not self.effects.interrupted([*nodes, reader]):
            act = match_activation(reader)
            nodes += [] if act is None else [reader]
        x, padding, widths = self._padded(matched, nodes)
        bn = norm_arguments(norm)
        params = ConvBNParams(
            matched.weight, bn["weight"], bn["bias"], bn["running_mean"], bn["running_var"], matched.bias
        )
        numbers = bn.get("training", False), bn.get("momentum", 0.1), bn.get("eps", 1e-5)
        stage = Stage(params, matched.stride, padding, matched.groups, act or "identity", *numbers)
        return TracedStage(conv, norm, nodes if x is matched.x else [matched.x, *nodes], x, stage, widths)

    def _padded(self, conv: Conv, nodes: list[fx.Node]) -> tuple[Any, int, Widths | None]:
        """The input of a stage of these nodes, its padding, and widths where they are others: by what pads its input,
        if the stage can do it.
        """
        widths = match_pad(conv.x) if conv.padding == 0 else None
        if widths is None or self._reader(conv.x) is not nodes[0] or self.effects.interrupted([conv.x, *nodes]):
            return conv.x, conv.padding, None
        x, first = conv.x.all_input_nodes[0], widths[0]
        if self.effects.changes_later(x, conv.x):
            return conv.x, conv.padding, None  # backward needs the padded copy as it is now
        if isinstance(first, int) and first >= 0 and widths == (first,) * 4:
            return x, first, None
        return x, example_value(conv.weight).shape[2] // 2, widths

    def grow(self, first: TracedStage) -> tuple[list[TracedStage], fx.Node | None]:
        """The longest chain that begins with this stage, and the addition behind it."""
        stages = [first]
        nodes = list(first.nodes)
        while True:
            reader = self._reader(nodes[-1], first.x)
            if reader is None or not self._together(nodes[-1], reader):
                break
            # what pads the input of a convolution belongs to it
            conv = self._reader(reader) if match_pad(reader) is not None else reader
            if conv is not None and is_conv(conv):
                stage = self.stage(conv)
                if (
                    isinstance(stage, str)
                    or stage.x is not nodes[-1]
                    or self.effects.interrupted([*nodes, *stage.nodes])
                ):
                    break
                # what it reads may be its weight too, which the chain's call must find as an input
                if any(param is nodes[-1] for param in stage.stage.params):
                    break
                stages.append(stage)
                nodes += stage.nodes
                continue
            if self._adds(reader, nodes[-1]) and not self.effects.interrupted([*nodes, reader]):
                self._additions.add(reader)
                return stages, reader
            break
        return stages, None

    @staticmethod
    def _reader(node: fx.Node, like: Any = None) -> fx.Node | None:
        """The only node that reads this one, or None; but for those whose question about its size `like` answers."""
        users = [user for user in node.users if like is None or not _asks_size(user) or not _same_size(node, like)]
        return users[0] if len(users) == 1 else None

    def _adds(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether the node adds another tensor to the value; not if it adds the value in place to the other tensor."""
        if len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
            return False
        in_place = ADDITIONS.get(callee(node))
        if in_place is None or node in self._additions or node.args[0] is node.args[1]:
            return False
        return not in_place or node.args[0] is value

    def _together(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether the two nodes are in the same block, so that one chain may have both.

        A block is a module with several convolutions, because users index, hook and checkpoint such modules. But a
        module that has all convolutions of its caller is the body of its caller and no block of its own, like the
        Sequential in torchvision's InvertedResidual.
        """
        stacks = module_stack(one), module_stack(other)
        around = common_prefix(stacks)
        whole = self._inside.get(around[-1][1] if around else "", set())
        crossed = [self._inside.get(path, set()) for stack in stacks for _, path in stack[len(around) :]]
        return all(len(inside) <= 1 or inside == whole for inside in crossed)


def _asks_size(node: fx.Node) -> bool:
    """Whether the node asks for sizes of a tensor without its channels, or for what nobody reads."""
    if node.target is getattr and not node.users:
        return True  # F.pad asks for devices where deterministic algorithms are wanted
    if node.target is getattr and node.args[1:] == ("shape",):
        asked: list[Any] = []
    elif callee(node) is Tensor.size and not node.kwargs:
        asked = [*node.args[1:]]
    else:
        return False
    # the whole size is asked for, so what follows tells
    asked = asked or [user.args[1] if user.target is operator.getitem else slice(None) for user in node.users]
    dimensions = torch.arange(4)
    return all(isinstance(item, (int, slice)) and 1 not in dimensions[item] for item in asked)


def _same_size(one: fx.Node, other: fx.Node) -> bool:
    """Whether the batches, heights and widths of what these nodes give are the same."""
    sizes = [(*example_value(node).shape[:1], *example_value(node).shape[2:]) for node in (one, other)]
    return statically_known_true(sym_eq(*sizes))


def is_conv(node: fx.Node) -> bool:
    """Whether the node is a convolution of any kind."""
    return node.op == "call_function" and (node.target is torch.conv2d or node.target in _OTHER_CONVOLUTIONS)


def _norm_problem(norm: fx.Node) -> str | None:
    """Why no stage can have what follows a convolution as its BatchNorm; None if one can."""
    if norm.op == "output":
        return "its result leaves the module, without a BatchNorm"
    if norm.target is not F.batch_norm:
        return f"followed by {callee_name(norm)}, not by a BatchNorm"
    arguments = norm_arguments(norm)
    if arguments.get("weight") is None or arguments.get("bias") is None:
        return "its BatchNorm has no affine parameters"
    numbers = [example_value(arguments.get(name, 0.0)) for name in ("momentum", "eps")]
    # NumPy's floats are tensors in a graph
    fixed = all(
        isinstance(number, (int, float, torch.SymFloat)) or (isinstance(number, Tensor) and number.dim() == 0)
        for number in numbers
    )
    return None if fixed and isinstance(arguments.get("training", False), bool) else "its momentum changes"


def module_stack(node: fx.Node) -> list[tuple[str, str]]:
    """The modules in whose forward the node runs, outermost first; each is the key of the call and the path."""
    return [(key, path) for key, (path, _) in node.meta.get("nn_module_stack", {}).items()]


def common_prefix(stacks: Iterable[list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """The levels with which all of these stacks begin."""
    prefix: list[tuple[str, str]] = []
    # zip to the shortest
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        prefix.append(level[0])
    return prefix
