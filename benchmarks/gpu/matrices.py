"""orthogonalize by size class, orthogonalize_, qr and geqrf beside PyTorch: the cases of benchmarks/ops, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu.bench import Bench
from benchmarks.harness import timed
from benchmarks.ops.cases import FORWARD, Case, prepare
from benchmarks.ops.table import table
from nasfast.measure.timing import measure

_OPERATORS = ("orthogonalize", "qr", "geqrf")
# of five calls in a case, which PyTorch's loop over 2,048 matrices makes slow
_ROUNDS, _SECONDS = 3, 4.0


def bench_matrices(bench: Bench) -> None:
    """Write a row with the time of every provider in every case.

    Raises:
        SystemExit: a provider computes something else than the first peer of its case, or cannot run.
    """
    failed = []
    cases = [case for case in table("quick" if bench.on_gpu else "tiny") if case.op in _OPERATORS]
    for i, case in enumerate(cases):
        if bench.left < _SECONDS:
            bench.row("left_out", what="matrices", error=f"{len(cases) - i} cases: no time")
            break
        failed.append(case.name)  # as one that raises
        with bench.attempt(case.name):
            times = measure(_calls(case, bench.device), rounds=_ROUNDS if bench.on_gpu else 1, warmup=1)
            for name, phases in times.items():
                bench.row("matrices", case=case.name, name=name, **phases["step"])
            failed.pop()
    if failed:
        raise SystemExit(f"{len(failed)} cases failed: {'; '.join(failed)}")


def _calls(case: Case, device: str) -> dict[str, Callable[[], dict[str, float]]]:
    """The call of each provider, whose results are those of the first peer."""
    return {setting.provider: timed(prepare(case, setting).timed(FORWARD)) for setting in case.settings(device)}
