"""Scikit-learn's handwritten digits as image sources, so that a whole run needs no download."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
from PIL import Image

from nasfast.data.datasets import ImageSource

Split = Literal["train", "val"]

_SIDE = 32
_CLUTTERED = {"train": 2000, "val": 1000}
_PIECES, _PIECE, _CLUTTER, _NOISE = 10, 6, 0.6, 20.0
"""Pieces of other digits per image, their side in pixels, their brightness, and the noise's standard deviation."""


def _load(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers (n,), images (n, 8, 8) uint8 and labels (n,) int64 of a part: `val` is every fifth image of a class."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RuntimeError("the digits of data.source need scikit-learn: pip install 'nasfast[demo]'") from error
    digits = load_digits()
    position = np.empty(len(digits.target), dtype=np.int64)
    for label in range(10):
        (members,) = np.nonzero(digits.target == label)
        position[members] = np.arange(len(members))
    (numbers,) = np.nonzero((position % 5 == 4) == (split == "val"))
    images = (digits.images[numbers] * (255 / 16)).round().astype(np.uint8)
    return numbers, images, digits.target[numbers].astype(np.int64)


def _enlarge(image: np.ndarray, side: int) -> Image.Image:
    return Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)


class _MemorySource(ImageSource):
    """Images of the ten digits, held in memory with their names."""

    in_memory = True
    classes = tuple(map(str, range(10)))

    def __init__(self, images: Sequence[Image.Image], labels: np.ndarray, names: Sequence[str]) -> None:
        self._images, self.labels, self._names = images, labels, names

    def image(self, index: int) -> Image.Image:
        return self._images[index]

    def name(self, index: int) -> str:
        return self._names[index]


class DigitsSource(_MemorySource):
    """Scikit-learn's 1797 handwritten digits (8 x 8, UCI), enlarged to 32 x 32 RGB and held in memory.

    Part `val` has every fifth image of each class, `train` the others.

    Raises:
        RuntimeError: scikit-learn is not installed.
    """

    def __init__(self, split: Split) -> None:
        numbers, images, labels = _make_plain(split)
        super().__init__(images, labels.copy(), [f"digit {number}" for number in numbers])


class ClutteredDigitsSource(_MemorySource):
    """Handwritten digits at random places among pieces of other digits, with noise: 32 x 32 RGB, held in memory.

    Every architecture learns plain digits almost perfectly. These are harder, so architectures differ. The images are
    the same in every run. Both parts, `train` of 2000 images and `val` of 1000, draw from their own part of the digits
    (see `DigitsSource`).

    Raises:
        RuntimeError: scikit-learn is not installed.
    """

    def __init__(self, split: Split) -> None:
        labels, images = _make_cluttered(split)
        super().__init__(images, labels.copy(), [f"cluttered digit {number}" for number in range(len(labels))])


@cache  # every stage of a run, and every network that a process retrains, opens the same images
def _make_plain(split: Split) -> tuple[np.ndarray, tuple[Image.Image, ...], np.ndarray]:
    """Numbers (n,), images and labels (n,) int64 of a part."""
    numbers, images, labels = _load(split)
    return numbers, tuple(_enlarge(image, _SIDE).convert("RGB") for image in images), labels


@cache
def _make_cluttered(split: Split) -> tuple[np.ndarray, tuple[Image.Image, ...]]:
    """Labels (n,) int64 and images of a part."""
    _, images, labels = _load(split)
    pieces, digits = ([np.asarray(_enlarge(image, side)) for image in images] for side in (16, 20))
    rng = np.random.default_rng(0 if split == "train" else 1)
    numbers = rng.integers(len(images), size=_CLUTTERED[split])
    return labels[numbers], tuple(_draw(pieces, digits[number], rng) for number in numbers)


def _draw(pieces: list[np.ndarray], digit: np.ndarray, rng: np.random.Generator) -> Image.Image:
    canvas = np.zeros((_SIDE, _SIDE))
    for other in rng.integers(len(pieces), size=_PIECES):
        y, x = rng.integers(16 - _PIECE + 1, size=2)
        piece = pieces[other][y : y + _PIECE, x : x + _PIECE]
        y, x = rng.integers(_SIDE - _PIECE + 1, size=2)
        window = canvas[y : y + _PIECE, x : x + _PIECE]
        np.maximum(window, _CLUTTER * piece, out=window)
    y, x = rng.integers(_SIDE - 20 + 1, size=2)
    window = canvas[y : y + 20, x : x + 20]
    np.maximum(window, digit, out=window)
    noisy = np.clip(canvas + rng.normal(0, _NOISE, canvas.shape), 0, 255)
    return Image.fromarray(noisy.astype(np.uint8)).convert("RGB")
