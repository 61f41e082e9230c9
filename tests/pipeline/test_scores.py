"""Scores of a run: the default, others of the same supernet, and scores that it cannot have."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from digits_runs import EVOLUTION
from scipy.stats import kendalltau
from tiny import tiny_space

from nasfast.cli.main import main
from nasfast.data import make_loader, make_loaders, random_subset
from nasfast.indicators import bn_gamma
from nasfast.indicators.scores import score_paths, score_table
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline import inputs
from nasfast.pipeline.resolve import resolved
from nasfast.research.zero_cost import ntk_q
from nasfast.search import load_candidates
from nasfast.settings import METHODS, RunConfig
from nasfast.supernet import inherit
from nasfast.train.supernet import make_supernet


def test_the_default_score_is_distilled_from_held_out_images_beside_structure(run_dir):
    table = IndicatorTable.load(run_dir / "indicators.json")
    assert (table.rule, table.meta["score"], table.meta["step"]) == ("sum", "path_loss", 20)
    assert table.meta["structure"] == METHODS["dinas"].structure
    assert 0 < table.meta["r2"] <= 1
    cfg = RunConfig.load(run_dir / "config.yaml")
    evidence, _ = inputs.load_evidence(cfg.replace(out=str(run_dir)))
    train, held = evidence.loaders
    assert len(train.source) + len(held.source) == 1442  # the digits of the training part
    assert sum(len(y) for _, y in evidence.batches) == len(held.source)
    # batches mix the classes, as those of training did
    assert all(len(y.unique()) > 5 for _, y in evidence.batches)
    again = score_table("path_loss", evidence, structure=METHODS["dinas"].structure)
    assert [again.score(a) for a in evidence.sample(5)] == [table.score(a) for a in evidence.sample(5)]


@pytest.mark.slow
def test_another_score_of_the_same_supernet(out, capsys):
    assert main(["score", "--out", str(out), "--score.name", "gamma", "--score.structure", "0"]) == 0
    net, _ = inputs.load_supernet(resolved(RunConfig.load(out / "config.yaml").replace(out=str(out))))
    table = IndicatorTable.load(out / "indicators.json")
    assert table.scores == bn_gamma.score(net).scores
    before = (out / "config.yaml").read_bytes()
    assert main(["search", "--out", str(out), "--score.name", "path_loss"]) == 1
    assert "has the score 'gamma', the settings say 'path_loss': run `nasfast score" in capsys.readouterr().err
    assert (out / "config.yaml").read_bytes() == before
    assert main(["search", "--out", str(out)]) == 0
    assert load_candidates(out / "archs.json").candidates[0].score == pytest.approx(
        table.score(load_candidates(out / "archs.json").candidates[0].arch)
    )
    # the scores need no training: they use the weights with which the supernet began
    assert main(["score", "--out", str(out), "--score.name", "ntk_q", "--score.images", "64"]) == 0
    assert IndicatorTable.load(out / "indicators.json").meta["score"] == "ntk_q"


def test_a_score_can_be_ranked_path_by_path(out, tmp_path, capsys):
    archs = list(itertools.product(range(3), repeat=4))
    table = tmp_path / "accuracies.json"
    table.write_text(json.dumps({"".join(map(str, a)): 50 + sum(a) + a[0] / 10 for a in archs}))
    ranked = ["rank", "--out", str(out), "--table", str(table), "--resamples", "10"]
    assert main([*ranked, "--score", "path_accuracy", "--sample", "12"]) == 0
    assert "12 architectures" in capsys.readouterr().out
    report = json.loads((out / "rank-path_accuracy.json").read_text())
    cfg = RunConfig.load(out / "config.yaml")
    evidence, _ = inputs.load_evidence(cfg.replace(out=str(out), score=cfg.score.replace(name="path_accuracy")))
    chosen = random.Random(0).sample(archs, 12)
    scores = score_paths("path_accuracy", evidence, chosen)
    tau = kendalltau([scores[a] for a in chosen], [50 + sum(a) + a[0] / 10 for a in chosen]).statistic
    assert report["predictor"]["kendall"]["value"] == pytest.approx(tau)
    assert not (out / "rank.json").exists()
    assert main([*ranked, "--sample", "12"]) == 2


def test_a_score_of_untrained_weights_is_ranked_from_the_settings_alone(config, tmp_path, capsys):
    cfg = RunConfig.load(config).replace(seed=3)
    out, space = tmp_path / "run", tiny_space(num_classes=10)
    archs = list(itertools.product(range(3), repeat=4))[::5]
    table = tmp_path / "accuracies.json"
    table.write_text(json.dumps({"".join(map(str, a)): 50 + sum(a) + a[0] / 10 for a in archs}))
    ranked = ["rank", "--out", str(out), "--table", str(table), "--resamples", "10", "--score"]
    out.mkdir()
    assert main([*ranked, "ntk_q"]) == 1
    error = capsys.readouterr().err
    assert f"{out / 'config.yaml'} is missing: run `nasfast supernet --out {out}` first" in error
    cfg.save(out / "config.yaml")
    assert main([*ranked, "ntk_q"]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["config.yaml", "rank-ntk_q.json"]
    # the same by hand: the weights of the method `dinas` with the seed, and the first batch of held-out images
    net, _ = make_supernet(space, "dinas", seed=3)
    _, held = make_loaders(cfg.data, resolution=space.resolution, seed=3, hold_out=True)
    images = make_loader(
        cfg.data, random_subset(held.source, 1000, 3), train=False, resolution=space.resolution, in_channels=3
    )
    batch = next(iter(images.epoch(0)))
    scores = [ntk_q(inherit(net, arch), *batch) for arch in archs]
    tau = kendalltau(scores, [50 + sum(a) + a[0] / 10 for a in archs]).statistic
    report = json.loads((out / "rank-ntk_q.json").read_text())
    assert report["predictor"]["kendall"]["value"] == pytest.approx(tau)
    assert main([*ranked, "gamma"]) == 1
    assert f"{out / 'space.yaml'} is missing: run `nasfast supernet --out {out}` first" in capsys.readouterr().err


@pytest.mark.slow
def test_a_score_of_paths_can_be_searched_without_a_table(out, capsys):
    (out / "indicators.json").rename(out / "refined.json")
    flags = ["--score.distill", "false", *(f"--search.{key}={value}" for key, value in EVOLUTION.items())]
    assert main(["score", "--out", str(out), *flags]) == 0
    assert not (out / "indicators.json").exists()
    assert main(["search", "--out", str(out), *flags]) == 0
    assert not (out / "refined.json").exists()
    (best, *_) = load_candidates(out / "archs.json").candidates
    evidence, checkpoint = inputs.load_evidence(resolved(RunConfig.load(out / "config.yaml").replace(out=str(out))))
    assert best.score == score_paths("path_loss", evidence, [best.arch])[best.arch]
    header = json.loads((out / "history.jsonl").read_text().splitlines()[0])
    assert header["scorer"] == f"path_loss of {checkpoint.digest}, 1000 images"
    assert main(["search", "--out", str(out), "--search.method", "exact"]) == 1
    assert (
        "'path_loss' scores whole paths: set search.method='evolution', or score.distill=true"
        in capsys.readouterr().err
    )
