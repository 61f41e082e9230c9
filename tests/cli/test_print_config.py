"""Settings as YAML: `--print_config`."""

from __future__ import annotations

import pytest
import yaml

from nasfast.cli.flags import parse
from nasfast.cli.main import main
from nasfast.settings import RunConfig


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
