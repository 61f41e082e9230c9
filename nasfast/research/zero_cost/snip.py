"""SNIP: how much the loss of one batch changes when weights are removed."""

from __future__ import annotations

from torch import Tensor, nn

from nasfast.research.zero_cost.layers import loss_gradients, weighted_layers, working_copy


def snip(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Sum over weights w of |w dL/dw|, where L is the mean cross entropy of the batch.

    The saliency of one connection is equation 6 of Lee et al., SNIP (ICLR 2019, arXiv 1810.02340), without its
    normalisation; the sum over a network is from Abdelfattah et al. (arXiv 2101.08134), section 3.2. The sum is over
    the weights of convolutions and linear layers that train. Norms use the batch's statistics.

    Args:
        module: images -> logits (N, classes).
        images: (N, C, H, W), on the module's device.
        labels: (N,) int64.

    Raises:
        ScoreError: no convolution weight trains, or a gradient is not finite (the text names the layer).
    """
    copied = working_copy(module)
    layers = weighted_layers(copied)
    gradients = loss_gradients(copied, layers, images, labels)
    pairs = zip(layers.values(), gradients, strict=True)
    return sum(((layer.weight.detach() * gradient).double().abs().sum().item() for layer, gradient in pairs), 0.0)
