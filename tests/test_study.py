"""What the studies share: marks, the report and its page, progress, and the commands with kinds."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nasfast.cli import commands
from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.moments import ModuleConfig, QuickConfig
from nasfast.report import write_study_page
from nasfast.study import Check, StudyReport, Table, carry_out, plain, progress, run_study, sample_shape


def test_checks():
    assert Check("", 0, 1, 0.5).passed and Check("", 0, 1, 1).passed
    assert not Check("", 0, 1, 1.01).passed and not Check("", 0, 1, math.nan).passed
    assert Check("", 4, math.inf, 1e9).passed


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
    def study(task):
        task("part", 2)(2)
        return {
            "subject": "two <things>",
            "explanation": "1 < 2.",
            "notes": ("a note",),
            "tables": (Table("numbers", ("", "x", "told"), (("a", "-1.5", "grows"), ("b", "-", "falls"))),),
            "verdicts": {"a": {"names": ("grows", "late"), "evidence": {"x": math.nan}}},
            "checks": (Check("met", 0, 1, 0.5), Check("missed", 1, math.inf, 0.5)),
        }

    return run_study("example", QuickConfig(threads=1, seed=4), study, device="cpu:0")


def test_a_report_as_text(report):
    text = str(report)
    assert text.startswith("example: two <things>\na note\n\nnumbers\n      x   told\na  -1.5  grows\nb     -  falls\n")
    assert "a  grows, late" in text and "missed         1       inf       0.5  MISSED" in text
    assert [check.name for check in report.missed] == ["missed"]


def test_a_report_as_files(report, tmp_path):
    page = report.save(tmp_path / "deep")
    assert page == tmp_path / "deep" / "example.html"
    form = json.loads((tmp_path / "deep" / "example.json").read_text())
    assert (form["name"], form["config"]["seed"], form["machine"]["device"]) == ("example", 4, "cpu:0")
    assert form["checks"][1] == {"name": "missed", "low": 1, "high": None, "measured": 0.5, "passed": False}
    assert form["verdicts"]["a"] == {"names": ["grows", "late"], "evidence": {"x": None}}
    text = page.read_text()
    for words in ("nasfast example", "1 of 2", "two &lt;things&gt;.", "1 &lt; 2.", "grows, late", "MISSED"):
        assert words in text
    # a column with a number in it is one of numbers, the others hold text
    assert "<td class=text>a</td><td>-1.5</td><td class=text>grows</td>" in text
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
    found = carry_out(QuickConfig(threads=before + 1), lambda: {"seen": torch.get_num_threads()})
    assert found["seen"] == found["machine"]["threads"] == before + 1
    assert torch.get_num_threads() == before
    assert found["seconds"] >= 0 and found["environment"]["versions"]


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


def test_a_command_of_kinds(report, monkeypatch, capsys, tmp_path):
    calls = []

    def resumed(cfg, *, out):
        calls.append((cfg, out))
        return report

    def short(cfg):
        calls.append(cfg)
        return replace(report, checks=())

    kinds = {
        "long_one": commands._Study(QuickConfig, resumed, "a long one", resumes=True),
        "short": commands._Study(ModuleConfig, short, "a short one"),
    }
    monkeypatch.setitem(commands._STUDIES, "moments", kinds)
    out = str(tmp_path)
    assert main(["moments", "long_one", "--seed", "7", "--out", out]) == 1
    assert calls == [(QuickConfig(seed=7), out)] and (tmp_path / "example.html").exists()
    assert "1 of 2 pass marks missed" in capsys.readouterr().err
    assert main(["moments", "short", "--batch", "5", "--out", out]) == 0
    assert calls[1:] == [ModuleConfig(batch=5)]
    with pytest.raises(SystemExit) as stopped:
        main(["moments", "--help"])
    assert stopped.value.code == 0
    assert "\n  long_one  a long one\n  short     a short one\n" in capsys.readouterr().out
    for kind, told in (("long_one", True), ("short", False)):
        with pytest.raises(SystemExit):
            main(["moments", kind, "--help"])
        assert ("continues from what it has there" in " ".join(capsys.readouterr().out.split())) == told
    assert main(["moments", "long"]) == 1
    assert "expected one of long_one, short behind moments, got 'long'" in capsys.readouterr().err
