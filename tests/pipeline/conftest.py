"""Fixtures of the tests of whole runs: one finished run for all of them."""

from __future__ import annotations

import shutil
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


@pytest.fixture
def out(run_dir, tmp_path) -> Path:
    """A copy of the finished run, which a test may change."""
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


@pytest.fixture(autouse=True)
def no_figures(blank_figures) -> None:
    """Of all reports here, that of the finished run alone has its figures drawn."""
