"""One view of all tasks on standard error: how many are done, what runs, and about how long the rest takes."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from nasfast.runtime.progress import LINE_EVERY, duration
from nasfast.tasks.task import Task
from nasfast.tasks.work import PROGRESS_FILE

_LOG = logging.getLogger(__name__)


class View:
    """A bar on a terminal; elsewhere a line every ten minutes."""

    def __init__(self) -> None:
        self._total, self._tasks, self._later, self._later_tasks = 0.0, 0, 0.0, 0
        self._done, self._done_tasks, self._given, self._failed = 0.0, 0, 0.0, 0
        self._phase = ""
        self._begin = self._said = time.monotonic()
        console = Console(file=sys.stderr)
        self._bars = None
        if console.is_terminal:
            columns = TextColumn("tasks"), BarColumn(), TextColumn("{task.description}")
            self._bars = Progress(*columns, console=console, transient=True)
            self._bar = self._bars.add_task("", total=1.0)
            self._bars.start()

    def expect(self, tasks: Sequence[Task], later: Sequence[float], phase: str = "") -> None:
        """Count tasks that run now, with what they are together, and later ones, of which only costs are known."""
        self._phase = phase
        self._total += sum(task.cost for task in tasks)
        self._tasks += len(tasks)
        self._later, self._later_tasks = sum(later), len(later)

    def ended(self, task: Task, *, before: bool = False, failed: bool = False) -> None:
        """Count a task that has ended; `before` says that an earlier call did the work."""
        self._failed += failed
        self._done += task.cost
        self._done_tasks += 1
        self._given += task.cost if before else 0.0

    def show(self, running: Mapping[str, tuple[Task, Path]]) -> None:
        """Show the state; `running` has the tasks that an executor has, with their folders, by name.

        A task that no worker has begun yet, because a cluster queues it, is not shown as running.
        """
        total, count = self._total + self._later, self._tasks + self._later_tasks
        states, part = [], 0.0
        for name, (task, folder) in running.items():
            state = _state(folder)
            if state is None:
                continue
            stage, done, size = state
            part += task.cost * min(1.0, done / max(1, size))
            states.append(f"{name}: {stage} {done}/{size}" if stage else name)
        work = self._done + part
        gained, elapsed = work - self._given, time.monotonic() - self._begin
        text = f"{self._phase}: " if self._phase else ""
        text += f"{self._done_tasks} of {count} tasks ended" + (f", {self._failed} failed" if self._failed else "")
        if gained > 0 and total > work:
            text += f", about {duration(elapsed * (total - work) / gained)} left"
        if states:
            more = f" and {len(states) - 4} more" if len(states) > 4 else ""
            text += f"; running {', '.join(states[:4])}{more}"
        if self._bars is not None:
            self._bars.update(self._bar, completed=work / total if total else 0.0, description=text)
        elif time.monotonic() - self._said >= LINE_EVERY:
            self._said = time.monotonic()
            _LOG.info("%s", text)

    def close(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()


def _state(folder: Path) -> tuple[str, int, int] | None:
    """What a running task told last; None if no worker has begun it."""
    try:
        stage, done, total = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stage, done, total
