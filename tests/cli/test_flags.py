"""Numbers with a suffix, the version, and errors of flags that belong to no config."""

from __future__ import annotations

import pytest

from nasfast.cli.flags import parse, run_config
from nasfast.config import to_number


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
