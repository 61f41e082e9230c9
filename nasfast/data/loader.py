"""`make_loaders(cfg)`: batches that depend only on (seed, epoch, position), whatever the number of workers."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nasfast.config import ConfigBase, ConfigError
from nasfast.data.datasets import DataError, DigitsSource, FolderSource, ImageSource, split_source
from nasfast.data.transforms import eval_transform, train_transform

_LOG = logging.getLogger(__name__)

_NAMED_FILES = 5
"""How many unreadable files an error or warning lists."""


@dataclass(frozen=True)
class DataConfig(ConfigBase):
    """Where images come from and how they are fed.

    Attributes:
        source: `folder` (image folders) or `digits` (scikit-learn's, embedded).
        train: training folder, `train/CLASS/IMAGE`.
        val: validation folder of the same classes; without it `val_fraction` of the training images is held out.
        val_fraction: held-out share per class when `val` is not given.
        batch_size: images per batch.
        augment: `imagenet` (random resized crop, flip, lighting), `cifar` (pad, crop, flip), `shift` (pad, crop),
            `none`, or `auto`: `shift` for digits, else `cifar` up to 64 pixels and `imagenet` above.
        workers: decoding processes; 0 decodes in the training process. Results do not depend on it.
        max_bad_files: unreadable images are skipped and named; more than this many stop the run.
        mean: per channel, finite, subtracted from images scaled to [0, 1]; grey images take its average.
        std: per channel, positive, divided by; grey images take its average.
    """

    source: Literal["folder", "digits"] = "folder"
    train: str | None = None
    val: str | None = None
    val_fraction: float = 0.1
    batch_size: int = 128
    augment: Literal["auto", "imagenet", "cifar", "shift", "none"] = "auto"
    workers: int = 2
    max_bad_files: int = 20
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise ValueError(
                f"batch_size must be at least 2 (BatchNorm needs more than one image), got {self.batch_size}"
            )
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")
        if min(self.workers, self.max_bad_files) < 0:
            raise ValueError(
                f"workers and max_bad_files must not be negative, got {self.workers}, {self.max_bad_files}"
            )
        if not all(map(math.isfinite, self.mean)):
            raise ValueError(f"mean must be finite, got {self.mean}")
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise ValueError(f"std must be positive and finite, got {self.std}: 1 leaves a channel unscaled")


class _Samples(Dataset):
    """Augmented samples; an item is asked for as (epoch, index) and draws from its own seed."""

    def __init__(self, source: ImageSource, transform: Callable[[Any], Tensor], seed: int) -> None:
        self._source, self._transform, self._seed = source, transform, seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor, list[str]]:
        images, labels, bad = [], [], []
        # one fork per batch, not per sample: saving the generator costs as much as decoding a small image
        with torch.random.fork_rng(devices=[]):
            for epoch, index in keys:
                try:
                    image = self._source.image(index)
                except OSError:
                    bad.append(self._source.name(index))
                    continue
                # torch.manual_seed would also seed every GPU kind there may be, a millisecond per image
                torch.default_generator.manual_seed(_derive_seed(self._seed, epoch, index))
                images.append(self._transform(image))
                labels.append(int(self._source.labels[index]))
        stacked = torch.stack(images) if images else torch.empty(0)
        return stacked, torch.tensor(labels, dtype=torch.int64), bad


class Loader:
    """Batches of one image source, resumable at any position of any epoch.

    Args:
        source: the images.
        transform: PIL image -> uint8 (C, H, W); C is the length of `mean` and `std`, or those have one value.
        batch_size: images per batch; the last, smaller one of an epoch is dropped when shuffling.
        shuffle: a new order each epoch, from (seed, epoch); otherwise the source's order.
        seed: of order and augmentation.
        workers, max_bad_files, mean, std: see `DataConfig`.
    """

    def __init__(
        self,
        source: ImageSource,
        transform: Callable[[Any], Tensor],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        workers: int = 0,
        max_bad_files: int = 0,
        mean: tuple[float, ...] = (0.0, 0.0, 0.0),
        std: tuple[float, ...] = (1.0, 1.0, 1.0),
    ) -> None:
        self.source = source
        self.bad_files: set[str] = set()
        self._samples = _Samples(source, transform, seed)
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._workers, self._max_bad_files = workers, max_bad_files
        self._mean, self._std = torch.tensor(mean).view(1, -1, 1, 1), torch.tensor(std).view(1, -1, 1, 1)

    @property
    def num_images(self) -> int:
        return len(self.source)

    def __len__(self) -> int:
        """Batches per epoch."""
        full, rest = divmod(len(self.source), self._batch_size)
        return full + (rest > 0 and not (self._shuffle and full))

    def _batches(self, epoch: int) -> list[list[tuple[int, int]]]:
        count = len(self.source)
        if self._shuffle:
            generator = torch.Generator().manual_seed(_derive_seed(self._seed, epoch))
            order = torch.randperm(count, generator=generator).tolist()
        else:
            order = list(range(count))
        size = self._batch_size
        return [[(epoch, i) for i in order[b * size : (b + 1) * size]] for b in range(len(self))]

    def epoch(
        self, epoch: int, *, start: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches `start`, `start + 1`, ... of an epoch: normalised fp32 channels_last images and int64 labels.

        Yields:
            images (N, C, H, W) and labels (N,) on `device`.

        Raises:
            DataError: more than `max_bad_files` images could not be read, or none of a batch.
        """
        device = torch.device(device)
        mean, std = self._mean.to(device), self._std.to(device)
        loader = DataLoader(
            self._samples,
            batch_sampler=self._batches(epoch)[start:],
            num_workers=self._workers,
            collate_fn=_as_is,
            pin_memory=device.type == "cuda",
            # its own generator: the loader otherwise draws from the global one, which a resumed run would notice
            generator=torch.Generator(),
        )
        for images, labels, bad in loader:
            self._note_bad(bad)
            if not len(labels):
                raise DataError(f"none of the {len(bad)} images of a batch could be read, e.g. {bad[0]}")
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            yield images.float().div_(255).sub_(mean).div_(std), labels.to(device, non_blocking=True)

    def _note_bad(self, names: list[str]) -> None:
        new = sorted(set(names) - self.bad_files)
        if not new:
            return
        self.bad_files.update(new)
        _LOG.warning("skipped %d unreadable images (%d so far): %s", len(new), len(self.bad_files), _shown(new))
        if len(self.bad_files) > self._max_bad_files:
            raise DataError(
                f"{len(self.bad_files)} images could not be read, more than data.max_bad_files={self._max_bad_files}: "
                f"{_shown(sorted(self.bad_files))}. Repair or delete them, or raise the limit"
            )


def _derive_seed(*parts: int) -> int:
    """A 63-bit seed from a few integers; unlike `hash`, the same in every Python."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def _as_is(batch: Any) -> Any:
    return batch


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_FILES} more" if len(names) > _NAMED_FILES else ""
    return ", ".join(names[:_NAMED_FILES]) + more


def make_loaders(
    cfg: DataConfig, *, resolution: int, in_channels: int = 3, seed: int = 0, hold_out: bool = False
) -> tuple[Loader, Loader]:
    """Training loader (shuffled, augmented) and validation loader (in order, centre crop).

    Args:
        cfg: what to load.
        resolution: height and width of the images in pixels.
        in_channels: 3 for RGB or 1 for grey images.
        seed: of the order, the augmentation and the held-out split.
        hold_out: validate on `val_fraction` of the training images instead of the validation images, for a search that
            must not see those.

    Raises:
        ConfigError: `data.train` is needed and was not given, or `in_channels` is neither 3 nor 1.
        DataError: the folders cannot be used.
        RuntimeError: an optional package is missing.
    """
    if in_channels not in (1, 3):
        raise ConfigError(
            f"in_channels must be 3 (RGB) or 1 (grey) for images from files, got {in_channels}: change the space, or "
            "train from Python with a loader of your own"
        )
    if cfg.source == "digits":
        train, val = DigitsSource("train"), DigitsSource("val")
    else:
        if cfg.train is None:
            raise ConfigError("data.train is not set: give the training folder, e.g. --data.train images/train")
        train = FolderSource(cfg.train)
        if cfg.val is not None:
            val = FolderSource(cfg.val, classes=train.classes)
        else:
            train, val = split_source(train, cfg.val_fraction, seed)
    if hold_out:
        train, val = split_source(train, cfg.val_fraction, seed)
    augment = cfg.augment
    if augment == "auto":
        augment = "shift" if cfg.source == "digits" else "cifar" if resolution <= 64 else "imagenet"
    common = {"batch_size": cfg.batch_size, "seed": seed, "workers": cfg.workers, "max_bad_files": cfg.max_bad_files}
    grey = in_channels == 1
    common |= {k: (sum(v) / len(v),) if grey else v for k, v in (("mean", cfg.mean), ("std", cfg.std))}
    return (
        Loader(train, train_transform(augment, resolution, grey=grey), shuffle=True, **common),
        Loader(val, eval_transform(resolution, grey=grey), shuffle=False, **common),
    )
