"""The cache of decoded images: torchvision's pixels, found again, and built again when damaged or unfinished."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nasfast.config import ConfigError
from nasfast.data import DataError, DatasetSource, DigitsSource, FolderSource, cache
from nasfast.data.augment import Augmentation
from nasfast.data.backends import Decoded, Request, TorchvisionBackend
from nasfast.data.cache import CacheBackend
from nasfast.data.datasets import split_source

IMAGES = 22
CPU = torch.device("cpu")
SMALL, EVAL = Augmentation("cifar", 12, seed=4), Augmentation("eval", 12)


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


def made(source, augmentation: Augmentation, tmp_path: Path, **settings) -> CacheBackend:
    return CacheBackend(source, augmentation, cache_dir=tmp_path / "caches", **settings)


def answers(backend, count: int = IMAGES) -> list[Decoded]:
    """Two epochs of shuffled batches."""
    orders = [np.random.default_rng(epoch).permutation(count) for epoch in range(2)]
    requests = [Request(order[i : i + 6], epoch, i) for epoch, order in enumerate(orders) for i in range(0, count, 6)]
    return list(backend.decode(requests, CPU))


def assert_same(got: list[Decoded], want: list[Decoded]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.images.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(one.images, other.images, rtol=0, atol=0)
        assert (one.kept.tolist(), one.bad) == (other.kept.tolist(), other.bad)


def file_of(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "caches").glob("[!.]*.npy")
    return path


@pytest.mark.parametrize(
    "augmentation",
    [
        *(Augmentation(kind, 12, seed=4) for kind in ("cifar", "shift", "none", "eval")),
        *(Augmentation(kind, 12, seed=4, grey=True) for kind in ("cifar", "shift", "eval")),
        Augmentation("cifar", 80, seed=4),
        Augmentation("eval", 80, seed=4),  # above 64 pixels with a centre crop
    ],
    ids=lambda a: f"{a.kind}-{a.resolution}{'-grey' * a.grey}",
)
def test_pixels_are_those_of_torchvision_and_stay(folder, tmp_path, monkeypatch, augmentation):
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, augmentation))
    assert_same(answers(made(source, augmentation, tmp_path, workers=2)), want)
    assert np.load(file_of(tmp_path)).shape == (IMAGES, *[augmentation.resolution] * 2, 1 if augmentation.grey else 3)
    monkeypatch.setattr(FolderSource, "image", lambda *_: pytest.fail("decoded again"))
    assert_same(answers(made(source, augmentation, tmp_path)), want)


def test_photographs_of_different_sizes_are_refused(folder):
    with pytest.raises(ConfigError, match="augment=imagenet crops photographs.*data.loader=dali or torchvision"):
        CacheBackend(FolderSource(folder), Augmentation("imagenet", 12))


class Arrays:
    """A map-style data set of arrays of two sizes; one is damaged."""

    targets = [i % 2 for i in range(IMAGES)]

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int):
        if index == 7:
            raise RuntimeError("damaged")
        draw = np.random.default_rng(index)
        return draw.integers(0, 256, (12 + index % 2, 13, 3), dtype=np.uint8), self.targets[index]


@pytest.mark.parametrize("augmentation", [SMALL, EVAL], ids=lambda a: a.kind)
@pytest.mark.parametrize("source", [DatasetSource(Arrays()), DigitsSource("val")], ids=lambda s: type(s).__name__)
def test_images_that_are_no_files_stay_in_memory(tmp_path, augmentation, source):
    backend, want = made(source, augmentation, tmp_path), answers(TorchvisionBackend(source, augmentation))
    for _ in range(2):
        assert_same(answers(backend), want)
    assert backend.folder is None and not list(tmp_path.iterdir())


def test_images_too_large_for_memory_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "free_memory", lambda: 19_000)
    source = DatasetSource(Arrays())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(DataError, match=r"22 decoded images take 9\.5 kB, and 4\.8 kB .* give a folder"):
        answers(made(source, SMALL, tmp_path))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(cache, "free_memory", lambda: 19_100)
    answers(made(source, SMALL, tmp_path))


def test_changed_images_and_other_forms_have_another_cache(folder, tmp_path):
    def files() -> int:
        source = FolderSource(folder)
        assert_same(
            answers(made(source, SMALL, tmp_path), len(source)), answers(TorchvisionBackend(source, SMALL), len(source))
        )
        return len(list((tmp_path / "caches").glob("*.npy")))

    assert files() == 1
    first = folder / "a" / "02.png"
    Image.open(folder / "a" / "04.png").save(first)
    assert files() == 2
    os.utime(first, ns=(1, 1))  # the same size and another time
    assert files() == 3
    shutil.copy(first, folder / "a" / "00a.png")
    assert files() == 4
    (folder / "a" / "00a.png").rename(folder / "a" / "00b.png")  # in the same place of the order
    assert files() == 5
    for augmentation in (Augmentation("cifar", 13), Augmentation("cifar", 12, grey=True), EVAL):
        answers(made(FolderSource(folder), augmentation, tmp_path))
    # random draws are not part of the kept images
    answers(made(FolderSource(folder), Augmentation("none", 12, seed=9), tmp_path))
    assert files() == 8


def test_parts_of_a_split_share_a_cache(folder, tmp_path):
    train, val = split_source(FolderSource(folder), 0.3, 0)
    some, _ = split_source(train, 0.3, 0)
    for part in (train, val, some):
        assert_same(
            answers(made(part, SMALL, tmp_path), len(part)), answers(TorchvisionBackend(part, SMALL), len(part))
        )
    assert np.load(file_of(tmp_path)).shape[0] == IMAGES
    # at evaluation only the part's own images are cached, because the crops of the others are not needed
    assert_same(answers(made(val, EVAL, tmp_path), len(val)), answers(TorchvisionBackend(val, EVAL), len(val)))
    assert sorted(len(np.load(path)) for path in (tmp_path / "caches").glob("*.npy")) == [len(val), IMAGES]


def test_default_place(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert CacheBackend(FolderSource(folder), SMALL).folder == tmp_path / "xdg" / "nasfast" / "images"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert CacheBackend(FolderSource(folder), SMALL).folder == tmp_path / "home" / ".cache" / "nasfast" / "images"


def test_unreadable_images_are_named_at_each_use_and_shown_once_they_can_be_read(folder, tmp_path):
    bad = [folder / "a" / f"{i:02d}.{('png', 'jpg')[i % 3 == 0]}" for i in (0, 2, 4)]
    whole = {path: (path.read_bytes(), path.stat()) for path in bad}
    for path in bad:
        stat = path.stat()
        path.write_bytes(bytes(stat.st_size))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, SMALL))
    assert {name for answer in want for name in answer.bad} == set(map(str, bad))
    for _ in range(2):
        assert_same(answers(made(source, SMALL, tmp_path)), want)
    assert json.loads(file_of(tmp_path).with_suffix(".json").read_text())["names"] == list(map(str, bad))
    (alone,) = made(source, SMALL, tmp_path).decode([Request(np.array([0, 1]), 0, 0)], CPU)
    assert alone.images.shape == (0, 3, 12, 12) and len(alone.bad) == 2
    for path, (data, stat) in whole.items():  # as on a network disk that was away
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert_same(answers(made(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))
    assert len(list((tmp_path / "caches").glob("*.npy"))) == 1


DAMAGES = {
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 4]),
    "in the head": lambda data: data[:70] + bytes([data[70] ^ 4]) + data[71:],
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "gone": lambda data: None,
}


@pytest.mark.parametrize(
    ("suffix", "how"), [*((".npy", how) for how in DAMAGES), *((".json", how) for how in ("cut", "empty", "gone"))]
)
def test_a_damaged_cache_is_built_again(folder, tmp_path, suffix, how):
    source = FolderSource(folder)
    want = answers(made(source, SMALL, tmp_path))
    target = file_of(tmp_path).with_suffix(suffix)
    whole = target.read_bytes()
    if (changed := DAMAGES[how](whole)) is None:
        target.unlink()
    else:
        target.write_bytes(changed)
    assert_same(answers(made(source, SMALL, tmp_path)), want)
    assert target.read_bytes() == whole, "not repaired"


def child(action: Callable[[], object]) -> int:
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


@pytest.mark.kill
@pytest.mark.parametrize("at", [0, 9, IMAGES - 1])
def test_a_killed_builder_leaves_no_cache_and_the_next_one_builds_it(folder, tmp_path, monkeypatch, at):
    source, plain = FolderSource(folder), FolderSource.image

    def dies(self, index):
        if index == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "image", dies)
        assert status_of(child(lambda: answers(made(source, SMALL, tmp_path, workers=2)))) == -signal.SIGKILL
    assert not list((tmp_path / "caches").glob("[!.]*.[jn]*"))
    assert_same(answers(made(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))
    assert not list((tmp_path / "caches").glob(".*")), "something is left of the killed one"


def test_a_full_disk_is_told_before_decoding(folder, tmp_path, monkeypatch):
    """A limit on the size of files, which a child of its own gets."""
    source, message = FolderSource(folder), tmp_path / "message"

    def build() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        monkeypatch.setattr(FolderSource, "image", lambda *_: os._exit(3))
        try:
            answers(made(source, SMALL, tmp_path))
        except DataError as error:
            message.write_text(str(error))

    assert status_of(child(build)) == 0
    assert "File too large. Make room" in message.read_text() and "data.cache_dir" in message.read_text()
    assert {path.suffix for path in (tmp_path / "caches").iterdir()} <= {".lock"}


def test_concurrent_builders_decode_each_image_once(folder, tmp_path, monkeypatch):
    source, plain, log = FolderSource(folder), FolderSource.image, tmp_path / "decoded"
    want = answers(TorchvisionBackend(source, SMALL))

    def logged(self, index):
        time.sleep(0.005)
        with open(log, "a") as file:
            file.write(f"{index}\n")
        return plain(self, index)

    monkeypatch.setattr(FolderSource, "image", logged)
    children = [child(lambda: assert_same(answers(made(source, SMALL, tmp_path)), want)) for _ in range(4)]
    assert [status_of(pid) for pid in children] == [0] * 4
    assert sorted(map(int, log.read_text().split())) == list(range(IMAGES))


def test_a_complete_cache_needs_nothing_to_be_written(folder, tmp_path, monkeypatch):
    source = FolderSource(folder)
    want = answers(made(source, SMALL, tmp_path))

    def refused(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache, "check_room", refused)
    assert_same(answers(made(source, SMALL, tmp_path)), want)
    with pytest.raises(DataError, match="Read-only file system.*set data.cache_dir to another place"):
        answers(made(source, EVAL, tmp_path))
