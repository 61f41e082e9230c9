"""Retraining from fresh and from inherited weights, and the files it leaves."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from tiny import batches, tiny_excited_space, tiny_space

from nasfast.indicators.scores import Evidence, score_paths
from nasfast.retrain import RetrainConfig, RetrainResult, load_model, retrain
from nasfast.retrain.export import read_form
from nasfast.spaces import SKIP, FairSampler
from nasfast.supernet import Supernet, build
from nasfast.train import TrainConfig, evaluate, train_supernet
from nasfast.train.checkpoint import load_checkpoint
from nasfast.train.log import read_metrics

ONE_STEP = TrainConfig(epochs=1, lr=1e-9, momentum=0.0, weight_decay=0.0)


def test_it_learns_and_reports_what_it_measured(retrained):
    result, network = retrained.result, load_model(retrained.folder)
    assert result.top1 > 0.7
    found = evaluate(network, retrained.val)
    assert (result.top1, result.top5) == (found.top1, found.top5)
    assert result.loss == pytest.approx(found.loss, rel=1e-5)
    cost = tiny_space().cost(retrained.arch)
    assert (result.macs, result.params) == (cost.macs, cost.params)
    assert sum(p.numel() for p in network.parameters()) == cost.params
    assert (result.arch, result.epochs) == (retrained.arch, 8)
    assert result.seconds > 0


def test_result_json_is_the_result(retrained):
    assert RetrainResult.from_dict(json.loads((retrained.folder / "result.json").read_text())) == retrained.result


def test_every_image_is_recorded(tmp_path):
    """The bits are those of the saved network, image by image; every third label is wrong on purpose."""
    val = [(x, torch.where(torch.arange(len(y)) % 3 == 0, (y + 1) % 4, y)) for x, y in batches(3, size=7, seed=1)]
    cfg = RetrainConfig(train=TrainConfig(epochs=4, lr=0.1))
    result = retrain(tiny_space(), (1, 0, 2, 1), batches(8), val, cfg, run_dir=tmp_path)
    network = load_model(tmp_path / "retrain" / "best").eval()
    with torch.no_grad():
        right = torch.cat([network(x).argmax(1) == y for x, y in val])
    assert (result.images, result.ranks) == (21, 1)
    assert result.correct == np.packbits(right.numpy()).tobytes().hex()
    assert right.double().mean().item() == pytest.approx(result.top1)
    assert 0 < result.top1 < 1


def test_files(retrained):
    assert {p.name for p in retrained.folder.iterdir()} >= {"model.safetensors", "config.json", "result.json"}
    assert read_form(retrained.folder / "config.json")[1] == retrained.arch
    stages = {m["stage"] for m in read_metrics(retrained.run_dir)}
    assert stages == {"retrain/best"}
    evaluations = [m["step"] for m in read_metrics(retrained.run_dir) if "eval_top1" in m]
    assert evaluations == [8 * epoch for epoch in range(1, 9)]


def test_fresh_weights_are_those_of_the_seed_and_nothing_is_frozen(tmp_path):
    """At a vanishing rate the weights stay what they were at the start."""
    cfg = RetrainConfig(init="gaussian", train=ONE_STEP)
    retrain(tiny_space(), (0, 1, 2, 0), batches(2), batches(1), cfg, run_dir=tmp_path, seed=5)
    trained = load_model(tmp_path / "retrain" / "best")
    for (name, got), want in zip(
        trained.named_parameters(), build(tiny_space(), (0, 1, 2, 0), init="gaussian", seed=5).parameters(), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert got.requires_grad
    momentum = load_checkpoint(next((tmp_path / "checkpoints").iterdir())).tensors
    assert sum(n.startswith("model.") for n in momentum) == len(trained.state_dict())


@pytest.mark.parametrize("init", ["inherit", "orthogonal"])
def test_inherited_weights_are_the_supernets(tmp_path, init):
    net = Supernet(tiny_space(), init="he", seed=3)
    cfg = RetrainConfig(init=init, train=ONE_STEP)
    retrain(tiny_space(), (0, 1, 2, SKIP), batches(2), batches(1), cfg, run_dir=tmp_path, supernet=net)
    got = load_model(tmp_path / "retrain" / "best")
    same = torch.allclose(got.blocks[2].project.conv.weight, net.layers[2].candidates[2].project.conv.weight, atol=1e-6)
    assert same == (init == "inherit")
    assert isinstance(got.blocks[3], torch.nn.Identity)
    assert all(not p.requires_grad for p in net.roles()["convolutions"])


def test_squeeze_and_excitation_goes_through_every_stage(tmp_path):
    """A supernet trains, a path of every form of SE is scored and retrained, and what is saved computes the same."""
    space, arch = tiny_excited_space(), (1, 2, 1, 0)
    net = Supernet(space, init="aligned", seed=3)
    net.freeze("bn", classifier=True)
    frozen = {n: p.detach().clone() for n, p in net.named_parameters() if not p.requires_grad}
    assert {"layers.0.candidates.1.se.excite.conv.bias", "head.1.unit.conv.weight"} < frozen.keys()
    train_supernet(net, batches(6), FairSampler(space, seed=0), TrainConfig(epochs=2, lr=0.1), run_dir=tmp_path)
    assert all(torch.equal(dict(net.named_parameters())[name], value) for name, value in frozen.items())
    assert math.isfinite(score_paths("path_loss", Evidence(net, batches(1)), [arch])[arch])
    cfg = RetrainConfig(init="inherit", train=TrainConfig(epochs=4, lr=0.1))
    result = retrain(space, arch, batches(8), batches(2, seed=1), cfg, run_dir=tmp_path, supernet=net)
    assert (result.macs, result.params) == (space.cost(arch).macs, space.cost(arch).params)
    assert result.top1 > 0.6
    got = load_model(tmp_path / "retrain" / "best")
    assert not torch.equal(got.blocks[0].se.excite.conv.bias, frozen["layers.0.candidates.1.se.excite.conv.bias"])
    assert got.blocks[3].se is None
    assert evaluate(got, batches(2, seed=1)).top1 == result.top1


def test_inherit_needs_a_supernet(tmp_path):
    with pytest.raises(ValueError, match="retrain.init='inherit' needs the trained supernet"):
        retrain(tiny_space(), (0,) * 4, batches(1), batches(1), RetrainConfig(init="inherit"), run_dir=tmp_path)


def test_another_architecture_does_not_resume_this_one(retrained, tmp_path):
    cfg = RetrainConfig(train=ONE_STEP)
    retrain(tiny_space(), (0, 0, 0, 0), batches(1), batches(1), cfg, run_dir=tmp_path)
    with pytest.raises(FileExistsError, match="retrain/best"):
        retrain(tiny_space(), (0, 0, 0, 0), batches(1), batches(1), cfg, run_dir=tmp_path)
    before = (tmp_path / "retrain/best/model.safetensors").read_bytes()
    other = retrain(tiny_space(), (0, 0, 0, 1), batches(1), batches(1), cfg, run_dir=tmp_path, resume=True)
    assert other.arch == load_model(tmp_path / "retrain/best").arch == (0, 0, 0, 1)
    assert (tmp_path / "retrain-superseded/best-0_0_0_0/model.safetensors").read_bytes() == before
