"""The cache backend: images are decoded once, then batches are drawn from a store in files or in memory.

Images that all have the resolution's size stay in memory, and on the GPU where they fit.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nasfast.data import cache_store
from nasfast.data.augment import Augmentation, Views, render
from nasfast.data.backends import Decoded, Request
from nasfast.data.cache_files import FileStore
from nasfast.data.cache_store import MemoryStore, StoredForm, size_text
from nasfast.data.datasets import ImageSource, SubsetSource

_LOG = logging.getLogger(__name__)

_GPU_SHARE = 1 / 8
"""Share of a GPU's free memory that images may take."""

_CHUNK = 8
"""Images that a thread draws at a time. The number is small so that all threads work on the same batch."""


class _PendingBatch(NamedTuple):
    """A batch that threads are drawing.

    Attributes:
        request: the request that the batch answers.
        images: (n, resolution, resolution, C) uint8, which the threads fill.
        results: one function per chunk; it waits for the chunk and returns the rows that could not be read.
    """

    request: Request
    images: Tensor
    results: Sequence[Callable[[], list[int]]]


class CacheBackend:
    """Decodes each image once; keeps images that have files on disk, and any others in memory.

    What is kept depends on the augmentation. Where all images are resized to the resolution, and at evaluation, batches
    equal those of the `torchvision` backend. Such images stay in memory if they take no more than half of what is
    available (shared by the processes of a machine), and on the GPU if they take no more than an eighth of its free
    memory. Photographs for random crops are kept at their own size, or reduced to a short side of `cache_side`; windows
    are then drawn on the kept photograph.

    A data set's own random transforms are drawn only once, when its images are cached: leave them out.

    Images are decoded when the first batch is asked for, so that a run that cannot begin for another reason fails
    before it spends the time.

    Args:
        source: the images; the parts of a split share one cache, except at evaluation.
        augmentation: how the images are augmented.
        workers: threads that decode for the cache and draw batches; 0 draws in the calling thread.
        prefetch: number of batches that the threads prepare ahead.
        cache_dir: folder of the caches; None takes `nasfast/images` in the user's cache folder.
        cache_side: largest short side of a kept photograph in pixels; None takes 8/7 of the resolution.
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
        self._form, self._workers, self._prefetch = StoredForm(augmentation, cache_side), workers, prefetch
        self._rows = np.arange(len(source))
        if augmentation.kind != "eval":
            while isinstance(source, SubsetSource):
                self._rows, source = source.indices[self._rows], source.source
        self._source, self._root = source, cache_dir
        # all images, and which of them could be read
        self._all: tuple[Tensor, np.ndarray] | None = None

    @functools.cached_property
    def _store(self) -> FileStore | MemoryStore:
        if any(self._source.path(index) is None for index in range(len(self._source))):
            return MemoryStore(self._source, self._form)
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        root = Path(self._root) if self._root else user / "nasfast" / "images"
        return FileStore(self._source, self._form, root, self._workers)

    @property
    def folder(self) -> Path | None:
        """The folder of the cache, which is built if it is absent; None for a cache in memory."""
        return self._store.folder if isinstance(self._store, FileStore) else None

    def decode(self, requests: Sequence[Request], device: torch.device) -> Iterator[Decoded]:
        """Answers in the order of the requests.

        Images that stay on the GPU give batches there; other batches for a GPU are in pinned host memory.

        Raises:
            DataError: the cache cannot be written, or images without files take too much memory.
        """
        resident = self._resident(device) if self._form.uniform else None
        if resident is not None:
            yield from (self._gather(*resident, request, device) for request in requests)
            return
        pool = ThreadPoolExecutor(self._workers) if self._workers else None
        pending: deque[_PendingBatch] = deque()
        try:
            for request in requests:
                pending.append(self._start(request, device, pool))
                if len(pending) > (self._prefetch if pool else 0):
                    yield self._finish(pending.popleft())
            while pending:
                yield self._finish(pending.popleft())
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _resident(self, device: torch.device) -> tuple[Tensor, np.ndarray] | None:
        """All images (N, resolution, resolution, C), on the device if they fit there, and (N,) which could be read.

        None if memory is too small.
        """
        size = len(self._source) * int(np.prod(self._form.shape))
        if self._all is None:
            if isinstance(self._store, FileStore) and size > cache_store.memory_share():
                return None
            stored, readable = self._store.array()
            self._all = torch.from_numpy(stored), readable
        array, readable = self._all
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device != array.device and (
            device.type != "cuda" or size <= _GPU_SHARE * torch.cuda.mem_get_info(device)[0]
        ):
            self._all = array.to(device), readable
            _LOG.info("%s of decoded images are on %s", size_text(size), device)
        return self._all

    def _gather(self, array: Tensor, readable: np.ndarray, request: Request, device: torch.device) -> Decoded:
        """The answer to a request, from the resident images."""
        rows, side = self._rows[request.indices], self._form.augmentation.resolution
        kept = np.flatnonzero(readable[rows])
        views = self._form.views(np.full((len(rows), 2), side), epoch=request.epoch, start=request.start)
        images = _windows(array, rows[kept], views.window[kept], views.mirror[kept])
        if device.type == "cuda" and not images.is_cuda:
            images = images.pin_memory()
        bad = [self._source.name(int(row)) for row in rows[~readable[rows]]]
        return Decoded(images.permute(0, 3, 1, 2), kept, bad)

    def _start(self, request: Request, device: torch.device, pool: ThreadPoolExecutor | None) -> _PendingBatch:
        """Start to draw a batch, in threads if there is a pool."""
        rows, side = self._rows[request.indices], self._form.augmentation.resolution
        # images that are not in the cache have size 0; any positive size will do for them here
        views = self._form.views(np.maximum(self._store.sizes[rows], 1), epoch=request.epoch, start=request.start)
        images = torch.empty(
            (len(rows), side, side, self._form.channels), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        chunks = (range(first, min(first + _CHUNK, len(rows))) for first in range(0, len(rows), _CHUNK))
        draws = [partial(self._draw, request, rows, views, images.numpy(), chunk) for chunk in chunks]
        return _PendingBatch(request, images, [pool.submit(draw).result for draw in draws] if pool else draws)

    def _draw(self, request: Request, rows: np.ndarray, views: Views, images: np.ndarray, chunk: range) -> list[int]:
        """Draw the rows `chunk` of `images` (n, resolution, resolution, C); return those that could not be read."""
        bad = []
        for row in chunk:
            pixels = self._store.load(int(rows[row]))
            if pixels is None:
                bad.append(row)
                continue
            shown, place = views, row
            if pixels.shape[:2] != tuple(self._store.sizes[rows[row]]):
                # the image was not in the cache: its own size decides, with the draws of its place in the epoch
                size = np.array([pixels.shape[:2]])
                shown, place = self._form.views(size, epoch=request.epoch, start=request.start + row), 0
            image = Image.fromarray(pixels[..., 0] if self._form.channels == 1 else pixels)
            # numpy assigns here because PyTorch would start threads of its own
            images[row] = render(image, shown, place, self._form.augmentation).permute(1, 2, 0).numpy()
        return bad

    def _finish(self, pending: _PendingBatch) -> Decoded:
        """Wait for a batch and return it without the images that could not be read."""
        bad = [row for result in pending.results for row in result()]
        kept = np.setdiff1d(np.arange(len(pending.images)), bad)
        images = pending.images[torch.from_numpy(kept)] if bad else pending.images
        indices = self._rows[pending.request.indices[bad]] if bad else []
        return Decoded(images.permute(0, 3, 1, 2), kept, [self._source.name(int(index)) for index in indices])


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
