"""`nasfast run --dry_run`: the stages of a run with their times, which are those of the steps; nothing is written."""

from __future__ import annotations

import gc
import itertools
import re
from pathlib import Path

import pytest
import torch
from tiny import tiny_space

from nasfast import ops
from nasfast.cli.main import main
from nasfast.pipeline import estimate
from nasfast.runtime.progress import duration
from nasfast.runtime.termination import Terminated
from nasfast.settings import RunConfig, TaskSettings


@pytest.fixture
def seconds(monkeypatch):
    """Steps, batches and scores of known times: each look at the clock is a second later than the one before."""
    clock = itertools.count()
    monkeypatch.setattr(estimate.time, "thread_time", lambda: float(next(clock)))


def rows(text: str) -> dict[str, tuple[int, str]]:
    """Number and time of one, by stage."""
    found = re.findall(r"^(.+?)  +(\d+) +\d+ +(\S+(?: \S+)+) +\S+ GiB$", text, re.MULTILINE)
    return {name: (int(number), time) for name, number, time in found}


def test_the_plan_of_a_run(config, tmp_path, capfd):
    """Stages and their numbers, from settings of the run; the run directory is not made."""
    flags = ["--out", str(tmp_path / "out"), "--config", str(config), "--retrain.seeds", "2", "--score.paths", "7"]
    assert main(["run", *flags, "--dry_run"]) == 0
    said = capfd.readouterr().out
    assert {name: number for name, (number, _) in rows(said).items()} == {
        "supernet": 1,
        "score": 1,
        "networks (retraining)": 3,  # the best with two seeds, a random one with one
    }
    space = tiny_space(num_classes=10)
    costs = [[cost.macs for cost in row.values()] for row in space.option_costs()]
    least, most = (sum(map(extreme, costs)) + space.fixed_cost.macs for extreme in (min, max))
    assert f"tiny: 4 layers, 81 architectures of {least:,} to {most:,} MACs" in said
    assert "training images of 10 classes; limits of the search: max_macs 70,000" in said
    assert "One after another: about " in said and "Nothing was trained." in said
    assert "because they take seconds: search" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_times_are_those_of_steps_batches_and_scores(config, tmp_path, seconds, capfd):
    """By the fixture's clock a step takes a second, and so do three batches, decoded in the first epoch alone."""
    settings = ["--method", "spos", "--search.population", "5", "--search.crossovers", "1", "--search.mutations", "1"]
    settings += ["--search.generations", "4", "--train.epochs", "300", "--data.batch_size", "128"]
    assert main(["run", "--out", str(tmp_path), "--config", str(config), *settings, "--dry_run"]) == 0
    found = rows(capfd.readouterr().out)
    # 1299 digits are not held out: 10 batches in each of 300 epochs, of twice as many images as were tried. As half as
    # many took as long, further images count half
    assert found["supernet"] == (1, duration(300 * 10 * 1.5 * (1 + 1 / 3 / 300)))
    # 5 x 4 architectures; 20 batches recalibrate a path and 143 images judge it, and both tried 143
    assert found["search"] == (1, duration(5 * 4 * (20 * 128 + 143) / (2 * 143)))
    assert "score" not in found


def test_a_batch_is_on_the_line_through_what_was_tried():
    """A step of 2 s and 0.5 s per image, whose third try took 20 % longer; memory is in proportion."""
    few, more = (estimate.Steps(n, [2 + n / 2] * 2 + [1.2 * (2 + n / 2)], n << 28) for n in (4, 8))
    found = estimate._timing(few, more, 100)
    assert (found.seconds, found.slowest) == (pytest.approx(52), pytest.approx(62.4))
    of_process = estimate._fresh_peak()
    assert found.memory - of_process == pytest.approx(100 << 28, rel=0.05)


def test_memory_that_operators_keep_is_given_back_before_a_step_is_tried(native):
    """Or the step would find it there, and seem to need less."""
    gc.collect()
    ops.conv_bn_act(
        torch.randn(8, 16, 64, 64), torch.randn(16, 16, 1, 1), torch.ones(16), torch.zeros(16), backend="cpu"
    )
    assert native.pool_bytes()[1] > 0
    estimate._fresh_peak()
    used, reached = native.pool_bytes()
    assert (used, reached) == (0, 0)


def test_what_is_timed_and_what_stays_is_said(config, tmp_path, capfd, caplog, monkeypatch):
    monkeypatch.setattr(estimate.Loader, "cache_folder", Path("/cache/images"))
    flags = ["--config", str(config), "--method", "bnnas", "--max_hours", str(0.001 / 3600)]
    assert main(["run", "--out", str(tmp_path / "out"), *flags, "--dry_run"]) == 0
    lines = [line for line in caplog.messages if line.startswith("timing")]
    assert lines == ["timing a few steps of the supernet", "timing a few steps of retraining a large network"]
    said = capfd.readouterr().out
    assert "\nDecoded images stay in /cache/images, where the run finds them.\n" in said
    assert said.endswith("Nothing was trained.\n--max_hours 2.77778e-07 ends before that; --resume continues.\n")


def test_an_interrupted_plan_names_no_checkpoint(config, tmp_path, capsys, monkeypatch):
    def stopped(*_, **__):
        raise Terminated("step 2 is saved in /tmp/x")

    monkeypatch.setattr(estimate, "train_supernet", stopped)
    (tmp_path / "plan.yaml").write_text("dry_run: true\n")
    files = ["--config", str(config), "--config", str(tmp_path / "plan.yaml")]
    assert main(["run", "--out", str(tmp_path / "out"), *files]) == 143
    said = capsys.readouterr().err
    assert said.endswith("nasfast run: stopped by SIGTERM; no run began, and nothing was trained\n")
    assert "/tmp/x" not in said


def test_a_plan_that_needs_more_memory_than_there_is_says_so(config, tmp_path, capfd, monkeypatch):
    flags = ["run", "--out", str(tmp_path / "out"), "--config", str(config), "--dry_run"]
    assert main(flags) == 0
    assert "GiB of memory for it" not in capfd.readouterr().out
    monkeypatch.setattr(estimate, "free_memory", lambda: -(1 << 30))
    assert main(flags) == 0
    said = capfd.readouterr().out
    assert re.search(
        r"This machine has -?[\d.]+ GiB of memory for it, and .+ takes up to [\d.]+ GiB: give a smaller", said
    )


def test_tasks_side_by_side_need_the_memory_of_each():
    def planned(at_a_time, memory):
        tasks = estimate.Work("b", 4, estimate.Timing(1, 1, 2 << 30), at_a_time)
        return estimate.Plan((estimate.Work("a", 1, estimate.Timing(1, 1, 3 << 30)), tasks), 1, None, memory=memory)

    for at_a_time, what, needed in ((1, "a", "3.0"), (3, "b", "6.0")):
        plan = planned(at_a_time, 2 << 30)
        assert f"This machine has 2.0 GiB of memory for it, and {what} takes up to {needed} GiB: give" in plan.too_large
    assert "fewer --workers, a smaller --data.batch_size" in plan.too_large
    assert planned(1, 3 << 30).too_large == ""


def test_each_kind_of_tasks_has_its_own_number_side_by_side():
    """Three seeds take one round and seven networks two, and this process trains a supernet in front of them."""
    one = estimate.Timing(10, 20)
    kinds = estimate.Work("seeds", 3, one, 3), estimate.Work("networks", 7, one, 4)
    plan = estimate.Plan(kinds, 1, TaskSettings())
    assert plan.total.seconds == 30 and "\n3 to 4 at a time: about 30 s" in str(plan)
    plan = estimate.Plan((estimate.Work("supernet", 1, one), kinds[1]), 1, TaskSettings())
    assert plan.total.seconds == 30 and "\n4 networks at a time: about 30 s" in str(plan)


def test_a_large_run_says_before_it_begins_that_it_needs_too_much(config, tmp_path, caplog, monkeypatch):
    cfg = RunConfig.load(config).replace(out=str(tmp_path / "out"))
    asked = []
    plan = estimate.Plan((estimate.Work("a", 1, estimate.Timing(1, 1, 3 << 30)),), 1, None, memory=2 << 30)
    monkeypatch.setattr(estimate, "plan_run", lambda *of: asked.append(of) or plan)
    estimate.warn_of_memory(cfg, None)
    assert not asked, "small batches need no try"
    estimate.warn_of_memory(cfg.replace(data=cfg.data.replace(batch_size=1_000_000)), None)
    assert len(asked) == 1 and caplog.messages == [plan.too_large]


def test_a_batch_has_at_most_the_images_there_are(config, tmp_path, seconds, capfd):
    found = []
    for size in ("1299", "5000"):
        flags = ["--out", str(tmp_path), "--config", str(config), "--data.batch_size", size]
        assert main(["run", *flags, "--dry_run"]) == 0
        found.append(rows(capfd.readouterr().out)["supernet"])
    assert found[0] == found[1]
