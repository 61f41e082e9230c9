"""Metrics of a run to Weights & Biases, Trackio and MLflow by their own packages; a failure never stops a training."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from nasfast.config import flatten
from nasfast.runtime.progress import calling

_LOG = logging.getLogger(__name__)

Send = Callable[[Mapping[str, float], int], Any]
End = Callable[[bool], Any]


def _begin(name: str, run: str, folder: Path, settings: Mapping[str, Any]) -> tuple[Send, End]:
    """Begin a run of a package: what takes metrics and their step, and what takes at the end whether it failed."""
    package = importlib.import_module(name)
    if name == "wandb":
        tracked_run = package.init(project="nasfast", name=run, dir=str(folder), config=dict(settings))
        # each stage counts its own steps, so they are a metric, and not wandb's steps, which only rise
        return (
            lambda metrics, step: tracked_run.log({**metrics, "step": step}),
            lambda failed: tracked_run.finish(int(failed)),
        )
    if name == "trackio":
        tracked_run = package.init(project="nasfast", name=run, config=dict(settings))
        return lambda metrics, step: tracked_run.log(dict(metrics), step=step), lambda failed: tracked_run.finish()
    package.set_experiment("nasfast")
    package.start_run(run_name=run)
    package.log_params(flatten(settings))
    return (
        lambda metrics, step: package.log_metrics(dict(metrics), step=step),
        lambda failed: package.end_run("FAILED" if failed else "FINISHED"),
    )


class _Session:
    """The trackers of a run; each begins with the first metrics, and is given up where it fails."""

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> None:
        self._names, self._runs = list(names), dict[str, tuple[Send, End]]()
        self._begin = lambda name: _begin(name, folder.resolve().name, folder, settings)

    def __call__(self, stage: str, step: int, metrics: Mapping[str, float | int | None]) -> None:
        values = {f"{stage}/{key}": value for key, value in metrics.items() if value is not None}
        for name in list(self._names):
            with self._giving_up(name):
                if name not in self._runs:
                    self._runs[name] = self._begin(name)
                self._runs[name][0](values, step)

    def close(self, *, failed: bool) -> None:
        for name in set(self._names) & self._runs.keys():
            with self._giving_up(name):
                self._runs[name][1](failed)

    @contextmanager
    def _giving_up(self, name: str) -> Iterator[None]:
        try:
            with redirect_stdout(sys.stderr):  # standard output is for the results of a command
                yield
        except Exception as error:  # of another package: nothing that it raises may stop a training
            self._names.remove(name)
            _LOG.warning(
                "%s gets no metrics from here on (%s: %s); metrics.jsonl has all of them. Is it installed "
                "(pip install 'nasfast[%s]'), and does its server answer?",
                name,
                type(error).__name__,
                " ".join(str(error).split())[:200],
                name,
            )


_tracking = False


@contextmanager
def tracked(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Within this block, send the metrics of every training to these packages; an inner block changes nothing.

    The run is named after its folder.
    """
    global _tracking
    if _tracking or not names:
        yield
        return
    session, _tracking, failed = _Session(names, folder, settings), True, True
    try:
        with calling([session]):
            yield
        failed = False
    finally:
        _tracking = False
        session.close(failed=failed)
