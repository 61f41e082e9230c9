"""How a study is carried out: its threads, its progress, and what its report says of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nasfast.measure.doctor import environment
from nasfast.measure.timing import machine, measuring
from nasfast.research.studies import registry
from nasfast.research.studies.report import StudyReport
from nasfast.runtime.device import torch_device
from nasfast.runtime.progress import Progress
from nasfast.settings import TaskSettings

Done = Callable[[int], None]
"""To be called with how much of a part of a study is done."""
Task = Callable[[str, int], Done]
"""Given the name of a part of a study and its size, returns its `Done`."""


@contextmanager
def progress() -> Iterator[Task]:
    """Shows the part of a study that runs, one at a time; see `nasfast.runtime.progress.Progress`."""
    with ExitStack() as current:

        def task(name: str, total: int) -> Done:
            current.close()  # the part before has ended
            part = current.enter_context(Progress(name, total))

            def update(done: int) -> None:
                part.update(done)
                if done >= total:
                    current.close()  # what follows may show its own progress

            return update

        yield task


def no_task(name: str, total: int) -> Done:
    """A `Task` that reports no progress, for measurements that run outside a study."""
    return lambda done: None


def run_study(
    name: str, config: Any = None, *, out: str | Path | None = None, tasks: TaskSettings | None = None
) -> StudyReport:
    """Run a study of the registry with the threads of its config, with progress on standard error.

    Args:
        name: such as `isometry` or `moments quick`.
        config: an instance of the study's config class; None takes its defaults.
        out: directory that the study may resume from and write to; None for none.
        tasks: where the parts of a study that has `tasks` run in processes of their own; None for this process.

    Returns:
        The study's report with `name`, `config`, `seconds`, `machine` and `environment`.

    Raises:
        ConfigError: the config's device is cuda and there is none.
    """
    study = registry.find(name)
    run, config = study.load("run"), study.load("config")() if config is None else config
    device = str(torch_device(getattr(config, "device", "cpu")))
    start = time.perf_counter()
    with measuring(config.threads):
        with progress() as task:
            keywords = {} if tasks is None else {"tasks": tasks}
            report: StudyReport = run(config, None if out is None else Path(out), task, **keywords)
        computer = {"device": device, **machine()}
    return replace(
        report,
        name=study.files,
        config=config,
        seconds=time.perf_counter() - start,
        machine=computer,
        environment=environment(),
    )
