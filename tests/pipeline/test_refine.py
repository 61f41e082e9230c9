"""`search --search.refine`: the exact search runs on the refined table, and files that cannot refine are refused."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from digits_runs import EVOLUTION, run_fails, write_config
from tiny import tiny_space

from nasfast.cli.main import main
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline.resolve import resolved
from nasfast.report import write_report
from nasfast.search import load_candidates
from nasfast.settings import RunConfig

SPACE = tiny_space(num_classes=10)
ARCHS = list(itertools.product(range(3), repeat=4))


@pytest.fixture
def scored(tmp_path, config):
    """A run directory as the score stage leaves it, with a table in which the first candidates are best."""
    out = tmp_path / "run"
    out.mkdir()
    resolved(RunConfig.load(config).replace(out=str(out))).save(out / "config.yaml")
    SPACE.save(out / "space.yaml")
    rows = [{v: -float(v) for v in layer.options} for layer in SPACE.layers]
    IndicatorTable.of_rows(SPACE, rows, {"score": "path_loss", "step": 1}).save(out / "indicators.json")
    return out


def write_accuracies(path, archs):
    """Accuracies in which the last candidates of the first two layers are best, against the table."""
    path.write_text(json.dumps({"".join(map(str, a)): 50.0 + 3 * a[0] + 2 * a[1] - a[2] - a[3] / 2 for a in archs}))
    return path


@pytest.mark.slow
def test_the_exact_search_runs_on_the_refined_table(scored, small_forests, tmp_path, capsys):
    table = write_accuracies(tmp_path / "accuracies.json", random.Random(0).sample(ARCHS, 60))
    assert main(["search", "--out", str(scored), "--search.max_macs", "null"]) == 0
    before = load_candidates(scored / "archs.json").candidates[0].arch
    assert before == (0, 0, 0, 0)
    assert main(["search", "--out", str(scored), "--search.refine", str(table)]) == 0
    refined = IndicatorTable.load(scored / "refined.json")
    best = load_candidates(scored / "archs.json").candidates[0]
    assert best.optimal and best.arch == max(ARCHS, key=refined.score)
    assert best.arch == (2, 2, 0, 0)
    said = "The proof is about the score only. The accuracies of 60 architectures are added to the score: "
    assert said in capsys.readouterr().out
    write_report(scored)
    assert said in (scored / "report.html").read_text()
    assert IndicatorTable.load(scored / "indicators.json").scores[0] == {0: 0.0, 1: -1.0, 2: -2.0}
    # a search without the accuracies is what it was
    assert main(["search", "--out", str(scored), "--search.refine", "null"]) == 0
    assert load_candidates(scored / "archs.json").candidates[0].arch == before
    assert not (scored / "refined.json").exists()


def test_files_that_cannot_refine_cost_nothing(scored, tmp_path, capsys):
    assert main(["search", "--out", str(scored)]) == 0
    before = {path.name: path.read_bytes() for path in scored.iterdir()}
    few = write_accuracies(tmp_path / "few.json", ARCHS[:9])
    for path, message in (
        (few, "has 9 architectures, at least 10 are needed"),
        (tmp_path / "none.json", "cannot read"),
    ):
        assert main(["search", "--out", str(scored), "--search.refine", str(path)]) == 1
        assert message in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in scored.iterdir()} == before


def test_they_are_refused_before_training(tmp_path, config, monkeypatch, capsys):
    few = write_accuracies(tmp_path / "few.json", ARCHS[:9])
    run_fails(tmp_path / "a", config, "--search.refine", str(few), monkeypatch=monkeypatch)
    assert "has 9 architectures" in capsys.readouterr().err
    table = write_accuracies(tmp_path / "many.json", ARCHS)
    paths = write_config(tmp_path / "spos", method="spos", search=EVOLUTION)
    run_fails(tmp_path / "b", paths, "--search.refine", str(table), monkeypatch=monkeypatch)
    assert "search.refine refines a table, and 'recalibrated_accuracy' scores whole paths" in capsys.readouterr().err
