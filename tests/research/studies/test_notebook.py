"""The report of a study: what it prints, its files, and the commands of the studies."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from nasfast.cli.main import main
from nasfast.report.plots import new_figure
from nasfast.research.studies import commands
from nasfast.research.studies.commands import Study, StudyConfig
from nasfast.research.studies.notebook import Notebook, plain


def example(cfg: StudyConfig, notes: Notebook) -> None:
    """A study."""
    notes.say("Two <things>.")
    notes.table("numbers", {"": "", "x": ".1f", "told": ""}, [("a", -1.52, "grows"), ("b", math.nan, "falls")])
    notes.mark("met", 0.5, at_least=0, at_most=0.5)
    notes.mark("missed", math.nan, at_least=1, note="a note")
    notes.data["threads"] = torch.get_num_threads()
    figure, axes = new_figure(6, 3, columns=2)
    for ax in axes:
        ax.plot([1, 2], [1, cfg.seed], label="a")
    notes.figure("a $5 title", "a caption", figure)


@pytest.fixture
def studies(monkeypatch):
    monkeypatch.setattr("nasfast.research.studies.notebook.example", example, raising=False)
    monkeypatch.setitem(commands.STUDIES, "wiring theorems", Study("a text", StudyConfig, "notebook:example"))


def test_marks_are_met_on_their_ends_and_missed_by_nan(capsys):
    notes = Notebook("n", StudyConfig())
    for value, bounds in ((1.0, {"at_least": 1}), (1.0, {"at_most": 1}), (1e9, {"at_least": 4})):
        notes.mark("ok", value, **bounds)
    assert notes.missed == []
    for value, bounds in ((1.01, {"at_most": 1}), (math.nan, {"at_least": 0}), (math.nan, {})):
        notes.mark("not", value, **bounds)
    assert notes.missed == ["not"] * 3
    assert capsys.readouterr().out.splitlines()[3] == "MISSED  not: 1.01 (<= 1)"


def test_plain_is_json():
    value = {"a": np.array([1.0, math.nan]), 1: (np.float32(0.5), np.int64(2), np.bool_(True)), "c": [-math.inf, "x"]}
    assert plain(value) == {"a": [1.0, None], "1": [0.5, 2, True], "c": [None, "x"]}


def test_a_study_prints_and_writes_what_it_finds(studies, tmp_path, capsys):
    before = torch.get_num_threads()
    argv = ["wiring", "theorems", "--seed", "4", "--threads", str(before + 1), "--out", str(tmp_path / "deep")]
    assert main(argv) == 1
    shown = capsys.readouterr()
    assert "\nnumbers\n      x   told\na  -1.5  grows\nb     -  falls\n" in shown.out
    assert "ok      met: 0.5 (>= 0, <= 0.5)\nMISSED  missed: nan (>= 1); a note\n" in shown.out
    assert "1 of 2 pass marks missed: missed" in shown.err
    form = json.loads((tmp_path / "deep/wiring-theorems.json").read_text())
    assert (form["threads"], torch.get_num_threads()) == (before + 1, before)
    assert (form["name"], form["settings"]["seed"], form["seconds"] >= 0) == ("wiring-theorems", 4, True)
    expected = {"name": "missed", "at_least": 1, "at_most": None, "measured": None, "passed": False, "note": "a note"}
    assert form["marks"][1] == expected
    page = (tmp_path / "deep/wiring-theorems.html").read_text()
    for words in ("nasfast wiring-theorems", "1 of 2", "Two &lt;things&gt;.", "MISSED", "a caption", "a note"):
        assert words in page
    # a column with a number in it is one of numbers, the others hold text
    assert '<td class="text short">a</td><td class="short">-1.5</td><td class="text short">grows</td>' in page
    assert (tmp_path / "deep/wiring-theorems/figure1.svg").exists()


def test_a_study_without_a_directory_writes_nothing(studies, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["wiring", "theorems"]) == 1
    assert not list(tmp_path.iterdir()) and "written" not in capsys.readouterr().out


def test_kinds_are_listed_and_others_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["wiring", "--help"])
    assert stopped.value.code == 0
    assert "    p1                  growing: None leads first, then operations\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["wiring", "p4"])
    assert "'p4' (choose from 'theorems', 'p1', 'p2', 'p3', 'cost')" in capsys.readouterr().err


def test_studies_have_few_settings():
    classes = {base for study in commands.STUDIES.values() for base in study.config.mro()}
    own = [vars(base).get("__annotations__", {}) for base in classes if base.__module__ == commands.__name__]
    assert sum(map(len, own)) < 30
