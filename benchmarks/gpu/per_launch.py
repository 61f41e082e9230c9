"""Every launch of a step, in its place in the step: beside the formula of benchmarks/gpu_step.py, and by two builds.

    python -m benchmarks.gpu.per_launch --before DIR [--after DIR] [--rounds N] [--device cuda|cpu]

measures a change of the kernels. A DIR has `nasfast/` with its extension: a checkout, or a copy of the package made on
another machine. No process can load two extensions, so each build has one: they compare every chain of the step with
float64, and then take turns with the step. The same DIR twice shows what a difference must be larger than.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.gpu.launches import CHAIN_OPERATORS, profile_kernels
from benchmarks.gpu.plan import ROOT, part_environment
from benchmarks.gpu.report import ratio
from benchmarks.gpu_step import ROWS, read

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench

# seconds in which a build compares its chains with float64, and launches that are named
_CHECKS, _NAMED = 45.0, 8


def bench_launches(bench: Bench) -> None:
    """Write a row for each launch of the engine's step, with its size where the step is that of `ROWS`."""
    from benchmarks.gpu.bench import ENGINE, make

    step = make(bench, ENGINE)
    with ENGINE.chosen(bench):
        ran = profile_kernels(step.run, torch.device(bench.device))
        whole = 1e6 * statistics.median(step()["step"] for _ in range(10 if bench.on_gpu else 1))
    ours = [(name, family, 1e3 * ms) for name, ms in ran if (family := parse_family(name))]
    if not ours:
        raise SystemExit(f"no CUDA kernel of a chain ran in the step, but {sorted({name for name, _ in ran})[:5]}")
    sizes = read(ROWS).now
    same = [family for _, family, _ in ours] == [launch.family for launch in sizes]
    bench.row("launches", measured=len(ours), us=sum(us for *_, us in ours), all_us=whole, kernels=len(ran))
    for i, (name, family, us) in enumerate(ours):
        size = {"chain": sizes[i].chain, "bytes": sizes[i].bytes, "products": sizes[i].products} if same else {}
        bench.row("launch_of_step", kernel=family, name=name, **size, us=us)


def parse_family(kernel: str) -> str | None:
    """The family of one of our kernels by the name that the profiler gives, on a CPU the operator; None for others."""
    match = re.search(r"run_kernel<(?:nasfast::gpu::)?(?:pointwise::)?(\w+)", kernel)
    operator = kernel.partition("nasfast::")[2]
    return match[1] if match else operator if operator in CHAIN_OPERATORS else None


# ---- two builds


class Round(NamedTuple):
    """A step: family and ms of each launch of our kernels in order, and ms of a whole step without the profiler."""

    launches: list[tuple[str, float]]
    step: float


class Build:
    """A process with the nasfast of a folder, which compares its chains with float64 and then measures steps."""

    def __init__(self, folder: Path, device: str, rounds: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        with patch.dict(os.environ, part_environment(device), clear=True):
            context.Process(target=_serve, args=(str(folder), device, rounds, child_pipe), daemon=True).start()
        child_pipe.close()

    def check(self) -> str:
        """Compare its chains with float64; what is wrong with them, empty for nothing."""
        return self._pipe.recv()

    def measure(self) -> Round:
        """Run its next step."""
        self._pipe.send(None)
        return self._pipe.recv()


def _serve(folder: str, device: str, rounds: int, pipe: Connection) -> None:
    sys.path.insert(0, folder)
    import nasfast
    from benchmarks.gpu import proofs
    from benchmarks.gpu.bench import ENGINE, Bench, make
    from nasfast.measure.timing import measuring

    if not Path(nasfast.__file__).is_relative_to(folder):
        raise SystemExit(f"{folder} has no nasfast/")
    bench = Bench("launches", Path(os.devnull), device, time.monotonic() + _CHECKS)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            left = proofs.bench_parity(bench, images=4, dtypes=(torch.bfloat16,))
            pipe.send(f"no time for {left} chains" if left else "")
        except SystemExit as wrong:
            pipe.send(str(wrong))
        with measuring(), ENGINE.chosen(bench):
            step = make(bench, ENGINE)
            for _ in range(rounds):
                pipe.recv()
                ran = profile_kernels(step.run, torch.device(device))
                launches = [(family, ms) for name, ms in ran if (family := parse_family(name))]
                pipe.send(Round(launches, 1e3 * step()["step"]))


def table(before: Sequence[Round], after: Sequence[Round]) -> list[str]:
    """Medians of each family and of the step by both builds, and the launches that differ most."""
    from nasfast.measure.timing import summarise

    def row(name: str, launches: object, time_of: Callable[[Round], float]) -> str:
        old, new = (summarise([time_of(each) for each in rounds], "ms") for rounds in (before, after))
        times = " | ".join(f"{1e3 * each['median_ms']:.1f}" for each in (old, new))
        return f"| {name} | {launches} | {times} | {ratio(new, old) if old['q20_ms'] and new['q20_ms'] else '-'} |"

    def of(family: str) -> Callable[[Round], float]:
        return lambda each: sum(ms for name, ms in each.launches if name == family)

    lines = ["| | launches | before us | after us | after / before (20 % to 80 %) |", "|---|---|---|---|---|"]
    olds, news = ([family for family, _ in rounds[0].launches] for rounds in (before, after))
    for family in dict.fromkeys([*olds, *news]):
        counts = olds.count(family), news.count(family)
        lines.append(row(family, counts[0] if counts[0] == counts[1] else "{} to {}".format(*counts), of(family)))
    lines.append(row("step", "", lambda each: each.step))
    if olds != news:
        return [*lines, "", "the builds launch other kernels"]
    launches = read(ROWS).now
    same = [launch.family for launch in launches] == news
    changes = [
        statistics.median(b.launches[i][1] - a.launches[i][1] for a, b in zip(before, after, strict=True))
        for i in range(len(news))
    ]
    for i in sorted(range(len(news)), key=lambda i: -abs(changes[i]))[:_NAMED]:
        where = f"chain {launches[i].chain}, " if same else ""
        lines.append(row(f"{where}launch {i}: {news[i]}", 1, lambda each, i=i: each.launches[i][1]))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.per_launch", description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="has the nasfast/ to compare with")
    parser.add_argument("--after", type=Path, default=ROOT, metavar="DIR", help="has the other; default: this checkout")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each that are measured; default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: emulated, on a tiny network")
    args = parser.parse_args(arguments)
    builds = [Build(folder.resolve(), args.device, args.rounds) for folder in (args.before, args.after)]
    wrong = [build.check() for build in builds]
    rounds = [[build.measure() for build in builds] for _ in range(args.rounds)]
    print("\n".join(table(*zip(*rounds, strict=True))))
    if any(wrong):
        sys.exit(
            f"chains are not as exact as eager autocast: before: {wrong[0] or 'none'}; after: {wrong[1] or 'none'}"
        )


if __name__ == "__main__":
    main()
