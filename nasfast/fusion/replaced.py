"""What every forward that `fuse` gives to a module has in common, and how it sees that modules have changed."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_state

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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

    def __reduce__(self) -> tuple:
        return type(self), (self.module,)

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


def hooks_of(module: nn.Module) -> tuple[dict, ...]:
    """The dictionaries of the hooks that a call of the module runs."""
    return tuple(vars(module)[name] for name in HOOKS)


class Watch:
    """A snapshot of a module and of modules below it that `same` compares with the present, object by object.

    It does not keep the owner alive, whose forward has the watch.

    Args:
        owner: its class, the forward of its class and its submodules must be the same.
        own: names of further attributes of the owner.
        modules: of these, the class, the forward of the class, the instance's own forward, the submodules and whether
            there are hooks must be the same.
        places: dictionaries and keys; the same object must be there, or still nothing.
    """

    def __init__(
        self,
        owner: nn.Module,
        own: Iterable[str] = (),
        modules: Iterable[nn.Module] = (),
        places: Iterable[tuple[dict[str, Any], str]] = (),
    ) -> None:
        self._modules = list(dict.fromkeys(modules))
        parents = [module for module in self._modules if module._modules]
        self._children = [owner._modules, *(module._modules for module in parents)]
        every = [*places, *((vars(m), "forward") for m in self._modules), *((vars(m), "_modules") for m in parents)]
        every += [(children, name) for children in self._children for name in children]
        self._dictionaries, self._keys = _columns(every)
        self._objects = list(map(dict.get, self._dictionaries, self._keys))
        self._numbers = list(map(len, self._children))
        self._owner_class, self._own = type(owner), ["_modules", *own]
        self._values = list(map(vars(owner).get, self._own))
        self._classes = list(map(type, self._modules))
        classes = {type(owner), *self._classes}
        # a convolution's forward calls this method
        convolving = [(cls, "_conv_forward") for cls in classes if issubclass(cls, nn.Conv2d)]
        self._owners, self._names = _columns([*((cls, "forward") for cls in classes), *convolving])
        self._functions = list(map(getattr, self._owners, self._names))
        self._hooked, self._hooks = _columns((vars(module), name) for module in self._modules for name in HOOKS)
        self._has_hooks = self._find_hooks()

    def same(self, owner: nn.Module) -> bool:
        """Whether everything is as it was."""
        return (
            type(owner) is self._owner_class
            and all(map(is_, map(vars(owner).get, self._own), self._values))
            and all(map(is_, map(dict.get, self._dictionaries, self._keys), self._objects))
            and all(map(is_, map(type, self._modules), self._classes))
            and all(map(is_, map(getattr, self._owners, self._names, repeat(None)), self._functions))
            and list(map(len, self._children)) == self._numbers
            and self._find_hooks() == self._has_hooks
        )

    def _find_hooks(self) -> list[bool]:
        """For each dictionary of hooks whether it has any; nothing if none has."""
        if not any(map(dict.__getitem__, self._hooked, self._hooks)):
            return []
        return list(map(bool, map(dict.__getitem__, self._hooked, self._hooks)))


def _columns(pairs: Iterable[tuple[Any, str]]) -> tuple[list[Any], list[str]]:
    pairs = list(pairs)
    return [one for one, _ in pairs], [other for _, other in pairs]
