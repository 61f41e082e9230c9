"""Searches of cells judged by trained accuracies: what each method chooses on NAS-Bench-201's space, looked up.

Each entry of the queue searches with one seed on CIFAR-10 images and writes one row: the chosen cell, its accuracies in
the table, its percentile among the cells of the table, its numbers of skip connections and removed edges, how well the
method's scores of candidates rank all cells of the table, and the CPU seconds of the search. Rows are appended to a
JSON-lines file, and rows in the file are not computed again. A differentiable search that was stopped continues from
its last checkpoint below --work, and entries of NASI that differ in the penalty alone share one sample of
architectures there.

The table may have only some of the cells. A chosen cell is looked up under its own name; if that is missing, under
another name of the same network (an edge that carries nothing may be named in several ways). Otherwise the row says
that it was not looked up. Every row also has the accuracies of the cells in the table that differ in one edge.

    python -m benchmarks.bench_cell_search --images cifar10/train --table nas_bench_201.json --only nasi
    python -m benchmarks.bench_cell_search --summary
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cell_judge import JUDGE, Judge
from benchmarks.cell_searches import SEARCHES, Entry
from benchmarks.harness import positive, provenance
from nasfast.cells import nas_bench_201_space
from nasfast.spaces.cell_costs import NONE

OUT = Path(__file__).parent / "results" / "cell_search_nas_bench_201.jsonl"


def _gradient(name: str, epochs: int, *changes: tuple[str, Any]) -> Entry:
    # five cells of 8 channels, because a step of 15 cells of 16 channels costs fourteen times as much
    return Entry(name, "gradient", changes=(("alpha_lr", 1e-2), *changes), epochs=epochs, batch=16)


def _nasi(name: str, *changes: tuple[str, Any]) -> Entry:
    return Entry(name, "nasi", changes=(("steps", 50), *changes), batch=16)


_BILEVEL = ("bilevel", True)
QUEUE = (
    *(
        Entry(f"{score} of 100 random cells", "score", score=score)
        for score in ("log_volume+synflow-ntk_q", "log_volume+synflow")
    ),
    _gradient("dsnas", 1, ("method", "dsnas")),
    Entry("BN indicators", "norms", epochs=1, batch=16),
    _gradient("snas", 1, ("method", "snas")),
    _gradient("proxyless", 1, ("method", "proxyless")),
    _nasi("nasi, 50 x 16"),
    _nasi("nasi, 50 x 16, mu 2, median", ("mu", 2.0), ("nu", 0.5)),
    _gradient("darts", 1, ("method", "darts"), _BILEVEL),
    Entry("random", "random", epochs=1, batch=16),
    _nasi("nasi, 50 x 16, random labels", ("labels", "random")),
    _nasi("nasi, 50 x 16, random images", ("images", "random")),
    _gradient("darts, second order", 1, ("method", "darts"), _BILEVEL, ("second_order", True)),
    Entry("nasi, small", "nasi"),
    Entry("nasi", "nasi", 15, 16),
)
"""Cheap methods first."""


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    judge = Judge(args.table, nas_bench_201_space())
    done = {(r["name"], r["seed"]) for r in rows(args.out)}
    for seed in args.seeds:
        for entry in QUEUE:
            if (entry.name, seed) in done or (args.only and entry.name not in args.only):
                continue
            wall, cpu = time.perf_counter(), time.process_time()
            arch, more = SEARCHES[entry.kind](args, entry, seed)
            spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            tables = {"logits": more["logits"], **more.get("tables", {})} if "logits" in more else {}
            row = {
                "name": entry.name,
                "seed": seed,
                "cells": entry.cells,
                "channels": entry.channels,
                **judge.row(arch),
                **{name: round(seconds, 1) for name, seconds in spent.items()},
                **more,
                **({"operations": best_operations(judge, more["logits"])} if "logits" in more else {}),
                "tau": {name: judge.table(scores) for name, scores in tables.items()},
                "threads": args.threads,
                "provenance": provenance(),
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{entry.name}, seed {seed}: {_cells(row)}", flush=True)


def best_operations(judge: Judge, logits: list[list[float]]) -> dict[str, Any]:
    """The cell of the best operation of every edge if no edge may be removed."""
    none = judge.space.ops.index(NONE)
    arch = tuple(max((k for k in range(len(row)) if k != none), key=row.__getitem__) for row in logits)
    row = judge.row(arch)
    return {key: row[key] for key in ("arch", "looked_up", "accuracy", "percentile")}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a line per row, and the median percentile of each method."""
    lines = [
        f"| method | network | seed | {JUDGE} | percentile | one edge away | skips, removed | CPU s | cell |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {r['name']} | {r['cells']} x {r['channels']} | {r['seed']} | {_cells(r)} |" for r in found]
    for name in dict.fromkeys(r["name"] for r in found):
        known = [r["percentile"] for r in found if r["name"] == name and r["percentile"] is not None]
        count = sum(r["name"] == name for r in found)
        middle = f"{statistics.median(known):.1f}" if known else "unknown"
        lines.append(f"\n{name}: median percentile {middle}, {len(known)} of {count} cells are in the table")
    return "\n".join(lines)


def details(found: Sequence[dict[str, Any]]) -> str:
    """Markdown about the searches that score candidates: how the scores rank, and how the local costs went.

    Costs are means over the edges in the first and the last quarter of the search, on the images that the logits learn
    from. The last column counts the edges whose chosen operation has the lowest mean cost of the whole search; `none`
    costs 0.
    """
    lines = [
        "| method | seed | tau of cells, of an edge's candidates | percentile without `none` "
        "| skips, removed on the way | cost, first and last quarter | lowest cost chosen |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        if "tau" not in row or not row["tau"]:
            continue
        tau = "; ".join(f"{name} {t['cells']:+.2f}, {t['candidates']:+.2f}" for name, t in row["tau"].items())
        percentile = row["operations"]["percentile"]
        kept = "-" if percentile is None else f"{percentile:.1f}"
        way = "; ".join(f"{k}: {v[0]}, {v[1]}" for k, v in row.get("shorter", {}).items()) or "-"
        lines.append(f"| {row['name']} | {row['seed']} | {tau} | {kept} | {way} | {_costs(row)} |")
    return "\n".join(lines)


def _costs(row: dict[str, Any]) -> str:
    if "edge_costs" not in row:
        return "- | -"
    which = int(row["settings"]["bilevel"])
    every = [sum(record[which]) / len(record[which]) for record in row["edge_costs"]]
    quarter = max(1, len(every) // 4)
    first, last = (sum(part) / quarter for part in (every[:quarter], every[-quarter:]))
    space = nas_bench_201_space()
    lowest = [min(range(len(costs)), key=costs.__getitem__) for costs in row["op_costs"][which]]
    agree = sum(a == b for a, b in zip(space.parse(row["arch"]), lowest, strict=True))
    return f"{first:+.4f}, {last:+.4f} | {agree} of {len(lowest)}"


def _cells(row: dict[str, Any]) -> str:
    accuracy = "not in the table" if row["accuracy"] is None else f"{row['accuracy'][JUDGE]:.2f}"
    percentile = "-" if row["percentile"] is None else f"{row['percentile']:.1f}"
    away = row.get("one_edge_away")
    near = "-" if away is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*away["accuracy"])
    # a search that was continued was timed for its last part only
    share = row["steps_here"] / row["steps"] if "steps_here" in row else 1
    seconds = f"{row['cpu_s'] / share:.0f}" if share > 0 else "?"
    return f"{accuracy} | {percentile} | {near} | {row['skips']}, {row['removed']} | {seconds} | `{row['arch']}`"


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
        print(f"{summary(rows(args.out))}\n\n{details(rows(args.out))}")
        return
    if None in (args.images, args.table):
        parser.error("give --images and --table, or --summary")
    run(args)


if __name__ == "__main__":
    main()
