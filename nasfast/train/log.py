"""What a training stage says while it runs: metrics.jsonl, TensorBoard, and a progress bar (plain lines elsewhere)."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from nasfast.runtime.files import METRICS_FILE, locked_lines, read_metrics, write_atomic

_LOG = logging.getLogger(__name__)


class TrainLog:
    """Sink of a stage's metrics.

    Lines after `step` that an interrupted run wrote are removed, so a resumed run leaves the same file as an unbroken
    one (but for times).

    Args:
        run_dir: gets metrics.jsonl, which other stages may be writing to, and tensorboard/STAGE.
        stage: e.g. `supernet` or `retrain/best`.
        step: step the stage starts from.
        total: step it ends at.
        shown: whether to show progress on the screen.
    """

    def __init__(self, run_dir: Path, stage: str, *, step: int, total: int, shown: bool = True) -> None:
        self._path, self._stage, self._total, self._shown = Path(run_dir) / METRICS_FILE, stage, total, shown
        with locked_lines(self._path):
            kept = [m for m in read_metrics(run_dir) if m["stage"] != stage or m["step"] <= step]
            write_atomic(self._path, "".join(json.dumps(m) + "\n" for m in kept).encode())
        self._board: SummaryWriter | None = None
        with self._on_board():
            self._board = SummaryWriter(str(Path(run_dir) / "tensorboard" / stage), purge_step=step + 1)
        self._start, self._start_step = time.monotonic(), step
        console = Console(file=sys.stderr)
        self._bar = None
        if shown and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[metrics]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(stage, total=total, completed=step, metrics="")
            self._bar.start()

    def write(self, step: int, **metrics: float | int | None) -> None:
        """Record metrics of `step`: to file, TensorBoard and screen."""
        with locked_lines(self._path) as file:
            file.write((json.dumps({"stage": self._stage, "step": step, **metrics}) + "\n").encode())
        with self._on_board():
            for name, value in metrics.items():
                if value is not None and self._board:
                    self._board.add_scalar(name, value, step)
        text = "  ".join(f"{name} {_short(name, value)}" for name, value in metrics.items() if value is not None)
        if self._bar:
            self._bar.update(self._task, completed=step, metrics=text)
        elif self._shown:
            done = max(1, step - self._start_step)
            left = (time.monotonic() - self._start) / done * (self._total - step)
            print(f"{self._stage} {step}/{self._total}  {text}  eta {left:.0f}s", file=sys.stderr, flush=True)

    def close(self) -> None:
        with self._on_board():
            if self._board:
                self._board.close()
        if self._bar:
            self._bar.stop()

    @contextlib.contextmanager
    def _on_board(self) -> Iterator[None]:
        """Go on without TensorBoard where its events cannot be written, e.g. for want of room: they are a copy."""
        try:
            yield
        except (OSError, UnicodeError) as error:
            self._board = None
            _LOG.warning("%s: no TensorBoard events from here on, metrics.jsonl has all (%s)", self._stage, error)

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _short(name: str, value: float) -> str:
    return f"{100 * value:.2f}%" if "top" in name else f"{value:.4g}"
