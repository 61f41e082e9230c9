"""Measures the step: the program behind the parts of the plan, one process for each."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.floor import measure_machine, step_floor, trace
from benchmarks.gpu import build, matrices, per_launch, proofs, tools, users
from benchmarks.gpu.bench import ENGINE, WRITTEN, Bench, Variant, Whole, make
from benchmarks.gpu.plan import PARTS
from benchmarks.gpu.system import clocks
from nasfast.measure.timing import measure, measuring
from nasfast.supernet import StandaloneNetwork


def bench_variants(bench: Bench, variants: Sequence[Variant], *, rounds: int) -> None:
    """Write a row when a variant has run, and one with its interleaved time; they name the batch unless it is 32."""
    steps: dict[str, Whole] = {}
    names = {v.name + (f", batch {bench.images}" if bench.images != 32 else ""): v for v in variants}
    for name, variant in names.items():
        with bench.attempt(name):
            start = time.monotonic()
            steps[name] = make(bench, variant)
            first = time.monotonic() - start
            bench.row("first_step", name=name, batch=bench.batch, first_s=first, loss=steps[name].loss)
    if not steps:
        return

    # the variants differ in what they launched when they were captured, or choose again
    def run(name: str) -> dict[str, float]:
        with names[name].chosen(bench):
            return steps[name]()

    calls = {name: partial(run, name) for name in steps}
    times = measure(calls, rounds=rounds if bench.on_gpu else 1, warmup=2 if bench.on_gpu else 0)
    bench.row("clocks", **clocks())
    for name, phases in times.items():
        bench.row("step", name=name, batch=bench.batch, **phases["step"])


def bench_engine(bench: Bench) -> None:
    """Time the step of the engine, with deferral and without, and the memory floor."""
    bench_variants(bench, (WRITTEN, ENGINE), rounds=30)
    machine = measure_machine(torch.bfloat16, quick=not bench.on_gpu, device=bench.device)
    space = bench.space
    shape = (bench.batch, space.in_channels, space.resolution, space.resolution)
    convolutions = trace(lambda: StandaloneNetwork(space, bench.path), shape)
    bench.row("floor", ms=1e3 * step_floor(convolutions, machine, torch.bfloat16).step)


def bench_peer(bench: Bench, how: str, images: str) -> None:
    """Time PyTorch's step of so many images, run as `how` says, and the engine's, interleaved.

    Eager runs before its graph in one process, because both wait for cuDNN to try its algorithms.
    """
    modes = ("eager", "graph") if how == "graph" else (how,)
    peers = [Variant("torch", mode) for mode in modes]
    bench_variants(replace(bench, images=int(images)), (*peers, ENGINE), rounds=30)


def main() -> None:
    parts: dict[str, Callable[..., None]] = {
        "build": build.bench_build,
        "demo": users.bench_demo,
        "fuse": partial(users.bench_fuse, kinds=users.EAGER_AND_GRAPHS),
        "adapt": partial(users.bench_fuse, kinds=users.EAGER_AND_GRAPHS, evaluating=True),
        "compile": partial(users.bench_fuse, kinds=users.COMPILED),
        "command": users.bench_step_command,
        "engine": bench_engine,
        "peer": bench_peer,
        "matrices": matrices.bench_matrices,
        "parity": proofs.bench_parity,
        "bits": proofs.bench_bits,
        "launches": per_launch.bench_launches,
        "ncu": tools.bench_ncu,
        "sanitizer": tools.bench_sanitizer,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[part.name for part in PARTS if part.name != "tests"])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    bench = Bench(args.part, args.rows, args.device, time.monotonic() + args.seconds)
    name, *argument = args.part.split()
    # what users do has the settings that they have; steps take cuDNN's fastest algorithms, whose trials take seconds
    with measuring() if name in ("engine", "peer", "launches") else nullcontext():
        parts[name](bench, *argument)


if __name__ == "__main__":
    main()
