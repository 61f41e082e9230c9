"""Validation accuracy of a path: what it computes, and that it leaves the supernet alone."""

from __future__ import annotations

import pytest
import torch
from tiny import batches, tiny_space

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.paths import recalibrated_accuracy
from nasfast.spaces import UniformSampler
from nasfast.supernet import Supernet, inherit
from nasfast.train import TrainConfig, evaluate, recalibrate_bn, train_supernet


def accuracy_of(net, arch, train, val, **settings) -> float:
    return recalibrated_accuracy(Evidence(net, val, loaders=(train, val), **settings), arch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Supernet:
    net = Supernet(tiny_space(), init="he", layer_indicators=False)
    net.freeze("all")
    sampler = UniformSampler(net.space, seed=1)
    train_supernet(net, batches(12), sampler, TrainConfig(epochs=10, lr=0.1), run_dir=tmp_path_factory.mktemp("spos"))
    return net


def test_it_is_the_recalibrated_standalone_network(trained):
    train, val, arch = batches(6), batches(3, seed=1), (1, 0, 2, 1)
    network = inherit(trained, arch)
    recalibrate_bn(network, train, batches=2)
    want = evaluate(network, val).top1
    assert accuracy_of(trained, arch, train, val, recalibration_batches=2) == want
    # the images must be normalised by the statistics of the path: without any the network guesses
    raw = evaluate(inherit(trained, arch).eval(), val).top1
    assert raw != want


def test_the_supernet_is_left_as_it_was(trained):
    before = {n: t.clone() for n, t in trained.state_dict().items()}
    flags = {n: p.requires_grad for n, p in trained.named_parameters()}
    trained.train()
    accuracy_of(trained, (0, 1, 2, 0), batches(2), batches(2))
    after = trained.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert flags == {n: p.requires_grad for n, p in trained.named_parameters()}
    assert trained.training
