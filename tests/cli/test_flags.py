"""Numbers with a suffix, the version, and errors of flags that belong to no config."""

from __future__ import annotations

import pytest

import nasfast
from nasfast.cli.flags import parse
from nasfast.cli.main import main
from nasfast.config import expand_suffix


@pytest.mark.parametrize(
    ("text", "value"), [("2.4M", 2.4e6), ("475e6", 475e6), (".5G", 0.5e9), ("12K", 12e3), ("7", 7.0)]
)
def test_large_numbers_may_have_a_suffix(tmp_path, text, value):
    (cfg,) = parse("score", "", ["--search.max_macs", text, f"--search.max_params={text}", "--out", "2M"])
    assert (cfg.search.max_macs, cfg.search.max_params, cfg.out) == (value, value, "2M")
    (tmp_path / "c.yaml").write_text(f"search: {{max_macs: {text}}}\n")
    assert parse("score", "", ["--config", str(tmp_path / "c.yaml")])[0].search.max_macs == value


@pytest.mark.parametrize("text", ["2.4m", "M", "1.2.3M", "-1M", "2 M", "infM"])
def test_nothing_else_is_read_as_a_suffix(text):
    assert expand_suffix(text) == text


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nasfast {nasfast.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rank", "--table", "x", "--resamples", "many"], "nasfast rank: --resamples: expected int, got 'many'\n"),
        (["export", "--out", "x", "--onnx", "maybe"], "nasfast export: --onnx: expected true or false, got 'maybe'\n"),
    ],
)
def test_a_wrong_value_of_a_plain_flag_is_named_without_python(capsys, argv, message):
    with pytest.raises(SystemExit):
        main(argv)
    error = capsys.readouterr().err
    assert message in error and "class" not in error
