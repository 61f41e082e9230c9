"""Fixtures of the tests of whole runs: one finished run for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from digits_runs import write_config

from nasfast.cli.main import main


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory, config) -> Path:
    """A finished run; tests must not change it."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["run", "--out", str(out), "--config", str(config)]) == 0
    return out
