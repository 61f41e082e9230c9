"""Models whose forward chooses its way, and models that cannot be traced."""

import copy
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from fused_models import Candidate, Fickle, check_same, conv, disturb, fuse_all, observe, unit
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

import nasfast


class Choice(nn.Module):
    """A layer of a supernet; `how` says who chooses the candidate."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.ops = nn.ModuleList([Candidate(3), Candidate(5), nn.Identity()])
        self.how, self.active, self.forwards = how, 0, 0

    def forward(self, x: Tensor, choice: int = 1) -> Tensor:
        self.forwards += 1
        if self.how == "attribute":
            choice = self.active
        elif self.how == "numpy":
            choice = int(np.random.randint(3))
        elif self.how == "data":
            choice = int(x.sum() > 0)
        return self.ops[choice](x)


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.stem = unit()
        self.layers = nn.ModuleList([Choice(how), Choice(how)])

    def forward(self, x: Tensor, path: tuple[int, ...] = (0, 1)) -> Tensor:
        x = self.stem(x)
        for layer, choice in zip(self.layers, path, strict=True):
            x = layer(x, choice)
        return x


@pytest.mark.parametrize("how", ["argument", "attribute", "numpy", "data"])
def test_supernets_keep_choosing(how, executed):
    plain = disturb(Net(how).double())
    fused = copy.deepcopy(plain)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    report = fuse_all(fused)
    after = random.random(), float(np.random.rand()), float(torch.rand(()))
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    assert after == (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert [layer.forwards for layer in fused.layers] == [0, 0]
    check_same(dict(fused.named_buffers()), dict(plain.named_buffers()))
    assert (report.fused, len(report.chains)) == (13, 5)
    assert all(chain.residual for chain in report.chains if chain.owner != "stem")
    for step in range(12):
        for model in (plain, fused):
            model.layers[0].active, model.layers[1].active = step % 3, step // 3 % 3
        np.random.seed(step)
        want = observe(plain, x := torch.randn(2, 4, 9, 9, dtype=torch.float64), steps=2)
        np.random.seed(step)
        check_same(observe(fused, x, steps=2), want)
    assert [layer.forwards for layer in fused.layers] == [24, 24]
    assert {(1, False), (3, True)} == set(executed)


WAYS = ["stop early", "no gradient first", "read twice", "read before", "other activation", "activation twice"]
WAYS += ["normalised twice", "more convolutions", "dropped", "no residual", "concatenated", "scaled", "to the input"]


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_changes_its_way_stays_right(way):
    plain = disturb(Fickle().double())
    fused = copy.deepcopy(plain)
    assert [str(chain) for chain in fuse_all(fused).chains] == ["3x3 4->4 relu, 3x3 4->4, + residual"]
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    plain.way = fused.way = way
    check_same(observe(fused, x, steps=2), observe(plain, x, steps=2))


@pytest.mark.parametrize("pack", [lambda z: [z], lambda z: {"z": (z, 1)}], ids=["list", "dict"])
def test_results_are_tensors(pack):
    class Packing(Fickle):
        def forward(self, x: Tensor) -> object:
            return pack(super().forward(x))

    model = Packing()
    assert fuse_all(model).chains[0].residual
    model.way = "no residual"
    (result,) = (t for t in tree_leaves(model(torch.randn(2, 4, 9, 9))) if isinstance(t, Tensor))
    assert type(result) is Tensor and result.shape == (2, 4, 9, 9)


def test_a_failed_trace_leaves_the_model_untouched():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.seen = conv(4, 4, 1), nn.BatchNorm2d(4), []

        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("traced", stacklevel=1)
            self.seen.append(1)
            y = self.bn(self.conv(x))
            if x.sum() > 0:
                raise ValueError
            return y

    model = nn.Sequential(Odd(), unit())
    before = [dict(vars(m)) for m in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fuse_all(model)
    assert [str(chain) for chain in report.chains] == ["3x3 4->4 relu"]
    assert report.left[0].reason == (
        "the forward of 0 cannot be traced (symbolically traced variables cannot be used as inputs to control flow)"
    )
    assert model[0].seen == []
    nasfast.unfuse(model)
    assert [dict(vars(m)) for m in model.modules()] == before


def test_a_model_that_cannot_be_copied_is_left():
    model = nn.Sequential(unit())
    model.lock = threading.Lock()
    report = fuse_all(model)
    assert report.chains == ()
    assert "cannot be copied, so that nothing was traced (cannot pickle" in report.left[0].reason


def test_a_parametrized_weight_is_not_computed():
    """Spectral norm in training mode changes its buffers each time."""
    model = nn.Sequential(parametrizations.spectral_norm(conv(4, 4, 1)), nn.BatchNorm2d(4))
    before = copy.deepcopy(dict(model.named_buffers()))
    assert fuse_all(model).left[0].reason == "its weight is computed by the forward"
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
