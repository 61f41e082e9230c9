"""The BN indicators of a trained supernet (BN-NAS; layer indicators and the combined score: DI-NAS, Algorithm 2).

"A large gamma means a good module" is an empirical score: the paper's Theorem 1 does not imply it, because its relative
deviation does not depend on gamma (docs/method.md 2).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.registry import ScoreError, register
from nasfast.indicators.table import IndicatorTable
from nasfast.runtime.arguments import check_type
from nasfast.supernet import Supernet


def _mean_abs_gamma(bn: nn.BatchNorm2d) -> float:
    return bn.weight.detach().double().abs().mean().item()


def score(net: Supernet, *, meta: dict[str, Any] | None = None) -> IndicatorTable:
    """The table of S_v = mean |gamma| of every block indicator, and S_u of every layer indicator.

    An untrained supernet scores 1 everywhere. `meta` is what the table says about its origin, e.g. method and step.

    Raises:
        TableError: a gamma is not finite.
        ScoreError: a candidate has no BatchNorm.
        TypeError: `net` is not a supernet.
    """
    check_type("net", net, Supernet, advice="nasfast.Supernet(space) makes one")
    if why := _refusal(net):
        raise ScoreError(f"{net.space.name} has no gammas to score by: {why}")
    block, layer_scores = [], []
    for layer in net.layers:
        norms = {choice: layer.block_indicator(choice) for choice in range(len(layer.candidates))}
        block.append({choice: _mean_abs_gamma(bn) for choice, bn in norms.items() if bn is not None})
        layer_scores.append(None if layer.layer_indicator is None else _mean_abs_gamma(layer.layer_indicator))
    return IndicatorTable(net.space, tuple(block), tuple(layer_scores), meta or {})


def _refusal(net: Supernet) -> str | None:
    for i, (layer, options) in enumerate(zip(net.layers, net.space.layers, strict=True)):
        for choice in range(len(layer.candidates)):
            if choice != options.indicator_choice and layer.block_indicator(choice) is None:
                return f"{net.space.place(i)}, {net.space.label(i, choice)}, has no BatchNorm2d"
    return None


@register("gamma", additive=True, images=False, refusal=_refusal)
def gamma(evidence: Evidence) -> IndicatorTable:
    """Mean |gamma| of the block indicator, times that of the layer indicator (BN-NAS; DI-NAS, Algorithm 2)."""
    return score(evidence.net)
