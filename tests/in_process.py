"""An executor for tests that runs each task in this process at once, so that no worker imports PyTorch."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path

import torch

from nasfast.tasks import Task, runner
from nasfast.tasks.work import Ending, execute


class InProcess:
    """As `nasfast.tasks.processes.Processes`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = 1

    def submit(self, task: Task, folder: Path, deadline: float | None) -> Future[Ending]:
        future: Future[Ending] = Future()
        threads = torch.get_num_threads()
        try:
            future.set_result(execute(task, str(folder), os.getcwd(), deadline))
        except Exception as error:
            future.set_exception(error)
        torch.set_num_threads(threads)
        return future

    def release(self, future: Future[Ending]) -> None:
        pass

    def close(self) -> None:
        pass


def run_tasks_here(monkeypatch) -> None:
    """Let runners take this executor for `processes`."""
    monkeypatch.setattr(runner, "Processes", InProcess)
