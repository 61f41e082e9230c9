"""Runs of the baselines, and what later stages may change."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from digits_runs import EVOLUTION, LIMIT, write_config

from nasfast import pipeline
from nasfast.cli.main import main
from nasfast.pipeline.inputs import image_loaders, load_evidence
from nasfast.retrain import load_model
from nasfast.search import load_candidates
from nasfast.settings import RunConfig
from nasfast.spaces import SearchSpace
from nasfast.train.checkpoint import load_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spos", "fairnas"])
def test_methods_that_score_by_accuracy(tmp_path, method, capsys):
    settings = write_config(
        tmp_path / "config",
        method=method,
        recalibration_batches=2,
        search=EVOLUTION,
        train={"epochs": 1, "log_every": 5},
        retrain={"random_architectures": 0, "train": {"epochs": 1}},
    )
    out = tmp_path / "run"
    assert main(["run", "--out", str(out), "--config", str(settings)]) == 0
    assert not (out / "indicators.json").exists()
    space = SearchSpace.load(out / "space.yaml")
    found = load_candidates(out / "archs.json", space).candidates
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    header, evaluated = history[0], history[1:]
    (*_, newest) = sorted((out / "checkpoints").glob("supernet-*"))
    assert load_checkpoint(newest).digest in header["scorer"]
    assert len(evaluated) == 8
    assert found[0].score == max(e["score"] for e in evaluated)
    assert all(c.macs <= LIMIT and not c.optimal and 0 <= c.score <= 1 for c in found)
    assert (out / "retrain/best/result.json").exists()
    # searching again takes every score from the history
    before = (out / "history.jsonl").read_bytes()
    assert main(["search", "--out", str(out)]) == 0
    assert (out / "history.jsonl").read_bytes() == before
    # the accuracies were of images that are not judged later
    _, held = image_loaders(RunConfig.load(out / "config.yaml"), space, hold_out=True)
    counts = [e["score"] * len(held.source) for e in evaluated]
    assert counts == pytest.approx([round(c) for c in counts], abs=1e-6)


@pytest.mark.parametrize(
    ("stage", "flags", "message"),
    [
        ("score", ["--method", "bnnas"], "method was 'dinas', now 'bnnas'"),
        ("search", ["--seed", "9"], "seed was 0, now 9"),
        ("retrain", ["--train.epochs", "77"], "train.epochs was 2, now 77"),
    ],
)
def test_a_later_stage_cannot_change_what_the_supernet_was_trained_with(out, capsys, stage, flags, message):
    before = (out / "config.yaml").read_bytes()
    assert main([stage, "--out", str(out), *flags]) == 1
    assert message in capsys.readouterr().err
    assert (out / "config.yaml").read_bytes() == before


@pytest.mark.slow
def test_a_new_search_can_be_retrained_and_the_earlier_network_is_kept(out):
    space = SearchSpace.load(out / "space.yaml")
    earlier, weights = (load_model(out / "retrain/best").arch, (out / "retrain/best/model.safetensors").read_bytes())
    smaller = space.cost(earlier).macs - 1
    assert main(["search", "--out", str(out), "--search.max_macs", str(smaller)]) == 0
    assert RunConfig.load(out / "config.yaml").search.max_macs == smaller
    assert main(["retrain", "--out", str(out), "--retrain.random_architectures", "0"]) == 0
    best = load_candidates(out / "archs.json", space).candidates[0].arch
    assert load_model(out / "retrain/best").arch == best != earlier
    (kept,) = (out / "retrain-superseded").iterdir()
    assert (kept / "model.safetensors").read_bytes() == weights


def test_a_supernet_that_is_not_trained_to_its_end_is_named(out, caplog):
    (out / "checkpoints/supernet-00000020.safetensors").unlink()
    table = pipeline.score(RunConfig.load(out / "config.yaml").replace(out=str(out)))
    assert "step 16 of 20" in caplog.text
    assert table.meta["step"] == 16


@pytest.mark.slow
def test_a_supernet_at_chance_is_named(tmp_path, config, caplog):
    flags = ["--train.epochs", "1", "--train.lr", "1e-6", "--train.checkpoint_every", "0"]
    assert main(["supernet", "--out", str(tmp_path / "run"), "--config", str(config), *flags]) == 0
    assert "at chance" in caplog.text


@pytest.mark.parametrize("stage", [pipeline.score, load_evidence])
def test_stages_without_training_use_the_threads_of_the_config(run_dir, tmp_path, stage):
    """The score is `gamma`, which reads no images. An exact search needs no torch, and so no threads of it."""
    out, before = tmp_path / "run", torch.get_num_threads()
    shutil.copytree(run_dir, out)
    cfg = RunConfig.load(out / "config.yaml")
    cfg = cfg.replace(out=str(out), threads=before + 1, score=cfg.score.replace(name="gamma"))
    pipeline.score(cfg.replace(threads=before))
    try:
        stage(cfg)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
