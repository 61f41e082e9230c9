"""Every registered score against a computation of its own, and the refusals of the registry."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from tiny import batches, tiny_macro_space, tiny_space
from torch.nn import functional as F

from nasfast import extensions
from nasfast.indicators import bn_gamma, registry
from nasfast.indicators.registry import (
    SCORES,
    ScoreError,
    all_scores,
    available,
    configured_score,
    get_score,
    list_scores,
    register,
)
from nasfast.indicators.scores import Evidence, score_paths, score_table
from nasfast.runtime import progress
from nasfast.search import search_table
from nasfast.settings import METHODS, ScoreConfig
from nasfast.spaces import FairSampler
from nasfast.supernet import Supernet, inherit
from nasfast.train import TrainConfig, evaluate, recalibrate_bn, train_supernet

HELD_OUT, MACRO = batches(4, seed=9), tiny_macro_space()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Supernet:
    net = Supernet(tiny_space(), init="aligned", layer_indicators=False, seed=1)
    net.freeze("bn", classifier=True)
    cfg = TrainConfig(epochs=6, lr=0.1, label_smoothing=0)
    sampler = FairSampler(net.space, seed=1, layer_indicators=False)
    train_supernet(net, batches(12), sampler, cfg, run_dir=tmp_path_factory.mktemp("aligned"))
    return net


def plain(net: Supernet) -> Supernet:
    """The same network made of PyTorch's own modules."""
    twin = Supernet(net.space, layer_indicators=net.layer_indicators, fused=False)
    twin.load_state_dict(net.state_dict())
    return twin


def test_path_loss_and_accuracy_are_those_of_the_whole_set(trained):
    evidence = Evidence(trained, HELD_OUT)
    arch = (1, 0, 2, 1)
    logits = [plain(trained)(x, arch) for x, _ in HELD_OUT]  # batch by batch: their statistics are the batch's
    labels = torch.cat([y for _, y in HELD_OUT])
    found = score_paths("path_loss", evidence, [arch])[arch]
    assert found == pytest.approx(-F.cross_entropy(torch.cat(logits), labels).item(), rel=1e-4)
    accuracy = score_paths("path_accuracy", evidence, [arch])[arch]
    assert accuracy == (torch.cat(logits).argmax(1) == labels).double().mean().item()


def test_scores_of_paths_show_signs_of_life_without_a_terminal(trained, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    evidence = Evidence(trained, HELD_OUT, paths=40)
    score_table("path_loss", evidence)
    lines, paths = capsys.readouterr().err.splitlines(), len(set(evidence.sample()))
    assert len(lines) == paths and all(line.startswith(f"score {i}/{paths}  eta ") for i, line in enumerate(lines, 1))
    score_paths("path_loss", Evidence(trained, HELD_OUT), [(1, 0, 2, 1), (0, 0, 0, 0)])
    assert capsys.readouterr().err.startswith("score 1/2  eta ")


def test_no_images_are_refused(trained):
    with pytest.raises(ScoreError, match="no image to score on"):
        _ = Evidence(trained, []).batches


def test_a_distilled_table_ranks_as_the_losses_of_all_paths_do(trained):
    evidence = Evidence(trained, HELD_OUT, paths=60)
    table = score_table("path_loss", evidence, meta={"step": 3})
    archs = list(itertools.product(range(3), repeat=4))
    losses = score_paths("path_loss", evidence, archs)
    values = np.array([losses[a] for a in archs])
    # the best that a table can do, fitted to all paths
    chosen = np.array([[c == choice for c in a for choice in range(3)] for a in archs], dtype=float)
    best = chosen @ np.linalg.lstsq(chosen, values, rcond=None)[0]
    tau = kendalltau([table.score(a) for a in archs], values).statistic
    assert tau > kendalltau(best, values).statistic - 0.05
    assert table.meta["score"] == "path_loss"
    assert table.meta["step"] == 3
    assert table.meta["paths"] == len(set(evidence.sample())) < 60
    assert 0.3 < table.meta["r2"] <= 1
    assert search_table(table, trained.space, top_k=1)[0].arch == max(archs, key=table.score)


def test_gamma_is_the_table_of_the_indicators(trained):
    table = score_table("gamma", Evidence(trained, HELD_OUT))
    assert table.block == bn_gamma.score(trained).block
    assert table.rule == "product"


def test_recalibrated_accuracy_needs_training_images(trained):
    with pytest.raises(ScoreError, match="needs training images too"):
        score_paths("recalibrated_accuracy", Evidence(trained, HELD_OUT), [(0, 0, 0, 0)])
    found = score_paths("recalibrated_accuracy", Evidence(trained, [], loaders=(batches(3), HELD_OUT)), [(0, 0, 0, 0)])
    assert 0.25 < found[0, 0, 0, 0] <= 1


def test_recalibrated_accuracy_is_that_of_the_standalone_network_and_leaves_the_supernet(trained):
    train, held, arch = batches(6), batches(3, seed=1), (1, 0, 2, 1)
    network = inherit(trained, arch)
    recalibrate_bn(network, train, batches=2)
    want = evaluate(network, held).top1
    # the images must be normalised by the statistics of the path: without any the network guesses
    assert evaluate(inherit(trained, arch).eval(), held).top1 != want
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    flags, mode = [p.requires_grad for p in trained.parameters()], trained.training
    trained.train()
    evidence = Evidence(trained, held, loaders=(train, held), recalibration_batches=2)
    assert score_paths("recalibrated_accuracy", evidence, [arch]) == {arch: want}
    after = trained.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert trained.training and flags == [p.requires_grad for p in trained.parameters()]
    trained.train(mode)


@pytest.mark.slow
def test_every_score_gives_a_table_or_says_why_not():
    net = Supernet(MACRO, init="aligned")
    images = batches(2, resolution=12)
    evidence = Evidence(net, images, loaders=(images, images), paths=12)
    assert list_scores() == sorted(all_scores())
    assert available(net) == list(all_scores()) and set(extensions.SCORES) < set(available(net))
    for name in available(net):
        table = score_table(name, evidence)
        assert table.meta["score"] == name
        assert len(search_table(table, MACRO, top_k=2)) == 2


def test_refusals_list_what_can_be_had(trained, monkeypatch):
    monkeypatch.setitem(SCORES, "naswot", dataclasses.replace(get_score("naswot"), refusal=lambda net: "no ReLU"))
    with pytest.raises(ScoreError, match=r"tiny has no score 'naswot': no ReLU. It can have .*path_loss"):
        score_table("naswot", Evidence(trained, HELD_OUT))
    assert "naswot" not in available(trained)
    with pytest.raises(ScoreError, match="unknown score 'path_los'; did you mean 'path_loss'"):
        score_table("path_los", Evidence(trained, HELD_OUT))
    with pytest.raises(KeyError, match="'gamma' is registered already"):
        register("gamma", additive=True)(lambda evidence: None)
    with pytest.raises(KeyError, match="'synflow' is registered already"):
        register("synflow", additive=False)(lambda evidence, arch: 0.0)


def test_paths_without_a_finite_score_are_refused(monkeypatch):
    """They would rank with the best paths, because a nan is below nothing."""
    net = Supernet(MACRO, init="aligned")
    with torch.no_grad():
        net.layers[1].candidates[2].project.bn.weight[0] = float("nan")
    good, bad = (0, 1, *(0,) * (len(MACRO) - 2)), (0, 2, *(0,) * (len(MACRO) - 2))
    evidence = Evidence(net, batches(1, resolution=12))
    assert math.isfinite(score_paths("path_loss", evidence, [good])[good])
    with pytest.raises(ScoreError, match=r"1 of 2 paths have no finite path_loss, the first is \[0 2"):
        score_paths("path_loss", evidence, [good, bad])
    monkeypatch.setitem(SCORES, "path_loss", dataclasses.replace(SCORES["path_loss"], trained=False))
    with pytest.raises(ScoreError) as untrained:
        score_paths("path_loss", evidence, [good, bad])
    assert "no finite" in str(untrained.value) and "train" not in str(untrained.value)


def test_a_new_score_is_one_function(trained, monkeypatch):
    monkeypatch.setattr(registry, "SCORES", SCORES)
    monkeypatch.delitem(SCORES, "test", raising=False)

    @register("test", additive=False)
    def test(evidence, arch):
        return -float(sum(arch))

    monkeypatch.setitem(SCORES, "test", SCORES["test"])  # the test removes the score again at its end
    table = score_table("test", Evidence(trained, HELD_OUT, paths=60))
    assert table.scores[0] == pytest.approx({0: 1, 1: 0, 2: -1}, abs=1e-9)
    del SCORES["test"]


def test_a_config_whose_score_is_null_must_be_resolved():
    assert configured_score(ScoreConfig().resolved("dinas")) is SCORES["path_loss"]
    weights = [ScoreConfig(name=name).resolved("dinas").structure for name in (None, "path_loss", "gamma")]
    assert weights == [METHODS["dinas"].structure, METHODS["dinas"].structure, 0.0]
    assert ScoreConfig(name="gamma", structure=1.0).resolved("dinas").structure == 1.0
    with pytest.raises(ValueError, match=r"call resolved\(method\)"):
        configured_score(ScoreConfig())
