"""Damaged caches: parts cut short, replaced or mixed up are noticed and made again."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable

import pytest
from cached_images import IMAGES, OWN_SIZE, SMALL, answers, assert_same, cached, damage, named, parts_of
from PIL import Image

from nasfast.data import FolderSource, cache_files
from nasfast.data.augment import Augmentation
from nasfast.data.backends import TorchvisionBackend


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


@pytest.mark.slow
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
    # parts of the same images that are stored differently, and parts of other images that are stored in the same way
    other = cached(source, Augmentation("cifar", 12, grey=True), tmp_path)
    shutil.copy(parts_of(other)[1], second)
    shutil.copytree(folder, tmp_path / "other")
    for path in (tmp_path / "other").glob("*/*"):
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    shutil.copy(parts_of(cached(FolderSource(tmp_path / "other"), SMALL, tmp_path))[2], third)
    assert_same(answers(cached(source, SMALL, tmp_path)), answers(TorchvisionBackend(source, SMALL)))


def test_a_part_replaced_by_another_process_is_not_written_into(folder, tmp_path, monkeypatch):
    """The part was made, for example, by another version of the decoder: other pixels at other places."""
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
