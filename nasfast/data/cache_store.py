"""What the image cache keeps of each image, and the store that keeps it in memory.

Where every image is resized to the resolution, the cache keeps the resized image, and a batch is a gather. At
evaluation it keeps the centre crop. For random crops of photographs it keeps the photograph, reduced if it is larger
than needed.
"""

from __future__ import annotations

import os

import numpy as np
from PIL import Image
from torchvision.transforms.v2 import functional as F

from nasfast.data.augment import Augmentation, Views, render
from nasfast.data.datasets import DataError, ImageSource
from nasfast.runtime.capacity import free_memory

_RAM_SHARE = 1 / 2
"""Share of the available main memory that images may take; the processes of a machine divide it."""


class StoredForm:
    """What is kept of each image.

    Args:
        augmentation: decides what batches will show.
        side: largest short side of a photograph in pixels; None takes 8/7 of the resolution.

    Attributes:
        augmentation: the given augmentation.
        channels: channels of an image, 1 or 3.
        uniform: whether every image is kept at (resolution, resolution).
    """

    def __init__(self, augmentation: Augmentation, side: int | None) -> None:
        self.augmentation = augmentation
        self.channels = 1 if augmentation.grey else 3
        self.uniform = augmentation.kind == "eval" or augmentation.fixed
        self._side = side or round(augmentation.resolution * 8 / 7)

    def __str__(self) -> str:
        side = self.augmentation.resolution
        if self.augmentation.kind == "eval":
            return f"centre crops, {side} x {side} x {self.channels}"
        if self.augmentation.fixed:
            return f"resized to {side} x {side} x {self.channels}"
        return f"short side at most {self._side}, {self.channels} channels"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of a kept image; for photographs, those of a typical one."""
        side = self.augmentation.resolution
        return (side, side, self.channels) if self.uniform else (self._side, self._side * 4 // 3, self.channels)

    def of(self, image: Image.Image) -> np.ndarray:
        """The pixels to keep of an RGB image, (height, width, channels) uint8."""
        if self.augmentation.grey:
            image = image.convert("L")
        size, side = np.array([[image.height, image.width]]), self.augmentation.resolution
        if self.uniform:
            views = Views(np.array([[side, side]]), _whole(1, side), np.zeros(1, bool), None)
            if self.augmentation.kind == "eval":
                views = self.augmentation.views(size, epoch=0, start=0)
            return render(image, views, 0, self.augmentation).permute(1, 2, 0).numpy()
        if (short := int(size.min())) > self._side:
            # the same rounding as at evaluation
            fit = [self._side if length == short else self._side * length // short for length in size[0].tolist()]
            image = F.resize(image, fit, antialias=True)
        return np.asarray(image).reshape(image.height, image.width, self.channels)

    def views(self, sizes: np.ndarray, *, epoch: int, start: int) -> Views:
        """`Augmentation.views` for kept images; `sizes` has their (N, 2) heights and widths."""
        if self.augmentation.kind == "eval":
            return Views(sizes, _whole(len(sizes), self.augmentation.resolution), np.zeros(len(sizes), bool), None)
        return self.augmentation.views(sizes, epoch=epoch, start=start)


def _whole(count: int, side: int) -> np.ndarray:
    """(count, 4) windows that each show the whole of an image (side, side)."""
    return np.tile(np.array([0, 0, side, side]), (count, 1))


def decode_stored(source: ImageSource, form: StoredForm, index: int) -> np.ndarray | None:
    """The pixels to keep of an image, (height, width, channels) uint8; None if the image cannot be read."""
    try:
        return form.of(source.image(index))
    except OSError:
        return None


class MemoryStore:
    """Keeps decoded images in memory.

    Args:
        source: the images.
        form: what is kept of each image.

    Attributes:
        sizes: (N, 2) int64 heights and widths; zeros for images that could not be read.

    Raises:
        DataError: the images take more than half of the available memory.
    """

    def __init__(self, source: ImageSource, form: StoredForm) -> None:
        room, size, count = memory_share(), 0, len(source)
        self._check(int(np.prod(form.shape)) * count if form.uniform else 0, room, count)
        self._array = np.zeros((count, *form.shape), np.uint8) if form.uniform else None
        self._images: list[np.ndarray | None] = []
        self.sizes = np.zeros((count, 2), np.int64)
        for index in range(count):
            if (pixels := decode_stored(source, form, index)) is not None:
                self.sizes[index] = pixels.shape[:2]
                if self._array is not None:
                    self._array[index] = pixels
                    pixels = self._array[index]
                self._check(size := size + pixels.nbytes, room, count)
            self._images.append(pixels)

    @staticmethod
    def _check(size: int, room: int, count: int) -> None:
        if size > room:
            raise DataError(
                f"{count} decoded images take {size_text(size)} or more, and {size_text(room)} of memory may be used "
                "for them: give a folder or a list of image files, which are cached on disk, or set "
                "data.loader=torchvision"
            )

    def load(self, index: int) -> np.ndarray | None:
        """Pixels (height, width, channels) uint8; None if the image could not be read."""
        return self._images[index]

    def array(self) -> tuple[np.ndarray, np.ndarray]:
        """All images, (N, resolution, resolution, channels) uint8, and (N,) bool: which of them could be read.

        Raises:
            ValueError: images are kept at different sizes.
        """
        if self._array is None:
            raise ValueError("array: these images are kept at different sizes; use load")
        return self._array, self.sizes[:, 0] > 0


def memory_share() -> int:
    """Bytes of main memory that the images of this process may take."""
    # torchrun sets the number of processes that it started on this machine
    return int(free_memory() * _RAM_SHARE) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def size_text(size: float) -> str:
    """A number of bytes for people, e.g. `9.5 kB`."""
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if size >= pair[0]), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"
