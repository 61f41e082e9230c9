"""How long a training step takes on a GPU, kernel by kernel, from its machine code; needs no GPU.

    python -m benchmarks.gpu_model [--arch 90 86] [--out benchmarks/results/gpu_model.json]
                                   [--rule nasfast/ops/cuda_times.json]

recorder.py records the launches of a step: forward, loss and backward of the mean path of `mobilenet_v2`, batch 32,
bf16. walk.py follows one warp of each launch of a CUDA kernel through the machine code. The estimate of a launch,
`predicted`, is an assumed fixed cost and the largest of memory, of instructions at 70 % of the issue rate, and of
tensor cores at 85 % of theirs, on the multiprocessor with the most programs; or the time of one program alone times the
number of rounds in which the GPU runs all programs, where that is larger. What only the last program to arrive does
comes on top of that. From sm_90 on, a kernel that is not the first of its operator may start before the one in front of
it has ended, for which an assumed part of the fixed cost is subtracted. What it does before it waits for that one,
which is to bring weights to shared memory, then takes no time of its own: the kernel in front ends with what only its
last program does. scenarios.py has intervals of the step.

--out writes the launches and the intervals, and --rule the times from which `nasfast.ops.cuda_times` chooses schedules.
The program needs nvcc and g++, and about ten minutes of CPU time for each GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu_model.cuda import CudaCode, CudaLaunch, compile_kernel, constants
from benchmarks.gpu_model.gpus import GPUS, Gpu
from benchmarks.gpu_model.recorder import Step, record_step, saved_bytes
from benchmarks.gpu_model.sass import Code, disassemble
from benchmarks.gpu_model.scenarios import step_interval
from benchmarks.gpu_model.walk import Latencies, Program, Walk, follow
from benchmarks.harness import positive
from nasfast.ops.cuda_times import Chain, Times

# assumed cycles of a load from DRAM and from the L2 cache by architecture, and size of that cache in bytes
_DRAM, _L2, _L2_BYTES = {90: 600, 86: 480}, {90: 280, 86: 240}, {90: 50e6, 86: 5e6}
_ATOMIC = {90: 350, 86: 300}
# cycles for which an instruction in double precision occupies its unit: a multiprocessor has 64 lanes or 2
_DOUBLE = {90: 0.5, 86: 16}
# assumed microseconds from the end of one empty launch to the end of the next
LAUNCH_US = {90: 3.8, 86: 4.6}
# assumed part of these that is saved if a launch may start before the one in front of it has ended: of 1.0 between the
# two and 1.3 until all blocks have started, 1.1 remain
EARLY_US = {90: 1.2, 86: 0.0}
# assumed shares of the rates of instructions and of products that a launch reaches, and the fewest cycles in which a
# warp issues an instruction
_ISSUE, _TENSOR, _CYCLES_OF_A_WARP = 0.70, 0.85, 3
# number of programs that are followed if not all programs of a launch do the same
_FOLLOWED = 8


@dataclass(frozen=True)
class Cost:
    """The cost of one launch on one GPU, in microseconds, except `reach`.

    Attributes:
        issue: of all instructions, at 4 per cycle and multiprocessor.
        latency: of a program alone, times the rounds of programs.
        memory: of the distinct bytes.
        work, products, reach: of the busiest multiprocessor, see Scenario.microseconds.
        early_work, early_latency: what the first round of programs has of `work` and `latency` before they wait for the
            kernels in front; 0 if the launch may not start early.
        tail: what the last program to arrive takes longer than the others.
        predicted: the estimate.
    """

    issue: float
    latency: float
    memory: float
    work: float
    products: float
    reach: float
    early_work: float
    early_latency: float
    tail: float
    predicted: float = 0


def costs(launches: Sequence[CudaLaunch], arch: int, *, processes: int) -> list[Cost]:
    """Compute the cost of every launch.

    Raises:
        UnknownLoop: a kernel has a loop that cannot be followed.
    """
    kernels: dict[str, dict[tuple, CudaLaunch]] = {}
    for launch in launches:
        kernels.setdefault(launch.kernel.name, {}).setdefault(_shape(launch), launch)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        results = pool.map(partial(_follow_launches, arch), [list(each.values()) for each in kernels.values()])
        found = {
            shape: cost
            for each, its_costs in zip(kernels.values(), results, strict=True)
            for shape, cost in zip(each, its_costs, strict=True)
        }
    return [_started(launch, found[_shape(launch)], arch) for launch in launches]


def _started(launch: CudaLaunch, cost: Cost, arch: int) -> Cost:
    """The cost with what the launch saves if it may start early, and the estimate."""
    if not launch.early:
        cost = replace(cost, early_work=0, early_latency=0)
    fixed = LAUNCH_US[arch] - EARLY_US[arch] * launch.early
    busy = max((cost.work - cost.early_work) / min(_ISSUE, cost.reach), cost.products / _TENSOR, cost.memory)
    bound = max(cost.issue, cost.latency - cost.early_latency, cost.memory) + cost.tail
    return replace(cost, predicted=max(fixed + busy, bound))


def _shape(launch: CudaLaunch) -> tuple:
    """All that the cost of a launch depends on."""
    return launch.kernel.name, launch.grid, launch.shared, launch.words, launch.bytes


def _follow_launches(arch: int, launches: Sequence[CudaLaunch]) -> list[Cost]:
    """The costs of different launches of one kernel."""
    kernel = launches[0].kernel
    compiled = compile_kernel(kernel.name, arch)
    code = disassemble(compiled.cubin)
    found = []
    for launch in launches:
        latencies = Latencies(
            memory=_L2[arch] if launch.bytes < _L2_BYTES[arch] / 2 else _DRAM[arch],
            double=_DOUBLE[arch],
            atomic=_ATOMIC[arch],
        )
        walks = partial(_walks, code, launch.grid, kernel.threads, constants(launch.words, arch), latencies)
        try:
            found.append(_cost(arch, compiled, launch, walks))
        except RuntimeError as error:
            raise type(error)(f"{kernel.name}, sm_{arch}, {launch.stage}: {error}") from None
    return found


def _walks(
    code: Code, grid: tuple[int, int, int], threads: int, words: dict[int, int], latencies: Latencies, i: int
) -> tuple[Walk, Walk]:
    """Follow the program that starts as number i: as one of many, and as the last to arrive."""
    index = (i % grid[0], i // grid[0] % grid[1], i // (grid[0] * grid[1]))
    program = Program(index, grid, threads, words)
    return follow(code, program, latencies, last=False), follow(code, program, latencies, last=True)


def _cost(arch: int, compiled: CudaCode, launch: CudaLaunch, walks: Callable[[int], tuple[Walk, Walk]]) -> Cost:
    gpu, programs, warps = GPUS[arch], math.prod(launch.grid), launch.kernel.threads // 32
    followed = [walks(i) for i in sorted({0, programs // 2})]
    if len({ordinary.instructions for ordinary, _ in followed}) > 1:
        followed = [walks(i) for i in sorted({(2 * k + 1) * programs // (2 * _FOLLOWED) for k in range(_FOLLOWED)})]
    instructions = sum(o.instructions for o, _ in followed) / len(followed)
    # the warps of a program share four schedulers
    cycles = max(max(o.cycles, o.instructions * warps / 4) for o, _ in followed)
    tail = max(last.cycles - o.cycles for o, last in followed)
    held = gpu.programs_per_processor(warps, compiled.registers, compiled.shared_bytes + launch.shared)
    rounds = programs / (gpu.processors * max(1, held))
    busiest = math.ceil(programs / gpu.processors)
    together = min(busiest, max(1, held))
    products = sum(_product_cycles(gpu, o) for o, _ in followed) / len(followed)
    early = sum(o.early_instructions for o, _ in followed) / len(followed)
    # microseconds for as many warps on each quarter of a multiprocessor
    quarter = warps / (4 * gpu.clock) * 1e6
    return Cost(
        issue=programs * warps * instructions / (4 * gpu.processors * gpu.clock) * 1e6,
        latency=math.ceil(rounds) * cycles / gpu.clock * 1e6,
        memory=launch.bytes / gpu.bandwidth * 1e6,
        work=busiest * instructions * quarter,
        products=busiest * products * quarter,
        reach=together * warps / 4 / _CYCLES_OF_A_WARP,
        early_work=together * early * quarter,
        early_latency=max(o.early_cycles for o, _ in followed) / gpu.clock * 1e6,
        tail=max(0, tail) / gpu.clock * 1e6,
    )


def _product_cycles(gpu: Gpu, walk: Walk) -> float:
    """Cycles for which the products of a warp occupy the tensor cores of its quarter of a multiprocessor."""
    return walk.products / (16 * 8 * 16) * gpu.multiply_cycles


def pytorch_us(step: Step, arch: int) -> float:
    """Estimate of the microseconds of PyTorch's launches, whose machine code is not followed: fixed cost and bytes."""
    return step.aten * LAUNCH_US[arch] + step.aten_bytes / GPUS[arch].bandwidth * 1e6


# ---- results


def rows_of_launches(launches: Iterable[CudaLaunch], found: Iterable[Cost]) -> list[dict[str, Any]]:
    """A row for each launch of a CUDA kernel, for benchmarks/gpu/per_launch.py."""
    rows = []
    for launch, cost in zip(launches, found, strict=True):
        family = launch.kernel.name.partition("<")[0].rpartition("::")[2]
        bounds = ("work", "early_work", "products", "reach", "memory", "latency", "early_latency", "tail")
        times = {name: round(getattr(cost, name), 2) for name in (*bounds, "predicted")}
        rows.append({"kernel": family, "stage": launch.stage, "may_start_early": launch.early, **times})
    return rows


def modelled(arch: int, processes: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The step with the schedules that the package chooses: launches, intervals, memory; and times of every chain."""
    steps = {schedule: record_step(arch, schedule) for schedule in (None, *Times._fields)}
    # they have most of their launches in common, which are modelled once
    every = [(schedule, launch) for schedule, step in steps.items() for launch in step.launches]
    found_costs = costs([launch for _, launch in every], arch, processes=processes)
    times: Counter[tuple[str | None, Chain | None]] = Counter()
    for (schedule, launch), cost in zip(every, found_costs, strict=True):
        times[schedule, launch.chain] += cost.predicted
    expanded = (launch for launch in steps["recomputed"].launches if launch.stage == "expand_depthwise_forward")
    again = {launch.chain for launch in expanded}
    chains = []
    for chain, count in steps["stored"].chains.items():
        own = {name: round(times[name, chain] / count, 1) for name in Times._fields}
        own = {name: time if name == "stored" or chain in again else None for name, time in own.items()}
        chains.append(chain._asdict() | own)
    step, others = steps[None], pytorch_us(steps[None], arch)
    rows = rows_of_launches(step.launches, found_costs[: len(step.launches)])
    counted = {"cuda": len(rows), "pytorch": step.aten}
    interval = step_interval(GPUS[arch].name, rows, others)
    found = {"launches_of": counted, "pytorch_us": others, "interval": interval, **saved_bytes(arch), "launches": rows}
    return found, chains


def write_lines(path: Path, value: dict[str, Any], depth: int) -> None:
    """Write JSON with a line for each element of a list, which is `depth` objects deep."""

    def text(value: Any, depth: int) -> str:
        if depth and isinstance(value, dict):
            return "{\n" + ",\n".join(f"{json.dumps(k)}: {text(v, depth - 1)}" for k, v in value.items()) + "\n}"
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) else json.dumps(value)

    path.write_text(text(value, depth) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_model", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="JSON file for launches and intervals")
    parser.add_argument("--rule", type=Path, help="JSON file from which the package chooses schedules")
    args = parser.parse_args()
    if args.rule and set(args.arch) != set(GPUS):
        parser.error(f"--rule: the package needs the times of every GPU, got --arch {args.arch}: leave out --arch")
    steps, rule = {}, {}
    for arch in args.arch:
        gpu = GPUS[arch].name
        steps[gpu], rule[gpu] = modelled(arch, args.jobs)
        stages: dict[str, list[float]] = {}
        for row in steps[gpu]["launches"]:
            stages.setdefault(row["stage"], []).append(row["predicted"])
        print(f"\n{gpu}: launches and microseconds of a step")
        for stage, each in sorted(stages.items(), key=lambda item: -sum(item[1])):
            print(f"{stage:28} {len(each):4} {sum(each):8.0f}")
        print(f"the step takes {', '.join(f'{us / 1e3:.2f} ms ({s})' for s, us in steps[gpu]['interval'].items())}")
        kept, eager = steps[gpu]["saved_bytes"], steps[gpu]["saved_bytes_of_eager"]
        print(f"it keeps {kept / 1e6:.0f} MB for backward, {kept / eager:.3f} of eager PyTorch")
    if args.out:
        write_lines(args.out, steps, 2)
    if args.rule:
        write_lines(args.rule, rule, 1)


if __name__ == "__main__":
    main()
