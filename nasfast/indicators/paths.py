"""The scores of single paths of a supernet: loss, accuracy, and accuracy after BN recalibration."""

from __future__ import annotations

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.registry import ScoreError, register
from nasfast.spaces import Arch
from nasfast.train import evaluate, recalibrate_bn


@register("path_loss", additive=False, held_out=True)
def path_loss(evidence: Evidence, arch: Arch) -> float:
    """Minus the mean cross-entropy (nats) of a path on held-out images; BatchNorms use the statistics of each batch."""
    return -evidence.outcome(arch)[0]


@register("path_accuracy", additive=False, held_out=True)
def path_accuracy(evidence: Evidence, arch: Arch) -> float:
    """Top-1, from 0 to 1, of a path on held-out images; BatchNorms use the statistics of each batch."""
    return evidence.outcome(arch)[1]


@register("recalibrated_accuracy", additive=False, held_out=True)
def recalibrated_accuracy(evidence: Evidence, arch: Arch) -> float:
    """Top-1, from 0 to 1, of a path on held-out images after BN recalibration: the score of SPOS and FairNAS."""
    if evidence.loaders is None:
        raise ScoreError("recalibrated_accuracy needs training images too: give Evidence(loaders=(training, held_out))")
    training, held_out = evidence.loaders
    network, device = evidence.network(arch), str(evidence.device)
    # SPOS, section 3.4: the first training batches give the path's own statistics
    recalibrate_bn(network, training, batches=evidence.recalibration_batches, device=device)
    return evaluate(network, held_out, device=device).top1
