"""The training step on a CUDA GPU: the methods of the paper's table, nasfast, and PyTorch at its best; one JSON file.

    python benchmarks/bench_gpu.py [--minutes N] [--space NAME] [--quick] [--out FILE]

Parts run in order of importance until the time is up; what was left out is said in the file. Every variant of a part
runs in the same process, interleaved. `step` is forward, cross entropy and backward.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import positive, provenance, saved_bytes, write_json
from torch import nn

from nasfast.engine import EagerEngine, GraphEngine
from nasfast.floor import Machine, measure_machine, step_floor, trace
from nasfast.projection import CARDS, kernels_of, passes_of, project
from nasfast.spaces import Arch, SearchSpace, get_space, mean_path
from nasfast.supernet import StandaloneNetwork, Supernet
from nasfast.timing import TrainingStep, measure, measuring, random_batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Variant:
    """How a step is run.

    Attributes:
        ops: `nasfast` or `torch`.
        how: `eager`, `compile`, `graph` (a CUDA graph of this one path), `compile graph`, or `engine` (nasfast's).
        layout: `contiguous` or `channels_last`.
        dtype: `fp32`, or `bf16` autocast.
        trainable: `bn`, or `all` as SPOS trains.
    """

    ops: str
    how: str
    layout: str
    dtype: str
    trainable: str = "bn"

    @property
    def name(self) -> str:
        return " ".join([self.ops, self.how, self.layout, self.dtype] + ["all weights"] * (self.trainable == "all"))


def step_variants(dtype: str, *, compiled: bool) -> list[Variant]:
    """Of one number type: the paper's setting, the peers, ours."""
    last = "channels_last"
    found = [
        Variant("torch", "eager", last, dtype, "all"),
        Variant("torch", "eager", last, dtype),
        Variant("torch", "graph", last, dtype),
        Variant("nasfast", "eager", last, dtype),
        Variant("nasfast", "graph", last, dtype),
        Variant("nasfast", "engine", last, dtype),
    ]
    if dtype == "fp32":  # the paper's setting
        found += [Variant("torch", "eager", "contiguous", dtype, "all"), Variant("torch", "eager", "contiguous", dtype)]
    if compiled:
        found += [Variant("torch", "compile", last, dtype), Variant("torch", "compile graph", last, dtype)]
    return found


def make(variant: Variant, space: SearchSpace, path: Arch, batch: int) -> Callable[[], dict[str, float]]:
    """One call of it is one step; returns seconds."""
    images, labels = random_batch(space, batch, device="cuda")
    if variant.layout == "contiguous":
        images = images.contiguous()
    net = Supernet(space, init="he", layer_indicators=False, fused=variant.ops == "nasfast")
    net.freeze(variant.trainable)
    memory_format = torch.channels_last if variant.layout == "channels_last" else torch.contiguous_format
    net.to(device="cuda", memory_format=memory_format).train()
    bf16 = variant.dtype == "bf16"
    if variant.how == "engine":
        engine = GraphEngine(net, tuple(images.shape), bf16=bf16)
        return timed(lambda: engine.forward_backward(images, labels, [path]))
    model, arguments = net, path
    if "compile" in variant.how:
        model, arguments = torch.compile(Fixed(net, path), dynamic=False), None
    step = TrainingStep(model, images, labels, path=arguments, bf16=bf16)
    return timed(captured(step)) if "graph" in variant.how else step


class Fixed(nn.Module):
    """A supernet on one path."""

    def __init__(self, net: Supernet, path: Arch) -> None:
        super().__init__()
        self.net, self.path = net, path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x, self.path)


def timed(work: Callable[[], Any]) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return {"step": start.elapsed_time(end) / 1e3}

    return run


def captured(step: TrainingStep) -> Callable[[], None]:
    """Replay of the whole step of one path."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step.model.zero_grad(set_to_none=True)
            step.loss().backward()
    torch.cuda.current_stream().wait_stream(stream)
    step.model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.loss().backward()

    def replay() -> None:
        graph.replay()

    replay.kept = step  # its parameters' gradients live in the graph's pool
    return replay


def memory_of(variant: Variant, space: SearchSpace, path: Arch, batch: int) -> dict[str, int]:
    """Bytes of one eager step: saved for backward, and highest point above what was there before."""
    step = make(variant, space, path, batch)
    step()
    there = [*step.model.parameters(), step.images]
    saved = saved_bytes(step.loss, exclude=there)
    step.model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return {"saved": saved, "peak": torch.cuda.max_memory_allocated() - before}


class Session:
    """Parts with a deadline; a part that fails leaves its error in the file and the others run."""

    def __init__(self, seconds: float, out: Path | None, head: dict) -> None:
        self.end = time.monotonic() + seconds
        self.rows: list[dict] = [head]
        self.out = out

    def part(self, name: str, needs: float, work: Callable[[], dict]) -> None:
        """Run `work` unless fewer than `needs` seconds are left."""
        left = self.end - time.monotonic()
        if left < needs:
            self.rows.append({"part": name, "left_out": f"{left:.0f} s left, needs about {needs:.0f}"})
            return
        start = time.monotonic()
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        found = {"part": name, "seconds": round(time.monotonic() - start, 1), **found}
        self.rows.append(found)
        if self.out:  # after every part: what is cut short keeps what it has
            write_json(self.out, self.rows)
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
        print(f"\n{name}: {found['seconds']} s")
        show(found)


def show(found: dict) -> None:
    for name, phases in found.get("times", {}).items():
        step = phases["step"]
        print(f"  {name:48} {step['median_ms']:9.3f} ms  ({step['q20_ms']:.3f} - {step['q80_ms']:.3f})")
    for key, value in found.items():
        if key not in ("part", "seconds", "times", "kernels", "projections"):
            print(f"  {key}: {value}")


def bench_step(space: SearchSpace, path: Arch, batch: int, dtype: str, *, compiled: bool, rounds: int) -> dict:
    """Times of all variants, ratios of ours, and the floor."""
    machine = measure_machine(DTYPES[dtype], device="cuda")
    # fp32 is fp32 for all: PyTorch's convolutions would take tf32, ours and its matrix products do not
    torch.backends.cudnn.allow_tf32 = False
    steps, errors = {}, {}
    for variant in step_variants(dtype, compiled=compiled):
        try:
            step = make(variant, space, path, batch)
            step()  # captures and compiles, and allocates what it needs
            steps[variant.name] = step
        except Exception as error:
            torch.cuda.empty_cache()
            errors[variant.name] = f"{type(error).__name__}: {error}"
    times = measure(steps, rounds=rounds)
    medians = {name: phases["step"]["median_ms"] for name, phases in times.items()}
    peers = {n: ms for n, ms in medians.items() if n.startswith("torch") and "all weights" not in n}
    best = min(peers, key=peers.get)
    traced = trace(lambda: StandaloneNetwork(space, path), (batch, 3, space.resolution, space.resolution))
    floor_ms = 1e3 * step_floor(traced, machine, DTYPES[dtype]).step
    ratios = {
        name: {
            "best_peer": best,
            "of_best_peer": ms / peers[best],
            "of_eager_channels_last": ms / medians[f"torch eager channels_last {dtype}"],
            "times_the_floor": ms / floor_ms,
        }
        for name, ms in medians.items()
        if name.startswith("nasfast")
    }
    return {
        "batch": batch,
        "ceilings": machine._asdict(),
        "floor_ms": floor_ms,
        "times": times,
        "ratios": ratios,
        "errors": errors,
    }


def bench_kernels(space: SearchSpace, path: Arch, batch: int, dtype: str) -> dict:
    """Every kernel of an eager nasfast step; convolution passes with their fraction of the floor; projections."""
    step = make(Variant("nasfast", "eager", "channels_last", dtype), space, path, batch)
    kernels = kernels_of(step)
    total: dict[str, list[float]] = {}
    for name, ms in kernels:
        total.setdefault(name, []).append(ms)
    machine = measure_machine(DTYPES[dtype], device="cuda")
    traced = trace(lambda: StandaloneNetwork(space, path), (batch, 3, space.resolution, space.resolution))
    passes = passes_of(kernels, traced)
    step_ms = sum(ms for _, ms in kernels)
    projections = {name: project(passes, step_ms, machine, card, dtype) for name, card in CARDS.items()}
    some = next(iter(projections.values()))
    # a machine of one byte a second and endless arithmetic
    only_bytes, item = Machine(1.0, float("inf"), float("inf")), 2 if dtype == "bf16" else 4
    bytes_moved = [p.floor(only_bytes, item) for p in passes]
    return {
        "kernel_ms": {name: {"total": sum(all_ms), "calls": len(all_ms)} for name, all_ms in total.items()},
        "passes": [
            {
                "name": p.name, "ms": p.ms, "floor_ms": p.floor_ms, "fraction_of_floor": p.fraction,
                "GB_per_s": moved / p.ms / 1e6,
            }
            for p, moved in zip(some.passes, bytes_moved, strict=True)
        ],
        "projections_not_measured": {name: found.step_ms for name, found in projections.items()},
    }  # fmt: skip


def bench_random_paths(space: SearchSpace, batch: int, dtype: str, steps: int) -> dict:
    """Images per second with a new path every step, where a graph or compilation of a path cannot follow."""
    generator = random.Random(0)
    paths = [tuple(generator.randrange(len(layer.choices)) for layer in space.layers) for _ in range(steps)]
    images, labels = random_batch(space, batch, device="cuda")
    bf16 = dtype == "bf16"
    rates = {}
    for name, fused, graphs in (
        ("torch eager", False, False),
        ("nasfast eager", True, False),
        ("nasfast engine", True, True),
    ):
        net = Supernet(space, init="he", layer_indicators=False, fused=fused)
        net.freeze("bn")
        net.to(device="cuda", memory_format=torch.channels_last).train()
        if graphs:
            engine = GraphEngine(net, tuple(images.shape), bf16=bf16)
        else:
            engine = EagerEngine(net, bf16=bf16)
        for path in paths:  # captures, kernels, algorithms
            engine.forward_backward(images, labels, [path])
        torch.cuda.synchronize()
        start = time.perf_counter()
        for path in paths:
            engine.forward_backward(images, labels, [path])
        torch.cuda.synchronize()
        rates[name] = batch * steps / (time.perf_counter() - start)
    return {"batch": batch, "steps": steps, "images_per_s": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="stop starting parts after so long")
    parser.add_argument("--space", default="mobilenet_v2")
    parser.add_argument("--quick", action="store_true", help="small images and batches, nothing compiled")
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    space = get_space(args.space, resolution=64 if args.quick else None)
    path, batch = mean_path(space), 4 if args.quick else 32
    head = {"space": space.name, "path": list(path), "cards": {name: asdict(card) for name, card in CARDS.items()}}
    session = Session(60 * args.minutes, args.out, head)
    with measuring():
        for dtype in ("bf16", "fp32"):
            session.part(
                f"step {dtype} batch {batch}", 60,
                lambda dtype=dtype: bench_step(
                    space, path, batch, dtype, compiled=not args.quick, rounds=args.rounds
                ),
            )  # fmt: skip
        for dtype in ("bf16", "fp32"):
            session.part(f"kernels {dtype}", 10, lambda dtype=dtype: bench_kernels(space, path, batch, dtype))
        session.part(
            "random paths bf16", 40, lambda: bench_random_paths(space, batch, "bf16", 20 if args.quick else 60)
        )
        session.part(
            "memory", 10,
            lambda: {
                variant.name: memory_of(variant, space, path, batch)
                for variant in step_variants("bf16", compiled=False)
                if variant.how == "eager"
            },
        )  # fmt: skip
        for more in (128, 512):
            if not args.quick:
                session.part(
                    f"step bf16 batch {more}", 30,
                    lambda more=more: bench_step(
                        space, path, more, "bf16", compiled=False, rounds=max(3, args.rounds // 4)
                    ),
                )  # fmt: skip
    if args.out:
        write_json(args.out, session.rows)
        print(f"written: {args.out}; {provenance()['gpu']}")


if __name__ == "__main__":
    main()
