"""Every kind of fault that the injector knows, once, and that its comparison can fail."""

from __future__ import annotations

import json
import shutil

import pytest

from . import __main__ as faults
from .processes import ForkServer
from .runs import contents, damaged_files, newest_checkpoints


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> faults.Suite:
    return faults.Suite(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def server(suite):
    server = ForkServer(suite.work / "server.log")
    yield server
    server.close()


def one_of_each(suite: faults.Suite) -> list[faults.Plan]:
    """The first plan of each fault that can be injected here."""
    plans = {}
    for plan in faults.PLANS:
        if suite.can(plan):
            plans.setdefault(plan.fault, plan)
    return list(plans.values())


# one test, because the processes that run tests side by side would each make the runs in peace
@pytest.mark.slow
def test_no_fault_loses_anything(suite, server):
    plans = one_of_each(suite)
    outcomes = [suite.run(plan, "test", server, forked=True) for plan in plans]
    assert [outcome.problems for outcome in outcomes] == [[]] * len(outcomes)
    assert min(outcome.injected for outcome in outcomes) > 0
    rows = faults.rows_of(outcomes)
    assert json.loads(json.dumps(rows)) == rows
    assert faults.table(rows).splitlines()[-1].split()[-3:] == [str(len(plans)), "of", str(len(plans))]


@pytest.mark.slow
def test_differences_and_losses_are_seen(suite, server, tmp_path):
    """Not vacuous: what a fault could do to a run directory does not pass for the run in peace."""
    reference = suite.reference("exact", "retrain", server)
    peace, run = reference.after("retrain"), tmp_path / "run"
    shutil.copytree(peace, run)
    assert contents(run) == contents(peace)
    assert damaged_files(run) == []
    before = faults._Saved(run)
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
    ours, theirs = contents(run), contents(peace)
    assert {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)} == {
        f"checkpoints/{newest.name}", "archs.json", "indicators.json", ".config.yaml.7.tmp",
        "retrain/best/result.json", "metrics.jsonl",
    }  # fmt: skip
    step = newest_checkpoints(peace, read=True)["supernet"]
    lost = before.missing(run)
    assert lost[:2] == ["archs.json is gone", f"checkpoint {step} of supernet"]
    assert [text.split(":")[0] for text in lost[2:]] == [f"checkpoints/{newest.name}", "indicators.json"]


def test_every_fault_of_the_table_is_planned_often_enough():
    assert sum(plan.times for plan in faults.PLANS) >= 100
    assert {plan.stage for plan in faults.PLANS if plan.inject is faults.killed} == {
        "supernet", "score", "search", "retrain", "report", "export",
    }  # fmt: skip
