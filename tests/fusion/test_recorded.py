"""Chains that are recorded while their module's own forward runs: when they pay."""

import copy

import pytest
import torch
from fused_models import conv, disturb
from tolerances import FLOAT32_CHAIN, assert_close
from torch import Tensor, nn

import nasfast


class Joined(nn.Module):
    """A layer like DenseNet's: it takes a tensor or several tensors, and is no well-known block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = conv(16, 32, 1), nn.BatchNorm2d(32), nn.ReLU()

    def forward(self, x: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        x = x if isinstance(x, Tensor) else torch.cat(x, 1)
        return self.act(self.norm(self.conv(x)))


def pair(training: bool) -> tuple[Joined, Joined]:
    """A layer, and its fused copy."""
    plain = disturb(Joined()).train(training).requires_grad_(False)
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    assert fused.forward.is_recorded()
    return plain, fused


def test_the_report_names_them():
    report = nasfast.fuse(Joined().requires_grad_(False))
    assert "give 120,000 numbers" in report.chains[0].runs
    assert any(
        note.startswith("1 chain in a forward that is not well known") and note.endswith(": conv")
        for note in report.notes
    )


@pytest.fixture
def recording_is_free():
    """Not here."""


# the chain has 115,200 and 131,072 results
@pytest.mark.parametrize(("pixels", "pays"), [(30, False), (32, True)])
@pytest.mark.parametrize("training", [False, True])
def test_small_chains_are_not_recorded(training, pixels, pays, folds, executed):
    plain, fused = pair(training)
    x = torch.randn(4, 16, pixels, pixels)
    for _ in range(2):
        assert_close("result", fused(x), plain(x).double(), FLOAT32_CHAIN)
    assert folds == [1] * (pays and not training)
    assert executed == [(1, False)] * (2 * (pays and training))
