"""The forward that `fuse` gives to a module with chains."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_state

from nasfast.fusion.chain import Chain, FusedForward
from nasfast.fusion.execute import Executor, Way
from nasfast.fusion.placeholders import run_own_forward
from nasfast.fusion.program import BoundProgram, Program

# situations that one module keeps in which nothing of it runs fused
_KEPT_SITUATIONS = 256


class ChainForward(FusedForward):
    """Replaces the forward of a module that owns chains; an object, so that it is copied and pickled with the module.

    It has a weak reference to the module: a cycle would keep the memory of a deleted model until the next garbage
    collection.

    Args:
        module: the module.
        chains: its chains.
        program: its forward as steps, None if it must run its own code.
        always: whether every chain always runs on the operator.
        ways: what was measured of each chain; see `Executor.measured`.
    """

    def __init__(
        self,
        module: nn.Module,
        chains: Sequence[Chain],
        program: Program | None,
        always: bool,
        ways: Sequence[dict[tuple, Way]] = (),
    ) -> None:
        self._module = weakref.ref(module)
        self.chains = tuple(chains)
        self.program = program
        self.always = always
        # of the program, whose first chains are those of the module
        chains = self.chains if program is None else program.chains
        self.executors = [Executor(always, known) for known in ways or [{}] * len(chains)]
        self._bound: BoundProgram | None = None
        # situations in which every chain runs on PyTorch, where the module's own forward is the fastest
        self._unfused: set[tuple] = set()

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                "the module of this fused forward was deleted; keep the model while its forward is used"
            )
        return module

    def __reduce__(self) -> tuple:
        ways = tuple(executor.measured for executor in self.executors)
        return ChainForward, (self.module, self.chains, self.program, self.always, ways)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(partial(type(self.module).forward, self.module))

    def __getattr__(self, name: str) -> Any:
        # torch.jit.script reads these of every forward that it compiles
        if name in ("__globals__", "__code__", "__closure__"):
            raise AttributeError(
                "torch.jit.script cannot compile a module that runs fused: call nasfast.unfuse(model) before, or use "
                "torch.jit.trace, which records the unfused model"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward = type(module).forward
        # compilers fuse by themselves, tracers need the plain operators, and global hooks see every module
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or module_state._has_any_global_hook():
            return forward(module, *args, **kwargs)
        x = args[0] if len(args) == 1 and not kwargs and type(args[0]) is Tensor else None
        bound = None if x is None else self._bind(module)
        executors = self.executors if bound is not None else self.executors[: len(self.chains)]
        if bound is None:
            _assign(executors, self.chains, module)
        situation = None if x is None or self.always else _situation(executors, x)
        if situation in self._unfused:
            return forward(module, *args)
        if bound is not None:
            result, ways = bound.run(args[0])
        else:
            chains = list(zip(self.chains, executors, strict=True))
            result, ways = run_own_forward(partial(forward, module), module, chains, args, kwargs)
        if situation is not None and all([way is Way.PLAIN for way in ways]):
            if len(self._unfused) >= _KEPT_SITUATIONS:
                self._unfused.clear()
            self._unfused.add(situation)
        return result

    def _bind(self, module: nn.Module) -> BoundProgram | None:
        """The program if it can replace the module's own forward now."""
        if self.program is None:
            return None
        bound = self._bound
        if bound is None or not bound.intact():
            if bound is not None and bound.hooked():
                return None
            self._bound = None
            try:
                bound = BoundProgram(self.program, module, self.executors)
            except LookupError:
                return None
            _assign(self.executors, self.program.chains, module)
            if any(executor.members is None for executor in self.executors):
                return None
            # kept even if it must wait until hooks are removed
            self._bound = bound
            return bound if bound.intact() else None
        if any([executor.members is None for executor in self.executors]):
            # while a convolution was pruned, which is a hook, its chain had no members
            _assign(self.executors, self.program.chains, module)
        return bound


def _assign(executors: Sequence[Executor], chains: Sequence[Chain], module: nn.Module) -> None:
    """Give the executors the chains' modules below this one."""
    for executor, chain in zip(executors, chains, strict=True):
        executor.members = chain.members(module)


def _situation(executors: Sequence[Executor], x: Tensor) -> tuple | None:
    """All that decides whether a chain of a forward on x runs fused; None where that is not decided."""
    if any([executor.members is None for executor in executors]):
        return None
    return tuple([executor.situation(x) for executor in executors])
