"""Caches of decoded images for their tests, and what is compared of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from nasfast.data.augment import Augmentation
from nasfast.data.backends import Decoded, Request
from nasfast.data.cache import CacheBackend

CPU = torch.device("cpu")
IMAGES = 22
SMALL = Augmentation("cifar", 12, seed=4)
PHOTOS = Augmentation("imagenet", 16, seed=4)

# with this side all of the images are kept at their own size
OWN_SIZE = Augmentation("imagenet", 28, seed=4)


def cached(source, augmentation: Augmentation, tmp_path: Path, **settings) -> CacheBackend:
    made = CacheBackend(source, augmentation, cache_dir=tmp_path / "caches", **settings)
    assert made.folder.is_dir()  # decodes
    return made


def requests(count: int, *, batch: int = 6, epoch: int = 3) -> list[Request]:
    """Shuffled batches; a batch of this size is more than one chunk."""
    order = np.random.default_rng(epoch).permutation(count)
    return [Request(order[first : first + batch], epoch, first) for first in range(0, count, batch)]


def answers(backend, count: int = IMAGES, **settings) -> list[Decoded]:
    return list(backend.decode(requests(count, **settings), CPU))


def assert_same(got: list[Decoded], want: list[Decoded]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.images.dtype == torch.uint8
        assert one.images.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(one.images, other.images, rtol=0, atol=0)
        assert one.kept.dtype == np.int64
        assert one.kept.tolist() == other.kept.tolist()
        assert one.bad == other.bad


def in_child(action: Callable[[], None]) -> int:
    """Process that runs `action` and exits with 0, or 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def named(augmentation: Augmentation) -> str:
    return f"{augmentation.kind}-{augmentation.resolution}{'-grey' * augmentation.grey}"


def damage(path: Path, how: Callable[[bytes], bytes | None]) -> None:
    """Change the file in place, as a failing disk or another program does."""
    changed = how(path.read_bytes())
    if changed is None:
        path.unlink()
        return
    with open(path, "r+b") as file:
        file.write(changed)
        file.truncate(len(changed))
