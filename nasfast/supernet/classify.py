"""The end of a supernet, head to logits, without launches that a captured step would repeat for nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nasfast.ops.modules import has_forward_hooks, run_in_order


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
        features = _Mean.apply(run_in_order(self.head, x))
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


class _Mean(torch.autograd.Function):
    """The mean over the pixels: (N, C, H, W) -> (N, C). The gradient is written once, in the layout of x."""

    @staticmethod
    def forward(ctx, x):
        nhwc = x.is_contiguous(memory_format=torch.channels_last)
        ctx.layout = torch.channels_last if nhwc else torch.contiguous_format
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.mean((2, 3))

    @staticmethod
    def backward(ctx, grad):
        dx = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad.device, memory_format=ctx.layout)
        pixels = dx.shape[2] * dx.shape[3]
        return torch.div(grad[:, :, None, None].expand_as(dx), pixels, out=dx)
