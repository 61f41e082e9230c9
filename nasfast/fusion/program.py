"""Forwards of modules that own chains, as lists of steps that run without the module's own Python code.

`recognise` writes a program for a forward whose code reads nothing but attributes of its module. A program has names
only, so it is right for every copy of the module. `BoundProgram` is a program with the modules of one model. When it is
made it checks everything on which the program depends. If something has changed since, the module's own forward runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nasfast.fusion import members
from nasfast.fusion.calls import IN_PLACE
from nasfast.fusion.chain import Chain, Path, descendant
from nasfast.fusion.execute import Executor
from nasfast.fusion.stages import Way, result_dtype


class Slot(int):
    """The number of a value: 0 is the input of the forward, and n the result of step n - 1."""


@dataclass(frozen=True)
class Step:
    """One operation that is in no chain: calls target(*args, **kwargs), where a Slot stands for its value.

    Tuples in the arguments may have Slots, too.

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
        functions: the functions of its class that run: the forward and the methods that it calls; and for each, what
            `fingerprint` says of it.
        fused: whether it owns chains too, which the program then runs.
    """

    path: Path
    present: tuple[tuple[str, bool], ...]
    attributes: tuple[tuple[str, Any], ...]
    functions: tuple[tuple[str, bytes], ...]
    fused: bool

    def problem(self, module: nn.Module) -> str | None:
        """Why this module is another one than the program is for; None if it is not."""
        if tuple((name, child is not None) for name, child in module._modules.items()) != self.present:
            return f"other submodules than {self.present}"
        there = vars(module)
        if any(there.get(name, _ABSENT) != value for name, value in self.attributes):
            return f"other attributes than {self.attributes}"
        for name, its_fingerprint in self.functions:
            if name != "forward" and name in there or fingerprint(type(module), name) != its_fingerprint:
                return f"another {name}"
        return None


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

    def reads(self, attribute: str) -> bool:
        """Whether a forward that it replaces reads this attribute of its module."""
        return any(attribute == name for frame in self.frames for name, _ in frame.attributes)


class BoundProgram:
    """A program with the modules of one model.

    Raises:
        LookupError: the module is not what the program is for.
    """

    def __init__(self, program: Program, owner: nn.Module, executors: Sequence[Executor]) -> None:
        self._result = program.result
        for frame in program.frames:
            problem = frame.problem(descendant(owner, frame.path))
            if problem is not None:
                raise LookupError(f"{'.'.join(frame.path) or 'the module'} has {problem}")
        for path, kind in program.kinds:
            if not _is(descendant(owner, path), kind):
                raise LookupError(f"{'.'.join(path)} is not what the chain had there")
        self._steps = [_bind(step, owner, executors) for step in program.steps]
        self._unread = _unread_after(program)

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
        way = self._executor.way(x, recorded=False)
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
    filled = [_filled(arg, values) for arg in args]
    return function(*filled, **{name: _filled(value, values) for name, value in kwargs})


def _filled(arg: Any, values: Sequence[Any]) -> Any:
    if type(arg) is Slot:
        return values[arg]
    return tuple([_filled(part, values) for part in arg]) if type(arg) is tuple else arg


def _slots(arg: Any) -> Iterator[Slot]:
    """The values that an argument has."""
    if type(arg) is Slot:
        yield arg
    elif type(arg) is tuple:
        for part in arg:
            yield from _slots(part)


def _unread_after(program: Program) -> list[list[int]]:
    """For each step, the values that no later step reads and the forward does not return."""
    last: dict[int, int] = {}
    for number, step in enumerate(program.steps):
        if isinstance(step, ChainStep):
            read: tuple = (step.source, step.residual)
        else:
            read = (*step.args, *(value for _, value in step.kwargs))
        last |= dict.fromkeys(_slots((*read, Slot(number + 1))), number)
    unread: list[list[int]] = [[] for _ in program.steps]
    for slot, number in last.items():
        if slot != program.result:
            unread[number].append(slot)
    return unread


def _is(module: nn.Module, kind: str) -> bool:
    """Whether the module may stand at a place of this kind; see `Program.kinds`."""
    if kind == "conv":
        return members.runs_conv(module)
    if kind.startswith("norm"):
        if not isinstance(module, _BatchNorm) or members.norm_problem(module) is not None:
            return False
        return kind == norm_kind(module)
    return members.module_activation(module) == kind


def fingerprint(cls: type, name: str) -> bytes:
    """What the code of a function of a class is; empty if it is no Python function.

    Unlike the function it can be pickled when the class was changed.
    """
    function = getattr(cls, name, None)
    if not isinstance(function, FunctionType):
        return b""
    code = function.__code__
    read = code.co_code, code.co_consts, code.co_names, code.co_varnames, function.__defaults__
    return hashlib.sha256(repr(read).encode()).digest()


_ABSENT = object()
