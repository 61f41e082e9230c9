"""NASI's table as a score: the logits that its search gives every candidate at initialisation."""

from __future__ import annotations

from nasfast.indicators.evidence import Evidence, NetworkEvidence
from nasfast.indicators.registry import ScoreError, register
from nasfast.indicators.table import IndicatorTable
from nasfast.nasi.config import NasiConfig
from nasfast.nasi.kinds import mixture_of, table_of
from nasfast.nasi.search import search
from nasfast.nasi.table import LogitTable
from nasfast.train.batches import as_epochs


@register("nasi", additive=True, trained=False, networks=True)
def nasi(evidence: Evidence | NetworkEvidence) -> IndicatorTable | LogitTable:
    """The logits of a search by NASI (docs/nasi.md): 100 sampled architectures, each on a batch of its own, mu 1.

    It has an untrained supernet of its own, whose weights are PyTorch's.

    Raises:
        ScoreError: no sampled architecture has a finite Q, or none has a slope.
    """
    cfg = NasiConfig(mu=1.0, seed=evidence.seed)
    try:
        found = search(mixture_of(evidence.space, seed=evidence.seed), as_epochs(evidence.images), cfg)
    except (ValueError, FloatingPointError) as error:
        raise ScoreError(f"NASI finds no table of {evidence.space.name}: {error}") from error
    return table_of(evidence.space, found)
