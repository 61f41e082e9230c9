"""The result of NASI in a layer-wise space, as the table of scores that every search of the package reads."""

from __future__ import annotations

from typing import Any

from nasfast.indicators.table import IndicatorTable
from nasfast.nasi.search import NasiResult
from nasfast.spaces import Arch, SearchSpace

METHOD = "nasi"
"""The `method` in the meta of a table that NASI made."""


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


def layer_arch(space: SearchSpace, result: NasiResult) -> Arch:
    """The architecture of the highest logits; of equal ones the lower option wins."""
    return nasi_table(space, result).argmax()
