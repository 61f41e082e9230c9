"""What turns requests for images into uint8 batches; torchvision in DataLoader workers is the one that always works."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from nasfast.data.augment import Augmentation, render
from nasfast.data.datasets import DataError, ImageSource

_LOG = logging.getLogger(__name__)

_RESTARTS = 3
"""How often workers are started again for the same batch before the loader gives up."""


class Request(NamedTuple):
    """One rank's share of a batch.

    Attributes:
        indices: (n,) of the images in the source.
        epoch: of the draws.
        start: place of the first image in the order of the epoch, over all ranks.
    """

    indices: np.ndarray
    epoch: int
    start: int


class Decoded(NamedTuple):
    """The answer to a request.

    Attributes:
        images: (m, C, resolution, resolution) uint8 in channels_last, on any device; m = 0 where none could be read.
        kept: (m,) int64, which images of the request these are.
        bad: what the others are called.
    """

    images: Tensor
    kept: np.ndarray
    bad: list[str]


class Backend(Protocol):
    """Decodes and augments; the same request always gives the same images.

    Attributes:
        kind: `torchvision`, `dali` or `cache`.
    """

    kind: str

    def decode(self, requests: Sequence[Request], device: torch.device) -> Iterator[Decoded]:
        """Answers in the order of the requests, prepared ahead.

        Args:
            device: where the images are wanted: a backend that decodes there does so, others may leave them in
                (pinned) host memory.
        """
        ...


def decode_one(source: ImageSource, augmentation: Augmentation, request: Request) -> Decoded:
    """One request, image by image, by PIL and torchvision."""
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
    # those of unreadable images are drawn too: the others' do not depend on it
    shown = np.ones((len(request.indices), 2), np.int64)
    shown[kept] = np.array(sizes, np.int64).reshape(-1, 2)
    views = augmentation.views(shown, epoch=request.epoch, start=request.start)
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


def _as_is(decoded: Decoded) -> Decoded:
    return decoded


def _unwatch(batches: Iterator[Decoded]) -> None:
    """Let PyTorch tell of a dead worker only where the next batch is asked for, which may take it five seconds.

    It would tell at once, by an exception from a signal handler, wherever the main thread is: in a training step.
    """
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False


class TorchvisionBackend:
    """PIL and torchvision, in the worker processes of a `torch.utils.data.DataLoader`.

    Args:
        source: the images.
        augmentation: of them.
        workers: processes; 0 decodes in this one.
        prefetch: batches each worker is ahead.
    """

    kind = "torchvision"

    def __init__(self, source: ImageSource, augmentation: Augmentation, *, workers: int = 0, prefetch: int = 2) -> None:
        self._source, self._augmentation = source, augmentation
        self._workers, self._prefetch = workers, prefetch

    def decode(self, requests: Sequence[Request], device: torch.device) -> Iterator[Decoded]:
        """Answers in order; workers that were killed are started again, at the batch that is missing.

        Raises:
            DataError: workers died four times at the same batch.
        """
        done, restarts = 0, 0
        while done < len(requests):
            loader = DataLoader(
                _Requests(self._source, self._augmentation, requests[done:]),
                batch_size=None,
                num_workers=self._workers,
                prefetch_factor=self._prefetch if self._workers else None,
                # what a forked worker inherits need not be picklable, as a user's data set may not be
                multiprocessing_context="fork" if self._workers else None,
                collate_fn=_as_is,
                pin_memory=device.type == "cuda",
                # its own generator: the loader otherwise draws from the global one, which a resumed run would notice
                generator=torch.Generator(),
            )
            try:
                batches = iter(loader)
                _unwatch(batches)
                for decoded in batches:
                    yield decoded
                    done, restarts = done + 1, 0
            except RuntimeError as error:
                # what PyTorch says of a worker that the kernel or a person killed; what a worker raised is passed on
                if "exited unexpectedly" not in str(error) and "is killed by signal" not in str(error):
                    raise
                restarts += 1
                if restarts > _RESTARTS:
                    raise DataError(
                        f"loader workers died {restarts} times at the same batch ({error}); if memory is short, set "
                        "data.workers lower"
                    ) from error
                _LOG.warning("a loader worker died (%s): starting the workers again", str(error).split(".")[0])
