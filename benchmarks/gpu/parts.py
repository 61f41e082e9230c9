"""Measures the step: the program behind the parts of the plan, one process for each.

The step is forward, cross entropy, backward and update of the mean path of the 6^20 space with batch 32, 224 x 224
images and bf16 autocast; only BatchNorms train. On the CPU the network is tiny, and the CUDA kernels are emulated.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.captures import EagerCapture
from benchmarks.floor import measure_machine, step_floor, trace
from benchmarks.gpu.launches import noted_chains, noted_launches
from benchmarks.gpu.plan import append, processes
from benchmarks.gpu.system import clocks
from nasfast.engine import EagerEngine, GraphEngine
from nasfast.engine.capture import CudaCapture
from nasfast.measure.timing import TrainingStep, measure, measuring, random_batch, seconds_of
from nasfast.ops import use_backend
from nasfast.spaces import Arch, Block, FixedLayer, SearchSpace, Stage, get_space, mean_path
from nasfast.supernet import StandaloneNetwork, Supernet


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
        how: `eager`, `graph` (one CUDA graph of the path), `engine` (that of nasfast), or `compile graph`
            (torch.compile with max-autotune, in one CUDA graph).
        backend: of all operators of nasfast; None for its own choice, which has to run CUDA kernels.
        early: whether CUDA kernels may start early.
    """

    ops: str
    how: str
    backend: str | None = None
    early: bool = True

    @property
    def name(self) -> str:
        said = [f"{self.ops} {self.how}", *filter(None, [self.backend]), *["no early launches"] * (not self.early)]
        return ", ".join(said)

    @contextmanager
    def chosen(self, bench: Bench) -> Iterator[None]:
        """Within this context, operators run as the variant says."""
        backend = self.backend or ("cuda" if not bench.on_gpu else None)  # the emulation has to be named
        with ExitStack() as stack:
            if backend is not None and self.ops == "nasfast":
                stack.enter_context(use_backend(backend))
            if not self.early:
                stack.enter_context(patch.dict(os.environ, NASFAST_CUDA_EARLY="0"))
            yield


# so small that all steps measure the same network
_RATE = 1e-6
# variants that are known to run come first, because a faulty kernel of ours can end the whole process
PEERS = (Variant("torch", "eager"), Variant("torch", "graph"))
OURS = (Variant("nasfast", "engine"), Variant("nasfast", "engine", early=False))
ON_TRITON = Variant("nasfast", "engine", backend="triton")


def network(bench: Bench, variant: Variant) -> Supernet:
    net = Supernet(bench.space, init="he", layer_indicators=False, fused=variant.ops == "nasfast")
    net.freeze("bn")
    return net.to(device=bench.device, memory_format=torch.channels_last).train()


def engine_of(bench: Bench, variant: Variant) -> tuple[Supernet, GraphEngine | EagerEngine, torch.Tensor, torch.Tensor]:
    """A network, its engine by a variant that is `engine` or `eager`, and images and labels."""
    images, labels = random_batch(bench.space, bench.batch, device=bench.device)
    net = network(bench, variant)
    if variant.how == "eager":
        return net, EagerEngine(net, bf16=True), images, labels
    capture = None if bench.on_gpu else EagerCapture()
    return net, GraphEngine(net, tuple(images.shape), bf16=True, capture=capture), images, labels


@contextmanager
def on_cuda_kernels(bench: Bench, variant: Variant) -> Iterator[None]:
    """Within this context, operators run as the variant says.

    Raises:
        NoCudaKernel: the variant leaves the choice to nasfast, and no CUDA kernel of a chain ran.
    """
    with variant.chosen(bench), noted_chains() as chains:
        yield
    if variant.ops == "nasfast" and variant.backend is None and not chains:
        raise NoCudaKernel(f"{variant.name}: no CUDA kernel of a chain ran")


class Fixed(nn.Module):
    """A supernet with a fixed path."""

    def __init__(self, net: Supernet, path: Arch) -> None:
        super().__init__()
        self.net, self.path = net, path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x, self.path)


def _optimizer(net: nn.Module) -> torch.optim.SGD:
    trainable = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=_RATE, momentum=0.9, nesterov=True, fused=True)


class Whole:
    """Forward, loss, backward and update; a call returns seconds of `step`. `loss`: that of the first call."""

    def __init__(self, bench: Bench, variant: Variant) -> None:
        self.device = torch.device(bench.device)
        if variant.how == "engine":
            net, engine, images, labels = engine_of(bench, variant)
            update = _optimizer(net)
            self.loss = float(engine.forward_backward(images, labels, [bench.path]).loss)
            self.run = lambda: (engine.forward_backward(images, labels, [bench.path]), update.step())
            return
        images, labels = random_batch(bench.space, bench.batch, device=bench.device)
        net = network(bench, variant)
        model, path, update = net, bench.path, _optimizer(net)
        if "compile" in variant.how:
            options = {"mode": "max-autotune-no-cudagraphs"} if bench.on_gpu else {"backend": "eager"}
            model, path = torch.compile(Fixed(net, path), dynamic=False, **options), None
        step = TrainingStep(model, images, labels, path=path, bf16=True)
        self.loss = float(step.loss().detach())

        def whole() -> None:
            model.zero_grad(set_to_none=True)
            step.loss().backward()
            update.step()

        whole()
        if "graph" in variant.how:
            capturing = CudaCapture(self.device) if bench.on_gpu else EagerCapture()
            (whole,) = capturing.capture([whole], capturing.pool())
        self.run = whole

    def __call__(self) -> dict[str, float]:
        return {"step": seconds_of(self.run, self.device)}


def make(bench: Bench, variant: Variant) -> Whole:
    """Make a step that has run once, and write a row with the kernels that did.

    Raises:
        NoCudaKernel: the variant leaves the choice to nasfast, and no CUDA kernel of a chain ran.
    """
    with variant.chosen(bench), noted_chains() as chains, noted_launches() as launches:
        step = Whole(bench, variant)
    triton = Counter(launches)
    bench.row("kernels", variant=variant.name, cuda=dict(chains), triton=dict(triton), loss=step.loss)
    if variant.ops == "nasfast" and variant.backend is None and not chains:
        raise NoCudaKernel(f"{variant.name}: no CUDA kernel of a chain ran, but {dict(triton) or 'PyTorch'}")
    return step


class NoCudaKernel(SystemExit):
    """What should have run our CUDA kernels ran others: no later number would mean anything."""


def bench_variants(bench: Bench, variants: Sequence[Variant], *, rounds: int) -> None:
    """Write a row when a variant has run, and one with its interleaved time."""
    steps: dict[str, Whole] = {}
    for variant in variants:
        with bench.attempt(variant.name):
            start = time.monotonic()
            steps[variant.name] = make(bench, variant)
            bench.row("variant", name=variant.name, first_s=time.monotonic() - start, loss=steps[variant.name].loss)
    if not steps:
        return
    # the variants differ in what they launched when they were captured, or choose again
    calls = {v.name: partial(_in_context, bench, v, steps[v.name]) for v in variants if v.name in steps}
    bench.row("clocks", when=f"before {', '.join(calls)}", **clocks())
    times = measure(calls, rounds=rounds if bench.on_gpu else 1, warmup=2 if bench.on_gpu else 0)
    bench.row("clocks", when=f"behind {', '.join(calls)}", **clocks())
    for name, phases in times.items():
        bench.row("step", name=name, **phases["step"])


def _in_context(bench: Bench, variant: Variant, step: Whole) -> dict[str, float]:
    with variant.chosen(bench):
        return step()


def bench_step(bench: Bench) -> None:
    bench_variants(bench, (*PEERS, *OURS), rounds=30)
    with bench.attempt("floor"):
        machine = measure_machine(torch.bfloat16, quick=not bench.on_gpu, device=bench.device)
        bench.row("floor", ms=1e3 * step_floor(traced(bench), machine, torch.bfloat16).step)
    if bench.on_gpu:
        compile_ahead(bench, list(enumerate(bench.path)), seconds=0.4 * bench.left)
    bench_variants(bench, (ON_TRITON, OURS[0]), rounds=30)
    bench_variants(bench, (Variant("torch", "compile graph"), OURS[0]), rounds=30)


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
    return network(bench, ON_TRITON)


# ---- random paths


def random_paths(bench: Bench, count: int) -> list[Arch]:
    generator = random.Random(0)
    return [tuple(generator.randrange(len(layer.choices)) for layer in bench.space.layers) for _ in range(count)]


def bench_paths(bench: Bench) -> None:
    """Measure images per second with a new path every step, which a graph or compilation of one path cannot serve."""
    paths = random_paths(bench, 60 if bench.on_gpu else 2)
    for variant in (Variant("torch", "eager"), Variant("nasfast", "eager"), Variant("nasfast", "engine")):
        with bench.attempt(variant.name):
            with on_cuda_kernels(bench, variant):
                _, engine, images, labels = engine_of(bench, variant)
                first = _seconds_of_paths(bench, engine, paths, images, labels)  # captures, kernels, algorithms
                seconds = _seconds_of_paths(bench, engine, paths, images, labels)
            bench.row("paths", name=variant.name, first_s=first, images_per_s=bench.batch * len(paths) / seconds)


def _seconds_of_paths(bench: Bench, engine: Any, paths: list[Arch], images: Any, labels: Any) -> float:
    start = time.perf_counter()
    for path in paths:
        engine.forward_backward(images, labels, [path])
    if bench.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    from benchmarks.gpu import build, per_launch, proofs, system, tools

    parts = {
        "build": build.bench_build,
        "machine": system.bench_machine,
        "parity": proofs.bench_parity,
        "bits": proofs.bench_bits,
        "launches": per_launch.bench_launches,
        "step": bench_step,
        "sanitizer": tools.bench_sanitizer,
        "ncu": tools.bench_ncu,
        "paths": bench_paths,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=parts)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    bench = Bench(args.part, args.rows, args.device, time.monotonic() + args.seconds)
    if args.part == "build":
        parts["build"](bench)
        return
    with measuring():
        parts[args.part](bench)


if __name__ == "__main__":
    main()
