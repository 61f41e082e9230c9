"""What a new user meets first: quick answers without torch, errors of one sentence with a remedy, nothing silent."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import types
import typing

import pytest
import yaml
from tiny import tiny_space, write_folder

from nasfast.cli import stages
from nasfast.cli.commands import parse
from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.structure import structure_table
from nasfast.measure.latency import Fit
from nasfast.pipeline.run import Run
from nasfast.runtime.termination import Terminated
from nasfast.settings import RunConfig
from nasfast.spaces import format_arch, get_space, list_spaces, named_space
from nasfast.spaces.cost_table import parse_cost_table
from nasfast.supernet import Supernet

PROGRAM = """
import sys
from nasfast.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print("imported:", *(name for name in ("torch", "torchvision", "scipy.stats", "matplotlib") if name in sys.modules))
sys.exit(code)
"""


def start(folder, *words: str, limit: float) -> tuple[int, str, str, bool]:
    """Exit status, output and errors of a command, and whether it takes at most so many CPU seconds.

    The first of three attempts may write bytecode, and another process may have the caches.
    """
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode")}  # one for all tests
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    for _ in range(3):
        before = os.times()
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], cwd=folder, env=env, capture_output=True, text=True
        )
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        if seconds <= limit:
            break
    return ended.returncode, ended.stdout, ended.stderr, seconds <= limit


QUICK = [
    ("--help", 0, "retrain"),
    ("--version", 0, "nasfast "),
    ("run --help", 0, "--search.max_macs"),
    ("spaces --resolution 128", 0, "mobilenet_v2_x0_5"),
    ("rnu", 2, "did you mean 'run'?"),
    ("run --retrain.train.epochs ten", 2, "--retrain.train.epochs takes a whole number, got 'ten'"),
    ("run --train.epochs -3 --data.source digits", 1, "epochs must be positive, got -3"),
    ("run --space foo --data.source digits", 1, "unknown space 'foo'"),
    ("run --score foo --data.source digits", 1, "unknown score 'foo'"),
    ("run --out /proc/x --data.source digits --space digits_macro", 1, "cannot create run directory /proc/x"),
    ("run --data.train nowhere", 1, "nowhere does not exist"),
    ("run --space mobilenet_v2 --max_macs 300M --data.train images", 1, "have 459,"),
    ("run --data.train images/a", 1, "images/a has no class folder: put each image into a folder named like its class"),
    ("run --data.train . --data.val images", 1, ". has one class only ('images')"),
    ("run --data.train images --data.val images/b", 1, "images/b has no class folder"),
    ("export --out nowhere", 1, "nowhere is no directory"),
    ("report nowhere", 1, "nowhere is no directory"),
    ("rank --out .", 2, "give either --table FILE or --train N"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "status", "said"), QUICK, ids=[words for words, _, _ in QUICK])
def test_what_needs_no_torch_does_not_wait_for_it(tmp_path, words, status, said):
    for name in "abcd":
        (tmp_path / "images" / name).mkdir(parents=True)
    code, out, err, quick = start(tmp_path, *words.split(), limit=1)
    assert (code, out.splitlines()[-1]) == (status, "imported:")
    assert said in out + err and quick


@pytest.fixture
def searched(tmp_path):
    """A run directory with a table and without a supernet."""
    out = tmp_path / "run"
    form = {"out": str(out), "score": {"name": "isometry"}, "space": {"name": str(out / "space.yaml")}}
    out.mkdir()
    space = tiny_space()
    space.save(out / "space.yaml")
    run = Run.look(RunConfig.from_dict(form))
    run.save_config()
    meta = {"seed": 0, "settings": run.cfg.score_settings, "score": "isometry"}
    table = structure_table(space, "sqrt_size")
    type(table).from_rows(space, table.block, meta).save(out / "indicators.json")
    return out


@pytest.mark.slow
def test_a_search_of_a_saved_table_needs_no_torch(searched):
    code, out, err, quick = start(searched.parent, "search", "--out", "run", "--search.top_k", "2", limit=2)
    assert code == 0, err
    assert out.splitlines()[-1] == "imported:" and "next: nasfast retrain --out run" in out
    assert tiny_space().words(json.loads((searched / "archs.json").read_text())["candidates"][0]["arch"]) in out
    assert quick


TRAINS = """
import sys
from nasfast.cli.main import main
main(["spaces"])
import nasfast.cli.commands, nasfast.data, nasfast.pipeline.stages, nasfast.retrain
assert "torch" in sys.modules and "torchvision" not in sys.modules
"""


@pytest.mark.slow
def test_training_waits_for_no_threads_that_spin_nor_for_the_models_of_torchvision():
    """What libgomp says when torch loads it."""
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment["OMP_DISPLAY_ENV"] = "verbose"
    ended = subprocess.run([sys.executable, "-c", TRAINS], env=environment, capture_output=True, text=True, check=True)
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\w+)'", ended.stderr)) == {"100"}


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "100"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)]
)
def test_a_choice_of_how_threads_wait_is_kept(given, spins, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main(["spaces"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def settings() -> dict[str, typing.Any]:
    """Every flag of `run` that does not take any text, with its type."""
    parser = parse(["run", "--data.source", "digits"])[2]
    hints = {flag: getattr(action, "_typehint", None) for flag, action in parser._option_string_actions.items()}
    return {
        flag: hint
        for flag, hint in hints.items()
        if hint is not None and str not in (hint, *typing.get_args(hint)) and not isinstance(hint, type(RunConfig))
    }


def kinds(hint) -> str:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return " ".join(sorted({getattr(typing.get_origin(o) or o, "__name__", str(o)) for o in options}))


def test_a_wrong_value_of_a_setting_of_any_type_is_one_sentence(capsys):
    found: dict[str, list[str]] = {}
    for flag, hint in settings().items():
        found.setdefault(kinds(hint), []).append(flag)
    assert len(found) >= 7
    for flag in (flag for flags in found.values() for flag in flags[:4]):
        with pytest.raises(SystemExit) as ended:
            parse(["run", flag, "0,7x"])
        said = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert len(said) == 2, said
        assert said[0].startswith(f"nasfast run: {flag} takes ") and said[0].endswith(", got '0,7x'"), said
        assert "<class" not in said[0] and "Union" not in said[0], said
        assert said[1] == "all flags: nasfast run --help_all"


MISTAKES = [
    ("run --max_macs -5M", "--search.max_macs takes a number, such as 0.5, 475e6 or 2.4M (or null), got '-5M'"),
    ("run --out", "--out takes a text, got nothing"),
    ("run --seed --out x", "--seed takes a whole number, got nothing"),
    ("run --max_macs -5 --data.source digits", "search: max_macs must be positive and finite (null for no limit), got"),
    (
        "run --data.source digits --space.resolution 7",
        "images of 7 x 7 pixels are too small for space 'mobilenet_v2', whose layers divide their side by 32: give a "
        "resolution of at least 32",
    ),
    ("run --data.source digits --space no.yaml", "there is no file no.yaml: give the path of a space, or a name"),
    (
        "run --config broken.yaml",
        "broken.yaml is not valid YAML at line 2, column 7 (expected ',' or '}', but got",
    ),
    ("run --config no.yaml", "cannot read no.yaml (No such file or directory): give the path of a YAML file"),
    ("rank --predictor few.csv --table no.json", "cannot read few.csv (No such file or directory): give JSON such as"),
    ("latency --device onxx", "device must be cpu, cuda, cuda:N or onnx, because a table is of one device; got 'onxx'"),
    (
        "search --out run --space nas_bench_201",
        "by `nasfast nasi search --out runs/cells --space nas_bench_201 --images",
    ),
    ("run --device onxx --data.source digits", "nasfast run: device must be auto, cpu, cuda or cuda:N, got 'onxx'"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_sentence_with_its_remedy(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("train: {epochs: 3\nsearch: max_macs: 3\n")
    try:
        code = main(words.split())
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err.splitlines()
    assert code and message in said[0]
    assert len(said) == code  # wrong flags, status 2, have the command that lists all flags besides


def test_a_run_without_out_says_where_it_writes(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "nasfast")
    tiny_space().save(tmp_path / "tiny.yaml")
    said = "everything is written to runs/nasfast, because --out gives no other folder"
    for flags, expected in (([], True), (["--out", "here"], False)):
        caplog.clear()
        assert main(["search", "--space", "tiny.yaml", "--score", "depth", *flags]) == 0
        assert (said in caplog.messages) == expected


def test_help_names_the_folder_of_a_run(capsys):
    with pytest.raises(SystemExit):
        parse(["run", "--help"])
    assert "the folder that the command reads and writes. Default: runs/nasfast" in capsys.readouterr().out


def test_help_has_two_tiers(capsys):
    lines = {}
    for flag in ("--help", "--help_all"):
        with pytest.raises(SystemExit):
            parse(["run", flag])
        lines[flag] = capsys.readouterr().out.splitlines()
    assert len(lines["--help"]) < 30 < 300 < len(lines["--help_all"])
    assert any("--config photos" in line for line in lines["--help"])
    with pytest.raises(SystemExit):
        parse(["nasi", "search", "--help"])
    shown = capsys.readouterr().out
    assert "--images" in shown and "--config photos" not in shown


@pytest.mark.parametrize("command", ["run", "supernet", "search"])
def test_short_flags_are_the_same_everywhere(command):
    assert parse([command, "--space", "digits_macro", "--max_macs=1M"])[1] == {
        "space": {"name": "digits_macro"},
        "search": {"max_macs": 1e6},
    }


@pytest.mark.parametrize("name", [name for name in list_spaces() if named_space(name).LAYERWISE])
def test_a_limit_that_nothing_meets_is_refused_and_one_that_all_meet_is_not(name, tmp_path, capsys, monkeypatch):
    """As in Python, where the search says that it chooses nothing. A list of images gives the classes, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").write_text("a.png cat\nb.png dog\n")
    started = []

    def begun(cfg, tasks, *, begins):
        started.append(cfg.search.max_macs)
        raise Terminated

    monkeypatch.setattr(stages, "_open_run", begun)
    monkeypatch.setattr("nasfast.pipeline.estimate.warn_of_memory", lambda cfg, tasks: None)
    space = get_space(name, num_classes=2)
    most = sum(max(cost.macs for cost in row.values()) for row in space.option_costs()) + space.fixed_cost.macs
    least = sum(min(cost.macs for cost in row.values()) for row in space.option_costs()) + space.fixed_cost.macs
    flags = ["run", "--data.train", "images", "--space", name, "--max_macs"]
    assert main([*flags, str(least - 1)]) == 1
    said = capsys.readouterr().err
    assert f"max_macs={least - 1:,} cannot be met" in said and f"have {least:,} MACs to {most:,} MACs; raise" in said
    assert not (tmp_path / "runs").exists() and not started
    assert main([*flags, str(least)]) == main([*flags, str(most)]) == 143 and started == [least, most]


def test_a_space_has_networks_of_50_to_300_million_macs(capsys):
    assert main(["spaces"]) == 0
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("mobilenet_v2_x0_5"))
    assert row[1] == "224" and float(row[5]) < 70 and float(row[8]) > 300


def test_numbers_are_shown_to_those_who_ask(searched, capsys):
    for flags, shown in (([], False), (["--verbose"], True)):
        assert main(["search", "--out", str(searched), "--search.top_k", "1", *flags]) == 0
        out = capsys.readouterr().out
        best = json.loads((searched / "archs.json").read_text())["candidates"][0]
        assert tiny_space().words(best["arch"]) in out
        assert (f"[{format_arch(best['arch'])}]  score {best['score']:.6g}" in out) == shown


def test_what_trains_is_said_in_words():
    summary = Supernet(tiny_space()).freeze("bn", classifier=True)
    assert re.fullmatch(r"[\d.]+ % of [\d,]+ weights train: BatchNorms and the classifier", summary.words)
    assert "tensors" not in summary.words


def test_links_to_a_folder_above_are_counted_once(tmp_path, caplog):
    root = write_folder(tmp_path / "images", {"a": 3, "b": 3})
    (root / "a" / "again").symlink_to(root / "a", target_is_directory=True)
    (root / "a" / "notes.txt").touch()
    for _ in range(2):
        assert len(FolderSource(root)) == 6
    assert [m for m in caplog.messages if "is a link to a folder" in m] == [m for m in caplog.messages if "again" in m]
    assert (
        sum("is a link" in m for m in caplog.messages)
        == 1
        == sum("skipped 1 file without" in m for m in caplog.messages)
    )


def test_a_batch_larger_than_the_data_is_said(tmp_path, caplog):
    root = write_folder(tmp_path / "images", {"a": 3, "b": 3})
    make_loader(DataConfig(train=str(root), batch_size=50, loader="torchvision"), resolution=12)
    assert any("batch_size=50 is more than the 4 training images" in message for message in caplog.messages)


def test_the_page_of_a_shrink_run_that_has_only_begun_is_its_own(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("model: torchvision:mobilenet_v2\n")
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert "Not run yet: `nasfast shrink --resume` writes it" in (tmp_path / "report.html").read_text()
    # damaged settings are those of no run
    (tmp_path / "config.yaml").write_text("model: [")
    main(["report", "--out", str(tmp_path)])
    assert "Not run yet: `nasfast shrink --resume` writes it" not in (tmp_path / "report.html").read_text()


def test_a_damaged_result_is_an_error_of_the_report(searched, capsys):
    (searched / "archs.json").write_text('{"a": 1}')
    assert main(["report", "--out", str(searched)]) == 1
    assert "archs.json" in capsys.readouterr().err


def test_no_block_of_a_latency_table_is_free():
    space = tiny_space()
    entries = [{"layer": i, "choice": c, "value": 1.0} for i, layer in enumerate(space.layers) for c in layer.options]
    entries[1]["value"] = 0.0
    form = {"quantity": "latency", "unit": "ms", "entries": entries}
    with pytest.raises(ConfigError, match="layer 0, choice 1 .* computes, and takes 0: measure again"):
        parse_cost_table(form, space)
    parse_cost_table({**form, "quantity": "energy"}, space)
    # a negative cost per part would make short parts free
    assert Fit.least_squares([1.0, 10.0], [10, 10], [0.5, 14.0]).per_part < 0
    assert Fit.least_squares([1.0, 10.0], [10, 10], [0.5, 14.0], shortest=0.01).value(0.01) > 0


def test_a_search_says_how_many_classes_it_takes(tmp_path, caplog):
    caplog.set_level(logging.INFO, "nasfast")
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(tiny_space().to_dict()))
    for number, flags in enumerate(([], ["--num_classes", "4"])):
        assert (
            main(["search", "--out", str(tmp_path / str(number)), "--space", str(path), "--score", "depth", *flags])
            == 0
        )
    assert sum("--num_classes N makes it yours" in message for message in caplog.messages) == 1
