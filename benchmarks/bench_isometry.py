"""What the isometry of untrained blocks says about trained accuracies.

NAS-Bench-Macro chose its weight; two more spaces, in which nothing was chosen, judge it.

These get trained networks of their own, drawn uniformly from all architectures:

    python -m benchmarks.bench_isometry train --images cifar10 --out trained.jsonl

One line per training is appended as soon as it is finished, and a line that is there is not trained again.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nasfast.data import DataConfig, make_loader, make_loaders, random_subset
from nasfast.retrain import RetrainConfig, retrain
from nasfast.spaces import Arch, Block, FixedLayer, SearchSpace, Stage, digits_macro, format_arch
from nasfast.train import TrainConfig

WEIGHT = 0.2
"""The weight of the table beside `sqrt_size`, and of its structural rival; fixed before any other space was trained."""

COUNT = 48
"""Trained architectures of each new space."""

IMAGES = 4800
"""Training images of each network, of those that there are."""


def small_deep() -> SearchSpace:
    """4^9 architectures for CIFAR-10 at 16 x 16: other widths, depths, strides, kernels and expansions than above.

    The first stage changes the width and keeps the resolution.
    """
    choices = (Block("identity"), *(Block("mbconv", kernel=k, expand=e) for k, e in ((3, 2), (3, 4), (5, 4))))
    return SearchSpace(
        name="small_deep",
        resolution=16,
        num_classes=10,
        stem=(FixedLayer(Block("conv", kernel=3), 12),),
        stages=tuple(Stage(c, n, s, choices) for c, n, s in ((16, 2, 1), (28, 4, 2), (48, 3, 2))),
        head=(FixedLayer(Block("conv", kernel=1), 200),),
        activation="relu",
    )


def new_spaces(images: Path | None) -> dict[str, tuple[SearchSpace, DataConfig, RetrainConfig]]:
    """Name -> the space, its images and the training of its networks.

    Args:
        images: folder with the folders `train` and `test` of CIFAR-10; None for callers that train nothing.
    """
    folders = {
        part: None if images is None else str(images / name) for part, name in (("train", "train"), ("val", "test"))
    }
    cifar = DataConfig(source="folder", **folders, batch_size=64, augment="cifar", loader="cache", workers=0)
    digits = DataConfig(source="cluttered_digits", batch_size=64, workers=0)
    recipe = RetrainConfig(train=TrainConfig(epochs=8, lr=0.1, warmup_epochs=0.5, eval_every=8))
    return {
        "digits_macro": (digits_macro(), digits, recipe),
        "small_deep": (small_deep(), cifar, recipe.replace(train=recipe.train.replace(epochs=3, eval_every=3))),
    }


def sampled(space: SearchSpace, count: int = COUNT) -> list[Arch]:
    """Distinct architectures, uniform over the space."""
    rng, found = random.Random(0), dict[Arch, None]()
    while len(found) < count:
        found[tuple(rng.choice(options) for options in space.options)] = None
    return list(found)


def train(args: argparse.Namespace) -> None:
    """Train every sampled architecture once, and the first ones with more seeds, which shows the noise."""
    torch.set_num_threads(1)
    done = {(row["space"], row["arch"], row["seed"]) for row in read_lines(args.out)}
    spaces = new_spaces(args.images)
    loaders = {}
    for name, (space, data, _) in spaces.items():
        full, held = make_loaders(data, resolution=space.resolution, seed=0)
        part = random_subset(full.source, IMAGES, 0)
        loaders[name] = make_loader(data, part, train=True, resolution=space.resolution), held
    # the spaces take turns, so that a stopped program has networks of both
    for seed, place, name in (
        (s, i, name) for s, count in enumerate(args.counts) for i in range(count) for name in spaces
    ):
        space, _, recipe = spaces[name]
        arch = sampled(space)[place]
        if (name, format_arch(arch), seed) in done:
            continue
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            result = retrain(space, arch, *loaders[name], recipe, run_dir=folder, seed=seed)
        row = {"space": name, "arch": format_arch(arch), "seed": seed, "top1": result.top1,
               "images": result.images, "cpu_s": round(time.process_time() - start, 1)}  # fmt: skip
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    training = parts.add_parser("train", help="train networks of the two new spaces")
    training.add_argument("--images", type=Path, required=True, help="folder of CIFAR-10's `train` and `test`")
    training.add_argument("--out", type=Path, required=True, help="JSON-lines file to which trainings are appended")
    training.add_argument("--counts", type=int, nargs="+", default=[COUNT, 12, 12], help="architectures of each seed")
    training.set_defaults(run=train)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
