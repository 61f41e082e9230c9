"""Metrics of a run to Weights & Biases and MLflow, through their own packages; a failure never stops a training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from nasfast.config import flatten

_LOG = logging.getLogger(__name__)

TRACKERS = ("wandb", "mlflow")
"""Names of the packages, which are those of the extras too."""

_REMEDIES = {
    "wandb": "Install it with pip install 'nasfast[wandb]', and log in with `wandb login`, or set WANDB_MODE=offline "
    "and send the run later with `wandb sync`",
    "mlflow": "Install it with pip install 'nasfast[mlflow]', and set MLFLOW_TRACKING_URI to a server that answers, or "
    "to a file, such as sqlite:///mlflow.db",
}
# Without these limits wandb waits for a server for a minute and a half, and MLflow for four minutes or more. MLflow's
# are variables of its own, which the user may have set.
_SECONDS = 20
_MLFLOW_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(_SECONDS)}


Ending = Literal["finished", "failed", "stopped"]
"""How the stages of a run ended: as they should, by an error, or by SIGTERM or Ctrl-C, from which they continue."""


class _Tracker(Protocol):
    """A run of a tracking package. A run that the caller has begun gets the metrics, and stays open."""

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, ending: Ending) -> None: ...


class _Wandb:
    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        self._stages: set[str] = set()
        self._ours = wandb.run is None
        if wandb.run is not None:
            self._run = wandb.run
            return
        options = wandb.Settings(init_timeout=_SECONDS)
        self._run = wandb.init(project="nasfast", name=name, dir=str(folder), config=dict(settings), settings=options)

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        if stage not in self._stages:
            # each stage counts its own steps
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._stages.add(stage)
        self._run.log({f"{stage}/step": step, **{f"{stage}/{key}": value for key, value in metrics.items()}})

    def close(self, ending: Ending) -> None:
        if self._ours:
            self._run.finish(exit_code=int(ending != "finished"))


class _Mlflow:
    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        self._ours = mlflow.active_run() is None
        if not self._ours:
            return
        for variable, limit in _MLFLOW_LIMITS.items():
            os.environ.setdefault(variable, limit)
        mlflow.set_experiment("nasfast")
        mlflow.start_run(run_name=name)
        mlflow.log_params(flatten(settings))

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({f"{stage}/{key}": value for key, value in metrics.items()}, step=step)

    def close(self, ending: Ending) -> None:
        if self._ours:
            self._mlflow.end_run({"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[ending])


_KINDS: dict[str, Callable[[str, Path, Mapping[str, Any]], _Tracker]] = {"wandb": _Wandb, "mlflow": _Mlflow}


class _Session:
    """The trackers of a run; each begins with the first metrics, and is given up where it fails."""

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> None:
        self._waiting, self._folder, self._settings = list(names), folder, settings
        self._open: dict[str, _Tracker] = {}

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        while self._waiting:
            name = self._waiting.pop()
            self._try(name, partial(self._begin, name))
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.log, stage, step, metrics))

    def close(self, ending: Ending) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.close, ending))

    def _begin(self, name: str) -> None:
        self._open[name] = _KINDS[name](self._folder.resolve().name, self._folder, self._settings)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # of another package: nothing that it raises may stop a training
            self._open.pop(name, None)
            _LOG.warning(
                "%s gets no metrics from here on (%s: %s); the training goes on, and metrics.jsonl has all of them. %s",
                name,
                type(error).__name__,
                " ".join(str(error).split())[:200],
                _REMEDIES[name],
            )


@contextmanager
def _restored_limits() -> Iterator[None]:
    """Within this block a tracker may set MLflow's limits; afterwards the process has those that it had before."""
    absent = [variable for variable in _MLFLOW_LIMITS if variable not in os.environ]
    try:
        yield
    finally:
        for variable in absent:
            os.environ.pop(variable, None)


_session: _Session | None = None


@contextmanager
def tracked(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Within this block, send everything that `log` gets to these trackers; an inner block changes nothing.

    A run of Weights & Biases or MLflow that the caller has begun gets the metrics and is left open, with the caller's
    settings. Otherwise a run begins with the first metrics, and ends with the block, as failed where the block raises.

    Args:
        names: of `TRACKERS`.
        folder: the run directory, after which the run is named.
        settings: the settings of the run, as nested mappings.
    """
    global _session
    if _session is not None or not names:
        yield
        return
    _session = _Session(names, folder, settings)
    ending: Ending = "finished"
    with _restored_limits():
        try:
            yield
        except BaseException as error:
            ending = "failed" if isinstance(error, Exception) else "stopped"
            raise
        finally:
            session, _session = _session, None
            session.close(ending)


def log(stage: str, step: int, metrics: Mapping[str, float | int | None]) -> None:
    """Send the metrics of a step to the trackers of the run, if it has any; None is left out."""
    if _session is not None:
        _session.log(stage, step, {key: value for key, value in metrics.items() if value is not None})
