"""The end of a supernet, head to logits, without launches that a captured step would repeat for nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nasfast.ops.modules import has_forward_hooks, run_in_order
from nasfast.ops.nhwc import pixel_mean


class Classify:
    """Head, mean over the pixels and classifier as a function; the numbers are those of `Supernet.forward`.

    Only where the CUDA kernels run the head as one chain, gradients differ by roundings.

    Args:
        head: the modules before the mean.
        classifier: a linear layer; one with hooks, or of another class, is called as it is.
    """

    def __init__(self, head: nn.Sequential, classifier: nn.Module) -> None:
        self.head, self.classifier = head, classifier
        # by name: a parameter, its rounded copy, and the version of the parameter that was rounded
        self._rounded: dict[str, tuple[nn.Parameter, Tensor, int]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        features = pixel_mean(run_in_order(self.head, x))
        if not self._rounded:
            return self.classifier(features)
        weight, bias = (
            self._rounded[name][1] if name in self._rounded else getattr(self.classifier, name)
            for name in ("weight", "bias")
        )
        return F.linear(features, weight, bias)

    def round(self, dtype: torch.dtype) -> None:
        """Keep frozen parameters of the classifier in the type in which autocast would round them at every step."""
        linear = self.classifier
        if type(linear) is not nn.Linear or has_forward_hooks(linear):
            return
        for name, parameter in linear.named_parameters():
            if not parameter.requires_grad:
                self._rounded[name] = parameter, parameter.detach().to(dtype), parameter._version

    def refresh(self) -> None:
        """Round parameters again that have changed, as when a state dict was loaded; it waits for nothing."""
        for name, (parameter, rounded, version) in self._rounded.items():
            if parameter._version != version:
                rounded.copy_(parameter.detach())
                self._rounded[name] = parameter, rounded, parameter._version
