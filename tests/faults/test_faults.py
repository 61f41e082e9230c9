"""Injects four kinds of faults once, and shows that the comparison with the undisturbed run can fail."""

from __future__ import annotations

import json
import shutil

import pytest

from .case import Saved
from .injections import killed
from .plans import PLANS, Plan
from .processes import ForkServer
from .runs import contents, damaged_files, newest_checkpoints
from .suite import Suite, rows_of, table


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Suite:
    return Suite(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def server(suite):
    server = ForkServer(suite.work / "server.log")
    yield server
    server.close()


# a death, a write that fails, a file that is damaged, and two runs at once; `python -m tests.faults` has all
FAULTS = ("SIGKILL", "file size limit (RLIMIT_FSIZE)", "newest checkpoint damaged", "second run in the directory")


def one_of_each(suite: Suite) -> list[Plan]:
    """The first plan of each of these faults."""
    return [next(plan for plan in PLANS if plan.fault == fault and suite.can(plan)) for fault in FAULTS]


# one test, because every process of pytest would make the undisturbed runs again
@pytest.mark.fault
def test_no_fault_loses_anything(suite, server):
    plans = one_of_each(suite)
    outcomes = [suite.run(plan, "test", server, forked=True) for plan in plans]
    assert [outcome.problems for outcome in outcomes] == [[]] * len(outcomes)
    assert min(outcome.injected for outcome in outcomes) > 0
    rows = rows_of(outcomes)
    assert json.loads(json.dumps(rows)) == rows
    assert table(rows).splitlines()[-1].split()[-3:] == [str(len(plans)), "of", str(len(plans))]


@pytest.mark.fault
def test_differences_and_losses_are_noticed(suite, server, tmp_path):
    """A run directory that a fault could have left is not taken for that of the undisturbed run."""
    reference = suite.reference("exact", "retrain", server)
    undisturbed, run = reference.after("retrain"), tmp_path / "run"
    shutil.copytree(undisturbed, run)
    assert contents(run) == contents(undisturbed)
    assert damaged_files(run) == []
    before = Saved(run)
    assert before.missing(run) == []

    newest = sorted((run / "checkpoints").glob("supernet-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    (run / "archs.json").unlink()
    (run / "indicators.json").write_text("{}")
    (run / ".config.yaml.7.tmp").touch()
    result = run / "retrain" / "best" / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "top1": 0.5, "seconds": 0}))
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines[1:]) + b"\n")
    ours, theirs = contents(run), contents(undisturbed)
    assert {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)} == {
        f"checkpoints/{newest.name}",
        "archs.json",
        "indicators.json",
        ".config.yaml.7.tmp",
        "retrain/best/result.json",
        "metrics.jsonl",
    }
    step = newest_checkpoints(undisturbed, read=True)["supernet"]
    lost = before.missing(run)
    assert lost[:2] == ["archs.json is gone", f"checkpoint {step} of supernet"]
    assert [text.split(":")[0] for text in lost[2:]] == [f"checkpoints/{newest.name}", "indicators.json"]


def test_every_fault_of_the_table_is_planned_often_enough():
    assert sum(plan.times for plan in PLANS) >= 100
    assert {plan.stage for plan in PLANS if plan.inject is killed} == {
        "supernet",
        "score",
        "search",
        "retrain",
        "report",
        "export",
    }
