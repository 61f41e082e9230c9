"""How many tasks fit on this machine: its cores and its memory, as its container sees them. No torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from nasfast.tasks.task import Task

_LOG = logging.getLogger(__name__)

MEMORY = 2 << 30
"""Bytes that a task needs which does not say how many: PyTorch with its libraries, a small network and its images."""

_SYSTEM = Path("/")


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_for(tasks: int) -> int:
    """Threads for each of `tasks` tasks, such that all cores are in use: one, unless there are fewer tasks than cores.

    Results depend on the number of threads, so the caller keeps this number for later calls.
    """
    return max(1, cores() // max(1, tasks))


def gpus_for(device: str) -> int:
    """GPUs that a task needs which trains on a device, such as `cpu` or `cuda:0`."""
    return int(device.startswith("cuda"))


def free_memory(system: Path = _SYSTEM) -> int:
    """Bytes that new processes may use: what is available, and what the control group still allows.

    Args:
        system: root of the file system, for tests.
    """
    lines = (system / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    group = system / "sys/fs/cgroup"
    try:
        limit, used = (int((group / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):  # no control group of version 2, or no limit ("max")
        return free
    # files that were read count as used, and the kernel drops them where a process needs the memory
    used -= int(statistics.get("inactive_file", 0))
    return min(free, max(0, limit - used))


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
