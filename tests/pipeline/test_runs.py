"""Whole runs on the digits through the command line: files, resuming, stages alone, and the baselines."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from digits_runs import EVOLUTION, LIMIT, contents, interrupt, write_config
from tiny import tiny_space

from nasfast.cli.main import main
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline import stages
from nasfast.pipeline.evidence import image_loaders, load_evidence
from nasfast.pipeline.inputs import read_layers
from nasfast.pipeline.run import Run, load_settings, resolved
from nasfast.pipeline.stages import score
from nasfast.retrain import load_model
from nasfast.search import Limits, equal_cost_peers, load_candidates
from nasfast.settings import RunConfig
from nasfast.spaces import Arch, SearchSpace
from nasfast.train.checkpoint import load_checkpoint


def test_every_file_of_a_run(run_dir):
    names = {str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file()}
    of_network = ("model.safetensors", "config.json", "result.json")
    expected = {f"checkpoints/supernet-{s:08d}.safetensors" for s in (16, 20)}
    files = "config.yaml space.yaml environment.json metrics.jsonl indicators.json archs.json report.html"
    expected |= {*files.split(), "finished.json", "path_scores.jsonl"}
    for name in ("best", "random"):
        expected |= {f"retrain/{name}/{file}" for file in of_network}
        arch = "_".join(map(str, load_model(run_dir / "retrain" / name).arch))
        expected |= {f"checkpoints/retrain-{name}-{arch}-{s}.safetensors" for s in ("00000008", "00000011", "best")}
    boards = {n for n in names if n.startswith("tensorboard/")}
    figures = {n for n in names if n.startswith("report/")}
    assert names - boards - figures == expected
    stages = ("supernet", "retrain/best", "retrain/random")
    assert {str(Path(n).parent) for n in boards} == {f"tensorboard/{stage}" for stage in stages}


def test_the_results_belong_together(run_dir):
    space = SearchSpace.load(run_dir / "space.yaml")
    assert space == tiny_space(num_classes=10)
    table = IndicatorTable.load(run_dir / "indicators.json")
    assert (table.space, table.meta["method"]) == (space, "dinas")
    assert all(v != 1.0 for row in table.block for v in row.values())
    found = load_candidates(run_dir / "archs.json", space)
    assert found.max_macs == LIMIT
    assert len(found.candidates) == 3
    for candidate in found.candidates:
        assert candidate.optimal
        assert candidate.macs == space.cost(candidate.arch).macs <= LIMIT
        assert candidate.score == pytest.approx(table.score(candidate.arch))
    assert len(found.pareto) > 1
    best = load_model(run_dir / "retrain/best").arch
    assert best == found.candidates[0].arch
    random = load_model(run_dir / "retrain/random").arch
    assert random != best
    result = json.loads((run_dir / "retrain/best/result.json").read_text())
    assert result["macs"] == found.candidates[0].macs
    assert 0.1 <= result["top1"] <= result["top5"] <= 1


def test_a_plain_run_stops_after_its_hours(config, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["run", "--out", str(out), "--config", str(config), "--max_hours", str(0.5 / 3600)]) == 143
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("nasfast run: --max_hours 0.000138889 is over")
    assert said.endswith("; the same command with --resume continues")
    assert not (out / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("at", "stage"), [(3, "supernet"), (40, "retrain")])
def test_an_interrupted_run_resumes_to_the_same_files(run_dir, config, tmp_path, monkeypatch, capsys, at, stage):
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        interrupt(patched, at)
        assert main(["run", "--out", str(out), "--config", str(config)]) == 130
    said = capsys.readouterr().err
    assert f"stopped by Ctrl-C in the stage `{stage}`; what was saved before is kept; " in said
    assert "; the same command with --resume continues" in said
    assert not (out / "report.html").exists()
    # the settings come from the run directory
    assert main(["run", "--out", str(out), "--resume"]) == 0
    assert contents(out) == contents(run_dir)
    assert (out / "report.html").exists()


def test_a_run_that_is_not_there_is_named_before_images_are_read(config, tmp_path, monkeypatch, capsys, caplog):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "supernet", interrupted)
    out = tmp_path / "typo"
    assert main(["run", "--out", str(out), "--config", str(config), "--resume"]) == 130
    assert f"nothing to resume in {out}: starting from the beginning" in caplog.messages
    assert "stopped by Ctrl-C in the stage `supernet`; nothing was saved yet; " in capsys.readouterr().err


@pytest.mark.slow
def test_stages_alone_give_with_the_saved_config_what_the_run_gives(run_dir, tmp_path):
    saved = RunConfig.load(run_dir / "config.yaml")
    assert resolved(saved) == saved
    assert (saved.supernet.init, saved.score.name) == ("aligned", "path_loss")
    assert (saved.train.epochs, saved.retrain.train.epochs, saved.data.batch_size) == (2, 1, 128)
    out = tmp_path / "stages"
    assert main(["supernet", "--config", str(run_dir / "config.yaml"), "--out", str(out)]) == 0
    assert not (out / "indicators.json").exists()
    for stage in ("score", "search", "retrain"):
        assert main([stage, "--out", str(out)]) == 0
    assert contents(out) == contents(run_dir)
    assert main(["report", "--out", str(out)]) == 0
    assert (out / "report.html").exists()


def test_settings_of_later_stages_may_change_on_resume(out):
    assert main(["supernet", "--out", str(out), "--resume", "--search.top_k", "2", "--data.workers", "1"]) == 0
    assert RunConfig.load(out / "config.yaml").search.top_k == 2


@pytest.mark.slow
def test_later_stages_need_neither_the_space_file_nor_the_old_settings(out, tmp_path):
    """The user's YAML space may be gone, and a search may be repeated with other limits."""
    saved = yaml.safe_load((out / "config.yaml").read_text())
    saved["space"]["name"] = str(tmp_path / "gone.yaml")
    (out / "config.yaml").write_text(yaml.safe_dump(saved))
    assert main(["score", "--out", str(out)]) == 0
    assert main(["search", "--out", str(out), "--search.max_macs", "190000", "--search.top_k", "1"]) == 0
    found = load_candidates(out / "archs.json")
    assert (found.max_macs, len(found.candidates)) == (190_000, 1)
    shutil.rmtree(out / "checkpoints")
    assert main(["retrain", "--out", str(out), "--retrain.random_architectures", "0"]) == 0


@pytest.mark.slow
def test_the_demo_fits_on_a_screen_without_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--config", "demo", "--out", "run", "--threads", "1", "--space.resolution", "16"]
    flags += ["--train.epochs", "1", "--retrain.train.epochs", "1", "--search.max_macs", "175e3"]
    flags += ["--score.paths", "30", "--retrain.seeds", "1", "--retrain.random_architectures", "2"]
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest, which would get what a user reads
    assert main(["run", *flags]) == 0
    done = capsys.readouterr()
    lines = [*done.err.splitlines(), *done.out.splitlines()]
    assert len(lines) <= 24 and max(map(len, lines)) < 240, "\n".join(lines)
    # one line per stage, in this order, and no line per epoch
    stages = [line.split()[0] for line in lines if re.match(r"(supernet|score|search|retrain) ", line)]
    assert stages == ["supernet", "score", "search", "retrain"]
    assert done.out.splitlines()[-1] == "report: run/report.html"
    assert re.search(r"^[+-]\d+\.\d points over 2 random networks of equal cost", done.out, re.MULTILINE)
    assert main(["run", *flags, "--resume"]) == 0
    assert capsys.readouterr().out == done.out, "a finished run says the same when it is resumed"


def test_random_architectures_differ_and_cost_the_same(run_dir, caplog):
    space = SearchSpace.load(run_dir / "space.yaml")
    best = load_candidates(run_dir / "archs.json", space).candidates[0].arch
    target = space.cost(best).macs
    every = set(itertools.product(range(3), repeat=4)) - {best}
    near = {a for a in every if abs(space.cost(a).macs - target) <= 0.01 * target}

    def draw(count: int) -> list[Arch]:
        return equal_cost_peers(space, random.Random(0), best, count, limits=Limits())

    peers = draw(3)
    assert len(set(peers)) == len(peers) == min(3, len(near)) and set(peers) <= near
    assert set(draw(len(near) + 5)) == near
    assert f"only {len(near)} of {len(near) + 5} different random architectures" in caplog.text
    assert draw(0) == []


@pytest.mark.slow
def test_inherited_retraining(run_dir, out):
    for path in (out / "checkpoints").glob("retrain*"):
        path.unlink()
    flags = ["--retrain.init", "inherit", "--retrain.random_architectures", "0", "--retrain.top_k", "2"]
    assert main(["retrain", "--out", str(out), *flags]) == 0
    assert (out / "retrain/best-2/result.json").exists()
    inherited, fresh = ((run / "retrain/best/model.safetensors").read_bytes() for run in (out, run_dir))
    assert inherited != fresh


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
    _, held = image_loaders(RunConfig.load(out / "config.yaml"), space)
    counts = [e["score"] * len(held.source) for e in evaluated]
    assert counts == pytest.approx([round(c) for c in counts], abs=1e-6)


@pytest.mark.slow
def test_a_new_search_can_be_retrained_and_the_earlier_network_is_kept(out):
    space = SearchSpace.load(out / "space.yaml")
    earlier, weights = (load_model(out / "retrain/best").arch, (out / "retrain/best/model.safetensors").read_bytes())
    smaller = space.cost(earlier).macs - 1
    assert main(["search", "--out", str(out), "--search.max_macs", str(smaller)]) == 0
    assert RunConfig.load(out / "config.yaml").search.max_macs == LIMIT, "the run's own stays"
    assert main(["retrain", "--out", str(out), "--retrain.random_architectures", "0"]) == 0
    best = load_candidates(out / "archs.json", space).candidates[0].arch
    assert load_model(out / "retrain/best").arch == best != earlier
    (kept,) = (out / "retrain-superseded").iterdir()
    assert (kept / "model.safetensors").read_bytes() == weights


def test_a_supernet_that_is_not_trained_to_its_end_is_named(out, caplog):
    (out / "checkpoints/supernet-00000020.safetensors").unlink()
    with Run.open(load_settings(str(out))) as run:
        table = score(run)
    assert "step 16 of 20" in caplog.text
    assert table.meta["step"] == 16


@pytest.mark.slow
def test_a_supernet_at_chance_is_named(tmp_path, config, caplog):
    flags = ["--train.epochs", "1", "--train.lr", "1e-6", "--train.checkpoint_every", "0"]
    assert main(["supernet", "--out", str(tmp_path / "run"), "--config", str(config), *flags]) == 0
    assert "at chance" in caplog.text


@pytest.mark.parametrize("stage", ["score", "load_evidence"])
def test_stages_without_training_use_the_threads_of_the_config(out, stage):
    """The score is `gamma`, which reads no images. An exact search needs no torch, and so no threads of it."""
    before = torch.get_num_threads()
    cfg = load_settings(str(out))
    cfg = cfg.replace(threads=before + 1, score=cfg.score.replace(name="gamma"))
    with Run.open(cfg.replace(threads=before)) as opened:
        score(opened)
    try:
        if stage == "score":
            with Run.open(cfg) as opened:
                score(opened)
        else:
            load_evidence(cfg, read_layers(out))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
