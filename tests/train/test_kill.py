"""Killed with SIGKILL at chosen moments, or stopped by a full disk, and resumed: the same bytes as an unbroken run."""

from __future__ import annotations

import json
from pathlib import Path

import killable
import numpy as np
import pytest
from forked import run_program

from nasfast.train.log import read_metrics

MOMENTS = {
    "supernet": [
        "in the first step",
        "in a step",
        "before a checkpoint",
        "half-written checkpoint",
        "before the replacement",
        "before the old one goes",
        "after the last checkpoint",
        "torn metrics line",
        "from outside",
        "full disk",
    ],
    "retrain": [
        "in a step",
        "half-written checkpoint",
        "between the best and its step",
        "before the model is saved",
        "between the model and its result",
    ],
    "cells": ["in the first step", "in a step", "half-written checkpoint"],
}
CASES = [(stage, moment) for stage, moments in MOMENTS.items() for moment in moments]


@pytest.fixture(scope="module")
def broken_runs(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """A folder with a broken run in STAGE/MOMENT for every case, and how each process ended."""
    out = tmp_path_factory.mktemp("broken")
    cases = [f"{stage}:{moment}" for stage, moment in CASES]
    ended = (line.partition("=") for line in run_program(killable, out, *cases).splitlines())
    return out, {case: int(code) for case, _, code in ended if case in cases}


@pytest.fixture(scope="module")
def unbroken(broken_runs) -> dict[str, tuple[Path, bytes, list]]:
    """Per stage: run directory, final file and metrics of an undisturbed run."""
    out, result = broken_runs[0], {}
    for stage, run_stage in killable.STAGES.items():
        run_dir = out / stage / "unbroken"
        final = run_stage(run_dir, out / "images", resume=False)
        result[stage] = run_dir, final.read_bytes(), metrics(run_dir)
    return result


def metrics(run_dir: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "images_per_s"} for line in read_metrics(run_dir)]


def checkpoints(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "checkpoints").glob("*.safetensors")}


@pytest.mark.kill
@pytest.mark.parametrize(("stage", "moment"), CASES, ids=[f"{s}, {m}" for s, m in CASES])
def test_resumed_run_ends_with_the_same_bytes(stage, moment, broken_runs, unbroken):
    out, codes = broken_runs
    assert codes[f"{stage}:{moment}"] == (3 if moment == "full disk" else -9)
    reference, final_bytes, expected_metrics = unbroken[stage]
    run_dir = out / stage / moment
    final = killable.STAGES[stage](run_dir, out / "images", resume=True)
    assert final.read_bytes() == final_bytes
    assert checkpoints(run_dir) == checkpoints(reference)
    assert metrics(run_dir) == expected_metrics
    if stage == "cells":
        with np.load(run_dir / "record.npz") as one, np.load(reference / "record.npz") as other:
            assert all(np.array_equal(one[name], other[name]) for name in (*one, *other))
    if stage == "retrain":
        one, other = (json.loads((d / "retrain/best/result.json").read_text()) for d in (run_dir, reference))
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.kill
def test_a_full_disk_keeps_the_old_checkpoints_and_says_so(broken_runs):
    out, codes = broken_runs
    assert codes["supernet:full disk"] == 3
    error = (out / "supernet" / "full disk" / "error.txt").read_text()
    assert "could not save" in error
    assert "File too large" in error
    assert "the checkpoints already in" in error
    assert "--resume" in error


@pytest.mark.kill
def test_the_unbroken_run_is_what_was_meant(unbroken):
    run_dir, _, lines = unbroken["supernet"]
    assert sorted(checkpoints(run_dir)) == ["supernet-00000012.safetensors", "supernet-00000015.safetensors"]
    assert [line["step"] for line in lines] == [3, 5, 6, 9, 10, 12, 15]
