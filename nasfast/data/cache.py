"""The cache backend: images of one size are decoded once into an array, from which batches are cut.

Images that have files stay in a cache on disk, `KEY.npy` and `KEY.json` in one folder. KEY is a digest of the files
(paths, sizes, times) and of what is kept of each image; the .npy is (N, resolution, resolution, C) uint8 and is mapped
into memory, the .json has its digest. It is derived data: it appears when it is complete, and is built again if its
digest differs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from torch import Tensor

from nasfast.config import ConfigError
from nasfast.data.augment import Augmentation, Views, render
from nasfast.data.backends import Decoded, Request
from nasfast.data.datasets import DataError, ImageSource, SubsetSource
from nasfast.runtime.capacity import free_memory
from nasfast.runtime.files import check_room, locked_file, temporary_beside, write_atomic

_LOG = logging.getLogger(__name__)

_FORMAT = "nasfast image cache 3"
_GPU_SHARE = 1 / 8
"""Share of a GPU's free memory that images may take."""
_MEMORY_SHARE = 1 / 2
"""Share of the available main memory that images without files may take; the processes of a machine divide it."""
_CHUNK = 64
"""Images that are decoded before they are written; that many are in memory."""
_REPORT_SECONDS = 30.0
"""Seconds between two reports of the progress."""


def can_keep(augmentation: Augmentation) -> bool:
    """Whether all images have one size before the draws: that of the resolution, or the centre crop at evaluation."""
    return augmentation.kind == "eval" or augmentation.fixed


class CacheBackend:
    """Decodes each image once; keeps images that have files on disk, and any others in memory.

    Batches equal those of the `torchvision` backend. On a GPU, the images stay there if they take no more than an
    eighth of its free memory. A data set's own random transforms are drawn only once, when its images are cached:
    leave them out.

    Images are decoded when the first batch is asked for, so that a run that cannot begin for another reason fails
    before it spends the time. The parts of a split share one cache, except at evaluation. `cache_dir` of None takes
    `nasfast/images` in the user's cache folder.
    """

    kind = "cache"

    def __init__(
        self,
        source: ImageSource,
        augmentation: Augmentation,
        *,
        workers: int = 0,
        cache_dir: str | Path | None = None,
    ) -> None:
        if not can_keep(augmentation):
            raise ConfigError(
                f"data.loader=cache keeps images of one size, and augment={augmentation.kind} crops photographs of "
                "different sizes: set data.loader=dali or torchvision"
            )
        self._augmentation, self._workers = augmentation, max(1, workers)
        self._rows = np.arange(len(source))
        if augmentation.kind != "eval":
            while isinstance(source, SubsetSource):
                self._rows, source = source.indices[self._rows], source.source
        self._source, self._root = source, cache_dir
        side = augmentation.resolution
        self._shape = (len(source), side, side, 1 if augmentation.grey else 3)
        self._bytes = math.prod(self._shape)
        self._on_gpu: Tensor | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of the caches; None for images in memory."""
        if any(self._source.path(index) is None for index in range(len(self._source))):
            return None
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return Path(self._root) if self._root else user / "nasfast" / "images"

    def decode(self, requests: Sequence[Request], device: torch.device) -> Iterator[Decoded]:
        """Answers in the order of the requests.

        Images that stay on the GPU give batches there; other batches for a GPU are in pinned host memory.
        """
        array = self._on_device(device)
        for request in requests:
            rows, side = self._rows[request.indices], self._augmentation.resolution
            readable = self._images[1][rows]
            if self._augmentation.kind == "eval":
                window, mirror = np.tile([0, 0, side, side], (len(rows), 1)), np.zeros(len(rows), bool)
            else:
                sizes = np.full((len(rows), 2), side)
                _, window, mirror, *_ = self._augmentation.views(sizes, epoch=request.epoch, start=request.start)
            kept = np.flatnonzero(readable)
            images = _windows(array, rows[kept], window[kept], mirror[kept])
            if device.type == "cuda" and not images.is_cuda:
                images = images.pin_memory()
            bad = [self._source.name(int(row)) for row in rows[~readable]]
            yield Decoded(images.permute(0, 3, 1, 2), kept, bad)

    def _on_device(self, device: torch.device) -> Tensor:
        """All images (N, resolution, resolution, C), on the device if they fit there."""
        array = torch.from_numpy(self._images[0])
        if device.type != "cuda":
            return array
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._on_gpu is None or self._on_gpu.device != device:
            if array.nbytes > _GPU_SHARE * torch.cuda.mem_get_info(device)[0]:
                return array
            self._on_gpu = array.to(device)
            _LOG.info("%s of decoded images are on %s", size_text(array.nbytes), device)
        return self._on_gpu

    @functools.cached_property
    def _images(self) -> tuple[np.ndarray, np.ndarray]:
        """All images (N, resolution, resolution, C) uint8, and (N,) bool: which of them could be read."""
        folder = self.folder
        if folder is None:
            return self._in_memory()
        path = folder / f"{self._fingerprint()}.npy"
        array, unreadable = self._open(path) or self._build(path)
        readable = np.ones(len(array), bool)
        for index in unreadable:  # perhaps only for a time
            pixels = self._decode(index)
            readable[index] = pixels is not None
            if pixels is not None:
                array[index] = pixels
        return array, readable

    def _decode(self, index: int) -> np.ndarray | None:
        """The pixels to keep of an image, (resolution, resolution, C) uint8; None if it cannot be read."""
        try:
            image = self._source.image(index)
        except OSError:
            return None
        image = image.convert("L") if self._augmentation.grey else image
        side = self._augmentation.resolution
        views = Views(np.array([[side, side]]), np.array([[0, 0, side, side]]), np.zeros(1, bool), None)
        if self._augmentation.kind == "eval":
            views = self._augmentation.views(np.array([[image.height, image.width]]), epoch=0, start=0)
        return render(image, views, 0, self._augmentation).permute(1, 2, 0).numpy()

    def _in_memory(self) -> tuple[np.ndarray, np.ndarray]:
        # torchrun sets the number of processes that it started on this machine
        room = int(free_memory() * _MEMORY_SHARE) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if self._bytes > room:
            raise DataError(
                f"{self._shape[0]} decoded images take {size_text(self._bytes)}, and {size_text(room)} of memory may "
                "be used for them: give a folder or a list of image files, which are cached on disk, or set "
                "data.loader=torchvision"
            )
        array, readable = np.zeros(self._shape, np.uint8), np.zeros(self._shape[0], bool)
        for index in range(len(array)):
            if (pixels := self._decode(index)) is not None:
                array[index], readable[index] = pixels, True
        return array, readable

    def _fingerprint(self) -> str:
        """Digest of the images' files and of what is kept of each image."""
        crop = self._augmentation.kind == "eval"
        digest = hashlib.blake2b(f"{_FORMAT}\n{self._shape[1:]} {crop}\n".encode(), digest_size=16)
        for index in range(len(self._source)):
            path = os.path.abspath(self._source.file(index))
            try:
                stat = os.stat(path)
                state = f"{stat.st_size}\n{stat.st_mtime_ns}"
            except OSError:
                state = "absent"
            digest.update(os.fsencode(path) + f"\0{state}\n".encode())
        return digest.hexdigest()

    def _open(self, path: Path) -> tuple[np.ndarray, list[int]] | None:
        """Map the images into memory, and which of them could not be read; None if they are absent or damaged."""
        try:
            described = json.loads(path.with_suffix(".json").read_bytes())
            unreadable, array = list(map(int, described["unreadable"])), _mapped(path)
            if array.shape != self._shape or array.dtype != np.uint8:
                return None
            if _digest(path, path.stat().st_mtime_ns) != described["digest"]:
                return None
        except (OSError, EOFError, ValueError, TypeError, KeyError):
            return None
        size = size_text(array.nbytes)
        _LOG.info("image cache %s: %d images, %s, %d unreadable", path, len(array), size, len(unreadable))
        return array, unreadable

    def _build(self, path: Path) -> tuple[np.ndarray, list[int]]:
        """Decode all images into the cache, unless another process does so meanwhile, and open it."""
        temporary = temporary_beside(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked_file(path.with_suffix(".lock")):
                if (opened := self._open(path)) is not None:
                    return opened
                if path.exists():
                    _LOG.warning("the image cache %s is damaged: decoding its images again", path)
                for unfinished in path.parent.glob(f".{path.name}.*.tmp"):  # of a process that was killed
                    unfinished.unlink()
                check_room(path.parent, self._bytes)
                try:
                    described = self._write(temporary)
                    os.replace(temporary, path)
                finally:
                    temporary.unlink(missing_ok=True)
                write_atomic(path.with_suffix(".json"), (json.dumps(described, indent=1) + "\n").encode())
                return _mapped(path), described["unreadable"]
        except OSError as error:
            raise DataError(
                f"cannot write the image cache {path} of {size_text(self._bytes)}: "
                f"{error.strerror or error}. Make room or the folder writable, "
                "set data.cache_dir to another place, or data.loader=torchvision"
            ) from error

    def _write(self, path: Path) -> dict[str, Any]:
        """Decode all images into a file; the description of the cache."""
        count, digest, reported = self._shape[0], hashlib.blake2b(digest_size=16), time.monotonic()
        _LOG.info("decoding %d images once into %s, %s", count, path.parent, size_text(self._bytes))
        unreadable, absent = [], np.zeros(self._shape[1:], np.uint8)
        with open(path, "wb") as file, ThreadPoolExecutor(self._workers) as pool:
            header = {"descr": "|u1", "fortran_order": False, "shape": self._shape}
            np.lib.format.write_array_header_1_0(file, header)
            for first in range(0, count, _CHUNK):
                chunk = range(first, min(first + _CHUNK, count))
                for index, pixels in zip(chunk, pool.map(self._decode, chunk), strict=True):
                    if pixels is None:
                        unreadable.append(index)
                    file.write(data := (absent if pixels is None else pixels).tobytes())
                    digest.update(data)
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    _LOG.info("image cache: %d of %d images decoded", chunk.stop, count)
            file.flush()
            os.fsync(file.fileno())
        names = [self._source.name(index) for index in unreadable]
        return {
            "decoder": f"Pillow {PIL.__version__}",
            "unreadable": unreadable,
            "names": names,
            "digest": digest.hexdigest(),
        }


def size_text(size: float) -> str:
    """A number of bytes for people, e.g. `9.5 kB`."""
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if size >= pair[0]), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"


def _mapped(path: Path) -> np.ndarray:
    """The images of a cache, mapped into memory; changes of the array stay in this process."""
    return np.asarray(np.load(path, mmap_mode="c"))


@functools.cache  # every stage of a run opens the same caches
def _digest(path: Path, changed: int) -> str:
    """Digest of the images of a cache whose file changed last at this time."""
    return hashlib.blake2b(_mapped(path).data, digest_size=16).hexdigest()


def _on(device: torch.device, values: np.ndarray) -> Tensor:
    """Copy numbers to a device without waiting for the work it is doing."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _windows(array: Tensor, index: np.ndarray, window: np.ndarray, mirror: np.ndarray) -> Tensor:
    """Cut a window of the image's own size out of each image; what lies outside the image is black.

    Args:
        array: (N, S, S, C) uint8 images on any device.
        index: (n,) which images.
        window: (n, 4) int64, see `Views`; height and width are S.
        mirror: (n,) bool, which windows are flipped left and right.
    """
    count, (total, side, _, channels) = len(index), array.shape
    images = array.view(total, -1).index_select(0, _on(array.device, index))
    images = images.view(count, side, side, channels)
    if pad := int(np.abs(window[:, :2]).max(initial=0)):
        wide = side + 2 * pad
        padded = images.new_zeros((count, wide, wide, channels))
        padded[:, pad : pad + side, pad : pad + side] = images
        # a row of a window is contiguous in the padded image, so `rows` views every pixel as the start of such a row
        rows = padded.view(-1).as_strided((count * wide * wide - side + 1, side * channels), (channels, 1))
        corner = np.arange(count) * wide * wide + (window[:, 0] + pad) * wide + window[:, 1] + pad
        starts = _on(array.device, corner[:, None] + np.arange(side) * wide)
        images = rows.index_select(0, starts.view(-1)).view(count, side, side, channels)
    if mirror.any():
        (mirrored,) = np.nonzero(mirror)
        flipped = images.index_select(0, _on(array.device, mirrored)).flip(2)
        order = np.arange(count)
        order[mirrored] = count + np.arange(len(mirrored))
        # this is several times as fast as `index_copy_` on the CPU
        images = torch.cat([images, flipped]).index_select(0, _on(array.device, order))
    return images
