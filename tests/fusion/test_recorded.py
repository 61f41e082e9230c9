"""Chains that are recorded while their module's own forward runs: when they pay, and when nothing is recorded."""

import copy

import pytest
import torch
from fused_models import conv, disturb
from tolerances import FLOAT32_CHAIN, assert_close
from torch import Tensor, nn

import nasfast
from nasfast.fusion import forward


class Joined(nn.Module):
    """A layer like DenseNet's: it takes a tensor or several tensors, so that no program can replace its forward."""

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
    assert fused.forward.program is None
    return plain, fused


def test_the_report_names_them():
    report = nasfast.fuse(Joined().requires_grad_(False))
    assert "give 600,000 numbers" in report.chains[0].runs
    assert any(note.startswith("1 chain inside a forward") and note.endswith(": conv") for note in report.notes)


@pytest.fixture
def recording_is_free():
    """Not here."""


@pytest.fixture
def recordings(monkeypatch):
    """One entry for each forward that was recorded."""
    calls = []
    run = forward.run_own_forward
    monkeypatch.setattr(forward, "run_own_forward", lambda *given: calls.append(None) or run(*given))
    return calls


# the chain has 524,288 and 720,000 results
@pytest.mark.parametrize(("pixels", "pays"), [(64, False), (75, True)])
@pytest.mark.parametrize("training", [False, True])
def test_small_chains_are_not_recorded(training, pixels, pays, folds, executed):
    plain, fused = pair(training)
    x = torch.randn(4, 16, pixels, pixels)
    for _ in range(2):
        assert_close("result", fused(x), plain(x).double(), FLOAT32_CHAIN)
    assert folds == [1] * (pays and not training)
    assert executed == [(1, False)] * (2 * (pays and training))


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_tensors_are_recorded_only_where_a_chain_may_run(kind, recordings):
    plain, fused = pair(training=False)
    small, large = (kind(torch.randn(2, 4, 8, pixels, pixels)) for pixels in (9, 90))
    other = kind([*torch.randn(3, 4, 4, 9, 9), torch.randn(4, 4, 9, 9)])
    for given, expected in [(small, 1), (small, 1), (large, 2), (large, 3), (other, 4), (small, 4), (other, 4)]:
        assert_close("result", fused(given), plain(given).double(), FLOAT32_CHAIN)
        assert len(recordings) == expected


def test_a_list_is_recorded_again_when_something_else_trains(recordings):
    _, fused = pair(training=True)
    given = list(torch.randn(2, 4, 8, 9, 9))
    for _ in range(2):
        fused(given)
    assert len(recordings) == 1
    fused.norm.requires_grad_(True)
    fused(given)
    assert len(recordings) == 2
    given[1].requires_grad_(True)
    fused(given)
    assert len(recordings) == 3
