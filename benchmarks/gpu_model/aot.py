"""Compile every Triton kernel without a GPU, and list the resources that each one needs.

    python -m benchmarks.gpu_model.aot [--arch 86 90] [--sample] [--kernel NAME ...] [--out FILE]

recorder.py records real calls, and the kernels are compiled for the arguments of these calls. The table has registers
and spilled bytes per thread, shared memory per program, and the number of programs that fit a multiprocessor. sm_86 is
the RTX 3080, with 99 KiB of shared memory per program; sm_90 is the H200. The model (`model.py`) reads every launch
of a step.
"""

from __future__ import annotations

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_model.compiled import compile_for, in_processes
from benchmarks.gpu_model.gpus import GPUS
from benchmarks.gpu_model.recorder import Launch, Specialization, Step, Workload, make_step, recorded
from benchmarks.harness import ROOT, positive, write_json
from nasfast.ops import bn_act, mixed_bn

_SHOWN = ("KERNEL", "STRIDE", "BATCH")


@dataclass(frozen=True)
class Row:
    """What one kernel needs.

    Attributes:
        registers, spilled_bytes: registers and bytes of spilled registers per thread.
        shared_bytes: shared memory per program.
        programs_per_sm: programs that fit a multiprocessor, by registers, threads and shared memory.
    """

    kernel: str
    constants: str
    dtype: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    programs_per_sm: int


@dataclass(frozen=True)
class _Job:
    specialization: Specialization
    constants: str
    dtype: str
    arch: int


def _inputs(count: int, dtype: torch.dtype) -> list[Tensor]:
    x = torch.zeros(4, 24, 14, 14, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return [x.clone().requires_grad_() for _ in range(count)]


def record_calls() -> list[Launch]:
    """Record steps of two spaces in both storage types, and calls of the operators that these steps do not use."""
    launches = []
    for dtype in (torch.bfloat16, torch.float32):
        name = "bf16" if dtype == torch.bfloat16 else "fp32"
        for space in ("mobilenet_v2", "shufflenet_v2"):
            _, forward_backward, update = make_step(Workload(space, dtype=name, engine="eager"))
            step = Step()
            with recorded(step):
                forward_backward()
                update()
            launches += step.launches
        step = Step()
        with recorded(step):
            (x,), weight = _inputs(1, dtype), torch.ones(24, requires_grad=True)
            bn_act(x, weight, torch.zeros(24)).sum().backward()
            running = {"running_mean": torch.zeros(24), "running_var": torch.ones(24)}
            bn_act(x, weight, torch.zeros(24), **running, training=False)
            # more tensors than one launch takes, one of them not normalised
            gates = torch.ones(10, requires_grad=True)
            mixed_bn(_inputs(10, dtype), gates, normalize=[True] * 9 + [False]).sum().backward()
        launches += step.launches
    return launches


def jobs(
    launches: list[Launch], archs: list[int], *, sample: bool = False, names: list[str] | None = None
) -> list[_Job]:
    """Choose the first call of each kernel, storage type and stencil, for every architecture.

    Args:
        sample: only one call of each kernel.
        names: choose only these kernels.
    """
    chosen: dict[tuple, _Job] = {}
    for launch in launches:
        if names and launch.kernel not in names:
            continue
        types = str(launch.specialization.signature)
        dtype = "bf16" if "*bf16" in types else "fp32"
        said = ",".join(f"{name}={launch.arguments[name]}" for name in _SHOWN if name in launch.arguments)
        for arch in archs:
            job = _Job(launch.specialization, said, dtype, arch)
            key = (launch.kernel, arch) if sample else (launch.kernel, said, dtype, arch)
            chosen.setdefault(key, job)
    return list(chosen.values())


def compile_job(job: _Job) -> Row:
    """Compile one job and read its resources."""
    found = compile_for(job.specialization, job.arch)
    return Row(
        job.specialization.kernel,
        job.constants,
        job.dtype,
        job.arch,
        found.registers,
        found.spilled_bytes,
        found.shared_bytes,
        GPUS[job.arch].programs_per_processor(found.warps, found.registers, found.shared_bytes),
    )


def show(rows: list[Row]) -> None:
    """Print a table."""
    print(f"{'kernel':28} {'constants':18} {'type':5} {'sm':>3} {'regs':>5} {'spill':>6} {'shared':>7} {'per SM':>6}")
    for r in rows:
        print(
            f"{r.kernel:28} {r.constants:18} {r.dtype:5} {r.arch:3} {r.registers:5} "
            f"{r.spilled_bytes:6} {r.shared_bytes:7} {r.programs_per_sm:6}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    parser.add_argument("--sample", action="store_true", help="compile each kernel once, as the tests do")
    parser.add_argument("--kernel", nargs="+", help="compile only these kernels")
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "triton", help="folder for Triton's cache")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    chosen = jobs(record_calls(), args.arch, sample=args.sample, names=args.kernel)
    rows = in_processes(compile_job, chosen, args.jobs, str(args.cache))
    show(rows)
    if args.out:
        write_json(args.out, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
