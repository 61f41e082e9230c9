"""A search whose score needs neither training nor images: one command, and what it leaves for later stages."""

from __future__ import annotations

import itertools
import json

import pytest
from tiny import tiny_space

import nasfast.train.loop as loop
from nasfast.cli.main import main
from nasfast.indicators.scores import untrained_table
from nasfast.indicators.table import IndicatorTable
from nasfast.search import load_candidates
from nasfast.spaces import SearchSpace


@pytest.fixture
def space_file(tmp_path):
    tiny_space().save(tmp_path / "tiny.yaml")
    return tmp_path / "tiny.yaml"


def test_one_command_finds_the_best_within_the_limit(space_file, tmp_path, capsys):
    out = tmp_path / "run"
    space = tiny_space(num_classes=7)
    costs = {arch: space.cost(arch).macs for arch in itertools.product(range(3), repeat=4)}
    limit = sorted(costs.values())[40]
    command = ["search", "--out", str(out), "--space.name", str(space_file), "--score.name=isometry"]
    command += ["--search.max_macs"]
    assert main([*command, str(limit), "--num_classes", "7"]) == 0
    assert SearchSpace.load(out / "space.yaml") == space
    table = untrained_table("isometry", space, structure=5.0)
    assert IndicatorTable.load(out / "indicators.json").scores == table.scores
    best = load_candidates(out / "archs.json").candidates[0]
    within = [arch for arch, macs in costs.items() if macs <= limit]
    assert best.optimal and best.score == pytest.approx(max(map(table.score, within)))
    assert "The proof is about the score only" in capsys.readouterr().out
    assert {"config.yaml", "space.yaml", "indicators.json", "archs.json"} <= {file.name for file in out.iterdir()}
    # again with another limit: the table is kept, and so are the classes
    before = (out / "indicators.json").stat().st_mtime_ns
    assert main([*command, str(2 * limit)]) == 0
    assert (out / "indicators.json").stat().st_mtime_ns == before
    assert SearchSpace.load(out / "space.yaml") == space
    # a damaged one is computed again
    (out / "indicators.json").write_text("{")
    assert main([*command, str(limit)]) == 0
    assert IndicatorTable.load(out / "indicators.json").scores == table.scores
    assert main([*command, str(limit), "--num_classes", "6"]) == 1
    assert "is another space: num_classes" in capsys.readouterr().err
    # another seed is another table
    assert main([*command, str(limit), "--seed", "1"]) == 1
    assert "has other settings: seed" in capsys.readouterr().err


def test_structure_alone_and_scores_that_need_a_run(space_file, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["search", "--out", str(out), "--space.name", str(space_file), "--score.name", "sqrt_size"]) == 0
    assert json.loads((out / "indicators.json").read_text())["meta"]["score"] == "sqrt_size"
    capsys.readouterr()
    other = ["search", "--out", str(tmp_path / "other"), "--space.name", str(space_file), "--score.name"]
    assert main([*other, "path_loss"]) == 1
    assert "space.yaml is missing: run `nasfast supernet" in capsys.readouterr().err
    assert main([*other, "path_loss", "--num_classes", "3"]) == 1
    assert "--num_classes is for a search without a run" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_limits_that_nothing_meets_leave_no_directory(space_file, tmp_path, capsys):
    out = tmp_path / "run"
    flags = ["--space", str(space_file), "--score", "isometry", "--max_macs=9"]
    assert main(["search", "--out", str(out), *flags]) == 1
    assert "MACs" in capsys.readouterr().err
    assert not out.exists()


def test_the_first_training_decides_the_images(space_file, tmp_path, capsys, monkeypatch):
    """Also where it is stopped; before it, they may change, because nothing depends on them."""
    out = tmp_path / "run"
    flags = ["--out", str(out), "--space", str(space_file), "--score", "isometry", "--num_classes", "10"]
    assert main(["search", *flags]) == 0
    command = ["retrain", "--out", str(out), "--data.source", "digits", "--data.workers", "0", "--threads", "1"]
    command += ["--retrain.train.epochs", "1", "--retrain.random_architectures", "0"]
    step, count = loop.update, itertools.count()

    def stopped(*args, **kwargs):
        if next(count) == 3:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "update", stopped)
        assert main([*command, "--retrain.train.checkpoint_every", "2"]) == 130
    before = (out / "config.yaml").read_bytes()
    assert main([*command, "--resume", "--data.augment", "none"]) == 1
    assert "has other settings: data.augment was 'auto', now 'none'" in capsys.readouterr().err
    assert (out / "config.yaml").read_bytes() == before
    assert main(["retrain", "--out", str(out), "--resume"]) == 0
    assert (out / "retrain/best/result.json").exists()
