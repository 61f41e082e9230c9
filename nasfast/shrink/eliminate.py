"""Which units a layer may lose and what its other weights then should be: backward elimination and least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ONE_BY_ONE = 512
"""Columns up to which units are removed one by one; for more, as many at once as the columns are times more."""

_COMPACT = 0.125
"""Share of removed units at which the matrices are copied without them."""


@dataclass(frozen=True)
class Elimination:
    """What a layer loses at each width.

    Attributes:
        order: (units,) units by the step in which they are removed, the most important last.
        errors: (units - 1,) squared error of the layer's outputs when a unit and all before it in `order` are gone.
        kept: width -> (width,) units that stay, ascending.
        weights: width -> (outputs, width * size of a unit) their least-squares weights.
    """

    order: Tensor
    errors: Tensor
    kept: dict[int, Tensor]
    weights: dict[int, Tensor]


def eliminate(
    covariance: Tensor, weight: Tensor, widths: Sequence[int], *, unit: int = 1, importance: Tensor | None = None
) -> Elimination:
    """Remove the units of a layer's input one by one, each time the one whose removal adds the smallest error.

    With C the covariance of the inputs, P = C^-1 and B the columns of a unit, its removal adds
    sum_o importance_o W_oB P_BB^-1 W_oB' to the squared error of the outputs, and the best weights of the others are
    W - W_B P_BB^-1 P_B (Hassibi and Stork 1993, with the covariance as Hessian). So one order serves all widths, and
    its weights are those of least squares. It costs columns^3 multiplications.

    Args:
        covariance: (columns, columns) float64, positive definite; with a ridge lambda diag(C) added, the weights are
            those of least squares plus lambda * |W' - W|^2 in units of each input's variance.
        weight: (outputs, columns) float64.
        widths: widths in units whose weights are wanted.
        unit: neighbouring columns that stay or go together.
        importance: (outputs,) factors of the outputs' squared errors; 1 by default.

    Returns:
        The order and the weights.
    """
    units = len(covariance) // unit
    wanted, alive = set(widths), torch.arange(units)
    scale = torch.ones(len(weight), dtype=weight.dtype) if importance is None else importance.to(weight.dtype)
    p, w = torch.linalg.inv(covariance), weight.clone()
    gone = torch.zeros(units, dtype=torch.bool)
    order: list[int] = []
    errors: list[float] = []
    kept: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    at_once = max(1, len(covariance) // _ONE_BY_ONE)
    left = units
    while left > 1:
        stop = max((width for width in wanted if width < left), default=1)
        increase = _increases(p, w, unit, scale, gone)
        places = increase.argsort()[: min(at_once, left - stop)]
        columns = (places[:, None] * unit + torch.arange(unit)).reshape(-1)
        across, change = p[columns], w[:, columns]
        removed = torch.linalg.solve(across[:, columns], torch.cat([across, change.T], 1))
        added = float(scale @ (change * removed[:, len(p) :].T).sum(1))
        errors += [(errors[-1] if errors else 0.0) + added] * len(places)
        w -= change @ removed[:, : len(p)]
        p -= p[:, columns] @ removed[:, : len(p)]
        order += alive[places].tolist()
        gone[places] = True
        left -= len(places)
        if left in wanted or int(gone.sum()) >= _COMPACT * len(alive):
            keep = ~gone
            rows = keep.repeat_interleave(unit)
            p, w, alive = p[rows][:, rows], w[:, rows], alive[keep]
            gone = torch.zeros(len(alive), dtype=torch.bool)
        if left in wanted:
            kept[left], weights[left] = alive.clone(), w.clone()
    order += alive[~gone].tolist()
    return Elimination(torch.tensor(order), torch.tensor(errors, dtype=torch.float64), kept, weights)


def _increases(p: Tensor, w: Tensor, unit: int, scale: Tensor, gone: Tensor) -> Tensor:
    """(units,) what the removal of each unit adds to the squared error; infinite for those that are gone."""
    units = len(gone)
    if unit == 1:
        return ((scale @ w.square()) / p.diagonal()).masked_fill_(gone, torch.inf)
    blocks = p.view(units, unit, units, unit).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    blocks[gone] = torch.eye(unit, dtype=p.dtype)
    parts = w.view(len(w), units, unit).permute(1, 2, 0)
    products = (parts * scale) @ parts.transpose(1, 2)
    return torch.linalg.solve(blocks, products).diagonal(dim1=1, dim2=2).sum(1).masked_fill_(gone, torch.inf)


def solve(covariance: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
    """(outputs, kept columns) the least-squares weights of some columns: W C[:, S] C[S, S]^-1."""
    return torch.linalg.solve(covariance[columns][:, columns], (weight @ covariance[:, columns]).T).T
