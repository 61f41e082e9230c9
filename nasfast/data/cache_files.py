"""The image cache on disk: decoded images in files that outlive the run.

A cache is a folder whose name is a digest of the images' files (paths, sizes, times) and of what is kept of each image:

    00000.part, ...   the same number of consecutive images in each part, the rest in the last one:
                        256 bytes: a line of JSON with the digest, the part, its images and the CRC-32 of the table
                        table: height, width and CRC-32 of the pixels of each image, little-endian uint32; zeros for an
                        image that could not be read
                        pixels of each image: (height, width, channels) uint8
    cache.json        a description for people; written when all parts are there
    lock              held by the process that decodes

A part appears only when it is complete. Whatever ends a process, finished parts are kept and none is half-written.
Parts are read by position (`pread`) and not mapped into memory. Reading is as fast, because the kernel's page cache
keeps the files in either case; but a mapped file that is truncated, or lies on a failing disk, kills its reader.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import PIL

from nasfast.data.cache_store import StoredForm, decode_stored, size_text
from nasfast.data.datasets import DataError, ImageSource
from nasfast.runtime.files import write_atomic

_LOG = logging.getLogger(__name__)

_FORMAT = "nasfast image cache 1"
_HEADER = 256
"""Bytes of the first line of a part."""
_ENTRY = np.dtype("<u4")
"""Type of the three numbers of an image in a part's table."""

_PART_BYTES, _PART_IMAGES = 32 * 2**20, 1024
"""Approximate limits of a part. Each thread has one part in memory, and a kill loses one part per thread."""

_SAMPLED = 32
"""Number of photographs that are decoded to estimate the size of the whole cache."""
_REPORT_SECONDS = 30.0
"""Seconds between two reports of the progress."""


class FileStore:
    """Keeps decoded images in the files of a cache; builds the cache if it is absent.

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
        self._source, self._form = source, form
        count = len(source)
        self._per_part = max(1, min(_PART_IMAGES, _PART_BYTES // int(np.prod(form.shape))))
        self._parts = -(-count // self._per_part)
        self._key = self._fingerprint()
        self.folder = root / self._key
        self.sizes = np.zeros((count, 2), np.int64)
        self._sums, self._offsets = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._checked = np.zeros(count, bool)
        self._warned, self._lock, self._local = False, threading.Lock(), threading.local()
        self._open(workers)

    def _fingerprint(self) -> str:
        """Digest of the images' files and of what is kept."""
        digest = hashlib.blake2b(f"{_FORMAT}\n{self._form}\n{self._per_part}\n".encode(), digest_size=16)
        for index in range(len(self._source)):
            path = os.path.abspath(self._source.file(index))
            try:
                stat = os.stat(path)
                state = f"{stat.st_size}\n{stat.st_mtime_ns}"
            except OSError:
                state = "absent"
            digest.update(os.fsencode(path) + f"\0{state}\n".encode())
        return digest.hexdigest()

    def _range(self, part: int) -> range:
        """Indices of the images of a part."""
        return range(part * self._per_part, min((part + 1) * self._per_part, len(self._source)))

    def _path(self, part: int) -> Path:
        return self.folder / f"{part:05d}.part"

    def _head(self, part: int, table: bytes) -> bytes:
        """First line and table of a part."""
        form = {"format": _FORMAT, "key": self._key, "part": part, "images": len(self._range(part))}
        return json.dumps({**form, "crc32": zlib.crc32(table)}).ljust(_HEADER - 1).encode() + b"\n" + table

    def _open(self, workers: int) -> None:
        """Read the tables of all parts; build the parts that are missing or damaged."""
        missing = self._scan(range(self._parts))
        description = self.folder / "cache.json"
        complete = description.exists()
        if complete and missing:
            _LOG.warning(
                "%d of %d parts of the image cache %s are missing or damaged: decoding their images again",
                len(missing),
                self._parts,
                self.folder,
            )
        try:
            if missing:
                self.folder.mkdir(parents=True, exist_ok=True)
                with _locked(self.folder / "lock") as held:
                    missing = self._scan(missing)  # another process may have made them meanwhile
                    if missing and held:
                        for left in self.folder.glob(".*.tmp"):
                            left.unlink(missing_ok=True)
                    if missing:
                        self._build(missing, workers)
                        missing = self._scan(missing)
            if not missing and not description.exists():
                write_atomic(description, (json.dumps(self._described(), indent=1) + "\n").encode())
        except OSError as error:
            reason = error.strerror or error
            if missing and not complete:
                kept = " Its finished parts are kept." if any(self.folder.glob("*.part")) else ""
                raise DataError(
                    f"cannot write the image cache {self.folder}: {reason}.{kept} Make room or the folder writable, "
                    "set data.cache_dir to another place, or data.loader=torchvision"
                ) from error
            if missing:
                _LOG.warning(
                    "cannot write the image cache %s (%s): its missing images are decoded at each use",
                    self.folder,
                    reason,
                )
        unread = int((self.sizes[:, 0] == 0).sum())
        _LOG.info(
            "image cache %s: %d images (%s), %s%s",
            self.folder,
            len(self.sizes),
            self._form,
            size_text(self._bytes(self.sizes).sum()),
            f"; {unread} images are not in it" if unread else "",
        )

    def _bytes(self, sizes: np.ndarray) -> np.ndarray:
        """Bytes of the pixels of images of these heights and widths."""
        return sizes[:, 0] * sizes[:, 1] * self._form.channels

    def _described(self) -> dict[str, object]:
        """The contents of cache.json."""
        return {
            "format": _FORMAT,
            "key": self._key,
            "stored": str(self._form),
            "images": len(self.sizes),
            "images_per_part": self._per_part,
            "bytes": int(self._bytes(self.sizes).sum()),
            "decoder": f"Pillow {PIL.__version__}",
            "unreadable": [self._source.name(index) for index in np.flatnonzero(self.sizes[:, 0] == 0).tolist()],
        }

    def _scan(self, parts: Sequence[int]) -> list[int]:
        """Read the tables of parts; return the parts that are absent or damaged."""
        return [part for part in parts if not self._read_table(part)]

    def _read_table(self, part: int) -> bool:
        """Read the table of a part; false if the part is absent or damaged."""
        images = self._range(part)
        start = _HEADER + 3 * _ENTRY.itemsize * len(images)
        try:
            with open(self._path(part), "rb") as file:
                head, size = file.read(start), os.fstat(file.fileno()).st_size
        except OSError:
            return False
        table = head[_HEADER:]
        if len(head) != start or head != self._head(part, table):
            return False
        entries = np.frombuffer(table, _ENTRY).reshape(-1, 3).astype(np.int64)
        ends = start + np.cumsum(self._bytes(entries))
        if size != ends[-1]:
            return False
        rows = slice(images.start, images.stop)
        self.sizes[rows], self._sums[rows] = entries[:, :2], entries[:, 2]
        self._offsets[rows] = ends - self._bytes(entries)
        return True

    def _build(self, parts: list[int], workers: int) -> None:
        """Decode the images of parts and write the parts.

        Raises:
            OSError: the disk is too small, or the folder cannot be written.
        """
        needed, free = self._expected_bytes(parts), shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it needs about {size_text(needed)}, and {size_text(free)} are free there")
        _LOG.info(
            "decoding images once into the cache %s: %d of %d parts, about %s",
            self.folder,
            len(parts),
            self._parts,
            size_text(needed),
        )
        told = time.monotonic()
        with ThreadPoolExecutor(max(1, workers)) as pool:
            try:
                for done, future in enumerate(as_completed([pool.submit(self._write, part) for part in parts]), 1):
                    future.result()
                    if time.monotonic() - told > _REPORT_SECONDS:
                        told = time.monotonic()
                        _LOG.info("image cache: %d of %d parts done", done, len(parts))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _expected_bytes(self, parts: list[int]) -> int:
        """Estimated bytes of parts; photographs are sampled, because their sizes differ."""
        images = [index for part in parts for index in self._range(part)]
        typical = float(np.prod(self._form.shape))
        if not self._form.uniform:
            sample = images[:: -(-len(images) // _SAMPLED)]
            sizes = [p.nbytes for p in (decode_stored(self._source, self._form, i) for i in sample) if p is not None]
            typical = float(np.mean(sizes)) if sizes else typical
        return int(typical * len(images))

    def _write(self, part: int) -> None:
        """Decode the images of a part and write it."""
        entries, pixels = [], []
        for index in self._range(part):
            image = decode_stored(self._source, self._form, index)
            if image is None:
                entries.append((0, 0, 0))
                continue
            pixels.append(image.tobytes())
            entries.append((*image.shape[:2], zlib.crc32(pixels[-1])))
        table = np.array(entries, _ENTRY).tobytes()
        write_atomic(self._path(part), b"".join([self._head(part, table), *pixels]))

    def load(self, index: int) -> np.ndarray | None:
        """Pixels (height, width, channels) uint8; None if neither the cache nor the source can give them.

        The pixels are overwritten when the thread loads its next image.
        """
        height, width = self.sizes[index].tolist()
        size, read = height * width * self._form.channels, 0
        # each thread keeps its buffer: the page faults of new memory would take longer than the read
        buffer = getattr(self._local, "buffer", b"")
        if len(buffer) < size:
            buffer = self._local.buffer = bytearray(size)
        data = memoryview(buffer)[:size]
        if size:
            with contextlib.suppress(OSError), _descriptor(self._path(index // self._per_part), os.O_RDONLY) as file:
                read = os.preadv(file, [data], self._offsets[index])
        pixels = self._verified(index, data[:read])
        return self._decode_again(index) if pixels is None else pixels

    def array(self) -> tuple[np.ndarray, np.ndarray]:
        """All images, (N, resolution, resolution, channels) uint8, and (N,) bool: which of them could be read."""
        images = np.zeros((len(self.sizes), *self._form.shape), np.uint8)
        there, length = np.zeros(len(images), bool), int(np.prod(self._form.shape))
        for part in range(self._parts):
            data = memoryview(b"")
            with contextlib.suppress(OSError):
                data = memoryview(self._path(part).read_bytes())
            for index in self._range(part):
                offset = int(self._offsets[index])
                pixels = self._verified(index, data[offset : offset + length])
                if pixels is None:
                    pixels = self._decode_again(index)
                if pixels is not None:
                    images[index], there[index] = pixels, True
        return images, there

    def _verified(self, index: int, data: bytes | memoryview) -> np.ndarray | None:
        """`data` as pixels, or None if it is not what was written; the first read of an image compares the CRC-32."""
        height, width = self.sizes[index].tolist()
        if not height or len(data) != height * width * self._form.channels:
            return None
        if not self._checked[index]:
            if zlib.crc32(data) != self._sums[index]:
                return None
            self._checked[index] = True
        return np.frombuffer(data, np.uint8).reshape(height, width, self._form.channels)

    def _decode_again(self, index: int) -> np.ndarray | None:
        """Decode an image that the cache lacks or that is damaged there; repair a damaged one."""
        damaged = self.sizes[index, 0] > 0
        if damaged:
            with self._lock:
                if not self._warned:
                    _LOG.warning(
                        "the image cache %s is damaged, first at image %s: decoding damaged images again",
                        self.folder,
                        self._source.name(index),
                    )
                self._warned = True
        pixels = decode_stored(self._source, self._form, index)
        if damaged and pixels is not None:
            # a cache of another user, or a full disk, cannot be repaired: the image is decoded again at its next use
            with contextlib.suppress(OSError):
                self._repair(index, pixels)
        return pixels

    def _repair(self, index: int, pixels: np.ndarray) -> None:
        """Write the pixels of an image to its place, if they are those that the part's table describes."""
        if pixels.shape[:2] != tuple(self.sizes[index]) or zlib.crc32(pixels.tobytes()) != self._sums[index]:
            return  # the file changed and kept its size and time, or the decoder's version did: the table does not fit
        part = index // self._per_part
        rows = slice(self._range(part).start, self._range(part).stop)
        head = self._head(part, np.column_stack([self.sizes[rows], self._sums[rows]]).astype(_ENTRY).tobytes())
        with _descriptor(self._path(part), os.O_RDWR) as file:
            if os.pread(file, len(head), 0) == head:  # otherwise another process has replaced the part
                os.pwrite(file, pixels.tobytes(), self._offsets[index])


@contextlib.contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    """Open a file for the length of the block and give its descriptor."""
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock, after waiting for any process that has it; gives false where the file system has no locks.

    Without locks several processes may decode the same images. That wastes time but does no harm, because a part is
    complete when it appears.
    """
    with _descriptor(path, os.O_RDWR | os.O_CREAT) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.info("another process is decoding images into %s: waiting for it", path.parent)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            # closing is not enough: a worker of a loader that was forked meanwhile has the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
