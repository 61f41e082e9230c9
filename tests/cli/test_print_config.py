"""Settings as YAML: `--print_config`."""

from __future__ import annotations

import pytest
import yaml

from nasfast.cli.flags import parse, run_config
from nasfast.cli.main import main


def test_settings_are_printed_and_read_again(tmp_path, capsys):
    flags = ["--data.train", "images", "--search.max_macs", "2.4M", "--seed", "7", "--train.epochs=3"]
    with pytest.raises(SystemExit) as ended:
        main(["run", *flags, "--print_config"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["train"]["momentum"] == 0.9, "defaults are printed too"
    (tmp_path / "all.yaml").write_text(text)
    again = parse(["run", "--config", str(tmp_path / "all.yaml")])[1]
    assert run_config("run", again)[0] == run_config("run", parse(["run", *flags])[1])[0]


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        (["latency", "--threads", "3"], "threads", 3),
        (["moments", "quick", "--seed", "5"], "seed", 5),
        (["export", "--out", "runs/x"], "out", "runs/x"),
    ],
)
def test_every_command_prints_its_settings(command, key, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--print_config"])
    assert ended.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)[key] == value
