"""Accuracy by hand, and recalibrated BatchNorm statistics against their definition."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import batches, tiny_space
from torch import nn

from nasfast.supernet import build
from nasfast.train import evaluate, recalibrate_bn


def test_top1_top5_and_loss_by_hand():
    """Seven classes, five images in batches of 3 and 2; the rank of the true class is 0, 1, 4, 5 and 6."""
    logits = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1]]).repeat(5, 1)
    labels = torch.tensor([0, 1, 4, 5, 6])
    rows = torch.arange(5.0).view(5, 1, 1, 1)
    loader = [(rows[:3], labels[:3]), (rows[3:], labels[3:])]
    found = evaluate(lambda x: logits[x.flatten().long()], loader)
    total = math.log(sum(math.exp(v) for v in range(1, 8)))
    loss = sum(total - v for v in (7, 6, 3, 2, 1)) / 5
    assert (found.top1, found.top5, found.images) == (0.2, 0.6, 5)
    assert found.loss == pytest.approx(loss, rel=1e-6)


def test_fewer_than_five_classes_are_all_in_the_top5():
    found = evaluate(
        lambda x: torch.tensor([[1.0, 2.0]]).expand(len(x), 2), [(torch.zeros(4, 3, 2, 2), torch.tensor([0, 1, 0, 0]))]
    )
    assert (found.top1, found.top5) == (0.25, 1.0)


def test_parts_keep_their_own_modes():
    """A BatchNorm that was frozen in evaluation mode stays frozen, and one in training mode does not train."""
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 8 * 8, 4))
    for modes in ((True, False), (False, True)):
        network.train(modes[0])
        network[0].train(modes[1])
        before = {name: t.clone() for name, t in network.state_dict().items()}
        evaluate(network, batches(2, resolution=8))
        assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
        assert (network.training, network[0].training) == modes
        recalibrate_bn(network, batches(2, resolution=8), batches=2)
        assert network[0].num_batches_tracked == 2
        assert (network.training, network[0].training) == modes


def test_an_empty_loader_is_an_error():
    with pytest.raises(ValueError, match="gave no image"):
        evaluate(lambda x: x, [])


def test_recalibration_is_the_average_over_batches():
    """Mean of the batch means and of the unbiased batch variances, of the first `batches` batches only."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(), nn.BatchNorm2d(4, track_running_stats=False)
    )
    loader = batches(6, size=5)
    network.eval()
    with torch.no_grad():
        network[1].running_mean.fill_(9)
        network[1].running_var.fill_(9)
        outs = [network[0](x) for x, _ in loader[:4]]
    recalibrate_bn(network, loader, batches=4)
    mean = torch.stack([y.mean((0, 2, 3)) for y in outs]).mean(0)
    var = torch.stack([y.var((0, 2, 3)) for y in outs]).mean(0)
    torch.testing.assert_close(network[1].running_mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(network[1].running_var, var, rtol=1e-5, atol=1e-6)
    assert network[1].num_batches_tracked == 4
    assert network[1].momentum == 0.3
    assert not network.training
    assert network[3].running_mean is None
    recalibrate_bn(network.train(), loader, batches=1)
    assert network.training
    torch.testing.assert_close(network[1].running_mean, outs[0].mean((0, 2, 3)), rtol=1e-5, atol=1e-6)


def test_recalibration_changes_statistics_only():
    network = build(tiny_space(), (0, 1, 2, 0))
    before = {n: t.clone() for n, t in network.state_dict().items()}
    recalibrate_bn(network, batches(3), batches=3)
    for name, tensor in network.state_dict().items():
        statistic = "running" in name or "tracked" in name
        assert torch.equal(tensor, before[name]) != statistic, name


@pytest.mark.parametrize(("loader", "count"), [([], 2), (batches(1), 0)])
def test_recalibration_without_a_batch_is_refused_and_changes_nothing(loader, count):
    network = nn.BatchNorm2d(3)
    network.running_mean.fill_(9)
    with pytest.raises(ValueError, match=f"no batch to average over: the loader gave none, or batches={count}"):
        recalibrate_bn(network, loader, batches=count)
    assert network.running_mean.eq(9).all()
