"""Searches of cells judged by trained accuracies: what each method chooses on NAS-Bench-201's space, looked up.

Each entry of the queue searches with one seed on CIFAR-10 images and writes one row: the chosen cell, its accuracies in
the table, its percentile among the cells of the table, its numbers of skip connections and removed edges, how well the
method's scores of candidates rank all cells of the table, what its local costs predict, and the CPU seconds of the
search. `cell_searches` has the searches, `cell_judge` the table, `cell_tables` the summary. Rows are appended to a
JSON-lines file, and rows in the file are not computed again. A differentiable search that was stopped continues from
its last checkpoint below --work, and entries of NASI that differ in the penalty alone share one sample of
architectures there.

The table may have only some of the cells. A chosen cell is looked up under its own name; if that is missing, under
another name of the same network (an edge that carries nothing may be named in several ways). Otherwise the row says
that it was not looked up. Every row also has the accuracies of the cells in the table that differ in one edge, and as
`in_table` the accuracy of the cell itself or, if the table lacks it, of the cell of the table that the scores prefer.

    python -m benchmarks.bench_cell_search --images cifar10/train --table nas_bench_201.json --only nasi
    python -m benchmarks.bench_cell_search --summary
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cell_judge import Judge
from benchmarks.cell_searches import SEARCHES, Entry
from benchmarks.cell_tables import line, summary
from benchmarks.harness import positive, provenance
from nasfast.cells import nas_bench_201_space
from nasfast.data import FolderSource
from nasfast.spaces.cell_costs import NONE

OUT = Path(__file__).parent / "results" / "cell_search_nas_bench_201.jsonl"


def _gradient(name: str, epochs: int, method: str, **changes: Any) -> Entry:
    # five cells of 8 channels, because a step of 15 cells of 16 channels costs fourteen times as much
    settings = (("alpha_lr", 1e-2), ("method", method), *changes.items())
    return Entry(name, "gradient", changes=settings, epochs=epochs, batch=16)


def _nasi(name: str, **changes: Any) -> Entry:
    return Entry(name, "nasi", changes=(("steps", 50), *changes.items()), batch=16)


def _score(score: str, **changes: Any) -> Entry:
    name = ", ".join((f"{score} of 100 random cells", *(f"{value} {what}" for what, value in changes.items())))
    return Entry(name, "score", score=score, changes=tuple(changes.items()))


_SUM = "log_volume+synflow-ntk_q"
QUEUE = (
    # half a CPU minute to one and a half, because steps of some methods cost several times as much as those of others
    _gradient("dsnas", 4, "dsnas"),
    _gradient("dsnas, two levels", 2, "dsnas", bilevel=True),
    _gradient("darts, two levels", 1, "darts", bilevel=True),
    _gradient("darts, one level", 1, "darts"),
    _gradient("proxyless", 1, "proxyless"),
    _gradient("snas", 1, "snas"),
    Entry("BN indicators", "norms", epochs=1, batch=16),
    # six CPU seconds a cell, so that a minute, the time of DARTS on one level, is enough for ten
    Entry("random", "random", changes=(("steps", 150), ("held_out", 80)), batch=16),
    _score("params"),
    _score(_SUM),
    _score(_SUM, labels="random"),
    _score(_SUM, images="random"),
    _nasi("nasi, 50 x 16"),
    _nasi("nasi, 50 x 16, random labels", labels="random"),
    _nasi("nasi, 50 x 16, random images", images="random"),
    _nasi("nasi, 50 x 16, mu 2, median", mu=2.0, nu=0.5),
    Entry("nasi, small", "nasi"),
    _gradient("darts, second order", 1, "darts", bilevel=True, second_order=True),
    Entry("nasi", "nasi", 15, 16),
)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    judge = Judge(args.table, nas_bench_201_space())
    images = len(FolderSource(args.images))
    done = {(r["name"], r["seed"]) for r in rows(args.out)}
    for seed in args.seeds:
        for entry in QUEUE:
            if (entry.name, seed) in done or (args.only and entry.name not in args.only):
                continue
            wall, cpu = time.perf_counter(), time.process_time()
            arch, more = SEARCHES[entry.kind](args, entry, seed)
            spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            row = {
                "name": entry.name,
                "seed": seed,
                "cells": entry.cells,
                "channels": entry.channels,
                "training_images": images,
                **judge.row(arch),
                **{name: round(seconds, 1) for name, seconds in spent.items()},
                **judged(judge, more),
                "threads": args.threads,
                "provenance": provenance(),
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{entry.name}, seed {seed}: {line(row)}", flush=True)


def judged(judge: Judge, more: dict[str, Any]) -> dict[str, Any]:
    """What a search says of itself, with what the table says of its scores in the place of long lists.

    `choices` has the cells that each table of scores chooses, `trajectory` the percentile of the cell of the table that
    the probabilities prefer, by record from before the search on, and `candidates` what is known of cells that were
    scored one by one.
    """
    more = dict(more)
    tables, scored = more.pop("tables", {}), more.pop("scored", None)
    if "logits" in more:
        tables = {"logits": more["logits"], **tables}
        more["tau"] = {name: judge.table(scores) for name, scores in tables.items()}
        more["choices"] = {rule: form for name, scores in tables.items() for rule, form in chosen(judge, name, scores)}
    if "probabilities" in more:
        logs = np.log(np.maximum(more.pop("probabilities"), np.finfo(float).tiny))
        more["trajectory"] = [judge.best(scores)["percentile"] for scores in logs]
    if scored is not None:
        more["candidates"] = {"all": len(scored), **judge.known(scored)}
    return more


def chosen(judge: Judge, name: str, scores: Sequence[Sequence[float]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cells of the best operation of every edge: if edges may be removed, and if none may be."""
    none = judge.space.ops.index(NONE)
    kept = [[-math.inf if k == none else value for k, value in enumerate(row)] for row in scores]
    for rule, values in ((name, scores), (f"{name}, without none", kept)):
        row = judge.row(tuple(max(range(len(of_edge)), key=of_edge.__getitem__) for of_edge in values))
        form = {key: row[key] for key in ("arch", "looked_up", "accuracy", "percentile")}
        yield rule, {**form, "in_table": judge.best(values)}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="folder of CIFAR-10 training images, one sub-folder per class")
    parser.add_argument("--table", help="JSON of NAS-Bench-201")
    parser.add_argument("--work", type=Path, default=Path("runs/cell_search"), help="folder of checkpoints")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON-lines file to which rows are appended")
    parser.add_argument("--only", nargs="*", help=f"methods: {', '.join(entry.name for entry in QUEUE)}")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=positive, help="epochs of the other searches; default: those of the queue")
    parser.add_argument("--candidates", type=positive, default=100, help="random cells that a score chooses from")
    parser.add_argument("--seconds", type=positive, default=60, help="CPU seconds of random search")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--summary", action="store_true", help="only print the rows of --out as Markdown")
    args = parser.parse_args(argv)
    if args.summary:
        print(summary(rows(args.out)))
        return
    if None in (args.images, args.table):
        parser.error("give --images and --table, or --summary")
    run(args)


if __name__ == "__main__":
    main()
