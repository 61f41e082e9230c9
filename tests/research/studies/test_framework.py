"""What the studies share: marks, the report and its page, progress, the registry, and the commands made from it."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.research.analysis.moments.detect import Verdict
from nasfast.research.studies import registry
from nasfast.research.studies.inputs import sample_shape
from nasfast.research.studies.moments.config import ModuleConfig, QuickConfig
from nasfast.research.studies.page import write_study_page
from nasfast.research.studies.report import Check, Claim, StudyReport, Table, plain
from nasfast.research.studies.run import carry_out, progress, run_study


def test_checks():
    assert Check("", 0, 1, 0.5).passed and Check("", 0, 1, 1).passed
    assert not Check("", 0, 1, 1.01).passed and not Check("", 0, 1, math.nan).passed
    assert Check("", 4, math.inf, 1e9).passed


def test_checks_around_a_value():
    check = Check.near("a", 1.0, 0.1, 1.05)
    assert check.passed and (check.low, check.high) == (0.9, 1.1)
    assert not Check.near("", 1.0, 0.1, 1.15).passed and not Check.near("", 1.0, 0.1, math.nan).passed
    assert Check("a", 0, 1, 2.0).to_dict() == {"name": "a", "low": 0, "high": 1, "measured": 2.0, "passed": False}


def test_plain_is_json():
    value = {"a": np.array([1.0, math.nan]), "b": (np.float32(0.5), np.int64(2), np.bool_(True)), "c": [-math.inf, "x"]}
    assert plain(value) == {"a": [1.0, None], "b": [0.5, 2, True], "c": [None, "x"]}
    json.dumps(plain(value), allow_nan=False)


@pytest.mark.parametrize("text", ["", "3,x", "3,0", "-1"])
def test_shapes(text):
    assert sample_shape("3, 4") == (3, 4)
    with pytest.raises(ConfigError, match=f"input must be positive integers such as 3,224,224, got '{text}'"):
        sample_shape(text)


@pytest.fixture(scope="module")
def report() -> StudyReport:
    def study(cfg, out, task):
        task("part", 2)(2)
        return StudyReport(
            subject="two <things>",
            explanation="1 < 2.",
            notes=("a note",),
            tables=(Table("numbers", ("", "x", "told"), (("a", "-1.5", "grows"), ("b", "-", "falls"))),),
            verdicts={"a": Verdict(("grows", "late"), {"x": math.nan})},
            checks=(Check("met", 0, 1, 0.5), Check("missed", 1, math.inf, 0.5)),
        )

    return carry_out("example", QuickConfig(threads=1, seed=4), study)


def test_a_report_as_text(report):
    text = str(report)
    assert text.startswith("example: two <things>\na note\n\nnumbers\n      x   told\na  -1.5  grows\nb     -  falls\n")
    assert "a  grows, late" in text and "missed     1   -       0.5  MISSED" in text
    assert [check.name for check in report.missed] == ["missed"]


def test_a_report_as_files(report, tmp_path):
    page = report.save(tmp_path / "deep")
    assert page == tmp_path / "deep" / "example.html"
    form = json.loads((tmp_path / "deep" / "example.json").read_text())
    assert (form["name"], form["config"]["seed"], form["machine"]["device"]) == ("example", 4, "cpu")
    assert form["checks"][1] == {"name": "missed", "low": 1, "high": None, "measured": 0.5, "passed": False}
    assert form["verdicts"]["a"] == {"names": ["grows", "late"], "evidence": {"x": None}}
    text = page.read_text()
    for words in ("nasfast example", "1 of 2", "two &lt;things&gt;.", "1 &lt; 2.", "grows, late", "MISSED"):
        assert words in text
    # a column with a number in it is one of numbers, the others hold text
    assert '<td class="text short">a</td><td class="short">-1.5</td><td class="text short">grows</td>' in text
    # the page is made of the file alone
    page.unlink()
    assert write_study_page(tmp_path / "deep", "example").read_text() == text


def test_a_report_without_marks_and_verdicts(report, tmp_path):
    bare = replace(report, notes=(), tables=(), verdicts={}, checks=(), explanation="")
    assert bare.missed == [] and "pass marks" not in str(bare)
    text = bare.save(tmp_path).read_text()
    assert "Pass marks" not in text and "pass marks met" not in text and "verdict" not in text


def test_threads_are_those_of_the_config_and_given_back():
    before = torch.get_num_threads()
    seen = []

    def study(cfg, out, task):
        seen.append(torch.get_num_threads())
        return StudyReport(subject="threads")

    found = carry_out("threads", QuickConfig(threads=before + 1), study)
    assert seen[0] == found.machine["threads"] == before + 1
    assert torch.get_num_threads() == before
    assert found.seconds >= 0 and found.environment["versions"]


def test_progress_is_lines_without_a_terminal(caplog):
    caplog.set_level("INFO", "nasfast")
    with progress() as task:
        done = task("part", 3)
        for count in (1, 2, 3, 3):
            done(count)
    # at most one every ten seconds, but the end once
    assert caplog.messages == ["part: 1 of 3", "part: 3 of 3"]


def test_progress_is_bars_on_a_terminal(monkeypatch, caplog, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    caplog.set_level("INFO", "nasfast")
    with progress() as task:
        first, second = task("one", 3), task("two", 4)
        first(3)
        second(1)
    shown = capsys.readouterr().err
    assert "one" in shown and "two" in shown and "3/3" in shown and "1/4" in shown
    assert not caplog.text


def test_claims_are_told_with_their_verdicts(report, tmp_path):
    told = replace(report, claims=(Claim("x < y", "x 2, y 1", "does not hold."),))
    assert "claim:    x < y\nmeasured: x 2, y 1\nverdict:  does not hold." in str(told)
    assert told.to_dict()["claims"] == [{"claim": "x < y", "measured": "x 2, y 1", "verdict": "does not hold."}]
    text = told.save(tmp_path).read_text()
    assert "x &lt; y" in text and "does not hold." in text


def test_cells_of_a_table():
    table = Table.of("t", {"": "", "x": ".2f"}, [("a", 1.234), ("b", None), ("c", math.nan), ("d", "told")])
    assert table == Table("t", ("", "x"), (("a", "1.23"), ("b", "-"), ("c", "-"), ("d", "told")))


def test_every_study_of_the_registry_can_be_run():
    names = registry.names()
    assert len(set(names)) == len(names) > 10
    for studies in registry.COMMANDS.values():
        for study in studies:
            assert registry.find(study.name) is study
            assert {"threads", "seed"} <= set(study.load("config")().to_dict())
            expected = ["cfg", "out", "task"] + ["tasks"] * study.tasks
            assert list(inspect.signature(study.load("run")).parameters) == expected
    with pytest.raises(KeyError, match="no study is called 'moments quik'; there are isometry, moments quick"):
        registry.find("moments quik")


def test_a_command_of_kinds(report, monkeypatch, capsys, tmp_path):
    calls = []

    def long_run(cfg, out, task):
        calls.append((cfg, out))
        return report

    def short_run(cfg, out, task):
        calls.append((cfg, out))
        return replace(report, checks=())

    kinds = (
        registry.Study(
            "moments", "long_one", "a long one", "QuickConfig", "long_run", "example", True, "an extra file"
        ),
        registry.Study("moments", "short", "a short one", "ModuleConfig", "short_run", "example"),
    )
    monkeypatch.setitem(registry.COMMANDS, "moments", kinds)
    for run in (long_run, short_run):
        monkeypatch.setattr(f"nasfast.research.studies.moments.study.{run.__name__}", run, raising=False)
    assert main(["moments", "long_one", "--seed", "7", "--out", str(tmp_path)]) == 1
    assert calls == [(QuickConfig(seed=7), tmp_path)] and (tmp_path / "example.html").exists()
    assert "1 of 2 pass marks missed" in capsys.readouterr().err
    assert main(["moments", "short", "--batch", "5"]) == 0
    assert calls[1:] == [(ModuleConfig(batch=5), None)]
    with pytest.raises(SystemExit) as stopped:
        main(["moments", "--help"])
    assert stopped.value.code == 0
    assert "\n    long_one            a long one\n    short               a short one\n" in capsys.readouterr().out
    for kind, told in (("long_one", True), ("short", False)):
        with pytest.raises(SystemExit):
            main(["moments", kind, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "example.json, the page example.html" in text
        assert ("continues from what it has there" in text) == ("an extra file" in text) == told
    with pytest.raises(SystemExit):
        main(["moments", "long"])
    assert "'long' (choose from 'long_one', 'short')" in capsys.readouterr().err
    assert run_study("moments short").config == ModuleConfig()
