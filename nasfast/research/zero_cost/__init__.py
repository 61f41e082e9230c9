"""Scores of untrained networks, mostly from the literature, which need one or a few batches and no training.

Each is `score(module, images, labels) -> float` for any `nn.Module` that gives logits, and does not change the module.
The papers say that a larger value predicts a higher accuracy; docs/ranking_zero_cost.md says how well that holds here.
"""

from collections.abc import Callable

from torch import Tensor, nn

from nasfast.indicators.registry import ScoreError
from nasfast.research.zero_cost.az_nas import expressivity, progressivity, trainability
from nasfast.research.zero_cost.scores import (
    beta_norm,
    gradient_norm,
    log_volume,
    naswot,
    ntk_q,
    snip,
    synflow,
    zico,
)

ZERO_COST: dict[str, Callable[[nn.Module, Tensor, Tensor], float]] = {
    "gradient_norm": gradient_norm,
    "snip": snip,
    "synflow": synflow,
    "naswot": naswot,
    "zico": zico,
    "ntk_q": ntk_q,
    "beta_norm": beta_norm,
    "log_volume": log_volume,
    "expressivity": expressivity,
    "progressivity": progressivity,
    "trainability": trainability,
}

__all__ = [
    "ZERO_COST",
    "ScoreError",
    "beta_norm",
    "expressivity",
    "gradient_norm",
    "log_volume",
    "naswot",
    "ntk_q",
    "progressivity",
    "snip",
    "synflow",
    "trainability",
    "zico",
]
