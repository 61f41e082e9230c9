"""Tasks for tests that run in this process, one after another, so that no worker imports PyTorch."""

from __future__ import annotations

from concurrent.futures import Executor, Future

import torch

from nasfast.pipeline import children
from nasfast.runtime.termination import raise_on_sigterm, stopped_at


class _Inline(Executor):
    """A pool of no threads: it calls what it is given, in the main thread, which hears SIGTERM."""

    def __init__(self, max_workers: int) -> None:
        pass

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _in_process(self, task, *arguments) -> children.Ending:
    threads = torch.get_num_threads()
    try:
        # at the deadline, the driver tells a worker to stop
        with raise_on_sigterm(), stopped_at(self._deadline):
            return children.execute(task, *arguments)
    finally:
        torch.set_num_threads(threads)


def run_tasks_here(monkeypatch) -> None:
    """Let runners run their tasks here."""
    monkeypatch.setattr(children, "ThreadPoolExecutor", _Inline)
    monkeypatch.setattr(children.TaskRunner, "_in_process", _in_process)
