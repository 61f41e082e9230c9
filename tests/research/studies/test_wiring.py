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

from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.research.cells.search import TRAIN, CellSearchEngine
from nasfast.research.studies.report import StudyReport
from nasfast.research.studies.run import run_study
from nasfast.research.studies.wiring.config import CollapseConfig, CostConfig, LearntConfig, WidthConfig
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
    "threads": 1,
}
STUDIES = {
    "p1": ("wiring p1", LearntConfig(**TINY)),
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
            if self._shown:
                told.append((self._stage, step, self._total))

    monkeypatch.setattr("nasfast.research.studies.wiring.study.Progress", Shown)
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
    assert main(["wiring", "p1", *flags(LearntConfig(**TINY)), "--out", str(tmp_path), "--attempts", "1"]) == 1
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
            run_study("wiring p1", LearntConfig(**{**TINY, **changes}), out=out)
    assert main(["wiring", "p1", *flags(LearntConfig(**TINY, noise=1.0)), "--out", str(out)]) == 1
    assert "data.noise was 4.0, now 1.0" in capsys.readouterr().err
    assert steps.take() == 0
    after = tree(out)
    assert {path: after[path] for path in before} == before


@pytest.mark.parametrize("method", ["darts", "proxyless"])
def test_other_methods(tmp_path, method):
    report = run_study("wiring p1", LearntConfig(**{**TINY, "seeds": 1}, method=method), out=tmp_path)
    assert report.subject.startswith(f"P1, growing: {method} on 1 minimal cell(s), 4 channels, 6 steps")
    arrays = np.load(tmp_path / f"{method}-s0" / "search.npz")
    # these three measure every operation in every step
    assert (arrays["costs"][:, TRAIN, 2, 0, :, 1:] == 2).all()
    own = [row[1] for row in report.tables[1].rows if "its own" in row[1]]
    assert own == ["darts (its own)" if method == "darts" else "argmax (its own)"]


def test_figures_show_the_records_of_a_search(reports):
    out, found, _ = reports
    p = np.load(out / "dsnas-s0" / "search.npz")["probabilities"]
    patterns, probabilities, *_ = found["p1"].figures
    lines = [[line.get_ydata() for line in edge.lines] for edge in probabilities.axes]
    assert np.array_equal(lines, p[:, 0].transpose(1, 2, 0))
    np.testing.assert_allclose(patterns.axes[1].lines[0].get_ydata(), p[:, 0, :4, 0].mean(1))
    arch = load_arch(out / "dsnas-s0" / "arch_argmax.json", read_space(out / "dsnas-s0" / "space.yaml"))
    assert len(arch) == 5


def test_without_a_directory_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = run_study("wiring p1", LearntConfig(**{**TINY, "seeds": 1, "steps": 1}))
    assert report.tables and not list(tmp_path.iterdir())


# --- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (LearntConfig, {"noise": math.nan}, "noise must not be negative, got nan"),
        (LearntConfig, {"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (WidthConfig, {"control_steps": 0}, "control_steps must be at least 1, got 0"),
        (CostConfig, {"nets": 0}, "nets must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_a_missing_gpu_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        run_study("wiring p1", LearntConfig(**TINY, device="cuda"), out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_pass_marks_are_of_the_default_settings():
    for config in (LearntConfig, WidthConfig, CollapseConfig, CostConfig):
        assert config().published
        assert config(seed=3, seeds=1, threads=2, device="auto").published
        for changes in ({"steps": 100}, {"records": 20}):
            assert not config(**changes).published
    for changes in ({"method": "snas"}, {"alpha_lr": 0.1}):
        assert not LearntConfig(**changes).published
    assert not WidthConfig(control_steps=5).published and not CostConfig(nets=3).published
    # P1 with the settings of the local costs does not have the defaults of P1
    assert not LearntConfig(cell="minimal", channels=8).published
