"""Every launch of a step, beside what the formula of benchmarks/gpu_step.py says of it."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.launches import kernels_of
from benchmarks.gpu_step import ROWS, read

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Bench


def bench_launches(bench: Bench) -> None:
    """Write a row for each launch of the engine's step, with its size where the step is that of `ROWS`."""
    from benchmarks.gpu.parts import OURS, make

    # the profiler's time of a launch that starts early is in part that of the one in front
    step = make(bench, next(variant for variant in OURS if not variant.early))
    if not bench.on_gpu:
        step()
        bench.row("launches", measured=0, us=0.0, all_us=0.0, kernels=0)
        return
    ran = kernels_of(step.run, torch.device(bench.device))
    ours = [(name, family, 1e3 * ms) for name, ms in ran if (family := family_of(name))]
    if not ours:
        raise SystemExit(f"no CUDA kernel of a chain ran in the step, but {sorted({name for name, _ in ran})[:5]}")
    known = read(ROWS).now
    same = [family for _, family, _ in ours] == [launch.family for launch in known]
    total, whole = sum(us for *_, us in ours), 1e6 * statistics.median(step()["step"] for _ in range(10))
    bench.row("launches", measured=len(ours), us=total, all_us=whole, kernels=len(ran))
    for i, (name, family, us) in enumerate(ours):
        size = {"chain": known[i].chain, "bytes": known[i].bytes, "products": known[i].products} if same else {}
        bench.row("launch_of_step", kernel=family, name=name, **size, us=us)


def family_of(kernel: str) -> str | None:
    """The family of one of our kernels by the name that the profiler gives; None for other kernels."""
    found = re.search(r"run_kernel<(?:nasfast::gpu::)?(?:pointwise::)?(\w+)", kernel)
    return found[1] if found else None
