"""Synthetic images for small experiments: noisy crops of ten class prototypes, and batches drawn from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.seeds import derive_seed

CLASSES, CHANNELS, SIZE = 10, 3, 12
_FULL = 16

# random streams (`nasfast.seeds`): the fields that a class is cut from; labels, windows and noise of each split
_PROTOTYPES, _SPLITS = 0, (1, 2)
Images = tuple[Tensor, Tensor]
"""(N, CHANNELS, SIZE, SIZE) float32 and (N,) int64 labels."""


def prototypes(noise: float, n_train: int, n_test: int, seed: int = 0) -> tuple[Images, Images]:
    """Two splits of images, each a random 12 x 12 window of the prototype of a random class, plus noise.

    A prototype is a 3 x 5 x 5 field of N(0, 1), resized to 16 x 16. Both splits share the prototypes. Each split is
    divided by the standard deviation of its values.

    Args:
        noise: standard deviation of the normal noise on every pixel.
        n_train, n_test: numbers of images in the two splits.
        seed: seed of prototypes, labels, windows and noise.
    """
    if noise < 0 or min(n_train, n_test) < 1:
        raise ValueError(f"prototypes: needs noise >= 0 and images in both splits, got {noise}, {n_train}, {n_test}")
    generator = torch.Generator().manual_seed(derive_seed(seed, _PROTOTYPES))
    fields = torch.randn(CLASSES, CHANNELS, 5, 5, generator=generator)
    full = F.interpolate(fields, size=(_FULL, _FULL), mode="bilinear", align_corners=False)
    sizes = zip((n_train, n_test), _SPLITS, strict=True)
    train, test = (_split(full, noise, n, derive_seed(seed, split)) for n, split in sizes)
    return train, test


def _split(full: Tensor, noise: float, count: int, seed: int) -> Images:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    top, left = torch.randint(_FULL - SIZE + 1, (2, count), generator=generator)
    window = torch.arange(SIZE)
    rows, columns = (top[:, None] + window)[:, None, :, None], (left[:, None] + window)[:, None, None, :]
    crops = full[labels[:, None, None, None], torch.arange(CHANNELS)[None, :, None, None], rows, columns]
    x = crops + noise * torch.randn(crops.shape, generator=generator)
    return (x / x.std()).contiguous(memory_format=torch.channels_last), labels


class DrawnBatches:
    """Batches drawn with replacement from tensors: an `EpochLoader`. A batch depends on seed, epoch and index alone.

    Args:
        x: (N, C, H, W) images.
        y: (N,) labels.
        steps: number of batches in an epoch.
        batch: number of images in a batch.
        seed: seed of the draws.
    """

    def __init__(self, x: Tensor, y: Tensor, *, steps: int, batch: int = 64, seed: int = 0) -> None:
        if min(steps, batch, len(x)) < 1 or len(x) != len(y):
            raise ValueError(
                f"DrawnBatches: needs steps, a batch, and as many labels as images; got steps={steps}, batch={batch}, "
                f"{len(x)} images, {len(y)} labels"
            )
        self._x, self._y, self._steps, self._batch, self._seed = x, y, steps, batch, seed

    def __len__(self) -> int:
        return self._steps

    def epoch(
        self, epoch: int, *, start: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(start, self._steps):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch, index))
            rows = torch.randint(len(self._x), (self._batch,), generator=generator)
            x = self._x[rows].to(device, memory_format=torch.channels_last)
            yield x, self._y[rows].to(device)
