"""Additive tables fitted to scores of paths by least squares, and sums of tables of different units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nasfast.indicators.rank import kendall_tau
from nasfast.indicators.registry import ScoreError
from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import SKIP, Arch, LayerSpace

_FOLDS = 5


def distill(
    space: LayerSpace, scores: Mapping[Arch, float], values: Sequence[Sequence[int]], *, meta: dict[str, Any]
) -> IndicatorTable:
    """The additive table that is nearest to the scores of sampled paths.

    It is the least-squares fit of the scores by one indicator variable per (layer, value). The scores of the values of
    a layer average 0, and the constant is `intercept` in meta. Besides, meta has the share of the variance that the
    table explains (`r2`), the number of `paths`, and `cross_validated_tau`: Kendall's tau-b between the scores of paths
    and the predictions of tables that were fitted without them, in five folds.

    Args:
        space: the space of the paths.
        scores: path -> score, larger is better.
        values: for each layer, the values that the table scores; every value must occur among the paths.
        meta: what the table says about its origin.
    """
    archs, y = list(scores), np.array(list(scores.values()), dtype=np.float64)
    columns = {pair: i for i, pair in enumerate((layer, v) for layer, row in enumerate(values) for v in row)}
    x = np.zeros((len(archs), len(columns)))
    for row, arch in zip(x, archs, strict=True):
        row[[columns[pair] for pair in enumerate(arch) if pair in columns]] = 1
    _check_finite(space, list(columns), x, y)
    free = sum(max(len(row) - 1, 0) for row in values)
    if len(archs) <= free or np.linalg.matrix_rank(_centre(values, x)) < free:
        raise ScoreError(
            f"{len(archs)} different paths do not determine the {free} free scores of a table of {space.name}: give "
            "more (score.paths)"
        )
    weights, intercept = _fit(values, x, y)
    rest, spread = y - intercept - x @ weights, y - y.mean()
    predicted = np.empty_like(y)
    folds = np.arange(len(y)) % _FOLDS
    for fold in range(_FOLDS):
        w, constant = _fit(values, x[folds != fold], y[folds != fold])
        predicted[folds == fold] = constant + x[folds == fold] @ w
    tau = float(kendall_tau(predicted, y, np.ones((1, len(y))))[0])
    rows = [{v: float(weights[columns[layer, v]]) for v in row} for layer, row in enumerate(values)]
    quality = {
        "paths": len(archs),
        "r2": 1 - float(rest @ rest) / float(spread @ spread) if spread.any() else None,
        "cross_validated_tau": None if math.isnan(tau) else tau,
        "intercept": float(intercept),
    }
    return IndicatorTable.from_rows(space, rows, {**meta, **quality})


def z_sum(parts: Sequence[tuple[IndicatorTable, float]], *, meta: dict[str, Any]) -> IndicatorTable:
    """The weighted sum of tables of different units, each divided by its own standard deviation.

    Mean and standard deviation are those of a table's score over all architectures of the space; they are exact because
    layers add up independently. A table that gives every architecture the same score adds nothing.
    """
    space = parts[0][0].space
    rows: list[dict[int, float]] = [
        dict.fromkeys([v for v in layer.legal if v in row or table_layer is not None], 0.0)
        for row, table_layer, layer in zip(parts[0][0].scores, parts[0][0].layer, space.layers, strict=True)
    ]
    for table, weight in parts:
        variance = sum(float(np.var(list(row.values()))) for row in table.scores)
        if not variance:
            continue
        for i, row in enumerate(rows):
            mean = float(np.mean(list(table.scores[i].values())))
            for choice in row:
                # a skip that a table has no score for scores 0, as in `IndicatorTable.score`
                score = table.scores[i].get(choice, table.layer[i] or 0.0)
                row[choice] += weight * (score - mean) / math.sqrt(variance)
    return IndicatorTable.from_rows(space, rows, meta)


def _centre(values: Sequence[Sequence[int]], x: np.ndarray) -> np.ndarray:
    """One variable fewer per layer: each indicator minus that of the layer's last value, so that weights average 0."""
    parts, start = [], 0
    for row in values:
        block = x[:, start : start + len(row)]
        parts.append(block[:, :-1] - block[:, -1:])
        start += len(row)
    return np.concatenate(parts, axis=1)


def _fit(values: Sequence[Sequence[int]], x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights of the columns of x, which average 0 in each layer, and the intercept."""
    design = np.column_stack([_centre(values, x), np.ones(len(y))])
    solution, *_ = np.linalg.lstsq(design, y, rcond=None)
    weights, start = [], 0
    for row in values:
        part = solution[start : start + len(row) - 1]
        weights += [*part, -part.sum()]
        start += len(row) - 1
    return np.array(weights), float(solution[-1])


def _check_finite(space: LayerSpace, columns: list[tuple[int, int]], x: np.ndarray, y: np.ndarray) -> None:
    """Refuse scores y that are not finite; see `distill`."""
    bad = ~np.isfinite(y)
    if not bad.any():
        return
    share = x[bad].sum(axis=0) / np.maximum(x.sum(axis=0), 1)
    layer, choice = columns[int(share.argmax())]
    label = "skip" if choice == SKIP else space.layers[layer].label(choice)
    raise ScoreError(
        f"{bad.sum()} of {len(y)} sampled paths have no finite score, most often those through layer {layer}, choice "
        f"{choice} ({label}): the supernet diverged; train it with a lower train.lr"
    )
