"""Settings of the images and of how they are fed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase, ConfigError

AutoAugment = Literal["autoaugment", "randaugment", "trivialaugment"]
"""Augmentation policies of torchvision.transforms.v2 that are applied to images after crop and flip."""


def check_policy(loader: str, policy: AutoAugment | None) -> None:
    """Refuse a policy that a loader cannot apply.

    Raises:
        ConfigError: the loader is `dali` or `cache`, which do not call torchvision's transforms.
    """
    if policy is not None and loader in ("dali", "cache"):
        raise ConfigError(
            f"data.loader={loader!r} cannot augment by {policy!r}, which torchvision applies to single images: set "
            "data.loader to torchvision or auto, or leave retrain.auto_augment out"
        )


@dataclass(frozen=True)
class DataConfig(ConfigBase):
    """Where images come from and how they are fed.

    Attributes:
        source: `folder` (image files), `digits` (scikit-learn's handwritten digits) or `cluttered_digits` (the same
            among pieces of others, which is harder).
        train: training images: a folder, `train/CLASS/IMAGE`, or a text file of lines `IMAGE LABEL`.
        val: validation images of the same classes; null holds out `val_fraction` of the training images.
        val_fraction: share of each class that is held out when `val` is not given.
        split_seed: seed of that choice; null takes the run's. With a seed of its own, runs of different seeds have the
            same validation images.
        batch_size: images per optimiser step, over all ranks.
        augment: `imagenet` (random resized crop, flip, lighting), `cifar` (pad, crop, flip), `shift` (pad, crop),
            `none`, or `auto`: `shift` for digits, otherwise `cifar` up to 64 pixels and `imagenet` above.
        loader: `torchvision` (in worker processes), `dali` (NVIDIA DALI, on the GPU or the CPU), `cache` (each image is
            decoded once and kept), or `auto`, which logs its choice and the reason.
        workers: decoding processes or threads per rank; 0 decodes in the training process. Results do not depend on it.
        prefetch: number of batches prepared ahead, for `torchvision` by each worker.
        cache_dir: folder of the files of `cache`; null takes `nasfast/images` in the user's cache folder.
        cache_side: `cache` reduces larger photographs to this short side in pixels; null takes 8/7 of the resolution.
            Images that are resized to the resolution in any case ignore it.
        max_bad_files: unreadable images are skipped and named; more than this many on one rank stop the run.
        mean: finite value per channel that is subtracted from images scaled to [0, 1]; grey images take the average.
        std: positive value per channel that images are then divided by; grey images take the average.
    """

    source: Literal["folder", "digits", "cluttered_digits"] = "folder"
    train: str | None = None
    val: str | None = None
    val_fraction: float = 0.1
    split_seed: int | None = None
    batch_size: int = 128
    augment: Literal["auto", "imagenet", "cifar", "shift", "none"] = "auto"
    loader: Literal["auto", "torchvision", "dali", "cache"] = "auto"
    workers: int = 2
    prefetch: int = 2
    cache_dir: str | None = None
    cache_side: int | None = None
    max_bad_files: int = 20
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def _check_values(self) -> None:
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
        if self.prefetch < 1 or (self.cache_side is not None and self.cache_side < 1):
            raise ValueError(f"prefetch and cache_side must be positive, got {self.prefetch} and {self.cache_side}")
        if not all(map(math.isfinite, self.mean)):
            raise ValueError(f"mean must be finite, got {self.mean}")
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise ValueError(f"std must be positive and finite, got {self.std}: 1 leaves a channel unscaled")
