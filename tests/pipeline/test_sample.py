"""`rank --train N`: the sample is trained once, grows, is ranked, and refines the search."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict

import pytest
from in_process import run_tasks_here

import nasfast.train.loop as loop
from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.indicators.accuracies import AccuracyError, read_accuracies
from nasfast.indicators.structure import BASELINES
from nasfast.indicators.table import IndicatorTable
from nasfast.ops import precision
from nasfast.pipeline import sample
from nasfast.pipeline.children import TaskResult, save_result
from nasfast.pipeline.evidence import find_space, image_loaders
from nasfast.pipeline.inputs import Inputs
from nasfast.pipeline.networks import train_network
from nasfast.pipeline.run import Run
from nasfast.retrain import load_model
from nasfast.runtime.files import checkpoint_state
from nasfast.search import Limits, stratified_sample
from nasfast.settings import RunConfig, TaskSettings
from nasfast.train import evaluate

ONE = TaskSettings(workers=1, attempts=1)


def train_sample(run, inputs, *args, **named):
    with Run.open(run.cfg, begins=True, threads=False) as open_run:
        return sample.train_sample(open_run, inputs, *args, **named)


@pytest.fixture
def run(tmp_path, config, monkeypatch):
    """A run directory that has its settings and nothing else; samples are of few draws."""
    monkeypatch.setattr("nasfast.search.sampling._POOL", 256)
    run = Run.look(RunConfig.load(config).replace(out=str(tmp_path / "run"), seed=3))
    run.dir.mkdir()
    run.save_config()
    return run


@pytest.mark.slow
def test_a_network_keeps_its_number_type_on_another_machine(run, tmp_path, monkeypatch):
    """It was stopped where `precision: auto` is bf16, and goes on where it is fp32."""
    run = Run.look(run.cfg.replace(data=run.cfg.data.replace(val_fraction=0.6)))
    task = sample.plan_sample(run.cfg, sample.sample_inputs(run.cfg), 10, epochs=2)[0]
    step, steps = loop.update, itertools.count()

    def stopped(*arguments, **named):
        if next(steps) == 30:  # in the second epoch
            raise KeyboardInterrupt
        return step(*arguments, **named)

    monkeypatch.setattr(precision, "default_precision", lambda device: ("bf16", ""))
    monkeypatch.setattr(loop, "update", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_network(tmp_path / "task", **task.arguments, **task.machine)
    (checkpoint,) = (tmp_path / "task/checkpoints").iterdir()
    assert checkpoint_state(checkpoint)["settings"]["train"]["precision"] == "bf16"
    monkeypatch.setattr(precision, "default_precision", lambda device: ("fp32", ""))
    monkeypatch.setattr(loop, "update", step)
    result = train_network(tmp_path / "task", **task.arguments, **task.machine)
    assert result["settings"]["train"]["precision"] == "bf16"


@pytest.mark.slow
def test_a_sample_is_trained_once_and_grows(run, small_forests, capsys, monkeypatch):
    run_tasks_here(monkeypatch)
    out = run.dir
    run = Run.look(run.cfg.replace(data=run.cfg.data.replace(val_fraction=0.6)))
    run.save_config()
    command = ["rank", "--out", str(out), "--epochs", "1", "--workers", "1", "--score", "naswot"]
    assert main([*command, "--train", "10", "--dry_run"]) == 0
    assert "10 trainings of 1 epoch on 577 images, 0 more are finished; 1 at a time" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["config.yaml"]
    assert main([*command, "--train", "10"]) == 0
    inputs = sample.sample_inputs(run.cfg)
    space = inputs.space
    first = read_accuracies(out / "accuracies.json", space)
    assert list(first) == stratified_sample(space, 10, limits=inputs.limits, seed=3)
    assert all(0 < accuracy < 100 for accuracy in first.values()) and len(set(first.values())) > 3
    shown = capsys.readouterr().out
    assert "10 trained architectures" in shown and "naswot" in shown and "sqrt_size" in shown
    assert "Trainings accumulate: the same command with a larger --train keeps these and adds to them." in shown
    report = json.loads((out / "trained.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["naswot", "learned", *BASELINES]
    assert 0 <= report["attainable"] < 1 and f"a tau of about {report['attainable']:.2f} with theirs" in shown
    assert not list(out.glob("trained/*/checkpoints"))
    before = {path: path.stat().st_mtime_ns for path in out.glob("trained/*/task.json")}
    assert main([*command[:3], "--train", "12", "--workers", "1", "--score", "synflow"]) == 0
    grown = read_accuracies(out / "accuracies.json", space)
    assert len(grown) == 12 and {arch: grown[arch] for arch in first} == first
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert sample.estimate_sample(run.cfg, inputs, 12, ONE) == "all 12 architectures are trained"
    assert "1 training of 1 epoch" in sample.estimate_sample(run.cfg, inputs, 13, ONE)
    # fewer lose nothing
    assert train_sample(run, inputs, 10, settings=ONE) == grown
    with pytest.raises(ConfigError, match="has trainings of 1 epochs, --epochs is 2"):
        train_sample(run, inputs, 10, epochs=2, settings=ONE)


def test_a_training_gives_the_accuracy_of_the_trained_network(run, tmp_path):
    task = sample.plan_sample(run.cfg, sample.sample_inputs(run.cfg), 10, epochs=1)[0]
    form = train_network(tmp_path / "a", **task.arguments, **task.machine)
    network = load_model(tmp_path / "a" / "retrain" / "network")
    _, held = image_loaders(run.cfg, find_space(run.cfg))
    measured = evaluate(network, held)
    assert form["top1"] == pytest.approx(measured.top1) and form["images"] == len(held.source)
    # again, from nothing and from what is there
    assert train_network(tmp_path / "b", **task.arguments, **task.machine) == form
    shutil.rmtree(tmp_path / "a" / "retrain" / "network" / "model.safetensors", ignore_errors=True)
    assert train_network(tmp_path / "a", **task.arguments, **task.machine) == form


def test_what_cannot_be_trained_is_refused_before_training(run, monkeypatch, capsys):
    def began(*_):
        raise AssertionError("training began")

    monkeypatch.setattr(sample.TaskRunner, "run", began)
    for other, count, message in (
        (run, 9, "at least 10 architectures are needed"),
        (run, 82, "draws from space 'tiny' within the limits have"),
        (Run.look(run.cfg.replace(data=run.cfg.data.replace(val_fraction=0.01))), 40, "cannot order 40 architectures"),
        (
            Run.look(run.cfg.replace(data=run.cfg.data.replace(val_fraction=0.99))),
            40,
            "training images are less than one",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            train_sample(other, sample.sample_inputs(other.cfg), count)
    assert main(["rank", "--train", "10", "--out", str(run.dir / "none")]) == 1
    assert "is no directory: give the directory of a run" in capsys.readouterr().err
    for score, message in (("naswott", "unknown score 'naswott'"), ("naswot+path_loss", "run `nasfast supernet")):
        assert main(["rank", "--train", "10", "--out", str(run.dir), "--score", score]) == 1
        assert message in capsys.readouterr().err


def test_trainings_outside_tighter_limits_stay_in_the_file(run, monkeypatch):
    """They are not compared, and need no second training when the limits are raised again."""

    def form(task):
        return {**dict.fromkeys(sample._RESULT_KEYS, 0), "top1": 0.5}

    def finished(self, tasks):
        for task in tasks:
            save_result(self.folder / task.name, task, form(task))
        return [TaskResult(t.name, "done", form(t), "", self.folder) for t in tasks]

    monkeypatch.setattr(sample.TaskRunner, "run", finished)
    space = find_space(run.cfg)
    first = train_sample(run, Inputs(space, Limits()), 12, epochs=1)
    limit = sorted(space.cost(arch).macs for arch in first)[8]
    second = train_sample(run, Inputs(space, Limits(max_macs=limit)), 10)
    written = read_accuracies(run.dir / "accuracies.json", space)
    assert all(space.cost(arch).macs <= limit for arch in second)
    assert written.keys() == first.keys() | second.keys() and len(first.keys() - second.keys()) == 3


@pytest.mark.slow
def test_a_comparison_takes_a_table_and_a_sum_of_scores(run, small_forests):
    """trained.json has the tau of rank.json where sums of the table differ only by rounding, and that of A+B."""
    space = find_space(run.cfg)
    archs = stratified_sample(space, 40, seed=1)
    # 0.1 + 0.2 - 0.3 and 0.3 + 0 - 0.3 differ by rounding
    rows = [
        {0: 1.0, 1: 0.1, 2: 0.3},
        {0: 0.2, 1: 0.0, 2: 0.2},
        dict.fromkeys(range(3), -0.3),
        dict.fromkeys(range(3), 0.0),
    ]
    IndicatorTable.from_rows(space, rows, {}).save(run.dir / "indicators.json")
    accuracies = {arch: float(i) for i, arch in enumerate(archs)}
    found = sample.compare_trained(run.cfg, space, accuracies, names=["naswot+synflow"], resamples=10)
    by_table, summed_up = found.rows[:2]
    form = json.loads((run.dir / "rank.json").read_text())
    assert form["resamples"] == 10 and form["predictor"]["kendall"] == asdict(by_table.kendall)
    assert summed_up.name == "naswot+synflow" and summed_up.kendall.value is not None


def test_too_few_finished_trainings_say_how_to_go_on(run, monkeypatch):
    def stopped(self, tasks):
        return [TaskResult(task.name, "stopped", None, "", self.folder) for task in tasks]

    monkeypatch.setattr(sample.TaskRunner, "run", stopped)
    with pytest.raises(AccuracyError, match="0 of 10 architectures are trained.*the same command continues"):
        train_sample(run, sample.sample_inputs(run.cfg), 10, epochs=1)
    assert not (run.dir / "accuracies.json").exists()
