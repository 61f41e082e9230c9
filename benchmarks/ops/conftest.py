"""Options of the benchmarks of operators, and what their result files say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from benchmarks.floor import Machine, measure_machine
from benchmarks.ops.cases import DTYPES, SIZES
from nasfast.measure.timing import machine, measuring


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--size", choices=SIZES, default="full", help="quick: a quarter of the batch; tiny: for tests")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.addoption("--device", choices=("cpu", "cuda"), default=device, help="default: the GPU where there is one")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: PyTorch finds no GPU here; use --device cpu, or leave it out")


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict) -> None:
    """Add the device and the versions, and leave out the time of every round, which would be megabytes."""
    output_json["nasfast"] = machine()
    for row in output_json["benchmarks"]:
        row["stats"].pop("data", None)


@pytest.fixture(scope="session", autouse=True)
def settings_of_measurements() -> Iterator[None]:
    with measuring():
        yield


@pytest.fixture(scope="session")
def ceilings(request: pytest.FixtureRequest) -> Callable[[str], Machine]:
    """A function from a dtype to the rates of this machine, which are measured once."""
    device, size = request.config.getoption("device"), request.config.getoption("size")
    return cache(lambda dtype: measure_machine(DTYPES[dtype], quick=size != "full", device=device))
