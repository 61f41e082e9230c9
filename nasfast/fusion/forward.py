"""The forward that `fuse` gives to a module with chains.

It runs a well-known block by its program. Any other module runs its own forward, while placeholders record its chains.
Both ask each chain, by `BoundChain.way`, how it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.fusion.chain import Chain, passed
from nasfast.fusion.execute import BoundChain, CompiledChain, surroundings
from nasfast.fusion.placeholders import run_own_forward
from nasfast.fusion.program import Program
from nasfast.fusion.replaced import ReplacedForward, must_run_unfused
from nasfast.fusion.stages import Way
from nasfast.fusion.watch import Watch

# situations that one module keeps in which nothing of it runs fused
_KEPT_SITUATIONS = 256


class ChainForward(ReplacedForward):
    """Replaces the forward of a module that owns chains.

    Args:
        module: the module.
        chains: its chains.
        program: its forward as steps; None if it must run its own code.
        always: whether every chain always runs on the operator.
        measured: for each chain of the program, or each of the module's own, how it was measured to run fastest in a
            situation.
    """

    def __init__(
        self,
        module: nn.Module,
        chains: Sequence[Chain],
        program: Program | None,
        always: bool,
        measured: Sequence[dict[tuple, Way]] = (),
    ) -> None:
        super().__init__(module)
        self.chains, self.program, self.always = tuple(chains), program, always
        # a program's first chains are the module's own
        self.measured = tuple(measured) or tuple({} for _ in (program.chains if program else self.chains))
        self._binding: _Binding | None = None

    def __reduce__(self) -> tuple:
        return ChainForward, (self.module, self.chains, self.program, self.always, self.measured)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward = type(module).forward
        alone = len(args) == 1 and not kwargs
        if must_run_unfused():
            return forward(module, *args, **kwargs)
        if torch.compiler.is_compiling():
            if self.program is None or not alone or not self.program.fits(module):
                return forward(module, *args, **kwargs)
            chains = [CompiledChain(chain.members(module), self.always) for chain in self.program.chains]
            return self.program.bind(module, chains).run(args[0])
        binding = self._binding
        if binding is None or not binding.watch.same(module):
            binding = self._binding = _Binding(self, module)
        if binding.program is not None and alone and type(args[0]) is Tensor:
            return binding.program.run(args[0])
        if alone and binding.unfused and binding.situation(args[0]) in binding.unfused:
            return forward(module, *args)
        result, ways = run_own_forward(partial(forward, module), binding.chains, args, kwargs)
        if alone and all([way is Way.PLAIN for way in ways]):
            binding.leave(args[0])
        return result


class _Binding:
    """A module's program and chains with its present modules. Nothing here may keep the module alive, which has this.

    Attributes:
        watch: whether they still are the module's.
        program: None if none can replace the module's own forward now.
        chains: those that run inside the module's own forward.
        unfused: situations in which each of these runs on PyTorch, where the module's own forward is the fastest.
    """

    def __init__(self, forward: ChainForward, module: nn.Module) -> None:
        program = forward.program if forward.program is not None and forward.program.fits(module) else None
        chains = []
        for chain, measured in zip(program.chains if program else forward.chains, forward.measured, strict=False):
            members = chain.members(module)
            if members is not None:
                chains.append(BoundChain(chain, members, forward.always, measured))
        self.watch = _watch(forward, module, chains)
        self.unfused: set[tuple] = set()
        self.program = program.bind(module, chains) if program else None
        # a placeholder must not reach a hook
        self.chains = [bound for bound in chains if not bound.chain.hooked(module)]
        self._whole = len(self.chains) == len(forward.chains)
        owners = [m._parameters for chain in self.chains for m in (*chain.members.convs, *chain.members.norms)]
        learned = [(parameters, name) for parameters in owners for name in ("weight", "bias")]
        self._dictionaries, self._names = [d for d, _ in learned], [name for _, name in learned]

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
        return around, wanted

    def leave(self, given: Any) -> None:
        """The module's own forward shall run from now on, where all is as it was for what is given."""
        situation = self.situation(given)
        if len(self.unfused) >= _KEPT_SITUATIONS:
            self.unfused.clear()
        self.unfused |= set() if situation is None else {situation}


def _watch(forward: ChainForward, module: nn.Module, chains: Sequence[BoundChain]) -> Watch:
    """Watches everything that a binding was made from."""
    program = forward.program
    every = {*forward.chains, *(program.chains if program else ())}
    paths = {path for chain in every for path in (*chain.convs, *chain.norms, *chain.watched)}
    paths |= {frame.path for frame in program.frames} if program else set()
    below = [m for path in sorted(paths) for m in passed(module, path)[1:]]
    places = [place for chain in chains for place in chain.members.places()]
    places += [(vars(m), name) for m in below if isinstance(m, nn.Hardtanh) for name in ("min_val", "max_val")]
    own: list[str] = []
    for frame in program.frames if program else ():
        place = passed(module, frame.path)[-1]
        names = [name for name, _ in frame.attributes]
        if place is module:
            own += names
        else:
            places += [(vars(place), name) for name in names]
    return Watch(module, own, below, places)
