"""What the isometry of untrained blocks says about trained accuracies.

NAS-Bench-Macro chose its weight; two more spaces, in which nothing was chosen, judge it.

These get trained networks of their own, drawn uniformly from all architectures:

    python -m benchmarks.bench_isometry train --images cifar10 --trained trained.jsonl
    python -m benchmarks.bench_isometry carry --trained trained.jsonl
    python -m benchmarks.bench_isometry explain --accuracies nas_bench_macro.json
    python -m benchmarks.bench_isometry agree
    python -m benchmarks.bench_isometry few --accuracies nas_bench_macro.json

`train` appends one line per training as soon as it is finished, and does not train a line again that is there.
`explain` varies the estimate and compares it with formulas of structure: half of the accuracies choose each weight, the
other half judges it. `agree` compares the tables of two seeds in mobilenet_v2. `few` refines a table by few trained
accuracies, which are chosen in two ways. Each writes its part of one JSON file, and `draw` makes the figure of
docs/ranking.md from it.
"""

import argparse
import itertools
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
from nasfast.indicators.refine import ridge
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
    Layer,
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

PENALTIES = (1, 2, 4, 8, 16, 32)
"""Penalties of the ridge that starts from a score; all are in the result."""

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
        row = {"space": name, "arch": format_arch(arch), "seed": seed, "top1": result.top1,
               "images": result.images, "cpu_s": round(time.process_time() - start, 1)}  # fmt: skip
        with args.trained.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


Rows = list[dict[int, float]]
"""For each layer, choice -> value."""


def structural(space: SearchSpace) -> dict[str, Rows]:
    """Corrections of `sqrt_size` that know only the space."""
    places = [place for place, stage in enumerate(space.stages) for _ in range(stage.layers)]
    formulas: dict[str, Callable[[Layer, int, int, float, float], float]] = {
        # layer, choice, index of the stage, whether it is a block, rank of its MACs from 0 to 1
        "blocks that keep the resolution": lambda layer, c, stage, works, rank: -works * (layer.stride == 1),
        "times log channels": lambda layer, c, stage, works, rank: (
            -works * (layer.stride == 1) * math.log(layer.out_channels)
        ),
        "times stage": lambda layer, c, stage, works, rank: -works * (layer.stride == 1) * (stage + 1),
        "times sqrt(channels / pixels)": lambda layer, c, stage, works, rank: (
            -works * (layer.stride == 1) * math.sqrt(layer.out_channels) / layer.size
        ),
        "times log(1 + sqrt(channels / pixels))": lambda layer, c, stage, works, rank: (
            -works * (layer.stride == 1) * math.log1p(math.sqrt(layer.out_channels) / layer.size)
        ),
        "in the last stage": lambda layer, c, stage, works, rank: -works * (layer.stride == 1) * (stage == places[-1]),
        "behind the first stage": lambda layer, c, stage, works, rank: -works * (layer.stride == 1) * (stage > 0),
        "depth": lambda layer, c, stage, works, rank: -works,
        "params": lambda layer, c, stage, works, rank: -float(layer.cost(c).params),
        "log params": lambda layer, c, stage, works, rank: -math.log1p(layer.cost(c).params),
        "more MACs": lambda layer, c, stage, works, rank: float(layer.cost(c).macs),
        "blocks that reduce": lambda layer, c, stage, works, rank: works * (layer.stride > 1),
        "size where it reduces": lambda layer, c, stage, works, rank: rank * (layer.stride > 1),
        "largest candidate": lambda layer, c, stage, works, rank: float(rank == 1),
        "smaller kernels": lambda layer, c, stage, works, rank: -works * layer.choices[c].kernel,
        "keep - reduce": lambda layer, c, stage, works, rank: works * (1 if layer.stride > 1 else -1),
        "keep - size where it reduces": lambda layer, c, stage, works, rank: rank if layer.stride > 1 else -works,
        "keep times stage - 2 size where it reduces": lambda layer, c, stage, works, rank: (
            2 * rank if layer.stride > 1 else -works * (stage + 1)
        ),
    }
    rows: dict[str, Rows] = {name: [] for name in formulas}
    for layer, stage in zip(space.layers, places, strict=True):
        order = sorted(layer.options, key=lambda choice: layer.cost(choice).macs)
        for name, formula in formulas.items():
            rows[name].append({
                c: float(formula(layer, c, stage, layer.operator(c).works, order.index(c) / (len(order) - 1)))
                for c in layer.options
            })  # fmt: skip
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
    ("one draw", "gaussian", 32, 6),
    ("one draw", "gaussian", 64, 8),
    ("one draw", "gaussian", 128, 3),
    ("one draw", "gaussian", 256, 3),
    ("one draw", "gaussian", 512, 1),
    ("one draw", "orthogonal", 64, 6),
    ("one draw", "aligned", 64, 6),
    ("gain", "gaussian", 32, 6),
    ("gain", "orthogonal", 32, 6),
    ("gain", "aligned", 32, 6),
    ("exact", "gaussian", 32, 1),
    ("exact", "orthogonal", 32, 1),
)  # fmt: skip
"""(estimate, initial weights, images, paths)."""

DEFINITION, NOISELESS = "one draw, gaussian, 64 images", "exact, gaussian, 32 images"
"""The variant that was fixed in advance, and the same without the noise of its estimate."""

RIVAL = "blocks that keep the resolution"
"""The formula of structure that was fixed in advance."""

WEIGHTS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
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
        half = np.zeros(n, dtype=bool)
        half[rng.permutation(n)[: n // 2]] = True
        self.halves = np.stack([half, ~half]).astype(float)

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

    def chosen(self, rows: Rows) -> dict[str, float]:
        """The weight that is best on the first half of the architectures, and tau on the second."""
        taus = [self.tau(self.scores(rows, weight), self.halves) for weight in WEIGHTS]
        best = max(range(len(WEIGHTS)), key=lambda i: taus[i][0])
        return {
            "weight": WEIGHTS[best],
            "chosen_on": round(float(taus[best][0]), 4),
            "judged_on": round(float(taus[best][1]), 4),
        }


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
    best = max(formulas.values(), key=lambda rows: ranking.tau(ranking.scores(rows, WEIGHT))[0])
    rows = []
    for name, terms in formulas.items():
        x = ranking.scores(terms, WEIGHT)
        rows.append(
            {"name": name, "kind": "structure", "tau": round(float(ranking.tau(x)[0]), 4), **ranking.chosen(terms)}
        )
    for measure, init, batch, paths in VARIANTS:
        for seed in range(SEEDS if (measure, init, batch) == ("one draw", "gaussian", 64) else 1):
            start = time.process_time()
            terms = measured(space, measure, init, batch, paths, seed)
            seconds, x = time.process_time() - start, ranking.scores(terms, WEIGHT)
            row = {"name": f"{measure}, {init}, {batch} images", "kind": "isometry", "seed": seed, "paths": paths,
                   "tau": round(float(ranking.tau(x)[0]), 4), **ranking.chosen(terms), "cpu_s": round(seconds, 1),
                   "table": _text(terms)}  # fmt: skip
            if row["name"] in (DEFINITION, NOISELESS):
                row["above_sqrt_size"] = ranking.interval(x, ranking.scores(None, 0))
                row["above_rival"] = ranking.interval(x, rival)
                row["above_best_formula"] = ranking.interval(x, ranking.scores(best, WEIGHT))
            rows.append(row)
            print(row["name"], row["tau"], flush=True)
    found["settings"] = len(formulas) + len(VARIANTS)
    found["wanted"] = _text(wanted(ranking))
    found["best_formula"] = next(name for name, terms in formulas.items() if terms is best)
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
        corrections["gain"] = measured(space, "gain", "gaussian", 32, 6, 0)
        corrections |= structural(space)
        x = {key: ranking.scores(rows, WEIGHT) for key, rows in corrections.items()}
        base, rival = ranking.scores(None, 0), x[RIVAL]
        several = [values for values in repeats.values() if len(values) > 1]
        pooled = math.sqrt(statistics.mean(map(statistics.variance, several))) if several else math.nan
        found[name] = {
            "architectures": len(repeats),
            "mean": round(float(ranking.y.mean()), 2),
            "sd": round(float(ranking.y.std(ddof=1)), 2),
            "sd_of_seeds": round(pooled, 2),
            "reseeded": len(several),
            "train_cpu_s": round(sum(line["cpu_s"] for line in lines)),
            "table_cpu_s": round(seconds, 1),
            "sqrt_size": ranking.interval(base),
            "isometry_above_rival": ranking.interval(x["isometry, seed 0"], rival),
            "tables": {key: _text(corrections[key]) for key in ("isometry, seed 0", "isometry, seed 1")},
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


def few(args: argparse.Namespace) -> dict[str, Any]:
    """tau on the architectures that were not trained, by the number of those that were, and by how they were chosen.

    The fit is that of `nasfast.indicators.refine` with the same penalty for all choices of one score: y = c + s p + sum
    of w[layer, choice], for the normal scores y of the ranks and the score p. The choices are one of each share of the
    architectures by MACs, and the D-optimal design: the architecture, one by one, that raises det(I + X^T X) most.
    """
    space = nas_bench_macro()
    ranking = Ranking(space, read_accuracies(args.accuracies, space))
    explained = json.loads(args.out.read_text())["explain"]["rows"]
    isometry = next(_numbers(row["table"]) for row in explained if row["name"] == DEFINITION)
    x = np.concatenate([np.array(ranking.archs) == choice for choice in range(3)], axis=1).astype(float)
    rows = []
    for score, terms in (("sqrt_size", None), ("sqrt_size and isometry", isometry)):
        p = ranking.scores(terms, WEIGHT)
        for count, choose in itertools.product((16, 32, 64, 128), (by_macs, d_optimal)):
            taus = []
            for seed in range(8):
                chosen = choose(ranking, x, count, np.random.default_rng(seed))
                others = np.ones((1, len(p)))
                others[0, chosen] = 0
                taus.append([float(ranking.tau(scores, others)[0]) for scores in refined(x, p, ranking.y, chosen)])
            for penalty, of_seeds in zip(PENALTIES, zip(*taus, strict=True), strict=True):
                mean, deviation = statistics.mean(of_seeds), statistics.stdev(of_seeds)
                rows.append({"score": score, "trained": count, "chosen": choose.__name__, "penalty": penalty,
                             "tau": round(mean, 4), "deviation": round(deviation, 4)})  # fmt: skip
                print(rows[-1], flush=True)
    return {"few": rows}


def by_macs(ranking: Ranking, x: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """One architecture of each share by MACs."""
    order = np.argsort([ranking.space.cost(arch).macs for arch in ranking.archs], kind="stable")
    return np.array([rng.choice(share) for share in np.array_split(order, count)])


def d_optimal(ranking: Ranking, x: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The D-optimal design among 700 architectures that are drawn."""
    drawn = rng.permutation(len(x))[:700]
    rows, inverse, chosen = x[drawn] - x.mean(axis=0), np.eye(x.shape[1]), []
    for _ in range(count):
        # the factor by which one more row raises the determinant
        factor = 1 + np.einsum("ij,jk,ik->i", rows, inverse, rows)
        factor[chosen] = 0
        chosen.append(int(factor.argmax()))
        step = inverse @ rows[chosen[-1]]
        inverse -= np.outer(step, step) / factor[chosen[-1]]
    return drawn[chosen]


def refined(x: np.ndarray, p: np.ndarray, truth: np.ndarray, chosen: np.ndarray) -> list[np.ndarray]:
    """For each penalty, scores of all architectures by a ridge on the accuracies of the chosen that starts from p."""
    y = norm.ppf((rankdata(truth[chosen]) - 0.5) / len(chosen))
    fixed = np.stack([np.ones(len(p)), p], axis=1)
    found = ridge(fixed[chosen], x[chosen], y, PENALTIES)
    return [merge_rounding(np.concatenate([fixed, x], axis=1) @ coefficients) for coefficients in found]


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
    best = structural(space)[found["best_formula"]]
    lines = {
        "what all accuracies ask for": (_numbers(found["wanted"]), "#111111", "o-"),
        "isometry": (_weighted(space, tables[DEFINITION]), "#0072b2", "s-"),
        "isometry without noise": (_weighted(space, tables[NOISELESS]), "#56b4e9", "^--"),
        "best formula": (_weighted(space, best), "#d55e00", "d:"),
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
    parser.add_argument("part", choices=("train", "carry", "explain", "agree", "few", "draw"))
    parser.add_argument("--images", type=Path, help="train: folder of CIFAR-10's `train` and `test`")
    parser.add_argument("--trained", type=Path, default=TRAINED, help="JSON-lines file of the trainings")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[COUNT, 12, 12], help="train: architectures of each seed"
    )
    parser.add_argument("--accuracies", type=Path, help="explain, few: trained accuracies of NAS-Bench-Macro, JSON")
    parser.add_argument("--supernets", type=Path, default=SUPERNETS, help="explain: rows of trained supernets")
    parser.add_argument("--resamples", type=int, default=300, help="explain: resamples of the bootstrap")
    parser.add_argument("--out", type=Path, default=OUT, help="result file")
    args = parser.parse_args(argv)
    if args.part == "train":
        train(args)
    elif args.part == "draw":
        draw(args)
    else:
        write({"carry": carry, "explain": explain, "agree": agree, "few": few}[args.part], args)


if __name__ == "__main__":
    main()
