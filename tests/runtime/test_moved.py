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


@pytest.mark.parametrize("name", moved.NAMES["nasfast.ops"])
def test_an_old_name_of_the_operators_is_that_of_fusion(name):
    fusion = importlib.import_module("nasfast.fusion")
    with pytest.warns(FutureWarning, match=f"nasfast.ops.{name} is now nasfast.fusion.{name}"):
        assert getattr(nasfast.ops, name) is getattr(fusion, name)


def test_a_name_that_never_was():
    with pytest.raises(AttributeError, match="'nasfast.ops' has no attribute 'fuze'"):
        nasfast.ops.fuze  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="nasfast.tming"):
        importlib.import_module("nasfast.tming")
