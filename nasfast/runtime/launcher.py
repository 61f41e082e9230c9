"""What torchrun says of this process in its environment. No torch."""

from __future__ import annotations

import os


def environment_rank() -> int:
    """Number of this process among those that a launcher started; 0 without a launcher or with a single process."""
    return int(os.environ.get("RANK", "0")) if environment_size() > 1 else 0


def environment_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
