"""Checks of fields that several configs have."""

from __future__ import annotations

import re


def check_device(name: str) -> None:
    """Raise ValueError unless `name` is auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")


def check_common(threads: int, seed: int, **counts: int) -> None:
    """Check the fields that every study's config has.

    Raises:
        ValueError: negative threads or seed, or a count below 1.
    """
    if threads < 0 or seed < 0:
        raise ValueError(f"threads and seed must not be negative, got {threads} and {seed}")
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
