"""Output of a training stage while it runs: metrics.jsonl, TensorBoard, and a progress bar or now and then a line."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from nasfast.runtime import progress
from nasfast.runtime.files import METRICS_FILE, locked_lines, read_metrics, write_atomic

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:  # the extra `tensorboard` is not installed
    SummaryWriter = None  # type: ignore[assignment, misc]

_LOG = logging.getLogger(__name__)


class TrainLog(contextlib.AbstractContextManager):
    """Writes a stage's metrics to file, TensorBoard and screen.

    It removes the stage's lines after `step`, which an interrupted run wrote. So a resumed run leaves the same file as
    an unbroken one, except for times.

    Args:
        run_dir: gets metrics.jsonl, to which other stages may write at the same time, and tensorboard/STAGE if
            tensorboard is installed.
        stage: name of the stage, e.g. `supernet` or `retrain/best`.
        step: step at which the stage starts.
        total: step at which it ends.
        shown: whether to show progress on the screen: a bar that goes when the stage ends, or where standard error is
            no terminal, a line every ten minutes.
    """

    def __init__(self, run_dir: Path, stage: str, *, step: int, total: int, shown: bool = True) -> None:
        self._path, self._stage, self._total, self._shown = Path(run_dir) / METRICS_FILE, stage, total, shown
        with locked_lines(self._path):
            kept = [m for m in read_metrics(run_dir) if m["stage"] != stage or m["step"] <= step]
            write_atomic(self._path, "".join(json.dumps(m) + "\n" for m in kept).encode())
        self._board: SummaryWriter | None = None
        if SummaryWriter is not None:
            with self._on_board():
                self._board = SummaryWriter(str(Path(run_dir) / "tensorboard" / stage), purge_step=step + 1)
        self._start, self._start_step = time.monotonic(), step
        self._said = self._start
        console = Console(file=sys.stderr)
        self._bar = None
        if shown and console.is_terminal:
            # in a narrow terminal the metrics are cut, never the counter and the time that is left
            rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            self._bar = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
                TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=12),
                TextColumn("{task.fields[metrics]}", table_column=rest),
                console=console,
                expand=True,
                transient=True,
            )
            self._task = self._bar.add_task(stage, total=total, completed=step, metrics="", left="")
            self._bar.start()

    def write(self, step: int, **metrics: float | int | None) -> None:
        """Write the metrics of `step`; None is written to the file only."""
        with locked_lines(self._path) as file:
            file.write((json.dumps({"stage": self._stage, "step": step, **metrics}) + "\n").encode())
        with self._on_board():
            for name, value in metrics.items():
                if value is not None and self._board:
                    self._board.add_scalar(name, value, step)
        progress.call(self._stage, step, metrics)
        text = "  ".join(f"{name} {_short(name, value)}" for name, value in metrics.items() if value is not None)
        now = time.monotonic()
        left = self._left(step, now)
        if self._bar:
            self._bar.update(self._task, completed=step, metrics=text, left=left)
        elif self._shown and now - self._said >= progress.LINE_EVERY:
            self._said = now
            parts = [f"{self._stage} {step}/{self._total}", left, text]
            print("  ".join(filter(None, parts)), file=sys.stderr, flush=True)

    def _left(self, step: int, now: float) -> str:
        """The time that is left of this stage, and of it with those that follow; empty before the first step."""
        if step <= self._start_step:
            return ""
        per_step = (now - self._start) / (step - self._start_step)
        left = per_step * (self._total - step)
        text = f"eta {progress.duration(left)}"
        more = progress.following()
        return text if not more else f"{text}, all {progress.duration(left + more * per_step * self._total)}"

    def __exit__(self, *_: object) -> None:
        """Close TensorBoard's file and end the progress bar."""
        with self._on_board():
            if self._board:
                self._board.close()
        if self._bar:
            self._bar.stop()

    @contextlib.contextmanager
    def _on_board(self) -> Iterator[None]:
        """Stop writing to TensorBoard if that fails, e.g. on a full disk; metrics.jsonl has the same figures."""
        try:
            yield
        except (OSError, UnicodeError) as error:
            self._board = None
            _LOG.warning(
                "%s: cannot write TensorBoard events (%s); none from here on, metrics.jsonl has all figures",
                self._stage, error,
            )  # fmt: skip


def _short(name: str, value: float) -> str:
    return f"{100 * value:.2f}%" if "top" in name else f"{value:.4g}"
