"""Ablation: how much the loss of a path rises when one of its candidates is replaced by the identity."""

from __future__ import annotations

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.path_loss import path_loss
from nasfast.indicators.registry import ScoreError, register
from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import SKIP, Layer
from nasfast.supernet import Supernet


def _identity(layer: Layer) -> int | None:
    """The value that removes a layer: its identity candidate, or the skip of a normal layer; None if it has neither."""
    kinds = [block.kind for block in layer.choices]
    return kinds.index("identity") if "identity" in kinds else SKIP if layer.normal else None


def _refusal(net: Supernet) -> str | None:
    without = [str(i) for i, layer in enumerate(net.space.layers) if _identity(layer) is None]
    return f"layers {', '.join(without)} change shape and have no identity as replacement" if without else None


@register("ablation", additive=True, held_out=True, refusal=_refusal)
def ablation(evidence: Evidence) -> IndicatorTable:
    """Mean over paths of the loss with the identity in place of a layer's candidate, minus the loss with it."""
    space = evidence.net.space
    identities = [_identity(layer) for layer in space.layers]
    rises: list[dict[int, list[float]]] = [{value: [] for value in values} for values in evidence.values]
    for path in evidence.sample():
        loss = -path_loss(evidence, path)
        for i, identity in enumerate(identities):
            if path[i] not in (identity, SKIP):
                without = (*path[:i], identity, *path[i + 1 :])
                rises[i][path[i]].append(-path_loss(evidence, without) - loss)
    rows = []
    for i, (row, identity) in enumerate(zip(rises, identities, strict=True)):
        missing = [choice for choice, values in row.items() if not values and choice not in (identity, SKIP)]
        if missing:
            raise ScoreError(
                f"no sampled path runs through layer {i}, choice {missing[0]}: give more than {evidence.paths} paths"
            )
        rows.append({choice: sum(values) / len(values) if values else 0.0 for choice, values in row.items()})
    return IndicatorTable.of_rows(space, rows, {})
