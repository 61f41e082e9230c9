"""A training step against PyTorch: a supernet's mean path, or a model after `nasfast.fuse`. Only BatchNorms train.

    python -m benchmarks.bench_steps [--quick] [--work NAME ...] [--scaling] [--out FILE]

Peers are networks of plain modules: eager and torch.compile, contiguous and channels_last, fp32 and bf16 autocast.
--scaling measures nasfast and the best eager peers by batch size and by number of threads instead.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from torch import nn

import nasfast
from benchmarks.harness import positive, write_json
from benchmarks.steps import VARIANTS, Variant, Workload, bench, make_step, show, train_batch_norms
from nasfast.measure.timing import measure
from nasfast.spaces import Arch, SearchSpace, get_space, mean_path
from nasfast.supernet import StandaloneNetwork, Supernet, inherit

FUSED = "torchvision mobilenet_v2"
# batch, resolution
SIZES = {"mobilenet_v2": (32, 224), "nas_bench_macro": (128, 32), "shufflenet_v2": (32, 224), FUSED: (32, 224)}
QUICK_SIZES = {"mobilenet_v2": (4, 64), "nas_bench_macro": (8, 32), "shufflenet_v2": (4, 64), FUSED: (4, 64)}
ROUNDS, QUICK_ROUNDS, SCALING_ROUNDS = 9, 3, 3
BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4)
# compilation takes minutes for any size
QUICK = [name for name, variant in VARIANTS.items() if variant.engine != "compile"]
# the compiler chooses its own layouts, so one of the two fp32 graphs is enough
FULL = [name for name in VARIANTS if name != "compile contiguous fp32"]
SCALED = [name for name in QUICK if name != "eager contiguous fp32"]


@dataclass(frozen=True)
class SupernetWorkload(Workload):
    """One path of a space."""

    name: str
    batch: int
    resolution: int
    path: Arch

    @property
    def space(self) -> SearchSpace:
        return get_space(self.name, resolution=self.resolution)

    @property
    def num_classes(self) -> int:
        return self.space.num_classes

    def ours(self) -> tuple[nn.Module, Arch]:
        # without layer indicators, a path does the same work as its standalone network
        net = Supernet(self.space, init="he", layer_indicators=False)
        net.freeze("bn")
        return net.train(), self.path

    def plain(self) -> nn.Module:
        return train_batch_norms(inherit(self.ours()[0], self.path))

    def skeleton(self) -> nn.Module:
        return StandaloneNetwork(self.space, self.path)


@dataclass(frozen=True)
class FuseWorkload(Workload):
    """torchvision's mobilenet_v2, fused or unchanged."""

    batch: int
    resolution: int
    name: str = FUSED
    num_classes: int = 1000

    def ours(self) -> tuple[nn.Module, None]:
        network = self.plain()
        nasfast.fuse(network)
        return network, None

    def plain(self) -> nn.Module:
        torch.manual_seed(0)
        # dropout would change the loss from step to step
        return train_batch_norms(torchvision.models.mobilenet_v2(dropout=0.0))

    def skeleton(self) -> nn.Module:
        return torchvision.models.mobilenet_v2()


def make_workload(name: str, batch: int, resolution: int) -> Workload:
    """The work of one of SIZES."""
    if name == FUSED:
        return FuseWorkload(batch, resolution)
    return SupernetWorkload(name, batch, resolution, mean_path(get_space(name)))


def scaling(workload: Workload, variants: list[Variant], batches: tuple[int, ...], threads: int) -> list[dict]:
    """Measure median step times by batch size, and by number of threads at the workload's own batch size."""
    sizes = [(batch, threads) for batch in batches] + [(workload.batch, n) for n in range(1, threads)]
    rows = []
    print(f"\n{workload.name} {workload.resolution} x {workload.resolution}: step ms (ms per image)")
    print(f"{'batch':>6} {'threads':>7} " + " ".join(f"{variant.name:>28}" for variant in variants))
    for batch, count in sizes:
        torch.set_num_threads(count)
        sized = make_workload(workload.name, batch, workload.resolution)
        times = measure({v.name: make_step(sized, v) for v in variants}, rounds=SCALING_ROUNDS, warmup=1)
        medians = [times[variant.name]["step"]["median_ms"] for variant in variants]
        cells = " ".join(f"{ms:17.1f} ({ms / batch:8.2f})" for ms in medians)
        print(f"{batch:6} {count:7} {cells}", flush=True)
        rows.append({"workload": workload.name, "batch": batch, "threads": count, "times": times})
    torch.set_num_threads(threads)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small images and batches, few rounds, nothing compiled")
    parser.add_argument(
        "--work", nargs="+", choices=SIZES, default=list(SIZES), metavar="NAME", help=f"some of {', '.join(SIZES)}"
    )
    parser.add_argument("--batch", type=positive, help="images per step")
    parser.add_argument("--resolution", type=positive, help="side of the images in pixels")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument(
        "--rounds", type=positive, help=f"timed rounds, default {ROUNDS}, or {QUICK_ROUNDS} with --quick"
    )
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help=f"some of {', '.join(VARIANTS)}")
    parser.add_argument("--scaling", action="store_true", help="measure by batch size and threads instead")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)

    rows = []
    for name in args.work:
        batch, resolution = (QUICK_SIZES if args.quick else SIZES)[name]
        workload = make_workload(name, args.batch or batch, args.resolution or resolution)
        if args.scaling:
            variants = [VARIANTS[v] for v in args.only or SCALED]
            rows += scaling(workload, variants, QUICK_BATCHES if args.quick else BATCHES, args.threads)
        else:
            variants = [VARIANTS[v] for v in args.only or (QUICK if args.quick else FULL)]
            rows.append(bench(workload, variants, rounds=rounds, threads=args.threads, quick=args.quick))
            show(rows[-1])
        if args.out:  # written after every work, because each takes minutes
            write_json(args.out, rows)


if __name__ == "__main__":
    main()
