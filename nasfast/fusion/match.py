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
_NORM_ARGUMENTS = signature(F.batch_norm)
_HARDTANH_ARGUMENTS = signature(F.hardtanh)
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


def callee(node: fx.Node) -> object:
    """The function or the method of tensors that a node calls; None for other nodes."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    return node.target if node.op == "call_function" else None


def example_value(node: Any) -> Any:
    """What a node gives, if that is known; what is no node is itself."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


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
        return f"is a {_name(conv)}, not a conv2d"
    names = ("input", "weight", *_CONV_ARGUMENTS)
    arguments: dict[str, Any] = {**_CONV_ARGUMENTS, **dict(zip(names, conv.args, strict=False)), **conv.kwargs}
    numbers: list[Any] = []
    for name in ("stride", "padding", "dilation"):
        value = arguments[name]
        each = {value} if isinstance(value, (int, str)) else set(value)
        if len(each) > 1 or isinstance(value, str) or (name == "dilation" and each != {1}):
            return f"has {name}={value!r}"
        numbers.append(each.pop())
    x, weight, bias, groups = (arguments[name] for name in ("input", "weight", "bias", "groups"))
    return Conv(x, weight, bias, numbers[0], numbers[1], groups)


def norm_arguments(norm: fx.Node) -> dict[str, Any]:
    """The arguments of a call of F.batch_norm behind its input, by their names."""
    _, *arguments = _NORM_ARGUMENTS.bind(*norm.args, **norm.kwargs).arguments.items()
    return dict(arguments)


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
    """One stage in a graph: the nodes of its convolution, BatchNorm and activation, its input, and its settings.

    Attributes:
        stage: it with nodes for tensors.
    """

    nodes: list[fx.Node]
    x: Any
    stage: Stage


class GraphChain(NamedTuple):
    """A chain in a graph.

    Attributes:
        x, residual: the nodes of its input, and of what is added to its result, or None.
        stages: its stages, with nodes for tensors.
        in_place: whether the addition keeps the type of the chain's result.
        nodes: all of its nodes, in order.
        convolutions, batch_norms: paths of the modules in which they are called.
    """

    x: fx.Node
    residual: fx.Node | None
    stages: tuple[Stage, ...]
    in_place: bool
    nodes: tuple[fx.Node, ...]
    convolutions: tuple[str, ...]
    batch_norms: tuple[str, ...]

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
        convs, norms = (tuple(module_path(part.nodes[i]) for part in traced) for i in (0, 1))
        stages = tuple(part.stage for part in traced)
        return cls(traced[0].x, residual, stages, in_place, tuple(nodes), convs, norms)

    def describe(self, runs: str) -> FusedChain:
        """It in words; `runs` is when it runs on the operator."""
        stages = tuple(map(describe_stage, self.stages))
        return FusedChain(self.convolutions, self.batch_norms, stages, self.residual is not None, runs)


class Matcher:
    """The chains of one graph.

    Attributes:
        order: place of every node.
        reasons: why no chain begins with a convolution that `chains` reached.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.reasons: dict[fx.Node, str] = {}
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        # an addition belongs to one chain, even if it adds the results of two
        self._additions: set[fx.Node] = set()
        self._changing = [node for node in graph.nodes if node.target is F.batch_norm or _changes_in_place(node)]
        # the convolutions inside of each module, by their paths in the stacks of modules; "" is around all others
        self._inside: dict[str, set[str]] = {"": set()}
        for conv in filter(is_conv, self.order):
            for path in ("", *(path for _, path in module_stack(conv))):
                self._inside.setdefault(path, set()).add(module_path(conv))

    def chains(self) -> Iterator[GraphChain]:
        """Every chain."""
        done: set[fx.Node] = set()
        for node in self.order:
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
        if reader is not None and self._together(norm, reader):
            act = match_activation(reader)
            nodes += [] if act is None else [reader]
        if self._interrupted(nodes):
            return "something is changed in place before its BatchNorm or activation"
        bn = norm_arguments(norm)
        params = ConvBNParams(
            matched.weight, bn["weight"], bn["bias"], bn["running_mean"], bn["running_var"], matched.bias
        )
        numbers = bn.get("training", False), bn.get("momentum", 0.1), bn.get("eps", 1e-5)
        stage = Stage(params, matched.stride, matched.padding, matched.groups, act or "identity", *numbers)
        return TracedStage(nodes, matched.x, stage)

    def grow(self, first: TracedStage) -> tuple[list[TracedStage], fx.Node | None]:
        """The longest chain that begins with this stage, and the addition behind it."""
        stages = [first]
        nodes = list(first.nodes)
        while True:
            reader = self._reader(nodes[-1])
            if reader is None or not self._together(nodes[-1], reader):
                break
            if is_conv(reader):
                stage = self.stage(reader)
                if isinstance(stage, str) or stage.x is not nodes[-1] or self._interrupted([*nodes, *stage.nodes]):
                    break
                # what it reads may be its weight too, which the chain's call must find as an input
                if any(param is nodes[-1] for param in stage.stage.params):
                    break
                stages.append(stage)
                nodes += stage.nodes
                continue
            if self._adds(reader, nodes[-1]) and not self._interrupted([*nodes, reader]):
                self._additions.add(reader)
                return stages, reader
            break
        return stages, None

    @staticmethod
    def _reader(node: fx.Node) -> fx.Node | None:
        """The only node that reads this one, or None."""
        return next(iter(node.users)) if len(node.users) == 1 else None

    def _adds(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether the node adds another tensor to the value; not if it adds the value in place to the other tensor."""
        if len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
            return False
        in_place = ADDITIONS.get(callee(node))
        if in_place is None or node in self._additions or node.args[0] is node.args[1]:
            return False
        return not in_place or node.args[0] is value

    def _interrupted(self, nodes: list[fx.Node]) -> bool:
        """Whether another node between these changes a tensor in place, because the chain reads its input at its end;
        or one BatchNorm is called twice, so that its statistics would move in another order.
        """
        own = [norm_arguments(node)["running_mean"] for node in nodes if node.target is F.batch_norm]
        own = [statistics for statistics in own if statistics is not None]
        order = [self.order[node] for node in nodes]
        between = {node for node in self._changing if min(order) < self.order[node] < max(order)} - {*nodes}
        return len({*own}) < len(own) or any(
            node.target is not F.batch_norm or norm_arguments(node)["running_mean"] in own for node in between
        )

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


def is_conv(node: fx.Node) -> bool:
    """Whether the node is a convolution of any kind."""
    return node.op == "call_function" and (node.target is torch.conv2d or node.target in _OTHER_CONVOLUTIONS)


def _norm_problem(norm: fx.Node) -> str | None:
    """Why no stage can have what follows a convolution as its BatchNorm; None if one can."""
    if norm.op == "output":
        return "its result leaves the module, without a BatchNorm"
    if norm.target is not F.batch_norm:
        return f"followed by {_name(norm)}, not by a BatchNorm"
    arguments = norm_arguments(norm)
    if arguments.get("weight") is None or arguments.get("bias") is None:
        return "its BatchNorm has no affine parameters"
    numbers = [example_value(arguments.get(name, 0.0)) for name in ("momentum", "eps")]
    fixed = all(isinstance(number, (int, float, torch.SymFloat)) for number in numbers)
    return None if fixed and isinstance(arguments.get("training", False), bool) else "its momentum changes"


def _changes_in_place(node: fx.Node) -> bool:
    """Whether the node changes a tensor that others may read."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    value = example_value(node)
    # what has no value changes a mode, such as autocast
    if value is None or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable):
        return True
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return False  # a counter of batches
    name = str(node.target) if node.op == "call_method" else _name(node)
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        return name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__"))
    return (name.endswith("_") and not name.endswith("__")) or (node.op == "call_function" and _inplace(node))


def _inplace(call: fx.Node) -> bool:
    """The argument inplace of a function, which may be given without its name."""
    try:
        arguments = signature(call.target).bind(*call.args, **call.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):  # builtin functions have no signatures
        arguments = dict(call.kwargs)
    return bool(arguments.get("inplace", False))


def _name(node: fx.Node) -> str:
    """The name of what a node calls."""
    if node.op == "call_module":
        return str([cls for _, cls in node.meta["nn_module_stack"].values()][-1].__name__)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


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
