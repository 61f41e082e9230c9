"""ZiCo: the size of gradients relative to their variation between batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nasfast.indicators.registry import ScoreError
from nasfast.research.zero_cost.layers import loss_gradients, weighted_layers, working_copy


def zico(module: nn.Module, images: Tensor, labels: Tensor, *, batches: int = 2) -> float:
    """Sum over layers of log(sum over weights w of mean |dL_i/dw| / std dL_i/dw), where i are the batches.

    Li et al., ZiCo: Zero-shot NAS via Inverse Coefficient of Variation on Gradients (ICLR 2023, arXiv 2301.11300),
    section 3.3. The paper prints the variance of |dL_i/dw|; the released code and this function take that of dL_i/dw,
    because the former is 0 for two batches whose gradients differ only in sign. The variance is divided by the number
    of batches. As in the code, weights whose gradient does not vary are left out, and so is a layer that has no others.
    Layers are the convolutions and linear layers whose weights train. Norms use the batch's statistics.

    Args:
        module: images -> logits (N, classes).
        images: (N, C, H, W), on the module's device; split in order into `batches` of equal size.
        labels: (N,) int64.
        batches: at least 2; the released code uses 2.

    Raises:
        ValueError: fewer than 2 batches, or N is no multiple of them.
        ScoreError: no convolution weight trains, a gradient is not finite (the text names the layer), or no gradient
            varies.
    """
    if batches < 2 or len(images) % batches:
        raise ValueError(f"zico needs at least 2 batches of equal size, got {len(images)} images in {batches} batches")
    copied = working_copy(module)
    layers = weighted_layers(copied)
    pairs = zip(images.chunk(batches), labels.chunk(batches), strict=True)
    by_batch = [loss_gradients(copied, layers, x, y) for x, y in pairs]
    logs = []
    for gradients in zip(*by_batch, strict=True):
        stacked = torch.stack(gradients).double()
        deviation = stacked.std(0, correction=0)
        varies = deviation > 0
        total = (stacked.abs().mean(0)[varies] / deviation[varies]).sum().item()
        if total > 0:
            logs.append(math.log(total))
    if not logs:
        raise ScoreError("no gradient differs between the batches: give batches of different images")
    return math.fsum(logs)
