"""A small supernet trained with the reference operators and with the default ones: same losses, same ranking."""

from __future__ import annotations

import pytest
import torch
from tiny import batches

from nasfast.data import DataConfig, make_loaders
from nasfast.indicators.bn_gamma import score
from nasfast.ops import resolve_backend, use_backend
from nasfast.spaces import FairSampler, digits_mini
from nasfast.supernet import Supernet
from nasfast.train import TrainConfig, train_supernet
from nasfast.train.log import read_metrics

# 25 batches of 57 images an epoch: 100 steps. At this rate the loss falls steadily; at ten times the rate a change of
# the weights by 1e-7 already moves scores by a twentieth of their spread, and no ranking could be compared.
SETTINGS = TrainConfig(epochs=4, lr=0.05, log_every=1)

# Measured: 2e-5 of the loss and 3e-5 of a score; weights changed by 1e-7 on one backend give as much.
LOSS_TOLERANCE = 1e-4
# scores closer than this are a tie: their order is rounding
TIE = 6e-5  # on AMX, which multiplies a float32 as three bfloat16 numbers, scores differed by 5.2e-5


def trained(run_dir, loader):
    net = Supernet(digits_mini(resolution=16), seed=3)
    net.freeze(classifier=True)
    train_supernet(net, loader, FairSampler(net.space, seed=3), SETTINGS, run_dir=run_dir)
    return [m["loss"] for m in read_metrics(run_dir)], score(net)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    if resolve_backend("conv_bn_act_chain", torch.empty(1)).name == "reference":
        pytest.skip("no backend but the reference is built on this machine")
    cfg = DataConfig(source="digits", batch_size=57, workers=0)
    loader, _ = make_loaders(cfg, resolution=16)
    out = tmp_path_factory.mktemp("convergence")
    default = trained(out / "default", loader)
    with use_backend("reference"):
        reference = trained(out / "reference", loader)
    return default, reference


@pytest.mark.slow
def test_the_losses_are_the_same(runs):
    (default, _), (reference, _) = runs
    assert len(default) == len(reference) == 100
    assert default == pytest.approx(reference, rel=LOSS_TOLERANCE)
    assert default[:5] == pytest.approx(reference[:5], rel=2e-6)
    assert sum(default[-10:]) < sum(default[:10])


@pytest.mark.slow
def test_the_ranking_is_the_same(runs):
    (_, default), (_, reference) = runs
    for ours, theirs in zip(default.scores, reference.scores, strict=True):
        assert ours == pytest.approx(theirs, abs=TIE)
        for one in theirs:
            for other in theirs:
                if theirs[one] - theirs[other] > 2 * TIE:
                    assert ours[one] > ours[other]
    assert max(abs(v - 1) for row in default.block for v in row.values()) > 20 * TIE


def test_one_step_on_either_backend_moves_the_same_parameters(tmp_path):
    moved = {}
    for name in ("reference", None):
        net = Supernet(digits_mini(num_classes=4, resolution=16), seed=3)
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        arguments = (net, batches(1), FairSampler(net.space, seed=3), SETTINGS.replace(epochs=1))
        if name is None:
            train_supernet(*arguments, run_dir=tmp_path / "default")
        else:
            with use_backend(name):
                train_supernet(*arguments, run_dir=tmp_path / name)
        moved[name] = {n: p.detach() - before[n] for n, p in net.named_parameters()}
    for name, change in moved["reference"].items():
        torch.testing.assert_close(moved[None][name], change, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
