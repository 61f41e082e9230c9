"""Settings of a training stage, the names of its files, and what its checkpoints must match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TrainExtras:
    """What a training does beyond steps of SGD on batches as they come.

    Attributes:
        ema: decay of an exponential moving average of the parameters and buffers, which every step updates; it begins
            with the weights after the first step. The average is evaluated, and the model has it in the end. None
            averages nothing.
        patience: the training ends after this many evaluations without a better top-1, and the model has the weights of
            the best evaluation in the end. None trains all epochs.
        mix: called with the images and labels of every batch, and returns what to train on instead: images of the same
            shape, and labels or (N, classes) probabilities. It may draw from torch's global generator, whose state the
            checkpoints have.
    """

    ema: float | None = None
    patience: int | None = None
    mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True)
class TrainStage:
    """One stage of a run directory: its name, its files, and what a checkpoint must match to continue it.

    Attributes:
        name: name in the metrics and of the checkpoints, e.g. `supernet` or `retrain/best`.
        run_dir: folder that gets checkpoints/, metrics.jsonl and tensorboard/; only rank 0 writes there.
        fingerprint: digest of what is trained; a checkpoint with another one is refused.
        settings: what else the result depends on, as JSON; a checkpoint with other settings is refused.
        prefix: what the names of the checkpoint files begin with; None takes `name`, with `-` for `/`.
        resume: whether to continue from the newest good checkpoint in `run_dir`. If not, the stage must have no
            checkpoints there, except those of this torchrun job, which continues them when it restarts its processes.
        quiet: whether to show nothing on the screen.
        overwrite: whether to delete the checkpoints of the stage first, if there are any.
        extends: whether checkpoints of fewer epochs may be continued; see `nasfast.train.train`.
    """

    name: str
    run_dir: str | Path
    fingerprint: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefix: str | None = None
    resume: bool = False
    quiet: bool = False
    overwrite: bool = False
    extends: bool = False

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ValueError("resume continues what is there and overwrite deletes it: give one of them")

    @property
    def file_prefix(self) -> str:
        """What the names of the checkpoint files begin with."""
        return self.prefix or self.name.replace("/", "-")
