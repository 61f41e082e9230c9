"""Builders of a cache that are killed, refused by the disk or concurrent, and threads that read it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cached_images import (
    CPU,
    IMAGES,
    OWN_SIZE,
    PHOTOS,
    SMALL,
    answers,
    assert_same,
    cached,
    damage,
    in_child,
    named,
    parts_of,
    requests,
    status_of,
)

from nasfast.data import DataError, FolderSource, cache_files
from nasfast.data import cache as cache_module
from nasfast.data.backends import TorchvisionBackend

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
            # the delay grows, so that the test also ends on a slow machine
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
    """Such a process may be a worker of another loader."""
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
    """Nothing can be written, even by root, for whom permissions do not count."""

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
    caplog.clear()  # an earlier test may have made the logger say more
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
