"""Accuracy of a path of the supernet, without recalibration."""

from __future__ import annotations

import torch

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.registry import register
from nasfast.spaces import Arch


@register("path_accuracy", additive=False, held_out=True)
@torch.no_grad()
def path_accuracy(evidence: Evidence, arch: Arch) -> float:
    """Top-1 in [0, 1] of a path on held-out images, with the statistics of each batch."""
    correct = sum((evidence.logits(x, arch).argmax(1) == y).sum().item() for x, y in evidence.batches)
    return correct / sum(len(y) for _, y in evidence.batches)
