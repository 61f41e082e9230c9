"""Inputs of the experiments: synthetic ones and images, standardised as the paper does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Source = Callable[[int, torch.Generator], Tensor]
"""(B, generator) -> raw inputs (B, C, *spatial); the same for the same state of the generator."""

# A pixel that all images of a batch share has no deviation to divide by.
_MIN_STD = 1e-6


def gaussian(features: int = 192) -> Source:
    """White normal vectors, for fully connected networks."""
    return lambda batch, generator: torch.randn(batch, features, generator=generator)


def fields(channels: int = 3, size: int = 16) -> Source:
    """Random fields whose amplitude falls as 1 / frequency, as that of natural images does."""
    steps = torch.fft.fftfreq(size) * size
    frequency = torch.hypot(steps[:, None], steps[None, : size // 2 + 1]).clamp_min(1)

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        white = torch.randn(batch, channels, size, size, generator=generator)
        return torch.fft.irfft2(torch.fft.rfft2(white) / frequency, s=(size, size))

    return draw


def images(pixels: Tensor, *, flat: bool = False) -> Source:
    """Images drawn without replacement.

    Args:
        pixels: (count, C, H, W), uint8 or floating.
        flat: one feature per pixel and channel, for fully connected networks.

    Raises:
        ValueError: from the source, a batch of more images than there are.
    """

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        if batch > len(pixels):
            raise ValueError(f"moments: a batch of {batch} needs as many images, got {len(pixels)}")
        chosen = pixels[torch.randperm(len(pixels), generator=generator)[:batch]].float()
        return chosen.flatten(1) if flat else chosen

    return draw


def standardised(x: Tensor) -> Tensor:
    """Mean 0 and deviation 1 per channel, over samples and positions of (B, C, *spatial)."""
    over = (0, *range(2, x.ndim))
    std, mean = torch.std_mean(x, over, correction=0, keepdim=True)
    return (x - mean) / std.clamp_min(_MIN_STD)
