"""Gradient norm of BatchNorm shifts: the size of the gradient of one batch's loss by them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.indicators.registry import ScoreError
from nasfast.research.zero_cost.layers import not_finite, working_copy


def beta_norm(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Sum over BatchNorms of ||dL/dbeta||_2, where L is the mean cross entropy of the batch.

    Norms use the batch's statistics.

    Args:
        module: images -> logits (N, classes).
        images: (N, C, H, W), on the module's device.
        labels: (N,) int64.

    Raises:
        ScoreError: no BatchNorm has a shift, or a gradient is not finite (the text names the layer).
    """
    copied = working_copy(module)
    norms = [m for m in copied.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.bias is not None]
    if not norms:
        raise ScoreError(f"no BatchNorm of this {type(module).__name__} has a shift: build it with affine norms")
    shifts = [norm.bias.requires_grad_() for norm in norms]
    loss = F.cross_entropy(copied(images), labels)
    gradients = torch.autograd.grad(loss, shifts, materialize_grads=True)
    if not all(gradient.isfinite().all() for gradient in gradients):
        raise not_finite(copied, images, "gradient of a BatchNorm's shift")
    return sum(gradient.double().norm().item() for gradient in gradients)
