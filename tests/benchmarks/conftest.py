"""How tests start the programs in `benchmarks/`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """A function that runs `python ...` and returns what it prints; keywords are environment variables.

    The process finds `benchmarks`, but not the `nasfast` beside it, because the tests may be for an installed one.
    """
    folder = tmp_path_factory.mktemp("path")
    (folder / "benchmarks").symlink_to(Path(__file__).parents[2] / "benchmarks")

    def run(*command: str, **variables: str) -> str:
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    return run
