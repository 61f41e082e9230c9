"""The image cache on disk: decoded images in files that outlive the run.

A cache is a folder whose name is a digest of the images' files (paths, sizes, times) and of what is kept of each image:

    images.npy   pixels of all images, one behind the other: (bytes,) uint8, mapped into memory
    sizes.npy    (N, 2) int64 heights and widths; zeros for an image that could not be read
    cache.json   a description for people, and the digests of both

It is derived data. The folder appears when it is complete, and a damaged one is built again: the sizes and the length
are compared whenever it is opened, and the pixels with their digest where all of them are read into memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from nasfast.data.cache_store import StoredForm, decode_stored, size_text
from nasfast.data.datasets import DataError, ImageSource
from nasfast.runtime.files import write_atomic

_LOG = logging.getLogger(__name__)

_FORMAT = "nasfast image cache 2"
_CHUNK = 64
"""Images that are decoded before they are written; that many are in memory."""
_SAMPLED = 32
"""Number of photographs that are decoded to estimate the size of the whole cache."""
_REPORT_SECONDS = 30.0
"""Seconds between two reports of the progress."""


class FileStore:
    """Keeps decoded images in the files of a cache; builds the cache if it is absent or damaged.

    Args:
        source: the images; each has a file.
        form: what is kept of each image.
        root: the folder that holds all caches.
        workers: threads that decode.

    Attributes:
        folder: the folder of this cache.
        sizes: (N, 2) int64 heights and widths; zeros for images that could not be read.

    Raises:
        DataError: the cache is not complete and cannot be written.
    """

    def __init__(self, source: ImageSource, form: StoredForm, root: Path, workers: int) -> None:
        self._source, self._form, self._workers = source, form, workers
        self.folder = root / self._fingerprint()
        if not self._open():
            self._build()
        unread = int((self.sizes[:, 0] == 0).sum())
        _LOG.info(
            "image cache %s: %d images (%s), %s%s",
            self.folder,
            len(self.sizes),
            form,
            size_text(len(self._pixels)),
            f"; {unread} images are not in it" if unread else "",
        )

    def _fingerprint(self) -> str:
        """Digest of the images' files and of what is kept."""
        digest = hashlib.blake2b(f"{_FORMAT}\n{self._form}\n".encode(), digest_size=16)
        for index in range(len(self._source)):
            path = os.path.abspath(self._source.file(index))
            try:
                stat = os.stat(path)
                state = f"{stat.st_size}\n{stat.st_mtime_ns}"
            except OSError:
                state = "absent"
            digest.update(os.fsencode(path) + f"\0{state}\n".encode())
        return digest.hexdigest()

    def _open(self) -> bool:
        """Map the cache into memory; false if it is absent or damaged."""
        try:
            described = json.loads((self.folder / "cache.json").read_bytes())
            table = (self.folder / "sizes.npy").read_bytes()
            if _digest(table) != described["sizes"]:
                return False
            sizes = np.load(io.BytesIO(table))
            ends = np.cumsum(sizes.prod(axis=1)) * self._form.channels
            head = _header(int(ends[-1]))
            images = self.folder / "images.npy"
            with open(images, "rb") as file:
                if file.read(len(head)) != head or os.fstat(file.fileno()).st_size != len(head) + ends[-1]:
                    return False
            pixels = np.memmap(images, np.uint8, "r", len(head)) if ends[-1] else np.empty(0, np.uint8)
            self._digest: str = described["pixels"]
        except (OSError, ValueError, TypeError, KeyError):
            return False
        self.sizes, self._ends, self._pixels = sizes, ends, pixels
        return True

    def _build(self) -> None:
        """Decode all images into a new folder, which takes the place of the cache.

        Raises:
            DataError: the disk is too small, or the folder cannot be written.
        """
        if self.folder.exists():
            _LOG.warning("the image cache %s is damaged: decoding its images again", self.folder)
        key, root = self.folder.name, self.folder.parent
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _file_lock(root / f"{key}.lock"):
                if self._open():  # another process has built it meanwhile
                    return
                for left in root.glob(f".{key}-*"):  # of a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                new = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
                try:
                    self._write(new)
                    shutil.rmtree(self.folder, ignore_errors=True)
                    new.rename(self.folder)
                finally:
                    shutil.rmtree(new, ignore_errors=True)
        except OSError as error:
            raise DataError(
                f"cannot write the image cache {self.folder}: {error.strerror or error}. Make room or the folder "
                "writable, set data.cache_dir to another place, or data.loader=torchvision"
            ) from error
        if not self._open():
            raise DataError(f"the image cache {self.folder} was written and cannot be read: is the disk failing?")

    def _write(self, folder: Path) -> None:
        """Decode all images and write the three files."""
        count, decode = len(self._source), partial(decode_stored, self._source, self._form)
        needed, free = self._expected_bytes(), shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it needs about {size_text(needed)}, and {size_text(free)} are free there")
        _LOG.info("decoding %d images once into the cache %s, about %s", count, self.folder, size_text(needed))
        sizes, digest, reported = np.zeros((count, 2), np.int64), hashlib.blake2b(digest_size=16), time.monotonic()
        with open(folder / "images.npy", "wb") as file, ThreadPoolExecutor(max(1, self._workers)) as pool:
            file.write(_header(0))
            for first in range(0, count, _CHUNK):
                chunk = range(first, min(first + _CHUNK, count))
                for index, pixels in zip(chunk, pool.map(decode, chunk), strict=True):
                    if pixels is not None:
                        sizes[index] = pixels.shape[:2]
                        file.write(data := pixels.tobytes())
                        digest.update(data)
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    _LOG.info("image cache: %d of %d images decoded", chunk.stop, count)
            file.seek(0)
            file.write(_header(int(sizes.prod(axis=1).sum()) * self._form.channels))
            file.flush()
            os.fsync(file.fileno())
        np.save(table := io.BytesIO(), sizes)
        write_atomic(folder / "sizes.npy", table.getvalue())
        described: dict[str, Any] = {
            "format": _FORMAT,
            "stored": str(self._form),
            "images": count,
            "decoder": f"Pillow {PIL.__version__}",
            "unreadable": [self._source.name(index) for index in np.flatnonzero(sizes[:, 0] == 0).tolist()],
            "sizes": _digest(table.getvalue()),
            "pixels": digest.hexdigest(),
        }
        write_atomic(folder / "cache.json", (json.dumps(described, indent=1) + "\n").encode())

    def _expected_bytes(self) -> int:
        """Estimated bytes of all images; photographs are sampled, because their sizes differ."""
        images, typical = range(len(self._source)), float(np.prod(self._form.shape))
        if not self._form.uniform:
            sample = images[:: -(-len(images) // _SAMPLED)]
            sizes = [p.nbytes for p in (decode_stored(self._source, self._form, i) for i in sample) if p is not None]
            typical = float(np.mean(sizes)) if sizes else typical
        return int(typical * len(images))

    def load(self, index: int) -> np.ndarray | None:
        """Pixels (height, width, channels) uint8; None if neither the cache nor the source can give them."""
        height, width = self.sizes[index].tolist()
        if not height:  # the image could not be read: perhaps only for a time
            return decode_stored(self._source, self._form, index)
        end = int(self._ends[index])
        start = end - height * width * self._form.channels
        return np.asarray(self._pixels[start:end]).reshape(height, width, self._form.channels)

    def array(self) -> tuple[np.ndarray, np.ndarray]:
        """All images, (N, resolution, resolution, channels) uint8, and (N,) bool: which of them could be read.

        Raises:
            DataError: the pixels are not those that were written, and the cache cannot be built again.
        """
        pixels = np.array(self._pixels)
        if _digest(pixels.data) != self._digest:
            (self.folder / "cache.json").unlink(missing_ok=True)  # so that no process opens it
            self._build()
            pixels = np.array(self._pixels)
        there = self.sizes[:, 0] > 0
        if there.all():
            return pixels.reshape(-1, *self._form.shape), there
        images = np.zeros((len(there), *self._form.shape), np.uint8)
        images[there] = pixels.reshape(-1, *self._form.shape)
        for index in np.flatnonzero(~there).tolist():
            if (again := self.load(index)) is not None:
                images[index], there[index] = again, True
        return images, there


def _header(length: int) -> bytes:
    """The header of a .npy file of `length` uint8; its own length is the same for all."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({length},), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold the lock, after waiting for any process that has it.

    Where the file system has no locks, several processes may decode the same images, which only wastes time.
    """
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # closing is not enough: a worker of a loader that was forked meanwhile has the descriptor too
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
