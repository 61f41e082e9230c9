"""The notebook of the documentation was executed as a whole, and its code runs."""

from __future__ import annotations

import json
import re
import sys
import types

import pytest
from doc_links import ROOT

NOTEBOOK = ROOT / "docs" / "digits.ipynb"
CODE = [c for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]

LESS = {"epochs=12": "epochs=2", "paths=120": "paths=48", "epochs=5": "epochs=1"}


def test_every_cell_was_executed_in_order_and_none_failed():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_code_runs(monkeypatch, capsys):
    """As one program, with less training; of IPython, which tests do not need, it takes only what shows the figure."""
    display = types.ModuleType("IPython.display")
    display.SVG = str
    package = types.ModuleType("IPython")
    package.version_info = (9, 0)  # matplotlib reads it
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict[str, object] = {}
    for number, cell in enumerate(CODE, 1):
        source = re.sub(r"\b(epochs|paths)=\d+", lambda found: LESS[found[0]], "".join(cell["source"]))
        exec(compile(source, f"cell {number}", "exec"), names)
    assert "architectures of 6 layers" in capsys.readouterr().out
    assert names["best"].optimal and names["best"].macs <= names["limit"]
    assert 0.2 < names["found"] <= 1 and len(names["peers"]) == 2
