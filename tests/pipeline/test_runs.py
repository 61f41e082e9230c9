"""Whole runs on the digits through the command line: files, resuming, stages alone."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import shutil
from pathlib import Path

import pytest
import yaml
from digits_runs import LIMIT, contents
from tiny import tiny_space

import nasfast.train.loop as loop
from nasfast.cli.main import main
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline.resolve import resolved
from nasfast.retrain import load_model
from nasfast.search import Limits, equal_cost_peers, load_candidates
from nasfast.settings import RunConfig
from nasfast.spaces import Arch, SearchSpace


def test_every_file_of_a_run(run_dir):
    names = {str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file()}
    expected = {
        "config.yaml",
        "space.yaml",
        "environment.json",
        "metrics.jsonl",
        "indicators.json",
        "archs.json",
        "report.html",
    }
    expected |= {
        f"retrain/{name}/{file}"
        for name in ("best", "random")
        for file in ("model.safetensors", "config.json", "result.json")
    }
    expected |= {f"checkpoints/supernet-{s:08d}.safetensors" for s in (16, 20)}
    for name in ("best", "random"):
        arch = "_".join(map(str, load_model(run_dir / "retrain" / name).arch))
        expected |= {f"checkpoints/retrain-{name}-{arch}-{s}.safetensors" for s in ("00000008", "00000011", "best")}
    boards = {n for n in names if n.startswith("tensorboard/")}
    figures = {n for n in names if n.startswith("report/")}
    assert names - boards - figures == expected
    assert {str(Path(n).parent) for n in boards} == {
        f"tensorboard/{s}" for s in ("supernet", "retrain/best", "retrain/random")
    }


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


def interrupt(monkeypatch, at: int) -> None:
    """Press Ctrl-C in the middle of step `at`, counted over all stages."""
    step, count = loop.update, 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(loop, "update", counted)


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


@pytest.mark.parametrize("stage", ["score", "search", "retrain"])
def test_a_stage_without_the_one_before(tmp_path, capsys, config, stage):
    assert main([stage, "--out", str(tmp_path / "empty"), "--config", str(config)]) == 1
    assert "space.yaml is missing: run `nasfast supernet" in capsys.readouterr().err
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("stage", "missing", "message"),
    [("search", "indicators.json", "run `nasfast score"), ("retrain", "archs.json", "run `nasfast search")],
)
def test_a_missing_file_names_the_stage_that_writes_it(out, capsys, stage, missing, message):
    (out / missing).unlink()
    assert main([stage, "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert missing in error


@pytest.mark.slow
def test_later_stages_need_neither_the_space_file_nor_the_old_settings(run_dir, tmp_path):
    """The user's YAML space may be gone, and a search may be repeated with other limits."""
    out = tmp_path / "moved"
    shutil.copytree(run_dir, out)
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
def test_inherited_retraining(run_dir, tmp_path):
    out = tmp_path / "inherit"
    shutil.copytree(run_dir, out)
    for path in (out / "checkpoints").glob("retrain*"):
        path.unlink()
    flags = ["--retrain.init", "inherit", "--retrain.random_architectures", "0", "--retrain.top_k", "2"]
    assert main(["retrain", "--out", str(out), *flags]) == 0
    assert (out / "retrain/best-2/result.json").exists()
    assert (out / "retrain/best/model.safetensors").read_bytes() != (
        run_dir / "retrain/best/model.safetensors"
    ).read_bytes()
