"""The wiring study with tiny settings: what it computes of searches, judges and writes, and its commands."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import write_folder

from nasfast import wiring
from nasfast.cells import DARTS_OPS, Cell, CellSpace, Edge, minimal_cell, read_space
from nasfast.cells.probe import CostTable
from nasfast.cells.search import SEARCH, TRAIN, CellSearchConfig, CellSearchEngine, CellSearchResult
from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.data import DataError
from nasfast.report import study_figure
from nasfast.spaces import load_arch
from nasfast.study import StudyReport, plain
from nasfast.train import CheckpointError
from nasfast.wiring import (
    CollapseConfig,
    CostConfig,
    GrowthConfig,
    TheoremsConfig,
    WidthConfig,
    collapse_study,
    cost_study,
    growth_study,
    measures,
    theorems_study,
    width_study,
)

INF = float("inf")
TINY = {
    "cell": "minimal", "channels": 4, "samples": 16, "steps": 6, "records": 3, "seeds": 2, "batch_size": 4,
    "threads": 1,
}  # fmt: skip
STUDIES = {
    "p1": (growth_study, GrowthConfig(**TINY)),
    "p2": (width_study, WidthConfig(**TINY, control_steps=4)),
    "p3": (collapse_study, CollapseConfig(**TINY, control_steps=4)),
    "cost": (cost_study, CostConfig(**TINY, nets=2, batches=3)),
}
STEPS = {
    "p1": 2 * 6,
    # three controls; the search is that of P1
    "p2": 2 * 3 * 4,
    # two levels, and the fixed probabilities; the search on one level is that of P1
    "p3": 2 * (6 + 4),
    "cost": 2 * 6,
}
"""Steps that a study takes in a directory in which those before it have been."""
CONTROLS = ("control-simplified", "control-modified__sampled", "control-modified___0_1__fixed")
FOLDERS = {f"{name}-s{seed}" for name in ("dsnas", *CONTROLS, "dsnas-bilevel", "table", "uniform") for seed in (0, 1)}


class Steps:
    """Counts the steps of searches."""

    def __init__(self) -> None:
        self.count = 0

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture(scope="module")
def steps():
    counted, original = Steps(), CellSearchEngine.forward_backward

    def counting(self, x, y, paths=None):
        counted.count += 1
        return original(self, x, y, paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CellSearchEngine, "forward_backward", counting)
        yield counted


@pytest.fixture(scope="module")
def reports(steps, tmp_path_factory) -> tuple[Path, dict[str, StudyReport], dict[str, int]]:
    """Every study but the theorems', one after another in one directory, and how many steps each took."""
    out, found, taken = tmp_path_factory.mktemp("studies"), {}, {}
    for kind, (study, cfg) in STUDIES.items():
        steps.take()
        found[kind] = study(cfg, out=out)
        taken[kind] = steps.take()
    return out, found, taken


def flags(cfg) -> list[str]:
    changed = {k: v for k, v in cfg.to_dict().items() if v != getattr(type(cfg)(), k)}
    return [f"--{name}={value}" for name, value in changed.items()]


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def told(form: Mapping) -> dict:
    """What a report says of searches, not of the machine and the time."""
    return {k: v for k, v in form.items() if k not in ("seconds", "machine", "environment")}


# --- whole studies ------------------------------------------------------------------------------------------------


def test_studies_share_their_searches(reports):
    out, _, taken = reports
    assert taken == STEPS
    assert {path.parent.name for path in out.glob("*/search.npz")} == FOLDERS


@pytest.mark.parametrize("kind", STUDIES)
def test_a_command_repeats_nothing_and_tells_the_same(reports, steps, kind, capsys, caplog):
    out, found, _ = reports
    steps.take()
    caplog.set_level("INFO", "nasfast")
    assert main(["wiring", kind, *flags(STUDIES[kind][1]), "--out", str(out)]) == 0
    assert steps.take() == 0
    assert any(re.fullmatch(r".*, seed 1: (\d+) of \1", message) for message in caplog.messages)
    form = json.loads((out / f"wiring-{kind}.json").read_text(encoding="utf-8"))
    assert told(form) == told(found[kind].to_dict())
    page = (out / f"wiring-{kind}.html").read_text(encoding="utf-8")
    assert page.count("<img ") == len(found[kind].figures) == len(list((out / f"wiring-{kind}").glob("*.png")))
    assert "settings are not those of the pass marks" in page and "Pass marks" not in page
    printed = capsys.readouterr().out
    assert printed.startswith(f"wiring-{kind}: ") and f"written: {out / f'wiring-{kind}.html'}" in printed


def test_every_search_has_its_files(reports):
    out, _, _ = reports
    for folder in (out / name for name in sorted(FOLDERS)):
        space = read_space(folder / "space.yaml")
        assert (space.num_classes, space.resolution) == (10, 12)
        arrays = np.load(folder / "search.npz")
        records, last = (4, 4) if folder.name.startswith(("control", "table")) else (3, 6)
        assert arrays["steps"][-1] == last
        assert arrays["costs"].shape == (records, 2, 3, 1, len(space.cell.edges), 8)
        assert (arrays["outputs"][:, SEARCH] != 0).any() == folder.name.startswith(("dsnas-bilevel", "table"))
        best = arrays["logits"].argmax(-1).flatten().tolist()
        assert list(load_arch(folder / "arch_argmax.json", space)) == best
        kept = np.array(load_arch(folder / "arch_darts.json", space)) != space.ops.index("none")
        assert [kept[list(space.cell.into(n))].sum() for n in range(space.cell.inputs, space.cell.inputs + 2)] == [
            min(2, len(space.cell.into(n))) for n in range(space.cell.inputs, space.cell.inputs + 2)
        ]
        written = json.loads((folder / "measures.json").read_text(encoding="utf-8"))
        result = CellSearchResult(SimpleNamespace(space=space), CellSearchConfig(
            bilevel=folder.name.startswith(("dsnas-bilevel", "table"))), **arrays)  # fmt: skip
        assert written == plain(measures(result))


def test_tables_hold_the_measures_of_every_seed(reports):
    out, found, _ = reports
    table = found["p1"].tables[0]
    assert table.header == ("", "seed 0", "seed 1", "mean, 95 %")
    forms = [json.loads((out / f"dsnas-s{seed}" / "measures.json").read_text(encoding="utf-8")) for seed in (0, 1)]
    values = {row[0]: row[1:] for row in table.rows}
    assert len(values) == len(forms[0])
    one, other = (form["q_int_end"] for form in forms)
    # Student's t of one degree of freedom
    interval = f"{(one + other) / 2:.3f} ± {12.7062 * abs(one - other) / 2:.3f}"
    assert values["end (intermediate)"] == (f"{one:.3f}", f"{other:.3f}", interval)


def test_other_settings_are_refused_and_nothing_is_lost(reports, steps, capsys):
    out, _, _ = reports
    before = tree(out)
    steps.take()
    for changes, message in (
        ({"lr": 0.2}, "train.lr was 0.4, now 0.2"),
        ({"samples": 17}, "data.samples was 16, now 17"),
        ({"records": 2}, "search.records was 3, now 2"),
        ({"steps": 5}, "batches_per_epoch was 6, now 5"),
        ({"channels": 6}, "belongs to another search space.*another --out folder"),
        ({"cell": "simplified"}, "belongs to another search space"),
    ):
        with pytest.raises(CheckpointError, match=message):
            growth_study(GrowthConfig(**{**TINY, **changes}), out=out)
    assert main(["wiring", "p1", *flags(GrowthConfig(**TINY, noise=1.0)), "--out", str(out)]) == 1
    assert "data.noise was 4.0, now 1.0" in capsys.readouterr().err
    assert steps.take() == 0
    after = tree(out)
    assert {path: after[path] for path in before} == before


def test_a_command_takes_a_file_of_settings_and_flags_over_it(tmp_path, capsys):
    form = {**TINY, "seeds": 1, "nets": 1, "batches": 2, "lr": 0.3}
    (tmp_path / "tiny.yaml").write_text(json.dumps(form), encoding="utf-8")
    out = tmp_path / "out"
    assert main(["wiring", "cost", "--config", str(tmp_path / "tiny.yaml"), "--lr=0.2", "--out", str(out)]) == 0
    cfg = json.loads((out / "wiring-cost.json").read_text(encoding="utf-8"))["config"]
    assert (cfg["lr"], cfg["seeds"], cfg["channels"], cfg["noise"]) == (0.2, 1, 4, 3.0)
    capsys.readouterr()
    (tmp_path / "wrong.yaml").write_text("chanels: 4\n", encoding="utf-8")
    assert main(["wiring", "p1", "--config", str(tmp_path / "wrong.yaml")]) == 1
    error = capsys.readouterr().err
    assert "wrong.yaml" in error and "did you mean 'channels'?" in error


def test_help_and_unknown_kinds(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["wiring", "--help"])
    assert stopped.value.code == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {kind:8}  " in listed for kind in ("theorems", *STUDIES))
    for kind in ("theorems", *STUDIES):
        with pytest.raises(SystemExit) as stopped:
            main(["wiring", kind, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert stopped.value.code == 0
        assert f"wiring-{kind}.json" in text
        assert ("continues from what it has there" in text) == (kind != "theorems")
    assert main(["wiring", "p4"]) == 1
    assert "expected one of theorems, p1, p2, p3, cost behind wiring, got 'p4'" in capsys.readouterr().err
    for wrong in (["--cell", "large"], ["--control_steps", "3"]):
        with pytest.raises(SystemExit) as stopped:
            main(["wiring", "p1", *wrong])
        assert stopped.value.code == 2


def test_theorems_as_a_study_and_as_a_command(tmp_path):
    cfg = TheoremsConfig(channels=2, batch=4, threads=1)
    report = theorems_study(cfg)
    assert report.missed == [] and len(report.checks) == len(report.tables[0].rows) > 20
    # no pass mark is of one theorem twice, and every theorem has some
    names = [check.name for check in report.checks]
    assert len(set(names)) == len(names) and {name[:2] for name in names} == {"T1", "T2", "T3", "T4", "T5"}
    assert all(check.low == -check.high for check in report.checks)
    assert main(["wiring", "theorems", *flags(cfg), "--out", str(tmp_path)]) == 0
    form = json.loads((tmp_path / "wiring-theorems.json").read_text(encoding="utf-8"))
    assert told(form) == told(report.to_dict())
    assert (tmp_path / "wiring-theorems.html").exists()


def test_a_missed_mark_is_an_exit_status(monkeypatch, tmp_path, capsys):
    row = SimpleNamespace(name="T0", measured=-2.0, bound=1.0, note="")
    monkeypatch.setattr(wiring, "check_theorems", lambda **settings: [row])
    assert main(["wiring", "theorems", "--out", str(tmp_path)]) == 1
    assert "1 of 1 pass marks missed" in capsys.readouterr().err
    assert (tmp_path / "wiring-theorems.html").exists()


@pytest.mark.parametrize(("method", "name"), [("darts", "DARTS"), ("snas", "SNAS"), ("proxyless", "ProxylessNAS")])
def test_other_methods(tmp_path, method, name):
    report = growth_study(GrowthConfig(**{**TINY, "seeds": 1}, method=method), out=tmp_path)
    assert report.subject.startswith(f"P1, growing: {name} on 1 minimal cell(s), 4 channels, 6 steps")
    arrays = np.load(tmp_path / f"{method}-s0" / "search.npz")
    # these three measure every operation in every step
    assert (arrays["costs"][:, TRAIN, 2, 0, :, 1:] == 2).all()
    own = [row[1] for row in report.tables[1].rows if "its own" in row[1]]
    assert own == ["darts (its own)" if method == "darts" else "argmax (its own)"]


def test_collapse_of_second_order_is_another_search(tmp_path):
    tiny = {**TINY, "seeds": 1, "control_steps": 2, "method": "darts"}
    first = collapse_study(CollapseConfig(**tiny), out=tmp_path / "first")
    second = collapse_study(CollapseConfig(**tiny, second_order=True), out=tmp_path / "second")
    one, other = (np.load(tmp_path / n / "darts-bilevel-s0" / "search.npz")["logits"] for n in ("first", "second"))
    assert not np.array_equal(one, other)
    # the search on one level and the fixed probabilities have no second order
    assert first.tables[1] == second.tables[1] and first.tables[3] == second.tables[3]


def test_reduction_cells_have_figures_of_their_own(tmp_path):
    cfg = GrowthConfig(**{**TINY, "seeds": 1}, cells=3, reductions=True)
    report = growth_study(cfg, out=tmp_path)
    p = np.load(tmp_path / "dsnas-s0" / "search.npz")["probabilities"]
    assert p.shape == (4, 2, 5, 8)
    figures = {figure["title"]: figure for figure in report.figures}
    for t, kind in enumerate(("normal", "reduction")):
        assert np.array_equal(figures[f"seed 0, {kind} cell: probabilities"]["p"], p[:, t])
        assert figures[f"seed 0, {kind} cell: wiring"]["steps"] == [0, 2, 4, 6]
        study_figure(plain(figures[f"seed 0, {kind} cell: wiring"]))
    np.testing.assert_allclose(figures["P1"]["runs"][0]["q_in"], p[:, :, :4, 0].mean((1, 2)))
    arch = load_arch(tmp_path / "dsnas-s0" / "arch_argmax.json", read_space(tmp_path / "dsnas-s0" / "space.yaml"))
    assert len(arch) == 10
    text = report.tables[1].rows[0][2]
    assert text.startswith("normal:") and "; reduction:" in text


def test_without_a_directory_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(wiring.tempfile, "tempdir", str(tmp_path))
    report = growth_study(GrowthConfig(**{**TINY, "seeds": 1, "steps": 1}))
    assert report.tables and not list(tmp_path.iterdir())


# --- settings and images ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (GrowthConfig, {"steps": 0}, "steps must be at least 1, got 0"),
        (GrowthConfig, {"batch_size": 1}, "batch_size must be at least 2"),
        (GrowthConfig, {"noise": math.nan}, "noise must not be negative, got nan"),
        (GrowthConfig, {"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (GrowthConfig, {"reductions": True, "cells": 2}, "reductions need at least 3 cells.*got cells=2"),
        (WidthConfig, {"control_steps": 0}, "control_steps must be at least 1, got 0"),
        (CollapseConfig, {"control_steps": 0}, "control_steps must be at least 1, got 0"),
        (CollapseConfig, {"second_order": True}, "second_order belongs to method='darts', got 'dsnas'"),
        (CostConfig, {"nets": 0}, "nets must be at least 1"),
        (CostConfig, {"batches": 0}, "batches must be at least 1"),
        (TheoremsConfig, {"batch": 0}, "batch must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_a_missing_gpu_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        growth_study(GrowthConfig(**TINY, device="cuda"), out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_pass_marks_are_of_the_default_settings():
    for config in (GrowthConfig, WidthConfig, CollapseConfig, CostConfig):
        assert config().published
        assert config(seed=3, seeds=1, threads=2, device="auto").published
        for changes in ({"steps": 100}, {"records": 20}, {"images": "x"}):
            assert not config(**changes).published
    for changes in ({"method": "snas"}, {"alpha_std": 0.1}):
        assert not GrowthConfig(**changes).published
    assert not WidthConfig(control_steps=5).published and not CostConfig(nets=3).published
    # those of P1 with the settings of the local costs are no defaults of P1
    assert not GrowthConfig(cell="minimal", channels=8).published


def test_steps_above_a_hundred_are_hundreds():
    for steps, per_epoch in ((7, 7), (100, 100), (150, 100), (1500, 100)):
        train, held_out = wiring.loaders(GrowthConfig(steps=steps), bilevel=True)
        assert len(train) == len(held_out) == per_epoch


def test_synthetic_images_depend_on_the_seed_and_held_out_ones_are_others():
    def images(seed: int, part: int) -> set[bytes]:
        loader = wiring.loaders(GrowthConfig(seed=seed, samples=20, steps=3), bilevel=True)[part]
        return {x.numpy().tobytes() for batch, _ in loader.epoch(0) for x in batch}

    assert images(0, 0) == images(0, 0) and len(images(0, 0)) == 20
    assert not images(0, 0) & images(1, 0) and not images(0, 0) & images(0, 1)
    assert wiring.loaders(GrowthConfig(), bilevel=False)[1] is None


@pytest.fixture
def images(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # more classes than the synthetic images have, some with a label above theirs
    return write_folder(tmp_path / "images", {f"class{i:02d}": 2 for i in range(12)}, side=8)


def test_images_of_a_folder_on_one_and_two_levels(images, tmp_path, steps):
    settings = {**TINY, "seeds": 1, "batch_size": 5, "images": str(images), "resolution": 8}
    cfg = CollapseConfig(**settings, control_steps=2)
    steps.take()
    report = collapse_study(cfg, out=tmp_path / "out")
    # 24 images are four batches of 5, half of them two; the fixed probabilities are of synthetic images
    assert steps.take() == 8 + 6 + 2
    assert "6 steps, images of images" in report.subject
    for name, size in (("dsnas", 8), ("dsnas-bilevel", 6)):
        space = read_space(tmp_path / "out" / f"{name}-s0" / "space.yaml")
        assert (space.num_classes, space.resolution) == (12, 8)
        arrays = np.load(tmp_path / "out" / f"{name}-s0" / "search.npz")
        assert arrays["steps"][-1] == size
        assert arrays["outputs"][:, :, 0, -1].sum(0).tolist() == [5 * size, 5 * size * (size == 6)]
    report = growth_study(GrowthConfig(**settings), out=tmp_path / "out")
    assert steps.take() == 0 and "8 steps, images of images" in report.subject
    with pytest.raises(CheckpointError, match="data.resolution was 8, now 9|another search space"):
        growth_study(GrowthConfig(**{**settings, "resolution": 9}), out=tmp_path / "out")


def test_held_out_images_are_half_of_every_class(tmp_path):
    folder = write_folder(tmp_path, {"a": 4, "b": 8}, side=8)
    cfg = GrowthConfig(batch_size=3, images=str(folder), resolution=8)
    train, held_out = wiring.loaders(cfg, bilevel=True)
    one, other = set(train.source.indices.tolist()), set(held_out.source.indices.tolist())
    assert len(one) == len(other) == 6 and not one & other
    assert sorted(train.source.labels) == sorted(held_out.source.labels) == [0, 0, 1, 1, 1, 1]
    train, held_out = wiring.loaders(cfg, bilevel=False)
    assert train.num_images == 12 and held_out is None


def test_folders_that_cannot_be_used(tmp_path):
    for counts, message in (({"a": 3}, "has one class only"), ({"a": 2, "b": 1}, "class 'b' has 1 image")):
        folder = write_folder(tmp_path / str(len(counts)), counts, side=8)
        with pytest.raises(DataError, match=message):
            collapse_study(CollapseConfig(**TINY, images=str(folder), resolution=8), out=tmp_path / "out")
    with pytest.raises(DataError, match="does not exist"):
        growth_study(GrowthConfig(**TINY, images=str(tmp_path / "absent")), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- numbers, against loops over fabricated searches --------------------------------------------------------------


def fabricated(
    space: CellSpace, *, records: int, seed: int = 0, bilevel: bool = False, method: str = "dsnas"
) -> CellSearchResult:
    """A search whose arrays are random but possible: no candidate, no cost; parts of the samples are correct."""
    rng = np.random.default_rng(seed)
    types, edges, ops = len(space.types), len(space.cell.edges), len(space.ops)
    allowed = np.zeros((edges, ops), dtype=bool)
    for e, columns in enumerate(space.candidates):
        allowed[e, list(columns)] = True
    logits = np.where(allowed, rng.normal(size=(records + 1, types, edges, ops)), -np.inf)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    shape = (records, 2, space.cells, edges, ops)
    count = rng.integers(0, 4, shape) * allowed
    cost = count * rng.normal(0.1, 1, shape)
    outputs = rng.normal(size=(records, 2, 3, 4))
    outputs[:, :, 1:, 3] = rng.integers(1, 9, (records, 2, 2))
    outputs[:, :, 0] = outputs[:, :, 1] + outputs[:, :, 2]
    return CellSearchResult(
        SimpleNamespace(space=space), CellSearchConfig(method=method, bilevel=bilevel), 10 * np.arange(1, records + 1),
        logits[-1], p, np.stack([cost, cost**2, count], 2), rng.normal(size=shape[:-1]), outputs,
    )  # fmt: skip


def windows(records: int) -> list[range]:
    """Fifteen parts of a run, the longer ones first."""
    short, rest = divmod(records, 15)
    sizes = [short + 1] * rest + [short] * (15 - rest)
    ends = np.cumsum(sizes)
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def mean_cost(found: CellSearchResult, edge: int, records: range) -> float:
    """Of all batches in which an operation but None ran on an edge of some cell."""
    total = count = 0.0
    for r in records:
        for cell in range(found.space.cells):
            for k, op in enumerate(found.space.ops):
                if op != "none":
                    total += found.costs[r, TRAIN, 0, cell, edge, k]
                    count += found.costs[r, TRAIN, 2, cell, edge, k]
    return total / count


def share_positive(found: CellSearchResult, records: range) -> float:
    signs = []
    for cell, edge, k in np.ndindex(found.costs.shape[3:]):
        total = sum(found.costs[r, TRAIN, 0, cell, edge, k] for r in records)
        count = sum(found.costs[r, TRAIN, 2, cell, edge, k] for r in records)
        if count and found.space.ops[k] != "none":
            signs.append(total > 0)
    return sum(signs) / len(signs)


def output_cost(found: CellSearchResult, which: int, records: range) -> float:
    return sum(found.outputs[r, which, 0, 0] for r in records) / sum(found.outputs[r, which, 0, 3] for r in records)


SPACES = {
    "minimal": CellSpace("minimal", minimal_cell(), cells=2, channels=2),
    "darts, reductions": GrowthConfig(cells=4, reductions=True).space(),
    "simplified": GrowthConfig(cell="simplified").space(),
    "nas_bench_201": GrowthConfig(cell="nas_bench_201").space(),
    "restricted": CellSpace("r", minimal_cell().restricted(0, 2, ("none", "sep_conv_3x3")), cells=1, channels=2),
    # into node 3 there is no edge from an input
    "chain": CellSpace("c", Cell(1, 3, (Edge(0, 1), Edge(0, 2), Edge(1, 2), Edge(2, 3)), (3,)), cells=1, channels=2),
}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("bilevel", [False, True])
def test_measures(name, bilevel):
    space, records = SPACES[name], 32
    found = fabricated(space, records=records, bilevel=bilevel)
    cell, none = space.cell, space.ops.index("none")
    # q has its peak at the start in half of the cases
    found.probabilities[0, ..., none] += bilevel
    m, parts = measures(found), windows(records)
    assert [len(part) for part in parts] == [3, 3] + [2] * 13
    expected = {
        "C_first": output_cost(found, TRAIN, parts[0]), "C_last": output_cost(found, TRAIN, parts[-1]),
        "positive_first": share_positive(found, parts[0]), "positive_last": share_positive(found, parts[-1]),
    }  # fmt: skip
    kinds = {"in": [e for e, edge in enumerate(cell.edges) if edge.source < cell.inputs],
             "int": [e for e, edge in enumerate(cell.edges) if edge.source >= cell.inputs]}  # fmt: skip
    for kind, edges in kinds.items():
        q = [np.mean([found.probabilities[r, t, e, none] for t in range(len(space.types)) for e in edges])
             for r in range(records + 1)]  # fmt: skip
        kept = [found.probabilities[-1, t, e].argmax() != none for t in range(len(space.types)) for e in edges]
        expected |= {f"q_{kind}_start": q[0], f"q_{kind}_peak": max(q), f"q_{kind}_end": q[-1],
                     f"kept_{kind}": sum(kept) / len(space.types), f"n_{kind}": len(edges)}  # fmt: skip
    differences = []
    for node in range(cell.inputs, cell.inputs + cell.nodes):
        of = {kind: [mean_cost(found, e, range(records)) for e in edges if cell.edges[e].target == node]
              for kind, edges in kinds.items()}  # fmt: skip
        if of["int"] and of["in"]:
            differences.append(np.mean(of["int"]) - np.mean(of["in"]))
    expected["intermediate_minus_input_cost"] = np.mean(differences)
    if bilevel:
        held_out = [output_cost(found, SEARCH, part) for part in parts]
        expected |= {
            "search_C_first": held_out[0], "search_C_last": held_out[-1], "search_C_smallest": min(held_out),
            "search_minus_train_C": min(s - output_cost(found, TRAIN, p) for s, p in zip(held_out, parts, strict=True)),
        }  # fmt: skip
    assert m == pytest.approx(expected, abs=1e-12)
    # every measure has words in the table
    assert set(m) <= set(wiring._MEASURES)


def test_a_short_run_has_a_part_per_record():
    found = fabricated(SPACES["minimal"], records=4)
    assert measures(found)["C_first"] == output_cost(found, TRAIN, range(1))
    figure = wiring._patterns_figure("", {0: found})["runs"][0]
    assert figure["steps"] == [10, 20, 30, 40] and figure["q_steps"] == [0, 10, 20, 30, 40]
    assert figure["positive"] == pytest.approx([share_positive(found, range(r, r + 1)) for r in range(4)])


def test_curves_of_a_search():
    found = fabricated(SPACES["minimal"], records=4, bilevel=True)
    curves = wiring._cost_curves("", found)
    # of the last of two cells
    np.testing.assert_array_equal(curves["cost"], found.edge_costs[:, TRAIN, 1])
    np.testing.assert_allclose(curves["total"], found.edge_costs[:, TRAIN, 1].sum(1))
    np.testing.assert_array_equal(curves["loss"], found.outputs[:, TRAIN, 0, 1] / found.outputs[:, TRAIN, 0, 3])
    np.testing.assert_array_equal(curves["accuracy"], found.outputs[:, TRAIN, 1, 3] / found.outputs[:, TRAIN, 0, 3])
    assert curves["edges"] == ["(0,2)", "(1,2)", "(0,3)", "(1,3)", "(2,3)"]
    assert curves["intermediate"] == [False, False, False, False, True]
    clh = wiring._clh_figure("", found)
    for split, which in (("train", TRAIN), ("search", SEARCH)):
        for g, group in enumerate(("all", "correct", "wrong")):
            for q, name in enumerate("CLH"):
                mean = found.outputs[:, which, g, q] / found.outputs[:, which, g, 3]
                np.testing.assert_array_equal(clh[split][group][name], mean)
    assert wiring._clh_figure("", fabricated(SPACES["minimal"], records=4))["search"] is None


def test_intervals_of_seeds():
    values = [1.0, 2.0, 4.0]
    half = 4.302653 * np.std(values, ddof=1) / math.sqrt(3)
    assert wiring._interval(values) == f"{7 / 3:.3f} ± {half:.3f}"
    assert wiring._interval([1.0]) == wiring._interval([1.0, math.nan]) == "-"


class Fabricating:
    """Stands in for the runner: every search is at once, and what was asked for is noted."""

    device = "cpu"

    def __init__(self, records: int | None = None) -> None:
        self.records, self.found, self.asked = records, {}, {}

    def search(self, name, cfg, search, *, cell=None) -> CellSearchResult:
        records = self.records or search.records
        seed = 100 * cfg.seed + len(name)
        made = fabricated(cfg.space(cell), records=records, seed=seed, bilevel=search.bilevel, method=search.method)
        self.found[name, cfg.seed], self.asked[name] = made, (cfg, search)
        return made


def assert_marks(found: Mapping, expected: Mapping[str, tuple[float, float, float]]) -> None:
    """Name -> from, to, measured."""
    assert sorted(check.name for check in found["checks"]) == sorted(expected)
    for check in found["checks"]:
        assert (check.low, check.high, check.measured) == pytest.approx(expected[check.name], abs=1e-12), check.name


def test_marks_of_growing():
    runner = Fabricating()
    found = wiring._growth(GrowthConfig(seeds=2), runner)
    expected = {}
    for seed in (0, 1):
        m = measures(runner.found["dsnas", seed])
        expected |= {
            f"seed {seed}: C of the first part": (0, INF, m["C_first"]),
            f"seed {seed}: C of the last part": (-INF, 0, m["C_last"]),
            f"seed {seed}: peak of q of input edges": (0.13, 1, m["q_in_peak"]),
            f"seed {seed}: q of input edges at the end": (0, 0.06, m["q_in_end"]),
            f"seed {seed}: input edges kept": (8, 8, m["kept_in"]),
        }
    assert_marks(found, expected)
    assert found["notes"] == ()
    assert wiring._growth(GrowthConfig(steps=1499), runner)["checks"] == ()


def test_marks_of_width_and_of_its_control():
    runner = Fabricating()
    found = wiring._width(WidthConfig(seeds=2), runner)
    expected = {}
    for seed in (0, 1):
        m = measures(runner.found["dsnas", seed])
        expected |= {
            f"seed {seed}: intermediate edges kept": (0, 2, m["kept_int"]),
            f"seed {seed}: input edges kept": (8, 8, m["kept_in"]),
            f"seed {seed}: cost of intermediate minus input edges of a node": (
                0, INF, m["intermediate_minus_input_cost"],
            ),
        }  # fmt: skip
    control = {}
    labels = dict(zip(CONTROLS, ("simplified", "modified, sampled", "modified, (0,1) fixed"), strict=True))
    for name, label in labels.items():
        for seed in (0, 1):
            f = runner.found[name, seed]
            late = [mean_cost(f, e, range(9, 12)) for e in range(3)]
            early = [mean_cost(f, e, range(6)) for e in range(3)]
            between = (-INF, 0) if name == CONTROLS[2] else (0, INF)
            control[f"{label}, seed {seed}: cost of (1,2) minus (0,2), last quarter"] = (*between, late[2] - late[1])
            if name == CONTROLS[1]:
                control[f"{label}, seed {seed}: cost of (1,2) minus (0,1), first half"] = (0, INF, early[2] - early[0])
            row = next(r for r in found["tables"][2].rows if r[:2] == (label, f"seed {seed}"))
            assert list(row[2:]) == [f"{v:+.3f}" for v in (*early, *late)]
    assert_marks(found, expected | control)
    # the control has marks of its own, which hold whatever the search is
    assert_marks(wiring._width(WidthConfig(seeds=2, cell="minimal"), runner), control)
    assert wiring._width(WidthConfig(seeds=2, control_steps=599), runner)["checks"] == ()
    panel = found["figures"][-1]["panels"][0]
    assert panel["edges"] == ["(0,1)", "(0,2)", "(1,2)"]
    one = [[mean_cost(runner.found[CONTROLS[0], 1], e, range(r, r + 1)) for e in range(3)] for r in range(12)]
    np.testing.assert_allclose(panel["runs"][1], one)


def test_the_control_is_that_of_section_6():
    runner = Fabricating()
    wiring._width(WidthConfig(seeds=1, lr=0.3, noise=1.0), runner)
    for name, outputs, first in (
        (CONTROLS[0], (1, 2), DARTS_OPS), (CONTROLS[1], (2,), DARTS_OPS), (CONTROLS[2], (2,), ("sep_conv_5x5",)),
    ):  # fmt: skip
        cfg, search = runner.asked[name]
        cell = runner.found[name, 0].space.cell
        assert (cell.outputs, cell.edges[0].ops, cell.edges[1].ops) == (outputs, first, DARTS_OPS)
        assert (search.method, search.redraw, search.records) == ("uniform", name != CONTROLS[0], 12)
        # row W5 of section 9, whatever the search
        assert (cfg.samples, cfg.noise, cfg.lr, cfg.steps, cfg.channels, cfg.cells) == (1000, 3.0, 0.1, 600, 8, 1)


def test_marks_of_collapse_and_signs_of_the_gates():
    runner = Fabricating()
    found = wiring._collapse(CollapseConfig(seeds=2), runner)
    expected = {}
    for seed in (0, 1):
        run, single, gates = (runner.found[name, seed] for name in ("dsnas-bilevel", "dsnas", "table"))
        m = measures(run)
        dropped = [int((r.probabilities[-1, 0].argmax(-1) == 0).sum()) for r in (run, single)]
        # the third quarter of twelve records, by hand
        sums = gates.outputs[6] + gates.outputs[7] + gates.outputs[8]
        c, ell, h = (sums[..., q] / sums[..., 3] for q in range(3))
        held_out = gates.outputs[:, SEARCH, 0, 0] / gates.outputs[:, SEARCH, 0, 3]
        table = f"table, seed {seed}:"
        expected |= {
            f"seed {seed}: edges that are None": (13, 14, dropped[0]),
            f"seed {seed}: held-out C, smallest part": (0, INF, m["search_C_smallest"]),
            f"seed {seed}: held-out minus training C, smallest part": (0, INF, m["search_minus_train_C"]),
            f"seed {seed}: edges that are None on one level": (0, 6, dropped[1]),
            f"{table} correct C, training": (-INF, 0, c[TRAIN, 1]),
            f"{table} correct C, held out": (-INF, 0, c[SEARCH, 1]),
            f"{table} wrong L, held out minus training": (0, INF, ell[SEARCH, 2] - ell[TRAIN, 2]),
            f"{table} wrong H, held out minus training": (-INF, 0, h[SEARCH, 2] - h[TRAIN, 2]),
            f"{table} wrong C, held out minus training": (0.5, INF, c[SEARCH, 2] - c[TRAIN, 2]),
            f"{table} held-out C, second half minus first": (0, INF, held_out[6:].mean() - held_out[:6].mean()),
        }
        row = next(r for r in found["tables"][3].rows if r[0] == f"wrong, seed {seed}")
        shown = [q[which, 2] for q in (c, ell, h) for which in (TRAIN, SEARCH)]
        assert list(row[1:]) == [f"{v:+.2f}" for v in shown]
    assert_marks(found, expected)
    cfg, search = runner.asked["table"]
    # row W4 of section 9: probabilities stay, held-out batches are measured
    assert (search.method, search.bilevel, search.alpha_lr) == ("darts", True, 0.0)
    assert (cfg.cell, cfg.channels, cfg.samples, cfg.noise, cfg.lr, cfg.steps) == ("minimal", 8, 300, 3.0, 0.1, 300)
    searches = {name: asked for name, (_, asked) in runner.asked.items()}
    assert searches["dsnas-bilevel"].bilevel and not searches["dsnas"].bilevel
    assert searches["dsnas"] == GrowthConfig().of_seed(1).search()


def test_what_was_published_stands_below_the_signs():
    rows = wiring._collapse(CollapseConfig(seeds=1, method="snas"), Fabricating())["tables"][3].rows
    # section 8: C, L and H, training and search
    assert rows[-2:] == (
        ("correct, published", "-0.11", "-0.11", "0.06", "0.08", "0.17", "0.19"),
        ("wrong, published", "0.80", "2.18", "1.70", "2.92", "0.90", "0.74"),
    )


GROWN = {"C_first": 0.1, "C_last": -0.1, "q_in_start": 0.1, "q_in_peak": 0.2, "q_in_end": 0.05,
         "positive_first": 0.8, "positive_last": 0.4}  # fmt: skip
WIDENED = {"q_int_end": 0.8, "q_in_end": 0.1, "kept_int": 1.0, "n_int": 6.0, "kept_in": 7.0, "n_in": 8.0,
           "intermediate_minus_input_cost": 0.01}  # fmt: skip
COLLAPSED = {"kept_in": 0.0, "kept_int": 0.0, "search_C_smallest": 0.1, "search_minus_train_C": 0.1}


@pytest.mark.parametrize(
    ("judge", "seen", "name", "changes"),
    [
        (wiring._grown, GROWN, "growing", {
            "C turns from positive to negative": [{"C_first": -0.2}, {"C_last": 0.05}, {"C_last": math.nan}],
            "None gains at first": [{"q_in_peak": 0.101}],
            "and loses in the end": [{"q_in_end": 0.15}],
            "fewer costs are positive": [{"positive_last": 0.9}],
        }),
        (wiring._widened, WIDENED, "width preferred", {
            "intermediate edges are less probable": [{"q_in_end": 0.9}],
            # as many in number, but fewer of the six are left
            "fewer of them are kept": [{"kept_int": 6.0}],
            "they cost more than input edges of their nodes": [
                {"intermediate_minus_input_cost": -0.1}, {"intermediate_minus_input_cost": math.nan},
            ],
        }),
        (wiring._collapsed, COLLAPSED, "collapsed", {
            "all edges are None": [{"kept_in": 1.0}, {"kept_int": 1.0}],
            "held-out C stays positive": [{"search_C_smallest": -0.1}],
            "training C is below it": [{"search_minus_train_C": -0.1}],
        }),
    ],
    ids=["P1", "P2", "P3"],
)  # fmt: skip
def test_verdicts(monkeypatch, judge, seen, name, changes):
    def verdict(of: Mapping[str, float]) -> dict:
        monkeypatch.setattr(wiring, "measures", lambda found: of)
        return judge(None)

    assert verdict(seen) == {"names": [name], **dict.fromkeys(changes, True)}
    for sign, others in changes.items():
        for other in others:
            assert verdict({**seen, **other}) == {
                "names": [f"not seen: {sign}"], **{s: s != sign for s in changes},
            }  # fmt: skip


def test_derived_cells_are_told_by_rule():
    ops = ("none", "skip_connect", "sep_conv_3x3")
    space = CellSpace("s", minimal_cell(ops), cells=3, channels=2, reductions=(1, 2))
    found = fabricated(space, records=2)
    logits = np.zeros((2, 5, 3))
    # edges (0,2) (1,2) (0,3) (1,3) (2,3); on the weakest of the last three DARTS's rule has None
    logits[0] = [[3, 1, 0], [0, 2, 1], [0, 0, 9], [5, 0, 1], [0, 3, 0]]
    logits[1] = [[9, 0, 1], [9, 1, 0], [9, 3, 0], [9, 0, 4], [9, 5, 0]]
    found = CellSearchResult(**{**vars(found), "logits": logits})
    rows = wiring._derivation_table({7: found}).rows
    assert rows == (
        ("seed 7", "argmax (its own)", "normal: (1,2)=skip_connect (0,3)=sep_conv_3x3 (2,3)=skip_connect; reduction: "),
        ("seed 7", "darts",
         "normal: (0,2)=skip_connect (1,2)=skip_connect (0,3)=sep_conv_3x3 (2,3)=skip_connect; "
         "reduction: (0,2)=sep_conv_3x3 (1,2)=skip_connect (1,3)=sep_conv_3x3 (2,3)=skip_connect"),
    )  # fmt: skip


def test_costs_are_those_of_the_last_cell(monkeypatch):
    """Means, shares and marks of fabricated tables: two networks of two cells, of which the first is not told."""
    rng = np.random.default_rng(0)
    cfg = CostConfig(**{**TINY, "cells": 2}, nets=2, batches=3)
    given = []

    def fake(net, loader, *, batches, seed, device):
        shape = (2, 5, 8)
        count = rng.integers(2, 5, shape).astype(float)
        total = count * rng.normal(0.2, 1, shape)
        # the first cell's are all positive
        total[0] = abs(total[0]) + 1
        given.append((total, count))
        outputs = torch.zeros(3, 4, dtype=torch.float64)
        outputs[0] = torch.tensor([6.0 if len(given) == 1 else 1.0, 0, 0, 10])
        return CostTable(*map(torch.tensor, (total, total**2 / count + count, count))), outputs

    monkeypatch.setattr(wiring, "monte_carlo", fake)
    monkeypatch.setattr(CostConfig, "published", True)
    monkeypatch.setattr(wiring, "_sums_table", lambda cfg, runner: None)
    monkeypatch.setattr(wiring, "_variants_table", lambda cfg, runner: None)
    monkeypatch.setattr(wiring, "_searches", lambda *args, **changes: {
        seed: fabricated(cfg.space(), records=3, seed=seed) for seed in (0, 1)})  # fmt: skip
    found = wiring._cost(cfg, SimpleNamespace(device="cpu"))
    rows = found["tables"][0].rows
    for row, pair, label in zip(rows, (given[:2], given[2:]), ("initialisation", "trained"), strict=True):
        total, count = (sum(g[i][1, :, 1:] for g in pair) for i in (0, 1))
        mean = total / count
        squares = sum((g[0][1, :, 1:] ** 2 / g[1][1, :, 1:] + g[1][1, :, 1:]) for g in pair)
        error = np.sqrt((squares - total**2 / count) / (count - 1) / count)
        single = np.mean([(g[0][1, :, 1:] > 0).mean() for g in pair])
        clear = [int((sign * mean > 2 * error).sum()) for sign in (1, -1)]
        assert row == (
            label, "2", f"{(mean > 0).mean():.2f}", f"{single:.2f}", f"{mean.mean():+.4f}", f"{error.mean():.4f}",
            f"{clear[0]} / {clear[1]}",
        )  # fmt: skip
        panel = next(p for p in found["figures"][0]["panels"] if p["label"] == label)
        np.testing.assert_allclose(panel["mean"][:, 1:], mean)
        assert np.isnan(panel["mean"][:, 0]).all() and panel["positive"] == (mean > 0).mean()
        if label == "initialisation":
            share = (mean > 0).mean()
    expected = {"mean C": (0, INF, 7 / 20), "share of costs > 0": (0.6, 1, share)}
    assert_marks(found, {f"initialisation: {name}": mark for name, mark in expected.items()})


def test_sums_are_of_two_cells_without_skips(monkeypatch):
    asked = []

    def initial(cfg, runner, space, nets):
        asked.append(space)
        total = torch.arange(2.0 * 5 * 8).view(2, 5, 8)
        return [CostTable(total, total, total)], 0.0

    monkeypatch.setattr(wiring, "_initial", initial)
    table = wiring._sums_table(CostConfig(cells=3, reductions=True, batches=10), None)
    assert table.rows == (("second last cell", "+7.80e+01"), ("last cell", "+2.38e+02"))
    assert (asked[0].cells, asked[0].reductions) == (2, ())
    assert ["skip_connect" in edge.ops for edge in asked[0].cell.edges] == [True] * 4 + [False]


def test_other_tables_of_local_costs(reports):
    _, found, _ = reports
    sums, variants = found["cost"].tables[1:]
    before, last = (float(row[1]) for row in sums.rows)
    # corollary 1.2: what is not the last cell costs nothing
    assert abs(before) < 0.02 * abs(last)
    assert [row[0] for row in variants.rows] == [
        "as above", "order conv_relu_norm", "order conv_norm_relu", "norm layer", "norm instance",
    ]  # fmt: skip
    cost = {row[0]: float(row[3]) for row in variants.rows}
    # theorem 5: without scale and shift an instance norm leaves nothing
    assert cost["norm instance"] == pytest.approx(0, abs=1e-5) and abs(cost["norm layer"]) > 1e-4
