"""The atomic write, the check for space on the disk, sealed JSON, the reader of metrics, and encodings everywhere."""

from __future__ import annotations

import errno
import json
import os
import resource

import numpy as np
import pytest

from nasfast.runtime.files import answers_from_hex, answers_to_hex, check_room, read_metrics, seal, unseal, write_atomic


@pytest.mark.parametrize("images", [0, 1, 8, 13, 1000])
def test_right_answers_are_packed_as_numpy_packs_bits(images):
    right = np.random.default_rng(images).integers(0, 2, images, dtype=np.uint8)
    text = answers_to_hex(right.tobytes())
    assert text == np.packbits(right).tobytes().hex()
    assert answers_from_hex(text, images) == right.astype(bool).tolist()


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


def test_read_metrics_skips_what_it_cannot_read(tmp_path):
    assert read_metrics(tmp_path) == []
    lines = (
        b'{"stage": "s", "step": 1}',
        b'{"stage": "s", "st',
        b"[1]",
        b'{"step": 2}',
        b'{"stage": "\xff',
        b"",
        b'{"stage": "s", "step": 3}',
    )
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 3]


def test_no_room_is_an_error_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        check_room(tmp_path, 10_000)
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            check_room(tmp_path, 10_001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


FORM = {"b": [1, 2.5, None, "\xe9"], "a": {"1": 1e-300, "2": {}}}


@pytest.mark.parametrize("indent", [1, None])
def test_sealed_json_comes_back(indent):
    text = seal(FORM, indent=indent)
    assert unseal(text) == FORM
    assert text.isascii()
    assert text.endswith("}\n")
    assert (text.count("\n") == 1) == (indent is None)
    assert unseal(json.dumps(FORM)) == FORM  # written by hand


def test_every_changed_character_is_noticed():
    text = seal(FORM, indent=None)
    for place, character in enumerate(text.rstrip()):
        for other in "7x ":
            if other == character or (other == " " and character in " ,:"):
                continue
            changed = text[:place] + other + text[place + 1 :]
            try:
                found = unseal(changed)
            except ValueError:
                continue
            # what is left undetected is the loss of the digest's own name, and layout
            assert found == FORM or set(found) - set(FORM), changed
