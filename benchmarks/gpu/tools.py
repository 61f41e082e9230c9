"""Runs small chains and matrices under compute-sanitizer, and a step under Nsight Compute.

    python -m benchmarks.gpu.tools kernels|step [--device cuda|cpu]

is what the tools look at: without them, it shows that the program itself works.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import json_lines
from benchmarks.gpu.plan import ROOT, part_environment

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
_SHOWN = 8
_TIME, _PERCENT = "gpu__time_duration.sum", "pct_of_peak_sustained_elapsed"


def bench_sanitizer(bench: Bench) -> None:
    """Run small chains and matrices under each tool of compute-sanitizer.

    Raises:
        SystemExit: a tool found an error.
    """
    tools = SANITIZERS if bench.on_gpu else ("",)
    sanitizer, bad = shutil.which("compute-sanitizer"), []
    if bench.on_gpu and sanitizer is None:
        raise SystemExit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    for i, tool in enumerate(tools):
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"] if tool else []
        code, output, seconds = _run(bench, [*command, *_program("kernels", bench)], bench.left / (len(tools) - i))
        summary = [
            line.strip("= ") for line in output.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line
        ]
        lines = [line for line in output.splitlines() if line.startswith("=========")][:12]
        bench.row(
            "sanitizer", tool=tool or "none", code=code, seconds=seconds, said=summary, lines=lines if code else []
        )
        if code is None or code:
            bad.append(f"{tool}: {'no time' if code is None else summary or output[-300:]}")
    if bad:
        raise SystemExit("; ".join(bad))


def bench_ncu(bench: Bench) -> None:
    """Write the counters of the longest kernels of a step, which the part `launches` has named.

    Raises:
        SystemExit: the tool is not there, or the machine does not allow its counters.
    """
    ncu = shutil.which("ncu")
    if bench.on_gpu and ncu is None:
        raise SystemExit("ncu is not on PATH: it comes with the CUDA toolkit")
    tool = [ncu, "--clock-control", "none", "--section", "SpeedOfLight", "--csv", "--page", "raw"]
    tool += [
        "--kernel-name-base",
        "demangled",
        "-k",
        f"regex:{kernel_pattern(json_lines.read(bench.rows))}",
        "-c",
        "60",
    ]
    code, output, seconds = _run(bench, [*(tool if bench.on_gpu else []), *_program("step", bench)], bench.left)
    bench.row("ran", what="ncu" if bench.on_gpu else "the step without ncu", code=code, seconds=seconds)
    # a tool that ran out of time has printed the kernels until then
    for row in longest(output):
        bench.row("counters", **row)
    if code is None or code:
        raise SystemExit(f"ncu: {'no time' if code is None else output[-500:]}")


def kernel_pattern(rows: list[dict[str, Any]]) -> str:
    """A regular expression of the names of the longest launches among rows; of all our kernels where there are none."""
    launches = sorted((row for row in rows if row["kind"] == "launch_of_step"), key=lambda row: -row["us"])[:_SHOWN]
    # the tools disagree about blanks, about what stands in front of the name, and about the arguments
    names = dict.fromkeys(re.sub(r"^void |\(.*", "", row["name"]) for row in launches)
    return "|".join(re.sub(r"(\\ )+", r"\\s*", re.escape(name)) for name in names) or "run_kernel"


def longest(output: str) -> list[dict[str, Any]]:
    """The longest kernels in the output of `ncu --csv --page raw`: name, time and percentages."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row.get(_TIME, "").replace(".", "").replace(",", "").isdigit()]
    rows.sort(key=lambda row: -float(row[_TIME].replace(",", "")))
    return [
        {
            "kernel": row["Kernel Name"],
            "time": row[_TIME],
            **{name: value for name, value in row.items() if name.endswith(_PERCENT)},
        }
        for row in rows[:_SHOWN]
    ]


def _program(what: str, bench: Bench) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.tools", what, "--device", bench.device]


def _run(bench: Bench, command: list[str], limit: float) -> tuple[int | None, str, float]:
    """Exit code, or None if it had no time; output; seconds. Memory is not cached, so that every access shows."""
    start, env = time.monotonic(), {**part_environment(bench.device), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1, limit),
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return None, output.decode(errors="replace") if isinstance(output, bytes) else output, round(limit, 1)
    return result.returncode, result.stdout, round(time.monotonic() - start, 1)


# ---- what the tools look at


# a batch that warps factor, then what blocks do with panels in shared memory and without, tall and wide
_MATRICES = ((130, 3, 3), (65, 65), (130, 129), (33, 100), (1700, 20), (300, 257))


def run_matrices(device: str) -> int:
    """Orthogonalise small matrices of each way to do it, and factor a batch; returns how many matrices there were."""
    import torch

    from nasfast import ops

    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device) for shape in _MATRICES]
    ops.orthogonalize(matrices, backend=device)
    ops.orthogonalize_([torch.empty_like(z) for z in matrices])
    ops.qr(matrices[0], backend=device)
    ops.geqrf(matrices[1], backend=device)
    return len(matrices)


def run_chains(device: str) -> int:
    """Run two small chains, one with an expansion and one behind a stem, in both types; returns how often."""
    import torch

    from benchmarks.gpu.proofs import Chain, draw, results
    from nasfast import ops

    pointwise = ("pointwise", 1, 1)
    chains = [
        Chain((pointwise, ("depthwise", 5, 1), pointwise), 2 * 9**2, (24, 56, 56, 16)),
        Chain((("dense", 3, 2), ("depthwise", 3, 2), pointwise), 2 * 16**2, (3, 40, 40, 16)),
    ]
    count = 0
    for chain in chains:
        for dtype in (torch.bfloat16, torch.float16):
            x, stages = draw(chain, 2, device)
            x = x.to(dtype)
            with torch.autocast(device, dtype):
                results(lambda x, stages: ops.conv_bn_act_chain(x, stages, backend="cuda"), x, stages, None, wide=False)
            count += 1
    return count


def run_step(device: str) -> None:
    """Run forward and backward of the eager engine once."""
    from benchmarks.gpu.bench import Bench, Variant, make_engine, on_cuda_kernels

    bench, variant = Bench("ncu", Path(os.devnull), device, time.monotonic() + 600), Variant("nasfast", "eager")
    with on_cuda_kernels(bench, variant):
        _, engine, images, labels = make_engine(bench, variant)
        engine.forward_backward(images, labels, [bench.path])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("kernels", "step"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.what == "kernels":
        print(run_chains(args.device), "chains,", run_matrices(args.device), "matrices")
    else:
        run_step(args.device)


if __name__ == "__main__":
    main()
