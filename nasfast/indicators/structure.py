"""Baselines that predict accuracy from the structure of an architecture and cost nothing. They need no torch.

A score is worth what it adds to them. Each baseline is a sum over the values of an architecture, so it is also a table
for the exact search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from nasfast.config import nearest
from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import SKIP, ArchSpace, LayerSpace, Operator

COST_BONUS = 0.2
"""By how much the candidate of most MACs exceeds the one of fewest in `sqrt_size`, as a fraction of the latter."""

Rows = tuple[dict[int, float], ...]
"""For each value of an architecture: option -> its term of the sum."""


def _per_option(value: Callable[[Operator], float]) -> Callable[[Mapping[int, Operator]], dict[int, float]]:
    return lambda options: {k: float(value(option)) for k, option in options.items()}


def _sqrt_size(options: Mapping[int, Operator]) -> dict[int, float]:
    macs = [option.cost.macs for option in options.values() if option.works]
    low, span = min(macs, default=0), max(macs, default=0) - min(macs, default=0)
    row = {}
    for k, option in options.items():
        bonus = COST_BONUS * (option.cost.macs - low) / span if span else 0.0
        row[k] = sum(map(math.sqrt, option.inputs)) * (1 + bonus) if option.works else 0.0
    return row


BASELINES: dict[str, Callable[[Mapping[int, Operator]], dict[int, float]]] = {
    "depth": _per_option(lambda option: option.works),
    "macs": _per_option(lambda option: option.cost.macs),
    "params": _per_option(lambda option: option.cost.params),
    "sqrt_size": _sqrt_size,
}
"""Name -> rule from the options of one layer (or edge) to their terms of the sum.

- `depth`: number of layers that are not the identity; for cells, of operations other than none, identity and pooling.
- `macs`, `params`: cost of the searched layers; stem, head and classifier are the same for all architectures.
- `sqrt_size`: sum over layers of sqrt(C H W) of the layer's input, times 1 + 0.2 (m - m_min) / (m_max - m_min). Here m
  are the MACs of the candidate, m_min and m_max the least and the most among the layer's candidates that are not the
  identity. The identity has 0. On NAS-Bench-Macro the second factor is 1 for k3 e3 and 1.2 for k5 e6. For cells it is
  summed over all cells.
"""


def baselines(space: ArchSpace) -> tuple[str, ...]:
    """The names of the baselines of a space.

    In a space of cells the number of times that each operation occurs is a baseline, too. The sign is fixed in advance:
    `more NAME` counts an operation with weights, `fewer NAME` is minus the count of one without.
    """
    return (*BASELINES, *_counts(space))


def _counts(space: ArchSpace) -> dict[str, Rows]:
    if space.LAYERWISE:
        return {}
    labels = [{k: space.label(i, k) for k in options} for i, options in enumerate(space.operators)]
    work = {labels[i][k] for i, options in enumerate(space.operators) for k in options if options[k].works}
    return {
        f"{'more' if op in work else 'fewer'} {op}": tuple(
            {k: (1.0 if op in work else -1.0) * (label == op) for k, label in row.items()} for row in labels
        )
        for op in space.columns
    }


def structure_rows(space: ArchSpace, name: str) -> Rows:
    """The terms of a baseline, for each value of an architecture and each allowed option."""
    if name in BASELINES:
        return tuple(BASELINES[name](options) for options in space.operators)
    counts = _counts(space)
    if name not in counts:
        raise ValueError(f"unknown baseline {name!r}; {nearest(name, (*BASELINES, *counts))}")
    return counts[name]


def structure_scores(space: ArchSpace, name: str, archs: Iterable[Iterable[int]]) -> list[float]:
    """The baseline of each architecture."""
    rows = structure_rows(space, name)
    return [math.fsum(row[k] for row, k in zip(rows, space.check(arch), strict=True)) for arch in archs]


def structure_table(space: LayerSpace, name: str) -> IndicatorTable:
    """The baseline as a table, which `nasfast.search_table` maximises exactly."""
    block = tuple(
        {choice: row[choice] for choice in layer.options if choice not in (layer.indicator_choice, SKIP)}
        for layer, row in zip(space.layers, structure_rows(space, name), strict=True)
    )
    return IndicatorTable(space, block, (None,) * len(space), {"method": name})
