"""Settings of the retraining stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase
from nasfast.settings.data import AutoAugment
from nasfast.settings.train import TrainConfig

CHOICES = ("top_k", "random_architectures", "seeds", "parallel")
"""The settings that say which networks are trained, and by which processes; the others say how one is trained."""


@dataclass(frozen=True)
class RetrainConfig(ConfigBase):
    """Settings of the retraining stage.

    Attributes:
        init: initial weights: `orthogonal`, `delta_orthogonal`, `gaussian` or `he`, or `inherit` for the supernet's.
        top_k: number of best architectures to retrain.
        random_architectures: number of random architectures with about the MACs of the best one to retrain, for
            comparison. A single one may be good or bad for its cost by chance. 0 makes no comparison.
        seeds: how often each architecture is retrained, with the seeds `seed`, `seed + 1`, ...; random architectures
            are retrained once each.
        parallel: with several processes, `batch` lets all of them train each network, each with a share of every batch;
            `networks` lets each process train networks of its own, as a single process would.
        ema: decay, between 0 and 1, of an exponential moving average of the weights and BatchNorm statistics, which
            every step updates: 0.999 averages about the last 1000 steps. The average is evaluated and saved. null takes
            the last weights.
        mixup: alpha > 0 of mixup (0.2 is usual): each image is blended with another of its batch, and their labels in
            the same shares, which are drawn from Beta(alpha, alpha). null blends none.
        cutmix: alpha > 0 of CutMix (1 is usual): a rectangle of each image is that of another, and labels are blended
            by area. With mixup too, each batch has one of the two, with equal chances. null cuts none.
        auto_augment: `autoaugment`, `randaugment` or `trivialaugment` of torchvision, applied after crop and flip; the
            loader must be `torchvision`, which `auto` then takes. AutoAugment has the policy of SVHN for `data.augment:
            shift`, of CIFAR-10 for `cifar`, and of ImageNet otherwise. null applies none.
        patience: the training ends after this many evaluations, at least 1, without a better validation top-1 (there is
            one every `train.eval_every` epochs), and the weights of the best evaluation are kept, so the accuracy is
            slightly too good. null trains all epochs and keeps the last weights.
        train: settings of the training.
    """

    init: Literal["orthogonal", "delta_orthogonal", "gaussian", "he", "inherit"] = "orthogonal"
    top_k: int = 1
    random_architectures: int = 3
    seeds: int = 1
    parallel: Literal["batch", "networks"] = "batch"
    ema: float | None = None
    mixup: float | None = None
    cutmix: float | None = None
    auto_augment: AutoAugment | None = None
    patience: int | None = None
    train: TrainConfig = TrainConfig(epochs=20, lr=0.1)

    def _check_values(self) -> None:
        for name in ("top_k", "seeds"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if self.random_architectures < 0:
            raise ValueError(f"random_architectures must not be negative, got {self.random_architectures}")
        # the conditions are written so that NaN fails too
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must be between 0 and 1, e.g. 0.999, got {self.ema}; null keeps no average")
        for name, usual in (("mixup", 0.2), ("cutmix", 1.0)):
            if (alpha := getattr(self, name)) is not None and not 0 < alpha < math.inf:
                raise ValueError(f"{name} must be positive, e.g. {usual}, got {alpha}; null switches it off")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}; null trains all epochs")

    @property
    def of_one(self) -> RetrainConfig:
        """What the training of one network depends on: the settings in `CHOICES` have their defaults."""
        return self.replace(**{name: getattr(RetrainConfig, name) for name in CHOICES})

    @property
    def recipe(self) -> dict[str, float | str]:
        """What is set of the fields that change how a network is trained, except `train` and `init`."""
        values = {name: getattr(self, name) for name in ("ema", "mixup", "cutmix", "auto_augment", "patience")}
        return {name: value for name, value in values.items() if value is not None}
