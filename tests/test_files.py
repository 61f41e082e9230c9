"""The atomic write and the reader of metrics."""

from __future__ import annotations

import errno
import os

import pytest

from nasfast.files import read_metrics, temporary_beside, write_atomic


def test_write_atomic_replaces(tmp_path):
    path = tmp_path / "deep" / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file"]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_write_atomic_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error, call):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        write_atomic(path, b"newer")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_two_processes_write_under_different_names(tmp_path, monkeypatch):
    mine = temporary_beside(tmp_path / "file")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert temporary_beside(tmp_path / "file") != mine


def test_read_metrics_skips_what_it_cannot_read(tmp_path):
    assert read_metrics(tmp_path) == []
    lines = (
        b'{"stage": "s", "step": 1}', b'{"stage": "s", "st', b"[1]", b'{"step": 2}', b'{"stage": "\xff', b"",
        b'{"stage": "s", "step": 3}',
    )  # fmt: skip
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 3]
