"""The DALI backend: the same images as torchvision's, whatever the files hold and however they are decoded."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from dali_images import CPU, by_dali, by_torchvision, distance, encoded, photograph, photographs, same, shares, write
from PIL import Image

from nasfast.data import FolderSource, dali
from nasfast.data.augment import Augmentation
from nasfast.data.backends import Request
from nasfast.data.dali import DaliBackend

pytest.importorskip("nvidia.dali")

pytestmark = pytest.mark.dali


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
