"""What every forward that `fuse` gives to a module has in common."""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_state


class ReplacedForward:
    """Replaces the forward of a module; an object, so that it is copied and pickled with the module.

    It has a weak reference to the module: a cycle would keep the memory of a deleted model until the next garbage
    collection.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                "the module of this fused forward was deleted; keep the model while its forward is used"
            )
        return module

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


def must_run_unfused() -> bool:
    """Whether tracers need the plain operators now, or global hooks see every module."""
    return torch.jit.is_tracing() or module_state._has_any_global_hook()
