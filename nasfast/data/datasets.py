"""Image sources: a folder of images per class, and the embedded handwritten digits."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

_LOG = logging.getLogger(__name__)

_EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"))

_SIXTEEN_BIT_FORMATS = ("PNG", "PPM")
"""Formats whose mode `I` is 16-bit grey; any other's may hold whatever 32 bits can."""


class DataError(ValueError):
    """Images that cannot be used: missing, empty or one-class folder, or too many unreadable files."""


def _to_rgb(image: Image.Image) -> Image.Image:
    # convert() does not scale but cut off above 255: 16-bit grey would come out white
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BIT_FORMATS):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode!r} have no fixed range: save the image with 8 or 16 bits")
    return image.convert("RGB")


class ImageSource(ABC):
    """Labelled images, decoded on access.

    Attributes:
        classes: class names; a label indexes them.
        labels: (len,) int64.
    """

    classes: tuple[str, ...]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """The RGB image; OSError when it cannot be decoded."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What an error message calls the image."""


class FolderSource(ImageSource):
    """`root/CLASS/**/IMAGE`: the layout of ImageNet and of torchvision's ImageFolder, classes in sorted order.

    Args:
        root: folder with one sub-folder per class.
        classes: expected class names in label order (those of the training folder); None takes the folder's own.

    Attributes:
        not_images: files that were passed over because their ending is not an image's.

    Raises:
        DataError: folder missing, no class folder, one class only, an empty class, or classes unlike `classes`.
    """

    def __init__(self, root: str | Path, *, classes: Sequence[str] | None = None) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise DataError(f"image folder {self.root} does not exist: give a folder with one sub-folder per class")
        found = sorted(
            entry.name for entry in os.scandir(self.root) if entry.is_dir() and not entry.name.startswith(".")
        )
        if not found:
            raise DataError(f"image folder {self.root} has no class sub-folder: expected {self.root}/CLASS/IMAGE.jpg")
        if classes is not None and list(classes) != found:
            missing, extra = sorted(set(classes) - set(found)), sorted(set(found) - set(classes))
            raise DataError(
                f"classes of {self.root} differ from the training folder's: missing {missing}, extra {extra}"
            )
        if len(found) == 1:
            raise DataError(
                f"image folder {self.root} has one class only ({found[0]!r}): a classifier needs two or more"
            )
        self.classes = tuple(found)
        self.not_images: list[str] = []
        self._paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(found):
            paths = self._scan(self.root / name)
            if not paths:
                raise DataError(f"class folder {self.root / name} holds no image ({', '.join(sorted(_EXTENSIONS))})")
            self._paths += paths
            labels += [label] * len(paths)
        self.labels = np.asarray(labels, dtype=np.int64)
        if self.not_images:
            shown = ", ".join(self.not_images[:5])
            _LOG.warning("%s: passed over %d files that are not images: %s", self.root, len(self.not_images), shown)

    def _scan(self, folder: Path) -> list[str]:
        images = []
        for parent, folders, files in os.walk(folder):
            folders.sort()
            for file in sorted(files):
                if file.startswith("."):
                    continue
                path = os.path.join(parent, file)
                (images if Path(file).suffix.lower() in _EXTENSIONS else self.not_images).append(path)
        return images

    def image(self, index: int) -> Image.Image:
        try:
            with Image.open(self._paths[index]) as opened:
                return _to_rgb(opened)
        except Exception as error:
            # damaged files make PIL's decoders raise anything: ValueError, SyntaxError, DecompressionBombError, ...
            raise OSError(f"{self._paths[index]}: {type(error).__name__}: {error}") from error

    def name(self, index: int) -> str:
        return self._paths[index]


class DigitsSource(ImageSource):
    """Scikit-learn's 1797 handwritten digits (8 x 8, UCI), enlarged to 32 x 32 RGB and held in memory.

    Args:
        split: `train`, or `val`: every fifth image of each class.

    Raises:
        RuntimeError: scikit-learn is not installed.
    """

    def __init__(self, split: str) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise RuntimeError("data.source='digits' needs scikit-learn: pip install 'nasfast[demo]'") from error
        digits = load_digits()
        position = np.empty(len(digits.target), dtype=np.int64)
        for label in range(10):
            (members,) = np.nonzero(digits.target == label)
            position[members] = np.arange(len(members))
        (self._indices,) = np.nonzero((position % 5 == 4) == (split == "val"))
        self.classes = tuple(map(str, range(10)))
        self.labels = digits.target[self._indices].astype(np.int64)
        small = (digits.images[self._indices] * (255 / 16)).round().astype(np.uint8)
        self._images = [Image.fromarray(im).resize((32, 32), Image.Resampling.BICUBIC).convert("RGB") for im in small]

    def image(self, index: int) -> Image.Image:
        return self._images[index]

    def name(self, index: int) -> str:
        return f"digit {self._indices[index]}"


class SubsetSource(ImageSource):
    """Some images of another source."""

    def __init__(self, source: ImageSource, indices: np.ndarray) -> None:
        self._source = source
        self._indices = indices
        self.classes = source.classes
        self.labels = source.labels[indices]

    def image(self, index: int) -> Image.Image:
        return self._source.image(int(self._indices[index]))

    def name(self, index: int) -> str:
        return self._source.name(int(self._indices[index]))


def split_source(source: ImageSource, val_fraction: float, seed: int) -> tuple[SubsetSource, SubsetSource]:
    """Stratified train and validation parts; at least one image of every class in each.

    Raises:
        DataError: a class has a single image.
    """
    rng = np.random.default_rng(seed)
    train, val = [], []
    for label, name in enumerate(source.classes):
        members = rng.permutation(np.nonzero(source.labels == label)[0])
        if len(members) < 2:
            raise DataError(
                f"class {name!r} has {len(members)} image: at least 2 are needed to hold some out for validation"
            )
        held_out = min(max(1, round(len(members) * val_fraction)), len(members) - 1)
        val.append(members[:held_out])
        train.append(members[held_out:])
    return SubsetSource(source, np.sort(np.concatenate(train))), SubsetSource(source, np.sort(np.concatenate(val)))
