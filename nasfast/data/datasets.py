"""Image sources: folders or lists of files, any map-style data set, and parts of other sources."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from nasfast.display import counted
from nasfast.runtime.image_files import IMAGE_ENDINGS, class_folders, is_hidden, read_image_list
from nasfast.runtime.once import log_once

_LOG = logging.getLogger(__name__)

_SIXTEEN_BIT_FORMATS = ("PNG", "PPM")
"""Formats whose mode `I` means 16-bit grey; in other formats it may hold any 32-bit value."""

_LOOKED_FOR = 100
"""Number of listed images that are looked for on disk, so that a moved folder is an error at once."""


class DataError(ValueError):
    """Images that cannot be used: missing, empty or one-class folder, or too many unreadable files."""


def to_rgb(image: Image.Image) -> Image.Image:
    """The image with 8 bits per channel: red, green and blue; itself if it has these."""
    if image.mode == "RGB":
        image.load()  # a file that is opened, but not read yet
        return image
    # convert() clamps at 255 and does not scale: 16-bit grey would become white
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BIT_FORMATS):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode!r} have no fixed range: save the image with 8 or 16 bits")
    return image.convert("RGB")


def open_image(path: str) -> Image.Image:
    """The image of a file, in RGB; OSError if it is missing, damaged or no image."""
    try:
        with Image.open(path) as image:
            return to_rgb(image)
    except Exception as error:
        # damaged files make PIL's decoders raise anything: ValueError, SyntaxError, DecompressionBombError, ...
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error


class ImageSource(ABC):
    """Labelled images, decoded on access.

    Attributes:
        classes: class names; a label is an index into them.
        labels: (len,) int64.
        in_memory: whether images are held decoded, so that access decodes nothing.
    """

    classes: tuple[str, ...]
    labels: np.ndarray
    in_memory: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """The RGB image; OSError if it cannot be decoded."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The name of the image in error messages."""

    def path(self, index: int) -> str | None:
        """The file that holds the image, for loaders that decode files themselves; None if there is no file."""
        return None

    def file(self, index: int) -> str:
        """As `path`, for callers that need a file; DataError where there is none."""
        path = self.path(index)
        if path is None:
            raise DataError(f"{self.name(index)} is in no file: set data.loader=torchvision")
        return path


class _FileSource(ImageSource):
    """A source whose images are files."""

    _paths: list[str]

    def image(self, index: int) -> Image.Image:
        return open_image(self._paths[index])

    def name(self, index: int) -> str:
        return self._paths[index]

    def path(self, index: int) -> str:
        return self._paths[index]


class FolderSource(_FileSource):
    """Images at `root/CLASS/**/IMAGE`: the layout of ImageNet and torchvision's ImageFolder; classes are sorted.

    Args:
        root: folder with one sub-folder per class.
        classes: expected class names in label order (those of the training folder); None takes the folder's own.

    Hidden files and folders, and those that systems make, such as `__MACOSX` and `@eaDir`, are left out.

    Attributes:
        not_images: files that were skipped because their ending is not that of an image.

    Raises:
        DataError: the folder is missing, has no class folder or only one, has an empty class, or its classes differ
            from `classes`.
    """

    def __init__(self, root: str | Path, *, classes: Sequence[str] | None = None) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise DataError(f"image folder {self.root} does not exist: give a folder with one sub-folder per class")
        try:
            names = class_folders(self.root)
        except ValueError as error:
            raise DataError(str(error)) from error
        if classes is not None and list(classes) != names:
            missing, extra = sorted(set(classes) - set(names)), sorted(set(names) - set(classes))
            raise DataError(
                f"classes of {self.root} differ from the training folder's: missing {missing}, extra {extra}; both "
                "need the same sub-folders, one per class"
            )
        self.classes = tuple(names)
        self.not_images: list[str] = []
        numbers = {name: label for label, name in enumerate(names)}
        images = [(path, label) for name, label in numbers.items() for path in self._images(self.root / name)]
        self._paths = [path for path, _ in images]
        self.labels = np.array([label for _, label in images], dtype=np.int64)
        counts = np.bincount(self.labels, minlength=len(names))
        if empty := [name for name, count in zip(names, counts, strict=True) if not count]:
            raise DataError(
                f"{self.root / empty[0]} has no image ({', '.join(sorted(IMAGE_ENDINGS))}): delete the folder, "
                "or put the images of the class into it"
            )
        if self.not_images:
            skipped = f"skipped {counted(len(self.not_images), 'file')} without the ending of an image"
            log_once(_LOG, logging.WARNING, f"{self.root}: {skipped}: {', '.join(self.not_images[:5])}")

    def _images(self, folder: Path) -> Iterator[str]:
        """The images below a folder, those of each folder in sorted order; links to folders are followed once each."""
        seen = set[str]()
        for directory, inner, files in os.walk(folder, followlinks=True):
            if (real := os.path.realpath(directory)) in seen:
                repeated = f"{directory} is a link to a folder whose images are counted already: left out"
                log_once(_LOG, logging.WARNING, repeated)
                inner.clear()
                continue
            seen.add(real)
            if hidden := [name for name in inner if is_hidden(name)]:
                left_out = f"{directory}: left out the hidden folders {', '.join(sorted(hidden)[:5])}"
                log_once(_LOG, logging.INFO, left_out)
            inner[:] = sorted(set(inner) - set(hidden))
            yield from filter(self._is_image, (os.path.join(directory, name) for name in sorted(files)))

    def _is_image(self, path: str) -> bool:
        name = os.path.basename(path)
        if is_hidden(name):
            return False
        image = os.path.splitext(name)[1].lower() in IMAGE_ENDINGS
        if not image:
            self.not_images.append(path)
        return image


class ListSource(_FileSource):
    """Images of a text file with lines `IMAGE LABEL`.

    Paths are relative to the file's folder and may contain spaces; labels are numbers or class names.

    Args:
        path: the text file; `nasfast.runtime.image_files.read_image_list` has its form.
        classes: expected class names in label order (those of the training images); None takes the file's own: its
            names in sorted order, or for numbers 0 to the largest.

    Raises:
        DataError: the file is missing or not text, a line has no label, there is only one class, a number has no image,
            or a label is not in `classes`.
    """

    def __init__(self, path: str | Path, *, classes: Sequence[str] | None = None) -> None:
        path = Path(path)
        try:
            images = read_image_list(path)
        except ValueError as error:
            raise DataError(str(error)) from error
        self._paths = [os.path.join(path.parent, image) for image, _ in images]
        labels = [label for _, label in images]
        names = sorted(set(labels))
        if all(name.isdecimal() for name in names):
            names.sort(key=int)
            if classes is None and len(names) <= int(names[-1]):
                # labels may be dates, so not all gaps are counted
                present = set(map(int, names))
                missing = islice((n for n in range(int(names[-1])) if n not in present), 5)
                raise DataError(
                    f"{path} has labels up to {names[-1]}, but no image of label {', '.join(map(str, missing))}: "
                    "number the labels from 0 without gaps"
                )
        if classes is not None:
            if unknown := sorted(set(labels) - set(classes)):
                raise DataError(f"{path} has labels that the training images lack: {', '.join(unknown[:5])}")
            names = list(classes)
        if len(names) < 2:
            raise DataError(f"{path} has images of {len(set(labels))} class only: a classifier needs two or more")
        self.classes = tuple(names)
        if not any(map(os.path.exists, self._paths[:_LOOKED_FOR])):
            raise DataError(
                f"{path}: none of the first {min(_LOOKED_FOR, len(self._paths))} listed images exists, e.g. "
                f"{self._paths[0]}; paths are relative to the folder of the list, and their folders end with /"
            )
        numbers_by_name = {name: number for number, name in enumerate(names)}
        self.labels = np.array([numbers_by_name[label] for label in labels], dtype=np.int64)


def open_files(path: str | Path, *, classes: Sequence[str] | None = None) -> FolderSource | ListSource:
    """The images of a folder with a sub-folder per class, or of a text file that lists them."""
    if not Path(path).exists():
        raise DataError(f"{path} does not exist: give a folder with one sub-folder per class, or a list of images")
    return (ListSource if Path(path).is_file() else FolderSource)(path, classes=classes)


class DatasetSource(ImageSource):
    """A map-style data set of (image, label), such as torchvision's; its own transforms run before nasfast's.

    Labels come from its attribute `targets` or `labels`; if it has neither, every item is read once.

    Args:
        dataset: has `__len__` and `__getitem__`; images are PIL images, uint8 tensors (1 or 3, H, W), or uint8 arrays
            (H, W) or (H, W, 3); labels are integers.
        classes: class names; None takes the data set's `classes`, or numbers.

    Raises:
        DataError: the data set has no length or no images, its labels are not integers from 0, or it has fewer than two
            classes.
    """

    def __init__(self, dataset: Any, *, classes: Sequence[str] | None = None) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(f"expected a map-style data set (__len__ and __getitem__), got {type(dataset).__name__}")
        self._dataset = dataset
        labels = next(
            (value for name in ("targets", "labels") if (value := getattr(dataset, name, None)) is not None), None
        )
        if labels is None:
            _LOG.info("%s has neither `targets` nor `labels`: reading its items once", type(dataset).__name__)
            try:
                labels = [dataset[i][1] for i in range(len(dataset))]
            except (TypeError, LookupError) as error:
                raise DataError(f"items of {type(dataset).__name__} must be (image, label): {error}") from error
        self.labels = np.asarray(labels)
        if self.labels.shape != (len(dataset),) or self.labels.dtype.kind not in "iu" or not len(self.labels):
            raise DataError(
                f"labels of {type(dataset).__name__} must be one integer per image, got {self.labels.dtype} of shape "
                f"{self.labels.shape} for {len(dataset)} images"
            )
        self.labels = self.labels.astype(np.int64)
        whole = getattr(dataset, "dataset", dataset)  # a torch Subset has its data set here
        names = classes or getattr(whole, "classes", None) or range(int(self.labels.max()) + 1)
        self.classes = tuple(map(str, names))
        if self.labels.min() < 0 or self.labels.max() >= len(self.classes) or len(self.classes) < 2:
            raise DataError(
                f"labels of {type(dataset).__name__} are {self.labels.min()} to {self.labels.max()}, expected 0 to "
                f"{len(self.classes) - 1}, and two or more classes"
            )

    def image(self, index: int) -> Image.Image:
        try:
            image = self._dataset[index][0]
        except Exception as error:  # a data set may raise anything for a damaged file
            raise OSError(f"{self.name(index)}: {type(error).__name__}: {error}") from error
        if isinstance(image, Image.Image):
            return to_rgb(image)
        if getattr(image, "dtype", None) not in (torch.uint8, np.uint8):
            raise DataError(
                f"{self.name(index)}: expected a PIL image, or a uint8 tensor (C, H, W) or array (H, W, C), "
                f"got {type(image).__name__} with {getattr(image, 'dtype', 'no dtype')}: leave out transforms to floats"
            )
        # PIL takes (H, W), and (H, W, C) of more than one channel
        pixels = np.moveaxis(image.numpy(), 0, -1) if isinstance(image, torch.Tensor) else image
        return to_rgb(Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels))

    def name(self, index: int) -> str:
        return f"item {index} of {type(self._dataset).__name__}"


class SubsetSource(ImageSource):
    """Some images of another source, by their indices (len,) int64 in it."""

    def __init__(self, source: ImageSource, indices: np.ndarray) -> None:
        self.source = source
        self.indices = indices
        self.classes = source.classes
        self.labels = source.labels[indices]
        self.in_memory = source.in_memory

    def image(self, index: int) -> Image.Image:
        return self.source.image(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def path(self, index: int) -> str | None:
        return self.source.path(int(self.indices[index]))


def split_source(source: ImageSource, val_fraction: float, seed: int) -> tuple[SubsetSource, SubsetSource]:
    """Split a source into training and validation parts by class.

    The second has `val_fraction` of each class; each part has at least one image of every class.
    """
    rng = np.random.default_rng(seed)
    train, val = [], []
    order = np.argsort(source.labels, kind="stable")
    ends = np.cumsum(np.bincount(source.labels, minlength=len(source.classes)))
    for name, of_class in zip(source.classes, np.split(order, ends[:-1]), strict=True):
        members = rng.permutation(of_class)
        if len(members) < 2:
            raise DataError(
                f"class {name!r} has {len(members)} image: at least 2 are needed to hold some out for validation"
            )
        held_out = min(max(1, round(len(members) * val_fraction)), len(members) - 1)
        val.append(members[:held_out])
        train.append(members[held_out:])
    return SubsetSource(source, np.sort(np.concatenate(train))), SubsetSource(source, np.sort(np.concatenate(val)))


def random_subset(source: ImageSource, count: int, seed: int) -> SubsetSource:
    """`count` images (all if there are fewer) in random order, so that batches have a mixture of classes."""
    return SubsetSource(source, np.random.default_rng(seed).permutation(len(source))[:count])
