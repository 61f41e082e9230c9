"""Old names of what has moved still work, and say where it is now."""

from __future__ import annotations

import importlib
import sys

import pytest

import nasfast.ops
from nasfast.runtime import moved


@pytest.mark.parametrize(("old", "new"), moved.MODULES.items())
def test_an_old_module_name_gives_the_new_module(old, new, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    there = importlib.import_module(new)
    specification = there.__spec__
    with pytest.warns(FutureWarning, match=f"{old} is now {new}"):
        assert importlib.import_module(old) is there
    assert there.__spec__ is specification and specification.name == new


@pytest.mark.parametrize(
    ("old", "name"), [(old, name) for old, names in {**moved.NAMES, **moved.SCATTERED}.items() for name in names]
)
def test_an_old_name_is_what_its_new_home_has(old, name):
    new = {**moved.NAMES, **moved.SCATTERED}[old][name]
    with pytest.warns(FutureWarning, match=f"{old}.{name} is now {new}.{name}"):
        found = getattr(importlib.import_module(old), name)
    assert found is getattr(importlib.import_module(new), name)


@pytest.mark.filterwarnings("ignore:nasfast.* is now:FutureWarning")
def test_two_imports_of_old_names_at_once_keep_the_specifications(monkeypatch):
    finder, begun = moved._MovedModules(), []
    for old in ("nasfast.files", "nasfast.lock"):  # as two threads may: both begin before one ends
        specification = finder.find_spec(old)
        module = finder.create_module(specification)
        begun.append((module, module.__spec__))
        monkeypatch.setattr(module, "__spec__", specification)
    for module, its_own in begun:
        finder.exec_module(module)
        assert module.__spec__ is its_own


def test_a_name_that_never_was():
    with pytest.raises(AttributeError, match="'nasfast.ops' has no attribute 'fuze'"):
        nasfast.ops.fuze  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'serch' from 'nasfast.cells.nasi'"):
        from nasfast.cells.nasi import serch  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="nasfast.tming"):
        importlib.import_module("nasfast.tming")


def test_the_script_of_an_earlier_installation_works(capsys):
    from nasfast.cli import main

    assert main(["--help"]) == 0
    assert "usage: nasfast COMMAND" in capsys.readouterr().out
