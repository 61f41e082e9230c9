"""Forwards of modules that own chains, as lists of steps that run without the module's own Python code.

`recognise` writes a program for a forward whose code reads nothing but attributes of its module. A program has names
only, so it is right for every copy of the module. `BoundProgram` is a program with the modules of one model. Before it
runs it checks everything on which the program depends; if something has changed, the module's own forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from nasfast.fusion import members
from nasfast.fusion.chain import Chain, FusedForward, Path, descendant, hooks_of
from nasfast.fusion.execute import Executor, Way, result_dtype
from nasfast.fusion.fold import IN_PLACE


class Slot(int):
    """The number of a value: 0 is the input of the forward, and n the result of step n - 1."""


@dataclass(frozen=True)
class Step:
    """One operation that is in no chain: calls target(*args, **kwargs), where a Slot stands for its value.

    Attributes:
        target: path of a module, or a function.
    """

    target: Path | Callable
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class ChainStep:
    """One chain.

    Attributes:
        number: index of the chain in the program.
        source: its input.
        residual: what is added to its result, if anything.
        in_place: whether the addition keeps the type of the chain's result.
        modules: paths of all modules that it calls, in order; the forward may call functions between them.
        functions: by the number of modules called before, the activation that the forward computes by a function.
    """

    number: int
    source: Slot
    residual: Slot | None
    in_place: bool
    modules: tuple[Path, ...]
    functions: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Frame:
    """A module whose forward the program replaces.

    Attributes:
        path: its path below the owner.
        present: names of its submodules, and whether each is a module or None.
        attributes: the attributes that its forward reads.
        fused: whether it owns chains too, which the program then runs.
    """

    path: Path
    present: tuple[tuple[str, bool], ...]
    attributes: tuple[tuple[str, Any], ...]
    fused: bool


@dataclass(frozen=True)
class Program:
    """The forward of one module.

    Attributes:
        chains: the chains that it runs, by their paths below the owner.
        steps: in order.
        result: the value that the forward returns.
        frames: the modules whose forwards it replaces, the owner first.
        kinds: for each module of a chain, its path and what it must be: "conv", what `norm_kind` says, or the name of
            an activation.
    """

    chains: tuple[Chain, ...]
    steps: tuple[Step | ChainStep, ...]
    result: Slot
    frames: tuple[Frame, ...]
    kinds: tuple[tuple[Path, str], ...]


class BoundProgram:
    """A program with the modules of one model.

    Raises:
        LookupError: the module is no longer what the program is for.
    """

    def __init__(self, program: Program, owner: nn.Module, executors: Sequence[Executor]) -> None:
        self._result = program.result
        frames = [descendant(owner, frame.path) for frame in program.frames]
        for frame, module in zip(program.frames, frames, strict=True):
            if tuple((name, child is not None) for name, child in module._modules.items()) != frame.present:
                raise LookupError(f"other submodules than {frame.present}")
            if frame.path and not _runs_its_class(module, fused=frame.fused):
                raise LookupError(f"{'.'.join(frame.path)} has another forward")
        inside = [(descendant(owner, path), kind) for path, kind in program.kinds]
        for module, kind in inside:
            if not _is(module, kind):
                raise LookupError(f"{type(module).__name__} is not what the chain had there")
        parents = [*frames, *(module for module, _ in inside)]
        self._children = [(module._modules, dict(module._modules)) for module in parents if module._modules]
        self._attributes = [
            (vars(module), name, value)
            for frame, module in zip(program.frames, frames, strict=True)
            for name, value in frame.attributes
        ]
        checked = [*frames[1:], *(module for module, _ in inside)]
        self._hooks = [hooks for module in checked for hooks in hooks_of(module)]
        self._classes = [(module, type(module), vars(module), vars(module).get("forward")) for module in checked]
        self._convs = [(conv, _conv_settings(conv)) for conv, kind in inside if kind == "conv"]
        self._norms = [module for module, kind in inside if kind.startswith("norm")]
        self._steps = [_bind(step, owner, executors) for step in program.steps]
        self._unread = _unread_after(program)

    def intact(self) -> bool:
        """Whether all on which the program depends is as it was."""
        if self.hooked():
            return False
        for attributes, name, value in self._attributes:
            if attributes.get(name) != value:
                return False
        for children, then in self._children:
            if children != then:
                return False
        for module, cls, attributes, forward in self._classes:
            if module.__class__ is not cls or attributes.get("forward") is not forward:
                return False
        for conv, settings in self._convs:
            if _conv_settings(conv) != settings or "bias" not in conv._parameters:
                return False
        for norm in self._norms:
            affine = norm._parameters
            if affine["weight"] is None or affine["bias"] is None:
                return False
        return True

    def hooked(self) -> bool:
        """Whether a module whose call the program replaces has hooks."""
        return any(self._hooks)

    def run(self, x: Tensor) -> tuple[Any, list[Way | None]]:
        """The result of the forward, and how each chain ran; None for one whose tensors are not ordinary."""
        values: list[Any] = [x]
        ways = []
        for step, unread in zip(self._steps, self._unread, strict=True):
            if isinstance(step, _BoundChain):
                residual = None if step.residual is None else values[step.residual]
                way, value = step.run(values[step.source], residual)
                ways.append(way)
                del residual
            else:
                value = _run_step(step, values)
            values.append(value)
            del value
            # as in the module's own code, what nothing reads again frees its memory
            for slot in unread:
                values[slot] = None
        return values[self._result], ways


class _BoundChain:
    """A `ChainStep` with its modules."""

    def __init__(self, step: ChainStep, owner: nn.Module, executors: Sequence[Executor]) -> None:
        self.source, self.residual = step.source, step.residual
        self._in_place = step.in_place
        self._executor = executors[step.number]
        functions = dict(step.functions)
        self._calls: list[Callable] = []
        for place, path in enumerate(step.modules):
            self._calls += [IN_PLACE[functions[place]]] if place in functions else []
            self._calls.append(descendant(owner, path))
        self._calls += [IN_PLACE[functions[len(step.modules)]]] if len(step.modules) in functions else []

    def run(self, x: Tensor, residual: Tensor | None) -> tuple[Way | None, Tensor]:
        """How the chain ran, None where its tensors are not ordinary ones; and its result with the residual added."""
        way = self._executor.way(x)
        if way is None or way is Way.PLAIN:
            for call in self._calls:
                x = call(x)
            if residual is None:
                return way, x
            return way, x.add_(residual) if self._in_place else x + residual
        y = self._executor.run_all(way, x, residual)
        return way, y.to(result_dtype(x)) if self._in_place else y


def norm_kind(bn: _BatchNorm) -> str:
    """The kind of a BatchNorm: it may have an activation of its own."""
    if not members.has_activation(bn):
        return "norm"
    return f"norm with {members.module_activation(bn.get_submodule('act'))}"


def _bind(
    step: Step | ChainStep, owner: nn.Module, executors: Sequence[Executor]
) -> _BoundChain | tuple[Callable, tuple, tuple]:
    if isinstance(step, ChainStep):
        return _BoundChain(step, owner, executors)
    target = descendant(owner, step.target) if isinstance(step.target, tuple) else step.target
    return target, step.args, step.kwargs


def _run_step(step: tuple[Callable, tuple, tuple], values: Sequence[Any]) -> Any:
    function, args, kwargs = step
    filled = [values[arg] if type(arg) is Slot else arg for arg in args]
    return function(*filled, **{name: values[v] if type(v) is Slot else v for name, v in kwargs})


def _unread_after(program: Program) -> list[list[int]]:
    """For each step, the values that no later step reads and the forward does not return."""
    last: dict[int, int] = {}
    for number, step in enumerate(program.steps):
        if isinstance(step, ChainStep):
            read: tuple = (step.source, step.residual)
        else:
            read = (*step.args, *(value for _, value in step.kwargs))
        last |= {value: number for value in (*read, Slot(number + 1)) if type(value) is Slot}
    unread: list[list[int]] = [[] for _ in program.steps]
    for slot, number in last.items():
        if slot != program.result:
            unread[number].append(slot)
    return unread


def _runs_its_class(module: nn.Module, *, fused: bool) -> bool:
    """Whether the module runs the forward of its class, or what `fuse` made of it."""
    forward = vars(module).get("forward")
    return isinstance(forward, FusedForward) if fused else forward is None


def _is(module: nn.Module, kind: str) -> bool:
    """Whether the module may stand at a place of this kind; see `Program.kinds`."""
    if "forward" in vars(module):
        return False
    if kind == "conv":
        return isinstance(module, _ConvNd) and members.conv_problem(module) is None
    if kind.startswith("norm"):
        if not isinstance(module, _BatchNorm) or members.norm_problem(module) is not None:
            return False
        return kind == norm_kind(module)
    return members.module_activation(module) == kind


def _conv_settings(conv: nn.Module) -> tuple:
    return conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode
