"""Inputs of the experiments: synthetic inputs and images, standardised as in the paper."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Source = Callable[[int, torch.Generator], Tensor]
"""(B, generator) -> raw inputs (B, C, *spatial); the same state of the generator gives the same inputs."""

# Lower limit of the deviation that inputs are divided by; a pixel that is equal in all images of a batch has 0.
_MIN_STD = 1e-6


def gaussian(features: int = 192) -> Source:
    """White Gaussian vectors, for fully connected networks."""
    return lambda batch, generator: torch.randn(batch, features, generator=generator)


def fields(channels: int = 3, size: int = 16) -> Source:
    """Random fields whose amplitude falls as 1 / frequency, like that of natural images."""
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
        flat: whether each pixel and channel is one feature, for fully connected networks.

    Raises:
        ValueError: the source is asked for more images than there are.
    """

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        if batch > len(pixels):
            raise ValueError(f"moments: a batch of {batch} needs {batch} images, got {len(pixels)}: lower the batch")
        chosen = pixels[torch.randperm(len(pixels), generator=generator)[:batch]].float()
        return chosen.flatten(1) if flat else chosen

    return draw


def standardised(x: Tensor) -> Tensor:
    """Scale (B, C, *spatial) to mean 0 and standard deviation 1 per channel, over samples and positions."""
    over = (0, *range(2, x.ndim))
    std, mean = torch.std_mean(x, over, correction=0, keepdim=True)
    return (x - mean) / std.clamp_min(_MIN_STD)
