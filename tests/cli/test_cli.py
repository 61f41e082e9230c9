"""The command line: help, precedence of settings, and errors that name the nearest."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import tiny_space

import nasfast
from nasfast import extensions
from nasfast.cli import stages as commands
from nasfast.cli.commands import COMMANDS, parse
from nasfast.cli.flags import Parser, run_config
from nasfast.cli.main import main
from nasfast.config import load_yaml, to_number
from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.pipeline import run as run_module
from nasfast.pipeline import stages
from nasfast.pipeline.run import Run, resolved
from nasfast.research.studies.commands import STUDIES
from nasfast.retrain import save_model
from nasfast.settings import RunConfig
from nasfast.spaces import nas_bench_macro
from nasfast.supernet import build

LINES = {**{name: command.text for name, command in COMMANDS.items()}, **extensions.COMMANDS}


@pytest.fixture
def seen(monkeypatch) -> list:
    """Stages replaced by ones that note their arguments."""
    calls = []
    for name in ("check_begins", "check_directory"):  # the settings of these tests name no images
        monkeypatch.setattr(commands, name, lambda *_, **__: None)
    monkeypatch.setattr(Run, "check_settings", lambda *_, **__: None)
    monkeypatch.setattr(run_module, "run_lock", lambda *_, **__: contextlib.nullcontext())
    for name in ("supernet", "score"):
        monkeypatch.setattr(stages, name, lambda run, _name=name, **k: calls.append((_name, run.cfg, k)))
    return calls


def said(capsys, *words: str, status: int = 0) -> str:
    """What a command that ends with this status shows on standard output, or on standard error where it fails."""
    try:
        code = main(list(words))
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr()
    assert code == status, shown.err
    return shown.err if status else shown.out


def config_of(seen, *argv: str) -> RunConfig:
    assert main(["supernet", *argv]) == 0
    return seen.pop()[1]


def test_defaults_are_those_of_the_config(seen):
    assert config_of(seen) == resolved(RunConfig())


def test_flags_reach_every_level(seen):
    flags = "--out x --seed=7 --train.lr 2.5e-1 --search.max_macs 475e6 --retrain.train.epochs 3"
    flags += " --supernet.layer_indicators false --space.name digits_mini"
    cfg = config_of(seen, *flags.split(), "--data.mean", "[0.1, 0.2, 0.3]")
    assert (cfg.out, cfg.seed, cfg.train.lr, cfg.search.max_macs) == ("x", 7, 0.25, 475e6)
    assert (cfg.retrain.train.epochs, cfg.data.mean, cfg.supernet.layer_indicators) == (3, (0.1, 0.2, 0.3), False)
    assert cfg.retrain.train.lr == RunConfig().retrain.train.lr
    assert cfg.space.name == "digits_mini"


def test_later_files_and_flags_win(seen, tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("seed: 1\ntrain: {epochs: 11, lr: 4e-2}\nsearch: {max_macs: 475e6}\n")
    two.write_text("train: {epochs: 22}\nmethod: bnnas\n")
    cfg = config_of(seen, "--config", str(one), "--config", str(two), "--search.max_macs", "3e6")
    assert (cfg.seed, cfg.train.epochs, cfg.train.lr, cfg.method, cfg.search.max_macs) == (1, 22, 0.04, "bnnas", 3e6)
    cfg = config_of(seen, "--config", str(two), "--config", str(one), "--train.epochs", "33")
    assert (cfg.train.epochs, cfg.method) == (33, "bnnas")
    cfg = config_of(seen, "--config", str(two), "--config", str(one))
    assert cfg.train.epochs == 11


def test_stages_that_continue_a_run_start_from_its_config(seen, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    RunConfig(out=str(out), seed=5, method="bnnas").save(out / "config.yaml")
    for argv in (["score", "--out", str(out)], ["supernet", "--out", str(out), "--resume"]):
        assert main(argv) == 0
        assert (seen[-1][1].seed, seen[-1][1].method) == (5, "bnnas")
    assert config_of(seen, "--out", str(out)).seed == 0
    assert main(["score", "--out", str(out), "--seed", "6"]) == 0
    assert (seen[-1][1].seed, seen[-1][1].method) == (6, "bnnas")
    (tmp_path / "c.yaml").write_text("seed: 7\n")
    assert main(["score", "--out", str(out), "--config", str(tmp_path / "c.yaml")]) == 0
    assert (seen[-1][1].seed, seen[-1][1].method) == (7, "bnnas")


@pytest.mark.parametrize("name", ["cifar10_macro", "demo", "imagenet_mobilenet_v2", "imagenet_shufflenet_v2"])
def test_a_recipe_is_a_file_of_the_package(seen, name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    file = load_yaml(Path(nasfast.__file__).parent / "recipes" / f"{name}.yaml")
    assert config_of(seen, "--config", name) == resolved(RunConfig.from_dict(file))


def test_another_score_does_not_take_what_was_resolved_for_that_of_the_run(tmp_path):
    """The weight of `sqrt_size` and distilling belong to a score, unless they are given."""
    run = Run.look(RunConfig.from_dict({"out": str(tmp_path)}))
    run.save_config()
    before = run.cfg
    assert (before.score.name, before.score.distill, before.score.structure) == ("path_loss", True, 4.0)
    for flags, distill, structure in (
        (["--score", "isometry"], None, 5.0),
        (["--score", "gamma"], None, 0.0),
        (["--score", "gamma", "--score.structure", "2"], None, 2.0),
        (["--score", "path_loss"], True, 4.0),
        ([], True, 4.0),
    ):
        cfg, _ = run_config("score", parse(["score", "--out", str(tmp_path), *flags])[1])
        fresh = before.score.replace(name=cfg.score.name, distill=distill, structure=structure).resolved(cfg.method)
        assert cfg.score == fresh


@pytest.mark.parametrize(
    ("text", "value"), [("2.4M", 2.4e6), ("475e6", 475e6), (".5G", 0.5e9), ("12K", 12e3), ("7", 7.0)]
)
def test_large_numbers_may_have_a_suffix(tmp_path, text, value):
    flags = ["--search.max_macs", text, f"--search.max_params={text}", "--out", "2M"]
    cfg, _ = run_config("score", parse(["score", *flags])[1])
    assert (cfg.search.max_macs, cfg.search.max_params, cfg.out) == (value, value, "2M")
    (tmp_path / "c.yaml").write_text(f"search: {{max_macs: {text}}}\n")
    cfg, _ = run_config("score", parse(["score", "--config", str(tmp_path / "c.yaml")])[1])
    assert cfg.search.max_macs == value


@pytest.mark.parametrize("text", ["2.4m", "M", "1.2.3M", "-1M", "2 M", "infM"])
def test_nothing_else_is_read_as_a_suffix(text):
    with pytest.raises(ValueError):
        to_number(text)


def test_settings_are_printed_and_read_again(tmp_path, capsys):
    flags = ["--data.train", "images", "--search.max_macs", "2.4M", "--seed", "7", "--train.epochs=3"]
    text = said(capsys, "run", *flags, "--print_config")
    assert yaml.safe_load(text)["train"]["momentum"] == 0.9, "defaults are printed too"
    (tmp_path / "all.yaml").write_text(text)
    again = parse(["run", "--config", str(tmp_path / "all.yaml")])[1]
    assert run_config("run", again)[0] == run_config("run", parse(["run", *flags])[1])[0]


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        ("latency --threads 3", "threads", 3),
        ("moments quick --seed 5", "seed", 5),
        ("export --out runs/x", "out", "runs/x"),
    ],
)
def test_every_command_prints_its_settings(command, key, value, capsys):
    assert yaml.safe_load(said(capsys, *command.split(), "--print_config"))[key] == value


# what goes wrong


@pytest.fixture
def exported(tmp_path):
    """A run directory with a retrained network."""
    save_model(build(tiny_space(), (1, 0, 2, 1)), tmp_path / "retrain" / "best-2" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (
            "run --config wrong.yaml",
            1,
            "wrong.yaml: there is no setting 'trian.epochs'; did you mean 'train.epochs'?",
        ),
        ("run --config absent.yaml", 1, "absent.yaml"),
        ("run --config demoo", 1, "'demoo' is neither a file nor a recipe; did you mean 'demo'?"),
        ("run --train.epoch 3", 2, "did you mean '--train.epochs'?"),
        ("run --method dinass", 2, "dinas, dinas_paper, bnnas, fairnas, spos"),
        ("run --data.mean [1,2]", 2, "a list of 3 in brackets, as '[1, 2, 3]', each a number"),
        ("run --search.max_macs 2.4X", 2, "2.4X"),
        ("run --search 3", 2, "search"),
        ("serach", 2, "did you mean 'search'?"),
        ("moments quik", 2, "did you mean 'quick'?"),
        ("search --dry_run", 2, "unrecognized arguments: --dry_run\nall flags"),
        ("export --out . --name bst-2", 1, "has no network 'bst-2'; did you mean 'best-2'? valid: best-2\n"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest(exported, monkeypatch, capsys, words, status, message):
    monkeypatch.chdir(exported)
    Path("wrong.yaml").write_text("trian: {epochs: 3}\n")
    error = said(capsys, *words.split(), status=status)
    assert message in error
    assert ("all flags: nasfast" in error) == (status == 2)


def test_the_traceback_is_optional(tmp_path, capsys, monkeypatch):
    for value in ("0", "1"):
        monkeypatch.setenv("NASFAST_TRACEBACK", value)
        error = said(capsys, "report", "--out", str(tmp_path / "absent"), status=1)
        assert ("Traceback" in error) == (value == "1")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_is_said_to_lose_nothing(monkeypatch, capsys, code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(stages, "score", fail)
    error = said(capsys, "score", status=1)
    assert os.strerror(code) in error
    assert "files that were saved before are intact. Free some space and run again" in error


def test_a_name_that_the_terminal_cannot_show_is_no_error(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    monkeypatch.setattr(stages, "supernet", lambda *_, **__: "läuft/\udcff")
    assert main(["supernet", "--data.source", "digits", "--out", "never"]) == 0
    narrow.flush()
    assert narrow.buffer.getvalue() == b"checkpoint: l\\xe4uft/\\udcff\n"


# help


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_usage_lists_every_command(capsys, argv):
    out = said(capsys, *argv)
    for name, text in LINES.items():
        assert f"  {name}" in out
        assert text in " ".join(out.split())


def test_completion_knows_the_flags_of_every_command(capsys):
    out = said(capsys, "--print_completion", "jsonschema")
    assert all(word in out for word in ("max_macs", "latency_table", "strict_fair", *LINES))


HEAVY = ("torch", "torchvision", "matplotlib", "scipy", "sklearn", "triton", "nvidia.dali")
HELP = """if True:
    import contextlib, sys
    from nasfast.cli.main import main
    for command in sys.argv[1:]:
        with contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
        loaded = [name for name in {heavy} if name in sys.modules]
        if loaded:
            sys.exit(f"nasfast {{command}} --help imports {{', '.join(loaded)}}")
"""


def test_a_reader_that_ends_early_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "nasfast", "run", "--print_config"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_no_help_waits_for_heavy_packages():
    names = ["", *LINES, *STUDIES]
    code = HELP.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code, *names], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name in names:
        assert f"usage: nasfast {name or 'COMMAND'}" in done.stdout


@pytest.mark.parametrize("config", [RunConfig, LatencyConfig, StepTimesConfig, *STUDIES], ids=str)
def test_every_flag_has_a_help_text(config):
    parser = Parser()
    parser.add_class_arguments(STUDIES[config].config if isinstance(config, str) else config)
    flags = [a for a in parser._actions if a.option_strings]
    assert len(flags) > (50 if config is RunConfig else 1)
    assert not [a.option_strings for a in flags if not (a.help or "").split("(type:")[0].strip()]


def test_the_flags_of_every_command_have_their_own_texts(capsys):
    with pytest.raises(SystemExit):
        main(["spaces", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--import MODULE import this first" in words and "--verbose also show" in words


# other commands


SMALL_STEP = "--space digits_mini --batch 2 --resolution 16 --device cpu --rounds 1"


def test_step(tmp_path, capsys):
    out = tmp_path / "step.json"
    text = said(capsys, "step", *SMALL_STEP.split(), "--out", str(out))
    for words in ("DI-NAS, nasfast ops", "published: DI-NAS paper, Table 2", "RTX 3080", f"written: {out}"):
        assert words in text
    assert len(json.loads(out.read_text())["rows"]) == 4


def macro_table(path) -> dict[tuple[int, ...], float]:
    """Made-up accuracies of 40 architectures that grow with the sum of their choices."""
    archs = [tuple((i // 3**j) % 3 for j in range(8)) for i in range(0, 40 * 161, 161)]
    table = {arch: 60.0 + sum(arch) for arch in archs}
    form = {"".join(map(str, a)): {"val_acc": [v, v], "test_acc": [v, v], "mean_acc": v} for a, v in table.items()}
    path.write_text(json.dumps(form))
    return table


def test_rank_of_a_run_writes_rank_json(tmp_path, capsys):
    from nasfast.indicators.bn_gamma import score
    from nasfast.supernet import Supernet

    macro_table(tmp_path / "table.json")
    score(Supernet(nas_bench_macro(), init="gaussian")).save(tmp_path / "indicators.json")
    argv = ["rank", "--table", str(tmp_path / "table.json"), "--out", str(tmp_path), "--resamples", "20"]
    assert "rank.json" in said(capsys, *argv)
    json.loads((tmp_path / "rank.json").read_text())


@pytest.mark.slow
def test_export_with_onnx(exported, capsys):
    text = said(capsys, "export", "--out", str(exported), "--name", "best-2")
    assert text.splitlines()[-1].endswith("model.onnx")
    assert (exported / "retrain/best-2/model.onnx").stat().st_size > 1000
