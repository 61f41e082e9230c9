"""Imports point one way: a module of nasfast imports only its own part and those further left in LAYERS."""

import ast
from pathlib import Path

import nasfast

# a part is a package, or a module apart from its package; parts of one layer do not import each other
LAYERS = """
config display seeds | runtime | settings spaces | indicators.accuracies indicators.table studies.registry |
indicators.structure search | indicators.rank ops | fusion supernet | engine data | analysis tasks train | cells |
nasi | indicators | settings.run | measure report retrain | studies | stages | pipeline | stability | cli | __main__
"""
PLACE = {part: place for place, layer in enumerate(LAYERS.split("|")) for part in layer.split()}
# a search needs no torch, and help must not wait for it
TORCH_FREE = set("config display seeds settings settings.run spaces search studies.registry cli".split())
TORCH_FREE |= {f"indicators.{module}" for module in ("accuracies", "config", "rank", "structure", "table")}
ROOT = Path(nasfast.__file__).parent
PATHS = [p for p in ROOT.rglob("*.py") if "_triton" not in p.parts and p != ROOT / "__init__.py"]


def part_of(module: str) -> str:
    return max((part for part in PLACE if f"{module}.".startswith(f"{part}.")), key=len, default="")


def violations(module: str, source: str) -> list[str]:
    nodes, own, found = list(ast.walk(ast.parse(source))), part_of(module), []
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {f"{node.module}.{a.name}" for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}
    for top, _, target in sorted(name.partition(".") for name in names):
        if top == "torch" and {own, module} & TORCH_FREE and module != "cli.commands":
            found.append(f"{module} imports torch")
        elif top == "nasfast" and target.split(".")[0] in ("_C", "_triton"):
            found += [] if own == "ops" else [f"{module} imports {target}: only ops may"]
        elif top == "nasfast" and (part := part_of(target)) not in ("", own) and PLACE[part] >= PLACE[own]:
            found.append(f"{module} imports {target}: {own} is not behind {part}")
    return found


def test_imports_point_one_way():
    modules = {p: ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in PATHS}
    assert [line for path, module in modules.items() for line in violations(module, path.read_text())] == []


def test_a_wrong_import_is_found():
    assert violations("spaces.arch", "from nasfast.supernet import Supernet")
    assert violations("search.exact", "def f():\n    import torch.nn") == ["search.exact imports torch"]
    assert violations("train.loop", "from nasfast import _C")
    assert not violations("train.loop", "import torch\nfrom nasfast.supernet.blocks import x")
