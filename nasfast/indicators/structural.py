"""The baselines of `nasfast.indicators.structure` as scores: sums over layers that depend only on the space."""

from __future__ import annotations

from nasfast.indicators.evidence import Evidence, NetworkEvidence, space_of_layers
from nasfast.indicators.registry import register
from nasfast.indicators.structure import BASELINES, structure_table
from nasfast.indicators.table import IndicatorTable


def _register(name: str) -> None:
    @register(name, additive=True, trained=False, images=False, networks=True)
    def baseline(evidence: Evidence | NetworkEvidence) -> IndicatorTable:
        return structure_table(space_of_layers(evidence), name)

    baseline.__doc__ = f"The baseline {name} of docs/ranking_zero_cost.md: it depends only on the space."


for _name in BASELINES:
    _register(_name)
