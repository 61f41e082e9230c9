"""Augmentation: sizes, what may move, and that draws are distributed as torchvision's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms import v2

from nasfast.data.augment import Augmentation, Views, render

SIGNIFICANCE = 1e-3
"""Of tests with fixed seeds: they fail for a wrong distribution, not by chance."""


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards, blue is 128."""
    pixels = np.full((height, width, 3), 128, np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


def pixels_of(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def views_of(augmentation: Augmentation, count: int, *, width: int = 32, height: int = 32, epoch: int = 0) -> Views:
    return augmentation.views(np.tile((height, width), (count, 1)), epoch=epoch, start=0)


def samples(augmentation: Augmentation, image: Image.Image, count: int) -> list[torch.Tensor]:
    views = views_of(augmentation, count, width=image.width, height=image.height)
    return [render(image, views, row, augmentation) for row in range(count)]


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (64, 65), (224, 224), (101, 333), (256, 256), (20, 31)])
@pytest.mark.parametrize("side", [32, 64, 65, 96, 224])
def test_evaluation_is_torchvisions(size, side):
    image = gradient(*size)
    short = side if side <= 64 else round(side / 0.875)
    want = v2.Compose([v2.Resize(short, antialias=True), v2.CenterCrop(side), v2.PILToTensor()])(image)
    (out,) = samples(Augmentation("eval", side), image, 1)
    assert torch.equal(out, want)


def test_windows_are_rendered_as_torchvision_renders_them():
    """The same crop, resize, padding and flip, from the numbers of a view."""
    image = gradient(50, 40)
    augmentation = Augmentation("imagenet", 24, seed=2)
    views = views_of(augmentation, 20, width=50, height=40)
    for row, (top, left, height, width) in enumerate(views.window.tolist()):
        want = v2.functional.resized_crop(image, top, left, height, width, [24, 24], antialias=True)
        want = pixels_of(v2.functional.horizontal_flip(want) if views.mirror[row] else want).int()
        want = (want + torch.from_numpy(views.shift[row]).int().view(3, 1, 1)).clamp(0, 255)
        assert torch.equal(render(image, views, row, augmentation).int(), want)
    augmentation = Augmentation("cifar", 24, seed=2)
    views = views_of(augmentation, 20, width=50, height=40)
    padded = v2.Compose([v2.Resize((24, 24), antialias=True), v2.Pad(4)])(image)
    for row, (top, left, height, width) in enumerate(views.window.tolist()):
        want = v2.functional.crop(padded, top + 4, left + 4, height, width)
        want = pixels_of(v2.functional.horizontal_flip(want) if views.mirror[row] else want)
        assert torch.equal(render(image, views, row, augmentation), want)


def test_draws_depend_on_seed_epoch_and_place_alone():
    sizes = np.random.default_rng(0).integers(20, 500, (40, 2))
    augmentation = Augmentation("imagenet", 32, seed=1, policy="randaugment")
    views = augmentation.views(sizes, epoch=3, start=100)

    def equal(one: Views, other: Views, rows=slice(None)) -> bool:
        return all(np.array_equal(a[rows], b) for a, b in zip(one, other, strict=True))

    assert equal(views, augmentation.views(sizes[7:19], epoch=3, start=107), slice(7, 19))
    others = sizes.copy()
    others[::2] = 30
    assert equal(
        Views(*(field[1::2] for field in views)),
        Views(*(field[1::2] for field in augmentation.views(others, epoch=3, start=100))),
    ), "the view of an image depends on the size of another"
    assert not equal(views, augmentation.views(sizes, epoch=4, start=100))
    assert not equal(views, augmentation.views(sizes, epoch=3, start=101))
    assert not equal(views, Augmentation("imagenet", 32, seed=2, policy="randaugment").views(sizes, epoch=3, start=100))
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    augmentation.views(sizes, epoch=0, start=0)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])


COUNT = 4000


def same_distribution(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Two-sample Kolmogorov-Smirnov; with ties, which whole pixels make, it is on the careful side."""
    assert stats.ks_2samp(ours, theirs).pvalue > SIGNIFICANCE


def crops(size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Windows (top, left, height, width) of ours and of torchvision's RandomResizedCrop."""
    height, width = size
    ours = views_of(Augmentation("imagenet", 32, seed=7), COUNT, width=width, height=height).window
    transform, image = v2.RandomResizedCrop(32, antialias=True), [torch.empty(3, height, width, dtype=torch.uint8)]
    theirs = [transform.make_params(image) for _ in range(COUNT)]
    return ours, np.array([[params[name] for name in ("top", "left", "height", "width")] for params in theirs])


# the last is so long that no draw may fit and the centre is taken, for most images
@pytest.mark.parametrize("size", [(375, 500), (500, 333), (32, 32), (60, 600)], ids=str)
def test_random_resized_crops_are_distributed_as_torchvisions(size):
    ours, theirs = crops(size)
    for windows in (ours, theirs):
        assert (windows[:, :2] >= 0).all()
        assert (windows[:, :2] + windows[:, 2:] <= size).all()
    rest = [np.array(size) - windows[:, 2:] for windows in (ours, theirs)]
    features = [
        {
            "area": windows[:, 2] * windows[:, 3],
            "ratio": windows[:, 3] / windows[:, 2],
            "height": windows[:, 2],
            "width": windows[:, 3],
            "top": windows[:, 0],
            "left": windows[:, 1],
            "relative top": (windows[:, 0] + 0.5) / (free[:, 0] + 1),
            "relative left": (windows[:, 1] + 0.5) / (free[:, 1] + 1),
            # of both axes together: dependence that the marginal distributions do not show
            "place and size": windows[:, 0] * free[:, 1] - windows[:, 1] * free[:, 0],
        }
        for windows, free in zip((ours, theirs), rest, strict=True)
    ]
    for name, values in features[0].items():
        result = stats.ks_2samp(values, features[1][name])
        assert result.pvalue > SIGNIFICANCE, (name, result)


@pytest.mark.parametrize(("kind", "padding"), [("cifar", 4), ("shift", 2), ("none", 0)])
def test_padded_crops_are_distributed_as_torchvisions(kind, padding):
    """Every place alike: chi-square over the (2 padding + 1)^2 of them, for ours and for torchvision's."""
    transform, image = v2.RandomCrop(32, padding=padding), [torch.empty(3, 32, 32, dtype=torch.uint8)]
    theirs = [transform.make_params(image) for _ in range(COUNT)]
    places = [
        views_of(Augmentation(kind, 32, seed=3), COUNT).window[:, :2] + padding,
        np.array([[params["top"], params["left"]] for params in theirs]),
    ]
    side = 2 * padding + 1
    for place in places:
        counts = np.bincount(place[:, 0] * side + place[:, 1], minlength=side**2)
        assert len(counts) == side**2
        assert side == 1 or stats.chisquare(counts).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(("kind", "rate"), [("imagenet", 0.5), ("cifar", 0.5), ("shift", 0), ("none", 0), ("eval", 0)])
def test_flips_are_half_of_the_images_and_depend_on_nothing_else(kind, rate):
    views = views_of(Augmentation(kind, 32, seed=4), COUNT, width=50, height=40)
    if rate == 0:
        assert not views.mirror.any()
        return
    assert stats.binomtest(int(views.mirror.sum()), COUNT, rate).pvalue > SIGNIFICANCE
    for column in range(4):
        if len(set(views.window[:, column])) > 1:
            same_distribution(views.window[views.mirror, column], views.window[~views.mirror, column])
    again = views_of(Augmentation(kind, 32, seed=4), COUNT, width=50, height=40, epoch=1)
    agree = int((views.mirror == again.mirror).sum())
    assert stats.binomtest(agree, COUNT, 0.5).pvalue > SIGNIFICANCE, "epochs flip the same images"


def test_lighting_has_the_covariance_of_the_eigenvectors():
    """Cov = 255^2 0.1^2 P diag(lambda^2) P^T, plus 1/12 of rounding; along each axis of P a normal distribution."""
    values = np.array([0.2175, 0.0188, 0.0045])
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    shift = views_of(Augmentation("imagenet", 32, seed=5), 20_000).shift.astype(np.float64)
    assert np.array_equal(shift, np.rint(shift))
    want = 25.5**2 * vectors @ np.diag(values**2) @ vectors.T + np.eye(3) / 12
    # sample error of a variance of n = 20000: 1 %, five of them
    np.testing.assert_allclose(np.cov(shift.T), want, rtol=0.05, atol=0.02)
    assert (abs(shift.mean(0)) < 5 * np.sqrt(want.diagonal() / len(shift))).all()
    found, axes = np.linalg.eigh(np.cov(shift.T))
    # the two smaller axes are lost in the rounding; the first has 96 % of the noise
    assert abs(axes[:, -1] @ vectors[:, 0] / np.linalg.norm(vectors[:, 0])) > 0.999
    assert found[-1] == pytest.approx((25.5 * values[0]) ** 2 + 1 / 12, rel=0.05)
    dithered = shift + np.random.default_rng(0).uniform(-0.5, 0.5, shift.shape)
    along = dithered @ vectors[:, 0] / np.linalg.norm(vectors[:, 0])
    assert stats.kstest(along / along.std(), "norm").pvalue > SIGNIFICANCE
