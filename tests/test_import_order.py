"""Imports point one way: which part of nasfast may import which, read from the sources.

The order is that of the design: `spaces -> supernet -> ops`, and `train -> indicators -> search -> retrain`, which meet
through files: the search reads a table and no network. A part is a package or module of nasfast. `indicators` is
several parts, because its table and its ranking must work without torch, and the search must not import the modules
that read a supernet.

The other rules: no cycle between modules, imports for type checkers included; functions import only optional packages
and never nasfast; only `ops` imports `_C` and `_triton`; the parts that a search needs do not import torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest
from imports import NATIVE, imports_in, read_sources

# part -> parts that it may import; a new part must be added here
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "display": set(),
    "seeds": set(),
    "runtime.arguments": set(),
    "runtime.files": set(),
    "runtime.late": set(),
    "runtime.imports": set(),
    "runtime.launcher": set(),
    "runtime.lock": {"runtime.files"},
    "runtime.moved": set(),
    "runtime.progress": set(),
    "runtime.termination": set(),
    "runtime.tracking": {"config"},
    "runtime": {"config", "runtime.launcher"},
    "settings": {"config", "runtime.moved"},
    "settings.run": {"config", "settings", "spaces", "indicators.config", "search", "runtime"},
    "tasks": {
        "config", "runtime.files", "runtime.imports", "runtime.lock", "runtime.progress", "runtime.termination",
        "runtime", "settings",
    },
    "spaces": {"config", "display", "runtime.moved"},
    "ops": {"runtime.files", "runtime.moved"},
    "fusion": {"ops"},
    "supernet": {"runtime.arguments", "config", "spaces", "ops", "settings"},
    "data": {"config", "runtime.files", "runtime.moved", "seeds", "settings"},
    "engine": {"spaces", "supernet", "ops"},
    "analysis.meanfield": set(),
    "analysis.concentration": {"ops"},
    "analysis": {
        "config", "spaces", "ops", "supernet", "indicators.table", "analysis.concentration",
        "analysis.meanfield", "settings",
    },
    "train": {
        "runtime.arguments",
        "config", "runtime.files", "runtime.lock", "runtime.moved", "runtime.progress", "runtime.termination",
        "runtime.tracking", "runtime", "spaces", "ops", "supernet", "engine", "settings",
    },
    "cells": {
        "config", "seeds", "runtime.files", "runtime.moved", "spaces", "ops", "supernet", "engine", "train",
        "settings",
    },
    "indicators.table": {"display", "runtime.files", "spaces"},
    "indicators.structure": {"config", "spaces", "indicators.table"},
    "indicators.accuracies": {"spaces"},
    "indicators.rank": {
        "runtime.arguments",
        "runtime.files", "spaces", "indicators.accuracies", "indicators.structure", "indicators.table",
    },
    "nasi": {
        "config", "seeds", "runtime.files", "runtime.moved", "spaces", "supernet", "train", "cells",
        "indicators.table", "settings",
    },
    "indicators": {
        "runtime.arguments",
        "config", "runtime.files", "spaces", "supernet", "train", "nasi", "indicators.accuracies", "indicators.rank",
        "indicators.structure", "indicators.table",
    },
    "indicators.config": {"config", "settings", "indicators"},
    "search": {"runtime.arguments", "config", "display", "runtime.files", "spaces", "indicators.table"},
    "retrain": {
        "runtime.arguments",
        "config", "runtime.files", "runtime.lock", "runtime", "spaces", "supernet", "data", "train", "cells",
        "settings",
    },
    "report": {
        "config", "runtime.files", "runtime.moved", "runtime.progress", "spaces", "indicators.table",
        "indicators.rank", "search", "settings", "settings.run",
    },
    "measure": {
        "config", "runtime.files", "runtime.moved", "runtime", "ops", "fusion", "spaces", "supernet", "engine",
        "train", "settings",
    },
    "studies.registry": set(),
    "studies": {"config", "runtime.files", "runtime", "measure", "report", "settings", "studies.registry"},
    "studies.isometry": {
        "config", "spaces", "ops", "supernet", "train", "indicators", "measure", "analysis", "analysis.meanfield",
        "report", "studies", "runtime.late", "settings",
    },
    "studies.moments": {
        "config", "runtime", "spaces", "supernet", "data", "analysis", "report", "studies", "runtime.late",
        "settings",
    },
    "studies.nasi": {
        "config", "seeds", "runtime.files", "runtime", "spaces", "cells", "nasi", "data", "indicators.accuracies",
        "indicators.rank", "indicators.table", "report", "studies", "runtime.late", "settings",
    },
    "studies.wiring": {
        "config", "runtime.files", "runtime", "spaces", "supernet", "cells", "data", "train", "report",
        "studies", "runtime.late", "settings", "tasks",
    },
    "stages": {
        "config", "runtime", "settings", "spaces", "supernet", "data", "train", "indicators", "indicators.accuracies",
        "search", "retrain", "settings.run", "tasks", "runtime.lock", "runtime.progress", "runtime.tracking",
    },
    "pipeline": {
        "runtime.arguments",
        "config", "display", "runtime.files", "runtime.lock", "runtime.progress", "runtime.termination",
        "runtime.tracking", "runtime", "spaces", "supernet", "train", "indicators", "indicators.accuracies",
        "indicators.table", "search", "retrain", "report", "measure", "settings", "stages", "settings.run",
    },
    "stability": {
        "config", "runtime.files", "runtime.lock", "runtime.progress", "runtime.tracking", "runtime", "spaces",
        "supernet", "engine",
        "data", "train",
        "measure", "indicators", "indicators.accuracies", "indicators.rank", "indicators.structure",
        "indicators.table", "search",
        "retrain", "report", "settings", "settings.run", "tasks", "stages", "pipeline",
    },
    "cli.commands": {
        "config", "runtime.launcher", "runtime.termination", "runtime", "settings", "settings.run", "stability",
        "spaces", "indicators", "indicators.accuracies", "indicators.table", "indicators.rank", "report", "measure",
        "search", "studies", "studies.registry", "pipeline", "stages",
    },
    "cli": {
        "config", "settings", "runtime.files", "runtime.imports", "runtime.termination", "studies.registry",
        "cli.commands", "measure",
        "runtime.launcher", "settings.run", "indicators.rank", "",
    },
    "__main__": {"cli"},
    # it imports the others only for a type checker
    "": {"runtime.moved"},
}  # fmt: skip

# Help must not wait for torch and scipy: `cli.main` imports `cli.commands` only to run one, and a config imports what
# needs them only where a value or a method asks for it.
# The launchers import Triton and its kernels, which `registry` imports only where they can run.
LATE = {
    ("nasfast.cli.main", "nasfast.cli.flags"),
    ("nasfast.cli.main", "nasfast.cli.commands"),
    ("nasfast.indicators.config", "nasfast.indicators.scores"),
    ("nasfast.search.milp", "scipy.optimize"),
    ("nasfast.settings.run", "nasfast.runtime.device"),
    ("nasfast.studies.wiring.config", "nasfast.cells.prototypes"),
    ("nasfast.studies.wiring.config", "nasfast.studies.wiring.images"),
    ("nasfast.ops.registry", "nasfast.ops.triton.bn"),
    ("nasfast.ops.registry", "nasfast.ops.triton.conv"),
    ("nasfast.ops.registry", "nasfast.ops.triton.mixed"),
    ("nasfast.ops.registry", "nasfast.ops.triton.training"),
}
TORCH_FREE = {
    "cli", "__main__", "config", "display", "seeds", "runtime.files", "runtime.imports", "runtime.lock",
    "runtime.moved", "runtime.progress", "runtime.termination", "spaces", "indicators.accuracies", "indicators.table",
    "indicators.structure", "indicators.rank", "search", "runtime.late", "runtime.launcher", "settings",
    "settings.run", "indicators.config", "studies.registry",
}  # fmt: skip
OPTIONAL = {
    "pandas", "sklearn", "onnx", "onnxruntime", "onnxscript", "timm", "nvidia", "ray", "triton", "torch_tb_profiler",
    "wandb", "mlflow",
}  # fmt: skip


def part_of(module: str) -> str:
    """`nasfast.train.loop` -> `train`; `nasfast.indicators.table` is a part of its own."""
    parts = module.split(".")[1:]
    if ".".join(parts[:2]) in ALLOWED and len(parts) > 1:
        return ".".join(parts[:2])
    return parts[0] if parts else ""


def violations(sources: Mapping[str, str]) -> list[str]:
    """Everything that breaks the rules; `sources` maps module names to source texts.

    A package stands under its own name and as `package.__init__`, which marks it as one.
    """
    names = {name.removesuffix(".__init__") for name in sources}
    problems = []
    graph: dict[str, set[str]] = {name: set() for name in names}
    for found in imports_in(sources):
        where = f"{found.module}:{found.line}"
        if found.typing_only:
            # arrows and torch matter when code runs; a circle is one for the reader too
            if found.target in names and found.module != "nasfast":
                graph[found.module].add(found.target)
            continue
        part, top = part_of(found.module), found.target.split(".")[0]
        if found.target in NATIVE or any(found.target.startswith(f"{n}.") for n in NATIVE):
            if part != "ops":
                problems.append(f"{where} imports {found.target}: only ops may")
            continue
        if top == "torch" and part in TORCH_FREE:
            problems.append(f"{where} imports torch: {part} must run without it")
        if top != "nasfast":
            if found.in_function and top not in OPTIONAL and (found.module, found.target) not in LATE:
                problems.append(f"{where} imports {found.target} inside a function: only optional packages may be")
            continue
        if found.in_function and (found.module, found.target) not in LATE:
            problems.append(f"{where} imports {found.target} inside a function: an import that dodges a cycle")
        if found.target not in names:
            problems.append(f"{where} imports {found.target}, which does not exist")
            continue
        graph[found.module].add(found.target)
        target = part_of(found.target)
        if target == part:
            continue
        if part not in ALLOWED:
            problems.append(f"{where}: part {part!r} is not in ALLOWED: add it with the parts that it may import")
        elif target not in ALLOWED[part]:
            problems.append(
                f"{where} imports {found.target}: {part or 'nasfast'} may not import {target or 'nasfast itself'}"
            )
    return problems + [f"cycle: {' -> '.join(cycle)}" for cycle in _cycles(graph)]


def _cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One cycle per entry point, found depth first; between modules, so a package that imports its modules is none."""
    done: set[str] = set()
    found = []

    def visit(node: str, path: list[str]) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
            return
        if node in done:
            return
        for target in sorted(graph.get(node, ())):
            visit(target, [*path, node])
        done.add(node)

    for node in sorted(graph):
        visit(node, [])
    return found


def test_the_package_keeps_the_order():
    assert violations(read_sources()) == []


def test_the_reader_sees_the_imports():
    """The check can fail: it finds imports that are known to exist."""
    sources = read_sources()
    seen = {(part_of(i.module), part_of(i.target)) for i in imports_in(sources) if i.target.startswith("nasfast")}
    assert {
        ("train", "supernet"),
        ("supernet", "ops"),
        ("search", "indicators.table"),
        ("cli.commands", "pipeline"),
    } <= seen
    assert {part for part in ALLOWED if part} == {part_of(n.removesuffix(".__init__")) for n in sources} - {""}


def test_the_arrows_themselves_have_no_cycle():
    assert _cycles(ALLOWED) == []
    assert ALLOWED["search"] == {
        "runtime.arguments",
        "config",
        "display",
        "runtime.files",
        "spaces",
        "indicators.table",
    }


FAKE = {
    "nasfast.__init__": "",
    "nasfast.config": "",
    "nasfast.spaces.__init__": "from nasfast.spaces.arch import Arch\n",
    "nasfast.spaces.arch": "from nasfast.config import ConfigBase\n",
    "nasfast.ops.__init__": "import torch\nfrom nasfast import _C\n",
    "nasfast.supernet.__init__": "import torch\nfrom nasfast.ops import bn_act\nfrom nasfast.spaces import Arch\n",
    "nasfast.train.__init__": "from nasfast.supernet import Supernet\n",
    "nasfast.indicators.__init__": "from nasfast.indicators.table import IndicatorTable\n",
    "nasfast.indicators.table": "from nasfast.spaces import Arch\n",
    "nasfast.search.__init__": "from nasfast.indicators.table import IndicatorTable\nimport numpy\n",
}


def test_a_good_fake_passes():
    assert violations(FAKE) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("nasfast.spaces.arch", "from nasfast.supernet import Supernet", "spaces may not import supernet"),
        ("nasfast.spaces.arch", "from ..supernet import Supernet", "spaces may not import supernet"),
        ("nasfast.config", "import nasfast.spaces", "config may not import spaces"),
        ("nasfast.search.__init__", "from nasfast.train import train", "search may not import train"),
        ("nasfast.search.__init__", "from nasfast.indicators import accuracy", "search may not import indicators"),
        ("nasfast.search.__init__", "import torch.nn as nn", "search must run without it"),
        ("nasfast.spaces.arch", "if True:\n    import torch", "spaces must run without it"),
        ("nasfast.supernet.__init__", "from nasfast import _C", "imports nasfast._C: only ops may"),
        ("nasfast.supernet.__init__", "from nasfast._triton import bn", "imports nasfast._triton: only ops may"),
        ("nasfast.train.__init__", "import importlib\nimportlib.import_module('nasfast._C')", "only ops may"),
        ("nasfast.train.__init__", "def f():\n    from nasfast.supernet import x", "inside a function"),
        ("nasfast.train.__init__", "def f():\n    import json", "imports json inside a function"),
        ("nasfast.train.__init__", "import nasfast", "train may not import nasfast itself"),
        ("nasfast.train.__init__", "import nasfast.suprnet", "which does not exist"),
        ("nasfast.spaces.arch", "from nasfast.spaces import Arch", "nasfast.spaces.arch -> nasfast.spaces"),
        (
            "nasfast.spaces.arch",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nasfast.train import train",
            "cycle: nasfast.spaces -> nasfast.spaces.arch -> nasfast.train -> nasfast.supernet -> nasfast.spaces",
        ),
        ("nasfast.attic", "from nasfast.config import ConfigBase", "part 'attic' is not in ALLOWED"),
    ],
)  # fmt: skip
def test_a_violation_is_found(module, source, message):
    problems = violations({**FAKE, module: source})
    assert any(message in problem for problem in problems), problems


def test_what_is_allowed_inside_functions_and_for_type_checkers():
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    assert violations({**FAKE, "nasfast.spaces.arch": typed}) == []
    assert violations({**FAKE, "nasfast.spaces.arch": "def f():\n    import sklearn\n"}) == []
    program = 'if __name__ == "__main__":\n    import nasfast.train\n'
    assert violations({**FAKE, "nasfast.spaces.arch": program}) == []


TORCH_FREE_USE = """
import sys
import nasfast
{use}
loaded = sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "torchvision"))
sys.exit(f"torch was imported: {{loaded[:3]}}" if loaded else 0)
"""


@pytest.mark.parametrize(
    "use",
    [
        "nasfast.__version__; dir(nasfast)",
        "from nasfast.cli.main import main; main(['--help'])",
        "nasfast.spaces.FairSampler(nasfast.spaces.mobilenet_v2()).step()",
        "s = nasfast.spaces.digits_mini()\n"
        "t = nasfast.IndicatorTable(s, tuple({c: 1.0 + c for c in u.options} for u in s.layers), (None,) * 6)\n"
        "assert nasfast.search(t, s, top_k=1)[0].arch == (5,) * 6\n"
        "nasfast.rank",
    ],
    ids=["import nasfast", "usage", "nasfast.spaces", "nasfast.search"],
)
def test_torch_stays_unloaded(use):
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", TORCH_FREE_USE.format(use=use)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
