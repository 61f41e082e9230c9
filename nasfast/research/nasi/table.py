"""The result of NASI as a table of scores: for cells, and for layers in the form that every search reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nasfast.indicators.table import IndicatorTable
from nasfast.research.nasi.search import NasiResult
from nasfast.spaces import Arch, SearchSpace

METHOD = "nasi"
"""The `method` in the meta of a table that NASI made."""


@dataclass(frozen=True)
class LogitTable:
    """The logits of cells as scores of candidates; that of an architecture is their sum, log p up to a constant.

    Attributes:
        logits: (choices, candidates), by the values of an architecture.
    """

    logits: Tensor

    def score(self, arch: Arch) -> float:
        """The sum over the values of an architecture."""
        return float(sum(row[k] for row, k in zip(self.logits, arch, strict=True)))


def nasi_table(space: SearchSpace, result: NasiResult, *, meta: dict[str, Any] | None = None) -> IndicatorTable:
    """The logits of a search as a table, whose sum over layers is log p(arch) up to a constant.

    A table without layer indicators gives an identity candidate the score 0. So the logits of its layer are written
    minus the logit of the identity.

    Args:
        space: the space that was searched, with a `LayerMixture`.
        result: the result of the search.
        meta: kept in the table besides the method.

    Raises:
        ValueError: a result of another shape.
    """
    if result.logits.shape[:2] != (1, len(space)):
        raise ValueError(f"logits must be (1, {len(space)}, ...) for {space.name!r}, got {tuple(result.logits.shape)}")
    block = []
    for layer, row in zip(space.layers, result.logits[0].tolist(), strict=True):
        logits = dict(zip(layer.options, row, strict=False))
        # a pinned layer has one option, which needs no score
        identity = layer.indicator_choice if layer.choices else layer.options[0]
        shift = 0.0 if identity is None else logits.pop(identity, 0.0)
        block.append({choice: value - shift for choice, value in logits.items()})
    return IndicatorTable(space, tuple(block), (None,) * len(space), {"method": METHOD, **(meta or {})})
