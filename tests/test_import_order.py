"""Imports point one way: a module imports its own part of nasfast and those before it. The core needs no research."""

import ast
from pathlib import Path

import nasfast

PARTS = """
config display extensions seeds runtime spaces settings ops supernet fusion engine data train indicators search
shrink retrain measure report pipeline cli research __main__
""".split()
ROOT = Path(nasfast.__file__).parent


def place(module: str) -> int:
    """Place of a module's part; -1 for other names."""
    part = module.split(".")[0]
    return PARTS.index(part) if part in PARTS else -1


def violations(module: str, source: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {f"{node.module}.{a.name}" for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}
    found = sorted(name.removeprefix("nasfast.") for name in names if name.startswith("nasfast."))
    private = [name for name in found if name.split(".")[0] == "_emulation" and not module.startswith("ops")]
    return [f"{module} imports {name}" for name in found if place(name) > place(module) or name in private]


def test_imports_point_one_way():
    paths = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    modules = {p: ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in paths}
    assert [name for name in modules.values() if place(name) < 0] == []
    assert [line for path, module in modules.items() for line in violations(module, path.read_text())] == []


def test_a_wrong_import_is_found():
    assert violations("spaces.arch", "from nasfast.supernet import Supernet")
    assert violations("cli.main", "from nasfast.research.studies import commands")
    assert violations("train.loop", "from nasfast import _emulation")
    assert not violations("train.loop", "import torch\nfrom nasfast.supernet.blocks import x")
