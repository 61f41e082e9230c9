"""Settings of the executor: where tasks run, how many at once, how often each is tried, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase

# timers of Python fail with much more
_MOST_HOURS = 1_000_000


@dataclass(frozen=True)
class TaskSettings(ConfigBase):
    """Where and for how long tasks run. What they compute does not depend on it.

    Attributes:
        executor: `processes` of this machine, or the workers of a `ray` cluster.
        workers: tasks at a time on this machine; 0 takes as many as cores and memory allow. A Ray cluster decides by
            itself.
        attempts: how often a task is tried that fails or whose worker dies.
        max_hours: after this time no task starts, and running ones save what they have and stop; None for no limit.
        ray_address: `HOST:PORT` of the cluster; None takes the cluster of this machine.
    """

    executor: Literal["processes", "ray"] = "processes"
    workers: int = 0
    attempts: int = 3
    max_hours: float | None = None
    ray_address: str | None = None

    def _check_values(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers must not be negative, got {self.workers}; 0 takes as many as the machine allows")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")
        if self.max_hours is not None and not 0 < self.max_hours <= _MOST_HOURS:
            raise ValueError(f"max-hours must be positive and at most {_MOST_HOURS:,}, got {self.max_hours}")
        if self.ray_address is not None and self.executor != "ray":
            raise ValueError(f"--ray.address {self.ray_address} needs --executor ray")
