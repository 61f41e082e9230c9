"""The interface of backends, which turn requests for images into uint8 batches, and the torchvision backend.

The torchvision backend runs in DataLoader workers and works everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nasfast.data.augment import Augmentation, render
from nasfast.data.datasets import ImageSource


class Request(NamedTuple):
    """One rank's share of a batch.

    Attributes:
        indices: (n,) indices of the images in the source.
        epoch: the epoch whose draws are used.
        start: place of the first image in the order of the epoch, counted over all ranks.
    """

    indices: np.ndarray
    epoch: int
    start: int


class Decoded(NamedTuple):
    """The answer to a request.

    Attributes:
        images: (m, C, resolution, resolution) uint8 in channels_last, on any device; m = 0 if none could be read.
        kept: (m,) int64, which images of the request these are.
        bad: names of the images that could not be read.
    """

    images: Tensor
    kept: np.ndarray
    bad: list[str]


class Backend(Protocol):
    """Decodes and augments images; the same request always gives the same images.

    Attributes:
        kind: `torchvision`, `dali` or `cache`.
    """

    kind: str

    def decode(self, requests: Sequence[Request], device: torch.device) -> Iterator[Decoded]:
        """Answers in the order of the requests, prepared ahead.

        Args:
            device: where the images are wanted. A backend that can decode there does so; others may leave the images
                in (pinned) host memory.
        """
        ...


def decode_one(source: ImageSource, augmentation: Augmentation, request: Request) -> Decoded:
    """Answer one request with PIL and torchvision, image by image."""
    pictures, sizes, kept, bad = [], [], [], []
    for row, index in enumerate(request.indices.tolist()):
        try:
            image = source.image(index)
        except OSError:
            bad.append(source.name(index))
            continue
        pictures.append(image.convert("L") if augmentation.grey else image)
        sizes.append((image.height, image.width))
        kept.append(row)
    # views of unreadable images are drawn too, so that the views of the others do not depend on them
    all_sizes = np.ones((len(request.indices), 2), np.int64)
    all_sizes[kept] = np.array(sizes, np.int64).reshape(-1, 2)
    views = augmentation.views(all_sizes, epoch=request.epoch, start=request.start)
    side = augmentation.resolution
    images = torch.empty(
        (len(kept), 1 if augmentation.grey else 3, side, side), dtype=torch.uint8, memory_format=torch.channels_last
    )
    for place, (row, picture) in enumerate(zip(kept, pictures, strict=True)):
        images[place] = render(picture, views, row, augmentation)
    return Decoded(images, np.array(kept, np.int64), bad)


class _Requests(Dataset):
    def __init__(self, source: ImageSource, augmentation: Augmentation, requests: Sequence[Request]) -> None:
        self._source, self._augmentation, self._requests = source, augmentation, requests

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, number: int) -> Decoded:
        return decode_one(self._source, self._augmentation, self._requests[number])


def _as_is(sample: Any) -> Any:
    return sample


class TorchvisionBackend:
    """Decodes with PIL and torchvision in the worker processes of a `torch.utils.data.DataLoader`.

    0 workers decode in this process; `prefetch` is the number of batches that each worker prepares ahead.
    """

    kind = "torchvision"

    def __init__(self, source: ImageSource, augmentation: Augmentation, *, workers: int = 0, prefetch: int = 2) -> None:
        self._source, self._augmentation = source, augmentation
        self._workers, self._prefetch = workers, prefetch

    def decode(self, requests: Sequence[Request], device: torch.device) -> Iterator[Decoded]:
        """Answers in the order of the requests; PyTorch raises RuntimeError at once if a worker was killed."""
        yield from DataLoader(
            _Requests(self._source, self._augmentation, requests),
            batch_size=None,
            num_workers=self._workers,
            prefetch_factor=self._prefetch if self._workers else None,
            # a forked worker inherits its data set, which then need not be picklable; a user's may not be
            multiprocessing_context="fork" if self._workers else None,
            collate_fn=_as_is,
            pin_memory=device.type == "cuda",
            # without a generator of its own the loader draws from the global one, and a resumed run would differ
            generator=torch.Generator(),
        )
