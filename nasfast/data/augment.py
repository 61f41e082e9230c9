"""Augmentation as numbers: which window of an image a batch shows, drawn before any pixel is read.

The draws of an image depend only on (seed, epoch, the image's place in the order of the epoch), and every loader
renders the same windows. So what a run sees does not depend on the loader, its workers, the batch size or the number of
ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy.special import ndtri
from torch import Tensor

from nasfast.seeds import derive_seed
from nasfast.settings import AutoAugment

AUTO_AUGMENT = 1
"""Stream of the policies, followed by the epoch and the place in it; windows draw from (seed, epoch)."""

_PADDING = {"cifar": 4, "shift": 2, "none": 0}
"""Number of pixels by which a window of the whole image may be moved over its border."""

_EVAL_CROP = 0.875
"""Share of the resized image that the centre crop keeps, as in ImageNet evaluation (224 of 256)."""

SMALL = 64
"""Up to this resolution, objects fill the frame (CIFAR, digits), so evaluation does not crop."""

_SCALE, _RATIO, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""torchvision's random resized crop: share of the area, width / height, draws before it takes the centre."""

_DRAWS = 28
"""Uniform numbers per image: 20 for sizes of a window, 2 for its place, 1 for mirroring, 3 for lighting, 2 to spare.

A multiple of 4, because each step of the Philox generator's counter gives four numbers."""

# Eigenvalues and eigenvectors of ImageNet's RGB covariance, and the noise's standard deviation (Krizhevsky et al.
# 2012, 4.1)
_EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
_EIGENVECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
_LIGHTING = 0.1


class Views(NamedTuple):
    """What a batch shows of its images; each row is an image.

    Attributes:
        fit: (N, 2) int64 height and width that the whole image is resized to first; an image that has this size already
            is not resized.
        window: (N, 4) int64 top, left, height and width in the resized image; what lies outside the image is black.
            The window is then resized to the resolution, with antialiasing (bilinear).
        mirror: (N,) bool, flip left and right.
        shift: (N, 3) float32 whole numbers added to the channels; results are clamped to 0 to 255. None adds nothing.
        policy: (N,) int64 seeds of what the policy of the augmentation does to each image after mirroring; None if it
            has no policy.
    """

    fit: np.ndarray
    window: np.ndarray
    mirror: np.ndarray
    shift: np.ndarray | None
    policy: np.ndarray | None = None


@dataclass(frozen=True)
class Augmentation:
    """How images become arrays (C, resolution, resolution).

    Attributes:
        kind: `imagenet` (the paper's: random resized crop, flip, lighting), `cifar` (pad 4, crop, flip), `shift` (pad
            2, crop: for digits, which a flip would change), `none` (resize), or `eval` (resize the short side, then
            crop the centre).
        resolution: height and width of the results in pixels.
        grey: whether results have one channel; these get no lighting, because it is colour noise.
        seed: seed of the draws.
        policy: what torchvision's transform of this name adds, which only the torchvision loader can; None for nothing.
    """

    kind: Literal["imagenet", "cifar", "shift", "none", "eval"]
    resolution: int
    grey: bool = False
    seed: int = 0
    policy: AutoAugment | None = None

    @property
    def fixed(self) -> bool:
        """Whether every image is first resized to (resolution, resolution), independent of the draws."""
        return self.kind in _PADDING

    def views(self, sizes: np.ndarray, *, epoch: int, start: int) -> Views:
        """Views of consecutive images of an epoch.

        Args:
            sizes: (N, 2) heights and widths of the images in pixels.
            epoch: the epoch whose draws are used.
            start: place of the first image in the order of the epoch, counted over all ranks.
        """
        count, side = len(sizes), self.resolution
        if self.kind == "eval":
            return Views(*self._centre(sizes), np.zeros(count, bool), None)
        generator = np.random.Philox(key=derive_seed(self.seed, epoch))
        generator.advance(start * (_DRAWS // 4))
        u = np.random.Generator(generator).random((count, _DRAWS))
        mirror = u[:, 22] < 0.5
        policy = None
        if self.policy is not None:
            places = range(start, start + count)
            policy = np.array([derive_seed(self.seed, AUTO_AUGMENT, epoch, place) for place in places], np.int64)
        if self.kind == "imagenet":
            shift = None if self.grey else _lighting(u[:, 23:26])
            return Views(sizes, _resized_crop(sizes, u), mirror, shift, policy)
        padding = _PADDING[self.kind]
        window = np.full((count, 4), side)
        window[:, :2] = np.floor(u[:, 20:22] * (2 * padding + 1)) - padding
        return Views(np.full((count, 2), side), window, mirror & (self.kind == "cifar"), None, policy)

    @property
    def short_side(self) -> int:
        """Pixels of the short side before the centre crop: `resolution`, or 8/7 of it where that is above SMALL."""
        return self.resolution if self.resolution <= SMALL else round(self.resolution / _EVAL_CROP)

    def _centre(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sizes and centre windows at evaluation, with torchvision's rounding."""
        side = self.short_side
        short = sizes.min(axis=1, keepdims=True)
        fit = np.where(sizes == short, side, side * sizes // short)
        corner = np.rint((fit - self.resolution) / 2).astype(np.int64)
        return fit, np.concatenate([corner, np.full_like(fit, self.resolution)], axis=1)


@functools.cache
def _transform(policy: AutoAugment, kind: str) -> Callable[[Image.Image], Image.Image]:
    """The transform of a policy, with torchvision's defaults; AutoAugment has policies for digits and CIFAR-10."""
    from torchvision.transforms import v2  # imports all models of torchvision, which takes seconds

    if policy == "autoaugment":
        named = {"shift": v2.AutoAugmentPolicy.SVHN, "cifar": v2.AutoAugmentPolicy.CIFAR10}
        return v2.AutoAugment(named.get(kind, v2.AutoAugmentPolicy.IMAGENET))
    return v2.RandAugment() if policy == "randaugment" else v2.TrivialAugmentWide()


def _resized_crop(sizes: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Windows of torchvision's RandomResizedCrop: the first of ten random sizes that fits, or a centre crop."""
    height, width = sizes[:, :1], sizes[:, 1:]
    area = height * width * (_SCALE[0] + (_SCALE[1] - _SCALE[0]) * u[:, :_TRIES])
    low, high = np.log(_RATIO)
    ratio = np.exp(low + (high - low) * u[:, _TRIES : 2 * _TRIES])
    h, w = np.rint(np.sqrt(area / ratio)), np.rint(np.sqrt(area * ratio))
    fits = (0 < w) & (w <= width) & (0 < h) & (h <= height)
    first = fits.argmax(axis=1)[:, None]
    h, w = np.take_along_axis(h, first, axis=1), np.take_along_axis(w, first, axis=1)
    top, left = np.floor(u[:, 20:21] * (height - h + 1)), np.floor(u[:, 21:22] * (width - w + 1))
    whole_h = np.minimum(height, np.maximum(np.rint(width / _RATIO[0]), 1))
    whole_w = np.minimum(width, np.maximum(np.rint(height * _RATIO[1]), 1))
    none = ~fits.any(axis=1, keepdims=True)
    h, w = np.where(none, whole_h, h), np.where(none, whole_w, w)
    top, left = np.where(none, (height - h) // 2, top), np.where(none, (width - w) // 2, left)
    return np.concatenate([top, left, h, w], axis=1).astype(np.int64)


def _lighting(u: np.ndarray) -> np.ndarray:
    """AlexNet's colour noise: sum_k alpha_k lambda_k p_k with alpha_k ~ N(0, 0.1^2) per image, times 255."""
    alpha = _LIGHTING * ndtri(np.maximum(u, 2.0**-54))
    # whole levels make the sums of pixels exact, in whatever arithmetic a loader adds
    return np.rint(255 * (alpha * _EIGENVALUES) @ _EIGENVECTORS.T).astype(np.float32)


def render(image: Image.Image, views: Views, row: int, augmentation: Augmentation) -> Tensor:
    """One view of a PIL image of mode RGB (L for grey), as uint8 (C, resolution, resolution)."""
    side = augmentation.resolution
    fit, (top, left, height, width) = views.fit[row].tolist(), views.window[row].tolist()
    if (image.height, image.width) != tuple(fit):
        image = image.resize((fit[1], fit[0]), Image.Resampling.BILINEAR)
    if (top, left, height, width) != (0, 0, image.height, image.width):
        image = image.crop((left, top, left + width, top + height))
    if (height, width) != (side, side):
        image = image.resize((side, side), Image.Resampling.BILINEAR)
    if views.mirror[row]:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if augmentation.policy is not None and views.policy is not None:
        # torchvision draws from the global generator, which other parts of the program draw from too
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(views.policy[row]))
            image = _transform(augmentation.policy, augmentation.kind)(image)
    pixels = torch.from_numpy(np.array(image).reshape(side, side, -1)).permute(2, 0, 1)
    if views.shift is not None:
        # numpy adds here because PyTorch would start threads of its own beside each thread of a loader; with 16 bits it
        # takes a third of the time that it takes with floats
        shift = views.shift[row].clip(-255, 255).astype(np.int16)
        rows = pixels.permute(1, 2, 0).numpy().reshape(side, -1) + np.tile(shift, side)
        pixels = torch.from_numpy(rows.clip(0, 255, out=rows).astype(np.uint8)).view(side, side, -1).permute(2, 0, 1)
    return pixels
