"""Gradient norm: the size of the gradient of one batch's loss by the weights."""

from __future__ import annotations

from torch import Tensor, nn

from nasfast.research.zero_cost.layers import loss_gradients, weighted_layers, working_copy


def gradient_norm(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Sum over layers l of ||dL/dW_l||_2, where L is the mean cross entropy of the batch.

    Abdelfattah et al., Zero-Cost Proxies for Lightweight NAS (ICLR 2021, arXiv 2101.08134), section 3.1. Layers are the
    convolutions and linear layers whose weights train. Norms use the batch's statistics.

    Args:
        module: images -> logits (N, classes).
        images: (N, C, H, W), on the module's device.
        labels: (N,) int64.

    Raises:
        ScoreError: no convolution weight trains, or a gradient is not finite (the text names the layer).
    """
    copied = working_copy(module)
    layers = weighted_layers(copied)
    return sum(gradient.double().norm().item() for gradient in loss_gradients(copied, layers, images, labels))
