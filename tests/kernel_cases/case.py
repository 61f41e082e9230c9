"""What the inputs of all operators have in common."""

import zlib
from collections.abc import Callable
from dataclasses import astuple

import torch
from torch import Tensor


class KernelCase:
    """One input of an operator; a subclass is a frozen dataclass with `shape` (N, C, H, W), `layout` and `dtype`."""

    def __str__(self) -> str:
        parts = ["x".join(map(str, field)) if isinstance(field, tuple) else str(field) for field in astuple(self)]
        return "-".join(parts).replace("torch.", "")

    def generator(self) -> torch.Generator:
        """The same for the same case."""
        return torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

    def image(self, x: Tensor) -> Tensor:
        """x in the type and layout of the case."""
        return with_layout(x.to(self.dtype), self.layout)


def with_layout(x: Tensor, layout: str) -> Tensor:
    """x as contiguous (nchw), channels_last (nhwc), or a slice of a larger tensor that is neither (strided)."""
    if layout == "nchw":
        return x.contiguous()
    if layout == "nhwc":
        return x.contiguous(memory_format=torch.channels_last)
    larger = x.new_full((x.shape[0], x.shape[1] + 1, x.shape[2] + 2, x.shape[3] + 3), torch.nan)
    view = larger[:, 1:, 1:-1, 2:-1]
    view.copy_(x)
    return view


def widened(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs in float64."""
    return {name: tensor.double() for name, tensor in tensors.items()}


def outputs_and_grads(function: Callable[..., Tensor], tensors: dict[str, Tensor], **settings) -> dict[str, Tensor]:
    """Result and gradients of function(**tensors, **settings); the tensor `grad` is the gradient of the result."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items() if name != "grad"}
    y = function(**leaves, **settings)
    y.backward(tensors["grad"])
    return {"y": y.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def saved_by(function: Callable[[], Tensor]) -> tuple[list[Tensor], Tensor]:
    """Tensors kept for backward while function runs, and its result."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        return saved, function()
