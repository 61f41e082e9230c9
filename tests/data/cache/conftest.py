"""Fixtures of the tests of the cache: images in a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cached_images import IMAGES
from PIL import Image


@pytest.fixture
def folder(tmp_path) -> Path:
    """Images of two classes whose sizes differ."""
    for number in range(IMAGES):
        draw = np.random.default_rng(number)
        # smooth, so that what is resized still differs from image to image
        pixels = draw.integers(0, 256, (3, 4, 3), dtype=np.uint8)
        size = (int(draw.integers(12, 24)), int(draw.integers(12, 24)))
        path = tmp_path / "images" / "ab"[number % 2] / f"{number:02d}.{('png', 'jpg')[number % 3 == 0]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path)
    return tmp_path / "images"
