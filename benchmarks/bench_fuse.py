"""A training step of torchvision's mobilenet_v2 after `nasfast.fuse` against PyTorch; reports on five models.

    python -m benchmarks.bench_fuse [--quick] [--out FILE]

Convolutions and classifier are frozen, all BatchNorms train.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torchvision
from torch import nn

import nasfast
from benchmarks.harness import positive, write_json
from benchmarks.steps import VARIANTS, Workload, bench, show, train_batch_norms

BATCH, RESOLUTION, ROUNDS = 32, 224, 9
QUICK_BATCH, QUICK_RESOLUTION, QUICK_ROUNDS = 4, 64, 3
# compilation takes minutes for any size, and the compiler chooses its own layouts
QUICK = [name for name, variant in VARIANTS.items() if variant.engine != "compile"]
FULL = [name for name in VARIANTS if name != "compile contiguous fp32"]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision mobilenet_v2": torchvision.models.mobilenet_v2,
    "torchvision shufflenet_v2_x1_0": torchvision.models.shufflenet_v2_x1_0,
    "torchvision mnasnet1_0": torchvision.models.mnasnet1_0,
    "torchvision resnet50": torchvision.models.resnet50,
    "timm efficientnet_lite0": lambda: timm.create_model("efficientnet_lite0", pretrained=False),
}


@dataclass(frozen=True)
class FuseWorkload(Workload):
    """torchvision's mobilenet_v2, fused or unchanged."""

    batch: int
    resolution: int
    name: str = "torchvision mobilenet_v2"
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


def reports() -> dict[str, str]:
    """The reports of `nasfast.fuse` on MODELS, with frozen convolutions and trainable BatchNorms."""
    return {name: str(nasfast.fuse(train_batch_norms(make()))) for name, make in MODELS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small images and batches, few rounds, nothing compiled")
    parser.add_argument("--batch", type=positive, help="images per step")
    parser.add_argument("--resolution", type=positive, help="side of the images in pixels")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument(
        "--rounds", type=positive, help=f"timed rounds, default {ROUNDS}, or {QUICK_ROUNDS} with --quick"
    )
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help=f"some of {', '.join(VARIANTS)}")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batch, resolution, rounds = (
        (QUICK_BATCH, QUICK_RESOLUTION, QUICK_ROUNDS) if args.quick else (BATCH, RESOLUTION, ROUNDS)
    )
    workload = FuseWorkload(args.batch or batch, args.resolution or resolution)
    variants = [VARIANTS[name] for name in args.only or (QUICK if args.quick else FULL)]
    row = bench(workload, variants, rounds=args.rounds or rounds, threads=args.threads, quick=args.quick)
    show(row)
    found = reports()
    for name, report in found.items():
        print(f"\n{name}\n{report}")
    if args.out:
        write_json(args.out, [row, {"reports": found}])


if __name__ == "__main__":
    main()
