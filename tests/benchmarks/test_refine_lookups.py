"""The lookups of refined tables: every row is in the file, and a table that knows the accuracies is left as it is."""

from __future__ import annotations

import itertools
import json

import pytest
from tiny import tiny_macro_space

from benchmarks import bench_refine
from nasfast.indicators.structure import structure_scores


@pytest.mark.parametrize("known", [True, False])
def test_the_curve(tmp_path, monkeypatch, capsys, known):
    monkeypatch.setattr(bench_refine, "nas_bench_macro", tiny_macro_space)
    space = tiny_macro_space()
    archs = list(itertools.product(range(3), repeat=4))
    values = structure_scores(space, "sqrt_size" if known else "params", archs)
    percent = [90 * v / max(values) for v in values]
    (tmp_path / "truth.json").write_text(
        json.dumps({"".join(map(str, a)): v + 1e-6 * i for i, (a, v) in enumerate(zip(archs, percent, strict=True))})
    )
    out = tmp_path / "out.jsonl"
    argv = [f"--accuracies={tmp_path / 'truth.json'}", f"--out={out}", "--draws=3", "--priors", "sqrt_size"]
    bench_refine.main([*argv, "--counts", "8", "40", "--noise", "0"])
    few, many = (json.loads(line) for line in out.read_text().splitlines()[1:])
    assert few["used"] == [False] * 3 and few["gain"] == [0] * 3
    assert many["used"] == [not known] * 3
    assert all(gain == 0 if known else gain > 0.1 for gain in many["gain"])
    shown = capsys.readouterr().out
    assert f"| sqrt_size | 0 | 40 | {0 if known else 3} of 3 |" in shown
