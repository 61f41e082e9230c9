"""Whether the isometry of untrained blocks ranks architectures in spaces in which nothing was chosen.

NAS-Bench-Macro chose its weight; two more spaces judge it. They get trained networks of their own, drawn uniformly from
all architectures:

    python -m benchmarks.bench_isometry train --images cifar10 --trained trained.jsonl
    python -m benchmarks.bench_isometry carry --trained trained.jsonl

`train` appends one line per training as soon as it is finished, and does not train a line again that is there. `carry`
compares `sqrt_size` with isometry and formulas of structure beside it, and writes its part of the result file.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import json_lines
from benchmarks.harness import RESULTS, provenance
from nasfast.data import DataConfig, make_loader, make_loaders, random_subset
from nasfast.indicators.distill import z_sum
from nasfast.indicators.isometry import (
    candidate_maps,
    largest_singular_value,
    mean_channel_jacobian,
    random_signs,
)
from nasfast.indicators.rank import kendall_tau, merge_rounding
from nasfast.indicators.structure import structure_table
from nasfast.indicators.table import IndicatorTable
from nasfast.retrain import RetrainConfig, retrain
from nasfast.runtime.files import write_atomic
from nasfast.spaces import (
    Arch,
    Block,
    FixedLayer,
    SearchSpace,
    Stage,
    digits_macro,
    format_arch,
)
from nasfast.train import TrainConfig

OUT, TRAINED = RESULTS / "isometry.json", RESULTS / "isometry_trained.jsonl"

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
        "small_deep": (small_deep(), cifar, recipe.replace(train=recipe.train.replace(epochs=12, eval_every=12))),
    }


def sample(space: SearchSpace, count: int = COUNT) -> list[Arch]:
    """Distinct architectures, uniform over the space."""
    rng, archs = random.Random(0), dict[Arch, None]()
    while len(archs) < count:
        archs[tuple(rng.choice(options) for options in space.options)] = None
    return list(archs)


def train(args: argparse.Namespace) -> None:
    """Train every sampled architecture once, and the first ones with more seeds, which shows the noise."""
    torch.set_num_threads(1)
    done = {(row["space"], row["arch"], row["seed"]) for row in json_lines.read(args.trained)}
    spaces = new_spaces(args.images)
    loaders = {}
    for name, (space, data, _) in spaces.items():
        full, held = make_loaders(data, resolution=space.resolution, seed=0)
        part = random_subset(full.source, IMAGES, 0)
        loaders[name] = make_loader(data, part, train=True, resolution=space.resolution), held
    # the spaces take turns, so that a stopped program has networks of both
    for seed, i, name in ((s, i, name) for s, count in enumerate(args.counts) for i in range(count) for name in spaces):
        space, _, recipe = spaces[name]
        arch = sample(space)[i]
        if (name, format_arch(arch), seed) in done:
            continue
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            result = retrain(space, arch, *loaders[name], recipe, run_dir=folder, seed=seed)
        row = {
            "space": name,
            "arch": format_arch(arch),
            "seed": seed,
            "top1": result.top1,
            "epochs": recipe.train.epochs,
            "images": result.images,
            "cpu_s": round(time.process_time() - start, 1),
        }
        json_lines.append(args.trained, row)


Rows = list[dict[int, float]]
"""For each layer, choice -> value."""

RIVAL = "blocks that keep the resolution"
"""The formula of structure that was fixed in advance."""

BEST = "keep times stage - 2 size where it reduces"
"""The one that NAS-Bench-Macro likes best."""


def structural_rows(space: SearchSpace) -> dict[str, Rows]:
    """Corrections of `sqrt_size` that know only the space."""
    rows: dict[str, Rows] = {RIVAL: [], BEST: []}
    stages = [number for number, stage in enumerate(space.stages, 1) for _ in range(stage.layers)]
    for layer, stage in zip(space.layers, stages, strict=True):
        by_macs = sorted(layer.options, key=lambda choice: layer.cost(choice).macs)
        size = {choice: rank / (len(by_macs) - 1) for rank, choice in enumerate(by_macs)}
        keeps = {choice: float(layer.stride == 1 and layer.operator(choice).works) for choice in layer.options}
        rows[RIVAL].append({c: -keeps[c] for c in keeps})
        rows[BEST].append({c: 2 * size[c] if layer.stride > 1 else -keeps[c] * stage for c in keeps})
    return rows


SEEDS = 2


def isometry_rows(space: SearchSpace, seed: int) -> Rows:
    """Minus the mean log of s of each block in 8 Gaussian networks, on 64 images; 0 for the identity."""
    rows, paths = [dict.fromkeys(options, 0.0) for options in space.options], 8
    generator = torch.Generator().manual_seed(seed)
    for layer, choice, x, y in candidate_maps(space, init="gaussian", paths=paths, batch=64, pixels=10**9, seed=seed):
        s = largest_singular_value(mean_channel_jacobian(x, y, random_signs(y, generator)))
        rows[layer][choice] -= math.log(s) / paths
    return rows


class Ranking:
    """Accuracies of architectures, and how well corrections of `sqrt_size` rank them.

    Attributes:
        resamples: (n resamples, architectures) counts of a bootstrap, the same for all that is compared.
    """

    def __init__(self, space: SearchSpace, accuracies: Mapping[Arch, float], *, resamples: int = 1000) -> None:
        self.space, self.archs, self.y = space, list(accuracies), np.array(list(accuracies.values()))
        rng, n = np.random.default_rng(0), len(self.archs)
        self.resamples = rng.multinomial(n, np.full(n, 1 / n), size=resamples)

    def scores(self, rows: Rows | None, weight: float) -> np.ndarray:
        """z(sqrt_size) + weight z(rows); the exact search's sum, so z is over the whole space."""
        structure = structure_table(self.space, "sqrt_size")
        parts = [(structure, 1.0)]
        if rows is not None:
            parts.append((IndicatorTable.from_rows(self.space, rows, {}), weight))
        table = z_sum(parts, meta={})
        return merge_rounding(np.array([table.score(arch) for arch in self.archs]))

    def tau(self, x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return kendall_tau(x, self.y, np.ones((1, len(x))) if weights is None else weights)

    def interval(self, x: np.ndarray, other: np.ndarray | None = None) -> dict[str, float]:
        """tau of x, or its difference from that of another score on the same resamples, with a 95 % interval."""
        value, samples = self.tau(x)[0], self.tau(x, self.resamples)
        if other is not None:
            value, samples = value - self.tau(other)[0], samples - self.tau(other, self.resamples)
        low, high = np.nanquantile(samples, (0.025, 0.975))
        return {"value": round(float(value), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def carry(args: argparse.Namespace) -> dict[str, Any]:
    """The new spaces: `sqrt_size`, with isometry, with the rivals, at the weight that was fixed in advance."""
    by_space: dict[str, Any] = {}
    for name, (space, _, _) in new_spaces(None).items():
        lines = [line for line in json_lines.read(args.trained) if line["space"] == name]
        repeats: dict[Arch, list[float]] = {}
        for line in sorted(lines, key=lambda line: line["seed"]):
            repeats.setdefault(space.parse(line["arch"]), []).append(100 * line["top1"])
        ranking = Ranking(space, {arch: values[0] for arch, values in repeats.items()}, resamples=5000)
        start = time.process_time()
        corrections = {f"isometry, seed {s}": isometry_rows(space, s) for s in range(SEEDS)}
        seconds = (time.process_time() - start) / SEEDS
        corrections |= structural_rows(space)
        x = {key: ranking.scores(rows, WEIGHT) for key, rows in corrections.items()}
        base, rival = ranking.scores(None, 0), x[RIVAL]
        several = [values for values in repeats.values() if len(values) > 1]
        pooled = math.sqrt(statistics.mean(map(statistics.variance, several))) if several else None
        by_space[name] = {
            "architectures": len(repeats),
            "mean": round(float(ranking.y.mean()), 2),
            "sd": round(float(ranking.y.std(ddof=1)), 2),
            "sd_of_seeds": pooled and round(pooled, 2),
            "reseeded": len(several),
            "train_cpu_s": round(sum(line["cpu_s"] for line in lines)),
            "table_cpu_s": round(seconds, 1),
            "sqrt_size": ranking.interval(base),
            "isometry_above_rival": ranking.interval(x["isometry, seed 0"], rival),
            "rows": [
                {"name": key, "tau": ranking.interval(scores), "above_sqrt_size": ranking.interval(scores, base)}
                for key, scores in x.items()
            ],
        }
    return {**by_space, "provenance": provenance()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "carry"))
    parser.add_argument("--images", type=Path, help="train: folder of CIFAR-10's `train` and `test`")
    parser.add_argument("--trained", type=Path, default=TRAINED, help="JSON-lines file of the trainings")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[COUNT, 12, 12], help="train: architectures of each seed"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="carry: result file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.part == "train":
        train(args)
    else:
        parts = json.loads(args.out.read_text()) if args.out.exists() else {}
        # the other parts are of earlier programs, and keep their provenance
        write_atomic(args.out, (json.dumps({**parts, "carry": carry(args)}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
