"""Fairness measures on modules whose spreads are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import tiny_space
from torch import nn

from nasfast.research.analysis.fairness import SPREADS, depth_spread, fairness, without_block_indicator
from nasfast.supernet import Supernet


class Scale(nn.Module):
    def __init__(self, factor: float, shift: float = 0.0) -> None:
        super().__init__()
        self.factor, self.shift = factor, shift

    def forward(self, x):
        return self.factor * x + self.shift


@pytest.fixture
def h() -> torch.Tensor:
    return torch.randn(16, 5, 4, 4)


def test_spreads_of_scaled_identities(h):
    equal = fairness([Scale(2.0), Scale(2.0)], h)
    assert equal == {**dict.fromkeys(SPREADS, 0), "distortion": pytest.approx(0, abs=1e-6), "f_phi": None}
    found = fairness([Scale(1.0), Scale(2.0), Scale(4.0)], h, phi=[1.0, 4.0, 16.0])
    wanted = 2 * np.log([1, 2, 4]).std()
    assert (found["f_var"], found["f_iso"], found["f_phi"]) == pytest.approx((wanted,) * 3, rel=1e-5)
    # ||a - b||^2 / (||a||^2 + ||b||^2) of multiples 1, 2 and 4
    assert found["disagreement"] == pytest.approx((1 / 5 + 9 / 17 + 4 / 20) / 3, rel=1e-5)


def test_mean_and_variance_are_per_channel(h):
    offsets = torch.arange(5.0).view(1, 5, 1, 1) * 100
    found = fairness([Scale(1.0), Scale(1.0, shift=3.0)], h + offsets)
    assert found["f_mean"] == pytest.approx(1.5 / math.sqrt(h.var((0, 2, 3), correction=0).mean()), rel=1e-3)


@pytest.mark.parametrize(
    ("candidates", "h", "message"),
    [
        ([Scale(1.0)] * 2, torch.zeros(4, 5), "two samples of h are equal"),
        ([Scale(1.0), Scale(math.inf)], torch.randn(4, 5), "result of candidate 1 is not finite"),
    ],
)
def test_what_cannot_be_compared_is_named(candidates, h, message):
    with pytest.raises(ValueError, match=message):
        fairness(candidates, h)


@pytest.fixture(scope="module")
def net() -> Supernet:
    return Supernet(tiny_space(), fused=False)


def test_a_batchnorm_at_the_end_makes_variances_equal(net):
    layer = net.layers[0]
    h = torch.randn(64, 8, 8, 8)
    with_bn = fairness(list(layer.candidates), h)
    bare = [without_block_indicator(c) for c in layer.candidates]
    without = fairness(bare, h)
    assert with_bn["f_var"] < 1e-3 < without["f_var"]
    assert with_bn["f_mean"] < 1e-6 < without["f_mean"]
    assert isinstance(bare[0].project.bn, nn.Identity) and isinstance(layer.candidates[0].project.bn, nn.BatchNorm2d)


def test_depth_spread_follows_paths(net):
    images = torch.randn(16, 3, 16, 16)
    with_bn = depth_spread(net, images, paths=6)
    assert {name: len(values) for name, values in with_bn.items()} == {"std": 4, "ratio": 4}
    # layers 0 and 2 end in a BatchNorm without residual, so that every path has variance 1 there
    assert with_bn["std"][0] < 1e-3 and with_bn["std"][2] < 1e-3 < with_bn["std"][3]
    without = depth_spread(net, images, paths=6, block_indicator=False)
    assert without["std"][0] > 1e-3
    assert all(r >= 1 for r in without["ratio"])
    assert depth_spread(net, images, paths=6) == with_bn
    assert isinstance(net.layers[0].candidates[0].project.bn, nn.BatchNorm2d)
