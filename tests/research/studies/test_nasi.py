"""The NASI studies with tiny settings: marks, the closed form, the files of a search, and their commands."""

from __future__ import annotations

import pytest
import torch
from tiny import write_folder

from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.indicators import IndicatorTable
from nasfast.research.cells.prototypes import prototypes
from nasfast.research.nasi.spaces import CellMixture
from nasfast.research.studies import nasi, nasi_search
from nasfast.research.studies.commands import NasiSearchConfig, StudyConfig
from nasfast.research.studies.nasi_closed_form import enumerate_space, slope, small_space
from nasfast.research.studies.notebook import Notebook
from nasfast.search import search_table
from nasfast.spaces import load_arch, nas_bench_macro, read_space

CELLS = {"cells": 2, "channels": 4, "resolution": 8, "steps": 3, "batch": 4}
TINY = {"resolution": 8, "steps": 2, "batch": 4}


def searched(cfg: NasiSearchConfig, out) -> Notebook:
    notes = Notebook("nasi-search", cfg, out)
    nasi_search.run(cfg, notes)
    return notes


@pytest.mark.slow
def test_quick_has_marks_and_tables(tmp_path, monkeypatch):
    sizes = {"CELLS": 3, "EXACT_CELLS": 3, "IMAGES": 16, "REPEATS": 1, "TRAIN_STEPS": 2, "STEPS": 3, "SEEDS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(nasi, name, value)
    notes = Notebook("nasi-quick", StudyConfig(threads=1), tmp_path)
    nasi.quick(notes.settings, notes)
    names = [mark["name"] for mark in notes.marks]
    # section 6: spread, three correlations with accuracy, four of Q; two for each kind of search; and the time
    assert len(names) == len(set(names)) == 1 + 3 + 4 + 2 * 7 + 1
    tables = {title.split(":")[0].split(" ")[0]: rows for title, rows in notes.tables.items()}
    scores = ["Q, standard", "Q, random labels", "Q, random images", "parameters"]
    assert [row[0] for row in tables["random"][1:]] == scores
    assert len(tables["searches"]) == 1 + 10
    closed = {row[0]: row for row in tables["one"]}
    assert closed["closed form, exact gradient"][1] == "1.000"
    assert float(closed["largest E[Q] of norm 1, ascent"][2]) >= float(closed["closed form, exact gradient"][2]) - 1e-6
    notes.marks.clear()  # tiny settings may miss them
    notes.close()
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
    notes = searched(NasiSearchConfig(space=space, **CELLS), tmp_path)
    written = read_space(tmp_path / "space.yaml")
    arch = load_arch(tmp_path / "arch_nasi.json", written)
    assert notes.tables["what was found"][1][1] == " ".join(written.ops[k] for k in arch)
    assert written.num_classes == 10 and written.resolution == 8
    if space != "nas_bench_201":
        none = written.ops.index("none")
        nodes = written.cell.inner
        kept = [sum(arch[e] != none for e in written.cell.into(node)) for node in nodes]
        assert kept == [min(2, len(written.cell.into(node))) for node in nodes]


@pytest.mark.slow
def test_a_layer_wise_search_writes_a_table_for_the_other_stages(tmp_path):
    notes = searched(NasiSearchConfig(space="nas_bench_macro", **TINY), tmp_path)
    indicators = IndicatorTable.load(tmp_path / "indicators.json")
    assert indicators.meta == {"method": "nasi", "steps": 2, "seed": 0, "images": False}
    best = search_table(indicators, indicators.space, top_k=1)[0].arch
    assert notes.tables["what was found"][1][1] == " ".join(map(str, best))


@pytest.mark.parametrize("space", ["nas_bench_201", "digits_mini"])
def test_what_a_search_writes_is_retrained(tmp_path, capsys, space):
    images, run = write_folder(tmp_path / "images", {"a": 8, "b": 8}, side=8), tmp_path / "run"
    flags = {"space": space, "images": images, "resolution": 8, "steps": 2, "batch": 4, "threads": 1, "out": run}
    flags |= {"cells": 1, "channels": 4} if space == "nas_bench_201" else {}
    assert main(["nasi", "search", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    result = run / ("arch_nasi.json" if space == "nas_bench_201" else "indicators.json")
    assert f"written: {result}\n" in capsys.readouterr().out and (run / "nasi-search.html").exists()
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
    searched(cfg, tmp_path)
    searched(cfg.replace(seed=1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match="space.yaml is of another space: choose another --out"):
        searched(cfg.replace(channels=8), tmp_path)
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
        searched(NasiSearchConfig(space="nas_bench_macro", **TINY), tmp_path / "trained")
    assert IndicatorTable.load(tmp_path / "trained" / "indicators.json") == trained


def test_batches_are_of_the_size_that_is_told(tmp_path):
    images = str(write_folder(tmp_path / "images", {"a": 4, "b": 4}, side=8))
    with pytest.raises(ConfigError, match="batch must be at most 8, the number of images, got 16"):
        searched(NasiSearchConfig(**{**CELLS, "batch": 16}, images=images), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"space": "nas_bench_macr"}, "unknown space 'nas_bench_macr'.*did you mean 'nas_bench_macro'"),
        ({"space": "nas_bench_macro", "channels": 8}, "channels belongs to darts, nas_bench_201, choice_blocks"),
        ({"batch": 1}, "batch must be at least 2"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_impossible_searches_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NasiSearchConfig(**settings)
