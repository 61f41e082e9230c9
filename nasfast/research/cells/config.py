"""Settings of a differentiable search on cells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase

Method = Literal["darts", "snas", "dsnas", "proxyless", "uniform"]
Rule = Literal["argmax", "darts"]


@dataclass(frozen=True)
class CellSearchConfig(ConfigBase):
    """The settings of a search; the defaults are the published ones for one level (arXiv 2009.01272, section 7).

    Attributes:
        method: how the gradient of the logits is estimated. `uniform` samples all candidates alike and learns nothing.
        bilevel: the logits learn from batches of held-out images, before the weights learn from training images.
        second_order: DARTS looks one step of the weights ahead; needs `bilevel`.
        two_path: ProxylessNAS measures one other operation instead of all.
        alpha_lr: learning rate of the logits, with Adam; 0 keeps them, and held-out batches are only measured.
        alpha_weight_decay: weight decay of the logits.
        alpha_mean, alpha_std: mean and standard deviation of the normal distribution that the logits start from.
        temperature: temperature of the softmax; SNAS begins with it.
        final_temperature: temperature that SNAS ends with.
        redraw: draw the operations again while only None enters some output node.
        records: into how many equal parts the search is divided; each part records mean probabilities and costs.
        seed: seed of weights, logits and gates.
    """

    method: Method = "dsnas"
    bilevel: bool = False
    second_order: bool = False
    two_path: bool = False
    alpha_lr: float = 3e-4
    alpha_weight_decay: float = 1e-3
    alpha_mean: float = 0.0
    alpha_std: float = 1e-3
    temperature: float = 1.0
    final_temperature: float = 0.03
    redraw: bool = False
    records: int = 100
    seed: int = 0

    def _check_values(self) -> None:
        for name in ("alpha_lr", "alpha_weight_decay", "alpha_std"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("temperature", "final_temperature", "records"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.second_order and not (self.method == "darts" and self.bilevel):
            raise ValueError("second_order belongs to method='darts' with bilevel=True")
        if self.two_path and self.method != "proxyless":
            raise ValueError(f"two_path belongs to method='proxyless', got {self.method!r}")
        if self.redraw and self.method not in ("uniform", "dsnas", "proxyless"):
            raise ValueError(f"redraw belongs to methods that sample one operation, got {self.method!r}")
