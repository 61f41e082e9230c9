"""Settings of the retraining stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase
from nasfast.settings.train import TrainConfig


@dataclass(frozen=True)
class RetrainConfig(ConfigBase):
    """Settings of the retraining stage.

    Attributes:
        init: initial weights: `orthogonal`, `delta_orthogonal`, `gaussian` or `he`, or `inherit` for the supernet's.
        top_k: number of best architectures to retrain.
        random_architectures: number of random architectures with about the MACs of the best one to retrain, for
            comparison. A single one may be good or bad for its cost by chance. 0 makes no comparison.
        parallel: with several processes, `batch` lets all of them train each network, each with a share of every batch;
            `networks` lets each process train networks of its own, as a single process would.
        train: settings of the training.
    """

    init: Literal["orthogonal", "delta_orthogonal", "gaussian", "he", "inherit"] = "orthogonal"
    top_k: int = 1
    random_architectures: int = 3
    parallel: Literal["batch", "networks"] = "batch"
    train: TrainConfig = TrainConfig(epochs=20, lr=0.1)

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.random_architectures < 0:
            raise ValueError(f"random_architectures must not be negative, got {self.random_architectures}")
