"""The NASI study with tiny settings: its report, its files, and its commands."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import write_folder

from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.indicators import IndicatorTable
from nasfast.research.cells.prototypes import prototypes
from nasfast.research.nasi.spaces import CellMixture
from nasfast.research.studies.nasi.config import NasiCompareConfig, NasiQuickConfig, NasiSearchConfig
from nasfast.research.studies.nasi.measure import enumerate_space, slope, small_space
from nasfast.research.studies.run import run_study
from nasfast.search import search_table
from nasfast.spaces import SearchSpace, load_arch, nas_bench_macro, read_space

CELLS = {"cells": 2, "channels": 4, "resolution": 8, "steps": 3, "batch": 4, "threads": 1}
TINY = {"resolution": 8, "steps": 2, "batch": 4, "threads": 1}


def table(report, start: str):
    return next(t for t in report.tables if t.title.startswith(start))


@pytest.mark.slow
def test_quick_tells_marks_and_tables(tmp_path):
    cfg = NasiQuickConfig(cells=3, images=16, repeats=1, train_steps=2, steps=3, seeds=1, exact=3, threads=1)
    report = run_study("nasi quick", cfg)
    names = [check.name for check in report.checks]
    # section 6: spread, three correlations with accuracy, four of Q; two for each kind of search; and the time
    assert len(names) == len(set(names)) == 1 + 3 + 4 + 2 * 7 + 1
    assert [row[0] for row in table(report, "random cells").rows] == [
        "Q, standard",
        "Q, random labels",
        "Q, random images",
        "parameters",
    ]
    assert len(table(report, "searches").rows) == 10
    closed = {row[0]: row for row in table(report, "one step").rows}
    assert closed["closed form, exact gradient"][1] == "1.000"
    assert float(closed["largest E[Q] of norm 1, ascent"][2]) >= float(closed["closed form, exact gradient"][2]) - 1e-6
    page = report.save(tmp_path)
    assert page.name == "nasi-quick.html" and "pass marks met" in page.read_text(encoding="utf-8")
    assert len(list((tmp_path / "nasi-quick").glob("*.svg"))) == 4


def test_the_expectation_is_that_of_the_enumeration_and_the_closed_form_is_its_best_direction():
    space, ((x, y), _) = small_space(), prototypes(3.0, 8, 1)
    mixture = CellMixture(space).double()
    archs, q = enumerate_space(mixture, space, x.double(), y)
    assert len(archs) == len(q) == space.cardinality == 27 and float(q.min()) > 0
    # sum_A p(A) Q(A) (1[A_e = k] - 1 / K) at alpha = 0
    gradient = slope(archs, q, torch.zeros(mixture.allowed.shape, dtype=torch.float64))
    by_hand = [[q[[arch[e] == k for arch in archs]].sum() - q.sum() / 3 for k in range(3)] for e in range(3)]
    torch.testing.assert_close(gradient, torch.tensor(by_hand)[None] / 27)
    # no direction of norm 1 gains more to first order than the closed form
    directions = torch.randn(5000, gradient.numel(), dtype=torch.float64)
    gains = (directions / directions.norm(dim=1, keepdim=True)) @ gradient.flatten()
    assert 0.5 * float(gradient.norm()) < float(gains.max()) <= float(gradient.norm())


@pytest.mark.parametrize("space", ["nas_bench_201", "choice_blocks", pytest.param("darts", marks=pytest.mark.slow)])
def test_a_search_of_cells_writes_its_architecture(tmp_path, space):
    report = run_study("nasi search", NasiSearchConfig(space=space, **CELLS), out=tmp_path)
    written = read_space(tmp_path / "space.yaml")
    arch = load_arch(tmp_path / "arch_nasi.json", written)
    assert report.tables[0].rows[0][1] == " ".join(written.ops[k] for k in arch)
    assert written.num_classes == 10 and written.resolution == 8
    if space != "nas_bench_201":
        none = written.ops.index("none")
        nodes = written.cell.inner
        kept = [sum(arch[e] != none for e in written.cell.into(node)) for node in nodes]
        assert kept == [min(2, len(written.cell.into(node))) for node in nodes]


@pytest.mark.slow
def test_a_layer_wise_search_writes_a_table_for_the_other_stages(tmp_path):
    report = run_study(
        "nasi search",
        NasiSearchConfig(space="nas_bench_macro", modes="standard, random labels", seeds=2, **TINY),
        out=tmp_path,
    )
    indicators = IndicatorTable.load(tmp_path / "indicators.json")
    assert indicators.meta == {"method": "nasi", "steps": 2, "seed": 0, "images": False}
    best = search_table(indicators, indicators.space, top_k=1)[0].arch
    assert report.tables[0].rows[0][1] == " ".join(map(str, best))
    moved = [row[0] for row in table(report, "of 8 choices").rows]
    assert moved == [
        "between seeds, standard",
        "between seeds, random labels",
        "standard and random labels, same seed",
        "two random architectures",
    ]
    assert report.figures[0].axes[0].get_legend_handles_labels()[1] == ["Q", "R", "nu"]


@pytest.mark.parametrize("space", ["nas_bench_201", "digits_mini"])
def test_what_a_search_writes_is_retrained(tmp_path, capsys, space):
    images, run = write_folder(tmp_path / "images", {"a": 8, "b": 8}, side=8), tmp_path / "run"
    flags = {"space": space, "images": images, "resolution": 8, "steps": 2, "batch": 4, "threads": 1, "out": run}
    flags |= {"cells": 1, "channels": 4} if space == "nas_bench_201" else {}
    assert main(["nasi", "search", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    result = run / ("arch_nasi.json" if space == "nas_bench_201" else "indicators.json")
    assert f"{run / 'nasi-search.html'}, {result}" in capsys.readouterr().out
    data = [
        f"--data.{name}={value}"
        for name, value in {"train": images, "val_fraction": 0.5, "batch_size": 4, "workers": 0}.items()
    ]
    if space == "digits_mini":
        assert main(["search", f"--out={run}", *data, "--search.top_k=1"]) == 0
        data = []
    name = "nasi" if space == "nas_bench_201" else "best"
    flags = [f"--out={run}", *data, "--retrain.train.epochs=1", "--retrain.random_architectures=0", "--threads=1"]
    assert main(["retrain", *flags]) == 0
    assert (run / "retrain" / name / "result.json").exists()


def test_another_run_is_not_touched(tmp_path):
    cfg = NasiSearchConfig(**CELLS)
    run_study("nasi search", cfg, out=tmp_path)
    run_study("nasi search", cfg.replace(seed=1), out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match="space.yaml is of another space: choose another --out"):
        run_study("nasi search", cfg.replace(channels=8), out=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    space = nas_bench_macro()
    trained = IndicatorTable(
        space,
        tuple({k: 0.0 for k in layer.options if k != layer.indicator_choice} for layer in space.layers),
        (None,) * len(space),
        {"method": "dinas"},
    )
    trained.save(tmp_path / "trained" / "indicators.json")
    with pytest.raises(FileExistsError, match="scores of a trained supernet"):
        run_study("nasi search", NasiSearchConfig(space="nas_bench_macro", **TINY), out=tmp_path / "trained")
    assert IndicatorTable.load(tmp_path / "trained" / "indicators.json") == trained


def test_batches_are_of_the_size_that_is_told(tmp_path):
    images = str(write_folder(tmp_path / "images", {"a": 4, "b": 4}, side=8))
    with pytest.raises(ConfigError, match="batch must be at most 8, the number of images, got 16"):
        run_study("nasi search", NasiSearchConfig(**{**CELLS, "batch": 16}, images=images), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def published(space: SearchSpace) -> dict:
    """Accuracies that grow with depth, for two dozen architectures."""
    archs = [tuple((i // 3**k) % 3 for k in range(8)) for i in range(0, 24 * 91, 91)]
    return {"".join(map(str, a)): {"mean_acc": 60 + sum(k > 0 for k in a) + 0.1 * a[0]} for a in archs}


@pytest.mark.slow
def test_compare_ranks_beside_trivial_predictors(tmp_path):
    space = nas_bench_macro()
    (tmp_path / "truth.json").write_text(json.dumps(published(space)), encoding="utf-8")
    given = IndicatorTable(
        space,
        tuple({k: float(k) for k in layer.options if k != layer.indicator_choice} for layer in space.layers),
        (None,) * len(space),
    )
    given.save(tmp_path / "given.json")
    cfg = NasiCompareConfig(
        accuracies=str(tmp_path / "truth.json"),
        indicators=str(tmp_path / "given.json"),
        architectures=10,
        repeats=3,
        score_batch=4,
        resamples=20,
        images=str(write_folder(tmp_path / "images", {"a": 4, "b": 4}, side=8)),
        **TINY,
    )
    report = run_study("nasi compare", cfg, out=tmp_path)
    names = ["NASI, standard, seed 0", "given indicators", "depth", "macs", "params", "sqrt_size"]
    assert [row[0] for row in table(report, "10 random").rows] == ["Q", *names]
    of_all = table(report, "all 24").rows
    assert [row[0] for row in of_all] == names
    depth = next(row for row in of_all if row[0] == "depth")
    assert depth[1].startswith("+0.9") and depth[3] == "undefined"
    assert (tmp_path / "indicators.json").exists()
    report.save(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modes": "standard, random label"}, "unknown 'random label'.*random labels"),
        ({"modes": "standard, standard"}, "each only once"),
        ({"space": "nas_bench_macr"}, "unknown space 'nas_bench_macr'.*did you mean 'nas_bench_macro'"),
        ({"mu": -1.0}, "mu and nu must not be negative, got -1.0"),
        ({"space": "nas_bench_macro", "channels": 8}, "channels belongs to darts, nas_bench_201, choice_blocks"),
        ({"batch": 1}, "batch must be at least 2"),
    ],
)
def test_impossible_searches_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NasiSearchConfig(**settings)


def test_impossible_studies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cells must be from 3"):
        NasiQuickConfig(cells=2)
    with pytest.raises(ValueError, match="exact must be from 3.* to 10000.*15,625"):
        NasiQuickConfig(exact=15_626)  # there are not so many different ones: drawing them never ended
    with pytest.raises(ValueError, match="architectures must be 0 or at least 10"):
        NasiCompareConfig(architectures=1)
    with pytest.raises(ValueError, match="cannot read"):
        run_study("nasi compare", NasiCompareConfig(accuracies=str(tmp_path / "absent.json"), **TINY))
