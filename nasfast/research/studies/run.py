"""How a study is carried out: its threads, its progress, and what its report says of the machine."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nasfast.measure.doctor import environment
from nasfast.measure.timing import machine, measuring
from nasfast.research.studies import registry
from nasfast.research.studies.report import StudyReport
from nasfast.runtime.device import torch_device
from nasfast.settings import TaskSettings

_LOG = logging.getLogger(__name__)

_SECONDS_PER_LINE = 10.0

Done = Callable[[int], None]
"""To be called with how much of a part of a study is done."""
Task = Callable[[str, int], Done]
"""Given the name of a part of a study and its size, returns its `Done`."""


@contextmanager
def progress() -> Iterator[Task]:
    """A bar for every task; where standard error is no terminal, a line at most every ten seconds."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _plain_lines
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bars:

        def task(name: str, total: int) -> Done:
            bar = bars.add_task(name, total=total)
            return lambda done: bars.update(bar, completed=done)

        yield task


def _plain_lines(name: str, total: int) -> Done:
    said, last = -math.inf, -1

    def tell(done: int) -> None:
        nonlocal said, last
        if done != last and (done == total or time.monotonic() - said >= _SECONDS_PER_LINE):
            said, last = time.monotonic(), done
            _LOG.info("%s: %d of %d", name, done, total)

    return tell


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
            more = {} if tasks is None else {"tasks": tasks}
            found: StudyReport = run(config, None if out is None else Path(out), task, **more)
        where = {"device": device, **machine()}
    seconds = time.perf_counter() - start
    return replace(found, name=study.files, config=config, seconds=seconds, machine=where, environment=environment())
