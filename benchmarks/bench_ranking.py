"""How well scores of supernets rank trained accuracies; one row per supernet, seed and score.

Supernets of NAS-Bench-Macro are compared with its trained accuracies. There are no trained accuracies of mobilenet_v2,
so its rows only show how well the tables of different seeds agree.

The program trains a queue of supernets in order, each in its own directory below --work, and computes the scores that
the queue names for it. `nasfast.indicators.rank.rank` compares the scores with the trained accuracies and with the
baselines. A stopped training continues from its last checkpoint. Each row is appended to a JSON-lines file as soon as
it is finished, and rows in the file are not computed again; --summary prints them as Markdown.

    python -m benchmarks.bench_ranking --train cifar10/train --val cifar10/test --accuracies nas_bench_macro.json
    python -m benchmarks.bench_ranking --summary
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import json_lines
from benchmarks.harness import RESULTS, provenance
from nasfast.data import DataConfig, make_loader, make_loaders, random_subset
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.rank import kendall_tau, rank
from nasfast.indicators.scores import Evidence, score_table, with_structure
from nasfast.indicators.table import IndicatorTable
from nasfast.settings import METHODS, SupernetConfig, default_lr
from nasfast.spaces import Arch, SearchSpace, mobilenet_v2, nas_bench_macro
from nasfast.supernet import Supernet
from nasfast.train import TrainConfig, train_supernet
from nasfast.train.checkpoint import CheckpointFolder
from nasfast.train.supernet import make_supernet

OUT = RESULTS / "ranking_nas_bench_macro.jsonl"
LEARNED = (("path_loss", 0.0), ("path_loss", METHODS["dinas"].structure), ("path_accuracy", 0.0), ("gamma", 0.0))
"""(score, weight of structure added to it); the first two are those of the default method."""
_COMPARED = 2000
"""Number of random architectures on which the tables of two seeds are compared."""


@dataclass(frozen=True)
class Entry:
    """One supernet of the queue.

    Attributes:
        name: name in the rows, the same for all seeds.
        method: the method whose preset is used.
        epochs: epochs of training; 0 scores the weights before training.
        changes: changes to the preset, by field of SupernetConfig.
        scores: (score, weight of structure), one row for each.
        paths: sampled paths per score; None means the package's number.
        batch_size, precision: settings of training.
        space: `nas_bench_macro`, or `mobilenet_v2` for the 6^20 space with images of 64 x 64 pixels.
    """

    name: str
    method: str = "dinas"
    epochs: int = 30
    changes: tuple[tuple[str, Any], ...] = ()
    scores: tuple[tuple[str, float], ...] = LEARNED
    paths: int | None = None
    batch_size: int = 128
    precision: str = "bf16"
    space: str = "nas_bench_macro"

    @property
    def supernet(self) -> SupernetConfig:
        return SupernetConfig(hold_out=True, **dict(self.changes)).resolved(self.method)

    @property
    def train(self) -> TrainConfig:
        lr = default_lr(self.supernet.trainable, len(search_space(self.space)))
        return TrainConfig(
            epochs=self.epochs or 1, lr=lr, label_smoothing=0.0,
            precision=self.precision, warmup_epochs=1.0, log_every=20, keep_checkpoints=3,
        )  # fmt: skip


QUEUE: tuple[tuple[Entry, tuple[int, ...]], ...] = (
    *(
        (
            Entry(
                f"initial-{init}",
                epochs=0,
                changes=(("init", init), ("layer_indicators", False)),
                scores=(("ntk_q", 0.0),),
                paths=400,
            ),
            (0, 1, 2),
        )
        for init in ("orthogonal", "aligned", "he")
    ),
    (Entry("default"), (0, 1, 2)),
    # their weights train, in fp32, because that takes half the time of bf16 on a CPU
    (Entry("spos", method="spos", epochs=10, scores=LEARNED[:3], precision="fp32"), (0,)),
    (Entry("fairnas", method="fairnas", epochs=4, scores=LEARNED[:3], precision="fp32"), (0,)),
    (Entry("paper", method="dinas_paper", scores=(("gamma", 0.0),)), (0, 1, 2)),
    *(
        (Entry(f"10 epochs, {name}", epochs=10, changes=changes, scores=LEARNED[:2]), (0, 1))
        for name, changes in (
            ("default", ()),
            ("indicators and classifier", (("trainable", "indicators"),)),
            ("BatchNorms", (("classifier", False),)),
        )
    ),
    (
        Entry("mobilenet_v2, deep", epochs=5, space="mobilenet_v2", scores=(*LEARNED[:2], ("gamma", 0.0))),
        (0, 1),
    ),
)
"""Rows of other entries are in the file; benchmarks/results/NOTES.md names the commit that has them."""


def search_space(name: str) -> SearchSpace:
    """The space that an entry or a row names, for the ten classes of CIFAR-10."""
    return nas_bench_macro() if name == "nas_bench_macro" else mobilenet_v2(num_classes=10, resolution=64)


def make_images(args: argparse.Namespace, entry: Entry, seed: int, space: SearchSpace) -> tuple[object, object]:
    """Make the loader of training images, and one of random held-out training images without augmentation."""
    cfg = DataConfig(
        train=args.train, val=args.val, batch_size=entry.batch_size, augment="none", loader="cache",
        cache_dir=str(args.work / "cache"), workers=0,
    )  # fmt: skip
    train, held = make_loaders(cfg, resolution=space.resolution, seed=seed, hold_out=True)
    subset = random_subset(held.source, args.images, seed)
    return train, make_loader(cfg.replace(batch_size=128), subset, train=False, resolution=space.resolution)


def train_entry(args: argparse.Namespace, entry: Entry, seed: int, space: SearchSpace) -> tuple[Supernet, object, dict]:
    """Train a supernet; returns it, its held-out images, and the cost of its training."""
    train, held = make_images(args, entry, seed, space)
    net, sampler = make_supernet(space, entry.method, entry.supernet, seed=seed)
    if not entry.epochs:
        return net, held, {}
    folder = args.work / f"{entry.name.replace(' ', '-')}-s{seed}"
    whole = not CheckpointFolder(folder / "checkpoints", "supernet").paths()
    torch.manual_seed(seed)
    wall, cpu = time.perf_counter(), time.process_time()
    train_supernet(net, train, sampler, entry.train, run_dir=folder, resume=True)
    # a training that continued an earlier one has no time of its own
    times = {"train_wall_s": time.perf_counter() - wall, "train_cpu_s": time.process_time() - cpu} if whole else {}
    return net, held, {"steps": entry.epochs * len(train), **{name: round(s, 1) for name, s in times.items()}}


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    done = {(r["name"], r["seed"], r["score"], r["structure"]) for r in json_lines.read(args.out)}
    for entry, seed in chosen_entries(args):
        missing = [s for s in entry.scores if (entry.name, seed, *s) not in done]
        if not missing:
            continue
        space = search_space(entry.space)
        truth = read_accuracies(args.accuracies, space) if entry.space == "nas_bench_macro" else None
        net, held, cost = train_entry(args, entry, seed, space)
        inputs = Evidence(net, held, paths=entry.paths, seed=seed, bf16=True)
        tables, seconds = {}, {}
        for name, structure in missing:
            if name not in tables:
                start = time.process_time()
                tables[name] = score_table(name, inputs)
                # path_accuracy takes what path_loss has run already, so only the first of them has a cost
                seconds[name] = time.process_time() - start
            table = with_structure(tables[name], structure)
            table.save(args.work / f"{entry.name.replace(' ', '-')}-s{seed}-{name}-{structure:g}.json")
            agreement = _agreement(truth, table, space, args.resamples) if truth else {}
            scores = [{str(choice): round(score, 6) for choice, score in row.items()} for row in table.scores]
            row = {
                "name": entry.name, "space": entry.space, "seed": seed, "score": name, "structure": structure, **cost,
                "score_cpu_s": round(seconds[name], 1), **agreement, "table": scores, "meta": table.meta,
                "threads": args.threads, "supernet": entry.supernet.to_dict(), "train": entry.train.to_dict(),
                "batch_size": entry.batch_size, "augment": "none", "provenance": provenance(),
            }  # fmt: skip
            json_lines.append(args.out, row)
            tau = f"tau {row['kendall']['value']:+.3f}" if truth else "no accuracies to compare with"
            print(f"{entry.name}, seed {seed}, {name} + {structure:g} structure: {tau}", flush=True)


def _agreement(truth: dict[Arch, float], table: IndicatorTable, space: SearchSpace, resamples: int) -> dict[str, Any]:
    """How a table ranks the trained accuracies."""
    report = rank(truth, table, space, resamples=resamples)
    predictor = report.predictor
    return {
        "architectures": report.architectures,
        "kendall": asdict(predictor.kendall),
        "within_depth": asdict(predictor.kendall_within_depth),
        "spearman": asdict(predictor.spearman),
        "regret": predictor.regret,
        "above_sqrt_size": asdict(report.above["sqrt_size"]),
    }


def chosen_entries(args: argparse.Namespace) -> Iterator[tuple[Entry, int]]:
    for entry, seeds in QUEUE:
        for seed in seeds:
            if (not args.only or entry.name in args.only) and (not args.seeds or seed in args.seeds):
                yield entry, seed


def summary(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of means over seeds, with ranges."""
    lines = [
        "| supernet | score | seeds | tau | within equal depth | Spearman | above `sqrt_size` (lower ends) | "
        "regret at 10, 25, 50, 75, 100 % of MACs | R^2 | path accuracy | tau between seeds | "
        "train, score CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["score"], row["structure"]), []).append(row)
    accuracy = {(r["name"], r["seed"]): r["meta"]["intercept"] for r in rows if r["score"] == "path_accuracy"}
    for (name, score, structure), group in groups.items():
        ranked = [row for row in group if "kendall" in row]
        regrets = zip(*(row["regret"] for row in ranked), strict=True)
        accuracies = [100 * accuracy[name, r["seed"]] for r in group if (name, r["seed"]) in accuracy]
        pairs = [_tau_between(one["table"], other["table"]) for one, other in itertools.combinations(group, 2)]
        r2 = [row["meta"]["r2"] for row in group if row["meta"].get("r2") is not None]
        cells = [
            name, score + (f" + {structure:g} structure" if structure else ""),
            " ".join(str(row["seed"]) for row in group),
            _spread([row["kendall"]["value"] for row in ranked]),
            _spread([row["within_depth"]["value"] for row in ranked]),
            _spread([row["spearman"]["value"] for row in ranked]),
            " ".join(f"{row['above_sqrt_size']['low']:+.3f}" for row in ranked) or "-",
            " ".join(f"{statistics.mean(values):.2f}" for values in regrets) or "-",
            _spread(r2), _spread(accuracies, "{:.1f} %"), _spread(pairs),
            f"{_spread([r['train_cpu_s'] for r in group if 'train_cpu_s' in r], '{:.0f}')}, "
            f"{_spread([r['score_cpu_s'] for r in group], '{:.0f}')}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _tau_between(one: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    """Kendall's tau between the scores of two tables for the same random architectures."""
    rng = random.Random(0)
    archs = [[rng.choice(list(row)) for row in one] for _ in range(_COMPARED)]
    scores = [
        [sum(row[choice] for row, choice in zip(table, arch, strict=True)) for arch in archs] for table in (one, other)
    ]
    return float(kendall_tau(*scores, np.ones((1, _COMPARED)))[0])


def _spread(values: list[float], number: str = "{:.3f}") -> str:
    """The mean, and the range of more than one."""
    if not values:
        return "-"
    mean = number.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ({number.format(min(values))} to {number.format(max(values))})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", help="folder of training images, one sub-folder per class")
    parser.add_argument("--val", help="folder of test images of the same classes, which only keeps them apart")
    parser.add_argument("--accuracies", help="trained accuracies of NAS-Bench-Macro, JSON")
    parser.add_argument("--work", type=Path, default=Path("runs/ranking"), help="folder of checkpoints and tables")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON-lines file to which rows are appended")
    parser.add_argument(
        "--only", nargs="*", help=f"entries of the queue: {', '.join(entry.name for entry, _ in QUEUE)}"
    )
    parser.add_argument("--seeds", nargs="*", type=int, help="only these seeds")
    parser.add_argument("--images", type=int, default=1000, help="number of held-out images for scores")
    parser.add_argument("--resamples", type=int, default=1000, help="resamples of the bootstrap")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--summary", action="store_true", help="only print the rows of --out as Markdown")
    args = parser.parse_args(argv)
    if args.summary:
        print(summary(json_lines.read(args.out)))
        return
    if None in (args.train, args.val, args.accuracies):
        parser.error("give --train, --val and --accuracies, or --summary")
    run(args)


if __name__ == "__main__":
    main()
