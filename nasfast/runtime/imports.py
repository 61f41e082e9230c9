"""Modules of the user's own that a process imports first, such as those that register block kinds. No torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_imported: list[str] = []


def imported() -> tuple[str, ...]:
    """What `import_modules` has imported in this process; its worker processes import the same."""
    return tuple(_imported)


def import_modules(names: Iterable[str]) -> None:
    """Import modules of the user's, each once per process; ValueError says which failed and why.

    A name is that of a module, which the current folder may have, or the path of a Python file.
    """
    for name in names:
        is_file = name.endswith(".py")
        # worker processes may run in another folder
        name = str(Path(name).resolve()) if is_file else name
        if name in _imported:
            continue
        try:
            if is_file:
                _import_file(Path(name))
            else:
                # the script `nasfast` does not look into the current folder, as `python -m` does
                if "" not in sys.path and os.getcwd() not in sys.path:
                    sys.path.append(os.getcwd())
                importlib.import_module(name)
        except Exception as error:
            raise ValueError(f"--import {name}: {type(error).__name__}: {error}") from error
        _imported.append(name)


def _import_file(path: Path) -> None:
    """Import a file as the module of its name."""
    if not path.is_file():
        raise ImportError("there is no such file")
    if path.stem in sys.modules:
        raise ImportError(f"a module {path.stem!r} is imported already: give the file another name")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None, "the name ends with .py"
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
