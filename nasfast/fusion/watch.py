"""Whether modules are still as they were when something was decided about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn

from nasfast.ops import _native

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> tuple[dict, ...]:
    """The dictionaries of the hooks that a call of the module runs."""
    return tuple(vars(module)[name] for name in HOOKS)


class Watch:
    """A snapshot that `same` compares with the present.

    It runs before every chain, when the convolutions of the model fill the caches. So `same` first asks Python whether
    any dictionary was changed at all, by their version numbers: one number per dictionary. Only if one was, and where
    there are no such numbers, does it read the entries.

    Args:
        places: dictionaries and keys; the same object must be there, or still nothing.
        modules: of these, the class, the function that is the class's forward, the instance's own forward, the
            submodules if it has any, and whether there are hooks must be the same.
        functions: classes and names of further functions that must be the same.
    """

    def __init__(
        self,
        places: Iterable[tuple[dict[str, Any], str]] = (),
        modules: Iterable[nn.Module] = (),
        functions: Iterable[tuple[type, str]] = (),
    ) -> None:
        places = list(places)
        self._modules = list(dict.fromkeys(modules))
        parents = [module for module in self._modules if module._modules]
        for module in self._modules:
            places.append((vars(module), "forward"))
        for module in parents:
            places.append((vars(module), "_modules"))
            places += [(module._modules, name) for name in module._modules]
        self._dictionaries, self._keys = _columns(places)
        self._hooked, self._hooks = _columns([(vars(module), name) for module in self._modules for name in HOOKS])
        self._children = [module._modules for module in parents]
        # before anything is read: what another thread changes meanwhile is then seen
        self._state = self._state_now()
        self._objects = list(map(dict.get, self._dictionaries, self._keys))
        self._numbers = list(map(len, self._children))
        self._classes = list(map(type, self._modules))
        functions = dict.fromkeys([*functions, *((cls, "forward") for cls in self._classes)])
        self._owners, self._names = _columns(functions)
        self._functions = list(map(getattr, self._owners, self._names, repeat(None)))
        self._has_hooks = self._find_hooks()

    def same(self) -> bool:
        """Whether everything is as it was."""
        return self._same_objects() and all(
            map(is_, map(getattr, self._owners, self._names, repeat(None)), self._functions)
        )

    def _same_objects(self) -> bool:
        """Whether everything but the functions is as it was."""
        if _VERSIONS is not None and self._state is not None:
            dictionaries, versions = self._state
            if versions == _VERSIONS(dictionaries, self._modules):
                return True
        state = self._state_now()
        same = (
            all(map(is_, map(dict.get, self._dictionaries, self._keys), self._objects))
            and self._find_hooks() == self._has_hooks
            and list(map(len, self._children)) == self._numbers
            and all(map(is_, map(type, self._modules), self._classes))
        )
        if same:
            self._state = state
        return same

    def _state_now(self) -> tuple[list[dict], bytes] | None:
        """All dictionaries, and their versions with the classes of the modules; None where Python has no versions."""
        if _VERSIONS is None:
            return None
        hooks = map(dict.__getitem__, self._hooked, self._hooks)
        every = [*self._dictionaries, *self._hooked, *hooks, *self._children]
        unique = list({id(one): one for one in every}.values())
        return unique, _VERSIONS(unique, self._modules)

    def _find_hooks(self) -> list[bool]:
        """For each dictionary of hooks whether it has any; nothing if none has."""
        if not any(map(dict.__getitem__, self._hooked, self._hooks)):
            return []
        return list(map(bool, map(dict.__getitem__, self._hooked, self._hooks)))


def _columns(pairs: Iterable[tuple[Any, str]]) -> tuple[list[Any], list[str]]:
    pairs = list(pairs)
    return [one for one, _ in pairs], [other for _, other in pairs]


# None in Python 3.13, and without the extension or with one of an older version
_VERSIONS: Callable[[list[dict], list[nn.Module]], bytes] | None = getattr(_native.extension, "versions", None)
