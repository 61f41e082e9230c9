"""The end of a supernet, head to logits, without launches that a captured step would repeat for nothing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from nasfast.ops.modules import has_forward_hooks, run_in_order
from nasfast.ops.nhwc import pixel_mean
from nasfast.ops.rounded import Rounded


class Classify:
    """Head, mean over the pixels and classifier as a function; the numbers are those of `Supernet.forward`.

    Only where the CUDA kernels run the head as one chain, gradients differ by roundings.

    Args:
        head: the modules before the mean.
        classifier: a linear layer; one with hooks, or of another class, is called as it is.
    """

    def __init__(self, head: nn.Sequential, classifier: nn.Module) -> None:
        self.head, self.classifier = head, classifier
        self._rounded: Rounded | None = None

    def __call__(self, x: Tensor) -> Tensor:
        features = pixel_mean(run_in_order(self.head, x))
        linear = self.classifier
        if self._rounded is None or type(linear) is not nn.Linear or has_forward_hooks(linear):
            return linear(features)
        weight, bias = (
            parameter if parameter is None or parameter.requires_grad else self._rounded.of(parameter)
            for parameter in (linear.weight, linear.bias)
        )
        return F.linear(features, weight, bias)

    def round(self, rounded: Rounded | None) -> None:
        """Take frozen parameters of the classifier from `rounded`, which has autocast's type; None: as they are."""
        self._rounded = rounded
