"""Channels by L1 norms of their filters, as pruning libraries choose them by default."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nasfast.indicators.table import IndicatorTable
from nasfast.shrink import Found, Measured, Place, Solution
from nasfast.shrink.measure import unit_channels


def by_norms(found: Found) -> Measured:
    """Of every width the channels with the largest L1 norms of the filters that make them, with weights as they are.

    This is what pruning libraries do by default; nothing is measured, and the table is of zeros.
    """
    solutions = tuple(
        tuple(
            {width: _kept_by_norm(found, place, i, width) for width in widths[:-1]}
            for i, widths in enumerate(place.widths)
        )
        for place in found.places
    )
    rows = [dict.fromkeys(range(len(place.candidates)), 0.0) for place in found.places]
    return Measured(found, IndicatorTable.from_rows(found.space, rows, {"score": "none"}), solutions)


def _kept_by_norm(found: Found, place: Place, index: int, width: int) -> Solution:
    dimension = place.dimensions[index]
    norms = torch.zeros(dimension.units)
    for layer in dimension.producers:
        weight: Any = found.model.get_submodule(layer.path).weight
        norms += weight.detach().abs().reshape(dimension.units, -1).sum(1)
    kept = norms.argsort(descending=True, stable=True)[:width].sort().values
    weights: dict[str, Tensor] = {}
    for layer in dimension.readers:
        matrix: Any = found.model.get_submodule(layer.path).weight
        columns = unit_channels(kept, layer.columns // dimension.units)
        weights[layer.path] = matrix.detach().reshape(layer.rows, -1)[:, columns].float()
    return Solution(kept, weights, {layer.path: torch.zeros(layer.rows) for layer in dimension.readers})
