"""Minus the loss of a path of the supernet: the score that `dinas` distils into a table."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.registry import register
from nasfast.spaces import Arch


@register("path_loss", additive=False, held_out=True)
@torch.no_grad()
def path_loss(evidence: Evidence, arch: Arch) -> float:
    """Minus the mean cross-entropy (nats) of a path on held-out images, with the statistics of each batch."""
    total, images = 0.0, 0
    for x, y in evidence.batches:
        total += F.cross_entropy(evidence.logits(x, arch), y, reduction="sum").item()
        images += len(y)
    return -total / images
