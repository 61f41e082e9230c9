"""Forwards of well-known blocks as lists of steps, so that their chains run without their Python code.

A trace has frozen what a forward decided in Python. So a program is written only for the forwards of `WELL_KNOWN`,
which read nothing but their input, submodules and plain attributes of their module. It runs while those attributes and
submodules are what they were; otherwise the module's own forward runs. A program has names only, so it is right for
every copy of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nasfast.fusion import members
from nasfast.fusion.calls import IN_PLACE
from nasfast.fusion.chain import Chain, Path, descendant
from nasfast.fusion.execute import BoundChain, CompiledChain
from nasfast.fusion.match import adds_in_place
from nasfast.fusion.replaced import ReplacedForward
from nasfast.fusion.stages import Way, result_dtype
from nasfast.fusion.watch import hooks_of

WELL_KNOWN = {
    "torch.nn.modules.container.Sequential",
    "torchvision.models.googlenet.BasicConv2d",
    "torchvision.models.mnasnet._InvertedResidual",
    "torchvision.models.mobilenetv2.InvertedResidual",
    "torchvision.models.mobilenetv3.InvertedResidual",
    "torchvision.models.regnet.ResBottleneckBlock",
    "torchvision.models.resnet.BasicBlock",
    "torchvision.models.resnet.Bottleneck",
    "timm.layers.conv_bn_act.ConvNormAct",
    "timm.models._efficientnet_blocks.ConvBnAct",
    "timm.models._efficientnet_blocks.DepthwiseSeparableConv",
    "timm.models._efficientnet_blocks.InvertedResidual",
    "timm.models._efficientnet_blocks.UniversalInvertedResidual",
    "timm.models.ghostnet.GhostBottleneck",
    "timm.models.regnet.Bottleneck",
    "timm.models.rexnet.LinearBottleneck",
}
"""Classes whose forwards read only their input, submodules and plain attributes, and of these not `training`."""

_PLAIN = (bool, int, float, str, type(None))


class Unwritten(Exception):
    """The forward has no program; the message says why."""


@dataclass(frozen=True)
class Slot:
    """A value: number 0 is the input of the forward, and n the result of step n - 1."""

    number: int


@dataclass(frozen=True)
class ChainPart:
    """A chain as the target of a step, whose arguments are its input and what is added to its result, or None.

    Attributes:
        number: index of the chain in the program.
        in_place: whether the addition keeps the type of the chain's result.
        parts: what it calls, in order: for a module its path and its `_kind`; for a function None and the activation.
    """

    number: int
    in_place: bool
    parts: tuple[tuple[Path | None, str], ...]


@dataclass(frozen=True)
class Step:
    """target(*args, **kwargs), where a Slot stands for its value; tuples in the arguments may have Slots, too.

    Attributes:
        target: path of a module, a function or a chain.
        frees: numbers of the values that no later step reads.
    """

    target: Path | Callable | ChainPart
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frame:
    """A module whose forward the program replaces.

    Attributes:
        path: its path below the owner.
        children: names of its submodules, and whether each is a module or None.
        attributes: its plain attributes, without `training`.
        fused: whether it owns chains too, which the program then runs.
    """

    path: Path
    children: tuple[tuple[str, bool], ...]
    attributes: tuple[tuple[str, Any], ...]
    fused: bool

    @classmethod
    def of(cls, module: nn.Module, path: Path, *, fused: bool) -> Frame:
        """The frame of a module as it is now."""
        values = [(name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN)]
        attributes = tuple((name, value) for name, value in values if name != "training" and not name.startswith("_"))
        return cls(path, _children(module), attributes, fused)

    def fits(self, module: nn.Module) -> bool:
        """Whether the module's forward still runs what was traced."""
        now = vars(module)
        values = [name in now and now[name] == value for name, value in self.attributes]
        return is_well_known(module) and _children(module) == self.children and all(values)


@dataclass(frozen=True)
class Program:
    """The forward of one module.

    Attributes:
        chains: the chains that it runs, by their paths below the owner; the owner's own chains come first.
        steps: in order.
        result: number of the value that the forward returns.
        frames: the modules whose forwards it replaces, the owner first.
    """

    chains: tuple[Chain, ...]
    steps: tuple[Step, ...]
    result: int
    frames: tuple[Frame, ...]

    def fits(self, owner: nn.Module) -> bool:
        """Whether it computes what the owner's own forward would compute now, and no hook misses a call."""
        try:
            inner = [(frame, descendant(owner, frame.path)) for frame in self.frames[1:]]
            parts = [(kind, descendant(owner, path)) for path, kind in self._parts()]
        except KeyError:
            return False
        # unfuse may have been called on a module inside
        replaced = [(frame.fused, vars(module).get("forward")) for frame, module in inner]
        if any(not isinstance(forward, ReplacedForward if fused else NoneType) for fused, forward in replaced):
            return False
        if not all(frame.fits(module) for frame, module in ((self.frames[0], owner), *inner)):
            return False
        if any(_kind(module) != kind for kind, module in parts):
            return False
        if any(chain.hooked(owner) or chain.members(owner) is None for chain in self.chains):
            return False
        return not any(hooks for _, module in inner for hooks in hooks_of(module))

    def bind(self, owner: nn.Module, chains: Sequence[BoundChain] | Sequence[CompiledChain]) -> BoundProgram:
        """The program with the modules of an owner that it fits, and its chains."""
        steps = []
        for step in self.steps:
            target: Any = step.target
            if isinstance(target, ChainPart):
                calls = [IN_PLACE[kind] if path is None else descendant(owner, path) for path, kind in target.parts]
                target = _ChainCall(chains[target.number], calls, target.in_place)
            elif isinstance(target, tuple):
                target = descendant(owner, target)
            steps.append((target, step.args, step.kwargs, step.frees))
        return BoundProgram(steps, self.result)

    def _parts(self) -> list[tuple[Path, str]]:
        """The modules that are called in chains, and what they must be."""
        parts = [part for step in self.steps if isinstance(step.target, ChainPart) for part in step.target.parts]
        return [(path, kind) for path, kind in parts if path is not None]


class BoundProgram:
    """A program with modules."""

    def __init__(self, steps: list[tuple[Callable, tuple, Mapping[str, Any], tuple[int, ...]]], result: int) -> None:
        self._steps, self._result = steps, result

    def run(self, x: Tensor) -> Any:
        """The result of the forward."""
        values: list[Any] = [x]
        for target, args, kwargs, frees in self._steps:
            named = {name: _filled(value, values) for name, value in kwargs.items()}
            values.append(target(*[_filled(arg, values) for arg in args], **named))
            # as in the module's own code, what nothing reads again frees its memory
            for number in frees:
                values[number] = None
        return values[self._result]


class _ChainCall:
    """A chain, and what it calls where it runs on PyTorch."""

    def __init__(self, chain: BoundChain | CompiledChain, calls: list[Callable], in_place: bool) -> None:
        self._chain, self._calls, self._in_place = chain, calls, in_place

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        way = self._chain.way(x, recorded=False)
        if way is not None and way is not Way.PLAIN:
            y = self._chain.run_all(way, x, residual)
            return y.to(result_dtype(x)) if self._in_place else y
        for call in self._calls:
            x = call(x)
        if residual is None:
            return x
        return x.add_(residual) if self._in_place else x + residual


def is_well_known(module: nn.Module) -> bool:
    """Whether the class has the forward of a well-known block."""
    return members.forward_name(module).removesuffix(".forward") in WELL_KNOWN


def write(
    graph: fx.Graph,
    modules: Mapping[str, nn.Module],
    chains: Sequence[tuple[Chain, list[fx.Node], fx.Node | None]],
    frames: Sequence[Frame],
) -> Program:
    """The program of a traced forward.

    Args:
        graph: the trace, which has looked into the frames only.
        modules: those of the owner by path.
        chains: all chains of the forward, with the nodes of their stages and of the addition behind them.
        frames: the owner, and the modules into which the trace has looked.

    Raises:
        Unwritten: the forward does something that a program does not have.
    """
    lasts = {nodes[-1] if add is None else add: number for number, (_, nodes, add) in enumerate(chains)}
    inside = {node for _, nodes, _ in chains for node in nodes}
    slots: dict[Any, Slot] = {}
    steps: list[Step] = []
    for node in graph.nodes:
        if node.op == "output":
            result = slots.get(node.args[0])
            if result is None:
                raise Unwritten("its result is not one tensor")
            return Program(tuple(c for c, *_ in chains), _freeing(steps, result.number), result.number, tuple(frames))
        if node.op == "placeholder":
            if slots:
                raise Unwritten("it has several inputs")
            slots[node] = Slot(0)
        elif node in lasts:
            number = lasts[node]
            steps.append(_chain_step(number, *chains[number][1:], slots, modules))
            slots[node] = Slot(len(steps))
        elif node not in inside:
            kwargs = {name: _argument(value, slots) for name, value in node.kwargs.items()}
            steps.append(Step(_target(node), _argument(node.args, slots), kwargs))
            slots[node] = Slot(len(steps))
    raise Unwritten("its forward returns nothing")


def _chain_step(
    number: int, nodes: list[fx.Node], add: fx.Node | None, slots: dict, modules: Mapping[str, nn.Module]
) -> Step:
    residual = None
    if add is not None:
        (residual,) = (slots[arg] for arg in add.args if arg is not nodes[-1])
    parts: list[tuple[Path | None, str]] = []
    for node in nodes:
        if node.op == "call_module":
            parts.append((_path(node), _kind(modules[str(node.target)])))
            if parts[-1][1] == "norm None":
                raise Unwritten(f"{node.target} has an activation that no stage has")
        else:
            act = members.function_activation(node)
            assert act is not None  # or it would not be in the chain
            parts.append((None, act))
    chain = ChainPart(number, adds_in_place(add), tuple(parts))
    return Step(chain, (slots[nodes[0].args[0]], residual), {})


def _freeing(steps: list[Step], result: int) -> tuple[Step, ...]:
    """The steps with `frees`."""
    last: dict[int, int] = {}
    for place, step in enumerate(steps):
        read = [slot.number for slot in _slots((step.args, tuple(step.kwargs.values())))]
        last |= dict.fromkeys([*read, place + 1], place)
    frees: list[list[int]] = [[] for _ in steps]
    for slot, place in last.items():
        if slot != result:
            frees[place].append(slot)
    return tuple(replace(step, frees=tuple(unread)) for step, unread in zip(steps, frees, strict=True))


def _target(node: fx.Node) -> Path | Callable:
    if node.op == "call_module":
        return _path(node)
    if node.op == "call_function" and callable(node.target):
        return node.target
    method = getattr(Tensor, str(node.target), None) if node.op == "call_method" else None
    if method is None:
        raise Unwritten(f"it reads {node.target}")
    return method


def _argument(value: Any, slots: Mapping[fx.Node, Slot]) -> Any:
    if isinstance(value, fx.Node):
        return slots[value]
    if isinstance(value, (list, tuple)):
        return tuple(_argument(part, slots) for part in value)
    if isinstance(value, slice):
        value = slice(*(_argument(part, {}) for part in (value.start, value.stop, value.step)))
    elif not isinstance(value, _PLAIN):
        raise Unwritten(f"it gives a function a {type(value).__name__}")
    return value


def _filled(arg: Any, values: Sequence[Any]) -> Any:
    """The argument with values in place of Slots."""
    if type(arg) is Slot:
        return values[arg.number]
    return tuple([_filled(part, values) for part in arg]) if type(arg) is tuple else arg


def _slots(arg: Any) -> list[Slot]:
    """The Slots that an argument has."""
    if type(arg) is Slot:
        return [arg]
    return [slot for part in arg for slot in _slots(part)] if type(arg) is tuple else []


def _kind(module: nn.Module) -> str:
    """What a module of a chain is: conv, norm with the activation that it has, identity or an activation."""
    if members.runs_conv(module):
        return "conv"
    if isinstance(module, _BatchNorm):
        if members.norm_problem(module) is not None:
            return ""
        own = module.get_submodule("act") if members.has_activation(module) else nn.Identity()
        return f"norm {members.module_activation(own)}"
    return members.module_activation(module) or ""


def _children(module: nn.Module) -> tuple[tuple[str, bool], ...]:
    return tuple((name, child is not None) for name, child in module._modules.items())


def _path(node: fx.Node) -> Path:
    return tuple(str(node.target).split("."))
