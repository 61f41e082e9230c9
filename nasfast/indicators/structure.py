"""What the structure of an architecture alone says of its accuracy: baselines that cost nothing. No torch.

A score proves itself by what it adds to these. Each is a sum over the values of an architecture, so each is also a
table that the exact search takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from nasfast.config import nearest
from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import ArchSpace, Operator, SearchSpace

COST_BONUS = 0.2
"""What the dearest candidate of a layer has over the cheapest in `sqrt_size`, as a part of the latter's."""

Rows = tuple[dict[int, float], ...]
"""Per value of an architecture: option -> its part of the sum."""


def _depth(options: Mapping[int, Operator]) -> dict[int, float]:
    return {k: float(option.works) for k, option in options.items()}


def _macs(options: Mapping[int, Operator]) -> dict[int, float]:
    return {k: float(option.cost.macs) for k, option in options.items()}


def _params(options: Mapping[int, Operator]) -> dict[int, float]:
    return {k: float(option.cost.params) for k, option in options.items()}


def _sqrt_size(options: Mapping[int, Operator]) -> dict[int, float]:
    macs = [option.cost.macs for option in options.values() if option.works]
    low, span = min(macs, default=0), max(macs, default=0) - min(macs, default=0)
    row = {}
    for k, option in options.items():
        bonus = COST_BONUS * (option.cost.macs - low) / span if span else 0.0
        row[k] = sum(map(math.sqrt, option.inputs)) * (1 + bonus) if option.works else 0.0
    return row


BASELINES: dict[str, Callable[[Mapping[int, Operator]], dict[int, float]]] = {
    "depth": _depth,
    "macs": _macs,
    "params": _params,
    "sqrt_size": _sqrt_size,
}
"""Name -> rule from the options of one layer (or edge) to their parts of the sum.

- `depth`: layers that are not the identity. Of cells: operations that are not none, the identity or a pooling.
- `macs`, `params`: cost of the layers that are searched; stem, head and classifier are the same for all.
- `sqrt_size`: sum of sqrt(C H W) of the layer's input, times 1 + 0.2 (m - m_min) / (m_max - m_min). m are the MACs of
  the candidate; m_min and m_max are the least and the most among the layer's candidates that are not the identity. An
  identity has 0. On NAS-Bench-Macro the second factor is 1 for k3 e3 and 1.2 for k5 e6. Cells: summed over all of them.
"""


def structure_rows(space: ArchSpace, name: str) -> Rows:
    """The parts of a baseline, per value of an architecture and legal option.

    Args:
        space: layer-wise, or of cells.
        name: one of `BASELINES`.

    Raises:
        ValueError: unknown name.
    """
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}; {nearest(name, BASELINES)}")
    return tuple(BASELINES[name](options) for options in space.operators)


def structure_scores(space: ArchSpace, name: str, archs: Iterable[Iterable[int]]) -> list[float]:
    """The baseline of each architecture.

    Raises:
        ArchError: an architecture is not of `space`.
        ValueError: unknown name.
    """
    rows = structure_rows(space, name)
    return [math.fsum(row[k] for row, k in zip(rows, space.check(arch), strict=True)) for arch in archs]


def structure_table(space: SearchSpace, name: str) -> IndicatorTable:
    """The baseline as a table, which `nasfast.search` maximises exactly.

    Raises:
        ValueError: unknown name.
    """
    block = tuple(
        {choice: row[choice] for choice in layer.options if choice != layer.indicator_choice and layer.choices}
        for layer, row in zip(space.layers, structure_rows(space, name), strict=True)
    )
    return IndicatorTable(space, block, (None,) * len(space), {"method": name})
