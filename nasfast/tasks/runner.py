"""`TaskRunner`: runs tasks until each is done, has failed too often, or the time is over."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, Protocol

from nasfast.runtime.lock import run_lock
from nasfast.settings import TaskSettings
from nasfast.tasks.cluster import Cluster
from nasfast.tasks.processes import Processes
from nasfast.tasks.room import workers_for
from nasfast.tasks.task import LOG_FILE, Status, Task, TaskError, TaskResult, saved_result
from nasfast.tasks.view import View
from nasfast.tasks.work import GRACE, PROGRESS_FILE, Ending

_LOG = logging.getLogger(__name__)

_SECONDS_PER_VIEW = 0.5


class Executor(Protocol):
    """Where tasks run."""

    capacity: int

    def submit(self, task: Task, folder: Path, deadline: float | None) -> Future[Ending]:
        """Start a task; the future raises if its worker dies."""

    def release(self, future: Future[Ending]) -> None:
        """Called once for each future that is done."""

    def close(self) -> None:
        """End what still runs."""


class TaskRunner:
    """A context in which tasks run; the workers and the lock on the folder stay from one `run` to the next.

    Args:
        folder: holds the folders of the tasks. All workers must see it under this path.
        settings: where, how often and how long.

    Raises:
        RunDirectoryError: another driver works in the folder; nothing was changed. Raised on entry, as the next one.
        TaskError: the Ray cluster cannot be used.
    """

    def __init__(self, folder: str | Path, settings: TaskSettings = TaskSettings()) -> None:
        self.folder, self.settings = Path(folder).absolute(), settings
        self._stack = contextlib.ExitStack()
        self._executor: Executor | None = None
        self._deadline: float | None = None

    def __enter__(self) -> TaskRunner:
        with contextlib.ExitStack() as stack:
            stack.enter_context(run_lock(self.folder))
            if self.settings.executor == "ray":
                self._take(Cluster(self.settings.ray_address), stack)
            if self.settings.max_hours is not None:
                self._deadline = time.time() + 3600 * self.settings.max_hours
            self._view = View()
            stack.callback(self._view.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _take(self, executor: Executor, stack: contextlib.ExitStack) -> Executor:
        self._executor = executor
        stack.callback(executor.close)
        return executor

    @property
    def time_is_over(self) -> bool:
        """Whether `max_hours` have passed since this runner began."""
        return self._deadline is not None and time.time() >= self._deadline

    def run(self, tasks: Iterable[Task], *, later: Sequence[float] = (), phase: str = "") -> list[TaskResult]:
        """Run tasks that are not finished yet.

        An attempt that raises, or whose worker dies, is repeated from what it left in its folder. A task that fails in
        every attempt is logged and reported, and the others go on.

        Args:
            tasks: what to run.
            later: about the costs of the tasks of later calls, for the estimate of the remaining time.
            phase: what these tasks are together, for the progress line; empty if there is only one call.

        Returns:
            How each task ended, in the order of `tasks`.

        Raises:
            TaskError: two tasks have one name, an argument is not JSON, or a folder has another task's result.
        """
        tasks = list(tasks)
        twice = [name for name, count in Counter(task.name for task in tasks).items() if count > 1]
        if twice:
            raise TaskError(f"two tasks have the name {twice[0]!r}: give each its own")
        self._view.expect(tasks, later, phase)
        results, missing = {}, []
        for task in tasks:
            task.identity  # noqa: B018  raises before anything runs
            if (saved := saved_result(self.folder / task.name, task)) is None:
                missing.append(task)
            else:
                results[task.name] = self._result(task, "done", result=saved[0])
                self._view.ended(task, before=True)
        if missing:
            results |= _Round(self, missing).results
        self._view.show({})
        return [results[task.name] for task in tasks]

    def executor_for(self, tasks: Sequence[Task]) -> Executor:
        """The executor, with room for as many of `tasks` as this machine allows."""
        executor = self._executor or self._take(Processes(1), self._stack)
        if isinstance(executor, Processes):
            executor.capacity = self.settings.workers or workers_for(tasks)
        return executor

    def _result(
        self,
        task: Task,
        status: Status,
        *,
        result: Any = None,
        error: str = "",
        attempts: int = 0,
        seconds: float = 0.0,
    ) -> TaskResult:
        return TaskResult(task.name, status, result, error, self.folder / task.name / LOG_FILE, attempts, seconds)


class _Round:
    """One call of `TaskRunner.run`: what waits, what runs, and what has ended."""

    def __init__(self, runner: TaskRunner, tasks: Sequence[Task]) -> None:
        self.runner, self.results = runner, dict[str, TaskResult]()
        self._executor = runner.executor_for(tasks)
        self._waiting = deque(tasks)
        self._running: dict[Future[Ending], tuple[Task, float]] = {}
        self._attempts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        while self._waiting or self._running:
            self._step()

    def _step(self) -> None:
        """Start what has room, wait a little, and take in what has ended."""
        runner = self.runner
        while self._waiting and (len(self._running) < self._executor.capacity or runner.time_is_over):
            task = self._waiting.popleft()
            if runner.time_is_over:
                self._end(task, "stopped")
                continue
            self._attempts[task.name] += 1
            # a killed worker leaves this file, and the view would take the next attempt for begun
            with contextlib.suppress(OSError):
                (runner.folder / task.name / PROGRESS_FILE).unlink()
            future = self._executor.submit(task, runner.folder / task.name, runner._deadline)
            self._running[future] = task, time.monotonic()
        ended, _ = wait(self._running, _SECONDS_PER_VIEW, FIRST_COMPLETED)
        for future in ended:
            task, begin = self._running.pop(future)
            self._seconds[task.name] += time.monotonic() - begin
            self._executor.release(future)
            self._take(task, future)
        if runner._deadline is not None and time.time() > runner._deadline + GRACE:
            self._leave()
        runner._view.show({task.name: (task, runner.folder / task.name) for task, _ in self._running.values()})

    def _leave(self) -> None:
        """Wait no longer for what has not ended: a cluster may never have started it. The executor ends it."""
        for task, begin in self._running.values():
            self._seconds[task.name] += time.monotonic() - begin
            self._end(task, "stopped")
        self._running.clear()

    def _take(self, task: Task, future: Future[Ending]) -> None:
        """Take in an attempt that has ended."""
        try:
            status, error = future.result()
        except Exception as died:  # each executor has its own errors for a worker or machine that is gone
            text = " ".join(str(died).split())[:300]
            status, error = "failed", f"no answer from its worker ({type(died).__name__}: {text})"
        # its result may be there although it was stopped, or its worker killed, just behind its end
        if (saved := saved_result(self.runner.folder / task.name, task)) is not None:
            self._end(task, "done", result=saved[0])
        elif status == "stopped" and self.runner.time_is_over:
            self._end(task, "stopped")
        elif self._attempts[task.name] < self.runner.settings.attempts:
            _LOG.warning("task %s, attempt %d: %s; it is tried again", task.name, self._attempts[task.name], error)
            self._waiting.append(task)
        else:
            self._end(task, "failed", error=error)
            _LOG.error(
                "task %s failed in %d attempts: %s; its log is %s",
                task.name,
                self._attempts[task.name],
                error,
                self.results[task.name].log,
            )

    def _end(self, task: Task, status: Status, *, result: Any = None, error: str = "") -> None:
        self.results[task.name] = self.runner._result(
            task,
            status,
            result=result,
            error=error,
            attempts=self._attempts[task.name],
            seconds=self._seconds[task.name],
        )
        if status != "stopped":
            self.runner._view.ended(task, failed=status == "failed")
