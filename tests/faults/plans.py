"""Which faults are injected into which stages, and how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .case import Case
from .injections import (
    DAMAGES,
    cache_damaged,
    checkpoint_damaged,
    clock_jumps,
    disk_full,
    file_size_limit,
    killed,
    killed_often,
    locale_changes,
    no_room,
    read_only,
    result_damaged,
    second_run,
    terminated,
    worker_killed,
)
from .runs import RECIPES


@dataclass(frozen=True)
class Plan:
    """Cases of one kind.

    Attributes:
        fault: name in the table.
        recipe, stage: the run and its stage that the fault disturbs.
        times: number of cases.
        inject: function that injects the fault.
    """

    fault: str
    recipe: str
    stage: str
    times: int
    inject: Callable[[Case], None]


def _damage_plan(name: str, recipe: str = "exact") -> Plan:
    return Plan(
        f"damaged {Path(name).name}", recipe, DAMAGES[name].repairs[-1], 2, lambda case: result_damaged(case, name)
    )


PLANS = [
    Plan("SIGKILL", "exact", "supernet", 12, killed),
    Plan("SIGKILL", "exact", "score", 3, killed),
    Plan("SIGKILL", "exact", "search", 3, killed),
    Plan("SIGKILL", "table", "search", 4, killed),
    Plan("SIGKILL", "accuracy", "search", 8, killed),
    Plan("SIGKILL", "exact", "retrain", 12, killed),
    Plan("SIGKILL", "exact", "report", 3, killed),
    Plan("SIGKILL", "exact", "export", 4, killed),
    Plan("SIGKILL, building a cache", "cache", "supernet", 5, killed),
    Plan("SIGKILL, unreadable images", "bad images", "supernet", 3, killed),
    Plan("SIGKILL, unreadable images", "bad images", "retrain", 2, killed),
    Plan("SIGKILL again and again", "exact", "run", 2, killed_often),
    Plan("SIGTERM", "exact", "supernet", 5, terminated),
    Plan("SIGTERM", "exact", "retrain", 4, terminated),
    Plan("SIGTERM", "accuracy", "search", 2, terminated),
    Plan("disk full (tmpfs)", "exact", "supernet", 3, disk_full),
    Plan("disk full (tmpfs)", "exact", "retrain", 3, disk_full),
    Plan("disk full (tmpfs)", "exact", "export", 1, disk_full),
    Plan("disk full (tmpfs)", "accuracy", "search", 1, disk_full),
    Plan("too small a disk (tmpfs)", "exact", "supernet", 1, no_room),
    Plan("too small a disk (tmpfs)", "exact", "retrain", 1, no_room),
    Plan("file size limit (RLIMIT_FSIZE)", "exact", "supernet", 2, file_size_limit),
    Plan("file size limit (RLIMIT_FSIZE)", "exact", "retrain", 2, file_size_limit),
    Plan("file size limit (RLIMIT_FSIZE)", "accuracy", "search", 1, file_size_limit),
    Plan("loader worker killed", "workers", "supernet", 4, worker_killed),
    Plan("newest checkpoint damaged", "exact", "supernet", 4, checkpoint_damaged),
    Plan("newest checkpoint damaged", "exact", "retrain", 3, checkpoint_damaged),
    Plan("cache damaged", "cache", "supernet", 4, cache_damaged),
    *[_damage_plan(name) for name in DAMAGES if name != "history.jsonl"],
    _damage_plan("history.jsonl", "accuracy"),
    Plan("clock jumps", "exact", "supernet", 2, clock_jumps),
    Plan("clock jumps", "exact", "retrain", 1, clock_jumps),
    *[Plan("locale changes, odd names", "names", stage, 1, locale_changes) for stage in RECIPES["names"].stages],
    Plan("read-only run directory", "exact", "supernet", 1, read_only),
    Plan("read-only run directory", "exact", "retrain", 1, read_only),
    Plan("second run in the directory", "exact", "supernet", 2, second_run),
    Plan("second run in the directory", "exact", "retrain", 1, second_run),
    Plan("second run in the directory", "accuracy", "search", 1, second_run),
]
