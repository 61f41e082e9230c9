"""The wiring study with tiny settings: what it computes of searches, judges and writes, and its commands."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from in_process import run_tasks_here
from tiny import write_folder

from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.data import DataError
from nasfast.research.cells.search import TRAIN, CellSearchEngine
from nasfast.research.studies.report import StudyReport
from nasfast.research.studies.run import run_study
from nasfast.research.studies.wiring.config import CollapseConfig, CostConfig, GrowthConfig, TheoremsConfig, WidthConfig
from nasfast.runtime.progress import Progress
from nasfast.spaces import load_arch, read_space
from nasfast.train import CheckpointError

TINY = {
    "cell": "minimal",
    "channels": 4,
    "samples": 16,
    "steps": 6,
    "records": 3,
    "seeds": 2,
    "batch_size": 4,
    "threads": 1,
}
STUDIES = {
    "p1": ("wiring p1", GrowthConfig(**TINY)),
    "p2": ("wiring p2", WidthConfig(**TINY, control_steps=4)),
    "p3": ("wiring p3", CollapseConfig(**TINY, control_steps=4)),
    "cost": ("wiring cost", CostConfig(**TINY, nets=2, batches=3)),
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
        found[kind] = run_study(study, cfg, out=out)
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


@pytest.mark.slow
def test_studies_share_their_searches(reports):
    out, _, taken = reports
    assert taken == STEPS
    assert {path.parent.name for path in out.glob("*/search.npz")} == FOLDERS


@pytest.fixture
def shown(monkeypatch):
    """(name, done, total) of all that a study shows of its progress."""
    told = []

    class Shown(Progress):
        def update(self, step, text=None):
            told.append((self._stage, step, self._total))

    monkeypatch.setattr("nasfast.research.studies.run.Progress", Shown)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["p2", "cost"])
def test_a_command_repeats_nothing_and_tells_the_same(reports, steps, kind, capsys, shown):
    out, found, _ = reports
    steps.take()
    assert main(["wiring", kind, *flags(STUDIES[kind][1]), "--out", str(out)]) == 0
    assert steps.take() == 0
    assert any(name.endswith(", seed 1") and done == total for name, done, total in shown)
    form = json.loads((out / f"wiring-{kind}.json").read_text(encoding="utf-8"))
    assert told(form) == told(found[kind].to_dict())
    page = (out / f"wiring-{kind}.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == len(found[kind].figures) == len(list((out / f"wiring-{kind}").glob("*.svg")))
    assert "settings are not those of the pass marks" in page and ">pass marks<" not in page
    printed = capsys.readouterr().out
    assert printed.startswith(f"wiring-{kind}: ") and f"written: {out / f'wiring-{kind}.html'}" in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["p3"])
def test_searches_as_tasks_have_the_same_bytes(reports, steps, kind, tmp_path, monkeypatch, shown):
    """Every search of a study is handed to the executor together, and read by the study as finished."""
    out, found, taken = reports
    run_tasks_here(monkeypatch)
    steps.take()
    assert main(["wiring", kind, *flags(STUDIES[kind][1]), "--out", str(tmp_path), "--attempts", "2"]) == 0
    folders = {path.parent for path in tmp_path.glob("*/task.json")}
    assert folders == {path.parent for path in tmp_path.glob("*/search.npz")} and len(folders) == 6
    assert len(shown) == len(folders), "a search ran in the study itself"
    # it finds the searches of p1 when it runs behind p1
    assert steps.take() == taken[kind] + taken["p1"]
    for folder in folders:
        # a checkpoint also has the state of torch's global generator, which no search uses or sets
        for path in (out / folder.name).glob("*.*"):
            if path.suffix in (".npz", ".json", ".yaml"):
                assert (folder / path.name).read_bytes() == path.read_bytes(), path
    form = json.loads((tmp_path / f"wiring-{kind}.json").read_text(encoding="utf-8"))
    assert told(form) == told(found[kind].to_dict())


def test_a_search_that_fails_as_a_task_is_named_with_its_log(tmp_path, monkeypatch, capsys):
    run_tasks_here(monkeypatch)

    def fail(self, x, y, paths=None):
        raise RuntimeError("no memory")

    monkeypatch.setattr(CellSearchEngine, "forward_backward", fail)
    assert main(["wiring", "p1", *flags(GrowthConfig(**TINY)), "--out", str(tmp_path), "--attempts", "1"]) == 1
    said = capsys.readouterr().err
    assert "2 of 2 searches are not finished; the same command continues; dsnas-s0: RuntimeError: no memory" in said
    assert "Traceback" in (tmp_path / "dsnas-s0/task.log").read_text()


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
        ({"channels": 6}, "belongs to another search space.*another --out folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            run_study("wiring p1", GrowthConfig(**{**TINY, **changes}), out=out)
    assert main(["wiring", "p1", *flags(GrowthConfig(**TINY, noise=1.0)), "--out", str(out)]) == 1
    assert "data.noise was 4.0, now 1.0" in capsys.readouterr().err
    assert steps.take() == 0
    after = tree(out)
    assert {path: after[path] for path in before} == before


@pytest.mark.parametrize(("method", "name"), [("darts", "DARTS"), ("proxyless", "ProxylessNAS")])
def test_other_methods(tmp_path, method, name):
    report = run_study("wiring p1", GrowthConfig(**{**TINY, "seeds": 1}, method=method), out=tmp_path)
    assert report.subject.startswith(f"P1, growing: {name} on 1 minimal cell(s), 4 channels, 6 steps")
    arrays = np.load(tmp_path / f"{method}-s0" / "search.npz")
    # these three measure every operation in every step
    assert (arrays["costs"][:, TRAIN, 2, 0, :, 1:] == 2).all()
    own = [row[1] for row in report.tables[1].rows if "its own" in row[1]]
    assert own == ["darts (its own)" if method == "darts" else "argmax (its own)"]


def test_reduction_cells_have_figures_of_their_own(tmp_path):
    cfg = GrowthConfig(**{**TINY, "seeds": 1}, cells=3, reductions=True)
    report = run_study("wiring p1", cfg, out=tmp_path)
    p = np.load(tmp_path / "dsnas-s0" / "search.npz")["probabilities"]
    assert p.shape == (4, 2, 5, 8)
    figures = {figure.title: figure for figure in report.figures}
    for t, kind in enumerate(("normal", "reduction")):
        edges = figures[f"seed 0, {kind} cell"].axes
        assert np.array_equal([[y.get_ydata() for y in edge.lines] for edge in edges], p[:, t].transpose(1, 2, 0))
    np.testing.assert_allclose(figures["P1"].axes[1].lines[0].get_ydata(), p[:, :, :4, 0].mean((1, 2)))
    arch = load_arch(tmp_path / "dsnas-s0" / "arch_argmax.json", read_space(tmp_path / "dsnas-s0" / "space.yaml"))
    assert len(arch) == 10
    text = report.tables[1].rows[0][2]
    assert text.startswith("normal:") and "; reduction:" in text


def test_without_a_directory_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = run_study("wiring p1", GrowthConfig(**{**TINY, "seeds": 1, "steps": 1}))
    assert report.tables and not list(tmp_path.iterdir())


def test_other_tables_of_local_costs(reports):
    _, found, _ = reports
    sums, variants = found["cost"].tables[1:]
    before, last = (float(row[1]) for row in sums.rows)
    # corollary 1.2: what is not the last cell costs nothing
    assert abs(before) < 0.02 * abs(last)
    assert [row[0] for row in variants.rows] == [
        "as above",
        "order conv_relu_norm",
        "order conv_norm_relu",
        "norm layer",
        "norm instance",
    ]
    cost = {row[0]: float(row[3]) for row in variants.rows}
    # theorem 5: without scale and shift an instance norm leaves nothing
    assert cost["norm instance"] == pytest.approx(0, abs=1e-5) and abs(cost["norm layer"]) > 1e-4


# --- settings and images ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (GrowthConfig, {"batch_size": 1}, "batch_size must be at least 2"),
        (GrowthConfig, {"noise": math.nan}, "noise must not be negative, got nan"),
        (GrowthConfig, {"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (GrowthConfig, {"reductions": True, "cells": 2}, "reductions need at least 3 cells.*got cells=2"),
        (WidthConfig, {"control_steps": 0}, "control_steps must be at least 1, got 0"),
        (CollapseConfig, {"second_order": True}, "second_order belongs to method='darts', got 'dsnas'"),
        (CostConfig, {"nets": 0}, "nets must be at least 1"),
        (TheoremsConfig, {"batch": 0}, "batch must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_a_missing_gpu_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        run_study("wiring p1", GrowthConfig(**TINY, device="cuda"), out=tmp_path)
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
    # P1 with the settings of the local costs does not have the defaults of P1
    assert not GrowthConfig(cell="minimal", channels=8).published


@pytest.fixture
def images(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # more classes than the synthetic images have, some with a label above theirs
    return write_folder(tmp_path / "images", {f"class{i:02d}": 2 for i in range(12)}, side=8)


def test_images_of_a_folder_on_one_and_two_levels(images, tmp_path, steps):
    settings = {**TINY, "seeds": 1, "batch_size": 5, "images": str(images), "resolution": 8}
    cfg = CollapseConfig(**settings, control_steps=2)
    steps.take()
    report = run_study("wiring p3", cfg, out=tmp_path / "out")
    # 24 images are four batches of 5, half of them two; the fixed probabilities are of synthetic images
    assert steps.take() == 8 + 6 + 2
    assert "6 steps, images of images" in report.subject
    for name, size in (("dsnas", 8), ("dsnas-bilevel", 6)):
        space = read_space(tmp_path / "out" / f"{name}-s0" / "space.yaml")
        assert (space.num_classes, space.resolution) == (12, 8)
        arrays = np.load(tmp_path / "out" / f"{name}-s0" / "search.npz")
        assert arrays["steps"][-1] == size
        assert arrays["outputs"][:, :, 0, -1].sum(0).tolist() == [5 * size, 5 * size * (size == 6)]
    report = run_study("wiring p1", GrowthConfig(**settings), out=tmp_path / "out")
    assert steps.take() == 0 and "8 steps, images of images" in report.subject
    with pytest.raises(CheckpointError, match="data.resolution was 8, now 9|another search space"):
        run_study("wiring p1", GrowthConfig(**{**settings, "resolution": 9}), out=tmp_path / "out")


def test_folders_that_cannot_be_used(tmp_path):
    for counts, message in (({"a": 3}, "has one class only"), ({"a": 2, "b": 1}, "class 'b' has 1 image")):
        folder = write_folder(tmp_path / str(len(counts)), counts, side=8)
        with pytest.raises(DataError, match=message):
            run_study("wiring p3", CollapseConfig(**TINY, images=str(folder), resolution=8), out=tmp_path / "out")
    with pytest.raises(DataError, match="does not exist"):
        run_study("wiring p1", GrowthConfig(**TINY, images=str(tmp_path / "absent")), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
