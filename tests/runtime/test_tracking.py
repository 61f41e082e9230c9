"""Metrics to Weights & Biases and MLflow, with stand-ins for both packages, which may be absent or fail."""

from __future__ import annotations

import sys
import types

import pytest

from nasfast.runtime.progress import call, calling
from nasfast.runtime.termination import Terminated
from nasfast.runtime.tracking import tracked
from nasfast.train.log import TrainLog, read_metrics

SETTINGS = {"seed": 3, "search": {"top_k": 1}}


class Recorder:
    """Calls by name, with their arguments; raises at the call `fails`."""

    def __init__(self, fails=""):
        self.calls, self.fails = [], fails

    def __getattr__(self, name):
        def call(*arguments, **keywords):
            if name == self.fails:
                raise SystemError("no server\nanswers")
            self.calls.append((name, arguments, keywords))
            return self

        return call

    def of(self, name):
        return [(arguments, keywords) for called, arguments, keywords in self.calls if called == name]


def install(monkeypatch, name, fails=""):
    recorder = Recorder(fails)
    module = types.ModuleType(name)
    module.__getattr__ = lambda attribute: getattr(recorder, attribute)
    # as both packages say that no run is active
    module.run, module.active_run = None, lambda: None
    monkeypatch.setitem(sys.modules, name, module)
    return recorder


def train(folder, names):
    with tracked(names, folder, SETTINGS):
        for stage in ("supernet", "retrain/best"):
            with TrainLog(folder, stage, step=0, total=2, shown=False) as file:
                file.write(1, loss=2.5, top1=None)
                file.write(2, loss=1.5)


def test_wandb_gets_settings_and_every_metric_with_the_steps_of_its_stage(tmp_path, monkeypatch):
    wandb = install(monkeypatch, "wandb")
    train(tmp_path / "mine", ["wandb"])
    ((_, started),) = wandb.of("init")
    assert started["name"] == "mine" and started["config"] == SETTINGS and started["dir"] == str(tmp_path / "mine")
    assert [arguments[0] for arguments, _ in wandb.of("log")] == [
        {"step": 1, "supernet/loss": 2.5},
        {"step": 2, "supernet/loss": 1.5},
        {"step": 1, "retrain/best/loss": 2.5},
        {"step": 2, "retrain/best/loss": 1.5},
    ]
    assert wandb.of("finish") == [((0,), {})]


def test_mlflow_gets_settings_and_every_metric(tmp_path, monkeypatch):
    mlflow = install(monkeypatch, "mlflow")
    train(tmp_path / "mine", ["mlflow"])
    assert mlflow.of("start_run") == [((), {"run_name": "mine"})]
    assert mlflow.of("log_params") == [(({"seed": 3, "search.top_k": 1},), {})]
    assert mlflow.of("log_metrics")[-1] == (({"retrain/best/loss": 1.5},), {"step": 2})
    assert len(mlflow.of("log_metrics")) == 4 and mlflow.of("end_run") == [(("FINISHED",), {})]


@pytest.mark.parametrize("error", [ValueError("diverged"), Terminated()])
def test_a_training_that_raises_does_not_count_as_finished(tmp_path, monkeypatch, error):
    wandb, mlflow = (install(monkeypatch, name) for name in ("wandb", "mlflow"))
    with pytest.raises(type(error)), tracked(["wandb", "mlflow"], tmp_path, {}):
        call("a", 1, {"loss": 1.0})
        raise error
    assert wandb.of("finish") == [((1,), {})]
    assert mlflow.of("end_run") == [(("FAILED",), {})]


@pytest.mark.parametrize(
    ("name", "fails"),
    [*(("wandb", call) for call in ("init", "log", "finish")), ("mlflow", "log_params"), ("mlflow", "end_run")],
)
def test_a_tracker_that_fails_is_given_up_with_one_warning(tmp_path, monkeypatch, caplog, name, fails):
    install(monkeypatch, name, fails)
    other = install(monkeypatch, "mlflow" if name == "wandb" else "wandb")
    train(tmp_path, ["wandb", "mlflow"])
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 1, 2]
    (warning,) = [r.getMessage() for r in caplog.records if "gets no metrics" in r.getMessage()]
    assert warning.startswith(f"{name} gets no metrics from here on (SystemError: no server answers)")
    assert len(other.of("log_metrics" if name == "wandb" else "log")) == 4


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_a_warning_that_says_what_to_do(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setitem(sys.modules, name, None)
    train(tmp_path, [name])
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 1, 2]
    assert caplog.text.count("gets no metrics") == 1 and f"pip install 'nasfast[{name}]'" in caplog.text


def test_one_run_for_all_stages_and_none_without_metrics(tmp_path, monkeypatch):
    wandb = install(monkeypatch, "wandb")
    with tracked(["wandb"], tmp_path, {}):
        pass
    assert wandb.calls == []
    with tracked(["wandb"], tmp_path, {}):
        with tracked(["wandb"], tmp_path, {}):
            call("a", 1, {"loss": 1.0})
        call("b", 1, {"loss": 1.0})
    assert len(wandb.of("init")) == len(wandb.of("finish")) == 1 and len(wandb.of("log")) == 2
    call("c", 1, {"loss": 1.0})
    assert len(wandb.of("log")) == 2


def test_callbacks_get_the_metrics_of_each_stage_within_their_block(tmp_path):
    seen = []
    with calling([lambda *given: seen.append(given)]), TrainLog(tmp_path, "supernet", step=0, total=2) as file:
        file.write(1, loss=2.5, top1=None)
    call("supernet", 2, {})
    assert seen == [("supernet", 1, {"loss": 2.5, "top1": None})]
