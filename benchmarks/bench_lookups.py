"""Zero-cost scores and structural baselines against tables of trained accuracies, without any training.

For each table and seed, every zero-cost score is computed for the same random architectures, each as a separate network
with PyTorch's initialisation. `nasfast.indicators.rank.rank` compares the scores with the trained accuracies and with
the baselines. Each row is appended to a JSON-lines file as soon as it is finished; rows in the file are not computed
again. `--summary` prints the means over seeds as Markdown.

    python -m benchmarks.bench_lookups --images cifar10/train --macro nas_bench_macro.json --cells nas_bench_201.json
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks.harness import positive, provenance
from nasfast.cells import nas_bench_201_space
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.rank import RankReport, rank
from nasfast.indicators.structure import BASELINES, structure_scores
from nasfast.indicators.zero_cost import ZERO_COST, ScoreError
from nasfast.nasi.score import untrained
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch, ArchSpace, nas_bench_macro

FAILED = -float("inf")
"""The score of an architecture that has none, such as a cell without a path to its output; it ranks lowest."""


class Task(NamedTuple):
    """A table of accuracies.

    Attributes:
        name: name in the rows.
        space: space of the architectures.
        truth: architecture -> accuracy.
        network: function of an architecture and a seed that makes an untrained network.
    """

    name: str
    space: ArchSpace
    truth: dict[Arch, float]
    network: Callable[[Arch, int], nn.Module]


def tasks(args: argparse.Namespace) -> list[Task]:
    found = []
    if args.macro:
        # the networks with the published accuracies have ReLU
        space = nas_bench_macro().replace(activation="relu")
        found.append(Task("nas_bench_macro", space, read_accuracies(args.macro, space), partial(_untrained, space)))
    if args.cells:
        # smaller than the published network, which has 15 cells and 16 channels
        small = nas_bench_201_space(cells=args.cell_count, channels=args.channels)
        for column in args.columns:
            truth = read_accuracies(args.cells, small, column=column)
            found.append(Task(f"nas_bench_201 {column}", small, truth, partial(_untrained, small)))
    return found


def _untrained(space: ArchSpace, arch: Arch, seed: int) -> nn.Module:
    return untrained(space, arch, seed=seed)


def batch_of(images: str, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch of augmented training images (N, 3, 32, 32), and their labels."""
    loader = make_loader(DataConfig(train=images, batch_size=size), FolderSource(images), resolution=32, seed=seed)
    return next(iter(loader.epoch(0)))


def sampled(truth: dict[Arch, float], count: int, seed: int) -> list[Arch]:
    return random.Random(seed).sample(sorted(truth), min(count, len(truth)))


def scored(task: Task, name: str, archs: Sequence[Arch], batch: tuple[Tensor, Tensor], seed: int) -> tuple[dict, dict]:
    """Score the architectures; returns the scores, and the CPU seconds of scoring without making the networks."""
    scores, spent, failed = {}, 0.0, 0
    for i, arch in enumerate(archs):
        network = task.network(arch, derive_seed(seed, i))
        start = time.process_time()
        try:
            scores[arch] = ZERO_COST[name](network, *batch)
        except ScoreError:
            scores[arch], failed = FAILED, failed + 1
        spent += time.process_time() - start
    lowest = min((s for s in scores.values() if s != FAILED), default=0.0)
    scores = {arch: lowest - abs(lowest) - 1 if s == FAILED else s for arch, s in scores.items()}
    return scores, {"cpu_seconds": round(spent, 2), "failed": failed}


def row_of(report: RankReport) -> dict[str, Any]:
    """The figures of a report: tau, tau within equal depth, Spearman, regrets, and tau above each baseline."""
    mine = report.predictor
    return {
        "architectures": report.architectures,
        "kendall": asdict(mine.kendall),
        "within_depth": asdict(mine.kendall_within_depth),
        "spearman": asdict(mine.spearman),
        "regret": mine.regret,
        "above": {name: asdict(estimate) for name, estimate in report.above.items()},
    }


def run(args: argparse.Namespace) -> None:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["table"], r["score"], r["seed"]) for r in rows(args.out)}
    settings = {"batch": args.batch, "cells": args.cell_count, "channels": args.channels}
    for seed in args.seeds:
        batch = batch_of(args.images, args.batch, seed)
        kept: dict[tuple[str, str], tuple[dict, dict]] = {}
        for task in tasks(args):
            archs = sampled(task.truth, args.architectures, seed)
            truth = {arch: task.truth[arch] for arch in archs}
            for name in (*BASELINES, *ZERO_COST):
                if (task.name, name, seed) in done:
                    continue
                if name in BASELINES:
                    start = time.process_time()
                    values = structure_scores(task.space, name, archs)
                    found = dict(zip(archs, values, strict=True)), {"cpu_seconds": time.process_time() - start}
                else:
                    # tables of one space have the same architectures and images, and so the same scores
                    key = task.space.name, name
                    if key not in kept:
                        kept[key] = scored(task, name, archs, batch, seed)
                    found = kept[key]
                report = rank(truth, found[0], task.space, resamples=args.resamples, seed=seed)
                row = {"table": task.name, "score": name, "seed": seed, **row_of(report), **found[1], **settings}
                if name in BASELINES:
                    # a baseline costs so little that the whole table is ranked, too
                    every = list(task.truth)
                    scores = dict(zip(every, structure_scores(task.space, name, every), strict=True))
                    row["whole_table"] = row_of(rank(task.truth, scores, task.space, resamples=100, seed=seed))
                append(args.out, row)
                print(f"{task.name:28} {name:14} seed {seed}: tau {report.predictor.kendall}", flush=True)


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the file; its first line, the provenance, is left out."""
    if not path.exists():
        return []
    forms = [json.loads(line) for line in path.read_text().splitlines()]
    return [form for form in forms if "score" in form]


def append(path: Path, row: dict[str, Any]) -> None:
    head = [] if path.exists() else [provenance()]
    with path.open("a") as file:
        for form in (*head, row):
            file.write(json.dumps(form) + "\n")


_HEAD = (
    "| score | tau: mean (lowest to highest) | within equal depth | Spearman | above sqrt_size in seeds "
    "| regret at 10, 25, 50, 75, 100 % of the MACs | CPU seconds | failed |",
    "|---|---|---|---|---|---|---|---|",
)


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Markdown with means over seeds by table and score, then the baselines on all architectures of each table."""
    lines = []
    for table in dict.fromkeys(r["table"] for r in found):
        mine = [r for r in found if r["table"] == table]
        counts = ", ".join(map(str, dict.fromkeys(r["architectures"] for r in mine)))
        lines += [f"\n{table}, {counts} architectures per seed\n", *_HEAD]
        names = list(dict.fromkeys(r["score"] for r in mine))
        lines += [_line(name, [r for r in mine if r["score"] == name]) for name in names]
        whole = {r["score"]: r["whole_table"] for r in mine if r["seed"] == mine[0]["seed"] and "whole_table" in r}
        if whole:
            lines += [f"\n{table}, all {next(iter(whole.values()))['architectures']} architectures\n", *_HEAD]
            lines += [_line(name, [row]) for name, row in whole.items()]
    return "\n".join(lines)


def _line(name: str, found: Sequence[dict[str, Any]]) -> str:
    tau = [r["kendall"]["value"] for r in found]
    regret = ", ".join(f"{statistics.mean(r['regret'][i] for r in found):.2f}" for i in range(5))
    # sqrt_size is not above itself, and has no interval
    above = sum((r["above"]["sqrt_size"]["low"] or 0) > 0 for r in found)
    seconds = statistics.mean(r.get("cpu_seconds", 0) for r in found)
    return (
        f"| {name} | {statistics.mean(tau):.3f} ({min(tau):.3f} to {max(tau):.3f}) | {_mean(found, 'within_depth')} "
        f"| {_mean(found, 'spearman')} | {above} of {len(found)} | {regret} | {seconds:.1f} "
        f"| {sum(r.get('failed', 0) for r in found)} |"
    )


def _mean(found: Sequence[dict[str, Any]], key: str) -> str:
    values = [r[key]["value"] for r in found]
    return "-" if None in values else f"{statistics.mean(values):.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="folder of CIFAR-10 training images, one sub-folder per class")
    parser.add_argument("--macro", help="JSON of NAS-Bench-Macro")
    parser.add_argument("--cells", help="JSON of NAS-Bench-201")
    parser.add_argument("--columns", nargs="+", default=["cifar10-val", "cifar100-val", "imagenet-val"])
    parser.add_argument("--cell-count", type=positive, default=5, help="cells of the networks that are scored")
    parser.add_argument("--channels", type=positive, default=8, help="initial channels of these networks")
    parser.add_argument("--architectures", type=positive, default=200, help="number per table and seed")
    parser.add_argument("--batch", type=positive, default=64, help="images per score; zico splits them in two")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="for architectures, weights, images")
    parser.add_argument("--resamples", type=positive, default=1000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lookups.jsonl"))
    parser.add_argument("--summary", action="store_true", help="only print the rows of --out as Markdown")
    args = parser.parse_args(argv)
    if args.summary:
        print(summary(rows(args.out)))
        return
    if not args.images or not (args.macro or args.cells):
        parser.error("give --images, and --macro or --cells")
    run(args)


if __name__ == "__main__":
    main()
