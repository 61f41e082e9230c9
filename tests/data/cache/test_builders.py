"""Builders of a cache that are killed, refused by the disk or concurrent, and threads that read it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import threading
import time
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
    in_child,
    named,
    requests,
    status_of,
)

from nasfast.data import DataError, FolderSource, cache_files
from nasfast.data import cache as cache_module
from nasfast.data.backends import TorchvisionBackend


def decodes(monkeypatch) -> list[int]:
    """A list that grows by each image that is decoded from its file."""
    plain, seen = FolderSource.image, []

    def counted(self, index):
        seen.append(index)
        return plain(self, index)

    monkeypatch.setattr(FolderSource, "image", counted)
    return seen


@pytest.mark.kill
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("at", [0, 9, IMAGES - 1])
def test_a_killed_builder_leaves_no_cache_and_the_next_one_builds_it(folder, tmp_path, monkeypatch, at, workers):
    source, plain = FolderSource(folder), FolderSource.image

    def dies(self, index):
        if index == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "image", dies)
        assert status_of(in_child(lambda: cached(source, SMALL, tmp_path, workers=workers))) == -signal.SIGKILL
    assert not list((tmp_path / "caches").glob("[!.]*/cache.json"))
    assert_same(answers(cached(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))
    assert not list((tmp_path / "caches").glob(".*")), "something is left of the killed one"


def test_full_disk_is_told_before_building(folder, tmp_path, monkeypatch):
    source = FolderSource(folder)
    monkeypatch.setattr(cache_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=9000))
    for augmentation, needed in ((SMALL, "9.5"), (PHOTOS, r"1\d\.\d")):
        with pytest.raises(DataError, match=rf"needs about {needed} kB, and 9.0 kB are free.*data.cache_dir"):
            cached(source, augmentation, tmp_path)
    assert {path.suffix for path in (tmp_path / "caches").iterdir()} == {".lock"}
    monkeypatch.setattr(cache_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=IMAGES * 12 * 12 * 3))
    cached(source, SMALL, tmp_path)


def test_full_disk_while_building(folder, tmp_path):
    """A limit on the size of files, which a child of its own gets."""
    source, message = FolderSource(folder), tmp_path / "message"

    def build() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            cached(source, SMALL, tmp_path)
        except DataError as error:
            message.write_text(str(error))

    assert status_of(in_child(build)) == 0
    assert "File too large. Make room" in message.read_text()
    assert_same(answers(cached(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))


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


def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    """Such a process may be a worker of another loader."""
    path = tmp_path / "lock"
    with cache_files._file_lock(path):
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


@pytest.fixture
def read_only(monkeypatch):
    """Nothing can be written, even by root, for whom permissions do not count."""

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    return lambda: [monkeypatch.setattr(cache_files, name, refused) for name in ("_file_lock", "write_atomic")]


@pytest.mark.parametrize("augmentation", [SMALL, OWN_SIZE], ids=named)
def test_read_only_caches_work(folder, tmp_path, read_only, augmentation):
    source = FolderSource(folder)
    want = answers(TorchvisionBackend(source, augmentation))
    cached(source, augmentation, tmp_path)
    read_only()
    assert_same(answers(cached(source, augmentation, tmp_path)), want)


def test_no_cache_where_nothing_can_be_written(folder, tmp_path, read_only):
    read_only()
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
