"""Tables of the user's own costs through the command line: limits, fronts, the score, and the report."""

from __future__ import annotations

import json
import random

import pytest
from tiny import tiny_space

from nasfast.cli.main import main
from nasfast.indicators.table import IndicatorTable
from nasfast.search import load_candidates
from nasfast.spaces import SKIP, read_cost_table


@pytest.fixture
def run(tmp_path):
    """A run directory that the search can begin with, and a file of latencies."""
    space, rng = tiny_space(), random.Random(0)
    folder = tmp_path / "run"
    folder.mkdir()
    space.save(folder / "space.yaml")
    rows = [{v: rng.uniform(0.1, 1) for v in layer.options} for layer in space.layers]
    IndicatorTable.of_rows(space, rows, {}).save(folder / "indicators.json")
    entries = [
        {"layer": i, "choice": v, "value": round(rng.uniform(1, 3), 2)}
        for i, layer in enumerate(space.layers)
        for v in layer.options
        if v != SKIP
    ]
    form = {"quantity": "latency", "unit": "ms", "about": "measured <here>", "fingerprint": space.fingerprint}
    (tmp_path / "latency.json").write_text(json.dumps({**form, "entries": entries}))
    return folder, tmp_path / "latency.json", space


def test_a_latency_limit_reaches_result_and_report(run, capsys):
    folder, file, space = run
    flags = ["search", "--out", str(folder), "--search.latency_table", str(file), "--search.top_k", "2"]
    assert main([*flags, "--search.max_latency_ms", "7.5"]) == 0
    shown = capsys.readouterr().out
    table, result = read_cost_table(file, space), load_candidates(folder / "archs.json", space)
    (limit,) = result.tables
    assert (limit.maximum, limit.about) == (7.5, "measured <here>")
    assert len(limit.pareto) > 1 and len(result.pareto) > 1
    for candidate in result.candidates:
        assert candidate.values == (table.cost(candidate.arch),) and candidate.values[0] <= 7.5
        assert f"{candidate.values[0]:.4g} ms latency" in shown
    assert "latency: measured <here>" in shown
    assert main(["report", "--out", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "7.5 ms of latency" in page and "Latency: measured &lt;here&gt;." in page and "latency, ms" in page
    assert (folder / "report" / "pareto_0.svg").exists()
    assert main([*flags, "--search.max_latency_ms", "1"]) == 1
    assert "max_latency_ms=1 cannot be met: the smallest architecture of space 'tiny' has" in capsys.readouterr().err
    assert load_candidates(folder / "archs.json", space) == result


def test_a_limit_of_a_table_names_where_it_is_set(run, tmp_path, capsys):
    folder, file, _ = run
    energy = tmp_path / "energy.json"
    energy.write_text(json.dumps({**json.loads(file.read_text()), "quantity": "energy", "unit": "mJ"}))
    assert main(["search", "--out", str(folder), "--search.tables", json.dumps([f"{energy} <= 1"])]) == 1
    assert "mJ; raise its limit in search.tables to at least that" in capsys.readouterr().err


def test_a_table_is_the_score(run, capsys):
    folder, file, space = run
    assert main(["search", "--out", str(folder), "--score.table", str(file)]) == 0  # a table of no known origin
    assert main(["score", "--out", str(folder), "--score.table", str(file)]) == 0
    assert main(["search", "--out", str(folder), "--search.top_k", "1"]) == 0
    result = load_candidates(folder / "archs.json", space)
    (best,) = result.candidates
    # what the results keep of their settings, for pages that compare runs
    assert (result.settings.top_k, result.settings.method, result.scored_with) == (1, "auto", None)
    assert IndicatorTable.load(folder / "indicators.json").meta["settings"]["score"]["table"] == str(file)
    costs = read_cost_table(file, space)
    fastest = tuple(min(layer.options, key=lambda v, i=i: costs.integers[i][v]) for i, layer in enumerate(space.layers))
    assert best.arch == fastest
    assert best.score == pytest.approx(-costs.cost(fastest))
    capsys.readouterr()
    other = file.with_name("other.json")
    other.write_bytes(file.read_bytes())
    assert main(["search", "--out", str(folder), "--score.table", str(other)]) == 1
    assert f"the settings say 'table {other}'" in capsys.readouterr().err
