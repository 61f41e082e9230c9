"""The forward that `fuse` gives to a module with chains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.fusion.chain import Chain, descendant, passed
from nasfast.fusion.execute import Executor, surroundings
from nasfast.fusion.placeholders import run_own_forward
from nasfast.fusion.program import BoundProgram, Program
from nasfast.fusion.replaced import ReplacedForward, must_run_unfused
from nasfast.fusion.stages import Way
from nasfast.fusion.watch import Watch, hooks_of

# situations that one module keeps in which nothing of it runs fused
_KEPT_SITUATIONS = 256


class ChainForward(ReplacedForward):
    """Replaces the forward of a module that owns chains.

    Args:
        module: the module.
        chains: its chains.
        programs: its forward as steps, perhaps one for each mode; none if it must run its own code.
        always: whether every chain always runs on the operator.
        ways: what was measured of each chain; see `Executor.measured`.
    """

    def __init__(
        self,
        module: nn.Module,
        chains: Sequence[Chain],
        programs: Sequence[Program],
        always: bool,
        ways: Sequence[dict[tuple, Way]] = (),
    ) -> None:
        super().__init__(module)
        self.chains = tuple(chains)
        self.programs = tuple(programs)
        self.always = always
        # a program's first chains are the module's own
        chains = programs[0].chains if programs else self.chains
        self.executors = [Executor(always, known) for known in ways or [{}] * len(chains)]
        self._binding: _Binding | None = None

    def __reduce__(self) -> tuple:
        ways = tuple(executor.measured for executor in self.executors)
        return ChainForward, (self.module, self.chains, self.programs, self.always, ways)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward = type(module).forward
        if must_run_unfused():
            return forward(module, *args, **kwargs)
        binding = self._binding
        if binding is None or not binding.same(module):
            binding = self._binding = _Binding(self, module)
        alone = len(args) == 1 and not kwargs
        if alone and binding.unfused and binding.situation(args[0]) in binding.unfused:
            return forward(module, *args)
        if alone and type(args[0]) is Tensor and binding.program is not None:
            result, ways = binding.program.run(args[0])
        else:
            result, ways = run_own_forward(partial(forward, module), binding.chains, args, kwargs)
        if alone and all([way is Way.PLAIN for way in ways]):
            binding.leave(args[0])
        return result


class _Binding:
    """A module's chains with its present modules.

    Attributes:
        program: the module's program; None if none can replace the module's own forward now.
        chains: those that run inside the module's own forward.
        unfused: situations in which every chain runs on PyTorch, where the module's own forward is the fastest.
    """

    def __init__(self, forward: ChainForward, module: nn.Module) -> None:
        self._watch(forward, module)
        self.unfused: set[tuple] = set()
        bound = [(p.chains, _bound(p, module, forward.executors)) for p in forward.programs]
        its_chains, self.program = next((found for found in bound if found[1]), (forward.chains, None))
        executors = forward.executors[: len(its_chains)]
        for executor, chain in zip(executors, its_chains, strict=True):
            executor.assign(chain.members(module))
        # a placeholder must not reach a hook
        self.chains = [
            (chain, executor)
            for chain, executor in zip(its_chains, executors, strict=True)
            if executor.members is not None and not chain.hooked(module)
        ]
        members = [members for _, executor in self.chains if (members := executor.members) is not None]
        self._whole = len(members) == len(its_chains)
        self._norms = [vars(bn) for one in members for bn in one.norms]
        owners = [module._parameters for one in members for module in (*one.convs, *one.norms)]
        learned = [(parameters, name) for parameters in owners for name in ("weight", "bias")]
        self._dictionaries, self._names = [d for d, _ in learned], [name for _, name in learned]

    def _watch(self, forward: ChainForward, module: nn.Module) -> None:
        frames = [frame for program in forward.programs for frame in program.frames]
        chains = {*forward.chains, *(chain for program in forward.programs for chain in program.chains)}
        paths = {path for chain in chains for path in (*chain.convs, *chain.norms, *chain.watched)}
        paths |= {frame.path for frame in frames} | {path for p in forward.programs for path, _ in p.kinds}
        below = [m for path in sorted(paths) for m in passed(module, path)[1:]]
        functions: list[tuple[type, str]] = [(type(m), "_conv_forward") for m in below if isinstance(m, nn.Conv2d)]
        places = [(module._modules, name) for name in module._modules]
        clamps = {m for m in below if isinstance(m, nn.Hardtanh)}
        places += [(vars(m), name) for m in clamps for name in ("min_val", "max_val")]
        own = ["_modules"]
        for frame in frames:
            place = passed(module, frame.path)[-1]
            functions += [(type(place), name) for name, _ in frame.functions]
            names = [name for name, _ in (*frame.functions, *frame.attributes)]
            if place is module:
                own += [name for name in names if name != "forward"]
            else:
                places += [(vars(place), name) for name in names]
        self._below = Watch(places, below, functions)
        # nothing here may keep the module or its attributes alive, among which this is
        self._class, self._children = type(module), len(module._modules)
        self._own, self._values = own, list(map(vars(module).get, own))

    def same(self, module: nn.Module) -> bool:
        """Whether the module and those below it are still the same."""
        return (
            type(module) is self._class
            and len(module._modules) == self._children
            and all(map(is_, map(vars(module).get, self._own), self._values))
            and self._below.same()
        )

    def situation(self, given: Any) -> tuple | None:
        """All that decides whether a chain of a forward on what is given runs fused; None where that is not decided.

        Args:
            given: the only argument of the forward: a tensor, or a list or tuple of tensors.
        """
        tensors = given if type(given) in (list, tuple) else [given]
        if not self._whole or not tensors or set(map(type, tensors)) != {Tensor}:
            return None
        around = type(given), *map(surroundings, tensors)
        if None in around:
            return None
        wanted: tuple = ()
        if torch.is_grad_enabled():
            parameters = map(dict.get, self._dictionaries, self._names)
            wanted = tuple(map(getattr, parameters, repeat("requires_grad"), repeat(None)))
        return around, wanted, tuple(map(dict.get, self._norms, repeat("training")))

    def leave(self, given: Any) -> None:
        """The module's own forward shall run from now on, where all is as it was for what is given."""
        situation = self.situation(given)
        if len(self.unfused) >= _KEPT_SITUATIONS:
            self.unfused.clear()
        self.unfused |= set() if situation is None else {situation}


def _bound(program: Program, module: nn.Module, executors: Sequence[Executor]) -> BoundProgram | None:
    """The program if it can replace the module's own forward now."""
    try:
        inner = [(frame, descendant(module, frame.path)) for frame in program.frames[1:]]
        replaced = [m for _, m in inner] + [descendant(module, path) for path, _ in program.kinds]
        # unfuse may have been called on a module inside
        if any(type(vars(m).get("forward")) is not (ChainForward if f.fused else type(None)) for f, m in inner):
            return None
        if any(hooks for m in replaced for hooks in hooks_of(m)) or any(c.hooked(module) for c in program.chains):
            return None
        return BoundProgram(program, module, executors)
    except LookupError:
        return None
