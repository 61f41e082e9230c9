"""`make_loader(cfg)`: batches depend only on (seed, epoch, position), not on the backend or the number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nasfast.config import ConfigError
from nasfast.data import dali
from nasfast.data.augment import SMALL, Augmentation
from nasfast.data.backends import Backend, Request, TorchvisionBackend
from nasfast.data.cache import CacheBackend, can_keep, size_text
from nasfast.data.datasets import DataError, DatasetSource, ImageSource, open_files, split_source
from nasfast.data.digits import ClutteredDigitsSource, DigitsSource
from nasfast.data.preprocess import normalise, scale_and_offset
from nasfast.display import counted
from nasfast.runtime.once import log_once
from nasfast.seeds import derive_seed
from nasfast.settings import AutoAugment, DataConfig, ImageInfo, check_policy

_LOG = logging.getLogger(__name__)

_AUTO_CACHE_BYTES = 2 * 2**30
"""Largest size of decoded images of small resolution at which `auto` takes the cache."""

_NAMED_FILES = 5
"""Number of unreadable files that an error or a warning lists."""


class Loader:
    """Gives the batches of one image source; can start at any position of any epoch.

    Args:
        source: the images.
        backend: decodes and augments the images.
        batch_size: images per batch, over all ranks; when shuffling, the last batch of an epoch is dropped if it is
            smaller.
        shuffle: whether each epoch has a new order, drawn from (seed, epoch); otherwise it is the source's order.
        seed: seed of the order.
        rank, world: this rank's number and the number of ranks. Each rank has its share of every batch, in the order of
            the ranks; the sizes of shares differ by at most one image.
        max_bad_files, mean, std: see `DataConfig`; mean and std have one value per channel.
        images: preprocessing at evaluation and classes, which a network is saved with.
        policy: the policy that the backend augments by; None for none.

    Attributes:
        source, images, policy, seed: as given.
        config: the settings that name its images; None if it has others.
        held_out: whether the images of its config are split, so that a search has images that no supernet saw.
        kind: name of the backend: `torchvision`, `dali` or `cache`.
        bad_files: names of the images that could not be read.

    Raises:
        DataError: a batch has fewer images than there are ranks.
    """

    def __init__(
        self,
        source: ImageSource,
        backend: Backend,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        max_bad_files: int = 0,
        mean: tuple[float, ...] = (0.0, 0.0, 0.0),
        std: tuple[float, ...] = (1.0, 1.0, 1.0),
        images: ImageInfo | None = None,
        policy: AutoAugment | None = None,
    ) -> None:
        self.source, self.images, self.policy = source, images, policy
        self.config: DataConfig | None = None
        self.held_out = False
        self.bad_files: set[str] = set()
        self.seed = seed
        self._backend, self._batch_size, self._shuffle = backend, batch_size, shuffle
        self._rank, self._world, self._max_bad_files = rank, world, max_bad_files
        if shuffle and min(batch_size, len(source)) < world:
            raise DataError(
                f"batches of {min(batch_size, len(source))} images cannot be shared by {world} ranks: set "
                "data.batch_size higher, or start fewer processes"
            )
        self._scale, self._offset = scale_and_offset(mean, std)
        self._iterations = 0

    @property
    def kind(self) -> str:
        return self._backend.kind

    @property
    def cache_folder(self) -> Path | None:
        """The folder in which decoded images stay; None if they stay in none."""
        return self._backend.folder if isinstance(self._backend, CacheBackend) else None

    def __len__(self) -> int:
        """Batches per epoch."""
        full, rest = divmod(len(self.source), self._batch_size)
        return full + (rest > 0 and not (self._shuffle and full))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch on the CPU, for a loop of your own: each loop takes the epoch after the last one's.

        The first takes epoch 0. See `epoch` for the batches; nasfast's own trainings call it and count for themselves.
        """
        number, self._iterations = self._iterations, self._iterations + 1
        return self.epoch(number)

    def _requests(self, epoch: int, first: int) -> list[Request]:
        """This rank's shares of the batches `first`, `first + 1`, ... of an epoch."""
        count = len(self.source)
        if self._shuffle:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
            order = torch.randperm(count, generator=generator).numpy()
        else:
            order = np.arange(count)
        requests = []
        for batch in range(first, len(self)):
            start = batch * self._batch_size
            size = min(self._batch_size, count - start)
            low, high = (start + size * r // self._world for r in (self._rank, self._rank + 1))
            if low < high:  # the last validation batch may have fewer images than there are ranks
                requests.append(Request(order[low:high], epoch, low))
        return requests

    def epoch(
        self, epoch: int, *, start: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches `start`, `start + 1`, ... of an epoch: normalised fp32 channels_last images and int64 labels.

        Yields:
            this rank's images (N, C, H, W) and labels (N,) on `device`.

        Raises:
            DataError: more than `max_bad_files` images could not be read, or no image of a training batch could.
        """
        device = torch.device(device)
        scale, offset = self._scale.to(device), self._offset.to(device)
        for images, labels in _ahead(self._host_batches(self._requests(epoch, start), device), device):
            yield normalise(images, scale, offset), labels

    def _host_batches(self, requests: list[Request], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """uint8 images, on the device where the backend left them, and labels."""
        for request, decoded in zip(requests, self._backend.decode(requests, device), strict=True):
            self._note_bad(decoded.bad)
            if not len(decoded.kept):
                if self._shuffle:
                    raise DataError(
                        f"none of the {len(decoded.bad)} images of a batch could be read, e.g. {decoded.bad[0]}"
                    )
                continue
            labels = torch.from_numpy(self.source.labels[request.indices[decoded.kept]])
            yield decoded.images, labels.pin_memory() if device.type == "cuda" else labels

    def _note_bad(self, names: list[str]) -> None:
        new = sorted(set(names) - self.bad_files)
        if not new:
            return
        self.bad_files.update(new)
        unreadable = counted(len(new), "unreadable image")
        _LOG.warning("skipped %s (%d so far): %s", unreadable, len(self.bad_files), _name_some(new))
        if len(self.bad_files) > self._max_bad_files:
            raise DataError(
                f"{len(self.bad_files)} images could not be read, more than data.max_bad_files={self._max_bad_files}: "
                f"{_name_some(sorted(self.bad_files))}. Repair or delete them, or raise the limit"
            )


def _ahead(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches on `device`; for a GPU, the next batch is copied on its own stream while the caller uses the last one."""
    if device.type != "cuda":
        yield from ((x.to(device), y.to(device)) for x, y in batches)
        return
    stream = torch.cuda.Stream(device)
    waiting: tuple[tuple[Tensor, Tensor], torch.cuda.Event] | None = None
    for x, y in batches:
        with torch.cuda.stream(stream):
            copied = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            done = stream.record_event()
        if waiting is not None:
            yield _after_copy(*waiting)
        waiting = copied, done
    if waiting is not None:
        yield _after_copy(*waiting)


def _after_copy(batch: tuple[Tensor, Tensor], done: torch.cuda.Event) -> tuple[Tensor, Tensor]:
    """The batch, ordered after its copy; the copy of the next batch may go on."""
    current = torch.cuda.current_stream(batch[0].device)
    current.wait_event(done)
    for tensor in batch:
        tensor.record_stream(current)  # it was made on the other stream, which must not reuse its memory too early
    return batch


def _name_some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_FILES} more" if len(names) > _NAMED_FILES else ""
    return ", ".join(names[:_NAMED_FILES]) + more


def open_images(cfg: DataConfig, *, seed: int = 0, hold_out: bool = False) -> tuple[ImageSource, ImageSource]:
    """Training and validation images that `cfg` names, before they have loaders; see `make_loaders`."""
    train: ImageSource
    val: ImageSource
    if cfg.source != "folder":
        kind = DigitsSource if cfg.source == "digits" else ClutteredDigitsSource
        train, val = kind("train"), kind("val")
    else:
        cfg.check_paths()
        train = open_files(str(cfg.train))
        if cfg.val is None:
            train, val = split_source(train, cfg.val_fraction, seed if cfg.split_seed is None else cfg.split_seed)
        else:
            val = open_files(cfg.val, classes=train.classes)
    return split_source(train, cfg.val_fraction, seed) if hold_out else (train, val)


def augment_of(cfg: DataConfig, resolution: int) -> Literal["imagenet", "cifar", "shift", "none"]:
    """The augmentation of training images of this height and width that `cfg` asks for."""
    if cfg.augment != "auto":
        return cfg.augment
    return "shift" if cfg.source != "folder" else "cifar" if resolution <= SMALL else "imagenet"


def _make_backend(cfg: DataConfig, source: ImageSource, augmentation: Augmentation, batch_size: int) -> Backend:
    kind: str = cfg.loader
    check_policy(kind, augmentation.policy)
    common = {"workers": cfg.workers, "prefetch": cfg.prefetch}
    if kind == "auto":
        kind, reason = _choose(source, augmentation)
        log_once(_LOG, logging.INFO, f"loader of images: {kind}, because {reason}")
    if kind == "cache":
        return CacheBackend(source, augmentation, workers=cfg.workers, cache_dir=cfg.cache_dir)
    if kind == "dali":
        return dali.DaliBackend(source, augmentation, batch_size=batch_size, **common)
    return TorchvisionBackend(source, augmentation, **common)


def _choose(source: ImageSource, augmentation: Augmentation) -> tuple[str, str]:
    """What `auto` means for these images, and why."""
    if augmentation.policy is not None:
        return "torchvision", f"only it can augment by {augmentation.policy}"
    keeps = can_keep(augmentation)
    if source.in_memory and keeps:
        return "cache", "they are in memory already"
    if source.path(0) is None:
        return "torchvision", "they are not in files"
    side = augmentation.resolution
    size = len(source) * side**2 * (1 if augmentation.grey else 3)
    if keeps and side <= SMALL and size <= _AUTO_CACHE_BYTES:
        return "cache", f"decoded once to {side} x {side} they take {size_text(size)}"
    refusal = dali.refusal(source)
    if refusal is None:
        return "dali", "DALI is installed"
    return "torchvision", refusal


def make_loader(
    cfg: DataConfig,
    dataset: Any = None,
    *,
    train: bool = True,
    resolution: int,
    in_channels: int = 3,
    seed: int = 0,
    policy: AutoAugment | None = None,
    rank: int = 0,
    world: int = 1,
) -> Loader:
    """A loader of one set of images.

    Args:
        cfg: where the images are and how they are fed.
        dataset: other images than those that `cfg` names: an `ImageSource`, or a map-style data set of (image, label),
            see `DatasetSource`.
        train: whether images are shuffled and augmented; otherwise they come in order with a centre crop.
        resolution: height and width of the batches in pixels.
        in_channels: 3 for RGB or 1 for grey images.
        seed: seed of the order and the augmentation.
        policy: `autoaugment`, `randaugment` or `trivialaugment` of torchvision for training images, after crop and
            flip; None for none.
        rank, world: this rank's number and the number of ranks.

    Raises:
        ConfigError: `in_channels` is neither 3 nor 1, or `cfg.loader` cannot serve these images or this policy.
        DataError: the data set cannot be used, or batches are smaller than the number of ranks.
        RuntimeError: an optional package is missing.
    """
    if in_channels not in (1, 3):
        raise ConfigError(
            f"in_channels must be 3 (RGB) or 1 (grey) for images from files, got {in_channels}: change the space, or "
            "train from Python with a loader of your own"
        )
    config = None if dataset is not None else cfg
    if dataset is None:
        dataset = open_images(cfg, seed=seed)[0 if train else 1]
    source = dataset if isinstance(dataset, ImageSource) else DatasetSource(dataset)
    grey = in_channels == 1
    policy = policy if train else None
    kind = augment_of(cfg, resolution) if train else "eval"
    augmentation = Augmentation(kind, resolution, grey=grey, seed=seed, policy=policy)
    mean, std = ((sum(v) / len(v),) if grey else v for v in (cfg.mean, cfg.std))
    images = ImageInfo(tuple(source.classes), augmentation.short_side, resolution, mean, std)
    loader = Loader(
        source,
        _make_backend(cfg, source, augmentation, -(-cfg.batch_size // world)),
        batch_size=cfg.batch_size,
        shuffle=train,
        seed=seed,
        rank=rank,
        world=world,
        max_bad_files=cfg.max_bad_files,
        mean=mean,
        std=std,
        images=images,
        policy=policy,
    )
    loader.config = config
    if train and cfg.batch_size > len(source):
        log_once(
            _LOG,
            logging.WARNING,
            f"data.batch_size={cfg.batch_size} is more than the {len(source):,} training images: an epoch is one step; "
            f"give a batch_size of at most {max(2, len(source) // 8)}",
        )
    return loader


def make_loaders(
    cfg: DataConfig,
    *,
    resolution: int,
    in_channels: int = 3,
    seed: int = 0,
    hold_out: bool = False,
    policy: AutoAugment | None = None,
    rank: int = 0,
    world: int = 1,
    images: tuple[ImageSource, ImageSource] | None = None,
) -> tuple[Loader, Loader]:
    """The training loader and the validation loader of the images that `cfg` names.

    Args:
        seed: seed of the order, the augmentation and the held-out split.
        hold_out: whether to validate on `val_fraction` of the training images, for a search that must not see the
            validation images.
        images: those of `open_images`, where they are open already.
        cfg, resolution, in_channels, policy, rank, world: see `make_loader`.

    Raises:
        ConfigError: `data.train` is needed and was not given, or see `make_loader`.
        DataError, RuntimeError: see `make_loader`.
    """
    train, val = images or open_images(cfg, seed=seed, hold_out=hold_out)
    common: dict[str, Any] = dict(
        resolution=resolution, in_channels=in_channels, seed=seed, policy=policy, rank=rank, world=world
    )
    loaders = make_loader(cfg, train, train=True, **common), make_loader(cfg, val, train=False, **common)
    for loader in loaders:
        loader.config, loader.held_out = cfg, hold_out
    return loaders
