"""Caches that a failing disk or another program has changed are built again."""

from __future__ import annotations

import logging
import shutil

import numpy as np
import pytest
from cached_images import IMAGES, OWN_SIZE, SMALL, answers, assert_same, cached, damage, named
from PIL import Image

from nasfast.data import FolderSource
from nasfast.data.augment import Augmentation
from nasfast.data.backends import TorchvisionBackend


def flip(place: int):
    return lambda data: data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGES = {
    "flipped": flip(-1),
    "in the head": flip(70),
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "gone": lambda data: None,
}


CASES = [(file, how) for file in ("images.npy", "sizes.npy") for how in DAMAGES]
CASES += [("cache.json", how) for how in ("cut", "empty", "zeros", "gone")]


@pytest.mark.parametrize("augmentation", [SMALL, OWN_SIZE], ids=named)
@pytest.mark.parametrize(("file", "how"), CASES)
def test_a_damaged_cache_is_built_again(folder, tmp_path, caplog, augmentation, file, how):
    if (file, how, augmentation) == ("images.npy", "flipped", OWN_SIZE):
        pytest.skip("pixels that are mapped into memory are not compared with their digest")
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, augmentation))
    target = cached(source, augmentation, tmp_path).folder / file
    whole = target.read_bytes()
    # the description ends with a bracket and a line feed
    damage(target, DAMAGES[how] if (file, how) != ("cache.json", "cut") else lambda data: data[:-2])
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        made = cached(source, augmentation, tmp_path)
        assert_same(answers(made), want)
    assert target.read_bytes() == whole, "not repaired"
    assert len(caplog.records) == 1 and f"{made.folder} is damaged" in caplog.text


def test_damage_of_pixels_that_are_read_whole_is_found_during_a_run(folder, tmp_path):
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, SMALL))
    made = cached(source, SMALL, tmp_path)
    damage(made.folder / "images.npy", flip(-5))
    assert_same(answers(made), want)


def test_caches_of_each_other_are_not_mistaken(folder, tmp_path):
    source = FolderSource(folder)
    first = cached(source, SMALL, tmp_path).folder
    shutil.copytree(folder, tmp_path / "other")
    for path in (tmp_path / "other").glob("*/*"):
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    other = cached(FolderSource(tmp_path / "other"), SMALL, tmp_path).folder
    shutil.copy(other / "images.npy", first / "images.npy")
    assert_same(answers(cached(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))
    grey = cached(source, Augmentation("cifar", 12, seed=4, grey=True), tmp_path).folder
    shutil.copy(grey / "images.npy", first / "images.npy")
    assert_same(answers(cached(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))


def test_the_pixels_are_a_file_of_numpy(folder, tmp_path):
    made = cached(FolderSource(folder), SMALL, tmp_path).folder
    assert np.load(made / "images.npy").shape == (IMAGES * 12 * 12 * 3,)
    assert np.load(made / "sizes.npy").tolist() == [[12, 12]] * IMAGES
