"""Zero-cost scores and structural baselines against tables of trained accuracies, without any training.

For each table and seed, every score of single networks is computed for the same random architectures, each as a network
with PyTorch's initialisation, as `nasfast rank --images` does. `nasfast.indicators.rank.rank` compares the scores with
the trained accuracies and with the baselines. Each row is appended to a JSON-lines file as soon as it is finished; rows
in the file are not computed again. `--summary` prints the means over seeds as Markdown.

    python -m benchmarks.bench_lookups --images cifar10/train --macro nas_bench_macro.json --cells nas_bench_201.json
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness import positive, provenance
from nasfast.cells import nas_bench_201_space
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.rank import PredictorReport, kendall_tau, rank
from nasfast.indicators.scores import NetworkEvidence, parts_of, score_networks, summed
from nasfast.indicators.structure import baselines, structure_scores
from nasfast.indicators.zero_cost import ZERO_COST
from nasfast.spaces import Arch, ArchSpace, nas_bench_macro

SUMS = ("log_volume+synflow", "log_volume+synflow-ntk_q", "naswot+synflow")
"""Sums of ranks. The first was chosen on the cells of `CHOSEN_ON`, the second is the same with a score of others."""
SCORES = (*ZERO_COST, *SUMS)
CHOSEN_ON = (100, 160)
"""Seed and size of the sample of cells on which `log_volume` and its sum were chosen; no other sample has these."""


class Task(NamedTuple):
    """A table of accuracies.

    Attributes:
        name: name in the rows.
        path, column: where its accuracies are.
        space: space of the architectures.
        truth: architecture -> accuracy, without those that scores were chosen on.
    """

    name: str
    path: str
    column: str | None
    space: ArchSpace
    truth: dict[Arch, float]


def tasks(args: argparse.Namespace) -> list[Task]:
    found = []
    if args.macro:
        # the networks with the published accuracies have ReLU
        space = nas_bench_macro().replace(activation="relu")
        found.append(Task("nas_bench_macro", args.macro, None, space, read_accuracies(args.macro, space)))
    if args.cells:
        space = nas_bench_201_space(cells=args.cell_count, channels=args.channels)
        for column in args.columns:
            truth = read_accuracies(args.cells, space, column=column)
            seen = set(sampled(truth, CHOSEN_ON[1], CHOSEN_ON[0])) if len(truth) > 2 * CHOSEN_ON[1] else set()
            left = {arch: accuracy for arch, accuracy in truth.items() if arch not in seen}
            found.append(Task(f"nas_bench_201 {column}", args.cells, column, space, left))
    return found


class Scored(NamedTuple):
    """A score of architectures, those that have none, and its CPU seconds."""

    scores: dict[Arch, float]
    failed: set[Arch]
    seconds: float


def evidence_of(args: argparse.Namespace, space: ArchSpace, seed: int) -> NetworkEvidence:
    """Untrained networks of a space, and augmented training images."""
    cfg = DataConfig(train=args.images, batch_size=args.batch)
    return NetworkEvidence(space, make_loader(cfg, FolderSource(args.images), resolution=32, seed=seed), seed=seed)


def sampled(truth: dict[Arch, float], count: int, seed: int) -> list[Arch]:
    return random.Random(seed).sample(sorted(truth), min(count, len(truth)))


def scored(
    evidence: NetworkEvidence, name: str, archs: Sequence[Arch], kept: dict[str, Scored]
) -> tuple[dict[Arch, float], dict[str, float]]:
    """The scores, the CPU seconds with making the networks, and how many have no score; `kept` has those of parts."""
    parts = [part for _, part in parts_of(name)]
    for part in parts:
        if part not in kept:
            start = time.process_time()
            scores, failed = score_networks(part, evidence, archs)
            kept[part] = Scored(scores, set(failed), time.process_time() - start)
    found = [kept[part] for part in parts]
    failed_any = set().union(*(part.failed for part in found))
    seconds = round(sum(part.seconds for part in found), 2)
    total = summed(name, [part.scores for part in found], failed_any)
    return total, {"cpu_seconds": seconds, "failed": len(failed_any)}


def row_of(row: PredictorReport) -> dict[str, Any]:
    """The figures of a report: tau, tau within equal depth, Spearman and regrets."""
    return {
        "kendall": asdict(row.kendall),
        "within_depth": asdict(row.kendall_within_depth),
        "spearman": asdict(row.spearman),
        "regret": row.regret,
    }


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["table"], r["score"], r["seed"]) for r in rows(args.out)}
    settings = {"batch": args.batch, "cells": args.cell_count, "channels": args.channels, "threads": args.threads}
    for seed in args.seeds:
        # tables of one space have the same architectures and images, and so the same scores
        kept: dict[str, dict[str, Scored]] = {}
        for name, task in itertools.product(args.scores or SCORES, tasks(args)):
            missing = [n for n in (name, *baselines(task.space)) if (task.name, n, seed) not in done]
            if not missing:
                continue
            archs = sampled(task.truth, args.architectures, seed)
            truth = {arch: task.truth[arch] for arch in archs}
            evidence = evidence_of(args, task.space, seed)
            scores, cost = scored(evidence, name, archs, kept.setdefault(task.space.name, {}))
            report = rank(truth, scores, task.space, resamples=args.resamples, seed=seed)
            for row in (report.predictor, *report.baselines):
                own = name if row is report.predictor else row.name
                if own not in missing:
                    continue
                form = {"table": task.name, "score": own, "seed": seed, **row_of(row), **settings}
                if row is report.predictor:
                    form |= {"above": {key: asdict(estimate) for key, estimate in report.above.items()}, **cost}
                else:
                    # a baseline costs so little that the whole table is ranked, too
                    form["whole_table"] = whole(task, own)
                append(args.out, {**form, "architectures": report.architectures})
                done.add((task.name, own, seed))
            print(f"{task.name:28} {name:20} seed {seed}: tau {report.predictor.kendall}", flush=True)


def whole(task: Task, name: str) -> dict[str, Any]:
    """Kendall's tau of a baseline on all architectures of a table, without an interval."""
    truth = read_accuracies(task.path, task.space, column=task.column)
    values = structure_scores(task.space, name, truth)
    tau = kendall_tau(values, list(truth.values()), np.ones((1, len(truth))))[0]
    return {"architectures": len(truth), "tau": None if np.isnan(tau) else round(float(tau), 4)}


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
    "| score | tau: mean (lowest to highest) | 95 % interval, widest ends | within equal depth | Spearman "
    "| above sqrt_size in seeds | regret at 10, 25, 50, 75, 100 % of the MACs | CPU seconds | failed |",
    "|---|---|---|---|---|---|---|---|---|",
)


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Markdown with means over seeds by table and score, then tau of the baselines on all architectures."""
    lines = []
    for table in dict.fromkeys(r["table"] for r in found):
        mine = [r for r in found if r["table"] == table]
        counts = ", ".join(map(str, dict.fromkeys(r["architectures"] for r in mine)))
        lines += [f"\n{table}, {counts} architectures per seed\n", *_HEAD]
        names = list(dict.fromkeys(r["score"] for r in mine))
        lines += [_line(name, [r for r in mine if r["score"] == name]) for name in names]
        whole = {r["score"]: r["whole_table"] for r in mine if "whole_table" in r}
        if whole:
            taus = ", ".join(f"{name} {row['tau']:.3f}" for name, row in whole.items() if row["tau"] is not None)
            lines.append(f"\nall {next(iter(whole.values()))['architectures']} architectures: tau {taus}\n")
    return "\n".join(lines)


def _line(name: str, found: Sequence[dict[str, Any]]) -> str:
    regret = ", ".join(f"{statistics.mean(r['regret'][i] for r in found):.2f}" for i in range(5))
    # baselines are not compared with one another
    above = sum((r["above"]["sqrt_size"]["low"] or 0) > 0 for r in found if "above" in r)
    seconds = statistics.mean(r.get("cpu_seconds", 0) for r in found)
    return (
        f"| {name} | {_taus(found)} | {_mean(found, 'within_depth')} | {_mean(found, 'spearman')} "
        f"| {above} of {len(found)} | {regret} | {seconds:.1f} | {sum(r.get('failed', 0) for r in found)} |"
    )


def _taus(found: Sequence[dict[str, Any]]) -> str:
    """Two columns: the mean with the lowest and the highest value, and the widest ends of the intervals."""
    every = [r["kendall"] for r in found]
    if any(tau["value"] is None for tau in every):
        return "- | -"
    values, low, high = [tau["value"] for tau in every], min(t["low"] for t in every), max(t["high"] for t in every)
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f}) | {low:.3f} to {high:.3f}"


def _mean(found: Sequence[dict[str, Any]], key: str) -> str:
    values = [r[key]["value"] for r in found]
    return "-" if None in values else f"{statistics.mean(values):.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="folder of CIFAR-10 training images, one sub-folder per class")
    parser.add_argument("--macro", help="JSON of NAS-Bench-Macro")
    parser.add_argument("--cells", help="JSON of NAS-Bench-201")
    parser.add_argument("--columns", nargs="+", default=["cifar10-val", "cifar100-val", "imagenet-val"])
    parser.add_argument("--cell-count", type=positive, default=15, help="cells of the networks that are scored")
    parser.add_argument("--channels", type=positive, default=16, help="initial channels of these networks")
    parser.add_argument("--scores", nargs="+", help=f"beside the baselines; default: {', '.join(SCORES)}")
    parser.add_argument("--architectures", type=positive, default=200, help="number per table and seed")
    parser.add_argument("--batch", type=positive, default=32, help="images per score; zico splits them in two")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="for architectures, weights, images")
    parser.add_argument("--threads", type=positive, default=1)
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
