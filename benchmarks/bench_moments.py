"""Speed of the moments experiments against a plain PyTorch loop, and the drift of float32 against float64.

    python -m benchmarks.bench_moments [--rounds 5] [--threads N] [--quick] [--out FILE]

The peer is a straightforward form of the experiment: one network at a time, one call of a layer for the signal and one
for the noise, weights from `torch.randn`, moments in float64 at the same layers, eigenvalues of the covariance of
features. Both have the same numbers of networks, layers and records, and run in turns. `run` is wall time; `cpu` is the
time of the process, which other programs disturb less.

Each row also has the difference that float32 makes to log chi with the same weights, inputs and noise: the largest
difference where log chi < 8, and the difference of the means over networks at the last layer. Where chi explodes, a
network's results in the two precisions must diverge as soon as chi times the rounding error is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import positive, ratios, write_json
from nasfast.measure.timing import measure, measuring
from nasfast.research.analysis.moments.inputs import Source, fields, gaussian, standardised
from nasfast.research.analysis.moments.networks import NetConfig, run

FC, CONV = gaussian(192), fields(3, 16)
CASES: dict[str, tuple[NetConfig, Source, int]] = {
    "vanilla FC": (NetConfig(width=128, batch=64, depth=200, every=4), FC, 8),
    "BN feed-forward FC": (NetConfig(norm="batch", width=128, batch=64, depth=200, every=4), FC, 8),
    "BN resnet FC": (NetConfig(norm="batch", residual=2, width=128, batch=64, depth=100, every=4), FC, 8),
    "BN feed-forward conv": (NetConfig(norm="batch", kernel=3, width=64, batch=16, depth=40, every=4), CONV, 5),
    "BN feed-forward FC, as published": (
        NetConfig(norm="batch", width=512, batch=64, depth=60, every=2),
        gaussian(3072),
        4,
    ),
}


def _bn(y: Tensor, dy: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    over = (0, *range(2, y.ndim))
    mean, variance = y.mean(over, keepdim=True), y.var(over, correction=0, keepdim=True)
    return (y - mean) / torch.sqrt(variance + eps), dy / torch.sqrt(variance + eps)


def _moments(x: Tensor, dx: Tensor) -> tuple[float, ...]:
    over = (0, *range(2, x.ndim))
    x, dx = x.double(), dx.double()
    centred = x - x.mean(over, keepdim=True)
    return (
        float(x.square().mean()),
        float(centred.square().mean()),
        float(dx.square().mean()),
        float(centred.square().square().mean()),
        float(x.abs().mean()),
    )


def _rank(x: Tensor) -> float:
    rows = x.double().movedim(1, -1).flatten(0, -2)
    values = torch.linalg.eigvalsh(torch.cov(rows.T, correction=0))
    return float(values.sum() / values[-1])


def plain(cfg: NetConfig, source: Source, realisations: int) -> list[float]:
    """Run the peer; returns log chi of every network at the last layer."""
    found = []
    size = (cfg.kernel,) * 2 if cfg.kernel else ()

    def layer(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
        if not cfg.kernel:
            return x @ weight.T
        return F.conv2d(F.pad(x, (cfg.kernel // 2,) * 4, mode="circular"), weight, stride=stride)

    for seed in range(realisations):
        generator = torch.Generator().manual_seed(seed)
        x = standardised(source(cfg.batch, generator))
        dx = torch.randn(x.shape, generator=generator)
        fan_in = x.shape[1] * max(1, cfg.kernel) ** 2
        weight = torch.randn(cfg.width, x.shape[1], *size, generator=generator) / math.sqrt(fan_in)
        stride = 2 if cfg.kernel else 1
        x, dx = layer(x, weight, stride), layer(dx, weight, stride)
        fan_in, scale = cfg.width * max(1, cfg.kernel) ** 2, 0.0
        for l_layer in range(1, cfg.depth + 1):
            records = [(x, dx)]
            skip = x, dx
            for _ in range(cfg.residual or 1):
                weight = torch.randn(cfg.width, cfg.width, *size, generator=generator) * math.sqrt(2 / fan_in)
                if not cfg.residual:
                    x, dx = layer(x, weight), layer(dx, weight)
                if cfg.norm == "batch":
                    x, dx = _bn(x, dx, cfg.eps)
                records.append((x, dx))
                dx = dx * (x > 0)
                x = x.relu()
                records.append((x, dx))
                if cfg.residual:
                    x, dx = layer(x, weight), layer(dx, weight)
                    records.append((x, dx))
            if cfg.residual:
                x, dx = x + skip[0], dx + skip[1]
                records.append((x, dx))
            rms = dx.square().mean().sqrt()
            dx, scale = dx / rms, scale + 2 * float(rms.log())
            if l_layer % cfg.every == 0:
                for pair in records:
                    _moments(*pair)
                for v in records[-1]:
                    _rank(v)
        _, signal, noise, *_ = _moments(x, dx)
        found.append((math.log(noise) + scale - math.log(signal)) / 2)
    return found


def timed(function: Callable[[], Any]) -> Callable[[], dict[str, float]]:
    def call() -> dict[str, float]:
        start, start_cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            function()
        return {"run": time.perf_counter() - start, "cpu": time.process_time() - start_cpu}

    return call


def bench(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Measure one row."""
    cfg, source, realisations = CASES[name]
    if quick:
        cfg, realisations = cfg.replace(depth=2 * cfg.every), 2
    times = measure(
        {
            "nasfast": timed(lambda: run(cfg, source, realisations=realisations)),
            "plain": timed(lambda: plain(cfg, source, realisations)),
        },
        rounds=rounds,
        warmup=1,
    )
    single, double = (
        run(cfg.replace(dtype=dtype), source, realisations=realisations).curves()["logchi"]
        for dtype in ("float32", "float64")
    )
    return {
        "name": name,
        "networks": realisations,
        **cfg.to_dict(),
        "times": times,
        "ratio": {phase: ratios(times, "nasfast", phase)["plain"] for phase in ("run", "cpu")},
        "log_chi_nasfast": float(double[:, -1].mean()),
        "log_chi_plain": float(np.mean(plain(cfg, source, realisations))),
        "float32_drift_of_log_chi_below_8": float(np.abs(single - double)[double < 8].max()),
        "float32_drift_of_mean_log_chi_at_L": float((single - double)[:, -1].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--quick", action="store_true", help="only show that everything runs")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    with measuring(args.threads):
        rows = []
        for name in CASES:
            row = bench(name, 1 if args.quick else args.rounds, args.quick)
            rows.append(row)
            ours, theirs = (row["times"][v]["cpu"]["median_ms"] for v in ("nasfast", "plain"))
            print(
                f"{name:34} CPU time: nasfast {ours:6.0f} ms  plain {theirs:6.0f} ms  ratio {row['ratio']['cpu']:5.2f} "
                f"(wall {row['ratio']['run']:5.2f})  log chi {row['log_chi_nasfast']:.3f} and "
                f"{row['log_chi_plain']:.3f}  drift {row['float32_drift_of_log_chi_below_8']:.1e}, "
                f"{row['float32_drift_of_mean_log_chi_at_L']:.1e}",
                flush=True,
            )
        if args.out:
            write_json(args.out, rows)
        else:
            print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
