"""What the zero-cost scores share: a copy of the module to work on, its layers with weights, and their gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.indicators.registry import ScoreError


def working_copy(module: nn.Module) -> nn.Module:
    """A deep copy in training mode, so that norms use the batch's statistics; without dropout, which is random.

    Scores work on it, so the module's weights, running statistics, gradients and mode stay as they are.
    """
    copied = copy.deepcopy(module).train()
    for child in copied.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) or type(child).__name__ in ("StochasticDepth", "DropPath"):
            child.eval()
    return copied


def weighted_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Convolutions and linear layers whose weights train, by name, in the order of `named_modules`.

    Raises:
        ScoreError: there is no convolution among them.
    """
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    layers = {n: m for n, m in module.named_modules() if isinstance(m, kinds) and m.weight.requires_grad}
    if not any(not isinstance(layer, nn.Linear) for layer in layers.values()):
        total = sum(isinstance(m, kinds[:3]) for m in module.modules())
        raise ScoreError(
            f"none of the {total} convolutions of this {type(module).__name__} has a weight that trains: "
            "set requires_grad on the weights that the score is to count"
        )
    return layers


def loss_gradients(module: nn.Module, layers: Mapping[str, nn.Module], images: Tensor, labels: Tensor) -> list[Tensor]:
    """Gradient of the batch's mean cross entropy by the weight of each layer; 0 where a weight has no influence.

    Raises:
        ScoreError: a gradient is not finite; the layer is named.
    """
    weights = [layer.weight for layer in layers.values()]
    loss = F.cross_entropy(module(images), labels)
    gradients = list(torch.autograd.grad(loss, weights, materialize_grads=True))
    for name, gradient in zip(layers, gradients, strict=True):
        if not gradient.isfinite().all():
            raise not_finite(module, images, f"gradient of layer {name!r}")
    return gradients


@torch.no_grad()
def not_finite(module: nn.Module, images: Tensor, what: str) -> ScoreError:
    """The error that tells where the first value that is not finite comes from.

    One such value in the forward pass spoils the gradients of all layers, so the forward pass runs again and the first
    layer whose weight or output is not finite is named. Where all are finite, the backward pass or a sum overflows.
    """
    found: list[str] = []

    def look(name: str, layer: nn.Module, output: Any) -> None:
        for part, value in (("weight", getattr(layer, "weight", None)), ("output", output)):
            if isinstance(value, Tensor) and not value.isfinite().all():
                found.append(f"the {part} of layer {name!r} is not finite")

    hooks = [
        child.register_forward_hook(lambda layer, _inputs, output, name=name: look(name, layer, output))
        for name, child in module.named_modules()
        if not any(child.children())
    ]
    module(images)
    for hook in hooks:
        hook.remove()
    where = found[0] if found else f"the {what} is not finite, though weights and outputs of all layers are"
    return ScoreError(f"this {type(module).__name__} has no finite score: {where}")
