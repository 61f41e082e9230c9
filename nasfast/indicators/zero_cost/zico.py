"""ZiCo: how large gradients are for how much they vary between batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nasfast.indicators.registry import ScoreError
from nasfast.indicators.zero_cost.layers import loss_gradients, weighted_layers, working_copy


def zico(module: nn.Module, images: Tensor, labels: Tensor, *, batches: int = 2) -> float:
    """Sum over layers of log(sum over weights w of mean |dL_i/dw| / std dL_i/dw), i the batches.

    Li et al., ZiCo: Zero-shot NAS via Inverse Coefficient of Variation on Gradients (ICLR 2023, arXiv 2301.11300),
    section 3.3. The paper prints the variance of |dL_i/dw|; the released code takes that of dL_i/dw, and so does this:
    of two batches the former is 0 as soon as gradients differ in sign alone. The standard deviation is that of the
    sample (divided by the number of batches). As in the code, weights whose gradient does not vary are left out, and so
    is a layer that has no others. Layers are the convolutions and linear layers whose weights train. Norms use the
    batch's statistics.

    Args:
        module: images -> logits (N, classes).
        images: (N, C, H, W), on the module's device; split in order into `batches` of equal size.
        labels: (N,) int64.
        batches: at least 2; the released code uses 2.

    Raises:
        ValueError: fewer than 2 batches, or N is no multiple of them.
        ScoreError: no convolution weight trains, a gradient is not finite (the layer is named), or no gradient varies.
    """
    if batches < 2 or len(images) % batches:
        raise ValueError(f"zico needs at least 2 batches of equal size, got {len(images)} images in {batches} batches")
    copied = working_copy(module)
    layers = weighted_layers(copied)
    pairs = zip(images.chunk(batches), labels.chunk(batches), strict=True)
    found = [loss_gradients(copied, layers, x, y) for x, y in pairs]
    logs = []
    for gradients in zip(*found, strict=True):
        stacked = torch.stack(gradients).double()
        deviation = stacked.std(0, correction=0)
        varies = deviation > 0
        total = (stacked.abs().mean(0)[varies] / deviation[varies]).sum().item()
        if total > 0:
            logs.append(math.log(total))
    if not logs:
        raise ScoreError("no gradient differs between the batches: are their images the same?")
    return math.fsum(logs)
