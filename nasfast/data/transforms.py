"""Augmentation: torchvision v2, plus the lighting noise of the papers, which torchvision lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

_EVAL_CROP = 0.875
"""Share of the resized image that the centre crop keeps, as in ImageNet evaluation (224 of 256)."""

_SMALL = 64
"""Up to this resolution images are objects that fill the frame (CIFAR, digits): no crop at evaluation."""


class Lighting(v2.Transform):
    """AlexNet's colour noise: adds sum_k alpha_k lambda_k p_k to every pixel, alpha_k ~ N(0, std^2) per image.

    lambda and p are the eigenvalues and eigenvectors of ImageNet's RGB covariance (Krizhevsky et al. 2012, 4.1).
    Takes and returns a uint8 (3, H, W) tensor.
    """

    _EIGENVALUES = torch.tensor([0.2175, 0.0188, 0.0045])
    _EIGENVECTORS = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])

    def __init__(self, std: float = 0.1) -> None:
        super().__init__()
        self.std = std

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        alpha = torch.randn(3) * self.std
        return {"shift": 255 * (self._EIGENVECTORS @ (alpha * self._EIGENVALUES))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return (inpt + params["shift"].view(3, 1, 1)).round_().clamp_(0, 255).to(torch.uint8)


def train_transform(augment: str, resolution: int, *, grey: bool = False) -> Callable[[Any], Tensor]:
    """PIL image -> augmented uint8 (3, resolution, resolution), or (1, resolution, resolution) when grey.

    Args:
        augment: `imagenet` (the paper's: random resized crop, flip, lighting), `cifar` (pad 4, crop, flip), `shift`
            (pad 2, crop: for digits, which a flip would change) or `none`.
        grey: convert to grey first; without lighting, which is noise of colours.
    """
    fit = [v2.Resize((resolution, resolution), antialias=True)]
    steps = {
        "imagenet": [v2.RandomResizedCrop(resolution, antialias=True), v2.RandomHorizontalFlip()],
        "cifar": [*fit, v2.RandomCrop(resolution, padding=4), v2.RandomHorizontalFlip()],
        "shift": [*fit, v2.RandomCrop(resolution, padding=2)],
        "none": fit,
    }[augment]
    lighting = [Lighting()] if augment == "imagenet" and not grey else []
    return v2.Compose([*_to_grey(grey), *steps, v2.PILToTensor(), *lighting])


def eval_transform(resolution: int, *, grey: bool = False) -> Callable[[Any], Tensor]:
    """PIL image -> uint8 (3 or, when grey, 1, resolution, resolution): resize the short side, centre crop."""
    side = resolution if resolution <= _SMALL else round(resolution / _EVAL_CROP)
    crop = [v2.Resize(side, antialias=True), v2.CenterCrop(resolution)]
    return v2.Compose([*_to_grey(grey), *crop, v2.PILToTensor()])


def _to_grey(grey: bool) -> list[v2.Transform]:
    return [v2.Grayscale()] if grey else []
