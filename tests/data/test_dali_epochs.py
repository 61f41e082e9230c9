"""The DALI backend through epochs: labels, threads, several at once, files that change, and what it refuses."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from dali_images import CPU, by_dali, by_torchvision, distance, encoded, photograph, photographs, same, shares, write

from nasfast.config import ConfigError
from nasfast.data import DigitsSource, Loader, TorchvisionBackend, dali
from nasfast.data.augment import Augmentation
from nasfast.data.backends import Request
from nasfast.data.dali import DaliBackend
from nasfast.data.datasets import SubsetSource

pytest.importorskip("nvidia.dali")

pytestmark = pytest.mark.dali


def test_files_that_change_while_they_are_used(tmp_path, caplog):
    """DALI fails at windows beyond a file's new edge: PIL decodes this image, and nothing else changes."""
    source = write(tmp_path, photographs([(120, 90), (121, 90), (90, 120), (119, 90)]))
    augmentation = Augmentation("imagenet", 32)
    backend = DaliBackend(source, augmentation, batch_size=2, workers=1)
    orders = [(0, 1), (2, 3), (1, 0), (0, 1), (1, 2), (0, 1), (3, 0), (1, 0), (0, 1), (1, 3)]
    requests = [Request(np.array(rows), 0, 2 * place) for place, rows in enumerate(orders)]
    before = list(backend.decode(requests, CPU))
    Path(source.path(2)).write_bytes(encoded(photograph(9, 20, 10)))
    Path(source.path(3)).unlink()
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        after = list(backend.decode(requests, CPU))
    want = by_torchvision(source, augmentation, requests)
    assert distance(after, want).max() <= 2
    for one, other, request in zip(before, after, requests, strict=True):
        for place, row in enumerate(other.kept):
            if request.indices[row] < 2:
                assert torch.equal(one.images[row], other.images[place])
    assert [message.count("DALI cannot decode") for message in caplog.messages] == [1, 1], "each file is named once"
    assert [decoded.bad for decoded in after] == [[source.name(3)] if 3 in rows else [] for rows in orders]


def threads(want: int | None = None) -> int:
    """Threads of this process. Threads that have ended may be listed a little longer, so this waits for `want`."""
    until = time.monotonic() + 5
    while (count := len(os.listdir("/proc/self/task"))) != want is not None and time.monotonic() < until:
        time.sleep(0.01)
    return count


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_nothing_is_left_of_an_epoch_that_is_broken_off(album, request):
    augmentation, requests = Augmentation("imagenet", 32), shares(len(album), 3)
    want = by_dali(album, augmentation, requests)
    torch.randn(200, 200) @ torch.randn(200, 200)  # PyTorch's threads have started
    before = threads()
    gc.disable()  # because a collection would hide that something still holds pipelines
    request.addfinalizer(gc.enable)
    backend = DaliBackend(album, augmentation, batch_size=3)
    for consumed in (0, 1, 3):
        answers = backend.decode(requests, CPU)
        list(itertools.islice(answers, consumed))
        answers.close()
        assert threads(before) == before
    assert same(list(backend.decode(requests, CPU)), want)
    kept = len(backend._idle)
    for _ in range(3):
        assert same(list(backend.decode(requests, CPU)), want)
    assert len(backend._idle) == kept == 1, "each epoch made a pipeline of its own"
    del backend
    assert threads(before) == before


def test_two_epochs_at_once(album):
    augmentation = Augmentation("cifar", 32)
    backend = DaliBackend(album, augmentation, batch_size=4)
    first, second = shares(len(album), 4), shares(len(album), 4, epoch=1)
    pairs = list(zip(backend.decode(first, CPU), backend.decode(second, CPU), strict=True))
    assert same([one for one, _ in pairs], by_dali(album, augmentation, first))
    assert same([other for _, other in pairs], by_dali(album, augmentation, second))


@pytest.mark.parametrize("bad", [False, True])
def test_labels_of_an_epoch_are_torchvisions(album, tmp_path, bad):
    source = album
    if bad:
        images = {f"{i}-{Path(album.path(i)).name}": Path(album.path(i)).read_bytes() for i in range(len(album))}
        source = write(tmp_path, {**images, "text.jpg": b"no image", "cut.jpg": next(iter(images.values()))[:-50]})
    augmentation = Augmentation("imagenet", 32, seed=1)
    batches = []
    for backend in (DaliBackend(source, augmentation, batch_size=4), TorchvisionBackend(source, augmentation)):
        loader = Loader(source, backend, batch_size=4, shuffle=True, seed=1, max_bad_files=2)
        batches.append([list(loader.epoch(epoch)) for epoch in range(2)])
        assert len(loader.bad_files) == 2 * bad
    for got, want in zip(*batches, strict=True):
        assert [y.tolist() for _, y in got] == [y.tolist() for _, y in want]
        assert all((255 * (x - z)).abs().max() < 2.01 for (x, _), (z, _) in zip(got, want, strict=True))


def test_subsets_and_lists_have_their_files(album):
    part = SubsetSource(album, np.array([7, 2, 5]))
    request = [Request(np.array([2, 0]), 0, 0)]
    want = by_dali(album, Augmentation("none", 16), [Request(np.array([5, 7]), 0, 0)])
    assert same(by_dali(part, Augmentation("none", 16), request), want)


def test_what_it_cannot_do_is_said(monkeypatch, album):
    with pytest.raises(ConfigError, match="DALI decodes image files, and DigitsSource has none"):
        DaliBackend(DigitsSource("val"), Augmentation("shift", 32), batch_size=4)
    assert dali.refusal(album) is None
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(RuntimeError, match="pip install 'nasfast\\[dali\\]'"):
        DaliBackend(album, Augmentation("cifar", 32), batch_size=4)
