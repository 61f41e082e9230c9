"""Scores of untrained networks, mostly from the literature, which need one or a few batches and no training.

Each is `score(module, images, labels) -> float` for any `nn.Module` that gives logits, and does not change the module.
The papers say that a larger value predicts a higher accuracy; docs/ranking_zero_cost.md says how well that holds here.
"""

from collections.abc import Callable

from torch import Tensor, nn

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

_FUNCTIONS = (
    gradient_norm,
    snip,
    synflow,
    naswot,
    zico,
    ntk_q,
    beta_norm,
    log_volume,
    expressivity,
    progressivity,
    trainability,
)
ZERO_COST: dict[str, Callable[[nn.Module, Tensor, Tensor], float]] = {score.__name__: score for score in _FUNCTIONS}
"""Name -> score."""
