"""The host's work for one step on a GPU: microseconds of Python per step and per launch, and compilations.

    python -m benchmarks.gpu_model.host_cost [--arch 90] [--backend cuda] [--engine eager] [--cache DIR] [--out FILE]

Triton's own just-in-time path runs with a driver that launches nothing, and so do the operators of the CUDA kernels, so
the times do not include the CUDA driver.
The graph engine replays nothing here, so its time is that of the host without the launches of graphs.
The step has one small image: PyTorch's operators run on the CPU here, and then take about as long as their launches
would. --cache compiles the kernels of the step at full size into a folder. A machine with such a GPU and the same
versions of Triton and of this package compiles none of them again if TRITON_CACHE_DIR names that folder.
"""

from __future__ import annotations

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from benchmarks.captures import EagerCapture
from benchmarks.gpu_model.compiled import compile_for, in_processes
from benchmarks.gpu_model.cuda import launching_nothing
from benchmarks.gpu_model.gpus import GPUS
from benchmarks.gpu_model.recorder import BACKENDS, Workload, make_step, no_gpu, record_step
from benchmarks.harness import positive, write_json

_REPEATS = 30
_SMALL = {"batch": 1, "resolution": 64}


class _Ready:
    """Takes the place of a compiled kernel and does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        return None


def _ready(kernel: JITFunction, key: Any, signature: Any, device: int, *rest: Any) -> _Ready:
    kernel.device_caches[device][0][key] = found = _Ready()
    return found


class _Graphs(EagerCapture):
    """A capture whose replays do nothing but count themselves."""

    replays = 0

    def capture(self, functions: Sequence[Callable[[], None]], pool: None) -> list[Callable[[], None]]:
        super().capture(functions, pool)
        return [self._replay] * len(functions)

    def _replay(self) -> None:
        self.replays += 1


@contextmanager
def _timed_launches() -> Iterator[list[float]]:
    """Within this context, collect the seconds of every launch."""
    times: list[float] = []
    run = JITFunction.run

    def timed(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = run(self, *arguments, **options)
        times.append(time.perf_counter() - start)
        return result

    with patch.object(JITFunction, "run", timed):
        yield times


def host_times(workload: Workload, arch: int) -> dict[str, float]:
    """Measure forward and backward of a small step, its update and its launches; medians in microseconds."""
    graphs = _Graphs() if workload.engine == "graphs" else None
    _, forward_backward, update = make_step(workload, arch, graphs)
    compiles = patch.object(JITFunction, "_do_compile", _ready)
    cuda = launching_nothing(arch) if workload.backend != "triton" else nullcontext()
    with no_gpu(arch, workload.backend), compiles, cuda:
        forward_backward()
        update()
        steps, updates = [], []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            forward_backward()
            middle = time.perf_counter()
            update()
            steps.append(middle - start)
            updates.append(time.perf_counter() - middle)
        before = graphs.replays if graphs else 0
        with _timed_launches() as launches:
            forward_backward()
            update()
    return {
        "step_us": statistics.median(steps) * 1e6,
        "update_us": statistics.median(updates) * 1e6,
        "replays": graphs.replays - before if graphs else 0,
        "launches": len(launches),
        "launch_us": statistics.median(launches) * 1e6,
    }


def fill_cache(workload: Workload, arch: int, cache: Path, processes: int) -> dict[str, int]:
    """Compile a step's kernels into a folder, and count which of them the just-in-time path finds there."""
    step = record_step(workload)
    distinct = list({launch.specialization.key: launch.specialization for launch in step.launches}.values())
    in_processes(_compile, [(specialization, arch) for specialization in distinct], processes, str(cache))
    found = {"specializations": len(distinct), "found": 0, "compiled_again": 0}

    def count(*, cache_hit: bool, **rest: Any) -> None:
        found["found" if cache_hit else "compiled_again"] += 1

    _, forward_backward, update = make_step(workload)
    with no_gpu(arch), patch.object(knobs.cache, "dir", str(cache)), patch.object(knobs.compilation, "listener", count):
        forward_backward()
        update()
    return found


def _compile(job: tuple[Any, int]) -> None:
    compile_for(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--space", default="mobilenet_v2")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--engine", choices=("graphs", "eager"), default="eager")
    parser.add_argument("--backend", choices=BACKENDS, default="triton", help="see Workload")
    parser.add_argument("--arch", type=int, choices=GPUS, default=90)
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, help="folder for compiled kernels, for TRITON_CACHE_DIR on a GPU machine")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    if args.cache and args.backend != "triton":
        parser.error("--cache is for Triton's kernels; those of other backends are in the extension: leave one out")
    common = {"space": args.space, "dtype": args.dtype, "engine": args.engine, "backend": args.backend}
    row = {**common, "arch": args.arch, "triton": triton.__version__}
    row |= host_times(Workload(**common, **_SMALL), args.arch)
    print(
        f"{row['step_us']:.0f} us of host time per step without its {row['replays']} replays of graphs, and "
        f"{row['update_us']:.0f} us for the update; {row['launches']} launches are of Triton kernels, "
        f"{row['launch_us']:.1f} us each"
    )
    if args.cache:
        row |= fill_cache(Workload(**common), args.arch, args.cache, args.jobs)
        print(
            f"{args.cache}: {row['specializations']} specialisations for sm_{args.arch} and Triton {row['triton']}; "
            f"the just-in-time path found {row['found']} and compiled {row['compiled_again']} again"
        )
    if args.out:
        write_json(args.out, [row])


if __name__ == "__main__":
    main()
