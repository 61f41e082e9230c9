"""Settings of a training stage, the names of its files, and what its checkpoints must match."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from nasfast.config import ConfigBase


@dataclass(frozen=True)
class TrainConfig(ConfigBase):
    """How one stage trains: SGD with a cosine learning rate.

    Attributes:
        epochs: passes over the training images.
        lr: peak learning rate; null takes 0.5 where only indicators train, 0.4 where all BatchNorms of a supernet
            train, and 0.1 elsewhere.
        lr_end: learning rate at the end of the cosine.
        momentum: momentum of SGD.
        nesterov: whether the momentum is Nesterov's.
        weight_decay: weight decay of SGD; BatchNorm parameters and biases have none.
        warmup_epochs: epochs of linear warm-up; may be a fraction.
        label_smoothing: label smoothing of the cross-entropy.
        clip_norm: largest gradient norm; 0 does not clip.
        precision: `fp32`, or `bf16` autocast.
        engine: `eager`, `graphs` (CUDA graphs per candidate of a supernet), or `auto`: graphs where they are possible.
        log_every: optimiser steps between log lines.
        checkpoint_every: optimiser steps between checkpoints; 0 saves one per epoch. Every evaluation saves one too.
        keep_checkpoints: number of newest checkpoints to keep; the second newest is the fallback for a damaged newest
            one. The checkpoint of the best validation top-1 is kept besides.
        eval_every: epochs between evaluations where there is a validation loader; the last epoch always has one.
    """

    epochs: int = 10
    lr: float | None = None
    lr_end: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 4e-5
    warmup_epochs: float = 0.0
    label_smoothing: float = 0.1
    clip_norm: float = 5.0
    precision: Literal["fp32", "bf16"] = "fp32"
    engine: Literal["auto", "eager", "graphs"] = "auto"
    log_every: int = 20
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    eval_every: int = 1

    @property
    def peak_lr(self) -> float:
        """`lr` of a stage that trains.

        Raises:
            ValueError: it is null.
        """
        if self.lr is None:
            raise ValueError("train: cfg.lr is not set: give a learning rate (train_supernet and retrain choose one)")
        return self.lr

    def __post_init__(self) -> None:
        # the conditions are written so that NaN fails too
        for name in ("epochs", "lr", "log_every", "keep_checkpoints", "eval_every"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("lr_end", "momentum", "weight_decay", "warmup_epochs", "clip_norm", "checkpoint_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")


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
    """

    name: str
    run_dir: str | Path
    fingerprint: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefix: str | None = None
    resume: bool = False
    quiet: bool = False

    @property
    def file_prefix(self) -> str:
        """What the names of the checkpoint files begin with."""
        return self.prefix or self.name.replace("/", "-")


def accept_old_keywords(train: Callable[..., Path]) -> Callable[..., Path]:
    """Let `train` take the fields of `TrainStage` as keywords of its own, as it once did; this warns.

    Delete it in the version after the one that made `TrainStage`.
    """
    names = {f.name for f in fields(TrainStage)} - {"name"}

    @functools.wraps(train)
    def call(*arguments: Any, **keywords: Any) -> Path:
        if isinstance(keywords.get("stage"), str):
            warnings.warn(
                "train(stage='NAME', run_dir=..., ...) is now train(..., TrainStage('NAME', run_dir, ...)); the old "
                "form goes away in the next version",
                category=FutureWarning,
                stacklevel=2,
            )
            # the old form had None for no settings
            old = {name: keywords.pop(name) for name in names & keywords.keys()}
            keywords["stage"] = TrainStage(keywords["stage"], **{**old, "settings": old.get("settings") or {}})
        return train(*arguments, **keywords)

    return call
