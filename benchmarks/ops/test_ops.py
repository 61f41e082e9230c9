"""Times every case of the table with every provider. A group of pytest-benchmark has the providers of the same work.

pytest-benchmark runs one provider after another, so a busy moment of the machine may hit one of them alone. Whole
steps, whose differences are small, are measured in turns (`nasfast.measure.timing.measure`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

from benchmarks.floor import Machine
from benchmarks.harness import saved_bytes
from benchmarks.ops.cases import BOTH, FORWARD, Call, Case, Setting, prepare
from benchmarks.ops.table import table


class Work(NamedTuple):
    """A case, how it is run, and its call."""

    case: Case
    setting: Setting
    call: Call


@cache
def settings(size: str, device: str) -> dict[str, tuple[Case, Setting]]:
    """Every case with every provider and dtype, by the text that stands for them in the name of a test.

    It has only characters that pytest's option -k takes.
    """
    works = {}
    for case in table(size):
        for setting in case.settings(device):
            parts = (case.op, case.family, case.shape, setting.dtype, setting.provider)
            works["-".join(parts).replace(" ", "_")] = case, setting
    return works


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    passes = BOTH if metafunc.function is test_forward_backward else FORWARD
    every = settings(metafunc.config.getoption("size"), metafunc.config.getoption("device"))
    names = [name for name, (case, _) in every.items() if passes in case.passes]
    # with this scope, pytest runs the tests of one work one after another, and makes it once
    metafunc.parametrize("work", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def work(request: pytest.FixtureRequest) -> Work:
    """Its results are checked; skipped where the backend cannot serve these arguments."""
    case, setting = settings(request.config.getoption("size"), request.config.getoption("device"))[request.param]
    try:
        return Work(case, setting, prepare(case, setting))
    except RuntimeError as error:
        if setting.ours and "cannot serve" in str(error):
            pytest.skip(str(error))
        raise


def test_forward(benchmark, work: Work, ceilings: Callable[[str], Machine]) -> None:
    time_passes(benchmark, work, FORWARD, ceilings)


def test_forward_backward(benchmark, work: Work, ceilings: Callable[[str], Machine]) -> None:
    time_passes(benchmark, work, BOTH, ceilings)
    # after the timing, because torch.compile may make another graph for the hooks that count
    call = work.call
    benchmark.extra_info["saved_bytes"] = saved_bytes(call.function, call.inputs, exclude=call.parameters)


def time_passes(benchmark, work: Work, passes: str, ceilings: Callable[[str], Machine]) -> None:
    (case, setting, call), dtype = work, work.setting.dtype
    benchmark.group = f"{case.name} {dtype} {passes}"
    benchmark.name = setting.provider
    run = call.timed(passes)
    run()  # compiles, and fills pools of memory and caches of algorithms
    benchmark(run)
    benchmark.extra_info |= {
        "op": case.op,
        "dtype": dtype,
        "device": setting.device,
        "passes": passes,
        "input_bytes": sum(tensor.nbytes for tensor in call.inputs),
    }
    if case.floor is not None and benchmark.enabled:
        benchmark.extra_info["floor_ms"] = case.floor(ceilings(dtype), dtype, passes)
