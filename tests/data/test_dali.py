"""The DALI backend: torchvision's images whatever the files hold, through epochs, threads, and files that change."""

from __future__ import annotations

import gc
import io
import itertools
import logging
import os
import struct
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nasfast.config import ConfigError
from nasfast.data import DigitsSource, FolderSource, Loader, TorchvisionBackend, dali
from nasfast.data.augment import Augmentation
from nasfast.data.backends import Request
from nasfast.data.dali import DaliBackend
from nasfast.data.datasets import SubsetSource

pytest.importorskip("nvidia.dali")

pytestmark = pytest.mark.dali

CPU = torch.device("cpu")


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """Shapes and textures of every scale, as photographs have them."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    for octave in range(2, 9):
        noise = random.normal(size=(2**octave, 2**octave, 3)) * 90 / octave**1.5
        layers = [Image.fromarray(noise[..., c].astype(np.float32)).resize((width, height)) for c in range(3)]
        pixels += np.stack([np.asarray(layer) for layer in layers], -1)
    rows, columns = np.mgrid[:height, :width]
    for _ in range(4):
        y, x, radius = random.uniform(0, height), random.uniform(0, width), random.uniform(5, min(height, width) / 2)
        pixels[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] += random.normal(size=3) * 60
    return Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8))


def write(folder: Path, images: dict[str, bytes]) -> FolderSource:
    """Files of the classes `a` and `b` in turn."""
    for number, (name, data) in enumerate(images.items()):
        path = folder / "ab"[number % 2] / f"{number:02d}-{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return FolderSource(folder)


def encoded(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def photographs(sizes: list[tuple[int, int]]) -> dict[str, bytes]:
    """JPEG files of qualities 75 to 95, each subsampling of chroma, baseline and progressive."""
    forms = itertools.cycle(itertools.product((75, 85, 95), (0, 1, 2), (False, True)))
    return {
        f"{width}x{height}.jpg": encoded(
            photograph(number, width, height), quality=quality, subsampling=subsampling, progressive=progressive
        )
        for number, ((width, height), (quality, subsampling, progressive)) in enumerate(zip(sizes, forms, strict=False))
    }


SIZES = [(150, 113), (113, 150), (64, 64), (32, 32), (200, 90), (33, 47), (500, 375), (61, 240), (16, 16), (97, 101)]


def shares(count: int, size: int, *, epoch: int = 0) -> list[Request]:
    """All images of an epoch in a random order, `size` at a time."""
    order = np.random.default_rng(epoch).permutation(count)
    return [Request(order[start : start + size], epoch, start) for start in range(0, count, size)]


def by_dali(source, augmentation: Augmentation, requests, *, batch_size: int = 16, **settings) -> list:
    return list(DaliBackend(source, augmentation, batch_size=batch_size, **settings).decode(requests, CPU))


def by_torchvision(source, augmentation: Augmentation, requests) -> list:
    return list(TorchvisionBackend(source, augmentation).decode(requests, CPU))


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.images, b.images) and np.array_equal(a.kept, b.kept) and a.bad == b.bad
        for a, b in zip(one, other, strict=True)
    )


def distance(one, other) -> torch.Tensor:
    """Levels between the values of the images, (N, C, H, W)."""
    assert [list(d.kept) for d in one] == [list(d.kept) for d in other]
    assert [d.bad for d in one] == [d.bad for d in other]
    return torch.cat([(a.images.int() - b.images.int()).abs() for a, b in zip(one, other, strict=True)])


@pytest.fixture(scope="session")
def album(tmp_path_factory) -> FolderSource:
    """Photographs of many sizes and kinds, all for DALI; tests must not change them."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, which neither loader does
    return write(
        tmp_path_factory.mktemp("album"),
        {
            **photographs(SIZES),
            "turned.jpg": encoded(photograph(20, 120, 80), quality=90, exif=exif),
            "grey.jpg": encoded(photograph(21, 90, 120).convert("L"), quality=90),
            "colour.png": encoded(photograph(22, 70, 50), "PNG"),
            "grey.png": encoded(photograph(23, 50, 70).convert("L"), "PNG"),
        },
    )


@pytest.fixture
def spoilt(tmp_path) -> FolderSource:
    """Good files, and one unreadable file of every kind."""
    good = photographs([(80, 60), (60, 80), (50, 50), (90, 40)])
    jpeg, png = encoded(photograph(5, 80, 60), quality=90), encoded(photograph(6, 80, 60), "PNG")
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 255
    bad = {
        "cut.jpg": jpeg[: len(jpeg) * 9 // 10],
        "cut-early.jpg": jpeg[: len(jpeg) // 2],
        "cut-progressive.jpg": encoded(photograph(7, 80, 60), progressive=True)[:-100],
        "no-end.jpg": jpeg[:-2],
        "cut.png": png[: len(png) // 2],
        "cut-but-ended.png": png[: len(png) // 2] + png[-12:],
        "flipped.png": bytes(flipped),
        "text.jpg": b"this is no image",
        "header.jpg": jpeg[:4] + b"\xff\xd9",
        "empty.jpg": b"",
        "missing.jpg": jpeg,
    }
    source = write(tmp_path, {**good, **bad})
    os.remove(next(source.path(i) for i in range(len(source)) if source.path(i).endswith("missing.jpg")))
    return source


# images


@pytest.mark.parametrize("grey", [False, True], ids=["rgb", "grey"])
@pytest.mark.parametrize(
    ("kind", "side"),
    [("imagenet", 96), ("imagenet", 24), ("cifar", 32), ("shift", 28), ("none", 48), ("eval", 32), ("eval", 96)],
)
def test_images_are_torchvisions_to_two_levels(album, kind, side, grey):
    augmentation = Augmentation(kind, side, grey=grey, seed=3)
    requests = shares(len(album), 5) + shares(len(album), 5, epoch=1)
    got = by_dali(album, augmentation, requests)
    levels = distance(got, by_torchvision(album, augmentation, requests))
    assert levels.max() <= 2
    assert (levels > 1).float().mean() < 1e-4
    assert levels.float().mean() < 0.1
    for decoded in got:
        assert decoded.images.shape[1:] == (1 if grey else 3, side, side)
        assert decoded.images.is_contiguous(memory_format=torch.channels_last)
        assert decoded.images.dtype == torch.uint8


def test_decoding_alone_is_exact(album):
    """Without resizing: PIL's pixels in DALI's windows."""
    whole = Augmentation("none", 64)
    square = [i for i in range(len(album)) if album.image(i).size == (64, 64)]
    request = [Request(np.array(square * 3), 0, 0)]
    assert same(by_dali(album, whole, request), by_torchvision(album, whole, request))
    # windows with their corners and edges everywhere in the blocks of the files, chroma subsampled or not
    pipeline, inbox = dali._pipeline(
        album, Augmentation("imagenet", 8), batch_size=16, threads=1, depth=1, device_id=None, render=False
    )
    sizes = np.array([album.image(i).size[::-1] for i in range(len(album))])
    for epoch in range(8):
        views = Augmentation("imagenet", 8).views(sizes, epoch=epoch, start=0)
        rows = np.arange(len(album))
        inbox.plans = iter([dali._Plan(Request(rows, epoch, 0), views, rows)] * 2)
        (windows,) = pipeline.run()
        pipeline.run()
        with pytest.raises(StopIteration):
            pipeline.run()
        pipeline.reset()
        for row, (top, left, height, width) in enumerate(views.window.tolist()):
            want = np.asarray(album.image(row))[top : top + height, left : left + width]
            assert np.array_equal(np.asarray(windows[row]), want), (row, epoch)


@pytest.mark.parametrize(("kind", "side"), [("imagenet", 96), ("cifar", 32), ("shift", 28), ("none", 48), ("eval", 96)])
@pytest.mark.parametrize("grey", [False, True], ids=["rgb", "grey"])
def test_the_operators_of_the_gpu_on_the_cpu(album, kind, side, grey):
    """What a GPU runs but for its JPEG decoder; at the edge of what is scaled down DALI's filter is another one."""
    augmentation = Augmentation(kind, side, grey=grey, seed=3)
    (request,) = shares(len(album), len(album))
    (want,) = by_torchvision(album, augmentation, [request])
    sizes = np.array([album.image(i).size[::-1] for i in request.indices])
    views = augmentation.views(sizes, epoch=request.epoch, start=request.start)
    pipeline, inbox = dali._pipeline(
        album, augmentation, batch_size=16, threads=2, depth=1, device_id=None, render=True
    )
    inbox.plans = iter([dali._Plan(request, views, np.arange(len(album)))])
    (output,) = pipeline.run()
    got = torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2)
    levels = (got.int() - want.images.int()).abs()
    assert levels.max() <= 40
    # the outermost pixels of the window, or of the resized image where a window of it is cut out
    rim = 1 + {"cifar": 4, "shift": 2}.get(kind, 0)
    assert levels[:, :, rim:-rim, rim:-rim].max() <= 2
    assert levels.float().mean() < 0.5


def sixteen_bit_png(image: Image.Image) -> bytes:
    """RGB with 16 bits per channel, which PIL reads but does not write; the low bytes are noise."""
    high = np.asarray(image).astype(np.uint16)
    pixels = (high << 8 | np.random.default_rng(0).integers(0, 256, high.shape, dtype=np.uint16)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", image.width, image.height, 16, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_other_kinds_of_files_are_left_to_pil(tmp_path):
    """They look as with PIL, to the bit, and those beside them as if they were alone."""
    picture = photograph(1, 60, 45)
    glass = picture.convert("RGBA")
    glass.putalpha(photograph(2, 60, 45).convert("L"))
    others = {
        "cmyk.jpg": encoded(picture.convert("CMYK"), quality=90),
        "junk-after-the-end.jpg": encoded(picture, quality=90) + b"\0" * 7,
        "palette.png": encoded(picture.quantize(50), "PNG"),
        "alpha.png": encoded(glass, "PNG"),
        "bit.png": encoded(picture.convert("1"), "PNG"),
        "sixteen.png": sixteen_bit_png(picture),
        "sixteen-grey.png": encoded(Image.fromarray(np.arange(2700, dtype=np.uint16).reshape(45, 60) * 24), "PNG"),
        "transparent-colour.png": encoded(picture, "PNG", transparency=picture.getpixel((3, 3))),
        "moving.png": encoded(picture, "PNG", save_all=True, append_images=[photograph(3, 60, 45)]),
        "windows.bmp": encoded(picture, "BMP"),
        "web.webp": encoded(picture, "WEBP"),
        "frames.gif": encoded(picture, "GIF"),
    }
    source = write(tmp_path, {**others, **photographs([(60, 45), (45, 60)])})
    left = [i for i in range(len(source)) if not source.path(i).endswith(("60x45.jpg", "45x60.jpg"))]
    assert len(left) == len(others)
    backend = DaliBackend(source, Augmentation("imagenet", 32), batch_size=20)
    assert [i for i in range(len(source)) if backend._size(i) == (-1, -1)] == left
    for kind in ("imagenet", "cifar", "eval"):
        augmentation = Augmentation(kind, 32)
        request = Request(np.arange(len(source)), 0, 0)
        (got,), (want,) = by_dali(source, augmentation, [request]), by_torchvision(source, augmentation, [request])
        assert torch.equal(got.images[left], want.images[left])
        assert distance([got], [want]).max() <= 2
        for row in range(len(source)):
            (alone,) = by_dali(source, augmentation, [Request(np.array([row]), 0, row)])
            assert torch.equal(alone.images[0], got.images[row])


def test_batches_without_images_for_dali(tmp_path):
    """They come at the beginning, in the middle and at the end of an epoch."""
    picture = encoded(photograph(1, 40, 40), "BMP")
    source = write(tmp_path, {**{f"{i}.bmp": picture for i in range(8)}, **photographs([(40, 40), (41, 40)])})
    other = [i for i in range(10) if source.path(i).endswith("bmp")]
    jpegs = [i for i in range(10) if source.path(i).endswith("jpg")]
    assert len(jpegs) == 2
    orders = [other[:2], other[2:4], [jpegs[0], other[4]], other[5:7], [jpegs[1], jpegs[0]], other[:2], other[3:5]]
    requests = [Request(np.array(order), 0, 2 * place) for place, order in enumerate(orders)]
    augmentation = Augmentation("none", 24)
    for chosen in (requests, requests[:2], requests[:3], requests[2:3], []):
        got = by_dali(source, augmentation, chosen)
        assert distance(got or [], by_torchvision(source, augmentation, chosen)).max() <= 2 if chosen else got == []


@pytest.mark.parametrize("kind", ["imagenet", "eval"])
def test_unreadable_files_are_those_of_pil(spoilt, kind):
    """Windows at the top too, which DALI could decode."""
    augmentation = Augmentation(kind, 32)
    backend = DaliBackend(spoilt, augmentation, batch_size=16)
    for epoch in range(6):
        for size in (4, 15):
            requests = shares(len(spoilt), size, epoch=epoch)
            got, want = list(backend.decode(requests, CPU)), by_torchvision(spoilt, augmentation, requests)
            assert distance(got, want).max() <= 2
            assert len({name for decoded in got for name in decoded.bad}) == 11


def test_a_batch_of_nothing_but_unreadable_files(spoilt):
    bad = [i for i in range(len(spoilt)) if spoilt.path(i).endswith(("cut.jpg", "flipped.png", "text.jpg"))]
    (decoded,) = by_dali(spoilt, Augmentation("cifar", 16), [Request(np.array(bad), 0, 0)])
    assert decoded.images.shape == (0, 3, 16, 16)
    assert (len(decoded.kept), decoded.bad) == (0, [spoilt.name(i) for i in bad])


def test_images_do_not_depend_on_threads_prefetching_or_batches(album):
    augmentation = Augmentation("imagenet", 48, seed=5)
    requests = shares(len(album), 3)
    want = by_dali(album, augmentation, requests, workers=1, prefetch=1)
    for workers, prefetch, batch_size in ((0, 1, 3), (2, 3, 16), (3, 7, 3)):
        settings = dict(workers=workers, prefetch=prefetch, batch_size=batch_size)
        assert same(by_dali(album, augmentation, requests, **settings), want)
    for start in range(len(requests)):
        assert same(by_dali(album, augmentation, requests[start:]), want[start:])
    together = torch.cat([decoded.images for decoded in by_dali(album, augmentation, shares(len(album), 14))])
    assert torch.equal(together, torch.cat([decoded.images for decoded in want]))


class Rendered(DaliBackend):
    """DALI does everything on the CPU, with dense batches, as on a GPU."""

    def _build(self, batch_size, depth):
        return dali._pipeline(
            self._source, self._augmentation, batch_size=batch_size, threads=2, depth=depth, device_id=None, render=True
        )

    def _outputs(self, pipeline):
        (output,) = pipeline.outputs()
        return torch.from_dlpack(output.as_tensor()).clone()


def test_batches_of_the_gpu_are_put_together_on_the_cpu(spoilt):
    """Batches have images by DALI, by PIL and none; this includes batches that fail."""
    for number in range(3):
        photograph(number, 40, 40).save(spoilt.root / "a" / f"x{number}.bmp")
    source, augmentation = FolderSource(spoilt.root), Augmentation("eval", 32)
    other = [i for i in range(len(source)) if source.path(i).endswith("bmp")]
    requests = [*shares(len(source), 4), *shares(len(source), 17, epoch=1), Request(np.array(other), 0, 0)]
    backend = Rendered(source, augmentation, batch_size=17)
    got, want = list(backend.decode(requests, CPU)), by_torchvision(source, augmentation, requests)
    assert (distance(got, want).float().mean((1, 2, 3)) < 2).all()
    assert all(decoded.images.is_contiguous(memory_format=torch.channels_last) for decoded in got)


@pytest.mark.parametrize(("kind", "side"), [("imagenet", 96), ("cifar", 32), ("eval", 96)])
def test_a_gpu_shows_the_same_windows(album, spoilt, kind, side, gpu):
    """Tolerances are guesses: nvJPEG is not libjpeg."""
    for source in (album, spoilt):
        augmentation, requests = Augmentation(kind, side), shares(len(source), 5)
        backend = DaliBackend(source, augmentation, batch_size=5)
        got = list(backend.decode(requests, torch.device(gpu)))
        assert all(decoded.images.is_cuda for decoded in got)
        assert all(decoded.images.is_contiguous(memory_format=torch.channels_last) for decoded in got)
        host = [decoded._replace(images=decoded.images.cpu()) for decoded in got]
        assert distance(host, by_torchvision(source, augmentation, requests)).float().mean() < 2
        again = list(backend.decode(requests, torch.device(gpu)))
        assert same([decoded._replace(images=decoded.images.cpu()) for decoded in again], host)


# epochs


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


def threads(at_most: int | None = None) -> int:
    """Threads of this process. Those that have ended may be listed a little longer, so this waits for `at_most`.

    Fewer are no fault: threads of tests before this one may end, too.
    """
    until = time.monotonic() + 5
    while (count := len(os.listdir("/proc/self/task"))) > (at_most or count) and time.monotonic() < until:
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
        assert threads(before) <= before
    assert same(list(backend.decode(requests, CPU)), want)
    kept = len(backend._idle)
    for _ in range(3):
        assert same(list(backend.decode(requests, CPU)), want)
    assert len(backend._idle) == kept == 1, "each epoch made a pipeline of its own"
    del backend
    assert threads(before) <= before


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
