"""Modelled times of the chains of a step, with Triton's kernels and with all schedules of the CUDA kernels.

    python -m benchmarks.gpu_model.cuda_times [--out FILE] [--rule nasfast/ops/cuda_times.json | --arch 90]

The step is that of the mean path of `mobilenet_v2` at batch 32 in bf16. The times are sums of `predicted` of model.py,
forward and backward. From the file of --rule, `nasfast.ops.cuda_times` decides which kernels run a chain. The program
needs nvcc and g++, and about ten minutes of CPU time for each GPU.
"""

from __future__ import annotations

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu_model.cuda import CudaKernel
from benchmarks.gpu_model.gpus import GPUS
from benchmarks.gpu_model.model import costs
from benchmarks.gpu_model.recorder import Step, Workload, record_step
from benchmarks.harness import ROOT, positive, write_json
from nasfast.ops.cuda_times import Chain, Times


def rows_of(arch: int, *, processes: int, cache: str) -> list[dict[str, Any]]:
    """One row for each chain that the CUDA kernels can run."""
    backends = "triton", "cuda", "release", "recompute"
    steps = {backend: record_step(Workload(backend=backend), arch) for backend in backends}
    # the last three have most of their launches in common, which are modelled once
    every = [(backend, launch) for backend, step in steps.items() for launch in step.launches]
    together = Step([launch for _, launch in every])
    times: Counter[tuple[str, Chain | None]] = Counter()
    for (backend, launch), cost in zip(every, costs(together, arch, processes=processes, cache=cache), strict=True):
        times[backend, launch.chain] += cost.predicted
    served = {launch.chain for launch in steps["cuda"].launches if isinstance(launch.specialization, CudaKernel)}
    again = {launch.chain for launch in steps["recompute"].launches if launch.kernel == "expand_depthwise_forward"}
    rows = []
    for chain in (chain for chain in steps["cuda"].chains if chain in served):
        on_triton = sum(times["triton", part] / steps["triton"].chains[part] for part in _parts(chain, steps["triton"]))
        stored, *others = (times[backend, chain] / steps[backend].chains[chain] for backend in backends[1:])
        released, recomputed = (round(time, 1) if chain in again else None for time in others)
        rows.append(chain._asdict() | Times(round(on_triton, 1), round(stored, 1), recomputed, released)._asdict())
    return rows


def _parts(chain: Chain, step: Step) -> list[Chain]:
    """The chains of a step that compute what this one does, one after the other: this one, or two.

    Raises:
        ValueError: there are none.
    """
    if chain in step.chains:
        return [chain]
    for i in range(1, len(chain.stages)):
        first = chain._replace(stages=chain.stages[:i], channels=chain.channels[: i + 1])
        rest = [c for c in step.chains if (c.stages, c.channels) == (chain.stages[i:], chain.channels[i:])]
        if first in step.chains and rest:
            return [first, rest[0]]
    raise ValueError(f"no chains of the step with Triton compute {chain}")


def show(gpu: str, rows: list[dict[str, Any]]) -> None:
    """Print a table of one GPU."""
    print(f"\n{gpu}: microseconds forward and backward\n{'chain':90}", *(f"{name:>10}" for name in Times._fields))
    chosen = 0.0
    for row in rows:
        chain, times = Chain(row["stages"], row["pixels"], row["channels"]), Times(*map(row.get, Times._fields))
        schedule = times.schedule(chain)
        chosen += min(times.triton, times.cuda(schedule))
        print(f"{chain!s:90}", *(f"{time or '':>10}" for time in times), schedule)
    print(f"{'all':90} {sum(row['triton'] for row in rows):10.1f} {sum(row['stored'] for row in rows):10.1f}")
    print(f"{'what is chosen':90} {chosen:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "triton", help="folder for Triton's cache")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--rule", type=Path, help="JSON file from which the package decides")
    args = parser.parse_args()
    if args.rule and set(args.arch) != set(GPUS):
        parser.error(f"--rule: the package needs the times of every GPU, got --arch {args.arch}: leave out --arch")
    found = {GPUS[arch].name: rows_of(arch, processes=args.jobs, cache=str(args.cache)) for arch in args.arch}
    for gpu, rows in found.items():
        show(gpu, rows)
    if args.out:
        write_json(args.out, [{"gpu": gpu, "chains": rows} for gpu, rows in found.items()])
    if args.rule:
        lines = [f'"{gpu}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for gpu, rows in found.items()]
        args.rule.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
