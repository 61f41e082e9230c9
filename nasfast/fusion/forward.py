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
from nasfast.fusion.chain import BoundChain, Chain, Path, descendant
from nasfast.fusion.placeholders import Recording
from nasfast.fusion.replaced import ReplacedForward, Watch, must_run_unfused
from nasfast.fusion.stages import Way


class ChainForward(ReplacedForward):
    """Replaces the forward of a module that owns chains.

    Args:
        module: the module.
        chains: its chains, each with how it was measured to run fastest in a situation.
        always: whether every chain always runs on the operator.
    """

    def __init__(self, module: nn.Module, chains: Sequence[tuple[Chain, dict[tuple, Way]]], always: bool) -> None:
        super().__init__(module)
        self.chains, self.always = chains, always
        self._binding: Binding | None = None

    def __reduce__(self) -> tuple:
        return ChainForward, (self.module, self.chains, self.always)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward = partial(type(module).forward, module)
        alone = len(args) == 1 and not kwargs and type(args[0]) is Tensor
        if torch.compiler.is_compiling():
            known = alone and not torch.compiler.is_exporting()
            block = Binding(self).block if known else None
            return forward(*args, **kwargs) if block is None else block.run(args[0])
        if must_run_unfused():
            # steps of an optimizer may follow that no version counter counts
            self._binding = None
            return forward(*args, **kwargs)
        binding = self._binding
        if binding is None or not binding.watch.same(module):
            binding = self._binding = Binding(self)
        if binding.block is None or not alone:
            return Recording(binding.starts).run(forward, args, kwargs)
        return binding.block.run(args[0])


class Binding:
    """A module's forward with its present modules. Nothing here may keep the module alive, which has this.

    Attributes:
        chains: the chains of the module, and of the modules between it and its chains, that can be chains now.
        block: the module as a well-known block, or None.
        watch: whether the modules still are the module's; torch.compile has guards instead.
        starts: the chains that are recorded if there is no block, by their first convolutions.
    """

    watch: Watch
    starts: dict[nn.Module, BoundChain]

    def __init__(self, forward: ChainForward) -> None:
        # the module may have another forward, which calls this one
        module = forward.module
        self.chains, paths, opened = _present_chains(forward)
        # a hook must see its usual arguments, and no placeholder
        unhooked = [found for found in self.chains if not found.chain.hooked(module)]
        self.block = blocks.bind(module, unhooked, opened)
        if not torch.compiler.is_compiling():
            self.watch = _watch(module, self.chains, paths, opened)
            self.starts = {found.convs[0]: found for found in unhooked}


def _present_chains(forward: ChainForward) -> tuple[list[BoundChain], list[Path], list[nn.Module]]:
    """The chains of a `Binding`, the paths of everything between its module and theirs and of these, and the modules
    between.
    """
    module = forward.module
    chains: list[BoundChain] = []
    paths: list[Path] = []
    opened: list[nn.Module] = []
    known = blocks.block_of(module) is not None
    pending: list[tuple[Path, ChainForward]] = [((), forward)]
    while pending:
        path, forward = pending.pop(0)
        for own, measured in forward.chains:
            chain = own.below(path)
            paths += (*chain.convs, *chain.norms, *chain.watched)
            found = chain.bind(module, forward.always, measured)
            if found is None:
                continue
            chains.append(found)
            for below in (*chain.convs, *chain.norms) if known else ():
                for length in range(len(path) + 1, len(below)):
                    inner = descendant(module, below[:length])
                    if inner is not None and not any([inner is other for other in opened]):
                        opened.append(inner)
                        if isinstance(below_forward := vars(inner).get("forward"), ChainForward):
                            pending.append((below[:length], below_forward))
    return chains, paths, opened


def _watch(module: nn.Module, chains: Sequence[BoundChain], paths: list[Path], opened: list[nn.Module]) -> Watch:
    """Watches everything that a binding is made from."""
    passed = {path[:length] for path in paths for length in range(1, len(path) + 1)}
    below = [found for path in passed if (found := descendant(module, path)) is not None]
    below += [child for parent in (module, *opened) for child in parent.children() if blocks.is_idle(child)]
    places = [place for one in chains for place in one.places()]
    places += [(vars(m), name) for m in below if isinstance(m, nn.Hardtanh) for name in ("min_val", "max_val")]
    block = blocks.block_of(module)
    return Watch(module, [block.adds] if block is not None and isinstance(block.adds, str) else [], below, places)
