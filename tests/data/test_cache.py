"""The cache of decoded images: the torchvision backend's pixels, whatever happens to its files or its writers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from nasfast.data import DataError, DatasetSource, DigitsSource, FolderSource, Loader, cache_files, cache_store
from nasfast.data import cache as cache_module
from nasfast.data.augment import Augmentation, render
from nasfast.data.backends import Decoded, Request, TorchvisionBackend
from nasfast.data.cache import CacheBackend
from nasfast.data.datasets import split_source

CPU = torch.device("cpu")
IMAGES = 22
SMALL = Augmentation("cifar", 12, seed=4)
PHOTOS = Augmentation("imagenet", 16, seed=4)
# with this one all of the images are kept at their own size
OWN_SIZE = Augmentation("imagenet", 28, seed=4)
EVAL = Augmentation("eval", 12)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Four images in each part."""
    monkeypatch.setattr(cache_files, "_PART_IMAGES", 4)


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


def spoil(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).write_bytes(b"not an image")
    return [str(folder / name) for name in names]


def cached(source, augmentation: Augmentation, tmp_path: Path, **settings) -> CacheBackend:
    made = CacheBackend(source, augmentation, cache_dir=tmp_path / "caches", **settings)
    assert made.folder.is_dir()  # decodes
    return made


def requests(count: int, *, batch: int = 6, epoch: int = 3) -> list[Request]:
    """Shuffled, of more than one chunk for one that is as large."""
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


def parts_of(backend_or_folder) -> list[Path]:
    return sorted(getattr(backend_or_folder, "folder", backend_or_folder).glob("*.part"))


def named(augmentation: Augmentation) -> str:
    return f"{augmentation.kind}-{augmentation.resolution}{'-grey' * augmentation.grey}"


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
    assert len(list((tmp_path / "caches").iterdir())) == 1


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
    """Windows are drawn on what is kept: what torchvision makes of photographs that were resized before."""
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


# -- found again, or another


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
    assert all(len(parts_of(made)) >= 6 for made in folders), "old caches are left alone"


def test_other_forms_have_other_caches(folder, tmp_path):
    source = FolderSource(folder)
    others = (Augmentation("cifar", 13), Augmentation("cifar", 12, grey=True), EVAL, PHOTOS)
    kept = [cached(source, augmentation, tmp_path).folder for augmentation in (SMALL, *others)]
    assert len(set(kept)) == 5
    # what is drawn is not part of what is kept
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
    # not at evaluation: nobody wants crops of the training images
    made = cached(val, EVAL, tmp_path)
    assert len(parts_of(made)) < len(parts_of(whole))
    assert_same(answers(made, len(val)), answers(TorchvisionBackend(val, EVAL), len(val)))


def test_default_place(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert CacheBackend(FolderSource(folder), SMALL).folder.parent == tmp_path / "xdg" / "nasfast" / "images"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = CacheBackend(FolderSource(folder), SMALL)
    assert made.folder.parent == tmp_path / "home" / ".cache" / "nasfast" / "images"


# -- unreadable images


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
    """Such as on a network disk; without it the cache would leave the image out for ever."""
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


# -- damage


def damages(size: int, start: int) -> dict[str, Callable[[bytes], bytes | None]]:
    """Ways to damage a part of `size` bytes, whose pixels begin at `start`; None removes it."""
    draw = random.Random(0)

    def flip(place: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]

    places = [0, 30, 255, 256, start - 1, start, size - 1, *(draw.randrange(size) for _ in range(25))]
    lengths = [0, 100, 256, start, start + 5, size - 1]
    return {
        **{f"flip {place}": flip(place) for place in places},
        **{f"cut to {length}": (lambda data, length=length: data[:length]) for length in lengths},
        "longer": lambda data: data + b"\0",
        "zeros": lambda data: bytes(len(data)),
        "zero pixels": lambda data: data[:start].ljust(len(data), b"\0"),
        "gone": lambda data: None,
    }


def damage(path: Path, how: Callable[[bytes], bytes | None]) -> None:
    """In place, as a failing disk or another program does."""
    changed = how(path.read_bytes())
    if changed is None:
        path.unlink()
        return
    with open(path, "r+b") as file:
        file.write(changed)
        file.truncate(len(changed))


@pytest.mark.parametrize("augmentation", [SMALL, OWN_SIZE], ids=named)
def test_damage_found_when_a_cache_is_opened_or_read(folder, tmp_path, caplog, augmentation):
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, augmentation))
    target = parts_of(cached(source, augmentation, tmp_path))[2]
    whole = target.read_bytes()
    for name, how in damages(len(whole), 256 + 4 * 12).items():
        damage(target, how)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="nasfast"):
            made = cached(source, augmentation, tmp_path)
            assert_same(answers(made), want)
            assert_same(answers(made), want)
        assert len(caplog.records) == 1, (name, caplog.text)
        assert str(made.folder) in caplog.text
        assert target.read_bytes() == whole, f"{name}: not repaired"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("augmentation", [SMALL, OWN_SIZE], ids=named)
def test_damage_during_a_run(folder, tmp_path, caplog, monkeypatch, augmentation, workers):
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, augmentation))
    whole = {path: path.read_bytes() for path in parts_of(cached(source, augmentation, tmp_path))}
    target = list(whole)[2]
    for name, how in damages(len(whole[target]), 256 + 4 * 12).items():
        made = cached(source, augmentation, tmp_path, workers=workers)
        damage(target, how)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="nasfast"):
            assert_same(answers(made), want)
        assert len(caplog.records) <= 1, (name, caplog.text)
        # a damaged head is seen when the cache is opened the next time
        assert_same(answers(cached(source, augmentation, tmp_path)), want)
        assert target.read_bytes() == whole[target], f"{name}: not repaired"


def test_a_part_cut_short_after_its_images_were_read(folder, tmp_path):
    source = FolderSource(folder)
    made = cached(source, OWN_SIZE, tmp_path)
    want = answers(made)
    for length in (1, 200, 400):
        damage(parts_of(made)[2], lambda data, length=length: data[:-length])
        assert_same(answers(made), want)


def test_parts_of_each_other_are_not_mistaken(folder, tmp_path):
    source = FolderSource(folder)
    first, second, third = parts_of(cached(source, SMALL, tmp_path))[:3]
    shutil.copy(second, first)
    # of the same images, stored otherwise, and of others, stored in the same way
    other = cached(source, Augmentation("cifar", 12, grey=True), tmp_path)
    shutil.copy(parts_of(other)[1], second)
    shutil.copytree(folder, tmp_path / "other")
    for path in (tmp_path / "other").glob("*/*"):
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    shutil.copy(parts_of(cached(FolderSource(tmp_path / "other"), SMALL, tmp_path))[2], third)
    assert_same(answers(cached(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))


def test_a_part_replaced_by_another_process_is_not_written_into(folder, tmp_path, monkeypatch):
    """Made by another version of the decoder, say: other pixels at other places."""
    source = FolderSource(folder)
    made = cached(source, OWN_SIZE, tmp_path)
    target = parts_of(made)[1]
    plain = cache_files.decode_stored
    with monkeypatch.context() as patch:
        patch.setattr(cache_files, "decode_stored", lambda *given: plain(*given)[: 9 + given[2] % 3] // 2)
        made._store._write(1)
    changed = target.read_bytes()
    assert_same(answers(made), answers(TorchvisionBackend(source, OWN_SIZE)))
    assert target.read_bytes() == changed


def test_the_description_does_not_matter(folder, tmp_path):
    source = FolderSource(folder)
    made = cached(source, SMALL, tmp_path)
    description = made.folder / "cache.json"
    form = json.loads(description.read_text())
    assert (form["images"], form["images_per_part"], form["unreadable"]) == (IMAGES, 4, [])
    assert form["bytes"] == IMAGES * 12 * 12 * 3
    for text in ("", "{", None):
        description.unlink() if text is None else description.write_text(text)
        assert_same(answers(cached(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))
    assert json.loads(description.read_text()) == form


def test_damage_of_image_and_cache_is_an_unreadable_image(folder, tmp_path, monkeypatch):
    source = FolderSource(folder)
    made = cached(source, SMALL, tmp_path)
    damage(parts_of(made)[0], lambda data: data[:-1] + bytes([data[-1] ^ 1]))

    def fails(self, index):
        raise OSError("gone")

    monkeypatch.setattr(FolderSource, "image", fails)
    assert [name for answer in answers(made) for name in answer.bad] == [source.name(3)]


# -- interrupted, refused and concurrent builders


MOMENTS = ("before a part", "in a part", "after a part", "at the description")


def dies_at(moment: str, count: int, monkeypatch) -> None:
    """Make this process kill itself at the part number `count` that it writes."""
    plain, calls, lock = cache_files.write_atomic, 0, threading.Lock()

    def killing(path: Path, data: bytes) -> None:
        nonlocal calls
        description = path.suffix == ".json"
        with lock:
            calls += not description
            now = description if moment == "at the description" else calls == count
            if now and moment == "in a part":
                path.with_name(f".{path.name}.{os.getpid()}.tmp").write_bytes(data[: len(data) // 2])
            if now and moment != "after a part":
                os.kill(os.getpid(), signal.SIGKILL)
            plain(path, data)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(cache_files, "write_atomic", killing)


def decodes(monkeypatch) -> list[int]:
    """A list that grows by each image that is decoded from its file."""
    plain, seen = FolderSource.image, []

    def counted(self, index):
        seen.append(index)
        return plain(self, index)

    monkeypatch.setattr(FolderSource, "image", counted)
    return seen


@pytest.mark.kill
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("workers", [1, 3])
def test_killed_builders_lose_no_part(folder, tmp_path, monkeypatch, moment, workers):
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, SMALL))

    def build() -> None:
        dies_at(moment, 2, monkeypatch)
        cached(source, SMALL, tmp_path, workers=workers)

    left = 6
    for _ in range(8):
        status = status_of(in_child(build))
        (made,) = (tmp_path / "caches").iterdir()
        if status == 0:
            break
        assert status == -signal.SIGKILL
        now = 6 - len(parts_of(made))
        assert now < left or moment == "at the description"
        left = now
        if moment == "at the description":
            break
    seen = decodes(monkeypatch)
    finished = cached(source, SMALL, tmp_path)
    assert len(seen) <= 4 * left
    assert_same(answers(finished), want)
    assert not list(finished.folder.glob(".*.part.*")), "what the killed ones left is removed"


@pytest.mark.kill
def test_builders_killed_at_random_times(folder, tmp_path, monkeypatch):
    source = FolderSource(folder)
    draw = random.Random(1)
    plain = FolderSource.image

    def slow(self, index):
        time.sleep(0.002)
        return plain(self, index)

    there = [0]
    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "image", slow)
        while there[-1] < 6:
            # longer from time to time, so that it comes to an end on a slow machine too
            pid = in_child(lambda: cached(source, SMALL, tmp_path, workers=2))
            time.sleep(draw.uniform(0, 0.004 * len(there)))
            os.kill(pid, signal.SIGKILL)
            status_of(pid)
            there.append(len(list((tmp_path / "caches").glob("*/*.part"))))
    assert there == sorted(there)
    assert len(set(there)) > 2, "not killed between the parts"
    seen = decodes(monkeypatch)
    finished = cached(source, SMALL, tmp_path)
    assert not seen
    assert_same(answers(finished), answers(TorchvisionBackend(source, SMALL)))


def test_full_disk_is_told_before_building(folder, tmp_path, monkeypatch):
    source = FolderSource(folder)
    monkeypatch.setattr(cache_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=9000))
    for augmentation, needed in ((SMALL, "9.5"), (PHOTOS, r"1\d\.\d")):
        with pytest.raises(DataError, match=rf"needs about {needed} kB, and 9.0 kB are free.*data.cache_dir"):
            cached(source, augmentation, tmp_path)
    assert not list((tmp_path / "caches").glob("*/*.part"))
    monkeypatch.setattr(cache_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=IMAGES * 12 * 12 * 3))
    cached(source, SMALL, tmp_path)


def test_full_disk_while_building(folder, tmp_path, monkeypatch):
    """A limit on the size of files, which a child of its own gets after the first two parts."""
    source = FolderSource(folder)
    message = tmp_path / "message"
    message.touch()

    def build() -> None:
        plain, calls = cache_files.write_atomic, 0

        def limited(path: Path, data: bytes) -> None:
            nonlocal calls
            if calls == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            calls += 1
            plain(path, data)

        monkeypatch.setattr(cache_files, "write_atomic", limited)
        try:
            cached(source, SMALL, tmp_path)
        except DataError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            message.write_text(str(error))

    assert status_of(in_child(build)) == 0
    assert "File too large. Its finished parts are kept." in message.read_text()
    (made,) = (tmp_path / "caches").iterdir()
    assert [path.name for path in parts_of(made)] == ["00000.part", "00001.part"]
    seen = decodes(monkeypatch)
    finished = cached(source, SMALL, tmp_path)
    assert sorted(seen) == list(range(8, IMAGES))
    assert_same(answers(finished), answers(TorchvisionBackend(source, SMALL)))


def test_concurrent_builders_decode_each_image_once(folder, tmp_path, monkeypatch):
    source = FolderSource(folder)
    plain, log = FolderSource.image, tmp_path / "decoded"

    def logged(self, index):
        time.sleep(0.005)
        with open(log, "a") as file:
            file.write(f"{index}\n")
        return plain(self, index)

    def build() -> None:
        monkeypatch.setattr(FolderSource, "image", logged)
        made = cached(source, SMALL, tmp_path, workers=2)
        monkeypatch.undo()
        assert_same(answers(made), want)

    want = answers(TorchvisionBackend(source, SMALL))
    children = [in_child(build) for _ in range(4)]
    assert [status_of(pid) for pid in children] == [0] * 4
    assert sorted(map(int, log.read_text().split())) == list(range(IMAGES))


@pytest.mark.kill
def test_a_waiting_builder_goes_on_where_the_killed_one_was(folder, tmp_path, monkeypatch, caplog):
    source = FolderSource(folder)
    plain = FolderSource.image

    def slow(self, index):
        time.sleep(0.3 if index >= 8 else 0)
        return plain(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "image", slow)
        pid = in_child(lambda: cached(source, SMALL, tmp_path))
    while len(list((tmp_path / "caches").glob("*/*.part"))) < 2:
        time.sleep(0.001)
    seen = decodes(monkeypatch)
    threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
    with caplog.at_level(logging.INFO, logger="nasfast"):
        made = cached(source, SMALL, tmp_path)
    assert status_of(pid) == -signal.SIGKILL
    assert "waiting for it" in caplog.text
    assert sorted(seen) == list(range(8, IMAGES))
    assert_same(answers(made), answers(TorchvisionBackend(source, SMALL)))


def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    """Such as a worker of another loader."""
    path = tmp_path / "lock"
    with cache_files._locked(path) as held:
        assert held
        pid = in_child(lambda: time.sleep(60))
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(pid, signal.SIGKILL)
    status_of(pid)


def test_without_locks(folder, tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    source = FolderSource(folder)
    assert_same(answers(cached(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))


@contextlib.contextmanager
def read_only(monkeypatch):
    """Nothing can be written, even by root, whom permissions do not stop."""

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    plain = os.open

    def open_(path, flags, *mode, **more):
        return refused() if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else plain(path, flags, *mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(cache_files, "write_atomic", refused)
        yield


@pytest.mark.parametrize("augmentation", [SMALL, OWN_SIZE], ids=named)
def test_read_only_caches_work(folder, tmp_path, monkeypatch, caplog, augmentation):
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, augmentation))
    parts = parts_of(cached(source, augmentation, tmp_path))
    with read_only(monkeypatch), caplog.at_level(logging.WARNING, logger="nasfast"):
        assert_same(answers(cached(source, augmentation, tmp_path)), want)
        assert not caplog.records
        (parts[0].parent / "cache.json").rename(tmp_path / "cache.json")
        assert_same(answers(cached(source, augmentation, tmp_path)), want)
        assert not caplog.records, "all parts are there"
    (tmp_path / "cache.json").rename(parts[0].parent / "cache.json")
    # damage that cannot be repaired: decoded each time
    damage(parts[1], lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    damage(parts[3], lambda data: data[:-1])
    before = [path.read_bytes() for path in parts]
    with read_only(monkeypatch), caplog.at_level(logging.WARNING, logger="nasfast"):
        made = cached(source, augmentation, tmp_path)
        assert_same(answers(made), want)
        assert_same(answers(made), want)
    assert "Read-only file system" in caplog.text
    assert [path.read_bytes() for path in parts] == before


def test_no_cache_where_nothing_can_be_written(folder, tmp_path, monkeypatch):
    with read_only(monkeypatch):
        with pytest.raises(DataError, match="Read-only file system.*set data.cache_dir to another place"):
            cached(FolderSource(folder), SMALL, tmp_path)


# -- threads


def test_batches_do_not_depend_on_threads(folder, tmp_path):
    source = FolderSource(folder)
    want = answers(cached(source, PHOTOS, tmp_path), batch=20)
    for workers, prefetch in ((1, 1), (2, 1), (2, 3), (5, 2)):
        made = cached(source, PHOTOS, tmp_path, workers=workers, prefetch=prefetch)
        assert_same(answers(made, batch=20), want)
        assert_same(list(made.decode(requests(IMAGES, batch=20)[1:], CPU)), want[1:])


def test_threads_end_with_the_epoch_or_when_it_is_given_up(folder, tmp_path):
    before = threading.active_count()
    made = cached(FolderSource(folder), PHOTOS, tmp_path, workers=3)
    assert threading.active_count() == before
    for taken in (1, 2, 4):
        batches = made.decode(requests(IMAGES), CPU)
        for _ in range(taken):
            next(batches)
        assert threading.active_count() > before
        batches.close()
        assert threading.active_count() == before
    answers(made)
    assert threading.active_count() == before


def test_errors_of_threads_are_raised(folder, tmp_path, monkeypatch):
    made = cached(FolderSource(folder), PHOTOS, tmp_path, workers=2)

    def fails(*_):
        raise MemoryError("no more")

    monkeypatch.setattr(cache_module, "render", fails)
    with pytest.raises(MemoryError, match="no more"):
        answers(made)
    monkeypatch.setattr(cache_files, "decode_stored", fails)
    with pytest.raises(MemoryError, match="no more"):
        cached(FolderSource(folder), SMALL, tmp_path, workers=2)
