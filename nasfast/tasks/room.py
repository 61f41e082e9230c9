"""How many tasks fit on this machine. No torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nasfast.runtime.capacity import cores, free_memory
from nasfast.tasks.task import Task

_LOG = logging.getLogger(__name__)

MEMORY = 2 << 30
"""Bytes that a task needs which does not say how many: PyTorch with its libraries, a small network and its images."""


def threads_for(tasks: int) -> int:
    """Threads for each of `tasks` tasks, such that all cores are in use: one, unless there are fewer tasks than cores.

    Results depend on the number of threads, so the caller keeps this number for later calls.
    """
    return max(1, cores() // max(1, tasks))


def gpus_for(device: str) -> int:
    """GPUs that a task needs which trains on a device, such as `cpu` or `cuda:0`."""
    return int(device.startswith("cuda"))


def workers_for(tasks: Sequence[Task]) -> int:
    """How many of these tasks may run at a time here; at least one.

    Tasks on a GPU run one after another, because they would share it; a Ray cluster gives each a GPU of its own.
    """
    if not tasks or any(task.gpus for task in tasks):
        return 1
    by_cores = cores() // max(task.threads for task in tasks)
    free, each = free_memory(), max(task.memory or MEMORY for task in tasks)
    by_memory = max(1, free // each)
    if by_memory < min(by_cores, len(tasks)):
        _LOG.info(
            "%d tasks at a time, although the cores would do for %d: %.1f GiB of memory are free, and a task counts as "
            "%.1f GiB; --workers sets another number",
            by_memory,
            min(by_cores, len(tasks)),
            free / 2**30,
            each / 2**30,
        )
    return max(1, min(by_cores, by_memory, len(tasks)))
