"""The score `path_accuracy`: accuracy of a path of the supernet without BN recalibration."""

from __future__ import annotations

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.registry import register
from nasfast.spaces import Arch


@register("path_accuracy", additive=False, held_out=True)
def path_accuracy(evidence: Evidence, arch: Arch) -> float:
    """Top-1, from 0 to 1, of a path on held-out images; BatchNorms use the statistics of each batch."""
    return evidence.outcome(arch)[1]
