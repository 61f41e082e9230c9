"""Completion of commands, flags and values by a shell, and settings as YAML."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from nasfast.cli.flags import options_of, parse
from nasfast.cli.main import _COMMANDS, main
from nasfast.settings.run import RunConfig


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    (text,) = parse("completion", "", ["bash"])
    file = tmp_path_factory.mktemp("completion") / "nasfast.bash"
    file.write_text(text)
    return file


def completed(script, *words: str) -> set[str]:
    """What bash offers for the last word."""
    program = f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _nasfast"
    program += '; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_flags_kinds_and_values(script):
    assert completed(script, "nasfast", "") == {*_COMMANDS, "--help", "--version"}
    assert completed(script, "nasfast", "su") == {"supernet"}
    assert completed(script, "nasfast", "search", "--search.max_") == {
        "--search.max_macs",
        "--search.max_params",
        "--search.max_latency_ms",
    }
    assert completed(script, "nasfast", "moments", "") == {"quick", "figures", "module", "--help"}
    assert "--threads" in completed(script, "nasfast", "moments", "quick", "--")
    assert completed(script, "nasfast", "run", "--search.method", "") == {"auto", "exact", "evolution"}
    assert completed(script, "nasfast", "run", "--search.allow_identity", "") == {"true", "false"}
    assert "--import" in completed(script, "nasfast", "doctor", "--im")
    assert "--import" in completed(script, "nasfast", "moments", "quick", "--im")
    # then bash takes the names of files
    assert completed(script, "nasfast", "run", "--data.train", "") == set()
    assert completed(script, "nasfast", "run", "--import", "") == set()


@pytest.mark.parametrize("command", ["run", "rank", "export", "latency", "doctor"])
def test_the_flags_are_those_that_the_command_takes(command, capsys):
    flags = options_of(command)
    assert "--help" in flags and "--print_config" in flags and "--list-flags" not in flags
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert all(flag in text for flag in flags)


@pytest.mark.parametrize(
    ("flags", "chosen", "lr"),
    [
        ([], {"train.lr": 0.05, "supernet.trainable": "bn"}, None),
        (["--space.name", "nas_bench_macro"], {"train.lr": 0.4}, None),
        (["--method", "spos"], {"train.lr": 0.1, "supernet.trainable": "all"}, None),
        (["--train.lr", "0.3"], {"train.lr": None}, 0.3),
    ],
)
def test_printed_settings_say_what_null_takes(flags, chosen, lr, capsys):
    with pytest.raises(SystemExit):
        main(["run", *flags, "--print_config"])
    text = capsys.readouterr().out
    comments = [line.removeprefix("# ") for line in text.splitlines()[2:] if line.startswith("# ")]
    said = yaml.safe_load("\n".join(comments))
    assert {key: said.get(key) for key in chosen} == chosen
    assert yaml.safe_load(text)["train"]["lr"] == lr


def test_zsh_loads_the_script_of_bash(script):
    (text,) = parse("completion", "", ["zsh"])
    assert "bashcompinit" in text and text.splitlines()[2:] == script.read_text().splitlines()[1:]


def test_settings_are_printed_and_read_again(tmp_path, capsys):
    flags = ["--data.train", "images", "--search.max_macs", "2.4M", "--seed", "7"]
    with pytest.raises(SystemExit) as ended:
        main(["run", *flags, "--print_config"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    (tmp_path / "all.yaml").write_text(text)
    assert parse("search", "", ["--config", str(tmp_path / "all.yaml")])[0] == RunConfig.from_dict(yaml.safe_load(text))
    assert RunConfig.load(tmp_path / "all.yaml").search.max_macs == 2.4e6


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        (["latency", "--threads", "3"], "threads", 3),
        (["moments", "quick", "--seed", "5"], "seed", 5),
        (["export", "--out", "runs/x"], "out", "runs/x"),
        (["doctor"], None, None),
    ],
)
def test_every_command_prints_its_settings(command, key, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--print_config"])
    assert ended.value.code == 0
    form = yaml.safe_load(capsys.readouterr().out)
    assert "print_config" not in form and (key is None or form[key] == value)


def test_a_setting_that_cannot_be_used_is_an_error_here_too(capsys):
    assert main(["run", "--search.top_k", "0", "--print_config"]) == 1
    assert "top_k must be at least 1" in capsys.readouterr().err
