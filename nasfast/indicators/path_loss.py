"""The score `path_loss`: minus the loss of a path of the supernet; `dinas` distils it into a table."""

from __future__ import annotations

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.registry import register
from nasfast.spaces import Arch


@register("path_loss", additive=False, held_out=True)
def path_loss(evidence: Evidence, arch: Arch) -> float:
    """Minus the mean cross-entropy (nats) of a path on held-out images; BatchNorms use the statistics of each batch."""
    return -evidence.outcome(arch)[0]
