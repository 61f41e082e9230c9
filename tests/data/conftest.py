"""Image files for the tests of the DALI backend."""

from __future__ import annotations

import os

import pytest
from dali_images import SIZES, encoded, photograph, photographs, write
from PIL import Image

from nasfast.data import FolderSource


@pytest.fixture(scope="session")
def album(tmp_path_factory) -> FolderSource:
    """Photographs of many sizes and kinds, all for DALI; tests must not change them."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, which neither loader does
    return write(
        tmp_path_factory.mktemp("album"),
        {
            **photographs(SIZES),
            "turned.jpg": encoded(photograph(20, 120, 80), quality=90, exif=exif),
            "grey.jpg": encoded(photograph(21, 90, 120).convert("L"), quality=90),
            "colour.png": encoded(photograph(22, 70, 50), "PNG"),
            "grey.png": encoded(photograph(23, 50, 70).convert("L"), "PNG"),
        },
    )


@pytest.fixture
def spoilt(tmp_path) -> FolderSource:
    """Good files, and one unreadable file of every kind."""
    good = photographs([(80, 60), (60, 80), (50, 50), (90, 40)])
    jpeg, png = encoded(photograph(5, 80, 60), quality=90), encoded(photograph(6, 80, 60), "PNG")
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 255
    bad = {
        "cut.jpg": jpeg[: len(jpeg) * 9 // 10],
        "cut-early.jpg": jpeg[: len(jpeg) // 2],
        "cut-progressive.jpg": encoded(photograph(7, 80, 60), progressive=True)[:-100],
        "no-end.jpg": jpeg[:-2],
        "cut.png": png[: len(png) // 2],
        "cut-but-ended.png": png[: len(png) // 2] + png[-12:],
        "flipped.png": bytes(flipped),
        "text.jpg": b"this is no image",
        "header.jpg": jpeg[:4] + b"\xff\xd9",
        "empty.jpg": b"",
        "missing.jpg": jpeg,
    }
    source = write(tmp_path, {**good, **bad})
    os.remove(next(source.path(i) for i in range(len(source)) if source.path(i).endswith("missing.jpg")))
    return source
