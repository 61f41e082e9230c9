"""Every launch of a step beside the model's, and the constants with which the model fits best.

The model's launches are in benchmarks/results/gpu_model.json; `python -m benchmarks.gpu_model --out FILE` writes it.
What is fitted is written to `constants.json` in the folder of the rows, from which benchmarks/gpu_model/scenarios.py
says how the model takes it.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.launches import kernels_of
from benchmarks.gpu.plan import ROOT
from benchmarks.gpu_model.scenarios import scenarios
from nasfast.ops import cuda_times

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Bench

MODEL = ROOT / "benchmarks" / "results" / "gpu_model.json"


def bench_launches(bench: Bench) -> None:
    """Write a row for each launch of the engine's step, and one with the constants that fit."""
    from benchmarks.gpu.parts import OURS, make

    # the profiler's time of a launch that starts early is in part that of the one in front
    step = make(bench, next(variant for variant in OURS if not variant.early))
    if not bench.on_gpu:
        step()
        bench.row("launches", measured=0, modelled=len(modelled("H200")), aligned=False)
        return
    ran = kernels_of(step.run, torch.device(bench.device))
    ours = [(name, 1e3 * ms) for name, ms in ran if family_of(name)]
    if not ours:
        raise SystemExit(f"no CUDA kernel of a chain ran in the step, but {sorted({name for name, _ in ran})[:5]}")
    gpu = cuda_times.similar_gpu(torch.cuda.get_device_capability())
    model = modelled(gpu)
    aligned = [family_of(name) for name, _ in ours] == [row["kernel"] for row in model]
    total, whole = sum(us for _, us in ours), 1e6 * statistics.median(step()["step"] for _ in range(10))
    bench.row(
        "launches", measured=len(ours), modelled=len(model), aligned=aligned, us=total, all_us=whole, kernels=len(ran)
    )
    for i, (name, us) in enumerate(ours):
        bench.row(
            "launch_of_step", kernel=family_of(name), name=name, us=us, **({"model": model[i]} if aligned else {})
        )
    if aligned:
        constants = fit(gpu, model, [us for _, us in ours])
        bench.row("constants", **constants)
        bench.rows.with_name("constants.json").write_text(json.dumps(constants) + "\n")


def modelled(gpu: str) -> list[dict[str, Any]]:
    """The launches of a step on this GPU by the model, in order."""
    return json.loads(MODEL.read_text(encoding="utf-8"))[gpu]["launches"]


def family_of(kernel: str) -> str | None:
    """The family of one of our kernels by the name that the profiler gives; None for other kernels."""
    found = re.search(r"run_kernel<(?:nasfast::gpu::)?(?:pointwise::)?(\w+)", kernel)
    return found[1] if found else None


def fit(gpu: str, model: Sequence[dict[str, Any]], measured: Sequence[float]) -> dict[str, float]:
    """The constants with the least mean of abs(log(modelled / measured)); `error` is that mean.

    No launch that was measured has started early, so `early` is not fitted.
    """
    best: dict[str, float] = {"error": math.inf}
    central = replace(scenarios(gpu)["central"], early=0.0)
    for ipc, bandwidth, fixed in product(
        [0.3 + 0.05 * i for i in range(11)], [0.5 + 0.05 * i for i in range(13)], [0.5 * i for i in range(11)]
    ):
        settings = {"ipc": ipc, "bandwidth": bandwidth, "fixed": fixed}
        scenario = replace(central, **settings)
        pairs = zip(model, measured, strict=True)
        error = statistics.fmean(abs(math.log(scenario.microseconds(row) / us)) for row, us in pairs)
        if error < best["error"]:
            best = {**settings, "error": error}
    return best
