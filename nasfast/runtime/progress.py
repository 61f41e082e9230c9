"""What a training calls at each step that it logs, how many stages follow it, and times as text. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

Callback = Callable[[str, int, Mapping[str, float | int | None]], object]
"""Takes the name of a stage (`supernet`, `retrain/best`), the step, and its metrics by name, such as `loss`."""

LINE_EVERY = 600.0
"""Seconds between lines where no terminal shows a bar: a run of minutes has none, and that of a day is not silent."""

_callbacks: list[Callback] = []
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


@contextmanager
def calling(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Within this block, call these functions with the metrics of each training of this process, as they are logged."""
    _callbacks.extend(callbacks)
    try:
        yield
    finally:
        for callback in callbacks:
            _callbacks.remove(callback)


def call(stage: str, step: int, metrics: Mapping[str, float | int | None]) -> None:
    """Call what `calling` was given; an error that a callback raises ends the training."""
    for callback in _callbacks:
        callback(stage, step, metrics)


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
