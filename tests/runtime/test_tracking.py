"""Metrics to Weights & Biases, Trackio and MLflow, with stand-ins for the packages, which may be absent or fail."""

from __future__ import annotations

import sys
from operator import attrgetter
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest

from nasfast.runtime import progress
from nasfast.runtime.progress import calling
from nasfast.runtime.termination import Terminated
from nasfast.runtime.tracking import tracked
from nasfast.train.log import TrainLog, read_metrics

SETTINGS = {"seed": 3, "search": {"top_k": 1}}


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for the packages, which take every call."""
    found = SimpleNamespace(wandb=MagicMock(), trackio=MagicMock(), mlflow=MagicMock())
    for name, package in vars(found).items():
        monkeypatch.setitem(sys.modules, name, package)
    return found


def train(folder, names):
    with tracked(names, folder, SETTINGS):
        for stage in ("supernet", "retrain/best"):
            with TrainLog(folder, stage, step=0, total=2, shown=False) as file:
                file.write(1, loss=2.5, top1=None)
                file.write(2, loss=1.5)


def test_all_get_settings_and_every_metric_with_the_steps_of_its_stage(tmp_path, packages):
    train(tmp_path / "mine", ["wandb", "trackio", "mlflow"])
    lines = [("supernet/loss", 2.5, 1), ("supernet/loss", 1.5, 2), ("retrain/best/loss", 2.5, 1)]
    lines.append(("retrain/best/loss", 1.5, 2))
    folder = str(tmp_path / "mine")
    packages.wandb.init.assert_called_once_with(project="nasfast", name="mine", dir=folder, config=SETTINGS)
    run = packages.wandb.init.return_value
    assert run.log.call_args_list == [call({name: loss, "step": step}) for name, loss, step in lines]
    run.finish.assert_called_once_with(0)
    packages.trackio.init.assert_called_once_with(project="nasfast", name="mine", config=SETTINGS)
    run = packages.trackio.init.return_value
    assert run.log.call_args_list == [call({name: loss}, step=step) for name, loss, step in lines]
    run.finish.assert_called_once_with()
    packages.mlflow.start_run.assert_called_once_with(run_name="mine")
    packages.mlflow.log_params.assert_called_once_with({"seed": 3, "search.top_k": 1})
    assert packages.mlflow.log_metrics.call_args_list == [call({name: loss}, step=step) for name, loss, step in lines]
    packages.mlflow.end_run.assert_called_once_with("FINISHED")


@pytest.mark.parametrize("error", [ValueError("diverged"), Terminated()])
def test_a_training_that_raises_does_not_count_as_finished(tmp_path, packages, error):
    with pytest.raises(type(error)), tracked(["wandb", "mlflow"], tmp_path, {}):
        progress.call("a", 1, {"loss": 1.0})
        raise error
    packages.wandb.init.return_value.finish.assert_called_once_with(1)
    packages.mlflow.end_run.assert_called_once_with("FAILED")


@pytest.mark.parametrize(
    ("name", "method"),
    [("wandb", method) for method in ("init", "init.return_value.log", "init.return_value.finish")]
    + [("trackio", "init.return_value.log")]
    + [("mlflow", method) for method in ("log_params", "end_run")],
)
def test_a_tracker_that_fails_is_given_up_with_one_warning(tmp_path, packages, caplog, name, method):
    attrgetter(f"{name}.{method}")(packages).side_effect = SystemError("no server\nanswers")
    train(tmp_path, ["wandb", "trackio", "mlflow"])
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 1, 2]
    (warning,) = [r.getMessage() for r in caplog.records if "gets no metrics" in r.getMessage()]
    assert warning.startswith(f"{name} gets no metrics from here on (SystemError: no server answers)")
    other = packages.mlflow.log_metrics if name == "wandb" else packages.wandb.init.return_value.log
    assert other.call_count == 4


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_package_that_is_not_installed_is_a_warning_that_says_what_to_do(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setitem(sys.modules, name, None)
    train(tmp_path, [name])
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 1, 2]
    assert caplog.text.count("gets no metrics") == 1 and f"pip install 'nasfast[{name}]'" in caplog.text


def test_one_run_for_all_stages_and_none_without_metrics(tmp_path, packages):
    with tracked(["wandb"], tmp_path, {}):
        pass
    assert packages.wandb.mock_calls == []
    with tracked(["wandb"], tmp_path, {}):
        with tracked(["wandb"], tmp_path, {}):
            progress.call("a", 1, {"loss": 1.0})
        progress.call("b", 1, {"loss": 1.0})
    progress.call("c", 1, {"loss": 1.0})
    run = packages.wandb.init.return_value
    assert packages.wandb.init.call_count == run.finish.call_count == 1 and run.log.call_count == 2


def test_what_trackers_print_goes_to_standard_error(tmp_path, packages, capsys):
    """Standard output has the results of a command."""
    packages.trackio.init.side_effect = lambda **_: print("a run begins") or MagicMock()
    train(tmp_path, ["trackio"])
    assert capsys.readouterr() == ("", "a run begins\n")


def test_callbacks_get_the_metrics_of_each_stage_within_their_block(tmp_path):
    seen = []
    with calling([lambda *given: seen.append(given)]), TrainLog(tmp_path, "supernet", step=0, total=2) as file:
        file.write(1, loss=2.5, top1=None)
    progress.call("supernet", 2, {})
    assert seen == [("supernet", 1, {"loss": 2.5, "top1": None})]
