"""A plugin of pytest that writes a row for every test, and starts a new process after a lost CUDA context.

pytest -p benchmarks.gpu.rows --rows FILE --part NAME ...
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import json_lines


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", type=Path, required=True, help="file of JSON lines")
    parser.addoption("--part", required=True, help="name of the part that the rows belong to")


def pytest_configure(config: pytest.Config) -> None:
    in_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(Worker() if in_worker else Reporter(config.option.rows, config.option.part))


class Reporter:
    """Writes the rows, in the process to which all workers report."""

    def __init__(self, rows: Path, part: str) -> None:
        self.rows, self.part = rows, part

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # setup and teardown get a row only if they failed or skipped
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report.longrepr, round(report.duration, 2))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "uncollected", report.longrepr, 0.0)

    def _write(self, test: str, outcome: str, problem: Any, seconds: float) -> None:
        row = {"part": self.part, "kind": "test", "test": test, "outcome": outcome, "seconds": seconds}
        if outcome in ("failed", "uncollected"):
            errors = [line for line in str(problem).splitlines() if line.startswith("E ")]
            row["error"] = (errors or str(problem).splitlines() or [""])[0].removeprefix("E").strip()[:500]
        if outcome == "skipped" and isinstance(problem, tuple):
            row["reason"] = problem[-1].removeprefix("Skipped: ")
        json_lines.append(self.rows, row)


class Worker:
    """Ends a worker process of xdist if its CUDA context is lost, because every later test in it would fail.

    xdist then reports a crash of the test that lost the context, and runs the other tests in a new process.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            time.sleep(0.5)  # until the report of this test is sent
            os._exit(1)
