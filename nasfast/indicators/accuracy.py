"""The score of SPOS and FairNAS: accuracy of a path after BN recalibration; it is not additive over layers."""

from __future__ import annotations

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.registry import ScoreError, register
from nasfast.spaces import Arch
from nasfast.supernet import Supernet, inherit
from nasfast.train import evaluate, recalibrate_bn


def path_accuracy(
    net: Supernet,
    arch: Arch,
    *,
    train_loader: object,
    val_loader: object,
    recalibration_batches: int = 20,
    device: str = "cpu",
) -> float:
    """Top-1, from 0 to 1, of `arch` with the supernet's weights.

    Args:
        net: the trained supernet.
        arch: an architecture of its space.
        train_loader: its first `recalibration_batches` batches give the path's BN statistics (SPOS, section 3.4).
        val_loader: the images that give the accuracy; use others to judge the final network.
        recalibration_batches: number of these batches.
        device: where to compute.

    Raises:
        ArchError: `arch` does not belong to the supernet's space.
    """
    network = inherit(net, arch).to(device)
    recalibrate_bn(network, train_loader, batches=recalibration_batches, device=device)
    return evaluate(network, val_loader, device=device).top1


@register("recalibrated_accuracy", additive=False, held_out=True)
def recalibrated_accuracy(evidence: Evidence, arch: Arch) -> float:
    """Top-1, from 0 to 1, of a path on held-out images after BN recalibration: the score of SPOS and FairNAS."""
    if evidence.loaders is None:
        raise ScoreError("recalibrated_accuracy needs training images too: give Evidence(loaders=(training, held_out))")
    training, held_out = evidence.loaders
    return path_accuracy(
        evidence.net,
        arch,
        train_loader=training,
        val_loader=held_out,
        recalibration_batches=evidence.recalibration_batches,
        device=str(evidence.device),
    )
