"""Tasks on the workers of a Ray cluster (the extra `ray`)."""

from __future__ import annotations

import logging
import os
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nasfast.runtime.imports import imported
from nasfast.tasks.task import Task, TaskError
from nasfast.tasks.work import Ending, execute

_SECONDS_TO_REACH = 10.0


class Cluster:
    """The workers of a running Ray cluster, which decides what runs where.

    Args:
        address: `HOST:PORT` of its head; None takes the cluster that runs on this machine.

    Raises:
        TaskError: Ray is not installed, the cluster cannot be reached, or it has another version.
    """

    capacity = 1 << 20
    """Ray queues tasks that do not fit yet."""

    def __init__(self, address: str | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise TaskError(
                "--executor ray needs Ray on this machine and on all of the cluster: pip install 'nasfast[ray]'"
            ) from error
        self._ray, self._running = ray, dict[Future[Ending], Any]()
        where = f"Ray cluster at {address}" if address else "Ray cluster of this machine"
        here = f"this process has Ray {ray.__version__}"
        start = "start one with `ray start --head`, or give the address of one with --ray_address HOST:PORT"
        if address:
            _reach(address, f"no {where}", f"{here}; {start}")
        try:
            ray.init(address or "auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise TaskError(f"no {where} ({_line(error)}); {here}; {start}") from error
        except Exception as error:  # Ray raises RuntimeError for another version, and more kinds for what is no cluster
            raise TaskError(
                f"the {where} cannot be used: {_line(error)}; {here}. All must have one version of Python and Ray"
            ) from error

    def submit(self, task: Task, folder: Path, deadline: float | None) -> Future[Ending]:
        """Queue a task. The future raises if its worker or machine dies."""
        needs: dict[str, Any] = {"num_cpus": task.threads, "num_gpus": task.gpus, "max_retries": 0}
        if task.memory:
            needs["memory"] = task.memory
        remote = self._ray.remote(**needs)(execute)
        reference = remote.remote(task, str(folder), os.getcwd(), deadline, imported())
        future = reference.future()
        self._running[future] = reference
        return future

    def release(self, future: Future[Ending]) -> None:
        """Forget a future that is done."""
        self._running.pop(future)

    def close(self) -> None:
        """Interrupt running tasks and leave the cluster, which goes on."""
        for reference in self._running.values():
            self._ray.cancel(reference)
        self._running.clear()
        self._ray.shutdown()


def _reach(address: str, failure: str, help: str) -> None:
    """Connect once, because Ray tries a dead address for minutes.

    Raises:
        TaskError: nothing answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_REACH).close()
    except (OSError, ValueError, OverflowError) as error:
        raise TaskError(f"{failure} ({_line(error)}); {help}") from error


def _line(error: BaseException) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())
