"""Limits of a search: those of an earlier one do not stay in force silently, and config.yaml keeps the run's own."""

from __future__ import annotations

import json
import logging
import shlex

import pytest
from tiny import tiny_space

from nasfast.cli.commands import parse
from nasfast.cli.main import main
from nasfast.report.html import write_report
from nasfast.search import load_candidates
from nasfast.settings import RunConfig
from nasfast.spaces import SKIP

SPACE = tiny_space()
MOST, FEW, PARAMS = 60_000, 50_000, 5_000


def table_file(path, quantity: str, unit: str, value: float):
    entries = [
        {"layer": i, "choice": v, "value": value}
        for i, layer in enumerate(SPACE.layers)
        for v in layer.options
        if v != SKIP
    ]
    path.write_text(json.dumps({"quantity": quantity, "unit": unit, "entries": entries}))
    return path


@pytest.fixture
def search(tmp_path, monkeypatch, caplog):
    """A search in `run`, which begins with the limit MOST; it gives the first line and the limits of archs.json."""
    monkeypatch.chdir(tmp_path)
    SPACE.save("tiny.yaml")
    table_file(tmp_path / "ms.json", "latency", "ms", 1.0)
    table_file(tmp_path / "energy.json", "energy", "mJ", 1.0)
    caplog.set_level(logging.INFO, "nasfast")

    def run(flags: str) -> tuple[str, dict[str, float]]:
        caplog.clear()
        assert main(["search", "--out", "run", *shlex.split(flags)]) == 0
        return caplog.messages[0], load_candidates("run/archs.json").settings.limits

    line, _ = run(f"--space tiny.yaml --score depth --max_macs {MOST} --latency_table ms.json")
    assert line == f"limits of the search: max_macs={MOST:,} (command line)"
    return run


OWN = "run/config.yaml"
SEARCHES = [
    ("", {"max_macs": MOST}, f"max_macs={MOST:,} ({OWN}; --max_macs null removes it)"),
    (
        f"--max_params {PARAMS}",
        {"max_params": PARAMS},
        f"max_params={PARAMS:,} (command line); without max_macs={MOST:,} of {OWN}, which --add_limits keeps",
    ),
    (
        f"--max_params {PARAMS} --add_limits",
        {"max_macs": MOST, "max_params": PARAMS},
        f"max_macs={MOST:,} ({OWN}; --max_macs null removes it), max_params={PARAMS:,} (command line)",
    ),
    ("--max_macs null", {}, "none (--max_macs 60M sets one)"),
    ("--search.top_k 2", {"max_macs": MOST}, f"max_macs={MOST:,} ({OWN}; --max_macs null removes it)"),
    (
        "--max_latency_ms 7.5",  # of the table of the run
        {"max_latency_ms": 7.5},
        f"max_latency_ms=7.5 (command line); without max_macs={MOST:,} of {OWN}, which --add_limits keeps",
    ),
    (
        "--tables '[energy.json <= 40]'",
        {"energy.json": 40},
        f"energy.json <= 40 (command line); without max_macs={MOST:,} of {OWN}, which --add_limits keeps",
    ),
    ("--config own.yaml", {"max_macs": FEW}, f"max_macs={FEW:,} (own.yaml; --max_macs null removes it)"),
    (f"--config own.yaml --max_macs {MOST}", {"max_macs": MOST}, f"max_macs={MOST:,} (command line)"),
    ("--max_macs 7 --config own.yaml", {"max_macs": FEW}, f"max_macs={FEW:,} (own.yaml; --max_macs null removes it)"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "limits", "line"), SEARCHES, ids=[flags for flags, _, _ in SEARCHES])
def test_a_search_has_its_own_limits_alone_and_says_which(search, tmp_path, flags, limits, line):
    (tmp_path / "own.yaml").write_text(f"search: {{max_macs: {FEW}}}\n")
    before = RunConfig.load(OWN).search
    assert search(flags) == (f"limits of the search: {line}", limits)
    assert RunConfig.load(OWN).search == before, "the run's own stay"


def test_a_limit_of_a_table_is_left_out_and_the_table_stays(search):
    search("--score depth --tables '[energy.json]'")
    RunConfig.load(OWN).replace(search=RunConfig.load(OWN).search.replace(tables=("energy.json <= 40",))).save(OWN)
    assert search("")[0].endswith("energy.json <= 40 (run/config.yaml; --tables without it removes it)")
    line, limits = search(f"--max_params {PARAMS}")
    assert limits == {"max_params": PARAMS} and "energy.json <= 40 of run/config.yaml" in line
    assert [table.quantity for table in load_candidates("run/archs.json").tables] == ["latency", "energy"]


def test_the_limits_of_a_recipe_have_its_name(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "nasfast")
    assert main("search --out run --config demo --space digits_macro --score depth".split()) == 0
    assert caplog.messages[0] == "limits of the search: max_macs=700,000 (recipe demo; --max_macs null removes it)"


def test_the_page_says_where_limits_come_from(search, blank_figures):
    for flags, text in (
        ("", "(max_macs from config.yaml; `nasfast search --out run --max_macs null` searches without)"),
        (
            f"--max_macs {FEW} --max_params {PARAMS}",
            "(max_macs from the command line of the search, max_params from the command line of the search; "
            "`nasfast search --out run --max_macs null --max_params null` searches without)",
        ),
        ("--max_macs null", "Limits: none."),
    ):
        search(flags)
        assert text in write_report("run").read_text()


def test_a_limit_behind_the_search_is_refused(search, capsys):
    assert main(["retrain", "--out", "run", "--max_macs", "3M"]) == 1
    said = capsys.readouterr().err
    assert (
        "--max_macs is a limit of the search" in said and "run `nasfast search --out run --max_macs ...` first" in said
    )


@pytest.mark.parametrize("flag", ["max_macs", "max_params", "max_latency_ms"])
@pytest.mark.parametrize("command", ["run", "supernet", "score", "search", "retrain"])
def test_every_limit_has_a_short_flag(command, flag):
    assert parse([command, f"--{flag}", "5"])[1] == {"search": {flag: 5.0}}
