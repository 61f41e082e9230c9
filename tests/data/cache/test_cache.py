"""The cache of decoded images: the same pixels as torchvision, found again, and unreadable images."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cached_images import CPU, IMAGES, OWN_SIZE, PHOTOS, SMALL, answers, assert_same, cached, named, requests
from PIL import Image
from torchvision.transforms.v2 import functional as F

from nasfast.data import DataError, DatasetSource, DigitsSource, FolderSource, Loader, cache_store
from nasfast.data.augment import Augmentation, render
from nasfast.data.backends import Request, TorchvisionBackend
from nasfast.data.cache import CacheBackend
from nasfast.data.datasets import split_source

EVAL = Augmentation("eval", 12)


def spoil(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).write_bytes(b"not an image")
    return [str(folder / name) for name in names]


ALL = [
    *(Augmentation(kind, 12, seed=4) for kind in ("cifar", "shift", "none", "eval")),
    *(Augmentation(kind, 12, seed=4, grey=True) for kind in ("cifar", "shift", "eval")),
    Augmentation("cifar", 80, seed=4),
    # above 64 pixels with a centre crop
    Augmentation("eval", 80, seed=4),
    OWN_SIZE,
    Augmentation("imagenet", 28, seed=4, grey=True),
]


@pytest.mark.parametrize("augmentation", ALL, ids=named)
def test_pixels_are_those_of_torchvision(folder, tmp_path, monkeypatch, augmentation):
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, augmentation))
    for workers in (0, 2):
        made = cached(source, augmentation, tmp_path, workers=workers)
        assert made.kind == "cache"
        assert_same(answers(made), want)
    monkeypatch.setattr(cache_store, "memory_share", lambda: 0)
    for workers in (0, 2):  # read from the files
        assert_same(answers(cached(source, augmentation, tmp_path, workers=workers)), want)
    assert len(list((tmp_path / "caches").glob("*/cache.json"))) == 1


def test_batches_of_a_loader_are_those_of_torchvision(folder, tmp_path):
    source = FolderSource(folder)
    for augmentation in (SMALL, OWN_SIZE):
        loaders = [
            Loader(source, backend, batch_size=5, shuffle=True, seed=1, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
            for backend in (TorchvisionBackend(source, augmentation), cached(source, augmentation, tmp_path))
        ]
        for epoch, start in ((0, 0), (1, 2)):
            for (x, y), (z, w) in zip(*(made.epoch(epoch, start=start) for made in loaders), strict=True):
                assert torch.equal(x, z)
                assert torch.equal(y, w)


def test_large_photographs_are_kept_smaller(folder, tmp_path):
    """Windows are drawn on the kept photograph: they equal torchvision's on photographs that were resized before."""
    source = FolderSource(folder)
    made = cached(source, PHOTOS, tmp_path, cache_side=14)
    smaller = []
    for index in range(IMAGES):
        image = source.image(index)
        short = min(image.size)
        if short > 14:
            image = F.resize(image, [14 if s == short else 14 * s // short for s in (image.height, image.width)])
        smaller.append(image)
    assert {min(image.size) for image in smaller} == {12, 13, 14}
    for request, got in zip(requests(IMAGES), answers(made), strict=True):
        chosen = [smaller[i] for i in request.indices]
        sizes = np.array([(image.height, image.width) for image in chosen])
        views = PHOTOS.views(sizes, epoch=request.epoch, start=request.start)
        want = torch.stack([render(image, views, row, PHOTOS) for row, image in enumerate(chosen)])
        assert torch.equal(got.images, want)
    default = cached(source, PHOTOS, tmp_path)
    assert default.folder != made.folder
    assert "short side at most 18," in json.loads((default.folder / "cache.json").read_text())["stored"]


class Arrays:
    """A map-style data set of arrays of two sizes."""

    targets = [i % 2 for i in range(IMAGES)]

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.images = [draw.integers(0, 256, (12 + i % 2, 13, 3), dtype=np.uint8) for i in range(IMAGES)]
        self.reads = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        self.reads += 1
        if index == 7:
            raise RuntimeError("damaged")
        return self.images[index], self.targets[index]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("augmentation", [SMALL, EVAL, OWN_SIZE], ids=named)
def test_images_that_are_no_files_stay_in_memory(tmp_path, monkeypatch, augmentation, workers):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dataset = Arrays()
    source = DatasetSource(dataset)
    want = answers(TorchvisionBackend(source, augmentation))
    assert [name for answer in want for name in answer.bad] == ["item 7 of Arrays"]
    dataset.reads = 0
    made = CacheBackend(source, augmentation, workers=workers)
    assert_same(answers(made), want)
    assert_same(answers(made), want)
    assert dataset.reads == IMAGES
    assert made.folder is None
    assert not list(tmp_path.iterdir())


def test_digits():
    source = DigitsSource("val")
    augmentation = Augmentation("shift", 32, seed=2)
    want = answers(TorchvisionBackend(source, augmentation), len(source), batch=64)
    assert_same(answers(CacheBackend(source, augmentation), len(source), batch=64), want)


@pytest.mark.parametrize("augmentation", [SMALL, PHOTOS], ids=named)
def test_images_too_large_for_memory_are_refused(monkeypatch, augmentation):
    monkeypatch.setattr(cache_store, "memory_share", lambda: 5000)
    with pytest.raises(DataError, match=r"22 decoded images take \d\.\d kB or more, and 5\.0 kB .* give a folder"):
        answers(CacheBackend(DatasetSource(Arrays()), augmentation), 22)


def test_memory_share_is_that_of_one_process(monkeypatch):
    whole = cache_store.memory_share()
    assert 0 < whole <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert whole / 8 < cache_store.memory_share() < whole / 2


def test_found_again_without_decoding(folder, tmp_path, monkeypatch, caplog):
    first = cached(FolderSource(folder), SMALL, tmp_path)
    want = answers(first)

    def refuse(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(FolderSource, "image", refuse)
    source = FolderSource(folder)
    source.labels = source.labels[::-1].copy()
    with caplog.at_level(logging.INFO, logger="nasfast"):
        second = cached(source, SMALL, tmp_path)
        assert_same(answers(second), want)
    assert second.folder == first.folder
    assert f"image cache {first.folder}: {IMAGES} images (resized to 12 x 12 x 3), 9.5 kB" in caplog.text


def test_a_changed_data_set_has_another_cache(folder, tmp_path):
    folders = [cached(FolderSource(folder), SMALL, tmp_path).folder]

    def changed() -> None:
        source = FolderSource(folder)
        made = cached(source, SMALL, tmp_path)
        assert made.folder not in folders
        folders.append(made.folder)
        assert_same(answers(made, len(source)), answers(TorchvisionBackend(source, SMALL), len(source)))

    first = folder / "a" / "02.png"
    times = os.stat(first)
    Image.open(folder / "a" / "04.png").save(first)
    changed()
    # the same size and another time
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    changed()
    shutil.copy(first, folder / "a" / "00a.png")
    changed()
    # in the same place of the order
    (folder / "a" / "00a.png").rename(folder / "a" / "00b.png")
    changed()
    assert all(made.is_dir() for made in folders), "old caches are left alone"


def test_other_forms_have_other_caches(folder, tmp_path):
    source = FolderSource(folder)
    others = (Augmentation("cifar", 13), Augmentation("cifar", 12, grey=True), EVAL, PHOTOS)
    kept = [cached(source, augmentation, tmp_path).folder for augmentation in (SMALL, *others)]
    assert len(set(kept)) == 5
    # random draws are not part of the kept images
    assert cached(source, Augmentation("none", 12, seed=9), tmp_path).folder == kept[0]


def test_parts_of_a_split_share_a_cache(folder, tmp_path):
    source = FolderSource(folder)
    train, val = split_source(source, 0.3, 0)
    some, _ = split_source(train, 0.3, 0)
    whole = cached(source, SMALL, tmp_path)
    for part in (train, val, some):
        made = cached(part, SMALL, tmp_path)
        assert made.folder == whole.folder
        assert_same(answers(made, len(part)), answers(TorchvisionBackend(part, SMALL), len(part)))
    # at evaluation only the part's own images are cached, because the crops of the others are not needed
    made = cached(val, EVAL, tmp_path)
    assert (made.folder / "images.npy").stat().st_size < (whole.folder / "images.npy").stat().st_size
    assert_same(answers(made, len(val)), answers(TorchvisionBackend(val, EVAL), len(val)))


def test_default_place(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert CacheBackend(FolderSource(folder), SMALL).folder.parent == tmp_path / "xdg" / "nasfast" / "images"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = CacheBackend(FolderSource(folder), SMALL)
    assert made.folder.parent == tmp_path / "home" / ".cache" / "nasfast" / "images"


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("augmentation", [SMALL, OWN_SIZE], ids=named)
def test_unreadable_images_are_skipped_and_named_at_each_use(folder, tmp_path, monkeypatch, augmentation, resident):
    if not resident:
        monkeypatch.setattr(cache_store, "memory_share", lambda: 0)
    # all of a part, and the only images of a batch
    bad = spoil(folder, *(f"a/{i:02d}.{('png', 'jpg')[i % 3 == 0]}" for i in (0, 2, 4, 6, 10)), "b/03.jpg")
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, augmentation))
    assert sorted(name for answer in want for name in answer.bad) == bad
    for workers in (0, 2):
        made = cached(source, augmentation, tmp_path, workers=workers)
        assert_same(answers(made), want)
        assert_same(answers(made), want)
    assert json.loads((made.folder / "cache.json").read_text())["unreadable"] == bad
    (alone,) = made.decode([Request(np.array([0, 1]), 0, 0)], CPU)
    assert alone.images.shape == (0, 3, augmentation.resolution, augmentation.resolution)
    assert len(alone.bad) == 2


@pytest.mark.parametrize("augmentation", [SMALL, OWN_SIZE], ids=named)
def test_an_image_that_was_unreadable_for_a_time_is_shown(folder, tmp_path, monkeypatch, augmentation):
    """This may happen on a network disk. The cache must not leave the image out for ever."""
    plain = FolderSource.image

    def fails(self, index):
        if index == 5:
            raise OSError("for now")
        return plain(self, index)

    source = FolderSource(folder)
    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "image", fails)
        cached(source, augmentation, tmp_path)
    assert_same(answers(cached(source, augmentation, tmp_path)), answers(TorchvisionBackend(source, augmentation)))
