"""List the resources that each CUDA kernel of conv_bn_act_chain needs, as the installed extension has it; needs no GPU.

    python -m benchmarks.gpu_model.cuda_table [--arch 80 86 89 90] [--kernel TEXT ...] [--out FILE]

The table has registers and spilled bytes per thread, shared memory per block, and the number of blocks that fit a
multiprocessor. What a launch asks for in shared memory depends on its shape, so it is read from a recorded step: the
mean path of `mobilenet_v2` at batch 32 in bf16. sm_80 is an A100, sm_86 an RTX 3080, sm_89 an RTX 4090 and sm_90 an
H200. Needs an extension that was built with CUDA for these architectures, and g++.
"""

from __future__ import annotations

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu_model.cuda import CudaKernel, Resources, installed_kernels, known_kernels
from benchmarks.gpu_model.gpus import LIMITS
from benchmarks.gpu_model.recorder import Step, Workload, record_step
from benchmarks.harness import write_json


@dataclass(frozen=True)
class Row:
    """What one kernel needs.

    Attributes:
        threads: of a block.
        registers, spilled_bytes: registers and bytes of spilled registers per thread.
        most_registers: registers per thread with which a multiprocessor holds as many blocks as the kernel was written
            for.
        shared_bytes: shared memory of a block that every launch has.
        launches: of the recorded steps, one with every expansion stored, and one with all computed again that can be.
        least_asked, most_asked: bytes of shared memory of a block that these launches ask for besides; None without.
        blocks_per_sm: blocks that fit a multiprocessor, by registers, threads and the most shared memory.
    """

    kernel: str
    arch: int
    threads: int
    registers: int
    most_registers: int
    spilled_bytes: int
    shared_bytes: int
    launches: int
    least_asked: int | None
    most_asked: int | None
    blocks_per_sm: int


def steps(arch: int) -> dict[str, Step]:
    """Recorded steps, by the schedule of expansions: each has kernels that the other does not need."""
    return {backend: record_step(Workload(backend=backend), arch) for backend in ("cuda", "recompute")}


def shared_memory(recorded: Iterable[Step]) -> dict[CudaKernel, list[int]]:
    """The bytes of shared memory that the launches of steps ask for, by kernel."""
    asked = defaultdict(list)
    for step in recorded:
        for launch in step.launches:
            if isinstance(launch.specialization, CudaKernel):
                asked[launch.specialization].append(launch.arguments["shared"])
    return asked


def make_row(kernel: CudaKernel, arch: int, code: Resources, asked: list[int]) -> Row:
    """The row of a kernel with these resources; asked: bytes of shared memory of its launches."""
    limits = LIMITS[arch]
    most = max(asked, default=0)
    return Row(
        short_name(kernel),
        arch,
        kernel.threads,
        code.registers,
        limits.registers // (kernel.blocks * kernel.threads) // 8 * 8,
        code.stack_bytes,
        code.shared_bytes,
        len(asked),
        min(asked, default=None),
        most if asked else None,
        limits.programs_per_processor(kernel.threads // 32, code.registers, code.shared_bytes + most),
    )


def make_rows(
    kernels: Iterable[CudaKernel],
    installed: Mapping[tuple[str, int], Resources],
    arch: int,
    asked: Mapping[CudaKernel, list[int]],
) -> list[Row]:
    """The rows of an architecture."""
    return [make_row(kernel, arch, installed[kernel.name, arch], asked.get(kernel, [])) for kernel in kernels]


def short_name(kernel: CudaKernel) -> str:
    """The kernel's type without namespaces."""
    return re.sub(r"\w+::", "", kernel.name).replace(" >", ">")


def show(rows: list[Row]) -> None:
    """Print a table."""
    print(
        f"{'kernel':60} {'sm':>3} {'threads':>7} {'regs':>4} {'spill':>5} {'shared':>6} {'launches':>8} {'asked':>13} "
        f"{'per SM':>6}"
    )
    for r in rows:
        asked = f"{r.least_asked} to {r.most_asked}" if r.launches else ""
        print(
            f"{r.kernel:60} {r.arch:3} {r.threads:7} {r.registers:4} {r.spilled_bytes:5} {r.shared_bytes:6} "
            f"{r.launches:8} {asked:>13} {r.blocks_per_sm:6}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", type=int, choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--kernel", nargs="+", help="list only kernels whose name in the table has one of these texts")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    kernels = [
        kernel
        for kernel in known_kernels().values()
        if not args.kernel or any(text in short_name(kernel) for text in args.kernel)
    ]
    installed = installed_kernels()
    if missing := [arch for arch in args.arch if (kernels[0].name, arch) not in installed]:
        parser.error(
            f"the installed extension has no kernels for {missing}: build it without CUDAARCHS, or give --arch"
        )
    rows = []
    for arch in args.arch:
        asked = shared_memory(steps(arch).values())
        rows += make_rows(kernels, installed, arch, asked)
    show(rows)
    if args.out:
        write_json(args.out, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
