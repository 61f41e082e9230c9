"""What the isometry of untrained blocks says about trained accuracies.

NAS-Bench-Macro chose its weight; two more spaces, in which nothing was chosen, judge it.

These get trained networks of their own, drawn uniformly from all architectures:

    python -m benchmarks.bench_isometry train --images cifar10 --trained trained.jsonl
    python -m benchmarks.bench_isometry carry --trained trained.jsonl
    python -m benchmarks.bench_isometry explain --accuracies nas_bench_macro.json --supernets supernets.jsonl
    python -m benchmarks.bench_isometry agree

`train` appends one line per training as soon as it is finished, and does not train a line again that is there.
`explain` varies the estimate, compares it with formulas of structure, and says what tables of trained supernets add.
`agree` compares the tables of two seeds in mobilenet_v2. Each writes its part of one JSON file, and `draw` makes the
figure of docs/ranking.md from it.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from scipy.linalg import hadamard
from scipy.stats import norm, rankdata
from torch import Tensor

from benchmarks.harness import ROOT, provenance
from nasfast.data import DataConfig, make_loader, make_loaders, random_subset
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.distill import distill, z_sum
from nasfast.indicators.isometry import (
    candidate_maps,
    isometry_table,
    largest_singular_value,
    mean_channel_jacobian,
    random_signs,
)
from nasfast.indicators.rank import kendall_tau, merge_rounding
from nasfast.indicators.scores import with_structure
from nasfast.indicators.structure import structure_table
from nasfast.indicators.table import IndicatorTable
from nasfast.retrain import RetrainConfig, retrain
from nasfast.runtime.files import write_atomic
from nasfast.settings import Init
from nasfast.spaces import (
    Arch,
    Block,
    FixedLayer,
    SearchSpace,
    Stage,
    digits_macro,
    format_arch,
    mobilenet_v2,
    nas_bench_macro,
)
from nasfast.train import TrainConfig

_RESULTS = Path(__file__).parent / "results"
OUT, TRAINED = _RESULTS / "isometry.json", _RESULTS / "isometry_trained.jsonl"
SUPERNETS = _RESULTS / "ranking_nas_bench_macro.jsonl"
PICTURE = ROOT / "docs" / "isometry.svg"

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


def sampled(space: SearchSpace, count: int = COUNT) -> list[Arch]:
    """Distinct architectures, uniform over the space."""
    rng, found = random.Random(0), dict[Arch, None]()
    while len(found) < count:
        found[tuple(rng.choice(options) for options in space.options)] = None
    return list(found)


def train(args: argparse.Namespace) -> None:
    """Train every sampled architecture once, and the first ones with more seeds, which shows the noise."""
    torch.set_num_threads(1)
    done = {(row["space"], row["arch"], row["seed"]) for row in read_lines(args.trained)}
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
        row = {
            "space": name,
            "arch": format_arch(arch),
            "seed": seed,
            "top1": result.top1,
            "epochs": recipe.train.epochs,
            "images": result.images,
            "cpu_s": round(time.process_time() - start, 1),
        }
        with args.trained.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


Rows = list[dict[int, float]]
"""For each layer, choice -> value."""

RIVAL, BEST = "blocks that keep the resolution", "keep times stage - 2 size where it reduces"
"""The formulas of structure that was fixed in advance, and that NAS-Bench-Macro likes best."""


def structural(space: SearchSpace) -> dict[str, Rows]:
    """Corrections of `sqrt_size` that know only the space."""
    rows: dict[str, Rows] = {RIVAL: [], "times log channels": [], BEST: []}
    stages = [number for number, stage in enumerate(space.stages, 1) for _ in range(stage.layers)]
    for layer, stage in zip(space.layers, stages, strict=True):
        by_macs = sorted(layer.options, key=lambda choice: layer.cost(choice).macs)
        size = {choice: rank / (len(by_macs) - 1) for rank, choice in enumerate(by_macs)}
        keeps = {choice: float(layer.stride == 1 and layer.operator(choice).works) for choice in layer.options}
        rows[RIVAL].append({c: -keeps[c] for c in keeps})
        rows["times log channels"].append({c: -keeps[c] * math.log(layer.out_channels) for c in keeps})
        rows[BEST].append({c: 2 * size[c] if layer.stride > 1 else -keeps[c] * stage for c in keeps})
    return rows


def gain(x: Tensor, y: Tensor, generator: torch.Generator) -> float:
    """sqrt of tr J J^T / outputs, the mean-field measure of how much a block stretches, without noise of channels."""
    signs = random_signs(y, generator)
    return math.sqrt(torch.autograd.grad(y, x, signs)[0].square().sum().item() / signs.numel())


def one_draw(x: Tensor, y: Tensor, generator: torch.Generator) -> float:
    """The score's own estimate of s."""
    return largest_singular_value(mean_channel_jacobian(x, y, random_signs(y, generator)))


def exact(x: Tensor, y: Tensor, generator: torch.Generator) -> float:
    """s without the noise between channels: as many draws as channels, whose signs are orthogonal across channels."""
    rows = torch.tensor(hadamard(y.shape[1]), dtype=torch.float32)
    total = torch.zeros(())
    for row in rows:
        signs = row.view(1, -1, 1, 1) * random_signs(y[:, :1], generator)
        total = total + mean_channel_jacobian(x, y, signs, retain_graph=True) / len(rows)
    return largest_singular_value(total)


MEASURES = {"one draw": one_draw, "exact": exact, "gain": gain}

VARIANTS: tuple[tuple[str, Init, int, int], ...] = (
    ("one draw", "gaussian", 16, 8),
    ("one draw", "gaussian", 64, 8),
    ("one draw", "gaussian", 256, 3),
    ("one draw", "gaussian", 512, 1),
    ("one draw", "orthogonal", 64, 6),
    ("one draw", "aligned", 64, 6),
    ("gain", "gaussian", 32, 6),
    ("exact", "gaussian", 32, 1),
)
"""(estimate, initial weights, images, paths)."""

DEFINITION, NOISELESS = "one draw, gaussian, 64 images", "exact, gaussian, 32 images"
"""The variant that was fixed in advance, and the same without the noise of its estimate."""

SEEDS = 2


def measured(space: SearchSpace, measure: str, init: Init, batch: int, paths: int, seed: int) -> Rows:
    """Minus the mean log of a measure of each block, 0 for the identity."""
    rows = [dict.fromkeys(options, 0.0) for options in space.options]
    generator = torch.Generator().manual_seed(seed)
    maps = candidate_maps(space, init=init, paths=paths, batch=batch, pixels=10**9, seed=seed)
    for place, choice, x, y in maps:
        rows[place][choice] -= math.log(MEASURES[measure](x, y, generator)) / paths
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
        parts = [(structure, 1.0)] + ([] if rows is None else [(IndicatorTable.of_rows(self.space, rows, {}), weight)])
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


def explain(args: argparse.Namespace) -> dict[str, Any]:
    """Every variant of the estimate and every formula of structure on NAS-Bench-Macro."""
    space = nas_bench_macro()
    ranking = Ranking(space, read_accuracies(args.accuracies, space), resamples=args.resamples)
    found: dict[str, Any] = {
        "architectures": len(ranking.archs),
        "sqrt_size": ranking.interval(ranking.scores(None, 0)),
    }
    formulas = structural(space)
    rival = ranking.scores(formulas[RIVAL], WEIGHT)
    rows: list[dict[str, Any]] = [
        {"name": name, "tau": round(float(ranking.tau(ranking.scores(terms, WEIGHT))[0]), 4)}
        for name, terms in formulas.items()
    ]
    for measure, init, batch, paths in VARIANTS:
        for seed in range(SEEDS if (measure, init, batch) == ("one draw", "gaussian", 64) else 1):
            start = time.process_time()
            terms = measured(space, measure, init, batch, paths, seed)
            seconds, x = time.process_time() - start, ranking.scores(terms, WEIGHT)
            row = {"name": f"{measure}, {init}, {batch} images", "seed": seed, "paths": paths,
                   "tau": round(float(ranking.tau(x)[0]), 4), "cpu_s": round(seconds, 1),
                   "table": _text(terms)}  # fmt: skip
            if row["name"] in (DEFINITION, NOISELESS):
                row["above_sqrt_size"] = ranking.interval(x, ranking.scores(None, 0))
                row["above_rival"] = ranking.interval(x, rival)
                row["above_best_formula"] = ranking.interval(x, ranking.scores(formulas[BEST], WEIGHT))
            rows.append(row)
            print(row["name"], row["tau"], flush=True)
    found["wanted"] = _text(wanted(ranking))
    return {"explain": {**found, "rows": rows, "supernets": with_supernets(ranking, rows, args.supernets)}}


def with_supernets(ranking: Ranking, rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """What tables of trained supernets add to structure and isometry, by seed and weight."""
    terms = next(_numbers(row["table"]) for row in rows if row["name"] == DEFINITION)
    z = ranking.scores(terms, WEIGHT)
    found = []
    for line in read_lines(path):
        if line["name"] != "default" or line["score"] != "path_loss" or line["structure"]:
            continue
        table = IndicatorTable.of_rows(ranking.space, _numbers(line["table"]), {})
        trained = z_sum([(table, 1.0)], meta={})
        values = np.array([trained.score(arch) for arch in ranking.archs])
        for weight in (0.05, 0.1, 0.25):
            found.append({"seed": line["seed"], "weight": weight, "above": ranking.interval(z + weight * values, z)})
    return found


def carry(args: argparse.Namespace) -> dict[str, Any]:
    """The new spaces: `sqrt_size`, with isometry, with the rivals, at the weight that was fixed in advance."""
    found: dict[str, Any] = {}
    for name, (space, _, _) in new_spaces(None).items():
        lines = [line for line in read_lines(args.trained) if line["space"] == name]
        repeats: dict[Arch, list[float]] = {}
        for line in sorted(lines, key=lambda line: line["seed"]):
            repeats.setdefault(space.parse(line["arch"]), []).append(100 * line["top1"])
        ranking = Ranking(space, {arch: values[0] for arch, values in repeats.items()}, resamples=5000)
        start = time.process_time()
        corrections = {f"isometry, seed {s}": measured(space, "one draw", "gaussian", 64, 8, s) for s in range(SEEDS)}
        seconds = (time.process_time() - start) / SEEDS
        corrections |= structural(space)
        x = {key: ranking.scores(rows, WEIGHT) for key, rows in corrections.items()}
        base, rival = ranking.scores(None, 0), x[RIVAL]
        several = [values for values in repeats.values() if len(values) > 1]
        pooled = math.sqrt(statistics.mean(map(statistics.variance, several))) if several else None
        found[name] = {
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
    return {"carry": found}


def agree(args: argparse.Namespace) -> dict[str, Any]:
    """Two seeds of the score's own table in mobilenet_v2, 6^20 architectures at 224 x 224."""
    space, rng = mobilenet_v2(), random.Random(0)
    archs = [tuple(rng.choice(options) for options in space.options) for _ in range(2000)]
    tables, seconds = [], []
    for seed in range(SEEDS):
        start = time.process_time()
        tables.append(isometry_table(space, seed=seed))
        seconds.append(round(time.process_time() - start, 1))
    scores = [[table.score(arch) for arch in archs] for table in tables]
    both = [[with_structure(table, 1 / WEIGHT).score(arch) for arch in archs] for table in tables]
    ones = np.ones((1, len(archs)))
    return {"agree": {
        "space": space.name, "cpu_s": seconds, **tables[0].meta,
        "tau": round(float(kendall_tau(*scores, ones)[0]), 4),
        "with_structure": round(float(kendall_tau(*both, ones)[0]), 4),
    }}  # fmt: skip


def wanted(ranking: Ranking) -> Rows:
    """What the accuracies ask for beyond `sqrt_size`, in its standard deviations over the space.

    The additive table that fits the normal scores of the ranks of all accuracies, divided so that it has as much of
    `sqrt_size` as that has of itself, minus `sqrt_size`.
    """
    space = ranking.space
    normal = norm.ppf((rankdata(ranking.y) - 0.5) / len(ranking.y))
    fitted = distill(space, dict(zip(ranking.archs, normal, strict=True)), space.options, meta={}).scores
    structure = z_sum([(structure_table(space, "sqrt_size"), 1.0)], meta={}).scores
    share = sum(
        float(np.cov(list(f.values()), list(z.values()), bias=True)[0, 1])
        for f, z in zip(fitted, structure, strict=True)
    )
    return [{c: f[c] / share - z[c] for c in f} for f, z in zip(fitted, structure, strict=True)]


def _weighted(space: SearchSpace, rows: Rows) -> Rows:
    """A correction as the score has it: in standard deviations over the space, times its weight."""
    return list(z_sum([(IndicatorTable.of_rows(space, rows, {}), WEIGHT)], meta={}).scores)


def _text(rows: Rows) -> list[dict[str, float]]:
    return [{str(choice): round(value, 4) for choice, value in row.items()} for row in rows]


def _numbers(rows: Sequence[Mapping[str, float]]) -> Rows:
    return [{int(choice): value for choice, value in row.items()} for row in rows]


def draw(args: argparse.Namespace) -> None:
    """Draw which layers the corrections correct: one panel per layer of NAS-Bench-Macro, one line per correction."""
    found, space = json.loads(args.out.read_text())["explain"], nas_bench_macro()
    tables = {row["name"]: _numbers(row["table"]) for row in reversed(found["rows"]) if "table" in row}
    lines = {
        "what all accuracies ask for": (_numbers(found["wanted"]), "#111111", "o-"),
        "isometry": (_weighted(space, tables[DEFINITION]), "#0072b2", "s-"),
        "isometry without noise": (_weighted(space, tables[NOISELESS]), "#56b4e9", "^--"),
        "best formula": (_weighted(space, structural(space)[BEST]), "#d55e00", "d:"),
    }
    figure = Figure(figsize=(11, 2.9), layout="constrained")
    axes = figure.subplots(1, len(space), sharey=True)
    for name, (rows, colour, style) in lines.items():
        for axis, row in zip(axes, rows, strict=True):
            values = np.array([row[choice] for choice in sorted(row)])
            axis.plot(values - values.mean(), style, color=colour, label=name, markersize=4, linewidth=1.3)
    for place, (axis, layer) in enumerate(zip(axes, space.layers, strict=True)):
        axis.set_title(
            f"layer {place}, {'halves' if layer.stride > 1 else 'keeps'}\n{layer.out_channels} channels", fontsize=8
        )
        axis.set_xticks(range(3), ["none", "k3 e3", "k5 e6"], fontsize=7)
        axis.axhline(0, color="#bbbbbb", linewidth=0.6, zorder=0)
        axis.tick_params(labelsize=7)
    axes[0].set_ylabel("correction of sqrt_size", fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "isometry"}):  # text stays text, and ids stay the same
        figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")


def write(part: Callable[[argparse.Namespace], dict[str, Any]], args: argparse.Namespace) -> None:
    """Replace one part of the result file."""
    torch.set_num_threads(1)
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    found = {**known, **part(args), "provenance": provenance()}
    write_atomic(args.out, (json.dumps(found, indent=1) + "\n").encode())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "carry", "explain", "agree", "draw"))
    parser.add_argument("--images", type=Path, help="train: folder of CIFAR-10's `train` and `test`")
    parser.add_argument("--trained", type=Path, default=TRAINED, help="JSON-lines file of the trainings")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[COUNT, 12, 12], help="train: architectures of each seed"
    )
    parser.add_argument("--accuracies", type=Path, help="explain: trained accuracies of NAS-Bench-Macro, JSON")
    parser.add_argument("--supernets", type=Path, default=SUPERNETS, help="explain: rows of trained supernets")
    parser.add_argument("--resamples", type=int, default=300, help="explain: resamples of the bootstrap")
    parser.add_argument("--out", type=Path, default=OUT, help="result file")
    args = parser.parse_args(argv)
    if args.part == "train":
        train(args)
    elif args.part == "draw":
        draw(args)
    else:
        write({"carry": carry, "explain": explain, "agree": agree}[args.part], args)


if __name__ == "__main__":
    main()
