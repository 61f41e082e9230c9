"""How far the work of this process is: a stage tells it, and whoever runs the stage may listen. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, int, int], None]
"""Takes the name of a stage, how much of it is done, and its size."""

LINE_EVERY = 600.0
"""Seconds between lines where no terminal shows a bar: a run of minutes has none, and that of a day is not silent."""

_listeners: list[Listener] = []
_following = 0


@contextmanager
def followed_by(stages: int) -> Iterator[None]:
    """Within this block, `stages` more stages follow the one that runs, each as long as it."""
    global _following
    before, _following = _following, stages
    try:
        yield
    finally:
        _following = before


def following() -> int:
    """How many stages follow the one that runs, as `followed_by` said."""
    return _following


def tell(stage: str, done: int, total: int) -> None:
    """Say that `done` of `total` parts of a stage are done."""
    for listener in _listeners:
        listener(stage, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within this block, pass everything that stages of this process tell to `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def duration(seconds: float) -> str:
    """A time as every screen shows it, rounded up.

    Below a minute it is `45 s`, below ten minutes `2 min 10 s`, and then whole minutes: `12 min` or `1 h 05 min`. A
    time that is not finite, such as one divided by a speed of 0, is `unknown`.
    """
    if not math.isfinite(seconds):
        return "unknown"
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60:02d} s"
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
