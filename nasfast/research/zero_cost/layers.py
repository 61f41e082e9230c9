"""Parts that the zero-cost scores share: a working copy of the module, its layers with weights, and their gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.indicators.registry import ScoreError

WeightedLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear


def working_copy(module: nn.Module) -> nn.Module:
    """A deep copy in training mode, so that norms use the batch's statistics; dropout is off, because it is random.

    Scores change only the copy, so the module keeps its weights, running statistics, gradients and mode.
    """
    copied = copy.deepcopy(module).train()
    for child in copied.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) or type(child).__name__ in ("StochasticDepth", "DropPath"):
            child.eval()
    return copied


def weighted_layers(module: nn.Module) -> dict[str, WeightedLayer]:
    """The convolutions and linear layers whose weights train, by name, in the order of `named_modules`.

    Raises:
        ScoreError: none of them is a convolution.
    """
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    layers = {n: m for n, m in module.named_modules() if isinstance(m, kinds) and m.weight.requires_grad}
    if not any(not isinstance(layer, nn.Linear) for layer in layers.values()):
        total = sum(isinstance(m, kinds[:3]) for m in module.modules())
        raise ScoreError(
            f"none of the {total} convolutions of this {type(module).__name__} has a weight that trains: "
            "set requires_grad=True on the weights that the score should count"
        )
    return layers


def loss_gradients(
    module: nn.Module, layers: Mapping[str, WeightedLayer], images: Tensor, labels: Tensor
) -> list[Tensor]:
    """Gradients of the batch's mean cross entropy by the weight of each layer; 0 for a weight without influence.

    Raises:
        ScoreError: a gradient is not finite; the text names the layer.
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
    """The error that says where the first value that is not finite comes from.

    One such value in the forward pass makes the gradients of all layers wrong. So the forward pass runs again, and the
    text names the first layer whose weight or output is not finite. If all are finite, the backward pass or a sum has
    overflowed.
    """
    origins: list[str] = []

    def look(name: str, layer: nn.Module, output: Any) -> None:
        for part, value in (("weight", getattr(layer, "weight", None)), ("output", output)):
            if isinstance(value, Tensor) and not value.isfinite().all():
                origins.append(f"the {part} of layer {name!r} is not finite")

    hooks = [
        child.register_forward_hook(lambda layer, _inputs, output, name=name: look(name, layer, output))
        for name, child in module.named_modules()
        if not any(child.children())
    ]
    module(images)
    for hook in hooks:
        hook.remove()
    where = origins[0] if origins else f"the {what} is not finite, though weights and outputs of all layers are"
    return ScoreError(f"this {type(module).__name__} has no finite score: {where}")
