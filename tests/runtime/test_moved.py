"""Old names of what has moved still work, and say where it is now."""

from __future__ import annotations

import importlib
import subprocess
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
    home, _, renamed = {**moved.NAMES, **moved.SCATTERED}[old][name].partition(":")
    new = renamed or name
    with pytest.warns(FutureWarning, match=f"{old}.{name} is now {home}.{new};") as caught:
        found = getattr(importlib.import_module(old), name)
    assert found is getattr(importlib.import_module(home), new)
    assert [warning.filename for warning in caught] == [__file__], "Python hides it if it is not of the caller's line"


@pytest.mark.slow
def test_a_module_that_was_a_function_too_can_still_be_called():
    """This runs in a process of its own, because an import of `nasfast.ops.fuse` binds that name for good."""
    code = """if True:
        import torch, warnings
        warnings.simplefilter("error")
        warnings.filterwarnings("always", "nasfast.*is now nasfast.fusion")
        import nasfast.ops
        function = nasfast.ops.fuse
        from nasfast.ops.fuse import FuseReport
        assert nasfast.ops.fuse is not function
        conv = torch.nn.Conv2d(2, 2, 1, bias=False).requires_grad_(False)
        report = nasfast.ops.fuse(torch.nn.Sequential(conv, torch.nn.BatchNorm2d(2)))
        assert isinstance(report, FuseReport), report
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split(": ", 1)[1] for line in done.stderr.splitlines() if "Warning" in line]
    old = [line.split(" is now ")[0] for line in lines]
    assert old == [f"FutureWarning: nasfast.ops.{name}" for name in ("fuse", "fuse.FuseReport", "fuse")]
    assert done.stderr.count("<string>") == 3, "each names a line of the caller"


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
