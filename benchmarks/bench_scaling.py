"""Weak scaling of training steps over gloo ranks on this machine, and the cost of a checkpoint to the loop.

    python -m benchmarks.bench_scaling [--ranks 2] [--threads 1] [--batch 32] [--steps 4] [--rounds 5] [--out FILE]

Efficiency is the images per second of N ranks with N times the batch, divided by N times those of one process. A third
variant shows the limit of the machine: N processes that exchange nothing, but share its memory, caches and clock. Each
round forks the three variants one after another; every process has `--threads` threads and takes the same paths.
`supernet` is a step along sampled paths with one flat all-reduce, `network` a step of a plain network under
DistributedDataParallel. Checkpoints hold the whole supernet; `in the loop` saves them without a thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import positive, write_json
from nasfast.engine import EagerEngine
from nasfast.measure.timing import summarise
from nasfast.runtime.distributed import SINGLE, World, start
from nasfast.spaces import FairSampler, SearchSpace, get_space, mean_path
from nasfast.supernet import Supernet, build
from nasfast.train import TrainConfig
from nasfast.train.checkpoint import Checkpoint, CheckpointFolder, CheckpointWriter
from nasfast.train.exchange import FlatExchange, OverlappedExchange
from nasfast.train.loop import make_optimizer
from nasfast.train.state import Progress, TrainState

_WARMUP = 2
KINDS = ("supernet", "network")
VARIANTS = ("one process", "ranks", "processes without exchange")


def _stepper(kind: str, space: SearchSpace, batch: int, world: World) -> tuple[Callable[[], None], Any]:
    """Make a function for one training step; returns it and the model."""
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(batch, space.in_channels, space.resolution, space.resolution, generator=generator)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(space.num_classes, (batch,), generator=generator)
    # the values of the weights do not matter, and Gaussian ones are the fastest to make
    model = Supernet(space, init="gaussian") if kind == "supernet" else build(space, mean_path(space), init="gaussian")
    model.to(memory_format=torch.channels_last).train()
    optimizer = make_optimizer(model, TrainConfig(lr=0.01))
    overlapped = kind == "network" and world.size > 1
    exchange = OverlappedExchange(model, world) if overlapped else FlatExchange(model, world)
    engine, sampler = EagerEngine(exchange.module), FairSampler(space)

    def step() -> None:
        paths = sampler.step() if kind == "supernet" else None
        exchange.step(x, lambda: engine.forward_backward(x, y, paths), stop=False)
        optimizer.step()

    return step, model


def _train(kind: str, space: SearchSpace, args: argparse.Namespace, world: World) -> float:
    """Images per second of this process."""
    step, _ = _stepper(kind, space, args.batch, world)
    for _ in range(_WARMUP):
        step()
    world.add(torch.zeros(1))  # all ranks start together
    begin = time.perf_counter()
    for _ in range(args.steps):
        step()
    return args.steps * args.batch / (time.perf_counter() - begin)


def _processes(count: int, joined: bool, work: Callable[[World], float]) -> list[float]:
    """Run `work` in `count` forked processes at once, as ranks of one world if `joined`; returns their results."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for rank in range(count):
        reader, writer = os.pipe()
        if os.fork() == 0:
            if joined:
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), **address}
            try:
                with start("cpu") as world:
                    os.write(writer, json.dumps(work(world)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        children.append(reader)
    results = []
    for reader in children:
        with open(reader) as file:
            results.append(json.loads(file.read()))
        os.wait()
    return results


def scaling(kind: str, space: SearchSpace, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one row: images per second of the three interleaved variants, and their ratios."""
    rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(args.rounds):
        for variant in VARIANTS:
            count = 1 if variant == "one process" else args.ranks
            found = _processes(count, variant == "ranks", lambda world: _train(kind, space, args, world))
            rates[variant].append(sum(found))
    one, ranks, others = (rates[variant] for variant in VARIANTS)

    def ratio(above: list[float], below: list[float], times: int) -> float:
        """Median ratio over the rounds; within a round the variants ran one right after another."""
        return statistics.median(a / (times * b) for a, b in zip(above, below, strict=True))

    spread = {v: {"median": statistics.median(r), "least": min(r), "most": max(r)} for v, r in rates.items()}
    return {
        "what": kind,
        "space": space.name,
        "resolution": space.resolution,
        "batch_per_rank": args.batch,
        "ranks": args.ranks,
        "threads_per_rank": args.threads,
        "steps": args.steps,
        "rounds": args.rounds,
        "images_per_s": spread,
        "weak_scaling_efficiency": ratio(ranks, one, args.ranks),
        "efficiency_without_exchange": ratio(others, one, args.ranks),
        "share_lost_to_exchange": 1 - ratio(ranks, others, 1),
    }


class _SignallingFolder(CheckpointFolder):
    """A folder of checkpoints that sets an event when it has saved one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "supernet")
        self.saved = threading.Event()

    def save(self, step: int, checkpoint: Checkpoint, *, best: bool = False) -> None:
        super().save(step, checkpoint, best=best)
        self.saved.set()


def checkpoints(space: SearchSpace, args: argparse.Namespace, trainable: str) -> dict[str, Any]:
    """Measure one row: how long a checkpoint stops the loop, and how long steps take while it is written."""
    torch.set_num_threads(args.threads)
    step, model = _stepper("supernet", space, args.batch, SINGLE)
    model.freeze(trainable)
    optimizer = make_optimizer(model, TrainConfig(lr=0.01))
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    state = TrainState(model, optimizer, FairSampler(space), fingerprint="", settings={}, loader_kind=None)
    folder = _SignallingFolder(Path(tempfile.mkdtemp(dir=args.folder)))
    times: dict[str, list[float]] = {
        n: [] for n in ("in the loop", "with a thread", "write", "step", "step in a write")
    }

    def timed(name: str, call: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        call()
        times[name].append(time.perf_counter() - begin)

    try:
        step()
        for number in range(args.rounds):
            timed("in the loop", lambda: folder.save(number, state.capture(Progress(number))))  # noqa: B023
            with CheckpointWriter(folder) as writer:
                timed("step", step)
                folder.saved.clear()
                begin = time.perf_counter()
                timed("with a thread", lambda: writer.save(number, state.capture(Progress(number))))  # noqa: B023
                while not folder.saved.is_set():
                    timed("step in a write", step)
                times["write"].append(time.perf_counter() - begin)
        size = folder.paths()[-1].stat().st_size
    finally:
        shutil.rmtree(folder.folder)
    names = {"what": "checkpoint", "space": space.name, "trainable": trainable, "bytes": size, "threads": args.threads}
    return names | {name: summarise(values, "s") for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--space", default="mobilenet_v2", help="a search space of this package")
    parser.add_argument("--resolution", type=positive, help="side of the images in pixels; default: that of the space")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--threads", type=positive, default=1, help="threads of every process")
    parser.add_argument("--batch", type=positive, default=32, help="images per rank")
    parser.add_argument("--steps", type=positive, default=4, help="timed steps per process and round")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--folder", type=Path, help="folder for checkpoints, which are deleted; default: temporary")
    parser.add_argument("--only", choices=(*KINDS, "checkpoint"), help="measure only this part")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    space = get_space(args.space, resolution=args.resolution)
    rows = [scaling(kind, space, args) for kind in KINDS if args.only in (None, kind)]
    if args.only in (None, "checkpoint"):
        rows += [checkpoints(space, args, trainable) for trainable in ("indicators", "all")]
    print(json.dumps(rows, indent=1))
    if args.out:
        write_json(args.out, rows)


if __name__ == "__main__":
    main()
