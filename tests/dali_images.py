"""Image files for the tests of the DALI backend, and what is compared of the images."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from nasfast.data import FolderSource, TorchvisionBackend
from nasfast.data.augment import Augmentation
from nasfast.data.backends import Request
from nasfast.data.dali import DaliBackend

CPU = torch.device("cpu")


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """Shapes and textures of every scale, as photographs have them."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    for octave in range(2, 9):
        noise = random.normal(size=(2**octave, 2**octave, 3)) * 90 / octave**1.5
        layers = [Image.fromarray(noise[..., c].astype(np.float32)).resize((width, height)) for c in range(3)]
        pixels += np.stack([np.asarray(layer) for layer in layers], -1)
    rows, columns = np.mgrid[:height, :width]
    for _ in range(4):
        y, x, radius = random.uniform(0, height), random.uniform(0, width), random.uniform(5, min(height, width) / 2)
        pixels[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] += random.normal(size=3) * 60
    return Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8))


def write(folder: Path, images: dict[str, bytes]) -> FolderSource:
    """Files of the classes `a` and `b` in turn."""
    for number, (name, data) in enumerate(images.items()):
        path = folder / "ab"[number % 2] / f"{number:02d}-{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return FolderSource(folder)


def encoded(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def photographs(sizes: list[tuple[int, int]]) -> dict[str, bytes]:
    """JPEG files of qualities 75 to 95, each subsampling of chroma, baseline and progressive."""
    forms = itertools.cycle(itertools.product((75, 85, 95), (0, 1, 2), (False, True)))
    return {
        f"{width}x{height}.jpg": encoded(
            photograph(number, width, height), quality=quality, subsampling=subsampling, progressive=progressive
        )
        for number, ((width, height), (quality, subsampling, progressive)) in enumerate(zip(sizes, forms, strict=False))
    }


SIZES = [(150, 113), (113, 150), (64, 64), (32, 32), (200, 90), (33, 47), (500, 375), (61, 240), (16, 16), (97, 101)]


def shares(count: int, size: int, *, epoch: int = 0) -> list[Request]:
    """All images of an epoch in a random order, `size` at a time."""
    order = np.random.default_rng(epoch).permutation(count)
    return [Request(order[start : start + size], epoch, start) for start in range(0, count, size)]


def by_dali(source, augmentation: Augmentation, requests, *, batch_size: int = 16, **settings) -> list:
    return list(DaliBackend(source, augmentation, batch_size=batch_size, **settings).decode(requests, CPU))


def by_torchvision(source, augmentation: Augmentation, requests) -> list:
    return list(TorchvisionBackend(source, augmentation).decode(requests, CPU))


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.images, b.images) and np.array_equal(a.kept, b.kept) and a.bad == b.bad
        for a, b in zip(one, other, strict=True)
    )


def distance(one, other) -> torch.Tensor:
    """Levels between the values of the images, (N, C, H, W)."""
    assert [list(d.kept) for d in one] == [list(d.kept) for d in other]
    assert [d.bad for d in one] == [d.bad for d in other]
    return torch.cat([(a.images.int() - b.images.int()).abs() for a, b in zip(one, other, strict=True)])
