"""How long a training step takes at least on a GPU, kernel by kernel, from its machine code; needs no GPU.

    python -m benchmarks.gpu_model [--backend cuda] [--arch 90 86] [--each] [--mix KERNEL] [--compare FILE] [--out FILE]

recorder.py records the launches of one step, compiled.py compiles their specialisations, and walk.py follows one warp
of each launch through the machine code. A launch takes at least as long as each of these:
- issue: its instructions, divided by 4 per cycle and multiprocessor;
- latency: the time of one program alone, times the number of rounds in which the GPU runs all programs;
- memory: its distinct bytes, divided by the bandwidth.
The model adds the largest of the three to the time of what only the last program to arrive does, and sums this over
the launches. The time that the GPU needs to start launches is printed separately and is not part of the sum.

A second sum, `predicted`, is an estimate and not a bound: the assumed fixed cost of a launch, and the largest of
memory, of instructions at 70 % of the issue rate, and of tensor cores at 85 % of theirs, on the multiprocessor with the
most programs; or the bound where that is larger. From sm_90 on, a CUDA kernel that is not the first of its operator may
start before the one in front of it has ended, for which an assumed part of the fixed cost is subtracted. What it does
before it waits for that one, which is to bring weights to shared memory, then takes no time of its own: the kernel in
front ends with what only its last program does.
"""

from __future__ import annotations

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import argparse
import json
import math
import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu_model.compiled import Compiled, compile_for, in_processes, parameters
from benchmarks.gpu_model.cuda import CACHE, CudaKernel, digest
from benchmarks.gpu_model.gpus import GPUS, Gpu
from benchmarks.gpu_model.recorder import BACKENDS, PHASES, Launch, Specialization, Step, Workload, record_step
from benchmarks.gpu_model.sass import Code
from benchmarks.gpu_model.scenarios import GRAPHS, scenarios
from benchmarks.gpu_model.walk import Latencies, Program, Walk, walks
from benchmarks.harness import ROOT, positive, write_json

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
# multiplications per cycle of a quarter of a multiprocessor by the instructions that only sm_90 has
_GROUP_PRODUCTS = 1024
# number of programs that are followed if not all programs of a launch do the same
_FOLLOWED = 8


@dataclass(frozen=True)
class Cost:
    """The cost of one launch on one GPU.

    Attributes:
        instructions: instructions of one warp, averaged over the programs.
        issue, latency, memory: lower bounds of the time in microseconds, as above.
        work, products, reach: of the busiest multiprocessor, see Scenario.microseconds.
        early_work, early_latency: what the first round of programs has of `work` and `latency` before they wait for the
            kernels in front; 0 if the launch may not start early.
        tail: microseconds that the last program to arrive takes longer than the others.
        predicted: estimate of the time in microseconds, as above.
        rounds: how often the programs fill the GPU.
        registers, spilled_bytes: registers and bytes of spilled registers per thread.
        shared_bytes: shared memory per program.
        programs_per_processor: programs that a multiprocessor holds at once.
        accesses: instructions that access global memory, of all warps, by bytes per thread.
        opcodes: instructions of all warps, by opcode.
    """

    instructions: float
    issue: float
    latency: float
    memory: float
    work: float
    products: float
    reach: float
    early_work: float
    early_latency: float
    tail: float
    rounds: float
    registers: int
    spilled_bytes: int
    shared_bytes: int
    programs_per_processor: int
    accesses: dict[int, float]
    opcodes: dict[str, float]
    predicted: float = 0

    @property
    def largest(self) -> float:
        return max(self.issue, self.latency - self.early_latency, self.memory) + self.tail


@dataclass(frozen=True)
class _Job:
    """One specialisation and its different launches: grid, arguments without floating-point numbers, distinct bytes."""

    arch: int
    specialization: Specialization | CudaKernel
    launches: tuple[tuple[tuple[int, int, int], tuple[tuple[str, int | str], ...], int], ...]


def costs(step: Step, arch: int, *, processes: int, cache: str) -> list[Cost]:
    """Compute the cost of every launch of a step.

    Raises:
        UnknownLoop: a kernel has a loop that cannot be followed.
    """
    jobs: dict[str, tuple[Specialization | CudaKernel, dict]] = {}
    for launch in step.launches:
        jobs.setdefault(launch.specialization.key, (launch.specialization, {}))[1][_shape(launch)] = None
    ordered = [_Job(arch, specialization, tuple(shapes)) for specialization, shapes in jobs.values()]
    found: dict[tuple, Cost] = {}
    for job, results in zip(ordered, in_processes(_job, ordered, processes, cache), strict=True):
        found |= {(job.specialization.key, shape): cost for shape, cost in zip(job.launches, results, strict=True)}
    return [_started(launch, found[launch.specialization.key, _shape(launch)], arch) for launch in step.launches]


def _started(launch: Launch, cost: Cost, arch: int) -> Cost:
    """The cost with what the launch saves if it may start early, and the estimate."""
    if not launch.early:
        cost = replace(cost, early_work=0, early_latency=0)
    fixed = LAUNCH_US[arch] - EARLY_US[arch] * launch.early
    busy = max((cost.work - cost.early_work) / min(_ISSUE, cost.reach), cost.products / _TENSOR, cost.memory)
    return replace(cost, predicted=max(fixed + busy, cost.largest))


def _shape(launch: Launch) -> tuple:
    given = launch.arguments.items()
    exact = tuple((k, v) for k, v in given if isinstance(v, (int, str)) and not isinstance(v, bool))
    return launch.grid, exact, launch.bytes


def _job(job: _Job) -> list[Cost]:
    """The costs of a job, or those that a run of this model has kept for the same machine code and launches."""
    compiled = compile_for(job.specialization, job.arch)
    signature = getattr(job.specialization, "signature", None)
    path = CACHE / f"costs-{digest(_SOURCES, repr((compiled, signature, job.arch, job.launches)))}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    found = _follow_launches(job, compiled)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{os.getpid()}-{path.name}")
    unfinished.write_bytes(pickle.dumps(found))
    unfinished.replace(path)
    return found


# what the costs of a launch depend on besides its machine code
_SOURCES = tuple(
    f"benchmarks/gpu_model/{name}.py"
    for name in ("compiled", "floats", "gpus", "integers", "model", "registers", "sass", "walk")
)


def _follow_launches(job: _Job, compiled: Compiled) -> list[Cost]:
    code = compiled.code()
    found = []
    for grid, arguments, size in job.launches:
        given = dict(arguments)
        words = parameters(job.specialization, given, job.arch)
        asked = replace(compiled, shared_bytes=compiled.shared_bytes + given.get("shared", 0))
        latencies = Latencies(
            memory=_L2[job.arch] if size < _L2_BYTES[job.arch] / 2 else _DRAM[job.arch],
            double=_DOUBLE[job.arch],
            atomic=_ATOMIC[job.arch],
        )
        follow = partial(_follow, code, grid, 32 * compiled.warps, words, latencies)
        try:
            found.append(_cost(job.arch, asked, math.prod(grid), size, follow))
        except RuntimeError as error:
            raise type(error)(f"{job.specialization.key[:200]}, sm_{job.arch}, {given}: {error}") from None
    return found


def _follow(
    code: Code, grid: tuple[int, int, int], threads: int, words: dict[int, int], latencies: Latencies, i: int
) -> tuple[Walk, Walk]:
    """Follow the program that starts as number i: as one of many, and as the last to arrive."""
    index = (i % grid[0], i // grid[0] % grid[1], i // (grid[0] * grid[1]))
    return walks(code, Program(index, grid, threads, words), latencies)


def _cost(arch: int, compiled: Compiled, programs: int, size: int, follow: Callable[[int], tuple[Walk, Walk]]) -> Cost:
    """Compute the cost of one launch from its number of programs and its bytes."""
    gpu, warps = GPUS[arch], compiled.warps
    followed = [follow(i) for i in sorted({0, programs // 2})]
    if len({ordinary.instructions for ordinary, _ in followed}) > 1:
        followed = [follow(i) for i in sorted({(2 * k + 1) * programs // (2 * _FOLLOWED) for k in range(_FOLLOWED)})]
    instructions = sum(o.instructions for o, _ in followed) / len(followed)
    # the warps of a program share four schedulers
    cycles = max(max(o.cycles, o.instructions * warps / 4) for o, _ in followed)
    tail = max(last.cycles - o.cycles for o, last in followed)
    held = gpu.programs_per_processor(warps, compiled.registers, compiled.shared_bytes)
    rounds = programs / (gpu.processors * max(1, held))
    each = programs * warps / len(followed)
    accesses, opcodes = Counter(), Counter()
    for ordinary, _ in followed:
        accesses += Counter({k: n * each for k, n in ordinary.accesses.items()})
        opcodes += Counter({k: n * each for k, n in ordinary.opcodes.items()})
    busiest = math.ceil(programs / gpu.processors)
    together = min(busiest, max(1, held))
    products = sum(_product_cycles(gpu, o) for o, _ in followed) / len(followed)
    early = sum(o.early_instructions for o, _ in followed) / len(followed)
    # microseconds for as many warps on each quarter of a multiprocessor
    quarter = warps / (4 * gpu.clock) * 1e6
    return Cost(
        instructions,
        issue=programs * warps * instructions / (4 * gpu.processors * gpu.clock) * 1e6,
        latency=math.ceil(rounds) * cycles / gpu.clock * 1e6,
        memory=size / gpu.bandwidth * 1e6,
        work=busiest * instructions * quarter,
        products=busiest * products * quarter,
        reach=together * warps / 4 / _CYCLES_OF_A_WARP,
        early_work=together * early * quarter,
        early_latency=max(o.early_cycles for o, _ in followed) / gpu.clock * 1e6,
        tail=max(0, tail) / gpu.clock * 1e6,
        rounds=rounds,
        registers=compiled.registers,
        spilled_bytes=compiled.spilled_bytes,
        shared_bytes=compiled.shared_bytes,
        programs_per_processor=held,
        accesses=dict(accesses),
        opcodes=dict(opcodes),
    )


def _product_cycles(gpu: Gpu, walk: Walk) -> float:
    """Cycles for which the products of a warp occupy the tensor cores of its quarter of a multiprocessor."""
    return walk.products["HMMA"] / (16 * 8 * 16) * gpu.multiply_cycles + walk.products["HGMMA"] / _GROUP_PRODUCTS


def pytorch_us(step: Step, arch: int) -> float:
    """Estimate of the microseconds of PyTorch's launches, whose machine code is not followed: fixed cost and bytes."""
    return step.aten_launches * LAUNCH_US[arch] + step.aten_bytes / GPUS[arch].bandwidth * 1e6


# ---- tables


def summarize(launches: Iterable[Launch], found: Iterable[Cost]) -> dict[str, dict]:
    """Sum by kernel, and for "all": launches, times in microseconds, and the shares of 128-bit accesses."""
    rows: dict[str, dict] = defaultdict(lambda: defaultdict(float))
    for launch, cost in zip(launches, found, strict=True):
        for row in (rows[launch.kernel], rows["all"]):
            row["launches"] += 1
            for name in ("issue", "latency", "memory", "tail", "largest", "predicted"):
                row[name] += getattr(cost, name)
            row["spilling_launches"] += cost.spilled_bytes > 0
            row["accesses"] += sum(cost.accesses.values())
            row["wide_accesses"] += cost.accesses.get(16, 0)
            row["access_bytes"] += sum(width * n for width, n in cost.accesses.items())
            row["wide_bytes"] += 16 * cost.accesses.get(16, 0)
    for row in rows.values():
        accesses, size = row.pop("accesses"), row.pop("access_bytes")
        row["wide_share"] = row.pop("wide_accesses") / accesses if accesses else 1.0
        row["wide_share_of_bytes"] = row.pop("wide_bytes") / size if size else 1.0
    return {name: dict(row) for name, row in sorted(rows.items(), key=lambda item: item[1]["largest"])}


def show(rows: dict[str, dict], arch: int, before: dict[str, dict] | None = None) -> None:
    """Print the table of one GPU, beside the sums of another run if `before` has them."""
    gpu = GPUS[arch]
    print(f"\n{gpu.name} (sm_{arch}): microseconds per step")
    print(
        f"{'kernel':32} {'launches':>8} {'issue':>8} {'latency':>8} {'memory':>7} {'tail':>6} {'largest':>8} "
        f"{'predicted':>9} {'128-bit':>8} {'of bytes':>8} {'spilling':>8}"
        + (f" {'before':>8} {'launches':>8}" if before else "")
    )
    names = [*dict.fromkeys([*(before or {}), *rows])]
    names = sorted(names, key=lambda n: (n == "all", -(rows.get(n) or (before or {}).get(n))["largest"]))
    for name in names:
        row = rows.get(name)
        old = (before or {}).get(name)
        text = f"{name:32} "
        if row:
            text += (
                f"{row['launches']:8.0f} {row['issue']:8.0f} {row['latency']:8.0f} {row['memory']:7.0f} "
                f"{row['tail']:6.0f} {row['largest']:8.0f} {row['predicted']:9.0f} {100 * row['wide_share']:7.1f}% "
                f"{100 * row['wide_share_of_bytes']:7.1f}% {row['spilling_launches']:8.0f}"
            )
        else:
            text += f"{'gone':>8}" + " " * 64
        if before:
            text += f" {old['largest']:8.0f} {old['launches']:8.0f}" if old else f" {'new':>8}"
        print(text)


def show_each(launches: Iterable[Launch], found: Iterable[Cost]) -> None:
    """Print one line per launch."""
    for i, (launch, cost) in enumerate(zip(launches, found, strict=True)):
        shown = {k: v for k, v in launch.arguments.items() if k in _SHOWN and not isinstance(v, bool)}
        said = " ".join(f"{k}={v}" for k, v in shown.items())
        print(
            f"{i:4} {launch.kernel[:28]:28} {said} | {launch.programs} programs x "
            f"{cost.instructions:.0f} instr | issue {cost.issue:.1f} latency {cost.latency:.1f} memory "
            f"{cost.memory:.1f} tail {cost.tail:.1f} predicted {cost.predicted:.1f} | "
            f"{cost.registers} regs, spill {cost.spilled_bytes}, shared {cost.shared_bytes}, "
            f"{cost.programs_per_processor} per SM, {cost.rounds:.2f} rounds"
        )


def rows_of_launches(launches: Iterable[Launch], found: Iterable[Cost]) -> list[dict[str, float | str]]:
    """A row for each launch of a CUDA kernel, for benchmarks/gpu/per_launch.py."""
    rows = []
    for launch, cost in zip(launches, found, strict=True):
        if isinstance(launch.specialization, CudaKernel):
            family = launch.specialization.name.partition("<")[0].rpartition("::")[2]
            bounds = ("work", "early_work", "products", "reach", "memory", "latency", "early_latency", "tail")
            times = {name: round(getattr(cost, name), 2) for name in (*bounds, "predicted")}
            rows.append({"kernel": family, "stage": launch.kernel, "may_start_early": launch.early, **times})
    return rows


def step_interval(gpu: str, launches: list[dict[str, float | str]], others: float) -> dict[str, float]:
    """Microseconds of a step in every scenario.

    Args:
        launches: of `rows_of_launches`.
        others: microseconds of all other launches.
    """
    return {
        name: sum(scenario.microseconds(launch) for launch in launches) + GRAPHS * scenario.gap + others
        for name, scenario in scenarios(gpu).items()
    }


_SHOWN = ("KERNEL", "STRIDE", "M", "K", "N", "C", "H", "W", "OH", "R", "programs", "ROWS", "COLUMNS", "CB", "BM", "BN")


def show_mix(kernel: str, launches: Iterable[Launch], found: Iterable[Cost]) -> None:
    """Print the share of each opcode in a kernel's instructions."""
    opcodes: Counter[str] = Counter()
    for launch, cost in zip(launches, found, strict=True):
        if launch.kernel == kernel:
            opcodes.update(cost.opcodes)
    total = sum(opcodes.values())
    print(f"{kernel}: {total / 1e6:.2f} million warp instructions")
    for name, count in opcodes.most_common(24):
        print(f"  {name:12} {100 * count / total:5.1f} %")


def launches_by_phase(step: Step) -> dict[str, dict[str, int]]:
    """Count the launches of Triton kernels, of CUDA kernels and of PyTorch in each part of the step."""
    ours = Counter((launch.phase, isinstance(launch.specialization, CudaKernel)) for launch in step.launches)
    aten: Counter[str] = Counter()
    for (phase, _), count in step.aten.items():
        aten[phase] += count
    return {
        phase: {"triton": ours[phase, False], "cuda": ours[phase, True], "pytorch": aten[phase]} for phase in PHASES
    }


def show_launches(step: Step) -> None:
    """Print the number of launches in each part of the step."""
    print(f"{'launches':12} {'Triton':>7} {'CUDA':>7} {'PyTorch':>8}")
    for phase, counts in launches_by_phase(step).items():
        print(f"{phase:12} {counts['triton']:7} {counts['cuda']:7} {counts['pytorch']:8}")
    both = len(step.launches) + step.aten_launches
    distinct = len({launch.specialization.key for launch in step.launches})
    print(f"{both} in all, {distinct} specialisations of {len(step.launches)} launches of Triton and CUDA kernels")
    for (phase, name), count in step.aten.most_common():
        print(f"  {phase:10} {name:32} {count:4}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_model", description=__doc__.splitlines()[0])
    parser.add_argument("--space", default="mobilenet_v2")
    parser.add_argument("--path", help="candidates separated by commas; default: the mean path")
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--resolution", type=positive)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--trains", choices=("bn", "indicators", "all"), default="bn")
    parser.add_argument("--engine", choices=("graphs", "eager"), default="graphs")
    parser.add_argument("--backend", choices=BACKENDS, default="triton", help="see Workload")
    parser.add_argument("--arch", nargs="*", type=int, choices=GPUS, default=list(GPUS), help="no value: only record")
    parser.add_argument("--kernel", nargs="+", help="model only these kernels")
    parser.add_argument("--each", action="store_true", help="list every launch")
    parser.add_argument("--mix", metavar="KERNEL", help="print the instructions of this kernel")
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "triton", help="folder for Triton's cache")
    parser.add_argument("--compare", type=Path, help="a file of an earlier --out, to compare with")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--launches", type=Path, help="JSON file for every launch of a CUDA kernel, in order, by GPU")
    args = parser.parse_args()
    path = tuple(map(int, args.path.split(","))) if args.path else None
    workload = Workload(
        args.space, path, args.batch, args.resolution, args.dtype, args.trains, args.engine, args.backend
    )
    # the CUDA kernels divide their work by the number of multiprocessors
    steps = {arch: record_step(workload, arch) for arch in args.arch or [90]}
    step = next(iter(steps.values()))
    show_launches(step)
    old = json.loads(args.compare.read_text())["rows"] if args.compare else []
    before = {row["arch"]: row["kernels"] for row in old if "arch" in row}
    counts = launches_by_phase(step)
    rows = [
        {"workload": vars(workload), "launches": counts, "pytorch": {f"{p} {n}": c for (p, n), c in step.aten.items()}}
    ]
    each: dict[str, list[dict[str, float | str]]] = {}
    for arch in args.arch:
        step = steps[arch]
        if args.kernel:
            step.launches = [launch for launch in step.launches if launch.kernel in args.kernel]
        found = costs(step, arch, processes=args.jobs, cache=str(args.cache))
        each[GPUS[arch].name] = rows_of_launches(step.launches, found)
        if args.each:
            show_each(step.launches, found)
        if args.mix:
            show_mix(args.mix, step.launches, found)
        kernels = summarize(step.launches, found)
        show(kernels, arch, before.get(arch))
        count = sum(sum(phase.values()) for phase in counts.values())
        early = sum(launch.early for launch in step.launches) if EARLY_US[arch] else 0
        fixed = count * LAUNCH_US[arch] - early * EARLY_US[arch]
        print(f"fixed cost of {count} launches, {early} of which may start early, assumed: {fixed:.0f}")
        others = pytorch_us(step, arch)
        print(f"not in the table: the {step.aten_launches} launches of PyTorch, {others:.0f} by fixed cost and bytes")
        interval = step_interval(GPUS[arch].name, each[GPUS[arch].name], others)
        print("the step takes " + ", ".join(f"{us / 1e3:.2f} ms ({name})" for name, us in interval.items()))
        rows.append(
            {"arch": arch, "gpu": GPUS[arch].name, "kernels": kernels, "pytorch_us": others, "interval": interval}
        )
    if args.out:
        write_json(args.out, rows)
    if args.launches:
        lines = [f'"{gpu}": [\n' + ",\n".join(map(json.dumps, launches)) + "\n]" for gpu, launches in each.items()]
        args.launches.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
