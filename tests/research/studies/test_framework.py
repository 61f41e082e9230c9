"""What the studies share: marks, the report and its page, progress, and the commands made from the registry."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nasfast.cli import commands
from nasfast.cli.main import main
from nasfast.research.analysis.moments.detect import Verdict
from nasfast.research.studies import registry
from nasfast.research.studies.draw import Figure, heat
from nasfast.research.studies.moments.config import ModuleConfig, QuickConfig
from nasfast.research.studies.report import Check, Claim, StudyReport, Table, plain
from nasfast.research.studies.run import progress, run_study
from nasfast.runtime.progress import Progress

REPORT = StudyReport(
    subject="two <things>",
    explanation="1 < 2.",
    notes=("a note",),
    tables=(Table("numbers", ("", "x", "told"), (("a", "-1.5", "grows"), ("b", "-", "falls"))),),
    verdicts={"a": Verdict(("grows", "late"), {"x": math.nan})},
    checks=(Check("met", 0, 1, 0.5), Check("missed", 1, math.inf, 0.5)),
    claims=(Claim("x < y", "x 2, y 1", "does not hold."),),
    name="example",
    config=QuickConfig(seed=4),
    machine={"device": "cpu", "threads": 1},
)


def test_checks():
    assert Check("", 0, 1, 0.5).passed and Check("", 0, 1, 1).passed and Check("", 4, math.inf, 1e9).passed
    assert not Check("", 0, 1, 1.01).passed and not Check("", 0, 1, math.nan).passed
    check = Check.near("a", 1.0, 0.1, 1.15)
    assert check.to_dict() == {"name": "a", "low": 0.9, "high": 1.1, "measured": 1.15, "passed": False}


def test_plain_is_json():
    value = {"a": np.array([1.0, math.nan]), "b": (np.float32(0.5), np.int64(2), np.bool_(True)), "c": [-math.inf, "x"]}
    assert plain(value) == {"a": [1.0, None], "b": [0.5, 2, True], "c": [None, "x"]}


def test_cells_of_a_table():
    table = Table.of("t", {"": "", "x": ".2f"}, [("a", 1.234), ("b", None), ("c", math.nan), ("d", "told")])
    assert table == Table("t", ("", "x"), (("a", "1.23"), ("b", "-"), ("c", "-"), ("d", "told")))


def test_a_figure_has_its_legends_and_a_map_its_numbers():
    figure = Figure("a $5 title", "", 3)
    one, two, three = figure.axes
    one.plot([1, 2, 3], [1, math.nan, 3], label="a")
    two.plot([1.5, 2], [2, 1], label="a")
    grid = np.array([[0.02, -0.041], [math.nan, 0.0]])
    heat(three, grid, ["r", "s"], ["c", "d"], limit=0.041, numbers=True)
    for _ in range(2):  # a page may be written again
        drawing = figure.drawing()
        # a label of two panels once; a title is text of a user
        assert [text.get_text() for legend in drawing.legends for text in legend.get_texts()] == ["a"]
    assert drawing.get_suptitle() == r"a \$5 title"
    assert three.images[0].get_clim() == (-0.041, 0.041) and three.images[0].get_array().mask[1, 0]
    # as many digits as the largest has two of
    assert [text.get_text() for text in three.texts] == ["0.020", "-0.041", "0.000"]
    small = Figure("", "", 1)
    heat(small.axes[0], grid / 10, ["r", "s"], ["c", "d"], limit=0.0041, numbers=True)
    assert small.drawing().axes[1].get_ylabel() == "in units of 1e-03"
    assert [text.get_text() for text in small.axes[0].texts] == ["2.0", "-4.1", "0.0"]
    rings = Figure("", "", 1, legend=False)
    heat(rings.axes[0], grid, ["r", "s"], ["c", "d"], limit=0.041)
    assert list(rings.axes[0].lines[0].get_xdata()) == [0, 1]


def test_a_report_as_text_and_files(tmp_path):
    text = str(REPORT)
    assert text.startswith("example: two <things>\na note\n\nnumbers\n      x   told\na  -1.5  grows\nb     -  falls\n")
    assert "a  grows, late" in text and "missed     1   -       0.5  MISSED" in text
    assert "claim:    x < y\nmeasured: x 2, y 1\nverdict:  does not hold." in text
    assert [check.name for check in REPORT.missed] == ["missed"]
    page = REPORT.save(tmp_path / "deep")
    assert page == tmp_path / "deep" / "example.html"
    form = json.loads((tmp_path / "deep" / "example.json").read_text())
    assert (form["name"], form["config"]["seed"], form["machine"]["device"]) == ("example", 4, "cpu")
    assert form["checks"][1] == {"name": "missed", "low": 1, "high": None, "measured": 0.5, "passed": False}
    assert form["verdicts"]["a"] == {"names": ["grows", "late"], "evidence": {"x": None}}
    text = page.read_text()
    for words in ("nasfast example", "1 of 2", "two &lt;things&gt;.", "1 &lt; 2.", "grows, late", "MISSED", "x &lt; y"):
        assert words in text
    # a column with a number in it is one of numbers, the others hold text
    assert '<td class="text short">a</td><td class="short">-1.5</td><td class="text short">grows</td>' in text
    bare = replace(REPORT, notes=(), tables=(), verdicts={}, checks=(), claims=(), explanation="")
    assert "pass marks" not in str(bare) and "pass marks" not in bare.save(tmp_path).read_text().lower()


def test_the_part_that_runs_is_shown_one_at_a_time(monkeypatch, capsys):
    times = iter(range(0, 10_000, 40))  # more than the seconds between two lines
    monkeypatch.setattr("nasfast.runtime.progress.time.monotonic", lambda: next(times))
    with progress() as task:
        for name in ("one", "two"):
            done = task(name, 3)
            for count in (1, 2, 3):
                done(count)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"{name} {i}/3" for name in ("one", "two") for i in (1, 2, 3)]
    monkeypatch.undo()
    monkeypatch.setenv("FORCE_COLOR", "1")
    # rich before 14.1 draws no bar beside another one: of a part that ended early, or of what a part calls
    with progress() as task:
        task("three", 3)(1)
        task("four", 4)(4)
        with Progress("a stage", 5) as stage:
            stage.update(5)
    shown = capsys.readouterr().err
    assert "1/3" in shown and "4/4" in shown and "5/5" in shown


def test_every_study_of_the_registry_can_be_run():
    assert len(registry.STUDIES) > 5
    for name, study in registry.STUDIES.items():
        assert registry.find(name) is study
        assert {"threads", "seed"} <= set(study.load("config")().to_dict())
        expected = ["cfg", "out", "task"] + ["tasks"] * study.tasks
        assert list(inspect.signature(study.load("run")).parameters) == expected
    with pytest.raises(KeyError, match="no study is called 'moments quik'; there are isometry, moments quick"):
        registry.find("moments quik")


def test_a_command_of_kinds(monkeypatch, capsys, tmp_path):
    calls = []

    def long_run(cfg, out, task):
        calls.append((cfg, out, torch.get_num_threads()))
        task("part", 2)(2)
        return REPORT

    def short_run(cfg, out, task):
        calls.append((cfg, out, torch.get_num_threads()))
        return replace(REPORT, checks=())

    place = "moments.config:", "moments.study:"
    kinds = {
        f"moments {name}": registry.Study(f"moments {name}", text, place[0] + config, place[1] + run, "example", *more)
        for name, text, config, run, *more in (
            ("long_one", "a long one", "QuickConfig", "long_run", True, "an extra file"),
            ("short", "a short one", "ModuleConfig", "short_run"),
        )
    }
    monkeypatch.setattr(registry, "STUDIES", kinds)
    monkeypatch.setattr(commands, "_parser", commands._parser.__wrapped__)  # the cached one may know the real kinds
    for run in (long_run, short_run):
        monkeypatch.setattr(f"nasfast.research.studies.moments.study.{run.__name__}", run, raising=False)
    # threads are those of the config, and given back
    before = torch.get_num_threads()
    threads = before + 1
    assert main(["moments", "long_one", "--seed=7", f"--threads={threads}", "--out", str(tmp_path)]) == 1
    assert calls == [(QuickConfig(seed=7, threads=threads), tmp_path, threads)]
    assert (tmp_path / "example.html").exists() and torch.get_num_threads() == before
    assert "1 of 2 pass marks missed" in capsys.readouterr().err
    form = json.loads((tmp_path / "example.json").read_text())
    assert form["machine"]["threads"] == threads and form["seconds"] >= 0 and form["environment"]["versions"]
    assert main(["moments", "short", "--batch", "5"]) == 0
    assert calls[1][:2] == (ModuleConfig(batch=5), None)
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
