"""Measures the step and its kernels: the program behind most parts of the plan, one process for each.

The step is forward, cross entropy and backward of the mean path of the 6^20 space with batch 32, 224 x 224 images and
bf16 autocast; only BatchNorms train. On the CPU the network is tiny, and Triton's kernels run under its interpreter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.captures import EagerCapture
from benchmarks.gpu.launches import noted_launches
from benchmarks.gpu.passes import kernels_of, passes_of
from benchmarks.gpu.plan import append, processes
from nasfast.engine import EagerEngine, GraphEngine
from nasfast.measure.floor import Machine, measure_machine, step_floor, trace
from nasfast.measure.timing import EngineStep, GraphedStep, TrainingStep, measure, measuring, random_batch
from nasfast.spaces import Arch, Block, FixedLayer, SearchSpace, Stage, get_space, mean_path
from nasfast.supernet import StandaloneNetwork, Supernet

Step = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Bench:
    """The settings of a part: where it measures, where it writes its rows, and when it must end.

    Attributes:
        part: name of the part.
        rows: file of JSON lines.
        device: `cuda` or `cpu`.
        end: time limit of the part, by time.monotonic().
    """

    part: str
    rows: Path
    device: str
    end: float

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def batch(self) -> int:
        return 32 if self.on_gpu else 1

    @cached_property
    def space(self) -> SearchSpace:
        if self.on_gpu:
            return get_space("mobilenet_v2")
        choices = (Block("mbconv", 3, 1), Block("mbconv", 3, 2))
        return SearchSpace(
            name="dry",
            resolution=8,
            num_classes=4,
            stem=(FixedLayer(Block("conv", 3), 8, stride=2),),
            stages=(Stage(8, 2, 1, choices),),
            head=(FixedLayer(Block("conv", 1), 16),),
        )

    @cached_property
    def path(self) -> Arch:
        return mean_path(self.space)

    def row(self, kind: str, **fields: Any) -> None:
        """Append a result to the file of rows, and print it."""
        row = {"part": self.part, "kind": kind, **fields}
        print(row, flush=True)
        append(self.rows, row)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Write an error within this context as a row, and continue."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            last = traceback.format_exception_only(error)[-1].strip()
            where = traceback.format_tb(error.__traceback__)[-3:]
            self.row("error", what=what, error=last[:2000], tail="".join(where).splitlines())


@dataclass(frozen=True)
class Variant:
    """A way to run the step.

    Attributes:
        ops: `nasfast` or `torch`.
        how: `eager`, `graph` (one CUDA graph of this path), `engine` (that of nasfast), `compile` or `compile graph`.
        trainable: `bn` for all BatchNorms, `indicators` for the last one of each block.
    """

    ops: str
    how: str
    trainable: str = "bn"

    @property
    def name(self) -> str:
        return f"{self.ops} {self.how}" + (f", {self.trainable}" if self.trainable != "bn" else "")


# variants that are known to run come first, because a faulty kernel of ours can end the whole process
PEERS = (Variant("torch", "eager"), Variant("torch", "graph"))
STEPS = (*PEERS, Variant("nasfast", "eager"), Variant("nasfast", "engine"))
MORE_STEPS = (Variant("torch", "graph", "indicators"), Variant("nasfast", "engine", "indicators"))


def network(bench: Bench, variant: Variant) -> Supernet:
    net = Supernet(bench.space, init="he", layer_indicators=False, fused=variant.ops == "nasfast")
    net.freeze(variant.trainable)
    return net.to(device=bench.device, memory_format=torch.channels_last).train()


class Fixed(nn.Module):
    """A supernet with a fixed path."""

    def __init__(self, net: Supernet, path: Arch) -> None:
        super().__init__()
        self.net, self.path = net, path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x, self.path)


def make(bench: Bench, variant: Variant) -> tuple[Step, float]:
    """Make a step that has run once; returns it and its loss."""
    images, labels = random_batch(bench.space, bench.batch, device=bench.device)
    net, capture = network(bench, variant), None if bench.on_gpu else EagerCapture()
    if variant.how == "engine":
        engine = GraphEngine(net, tuple(images.shape), bf16=True, capture=capture)
        loss = engine.forward_backward(images, labels, [bench.path]).loss
        return EngineStep(engine, images, labels, bench.path), float(loss)
    model, path = net, bench.path
    if "compile" in variant.how:
        backend = "inductor" if bench.on_gpu else "aot_eager"
        model, path = torch.compile(Fixed(net, path), dynamic=False, backend=backend), None
    step = TrainingStep(model, images, labels, path=path, bf16=True)
    loss = step.loss()
    loss.backward()
    return (GraphedStep(step, capture) if "graph" in variant.how else step), float(loss.detach())


def bench_variants(bench: Bench, variants: Sequence[Variant], *, rounds: int) -> dict[str, float]:
    """Write a row when a variant has run, and one with its interleaved time; returns the medians in ms."""
    steps: dict[str, Step] = {}
    for variant in variants:
        with bench.attempt(variant.name):
            start = time.monotonic()
            step, loss = make(bench, variant)
            first = time.monotonic() - start
            if bench.on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            alone = statistics.median(step()["step"] for _ in range(5 if bench.on_gpu else 1))
            # only here: a graph allocates its memory when it is captured
            counts = bench.on_gpu and variant.how in ("eager", "compile")
            peak = {"peak_MiB": (torch.cuda.max_memory_allocated() - before) / 2**20} if counts else {}
            bench.row("variant", name=variant.name, first_s=first, alone_ms=1e3 * alone, loss=loss, **peak)
            steps[variant.name] = step
    times = measure(steps, rounds=rounds if bench.on_gpu else 1, warmup=2 if bench.on_gpu else 0) if steps else {}
    for name, phases in times.items():
        bench.row("step", name=name, **phases["step"])
    return {name: phases["step"]["median_ms"] for name, phases in times.items()}


def bench_step(bench: Bench) -> None:
    bench_variants(bench, PEERS, rounds=5)
    compile_ahead(bench, list(enumerate(bench.path)), seconds=0.4 * bench.left)
    medians = bench_variants(bench, STEPS, rounds=20)
    with bench.attempt("floor"):
        machine = measure_machine(torch.bfloat16, quick=not bench.on_gpu, device=bench.device)
        floor = 1e3 * step_floor(traced(bench), machine, torch.bfloat16).step
        bench.row("floor", ms=floor, ceilings=machine._asdict(), times={n: ms / floor for n, ms in medians.items()})
    if bench.left > 25:
        # only one of them under the interpreter, where a step takes seconds
        bench_variants(bench, MORE_STEPS if bench.on_gpu else MORE_STEPS[:1], rounds=10)
    else:
        bench.row("left_out", what="indicators", error=f"{bench.left:.0f} s left")


def traced(bench: Bench) -> Any:
    space = bench.space
    shape = (bench.batch, space.in_channels, space.resolution, space.resolution)
    return trace(lambda: StandaloneNetwork(space, bench.path), shape)


# ---- compilation in parallel


def compile_ahead(bench: Bench, layers: Sequence[tuple[int, int]], *, seconds: float) -> None:
    """Run layers in parallel processes, to fill Triton's cache with their kernels.

    Args:
        layers: index and choice of each layer.
        seconds: time limit; layers that are not finished by then are left out.
    """
    tasks = [(bench, i, choice) for i, choice in [(-1, 0), (len(bench.space.layers), 0), *layers]]
    workers = min(processes(), len(tasks)) if bench.on_gpu else 1
    start, failed, done = time.monotonic(), 0, 0
    # the context manager ends the processes by force, so none of them can hang the part
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.imap_unordered(_run_layer, tasks)
        try:
            for _ in tasks:
                layer, choice, problem = results.next(max(0.0, start + seconds - time.monotonic()))
                done += 1
                if problem is not None:
                    failed += 1
                    bench.row("error", what=f"layer {layer}, choice {choice}", error=problem)
        except multiprocessing.TimeoutError:
            bench.row("left_out", what="compilation", error=f"{len(tasks) - done} layers after {seconds:.0f} s")
    bench.row(
        "compiled", seconds=time.monotonic() - start, processes=workers, layers=done, failed=failed, of=len(tasks)
    )


def _run_layer(task: tuple[Bench, int, int]) -> tuple[int, int, str | None]:
    """Run forward and backward of one layer; index -1 is the stem, and the index after the last layer is the head."""
    bench, i, choice = task
    if bench.on_gpu:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return i, choice, f"not run, because an earlier layer lost the CUDA context of this process: {error}"[:1000]
    try:
        net = _network_of_process(bench)
        space = bench.space
        modules = [net.stem, *(lambda x, layer=layer: layer(x, choice) for layer in net.layers), net.head]
        first = [space.stem_layers[0], *space.layers, space.head_layers[0]][i + 1]
        x = torch.randn(bench.batch, first.in_channels, first.size, first.size, device=bench.device)
        x = x.contiguous(memory_format=torch.channels_last)
        if i >= 0:
            x = x.to(torch.bfloat16).requires_grad_()
        with torch.autocast(bench.device, torch.bfloat16):
            y = modules[i + 1](x)
        y.backward(torch.randn_like(y))
        if bench.on_gpu:
            torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        return i, choice, traceback.format_exception_only(error)[-1].strip()[:1000]
    return i, choice, None


@cache
def _network_of_process(bench: Bench) -> Supernet:
    torch.set_num_threads(1)
    return network(bench, Variant("nasfast", "eager"))


# ---- kernels


def bench_kernels(bench: Bench) -> None:
    """Write the launches and total us of every kernel: for nasfast's eager step by grid and arguments, and for the
    engine's replays and PyTorch's eager step by name alone."""
    with bench.attempt("nasfast eager"):
        step, _ = make(bench, Variant("nasfast", "eager"))
        with noted_launches() as launches:
            kernels = _kernels(bench, step, launches)
        # kernels_of runs the step twice and returns the kernels of the second run
        _write_kernels(bench, "nasfast eager", kernels, launches[len(launches) // 2 :] if bench.on_gpu else launches)
        with bench.attempt("projections"):
            _write_passes(bench, kernels)
    for variant in (Variant("nasfast", "engine"), Variant("torch", "eager")):
        with bench.attempt(variant.name):
            step, _ = make(bench, variant)
            with noted_launches() as launches:
                kernels = _kernels(bench, step, launches)
            _write_kernels(bench, variant.name, kernels, [])


def _kernels(bench: Bench, step: Step, launches: list) -> list[tuple[str, float]]:
    """Name and ms of every kernel that ran, in order; without a GPU these are the interpreted kernels."""
    if bench.on_gpu:
        return kernels_of(step, torch.device(bench.device))
    step()
    return [(launch.kernel, launch.ms) for launch in launches]


def _write_kernels(bench: Bench, variant: str, kernels: list[tuple[str, float]], launches: list) -> None:
    by_name: dict[str, list] = {}
    for launch in launches:
        by_name.setdefault(launch.kernel, []).append(launch)
    counts = {name: sum(kernel == name for kernel, _ in kernels) for name in by_name}
    # both lists are in stream order; if their lengths differ, launches and kernels cannot be matched
    queues = {name: iter(found) for name, found in by_name.items() if len(found) == counts[name]}
    groups: dict[tuple, list[float]] = {}
    for name, ms in kernels:
        launch = next(queues[name]) if name in queues else None
        key = (name, *((launch.grid, launch.arguments) if launch else ((), ())))
        groups.setdefault(key, []).append(1e3 * ms)
    for (name, grid, arguments), us in sorted(groups.items(), key=lambda group: -sum(group[1])):
        bench.row(
            "kernel",
            variant=variant,
            kernel=name,
            grid=grid,
            arguments=dict(arguments),
            launches=len(us),
            us=sum(us),
            min_us=min(us),
            max_us=max(us),
        )
    if unmatched := sorted(name for name in by_name if name not in queues):
        bench.row("left_out", what="arguments of kernels", error=f"other numbers of launches: {', '.join(unmatched)}")


def _write_passes(bench: Bench, kernels: list[tuple[str, float]]) -> None:
    """Write the passes of convolutions with their fraction of the floor."""
    machine = measure_machine(torch.bfloat16, quick=not bench.on_gpu, device=bench.device)
    # on this machine the floor in seconds is the number of bytes
    only_bytes = Machine(1.0, float("inf"), float("inf"))
    for found in passes_of(kernels, traced(bench)):
        floor_ms = 1e3 * found.floor(machine, 2)
        bench.row(
            "pass",
            name=found.name,
            ms=found.ms,
            floor_ms=floor_ms,
            # a pass can be faster than its floor, which assumes no cache
            fraction=min(1.0, floor_ms / found.ms),
            GB_per_s=found.floor(only_bytes, 2) / found.ms / 1e6,
        )


# ---- random paths and torch.compile


def bench_paths(bench: Bench) -> None:
    """Measure images per second with a new path every step, which a graph or compilation of one path cannot serve."""
    generator = random.Random(0)
    count = 60 if bench.on_gpu else 2
    paths = [tuple(generator.randrange(len(layer.choices)) for layer in bench.space.layers) for _ in range(count)]
    images, labels = random_batch(bench.space, bench.batch, device=bench.device)
    for ops, how in (("torch", "eager"), ("nasfast", "eager"), ("nasfast", "engine")):
        if (ops, how) == ("nasfast", "eager"):
            used = sorted({(i, choice) for path in paths for i, choice in enumerate(path)})
            compile_ahead(bench, used, seconds=0.6 * bench.left)
        with bench.attempt(f"{ops} {how}"):
            net = network(bench, Variant(ops, how))
            if how == "engine":
                capture = None if bench.on_gpu else EagerCapture()
                engine = GraphEngine(net, tuple(images.shape), bf16=True, capture=capture)
            else:
                engine = EagerEngine(net, bf16=True)
            first = _seconds_of_paths(bench, engine, paths, images, labels)  # captures, kernels, algorithms
            seconds = _seconds_of_paths(bench, engine, paths, images, labels)
            bench.row("paths", name=f"{ops} {how}", first_s=first, images_per_s=bench.batch * count / seconds)


def _seconds_of_paths(bench: Bench, engine: Any, paths: list[Arch], images: Any, labels: Any) -> float:
    start = time.perf_counter()
    for path in paths:
        engine.forward_backward(images, labels, [path])
    if bench.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def bench_compile(bench: Bench) -> None:
    bench_variants(bench, [Variant("torch", "compile"), Variant("nasfast", "engine")], rounds=20)
    if bench.left > 20 or not bench.on_gpu:
        torch.compiler.reset()
        bench_variants(bench, [Variant("torch", "compile graph"), Variant("nasfast", "engine")], rounds=20)
    else:
        bench.row("left_out", what="compile graph", error=f"{bench.left:.0f} s left")


def main() -> None:
    from benchmarks.gpu import system

    parts = {"step": bench_step, "kernels": bench_kernels, "paths": bench_paths, "compile": bench_compile}
    of_the_system = {
        "machine": system.bench_machine,
        "native": system.bench_native,
        "orthogonalize": system.bench_orthogonalize,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[*parts, *of_the_system])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    if args.device == "cpu" and args.part in parts:
        os.environ["NASFAST_BACKEND"] = "triton"  # interpreted kernels run only for an explicit backend
    # the part `native` starts this program with the extension that it built
    part = "native" if args.part == "orthogonalize" else args.part
    bench = Bench(part, args.rows, args.device, time.monotonic() + args.seconds)
    with measuring():
        {**parts, **of_the_system}[args.part](bench)


if __name__ == "__main__":
    main()
