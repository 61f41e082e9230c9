"""Output of a training stage while it runs: metrics.jsonl, TensorBoard, and its progress."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

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
        shown: whether to show progress on the screen; see `nasfast.runtime.progress.Progress`.
    """

    def __init__(self, run_dir: Path, stage: str, *, step: int, total: int, shown: bool = True) -> None:
        self._path, self._stage = Path(run_dir) / METRICS_FILE, stage
        with locked_lines(self._path):
            kept = [m for m in read_metrics(run_dir) if m["stage"] != stage or m["step"] <= step]
            write_atomic(self._path, "".join(json.dumps(m) + "\n" for m in kept).encode())
        self._board: SummaryWriter | None = None
        if SummaryWriter is not None:
            with self._on_board():
                self._board = SummaryWriter(str(Path(run_dir) / "tensorboard" / stage), purge_step=step + 1)
        self._progress = progress.Progress(stage, total, step=step, shown=shown)

    def tick(self, step: int) -> None:
        """Show that `step` steps are done, whose metrics nobody has read yet."""
        self._progress.update(step)

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
        self._progress.update(step, text)

    def __exit__(self, *_: object) -> None:
        """Close TensorBoard's file and end the progress."""
        with self._on_board():
            if self._board:
                self._board.close()
        self._progress.__exit__()

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
