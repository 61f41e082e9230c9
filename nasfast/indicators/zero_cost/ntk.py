"""Q of NASI: the squared length of one batch's gradient, which estimates the trace of the neural tangent kernel."""

from __future__ import annotations

import math

from torch import Tensor, nn

from nasfast.indicators.registry import ScoreError
from nasfast.indicators.zero_cost.layers import not_finite, working_copy
from nasfast.nasi.score import score as nasi_score


def ntk_q(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """||dL/dtheta||^2, L the mean cross entropy of the batch and theta all parameters that train.

    Shu et al., NASI (ICLR 2022, arXiv 2109.00817), section 3.2; see docs/nasi.md. It is `gradient_norm` with one norm
    over all parameters, norms' scales and shifts included, where that is a sum of the layers' norms. Norms use the
    batch's statistics.

    Args:
        module: images -> logits (N, classes).
        images: (N, C, H, W), on the module's device.
        labels: (N,) int64.

    Raises:
        ScoreError: no parameter trains, or Q is not finite (the layer where it began is named).
    """
    copied = working_copy(module)
    if not any(p.requires_grad for p in copied.parameters()):
        raise ScoreError(f"no parameter of this {type(module).__name__} trains: set requires_grad")
    value = nasi_score(copied, images, labels)
    if not math.isfinite(value):
        raise not_finite(copied, images, "squared norm of the gradient")
    return value
