"""Output of a training stage while it runs: metrics.jsonl, TensorBoard, and a progress bar or plain lines."""

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

from nasfast.runtime import progress
from nasfast.runtime.files import METRICS_FILE, locked_lines, read_metrics, write_atomic

_LOG = logging.getLogger(__name__)


class TrainLog:
    """Writes a stage's metrics to file, TensorBoard and screen.

    It removes the stage's lines after `step`, which an interrupted run wrote. So a resumed run leaves the same file as
    an unbroken one, except for times.

    Args:
        run_dir: gets tensorboard/STAGE, and metrics.jsonl, to which other stages may write at the same time.
        stage: name of the stage, e.g. `supernet` or `retrain/best`.
        step: step at which the stage starts.
        total: step at which it ends.
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
        """Write the metrics of `step`; None is written to the file only."""
        with locked_lines(self._path) as file:
            file.write((json.dumps({"stage": self._stage, "step": step, **metrics}) + "\n").encode())
        with self._on_board():
            for name, value in metrics.items():
                if value is not None and self._board:
                    self._board.add_scalar(name, value, step)
        progress.tell(self._stage, step, self._total)
        text = "  ".join(f"{name} {_short(name, value)}" for name, value in metrics.items() if value is not None)
        if self._bar:
            self._bar.update(self._task, completed=step, metrics=text)
        elif self._shown:
            done = max(1, step - self._start_step)
            left = (time.monotonic() - self._start) / done * (self._total - step)
            print(f"{self._stage} {step}/{self._total}  {text}  eta {left:.0f}s", file=sys.stderr, flush=True)

    def close(self) -> None:
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

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _short(name: str, value: float) -> str:
    return f"{100 * value:.2f}%" if "top" in name else f"{value:.4g}"
