"""Q of NASI: the squared norm of one batch's gradient, which estimates the trace of the neural tangent kernel."""

from __future__ import annotations

import math

from torch import Tensor, nn

from nasfast.indicators.registry import ScoreError
from nasfast.research.nasi.score import score as nasi_score
from nasfast.research.zero_cost.layers import not_finite, working_copy


def ntk_q(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """||dL/dtheta||^2, where L is the mean cross entropy of the batch and theta are all parameters that train.

    Shu et al., NASI (ICLR 2022, arXiv 2109.00817), section 3.2; see docs/nasi.md. `gradient_norm` sums the norms of
    layers; this is the square of one norm over all parameters, scales and shifts of norm layers included. Norm layers
    use the batch's statistics.

    Args:
        module: images -> logits (N, classes).
        images: (N, C, H, W), on the module's device.
        labels: (N,) int64.

    Raises:
        ScoreError: no parameter trains, or Q is not finite (the text names the layer where it began).
    """
    copied = working_copy(module)
    if not any(p.requires_grad for p in copied.parameters()):
        raise ScoreError(f"no parameter of this {type(module).__name__} trains: set requires_grad=True on some")
    value = nasi_score(copied, images, labels)
    if not math.isfinite(value):
        raise not_finite(copied, images, "squared norm of the gradient")
    return value
