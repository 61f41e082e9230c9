"""The images of a run of `nasfast shrink`, in memory: batches at any size, and views to train on with their targets."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nasfast.config import ConfigError
from nasfast.data import DataError, ImageSource, make_loader, random_subset
from nasfast.data.datasets import SubsetSource
from nasfast.data.loader import augment_of, open_images
from nasfast.data.preprocess import normalise, scale_and_offset
from nasfast.pipeline.shrinking.models import per_channel
from nasfast.pipeline.shrinking.run import ShrinkConfig
from nasfast.seeds import derive_seed
from nasfast.settings import DataConfig, ImageInfo

_FEWEST = 40
"""Fewest training images: fewer say little of channels, and their least squares follow noise."""

_SHIFT = 16
"""A view is moved by at most this part of its side."""

Item = TypeVar("Item")

Shown = tuple[Tensor, Tensor]
"""Images (N, C, H, W) as uint8 in channels_last, and labels (N,)."""


def spread(shown: Shown, most: int) -> Shown:
    """At most so many of the images, at equal distances, because files come class by class."""
    step = -(-len(shown[1]) // most)
    return shown[0][::step], shown[1][::step]


@dataclass(frozen=True)
class Images:
    """The training and validation images.

    Attributes:
        train: in random order, so that the first are a sample.
        val: the validation images.
        data: their settings, with the network's normalisation.
        channels: 3 or 1.
        seed: of the run.
    """

    train: ImageSource
    val: ImageSource
    data: DataConfig
    channels: int
    seed: int

    @classmethod
    def open(cls, cfg: ShrinkConfig, data: DataConfig, channels: int) -> Images:
        """The images of the settings.

        Raises:
            ConfigError, DataError: they cannot be used, or are too few.
        """
        train, val = open_images(data, seed=cfg.seed)
        if channels not in (1, 3):
            raise ConfigError(f"the network takes images of {channels} channels: give one for RGB or grey images")
        if len(train) < max(_FEWEST, 2 * len(train.classes)):
            raise DataError(
                f"{len(train)} training images of {len(train.classes)} classes are too few to measure channels with: "
                f"give at least {max(_FEWEST, 2 * len(train.classes))}"
            )
        return cls(random_subset(train, cfg.images, cfg.seed), val, data, channels, cfg.seed)

    @cached_property
    def digest(self) -> str:
        """Digest of the classes, and of name, label and size of the file of each image."""
        digest = hashlib.blake2b(json.dumps(self.train.classes).encode(), digest_size=16)
        for source in (self.train, self.val):
            for i, label in enumerate(source.labels.tolist()):
                path = source.path(i)
                size = os.path.getsize(path) if path is not None and os.path.exists(path) else 0
                digest.update(f"{source.name(i)}\0{label}\0{size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.train.classes)

    @property
    def normaliser(self) -> tuple[Tensor, Tensor]:
        """Scale and offset by which uint8 images become the network's input."""
        return scale_and_offset(*(per_channel(values, self.channels) for values in (self.data.mean, self.data.std)))

    def info(self, size: int) -> ImageInfo:
        """Preprocessing and classes at a size."""
        loader = make_loader(self.data, self.val, train=False, resolution=size, in_channels=self.channels)
        assert loader.images is not None
        return loader.images

    def read(self, source: ImageSource, size: int, count: int | None = None) -> Shown:
        """The first `count` images of a source as at evaluation; all by default."""
        if count is not None and count < len(source):
            source = SubsetSource(source, np.arange(count))
        loader = make_loader(self.data, source, train=False, resolution=size, in_channels=self.channels)
        scale, offset = self.normaliser
        scale, offset = scale[:, None, None], offset[:, None, None]
        shown, labels = [], []
        for x, y in loader.epoch(0):
            shown.append(((x - offset) / scale).round().clamp(0, 255).to(torch.uint8))
            labels.append(y)
        return torch.cat(shown).contiguous(memory_format=torch.channels_last), torch.cat(labels)

    def prepared(self, shown: Tensor) -> Tensor:
        """uint8 images as the network's input."""
        return normalise(shown.contiguous(memory_format=torch.channels_last), *self.normaliser)


class Targets(NamedTuple):
    """What a teacher gives for all views of a lesson.

    Attributes:
        logits: (epochs, N, classes).
        features: (epochs, N, features), what its classifier reads; 0 features where it gives none.
    """

    logits: Tensor
    features: Tensor


def lesson_epochs(epochs: int) -> int:
    """How many epochs of views there are for a training of so many epochs: half of them, after which they come again.

    The teacher answers each view once. With as many views as epochs, accuracy is the same (docs/shrink.md).
    """
    return -(-epochs // 2)


class Lesson:
    """Views of the training images, the same in every lesson of a seed, with targets of a teacher where it has one.

    After `begin`, each iteration is an epoch with its own views; after the last the first follows. Views are moved a
    little and mirrored, but for digits.

    Args:
        images: the settings of the images.
        shown: from `Images.read`, at the largest size.
        batch: images per batch.
        epochs: number of different epochs.
    """

    def __init__(self, images: Images, shown: Shown, *, batch: int, epochs: int) -> None:
        self._images, (self._shown, self._labels) = images, shown
        self._batch, self._epochs, self._next = batch, epochs, 0
        self._targets: Targets | None = None
        self._kept: Tensor | None = None
        self._taught = torch.ones(len(self._shown), dtype=torch.bool)
        self._size: int = self._shown.shape[-1]
        self._kind = augment_of(images.data, self._shown.shape[-1])
        self._at = (0, torch.empty(0, dtype=torch.long))

    def begin(
        self,
        targets: Targets | None = None,
        kept: Tensor | None = None,
        *,
        size: int | None = None,
        without: slice = slice(0),
    ) -> Lesson:
        """This lesson, from its first epoch.

        Args:
            targets: of `taught_by`, for a teacher.
            kept: the features that the teacher gives with its logits; None for logits alone.
            size: side of the views; the largest by default.
            without: images that are left out.
        """
        self._next, self._targets, self._kept = 0, targets, kept
        self._size = size or self._shown.shape[-1]
        self._taught.fill_(True)
        self._taught[without] = False
        return self

    def __len__(self) -> int:
        return -(-len(self._shown) // self._batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, self._next = self._next % self._epochs, self._next + 1
        for places, images, labels in made_ahead(self._views(epoch, self._size, self._taught)):
            self._at = epoch, places
            yield images, labels

    def _views(self, epoch: int, size: int, taught: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches of an epoch: their places in its order, images and labels; of the images in a mask (N,)."""
        seed = derive_seed(self._images.seed, epoch)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self._shown), generator=generator)
        side = self._shown.shape[-1]
        reach = 0 if self._kind == "none" else max(1, side // _SHIFT)
        moves = torch.randint(-reach, reach + 1, (len(order), 2), generator=generator)
        mirrored = (torch.rand(len(order), generator=generator) < 0.5) & (self._kind in ("imagenet", "cifar"))
        pixels = self._shown.permute(0, 2, 3, 1)
        for start in range(0, len(order), self._batch):
            places = torch.arange(start, min(start + self._batch, len(order)))
            places = places[taught[order[places]]]
            if not len(places):
                continue
            chosen = order[places]
            rows, columns = (_reflected(torch.arange(side) + moves[places, i, None], side) for i in (0, 1))
            columns = torch.where(mirrored[places, None], side - 1 - columns, columns)
            parts = zip(pixels[chosen], rows, columns, strict=True)
            views = torch.stack([x[row].index_select(1, column) for x, row, column in parts]).permute(0, 3, 1, 2)
            if size != side:  # bytes are resized in an eighth of the time that floats take
                views = functional.interpolate(views, size=(size, size), mode="bilinear", antialias=True)
            yield places, self._images.prepared(views), self._labels[chosen]

    def teacher(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The teacher's logits of the batch that the last iteration gave, and its kept features where there are."""
        assert self._targets is not None, "a lesson of a teacher begins with targets"
        epoch, places = self._at
        logits = self._targets.logits[epoch, places]
        return logits if self._kept is None else (logits, self._targets.features[epoch, places][:, self._kept])

    @torch.no_grad()
    def taught_by(self, network: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Targets:
        """Logits and features of a network for all views."""
        epochs = []
        for epoch in range(self._epochs):
            views = made_ahead(self._views(epoch, self._shown.shape[-1], torch.ones_like(self._taught)))
            logits, features = zip(*(network(x) for _, x, _ in views), strict=True)
            epochs.append((torch.cat(logits), torch.cat(features)))
        return Targets(*map(torch.stack, zip(*epochs, strict=True)))


def made_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The items, of which the next is made on a thread of its own while one is used, unless PyTorch has one thread."""
    count = torch.get_num_threads()
    if count == 1:
        yield from items
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_use_one_thread).result()
        torch.set_num_threads(count)
        made = thread.submit(next, items, None)
        while (item := made.result()) is not None:
            made = thread.submit(next, items, None)
            yield item


def _use_one_thread() -> None:
    # A new thread takes the number of threads of the process at its first parallel operation or question. Asked first,
    # it keeps the number that it sets.
    torch.get_num_threads()
    torch.set_num_threads(1)


def _reflected(places: Tensor, side: int) -> Tensor:
    """Places of pixels, of which those outside of the side of an image are reflected at its first and last pixel."""
    return side - 1 - (side - 1 - places.abs()).abs()


@dataclass(frozen=True)
class Answers:
    """What a network answers to the validation images.

    Attributes:
        right: (N,) one byte, 1 where its most probable class is the image's.
    """

    right: bytes

    @cached_property
    def top1(self) -> float:
        """Share of right answers."""
        return float(np.frombuffer(self.right, np.uint8).mean())


@torch.no_grad()
def answers(network: Callable[[Tensor], Tensor], images: Images, shown: Shown, *, batch: int = 64) -> Answers:
    """The answers of a network to images at its size."""
    pixels, labels = shown
    parts = zip(pixels.split(batch), labels.split(batch), strict=True)
    right = torch.cat([network(images.prepared(x)).argmax(1) == y for x, y in parts])
    return Answers(right.to(torch.uint8).numpy().tobytes())
