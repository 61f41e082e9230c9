"""Signs of life: a bar or lines, what a training calls at each step that it logs, and times as text. No torch."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Callback = Callable[[str, int, Mapping[str, float | int | None]], object]
"""Takes the name of a stage (`supernet`, `retrain/best`), the step, and its metrics by name, such as `loss`."""

LINE_EVERY = 30.0
"""Seconds between lines, where no terminal shows a bar."""

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


class Progress(AbstractContextManager):
    """How far a stage is: a bar that goes when it ends, or where standard error is no terminal, a line now and then.

    Args:
        stage: name of the stage.
        total: number of steps at its end.
        step: number of steps at its beginning.
        shown: whether to show anything.
        timed: whether what happens between two updates is timed; the bar is then drawn in `update` alone, and by no
            thread beside it.
    """

    def __init__(self, stage: str, total: int, *, step: int = 0, shown: bool = True, timed: bool = False) -> None:
        self._stage, self._total, self._shown, self._text = stage, total, shown, ""
        self._start, self._start_step = time.monotonic(), step
        self._next_line = self._start + LINE_EVERY
        self._bar, self._timed = _bar(auto_refresh=not timed) if shown else None, timed
        if self._bar is not None:
            self._task = self._bar.add_task(stage, total=total, completed=step, text="", eta="")
            self._bar.start()

    def update(self, step: int, text: str | None = None) -> None:
        """Show that `step` steps are done, and the text, which stays until there is another."""
        self._text, now = self._text if text is None else text, time.monotonic()
        if self._bar is not None:
            eta = self._eta(step, now)
            self._bar.update(self._task, completed=step, text=self._text, eta=eta, refresh=self._timed)
        elif self._shown and now >= self._next_line:
            self._next_line = now + LINE_EVERY
            parts = [f"{self._stage} {step}/{self._total}", self._eta(step, now), self._text]
            print("  ".join(filter(None, parts)), file=sys.stderr, flush=True)

    def _eta(self, step: int, now: float) -> str:
        """The time that is left of this stage, and of it with those that follow; empty before the first step."""
        if step <= self._start_step:
            return ""
        per_step = (now - self._start) / (step - self._start_step)
        seconds = per_step * (self._total - step)
        text = f"eta {duration(seconds)}"
        return text if not _following else f"{text}, all {duration(seconds + _following * per_step * self._total)}"

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(*, auto_refresh: bool) -> Any:
    """A bar of rich; None where standard error is no terminal, or rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column
    except ImportError:
        return None
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        return None
    # in a narrow terminal the text is cut, never the counter and the time that is left
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Bar(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[eta]}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[text]}", table_column=rest),
        console=console,
        auto_refresh=auto_refresh,
        expand=True,
        transient=True,
    )


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
