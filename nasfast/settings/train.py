"""Settings of a training stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from nasfast.config import ConfigBase


@dataclass(frozen=True)
class TrainConfig(ConfigBase):
    """How one stage trains: SGD with a cosine learning rate.

    Attributes:
        epochs: passes over the training images.
        lr: peak learning rate; null takes 0.5 where only indicators train, 0.4 where all BatchNorms of a supernet
            train, or 0.05 if its space has more than ten searched layers, and 0.1 elsewhere.
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
    def of_result(self) -> dict[str, Any]:
        """The settings that a checkpoint must match: all but the engine, which changes how a step is executed.

        Graphs and eager steps may round differently, so a run resumed with another engine may end with other bytes.
        """
        return {name: value for name, value in self.to_dict().items() if name != "engine"}

    @property
    def peak_lr(self) -> float:
        """`lr` of a stage that trains.

        Raises:
            ValueError: it is null.
        """
        if self.lr is None:
            raise ValueError("train: cfg.lr is not set: give a learning rate (train_supernet and retrain choose one)")
        return self.lr

    def _check_values(self) -> None:
        # the conditions are written so that NaN fails too
        for name in ("epochs", "lr", "log_every", "keep_checkpoints", "eval_every"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("lr_end", "momentum", "weight_decay", "warmup_epochs", "clip_norm", "checkpoint_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
