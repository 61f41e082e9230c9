"""Compile every Triton kernel ahead of time, without a GPU, and show what each asks of one.

    python benchmarks/aot.py [--arch 86 90] [--default] [--kernel NAME ...] [--jobs N] [--out FILE]

For every configuration of kernels/triton/configs.py: registers and spilled bytes per thread (ptxas), shared memory per
program, and how many programs fit a multiprocessor. sm_86 is the RTX 3080, with 99 KB of shared memory per program;
sm_90 the H200.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

# a kernel that was made for the interpreter cannot be compiled
os.environ["TRITON_INTERPRET"] = "0"

import triton
from harness import positive, write_json
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from nasfast._triton import bn, depthwise, mixed, pointwise
from nasfast._triton.configs import FAMILIES, TOGETHER, Config, stencil_tile

# bytes of shared memory one program may use, and of a multiprocessor; its registers and threads
LIMITS = {86: (99 * 1024, 100 * 1024, 65536, 1536), 90: (227 * 1024, 228 * 1024, 65536, 2048)}

# pointers that are not of the storage type
_POINTERS = {
    **dict.fromkeys(("fold", "back", "fold_before", "gamma", "beta"), "*fp32"),
    **dict.fromkeys(("running_mean", "running_var", "gates", "subtotal"), "*fp32"),
    # parameters stay float32 under autocast
    **dict.fromkeys(("weight", "taps"), "*fp32"),
    "statistics": "*fp64",
}
# tuples of pointers of the storage type
_TUPLES = {"xs", "dxs"}
# what completes BatchNorm's coefficients, forward and backward: Norm.sums and NormGradient.sums of bn_triton.py
_FORWARD_SUMS = ("*fp32", "*fp32", "*i32", "*fp64", "*fp32", "*fp32", "*fp32", "fp32")
_BACKWARD_SUMS = ("*fp32", "*i32", "*fp64", "*fp32", "*fp32", "*fp32", "*fp32", "fp32", "i32")
_STORED = {"x", "y", "grad", "dx", "before", "added", "residual", "out", "even"}

# a projection of 28 x 28 pixels, and back through its expansion's
_POINTWISE = {
    **dict.fromkeys(("H", "W", "OH", "OW"), 0), "K": 168, "N": 56, "LDX": 168, "XSTEP": 1, "KERNEL": 1, "STRIDE": 1,
    "FOLDED": True, "ACT": "relu6", "STATISTICS": True, "TILES": 1,
}  # fmt: skip
_STEM = {
    "H": 224, "W": 224, "OH": 112, "OW": 112, "K": 27, "N": 40, "LDX": 3, "KERNEL": 3, "STRIDE": 2, "FOLDED": False,
}  # fmt: skip
_POINTWISE_BACKWARD = {"K": 56, "N": 168, "LDG": 56, "LDX": 168, "TILES": 2}
_ROWS = {"C": 56, **dict.fromkeys(("X_ROW", "Y_ROW", "GRAD_ROW", "RESIDUAL_ROW", "OUT_ROW"), 56), "TILES": 2}
# The maps of a stencil are so wide. Strips and blocks of channels fit them.
_WIDTH = 56
_DEPTHWISE = {"XSTEP": 1, "FOLDED": True, "ACT": "relu6", "C": 192, "LDX": 192, "EVEN": True}
_BACKWARD = {"XSTEP": 1, "FOLDED": True, "ACT": "identity", "ACT_BEFORE": "relu6", "ADDED": False}
_TRANSPOSED = {"C": 192, "LDG": 192, "LDX": 192, "EVEN": True}

# kernel, family, and the constants of the cases that are compiled: those of an inverted residual, and of the stem
CASES = [
    (pointwise.pointwise_forward_kernel, "pointwise", _POINTWISE),
    (pointwise.pointwise_forward_kernel, "pointwise_fp32", _POINTWISE),
    (pointwise.pointwise_forward_kernel, "dense", {**_POINTWISE, **_STEM}),
    (pointwise.pointwise_backward_kernel, "pointwise_backward", {**_BACKWARD, **_POINTWISE_BACKWARD}),
    (pointwise.pointwise_backward_kernel, "pointwise_backward_fp32", {**_BACKWARD, **_POINTWISE_BACKWARD}),
    *(
        (depthwise.depthwise_forward_kernel, "depthwise", {**_DEPTHWISE, "KERNEL": k, "STRIDE": s, "STATISTICS": True})
        for k in (3, 5, 7)
        for s in (1, 2)
    ),
    *(
        (depthwise.depthwise_backward_kernel, "depthwise", {**_BACKWARD, **_TRANSPOSED, "KERNEL": k, "STRIDE": s})
        for k in (3, 5, 7)
        for s in (1, 2)
    ),
    (bn.bn_statistics_kernel, "batch_norm", _ROWS),
    (bn.bn_act_kernel, "batch_norm", {**_ROWS, "ACT": "relu6", "RESIDUAL": True, "SHUFFLE": False}),
    (bn.bn_act_reduce_kernel, "batch_norm", {**_ROWS, "ACT": "relu6"}),
    (bn.bn_act_backward_kernel, "batch_norm", {**_ROWS, "ACT": "relu6"}),
    (bn.shuffle_merge_kernel, "batch_norm", _ROWS),
    (mixed.mixed_bn_statistics_kernel, "mixed", {}),
    (mixed.mixed_bn_kernel, "mixed", {"NORMALIZE": True, "FIRST": False}),
    (mixed.mixed_bn_reduce_kernel, "mixed", {"NORMALIZE": True}),
    (mixed.mixed_bn_backward_kernel, "mixed", {"NORMALIZE": True}),
    (bn.bn_fold_kernel, "fold", {"RUNNING": True}),
]


@dataclass(frozen=True)
class Compiled:
    """What one kernel needs in one configuration.

    Attributes:
        default: whether it is the first of its family.
        registers, spilled_bytes: per thread.
        shared_bytes: per program.
        programs_per_sm: how many fit, by registers, threads and shared memory.
    """

    kernel: str
    constants: str
    dtype: str
    config: str
    default: bool
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    programs_per_sm: int


def jobs(
    archs: list[int], *, default_only: bool, names: list[str] | None = None
) -> Iterator[tuple[int, str, str, int]]:
    """(index of CASES, name of configuration, storage type, architecture)."""
    for i, (kernel, family, constants) in enumerate(CASES):
        if names and kernel.__name__ not in names:
            continue
        dtypes = (
            ["fp32"] if family.endswith("_fp32") else ["bf16"] if f"{family}_fp32" in FAMILIES else ["bf16", "fp32"]
        )
        for i_config, config in enumerate(FAMILIES[family]):
            # one stencil of each kernel stands for the configurations that are not the default
            stencil = family == "depthwise"
            if i_config and (default_only or (stencil and constants["KERNEL"] != 7)):
                continue
            for dtype in dtypes:
                for arch in archs:
                    yield i, config, dtype, arch


def compile_job(job: tuple[int, str, str, int]) -> Compiled:
    """Compile one job and read ptxas's report."""
    index, name, dtype, arch = job
    kernel, family, constants = CASES[index]
    config: Config = FAMILIES[family][name]
    if family == "depthwise":
        back = constants["STRIDE"] if kernel is depthwise.depthwise_backward_kernel else 0
        constants = {**constants, **stencil_tile(config, _WIDTH, constants["C"], back)}
    else:
        constants = {k: v for k, v in {**constants, **config.tile}.items() if k in kernel.arg_names}
    if "PRECISION" in kernel.arg_names:
        constants["PRECISION"] = "ieee"
    signature, attributes = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        if argument in _TUPLES:
            signature[argument] = (f"*{dtype}",) * TOGETHER
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(TOGETHER)}
            continue
        if argument == "sums":
            forward = kernel.__name__.endswith(("statistics_kernel", "forward_kernel"))
            signature[argument] = _FORWARD_SUMS if forward else _BACKWARD_SUMS
            attributes |= {
                (i, j): [["tt.divisibility", 16]] for j, kind in enumerate(signature[argument]) if kind[0] == "*"
            }
            continue
        pointer = _POINTERS.get(argument) or (f"*{dtype}" if argument in _STORED else None)
        signature[argument] = pointer or ("fp32" if argument == "eps" else "i32")
        # as at run time: allocations are aligned, and channels and strides mostly multiples of 16
        if pointer or argument in {"C", "K", "N", "ldx", "ldg"}:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spilled = ptxas_report(compiled.asm["ptx"], arch)
    shared = compiled.metadata.shared
    said = ",".join(f"{key}={value}" for key, value in CASES[index][2].items() if key in ("KERNEL", "STRIDE", "BATCH"))
    return Compiled(
        kernel.__name__, said, dtype, name, name == next(iter(FAMILIES[family])), arch,
        registers, spilled, shared, programs_per_sm(arch, config.num_warps * 32, registers, shared),
    )  # fmt: skip


def ptxas_report(ptx: str, arch: int) -> tuple[int, int]:
    """Registers and spilled bytes per thread.

    Raises:
        RuntimeError: ptxas refused the code.
    """
    ptxas = get_ptxas(arch).path  # the one that made the kernel: PTX is not portable to older ones
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        suffix = "a" if arch >= 90 else ""
        command = [ptxas, "-v", f"--gpu-name=sm_{arch}{suffix}", path, "-o", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True)
    report = result.stdout + result.stderr
    registers = re.search(r"Used (\d+) registers", report)
    if result.returncode or registers is None:
        raise RuntimeError(f"ptxas: {report}")
    return int(registers[1]), sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))


def programs_per_sm(arch: int, threads: int, registers: int, shared: int) -> int:
    """Programs that a multiprocessor holds at once."""
    _, shared_memory, register_file, most_threads = LIMITS[arch]
    # registers are given out in units of 256 per warp; every program takes 1 KiB of shared memory for the system
    by_registers = register_file // (-(-registers * 32 // 256) * 256 * (threads // 32))
    return min(by_registers, most_threads // threads, shared_memory // (shared + 1024))


def compile_all(chosen: list[tuple[int, str, str, int]], processes: int) -> list[Compiled]:
    """compile_job for all, in processes of their own."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_job, chosen, chunksize=4))


def show(rows: list[Compiled]) -> None:
    """Print a table."""
    print(
        f"{'kernel':28} {'constants':18} {'type':5} {'config':8} {'sm':>3} {'regs':>5} {'spill':>6} {'shared':>7} "
        f"{'per SM':>6}"
    )
    for r in rows:
        mark = "*" if r.default else ""
        print(
            f"{r.kernel:28} {r.constants:18} {r.dtype:5} {r.config + mark:8} {r.arch:3} {r.registers:5} "
            f"{r.spilled_bytes:6} {r.shared_bytes:7} {r.programs_per_sm:6}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", type=int, choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--default", action="store_true", help="default configurations only")
    parser.add_argument("--kernel", nargs="+", choices=sorted({kernel.__name__ for kernel, *_ in CASES}))
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    rows = compile_all(list(jobs(args.arch, default_only=args.default, names=args.kernel)), args.jobs)
    show(rows)
    if args.out:
        write_json(args.out, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
