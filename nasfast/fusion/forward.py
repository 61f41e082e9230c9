"""The forward that `fuse` gives to a module with chains.

A well-known block runs as its program. Any other module runs its own forward, while placeholders record its chains.
Both ask each chain how it runs, by `BoundChain.way`. Under torch.compile, programs run on `CompiledChain`, and other
modules as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.fusion.chain import Chain, passed
from nasfast.fusion.execute import BoundChain, CompiledChain
from nasfast.fusion.placeholders import run_own_forward
from nasfast.fusion.program import Program
from nasfast.fusion.replaced import ReplacedForward, must_run_unfused
from nasfast.fusion.stages import Way
from nasfast.fusion.watch import Watch


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
        module, program = self.module, self.program
        forward = partial(type(module).forward, module)
        alone = len(args) == 1 and not kwargs
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting() or program is None or not alone or not program.fits(module):
                return forward(*args, **kwargs)
            chains = [CompiledChain(chain.members(module), self.always) for chain in program.chains]
            return program.bind(module, chains).run(args[0])
        if must_run_unfused() or (program is not None and not alone):
            # steps of an optimizer may follow that no version counter counts
            self._binding = None
            return forward(*args, **kwargs)
        binding = self._binding
        if binding is None or not binding.watch.same(module):
            binding = self._binding = _Binding(self, module)
        if program is None:
            return run_own_forward(forward, binding.starts, args, kwargs)
        if binding.program is None or type(args[0]) is not Tensor:
            return forward(*args)
        return binding.program.run(args[0])


class _Binding:
    """A module's program and chains with its present modules. Nothing here may keep the module alive, which has this.

    Attributes:
        watch: whether they still are the module's.
        program: None if there is none that computes what the module's own forward computes now.
        starts: the chains that are recorded, by their first convolutions.
    """

    def __init__(self, forward: ChainForward, module: nn.Module) -> None:
        program = forward.program
        chains = forward.chains if program is None else program.chains
        found = [(chain, chain.members(module), known) for chain, known in zip(chains, forward.measured, strict=True)]
        bound = [BoundChain(chain, members, forward.always, known) for chain, members, known in found if members]
        self.watch = _watch(module, chains, program, bound)
        self.program = program.bind(module, bound) if program is not None and program.fits(module) else None
        # a placeholder must not reach a hook
        self.starts: dict[nn.Module, BoundChain] = {
            chain.members.convs[0]: chain for chain in bound if not chain.chain.hooked(module)
        }


def _watch(module: nn.Module, chains: Sequence[Chain], program: Program | None, bound: Sequence[BoundChain]) -> Watch:
    """Watches everything that a binding is made from."""
    frames = () if program is None else program.frames
    paths = {path for chain in chains for path in (*chain.convs, *chain.norms, *chain.watched)}
    paths |= {frame.path for frame in frames}
    below = [m for path in sorted(paths) for m in passed(module, path)[1:]]
    places = [place for chain in bound for place in chain.members.places()]
    places += [(vars(m), name) for m in below if isinstance(m, nn.Hardtanh) for name in ("min_val", "max_val")]
    for frame in frames[1:]:
        places += [(vars(passed(module, frame.path)[-1]), name) for name, _ in frame.attributes]
    return Watch(module, [name for name, _ in frames[0].attributes] if frames else [], below, places)
