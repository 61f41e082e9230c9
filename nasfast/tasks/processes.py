"""Tasks in processes of this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context, parent_process
from pathlib import Path

from nasfast.runtime.imports import imported
from nasfast.tasks.task import Task
from nasfast.tasks.work import GRACE, Ending, execute


class Processes:
    """A number of worker processes; each is a pool of its own, because a pool ends when one of its processes dies.

    Attributes:
        capacity: how many tasks run at a time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._idle: list[_Worker] = []
        self._busy: dict[Future[Ending], _Worker] = {}

    def submit(self, task: Task, folder: Path, deadline: float | None) -> Future[Ending]:
        """Start a task; call it only while fewer than `capacity` run. The future raises if the worker dies."""
        worker = self._idle.pop() if self._idle else _Worker()
        arguments = task, str(folder), os.getcwd(), deadline, imported()
        try:
            future = worker.pool.submit(_work, *arguments)
        except BrokenProcessPool:  # it died while it was idle
            worker.end()
            worker = _Worker()
            future = worker.pool.submit(_work, *arguments)
        self._busy[future] = worker
        return future

    def release(self, future: Future[Ending]) -> None:
        """Take back the worker of a future that is done."""
        worker = self._busy.pop(future)
        if isinstance(future.exception(), BrokenProcessPool):
            worker.end()
        else:
            self._idle.append(worker)

    def close(self) -> None:
        """Let running tasks save what they have, and end the workers."""
        for worker in self._busy.values():
            worker.signal(signal.SIGTERM)
        wait(self._busy, timeout=GRACE)
        for worker in (*self._busy.values(), *self._idle):
            worker.end()
        self._busy.clear()
        self._idle.clear()


class _Worker:
    """One process, in a pool of one."""

    def __init__(self) -> None:
        # a forked process would share locks and threads of PyTorch with this one
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)
        self._pid = self.pool.submit(os.getpid)

    def signal(self, number: int) -> None:
        # a process that has not begun yet has no number, and nothing to save
        if self._pid.done() and self._pid.exception() is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid.result(), number)

    def end(self) -> None:
        """End the process at once if it still runs."""
        self.signal(signal.SIGKILL)
        self.pool.shutdown(wait=False, cancel_futures=True)


def _work(task: Task, folder: str, here: str, deadline: float | None, modules: tuple[str, ...]) -> Ending:
    """`execute` in a worker, which ends here if its driver has gone meanwhile."""
    ending = execute(task, folder, here, deadline, modules)
    driver = parent_process()
    if driver is None or not driver.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
    return ending


def _begin() -> None:
    """Let a worker leave Ctrl-C to its driver, and end when the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, daemon=True).start()


def _end_with_driver() -> None:
    driver = parent_process()
    assert driver is not None, "a worker has a parent"
    driver.join()
    # a task saves what it has, behind which `_work` ends; an idle worker ends at once
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
