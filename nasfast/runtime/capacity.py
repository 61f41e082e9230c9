"""The cores and the memory that this process may use, as the control group of its container limits them. No torch."""

from __future__ import annotations

import os
from pathlib import Path

_SYSTEM = Path("/")


def cores(system: Path = _SYSTEM) -> int:
    """CPU cores that this process may use, at least one: those of its affinity, or fewer by its quota of time."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = system / "sys/fs/cgroup"
    # quota and period in microseconds: control groups version 2 ("max" is no quota), then version 1 (-1 is none)
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        numbers = " ".join(_text(group / file) for file in files).split()
        if len(numbers) == 2 and numbers[0].isdigit():
            count = min(count, int(numbers[0]) // int(numbers[1]))
    return max(1, count)


def free_memory(system: Path = _SYSTEM) -> int:
    """Bytes that this process and new ones may still use: what is available, and what the control group allows."""
    # only Linux has this file
    lines = (line.split() for line in _text(system / "proc/meminfo").splitlines())
    free = next((int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"), None)
    if free is None:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = system / "sys/fs/cgroup"
    # control groups version 2 ("max" is no limit), then version 1
    for limit_file, used_file, statistics_file in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        limit, used = _text(group / limit_file).strip(), _text(group / used_file).strip()
        if limit.isdigit() and used.isdigit():
            statistics = dict(line.split() for line in _text(group / statistics_file).splitlines())
            # files that were read count as used, and the kernel drops them where a process needs the memory
            free = min(free, max(0, int(limit) - int(used) + int(statistics.get("inactive_file", 0))))
    return free


def _text(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
