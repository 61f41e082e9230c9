"""Images decoded once: into files that outlive the run, or into memory, and from there onto the GPU where they fit.

What is kept of an image is what batches can show of it: where every image is resized to the resolution, the resized one
(a batch is then a gather); at evaluation the very crop; for random crops of photographs the photograph, made smaller if
it is larger than needed.

A cache of files is a folder whose name is a digest of the images' files (paths, sizes, times) and of what is kept:

    00000.part, ...   the same number of consecutive images in each, the rest in the last:
                        256 bytes: a line of JSON with the digest, the part, its images and the CRC-32 of the table
                        table: height, width and CRC-32 of the pixels of each image, little-endian uint32; zeros for an
                        image that could not be read
                        pixels of each image: (height, width, channels) uint8
    cache.json        what this is, for people; written when all parts are there
    lock              held by the process that decodes

A part appears when it is complete, so whatever ends a process, finished parts are kept and none is half-written. Parts
are read by position (`pread`) and not mapped into memory, which is as fast: the kernel's page cache keeps them in
either case, but a mapped file that is truncated, or lies on a failing disk, kills the process that reads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from nasfast.data.augment import Augmentation, Views, render
from nasfast.data.backends import Decoded, Request
from nasfast.data.datasets import DataError, ImageSource, SubsetSource
from nasfast.runtime.files import write_atomic

_LOG = logging.getLogger(__name__)

_FORMAT = "nasfast image cache 1"
_HEADER = 256
"""Bytes of the first line of a part."""
_ENTRY = np.dtype("<u4")

_PART_BYTES, _PART_IMAGES = 32 * 2**20, 1024
"""Most that a part holds, about: each thread has one in memory, and a kill loses one per thread."""

_SAMPLED = 32
"""Photographs that are decoded to tell how large the cache of all will be."""

_RAM_SHARE, _GPU_SHARE = 1 / 2, 1 / 8
"""Of the available memory, what images may take; the processes of a machine share the first."""

_CHUNK = 8
"""Images that a thread draws at a time: so few that all threads work at the same batch."""

_REPORT_SECONDS = 30.0


class _Form:
    """What is kept of each image.

    Args:
        augmentation: what batches will show.
        side: largest short side of a photograph in pixels; None takes 8/7 of the resolution.

    Attributes:
        uniform: all are (resolution, resolution).
        channels: 1 or 3.
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
        """Of an image, for photographs of a typical one."""
        side = self.augmentation.resolution
        return (side, side, self.channels) if self.uniform else (self._side, self._side * 4 // 3, self.channels)

    def of(self, image: Image.Image) -> np.ndarray:
        """(height, width, channels) uint8 of an RGB image."""
        if self.augmentation.grey:
            image = image.convert("L")
        size, side = np.array([[image.height, image.width]]), self.augmentation.resolution
        if self.uniform:
            views = Views(np.array([[side, side]]), _whole(1, side), np.zeros(1, bool), None)
            if self.augmentation.kind == "eval":
                views = self.augmentation.views(size, epoch=0, start=0)
            return render(image, views, 0, self.augmentation).permute(1, 2, 0).numpy()
        if (short := int(size.min())) > self._side:
            # rounded as at evaluation
            fit = [self._side if length == short else self._side * length // short for length in size[0].tolist()]
            image = F.resize(image, fit, antialias=True)
        return np.asarray(image).reshape(image.height, image.width, self.channels)

    def views(self, sizes: np.ndarray, *, epoch: int, start: int) -> Views:
        """`Augmentation.views` of images as they are kept, of these (N, 2) sizes."""
        if self.augmentation.kind == "eval":
            return Views(sizes, _whole(len(sizes), self.augmentation.resolution), np.zeros(len(sizes), bool), None)
        return self.augmentation.views(sizes, epoch=epoch, start=start)


def _whole(count: int, side: int) -> np.ndarray:
    return np.tile(np.array([0, 0, side, side]), (count, 1))


def _decoded(source: ImageSource, form: _Form, index: int) -> np.ndarray | None:
    try:
        return form.of(source.image(index))
    except OSError:
        return None


class _Memory:
    """Images in memory.

    Attributes:
        sizes: (N, 2) int64 heights and widths; zeros for images that could not be read.

    Raises:
        DataError: they take more than half of the available memory.
    """

    def __init__(self, source: ImageSource, form: _Form) -> None:
        room, size, count = _memory_share(), 0, len(source)
        self._check(int(np.prod(form.shape)) * count if form.uniform else 0, room, count)
        self._array = np.zeros((count, *form.shape), np.uint8) if form.uniform else None
        self._images: list[np.ndarray | None] = []
        self.sizes = np.zeros((count, 2), np.int64)
        for index in range(count):
            if (pixels := _decoded(source, form, index)) is not None:
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
                f"{count} decoded images take {_text(size)} or more, and {_text(room)} of memory may be used for them: "
                "give a folder or a list of image files, which are cached on disk, or set data.loader=torchvision"
            )

    def load(self, index: int) -> np.ndarray | None:
        """Pixels (height, width, channels) uint8, None if the image could not be read."""
        return self._images[index]

    def array(self) -> tuple[np.ndarray, np.ndarray]:
        """(N, resolution, resolution, channels) uint8, and (N,) bool: which of them could be read."""
        return self._array, self.sizes[:, 0] > 0


class _Files:
    """Images in the files of a cache, which is made when absent.

    Args:
        source: the images, all of them files.
        form: what is kept.
        root: folder of all caches.
        workers: threads that decode.

    Attributes:
        folder: of this cache.
        sizes: (N, 2) int64 heights and widths; zeros for images that could not be read.

    Raises:
        DataError: the cache cannot be written and is not complete.
    """

    def __init__(self, source: ImageSource, form: _Form, root: Path, workers: int) -> None:
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
        digest = hashlib.blake2b(f"{_FORMAT}\n{self._form}\n{self._per_part}\n".encode(), digest_size=16)
        for index in range(len(self._source)):
            path = os.path.abspath(self._source.path(index))
            try:
                stat = os.stat(path)
                state = f"{stat.st_size}\n{stat.st_mtime_ns}"
            except OSError:
                state = "absent"
            digest.update(os.fsencode(path) + f"\0{state}\n".encode())
        return digest.hexdigest()

    def _range(self, part: int) -> range:
        return range(part * self._per_part, min((part + 1) * self._per_part, len(self._source)))

    def _path(self, part: int) -> Path:
        return self.folder / f"{part:05d}.part"

    def _head(self, part: int, table: bytes) -> bytes:
        """First line and table of a part."""
        form = {"format": _FORMAT, "key": self._key, "part": part, "images": len(self._range(part))}
        return json.dumps({**form, "crc32": zlib.crc32(table)}).ljust(_HEADER - 1).encode() + b"\n" + table

    def _open(self, workers: int) -> None:
        missing = self._scan(range(self._parts))
        description = self.folder / "cache.json"
        complete = description.exists()
        if complete and missing:
            _LOG.warning(
                "%d of %d parts of the image cache %s are missing or damaged: decoding their images again",
                len(missing), self._parts, self.folder,
            )  # fmt: skip
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
                _LOG.warning("cannot write the image cache %s (%s): going on without", self.folder, reason)
        unread = int((self.sizes[:, 0] == 0).sum())
        _LOG.info(
            "image cache %s: %d images (%s), %s%s",
            self.folder, len(self.sizes), self._form, _text(self._bytes(self.sizes).sum()),
            f"; {unread} are not in it" if unread else "",
        )  # fmt: skip

    def _bytes(self, sizes: np.ndarray) -> np.ndarray:
        return sizes[:, 0] * sizes[:, 1] * self._form.channels

    def _described(self) -> dict[str, object]:
        return {
            "format": _FORMAT, "key": self._key, "stored": str(self._form), "images": len(self.sizes),
            "images_per_part": self._per_part, "bytes": int(self._bytes(self.sizes).sum()),
            "decoder": f"Pillow {PIL.__version__}",
            "unreadable": [self._source.name(index) for index in np.flatnonzero(self.sizes[:, 0] == 0).tolist()],
        }  # fmt: skip

    def _scan(self, parts: Sequence[int]) -> list[int]:
        """Reads the tables of parts; those that are absent or damaged."""
        return [part for part in parts if not self._read_table(part)]

    def _read_table(self, part: int) -> bool:
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
        """Decodes the images of parts.

        Raises:
            OSError: no room, or the folder cannot be written.
        """
        needed, free = self._expected_bytes(parts), shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it needs about {_text(needed)}, and {_text(free)} are free there")
        _LOG.info(
            "decoding images once into the cache %s: %d of %d parts, about %s",
            self.folder, len(parts), self._parts, _text(needed),
        )  # fmt: skip
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
        images = [index for part in parts for index in self._range(part)]
        typical = float(np.prod(self._form.shape))
        if not self._form.uniform:
            sample = images[:: -(-len(images) // _SAMPLED)]
            sizes = [p.nbytes for p in (_decoded(self._source, self._form, i) for i in sample) if p is not None]
            typical = float(np.mean(sizes)) if sizes else typical
        return int(typical * len(images))

    def _write(self, part: int) -> None:
        entries, pixels = [], []
        for index in self._range(part):
            image = _decoded(self._source, self._form, index)
            if image is None:
                entries.append((0, 0, 0))
                continue
            pixels.append(image.tobytes())
            entries.append((*image.shape[:2], zlib.crc32(pixels[-1])))
        table = np.array(entries, _ENTRY).tobytes()
        write_atomic(self._path(part), b"".join([self._head(part, table), *pixels]))

    def load(self, index: int) -> np.ndarray | None:
        """Pixels (height, width, channels) uint8, from the source if the cache lacks them; None if that fails too.

        They are overwritten when the thread loads its next image.
        """
        height, width = self.sizes[index].tolist()
        size, read = height * width * self._form.channels, 0
        # one buffer for each thread: the page faults of new memory would take longer than reading
        buffer = getattr(self._local, "buffer", b"")
        if len(buffer) < size:
            buffer = self._local.buffer = bytearray(size)
        data = memoryview(buffer)[:size]
        if size:
            with contextlib.suppress(OSError), _descriptor(self._path(index // self._per_part), os.O_RDONLY) as file:
                read = os.preadv(file, [data], self._offsets[index])
        pixels = self._verified(index, data[:read])
        return self._again(index) if pixels is None else pixels

    def array(self) -> tuple[np.ndarray, np.ndarray]:
        """(N, resolution, resolution, channels) uint8, and (N,) bool: which of them could be read."""
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
                    pixels = self._again(index)
                if pixels is not None:
                    images[index], there[index] = pixels, True
        return images, there

    def _verified(self, index: int, data: bytes | memoryview) -> np.ndarray | None:
        """`data` as pixels, None unless they are those that were written; compared when first read."""
        height, width = self.sizes[index].tolist()
        if not height or len(data) != height * width * self._form.channels:
            return None
        if not self._checked[index]:
            if zlib.crc32(data) != self._sums[index]:
                return None
            self._checked[index] = True
        return np.frombuffer(data, np.uint8).reshape(height, width, self._form.channels)

    def _again(self, index: int) -> np.ndarray | None:
        """Decodes an image that is not in the cache or damaged there, and puts it back."""
        damaged = self.sizes[index, 0] > 0
        if damaged:
            with self._lock:
                if not self._warned:
                    _LOG.warning(
                        "the image cache %s is damaged, first seen at %s: decoding what is damaged again",
                        self.folder, self._source.name(index),
                    )  # fmt: skip
                self._warned = True
        pixels = _decoded(self._source, self._form, index)
        if damaged and pixels is not None:
            with contextlib.suppress(OSError):  # of another user, or no room: it is decoded again next time
                self._repair(index, pixels)
        return pixels

    def _repair(self, index: int, pixels: np.ndarray) -> None:
        if pixels.shape[:2] != tuple(self.sizes[index]) or zlib.crc32(pixels.tobytes()) != self._sums[index]:
            return  # an image changed in secret, or another version of the decoder: there is no place for it
        part = index // self._per_part
        rows = slice(self._range(part).start, self._range(part).stop)
        head = self._head(part, np.column_stack([self.sizes[rows], self._sums[rows]]).astype(_ENTRY).tobytes())
        with _descriptor(self._path(part), os.O_RDWR) as file:
            if os.pread(file, len(head), 0) == head:  # else another process has replaced the part
                os.pwrite(file, pixels.tobytes(), self._offsets[index])


@contextlib.contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Waits until no other process has the lock; false where the file system has none.

    Without a lock, processes at worst decode the same images: each part is complete when it appears.
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
            # closing would not do where a loader's worker was forked meanwhile, which has the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _memory_share() -> int:
    """Bytes of main memory that images of this process may take."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration):  # Linux alone has this file
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    # a container's limit, of either version of control groups
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            available = min(available, int(Path(path).read_text(encoding="ascii")))
    # how many processes torchrun started on this machine
    return int(available * _RAM_SHARE) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _text(size: float) -> str:
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if size >= pair[0]), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"


class _Begun(NamedTuple):
    """A batch that threads are drawing: each result is the rows of a chunk that could not be read."""

    request: Request
    images: Tensor
    results: list[Callable[[], list[int]]]


class CacheBackend:
    """Images that were decoded once; those of files are kept on disk, any others in memory.

    What is kept depends on the augmentation. Where all images are resized to the resolution, and at evaluation, batches
    equal the `torchvision` backend's; they stay in memory if they take no more than half of what is available (shared
    by the processes of a machine), and on the GPU if they take no more than an eighth of its free memory. Photographs
    are kept at their own size, or smaller with a short side of `cache_side`, on which windows are then drawn.

    A data set's own random transforms would be drawn once: leave them out.

    Args:
        source: the images; parts of a split share its cache, except at evaluation.
        augmentation: of them.
        workers: threads that decode for the cache and draw batches; 0 draws in the calling one.
        prefetch: batches the threads are ahead.
        cache_dir: where the caches are; None takes `nasfast/images` in the user's cache folder.
        cache_side: see above, in pixels; None takes 8/7 of the resolution.

    Images are decoded when the first are asked for: a run that cannot begin for other reasons has then said so.
    """

    kind = "cache"

    def __init__(
        self,
        source: ImageSource,
        augmentation: Augmentation,
        *,
        workers: int = 0,
        prefetch: int = 2,
        cache_dir: str | Path | None = None,
        cache_side: int | None = None,
    ) -> None:
        self._form, self._workers, self._prefetch = _Form(augmentation, cache_side), workers, prefetch
        self._rows = np.arange(len(source))
        if augmentation.kind != "eval":
            while isinstance(source, SubsetSource):
                source, self._rows = source.source, source.indices[self._rows]
        self._source, self._root = source, cache_dir
        self._array: Tensor | None = None
        self._there: np.ndarray | None = None

    @functools.cached_property
    def _store(self) -> _Files | _Memory:
        if any(self._source.path(index) is None for index in range(len(self._source))):
            return _Memory(self._source, self._form)
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        root = Path(self._root) if self._root else user / "nasfast" / "images"
        return _Files(self._source, self._form, root, self._workers)

    @property
    def folder(self) -> Path | None:
        """Of the cache, which is made when absent; None if it is in memory."""
        return self._store.folder if isinstance(self._store, _Files) else None

    def decode(self, requests: Sequence[Request], device: torch.device) -> Iterator[Decoded]:
        """Answers in order; on the GPU if the images are resident there, pinned if they are to go there.

        Raises:
            DataError: the cache cannot be written, or images that are no files are too large for the memory.
        """
        array = self._resident(device) if self._form.uniform else None
        if array is not None:
            yield from (self._gathered(array, request, device) for request in requests)
            return
        pool = ThreadPoolExecutor(self._workers) if self._workers else None
        begun: deque[_Begun] = deque()
        try:
            for request in requests:
                begun.append(self._begin(request, device, pool))
                if len(begun) > (self._prefetch if pool else 0):
                    yield self._finished(begun.popleft())
            while begun:
                yield self._finished(begun.popleft())
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _resident(self, device: torch.device) -> Tensor | None:
        """All images (N, resolution, resolution, C), where they fit; None if they do not."""
        size = len(self._source) * int(np.prod(self._form.shape))
        if self._array is None:
            if isinstance(self._store, _Files) and size > _memory_share():
                return None
            array, self._there = self._store.array()
            self._array = torch.from_numpy(array)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device != self._array.device and (
            device.type != "cuda" or size <= _GPU_SHARE * torch.cuda.mem_get_info(device)[0]
        ):
            self._array = self._array.to(device)
            _LOG.info("%s of decoded images are on %s", _text(size), device)
        return self._array

    def _gathered(self, array: Tensor, request: Request, device: torch.device) -> Decoded:
        rows, side = self._rows[request.indices], self._form.augmentation.resolution
        kept = np.flatnonzero(self._there[rows])
        views = self._form.views(np.full((len(rows), 2), side), epoch=request.epoch, start=request.start)
        images = _windows(array, rows[kept], views.window[kept], views.mirror[kept])
        if device.type == "cuda" and not images.is_cuda:
            images = images.pin_memory()
        bad = [self._source.name(int(row)) for row in rows[~self._there[rows]]]
        return Decoded(images.permute(0, 3, 1, 2), kept, bad)

    def _begin(self, request: Request, device: torch.device, pool: ThreadPoolExecutor | None) -> _Begun:
        rows, side = self._rows[request.indices], self._form.augmentation.resolution
        # of images that are not in the cache the size does not matter here
        views = self._form.views(np.maximum(self._store.sizes[rows], 1), epoch=request.epoch, start=request.start)
        images = torch.empty(
            (len(rows), side, side, self._form.channels), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        chunks = (range(first, min(first + _CHUNK, len(rows))) for first in range(0, len(rows), _CHUNK))
        draws = [partial(self._draw, request, rows, views, images.numpy(), chunk) for chunk in chunks]
        return _Begun(request, images, [pool.submit(draw).result for draw in draws] if pool else draws)

    def _draw(self, request: Request, rows: np.ndarray, views: Views, images: np.ndarray, chunk: range) -> list[int]:
        """Draws some rows of `images` (n, resolution, resolution, C); the others of `chunk`."""
        bad = []
        for row in chunk:
            pixels = self._store.load(int(rows[row]))
            if pixels is None:
                bad.append(row)
                continue
            shown, place = views, row
            if pixels.shape[:2] != tuple(self._store.sizes[rows[row]]):
                # it was not in the cache: its own size decides, with the draws of its place in the epoch
                size = np.array([pixels.shape[:2]])
                shown, place = self._form.views(size, epoch=request.epoch, start=request.start + row), 0
            image = Image.fromarray(pixels[..., 0] if self._form.channels == 1 else pixels)
            # numpy's assignment: PyTorch's would use threads of its own
            images[row] = render(image, shown, place, self._form.augmentation).permute(1, 2, 0).numpy()
        return bad

    def _finished(self, begun: _Begun) -> Decoded:
        bad = [row for result in begun.results for row in result()]
        kept = np.setdiff1d(np.arange(len(begun.images)), bad)
        images = begun.images[torch.from_numpy(kept)] if bad else begun.images
        indices = self._rows[begun.request.indices[bad]] if bad else []
        return Decoded(images.permute(0, 3, 1, 2), kept, [self._source.name(int(index)) for index in indices])


def _on(device: torch.device, values: np.ndarray) -> Tensor:
    """Numbers on a device, without waiting for what it is doing."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _windows(array: Tensor, index: np.ndarray, window: np.ndarray, mirror: np.ndarray) -> Tensor:
    """Windows of images, as large as these, moved and black outside.

    Args:
        array: (N, S, S, C) uint8 images on any device.
        index: (n,) which of them.
        window: (n, 4) int64, see `Views`; height and width are S.
        mirror: (n,) bool.

    Returns:
        (n, S, S, C) uint8 on the same device.
    """
    count, (total, side, _, channels) = len(index), array.shape
    images = array.view(total, -1).index_select(0, _on(array.device, index))
    images = images.view(count, side, side, channels)
    if pad := int(np.abs(window[:, :2]).max(initial=0)):
        wide = side + 2 * pad
        padded = images.new_zeros((count, wide, wide, channels))
        padded[:, pad : pad + side, pad : pad + side] = images
        # a row of a window is contiguous in the padded image: every pixel is the start of one, overlapping the next
        rows = padded.view(-1).as_strided((count * wide * wide - side + 1, side * channels), (channels, 1))
        corner = np.arange(count) * wide * wide + (window[:, 0] + pad) * wide + window[:, 1] + pad
        starts = _on(array.device, corner[:, None] + np.arange(side) * wide)
        images = rows.index_select(0, starts.view(-1)).view(count, side, side, channels)
    if mirror.any():
        (mirrored,) = np.nonzero(mirror)
        flipped = images.index_select(0, _on(array.device, mirrored)).flip(2)
        order = np.arange(count)
        order[mirrored] = count + np.arange(len(mirrored))
        # on the CPU several times as fast as `index_copy_`
        images = torch.cat([images, flipped]).index_select(0, _on(array.device, order))
    return images
