"""Augmentation: sizes, what may move, and the statistics of the lighting noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from nasfast.data.transforms import Lighting, eval_transform, train_transform


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards, blue is 128."""
    pixels = np.full((height, width, 3), 128, np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


@pytest.mark.parametrize("augment", ["imagenet", "cifar", "shift", "none"])
@pytest.mark.parametrize("size", [(32, 32), (50, 20), (7, 9)])
def test_size_and_type(augment, size):
    out = train_transform(augment, 32)(gradient(*size))
    assert (out.shape, out.dtype) == ((3, 32, 32), torch.uint8)


def samples(augment: str, count: int = 60) -> list[torch.Tensor]:
    transform = train_transform(augment, 32)
    torch.manual_seed(0)
    return [transform(gradient(32, 32)) for _ in range(count)]


def test_none_changes_nothing():
    original = torch.from_numpy(np.array(gradient(32, 32))).permute(2, 0, 1)
    assert all(torch.equal(out, original) for out in samples("none", 3))


def flipped(out: torch.Tensor) -> bool:
    """Whether red falls to the right, judged inside the padding."""
    row = out[0, 16, 6:26].int()
    return bool(row[0] > row[-1])


def test_shift_moves_by_at_most_two_pixels_and_never_flips():
    original = torch.from_numpy(np.array(gradient(32, 32))).permute(2, 0, 1)
    padded = torch.nn.functional.pad(original, (2, 2, 2, 2))
    moves = set()
    for out in samples("shift", 150):
        found = [(r, c) for r in range(5) for c in range(5) if torch.equal(out, padded[:, r : r + 32, c : c + 32])]
        assert len(found) == 1
        moves.update(found)
    assert len(moves) == 25


def test_cifar_flips_half_of_the_images_and_moves_by_four():
    outs = samples("cifar", 100)
    assert 30 <= sum(map(flipped, outs)) <= 70
    borders = {int((out[2].amax(0) == 0).sum()) for out in outs}
    assert borders == {0, 1, 2, 3, 4}


def test_imagenet_crops_flips_and_lights():
    outs = samples("imagenet", 100)
    assert 30 <= sum(map(flipped, outs)) <= 70
    assert len({out[2, 16, 16].item() for out in outs}) > 5, "the lighting noise moves the constant blue"
    spans = [(out[0].max() - out[0].min()).item() for out in outs]
    assert min(spans) < 150, "no small crop among 100"


def test_lighting_has_the_covariance_of_the_eigenvectors():
    """Cov = 255^2 std^2 P diag(lambda^2) P^T; sample error of a variance over n = 4000: 2.2 %, five of them."""
    values = torch.tensor([0.2175, 0.0188, 0.0045], dtype=torch.float64)
    vectors = torch.tensor(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]], dtype=torch.float64
    )
    want = (255 * 0.1) ** 2 * vectors @ torch.diag(values**2) @ vectors.T
    lighting = Lighting(std=0.1)
    torch.manual_seed(0)
    shifts = torch.stack([lighting.make_params([])["shift"] for _ in range(4000)]).double()
    torch.testing.assert_close(shifts.T.cov(), want, rtol=0.11, atol=0.02)
    assert shifts.mean(0).abs().max() < 5 * want.diagonal().max().sqrt() / 4000**0.5


def test_lighting_shifts_all_pixels_alike_and_stays_in_range():
    lighting = Lighting(std=2.0)
    torch.manual_seed(0)
    base = torch.full((3, 4, 5), 128, dtype=torch.uint8)
    for _ in range(20):
        out = lighting(base)
        assert out.dtype == torch.uint8
        assert all(channel.unique().numel() == 1 for channel in out)
    dark = lighting(torch.zeros(3, 2, 2, dtype=torch.uint8)).int() + lighting(
        torch.full((3, 2, 2), 255, dtype=torch.uint8)
    )
    assert ((dark >= 0) & (dark <= 510)).all()
    torch.manual_seed(3)
    shift = lighting.make_params([])["shift"]
    torch.manual_seed(3)
    out = lighting(base)
    assert out[:, 0, 0].tolist() == (128 + shift).round().clamp(0, 255).int().tolist()


def test_evaluation_crops_the_centre():
    """Above 64 pixels the short side becomes resolution / 0.875; the crop is central, so red is symmetric about 128."""
    out = eval_transform(112)(gradient(256, 128))
    assert out.shape == (3, 112, 112)
    red, green = out[0, 56].float(), out[1, :, 56].float()
    # the middle 112 of 256 x 128 pixels
    assert (red[0].item(), red[-1].item()) == pytest.approx((72, 183), abs=2)
    assert (green[0].item(), green[-1].item()) == pytest.approx((16, 239), abs=3)


def test_evaluation_of_small_images_keeps_everything():
    original = torch.from_numpy(np.array(gradient(32, 32))).permute(2, 0, 1)
    assert torch.equal(eval_transform(32)(gradient(32, 32)), original)
    assert eval_transform(16)(gradient(40, 20)).shape == (3, 16, 16)
