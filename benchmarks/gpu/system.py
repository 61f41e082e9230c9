"""Measures the machine: versions, clocks, copies, products, and the constants of the model (micro.cu)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.plan import BUILD, ROOT
from nasfast.measure.doctor import environment
from nasfast.measure.timing import machine, seconds_of

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Bench

_PACKAGES = "torch", "triton", "numpy", "pytest", "pytest-xdist", "pybind11", "cmake", "ninja", "rich"
_SMI = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,temperature.gpu"


def bench_machine(bench: Bench) -> None:
    """Write device and versions, then the ceilings, then what micro.cu measures."""
    with bench.attempt("device"):
        bench.row("machine", **machine(), cores=os.cpu_count(), packages=_versions(), **_device(bench))
        bench.row("doctor", **environment())
    with bench.attempt("clocks"):
        bench.row("clocks", when="idle", **clocks())
    with bench.attempt("copies"):
        for mebibytes in (1024, 64, 32, 16) if bench.on_gpu else (1,):
            source = torch.randn(mebibytes << 18, device=bench.device)
            target = torch.empty_like(source)
            seconds = _best(bench, lambda source=source, target=target: target.copy_(source))
            bench.row("ceiling", what=f"copy of {mebibytes} MiB", GB_per_s=2 * source.nbytes / seconds / 1e9)
    with bench.attempt("matrix products"):
        n = 8192 if bench.on_gpu else 64
        for dtype in (torch.bfloat16, torch.float32):
            a, b = (torch.randn(n, n, device=bench.device).to(dtype) for _ in range(2))
            seconds = _best(bench, lambda a=a, b=b: a @ b)
            bench.row("ceiling", what=f"product {n} {str(dtype)[6:]}", TFLOP_per_s=2 * n**3 / seconds / 1e12)
    with bench.attempt("clocks"):
        bench.row("clocks", when="busy", **clocks())
    with bench.attempt("micro.cu"):
        _bench_micro(bench)


def _versions() -> dict[str, str | None]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _device(bench: Bench) -> dict:
    if not bench.on_gpu:
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "capability": torch.cuda.get_device_capability(),
        "multiprocessors": properties.multi_processor_count,
        "memory_GiB": properties.total_memory / 2**30,
        "L2_MiB": properties.L2_cache_size / 2**20,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvcc": shutil.which("nvcc"),
    }


def clocks() -> dict:
    """Clocks, power and temperature by nvidia-smi, or an error."""
    if shutil.which("nvidia-smi") is None:
        return {"error": "no nvidia-smi"}
    command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    values = answer.stdout.strip().splitlines()[0].split(", ") if answer.returncode == 0 else []
    return dict(zip(_SMI.split(","), values, strict=False)) or {"error": answer.stderr.strip()[:500]}


def _best(bench: Bench, work: Callable[[], object], repeats: int = 8) -> float:
    device = torch.device(bench.device)
    return min(seconds_of(work, device) for _ in range(repeats + 2))


def _bench_micro(bench: Bench) -> None:
    """Write the rows of micro.cu; on the CPU, where it cannot run, only whether it is there."""
    source = Path(__file__).with_name("micro.cu")
    if not bench.on_gpu:
        bench.row("micro", what="not run on a CPU", bytes=source.stat().st_size)
        return
    program = ROOT / BUILD / "micro"
    major, minor = torch.cuda.get_device_capability()
    command = ["nvcc", "-O3", "-std=c++17", f"-arch=sm_{major}{minor}", str(source), "-o", str(program)]
    for run in (command, [str(program)]):
        result = subprocess.run(run, capture_output=True, text=True, timeout=max(1.0, bench.left))
        if result.returncode:
            raise RuntimeError(f"{run[0]}: {result.stderr[-1500:]}")
    for line in result.stdout.splitlines():
        bench.row("micro", **json.loads(line))
