"""The forward that `fuse` gives to a module with chains.

A well-known block runs as `blocks` spells it out. Any other module runs its own forward, while placeholders record its
chains. Both ask each chain how it runs, by `BoundChain.way`. Under torch.compile, well-known blocks run on
`CompiledChain`, and other modules as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.fusion import blocks
from nasfast.fusion.chain import Chain, Path, descendant, passed
from nasfast.fusion.execute import BoundChain, CompiledChain
from nasfast.fusion.placeholders import run_own_forward
from nasfast.fusion.replaced import ReplacedForward, Watch, must_run_unfused
from nasfast.fusion.stages import Way


class ChainForward(ReplacedForward):
    """Replaces the forward of a module that owns chains.

    Args:
        module: the module.
        chains: its chains.
        always: whether every chain always runs on the operator.
        measured: for each chain, how it was measured to run fastest in a situation.
    """

    def __init__(
        self, module: nn.Module, chains: Sequence[Chain], always: bool, measured: Sequence[dict[tuple, Way]] = ()
    ) -> None:
        super().__init__(module)
        self.chains, self.always = tuple(chains), always
        self.measured = tuple(measured) or tuple({} for _ in self.chains)
        self._binding: _Binding | None = None

    def __reduce__(self) -> tuple:
        return ChainForward, (self.module, self.chains, self.always, self.measured)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward = partial(type(module).forward, module)
        alone = len(args) == 1 and not kwargs and type(args[0]) is Tensor
        if torch.compiler.is_compiling():
            known = alone and not torch.compiler.is_exporting()
            block = _Binding(self, compiled=True).block if known else None
            return forward(*args, **kwargs) if block is None else block.run(args[0])
        if must_run_unfused():
            # steps of an optimizer may follow that no version counter counts
            self._binding = None
            return forward(*args, **kwargs)
        binding = self._binding
        if binding is None or not binding.watch.same(module):
            binding = self._binding = _Binding(self)
        if binding.block is None or not alone:
            return run_own_forward(forward, binding.starts, args, kwargs)
        return binding.block.run(args[0])

    def is_recorded(self) -> bool:
        """Whether the module's own forward runs while its chains are recorded."""
        return _Binding(self).block is None


class _Binding:
    """A module's forward with its present modules. Nothing here may keep the module alive, which has this.

    Args:
        forward: the module's forward.
        compiled: whether torch.compile traces it, whose guards are the watch then; it has no placeholders.

    Attributes:
        block: the module as a well-known block, or None.
        watch: whether the modules still are the module's.
        starts: the chains that are recorded otherwise, by their first convolutions.
    """

    watch: Watch
    starts: dict[nn.Module, BoundChain]

    def __init__(self, forward: ChainForward, *, compiled: bool = False) -> None:
        # the module may have another forward, which calls this one
        module = forward.module
        chains, paths, opened = _present_chains(forward, compiled)
        # a hook must see its usual arguments, and no placeholder
        unhooked = [found for found in chains if not found.chain.hooked(module)]
        self.block = blocks.bind(module, unhooked, opened)
        if not compiled:
            self.watch = _watch(module, chains, paths, opened)
            self.starts = {found.members.convs[0]: found for found in unhooked}


def _present_chains(forward: ChainForward, compiled: bool) -> tuple[list[BoundChain], list[Path], list[nn.Module]]:
    """The chains that a forward runs: the module's, and those of the modules between it and its chains.

    Returns:
        Those whose modules can be chains now, the paths of everything between the module and the modules of its chains,
        and of these, and the modules between.
    """
    module = forward.module
    chains: list[BoundChain] = []
    paths: list[Path] = []
    opened: list[nn.Module] = []
    known = blocks.block_of(module) is not None
    pending: list[tuple[Path, ChainForward]] = [((), forward)]
    while pending:
        path, forward = pending.pop(0)
        for own, measured in zip(forward.chains, forward.measured, strict=True):
            chain = own.below(path)
            chain_members = chain.members(module)
            paths += (*chain.convs, *chain.norms, *chain.watched)
            if chain_members is None:
                continue
            if compiled:
                chains.append(CompiledChain(chain, chain_members, forward.always))
            else:
                chains.append(BoundChain(chain, chain_members, forward.always, measured))
            for below in (*chain.convs, *chain.norms) if known else ():
                for length in range(len(path) + 1, len(below)):
                    inner = descendant(module, below[:length])
                    if not any([inner is other for other in opened]):
                        opened.append(inner)
                        if isinstance(below_forward := vars(inner).get("forward"), ChainForward):
                            pending.append((below[:length], below_forward))
    return chains, paths, opened


def _watch(module: nn.Module, chains: Sequence[BoundChain], paths: list[Path], opened: list[nn.Module]) -> Watch:
    """Watches everything that a binding is made from."""
    below = [m for path in sorted(set(paths)) for m in passed(module, path)[1:]]
    below += [child for parent in (module, *opened) for child in parent.children() if blocks.is_idle(child)]
    places = [place for one in chains for place in one.members.places()]
    places += [(vars(m), name) for m in below if isinstance(m, nn.Hardtanh) for name in ("min_val", "max_val")]
    block = blocks.block_of(module)
    return Watch(module, [block.adds] if block is not None and isinstance(block.adds, str) else [], below, places)
