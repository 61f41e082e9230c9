"""Searches of cells judged by trained accuracies: what each method chooses on NAS-Bench-201's space, looked up.

Each entry of the queue searches with one seed on CIFAR-10 images and writes one row: the chosen cell, its accuracies in
the table, its percentile among the cells of the table, its numbers of skip connections and removed edges, and the CPU
seconds of the search. Rows are appended to a JSON-lines file, and rows in the file are not computed again. A
differentiable search that was stopped continues from its last checkpoint below --work.

The table may have only some of the cells. A chosen cell is looked up under its own name; if that is missing, under
another name of the same network (an edge that carries nothing may be named in several ways). Otherwise the row says
that it was not looked up. Every row also has the accuracies of the cells in the table that differ in one edge.

    python -m benchmarks.bench_cell_search --images cifar10/train --table nas_bench_201.json --only nasi
    python -m benchmarks.bench_cell_search --summary --table nas_bench_201.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness import positive, provenance
from nasfast.cells import CellSpace, derive, nas_bench_201_space, search_cells
from nasfast.cells.search import WEIGHTS
from nasfast.data import DataConfig, FolderSource, Loader, make_loader
from nasfast.data.datasets import split_source
from nasfast.indicators.accuracies import read_accuracies
from nasfast.nasi.cells import CellMixture
from nasfast.nasi.config import NasiConfig
from nasfast.nasi.score import untrained
from nasfast.nasi.search import search as nasi_search
from nasfast.seeds import derive_seed
from nasfast.settings.cells import CellSearchConfig
from nasfast.spaces import Arch
from nasfast.spaces.cell_costs import NONE, SKIP_CONNECT
from nasfast.train.checkpoint import CheckpointFolder

OUT = Path(__file__).parent / "results" / "cell_search_nas_bench_201.jsonl"
COLUMNS = ("cifar10-val", "cifar10-test", "cifar100-val", "cifar100-test", "imagenet-val", "imagenet-test")
JUDGE = "cifar10-val"
"""The accuracy whose percentile is reported."""
BATCH = 64


@dataclass(frozen=True)
class Entry:
    """One method of the queue.

    Attributes:
        name: name in the rows.
        cells, channels: size of the network that is searched; that of the table has 15 and 16.
        changes: settings of `NasiConfig` or `CellSearchConfig`; None for random search.
        nasi: whether it is a search by NASI.
        epochs: passes over the training images of a differentiable search; for random search those of every candidate.
    """

    name: str
    cells: int
    channels: int
    changes: tuple[tuple[str, Any], ...] | None = ()
    nasi: bool = False
    epochs: int = 0

    @property
    def space(self) -> CellSpace:
        return nas_bench_201_space(cells=self.cells, channels=self.channels)


def _nasi(name: str, cells: int, channels: int, *changes: tuple[str, Any]) -> Entry:
    return Entry(name, cells, channels, (("mu", 1.0), *changes), nasi=True)


def _gradient(name: str, epochs: int, *changes: tuple[str, Any]) -> Entry:
    # five cells of 8 channels, because a step of 15 cells of 16 channels costs fourteen times as much
    return Entry(name, 5, 8, (("alpha_lr", 3e-3), *changes), epochs=epochs)


_BILEVEL = ("bilevel", True)
QUEUE = (
    _nasi("nasi", 15, 16),
    _nasi("nasi, small", 5, 8),
    _nasi("nasi, small, random labels", 5, 8, ("labels", "random")),
    _nasi("nasi, small, random images", 5, 8, ("images", "random")),
    _gradient("darts", 10, ("method", "darts"), _BILEVEL),
    _gradient("darts, second order", 4, ("method", "darts"), _BILEVEL, ("second_order", True)),
    _gradient("snas", 10, ("method", "snas")),
    _gradient("dsnas", 40, ("method", "dsnas")),
    _gradient("proxyless", 15, ("method", "proxyless")),
    Entry("random", 5, 8, None, epochs=1),
)


def loaders(args: argparse.Namespace, space: CellSpace, seed: int) -> tuple[Loader, Loader]:
    """Two halves of the images; both are shuffled and augmented as for training."""
    cfg = DataConfig(train=args.images, batch_size=BATCH, loader="cache", cache_dir=str(args.work / "cache"), workers=0)
    halves = split_source(FolderSource(args.images), 0.5, seed)
    first, second = (make_loader(cfg, half, resolution=space.resolution, seed=seed) for half in halves)
    return first, second


def search_nasi(args: argparse.Namespace, entry: Entry, seed: int) -> tuple[Arch, dict[str, Any]]:
    cfg = NasiConfig(**{"steps": args.steps, "seed": seed, **dict(entry.changes or ())})
    space = entry.space
    found = nasi_search(CellMixture(space, seed=seed), loaders(args, space, seed)[0], cfg)
    more = {"logits": _plain(found.logits[0]), "skipped": found.skipped, "settings": cfg.to_dict()}
    return derive(space, found.logits, "argmax"), more


def search_gradient(args: argparse.Namespace, entry: Entry, seed: int) -> tuple[Arch, dict[str, Any]]:
    cfg = CellSearchConfig(**{"seed": seed, **dict(entry.changes or ())})
    train_cfg = WEIGHTS.replace(epochs=args.epochs or entry.epochs)
    folder, space = args.work / f"{entry.name.replace(', ', '-').replace(' ', '-')}-s{seed}", entry.space
    newest = CheckpointFolder(folder / "checkpoints", "cells").paths()[-1:]
    before = int(newest[0].stem.rpartition("-")[2]) if newest else 0
    first, second = loaders(args, space, seed)
    torch.manual_seed(seed)
    result = search_cells(
        space, first, cfg, train_cfg, held_out=second if cfg.bilevel else None, run_dir=folder, resume=True
    )
    total = train_cfg.epochs * len(first)
    costs = result.costs.sum(0)
    mean = costs[:, 0] / np.maximum(costs[:, 2], 1)
    more = {
        "steps": total,
        "steps_here": total - before,
        "logits": _plain(torch.as_tensor(result.logits[0])),
        "edge_costs": np.round(result.edge_costs.mean(2), 5).tolist(),
        "op_costs": np.round(mean.mean(1), 6).tolist(),
        "settings": {**cfg.to_dict(), "epochs": train_cfg.epochs},
    }
    return derive(space, result.logits, "argmax"), more


def search_random(args: argparse.Namespace, entry: Entry, seed: int) -> tuple[Arch, dict[str, Any]]:
    """Train random cells for a short time until the CPU seconds are spent; the best on the other half is chosen."""
    space, rng, start = entry.space, np.random.default_rng(seed), time.process_time()
    first, second = loaders(args, space, seed)
    tried: dict[Arch, float] = {}
    while not tried or time.process_time() - start < args.seconds:
        arch = space.random(rng)
        if arch not in tried:
            network = untrained(space, arch, seed=derive_seed(seed, len(tried)))
            tried[arch] = short_accuracy(network, first, second, args.epochs or entry.epochs)
    best = max(tried, key=tried.__getitem__)
    return best, {"candidates": len(tried), "best": tried[best], "settings": {"epochs": entry.epochs}}


def short_accuracy(network: nn.Module, train: Loader, held: Loader, epochs: int) -> float:
    """Top-1 in [0, 1] on half of the other images after a short training with SGD and a cosine to 0."""
    sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, epochs * len(train))
    for epoch in range(epochs):
        for x, y in train.epoch(epoch):
            sgd.zero_grad()
            F.cross_entropy(network(x), y).backward()
            sgd.step()
            cosine.step()
    network.eval()
    batches = [batch for i, batch in enumerate(held.epoch(0)) if i % 2]
    with torch.no_grad():
        right = sum(int((network(x).argmax(1) == y).sum()) for x, y in batches)
    return right / sum(len(y) for _, y in batches)


class Judge:
    """The table of accuracies, and what it says of a cell."""

    def __init__(self, path: str, space: CellSpace) -> None:
        self.space = space
        self.accuracies = {column: read_accuracies(path, space, column=column) for column in COLUMNS}
        self.judge = self.accuracies[JUDGE]
        self._values = np.array(list(self.judge.values()))
        self._twins: dict[Any, Arch] = {}
        for arch in sorted(self.judge):
            self._twins.setdefault(network_of(space, arch), arch)

    def percentile(self, accuracy: float) -> float:
        """Share of the cells of the table that are not better, in percent."""
        return round(100 * float((self._values <= accuracy).mean()), 2)

    def row(self, arch: Arch) -> dict[str, Any]:
        """What the table says of a cell, and what can be said of one that it does not have."""
        ops = [self.space.ops[k] for k in arch]
        found = arch if arch in self.judge else self._twins.get(network_of(self.space, arch))
        near = [self.judge[other] for other in neighbours(self.space, arch) if other in self.judge]
        row: dict[str, Any] = {
            "arch": text_of(self.space, arch),
            "skips": ops.count(SKIP_CONNECT),
            "removed": ops.count(NONE),
            "looked_up": "no" if found is None else "itself" if found == arch else text_of(self.space, found),
            "accuracy": None if found is None else {c: table[found] for c, table in self.accuracies.items()},
            "percentile": None if found is None else self.percentile(self.judge[found]),
        }
        if near:
            middle = statistics.median(near)
            row["one_edge_away"] = {
                "cells": len(near),
                "accuracy": [min(near), round(middle, 3), max(near)],
                "percentile": [self.percentile(value) for value in (min(near), middle, max(near))],
            }
        return row


def text_of(space: CellSpace, arch: Arch) -> str:
    """A cell as NAS-Bench-201 writes it."""
    groups: dict[int, list[str]] = {}
    for edge, k in zip(space.cell.edges, arch, strict=True):
        op = space.ops[k]
        groups.setdefault(edge.target, []).append(f"{'nor_' * op.startswith('conv')}{op}~{edge.source}")
    return "+".join(f"|{'|'.join(group)}|" for group in groups.values())


def neighbours(space: CellSpace, arch: Arch) -> Iterator[Arch]:
    """The cells that differ in one edge."""
    for i, options in enumerate(space.candidates):
        yield from ((*arch[:i], k, *arch[i + 1 :]) for k in options if k != arch[i])


def network_of(space: CellSpace, arch: Arch) -> tuple[str, int]:
    """The same for cells that compute the same: what reaches the output as a formula, and the number of convolutions.

    An identity is its input, a missing edge and what nothing enters or leaves are left out, and terms of a sum have no
    order. The number tells a convolution that is used twice from two convolutions of one input.
    """
    terms: dict[int, list[tuple[str, frozenset[int]]]] = {0: [("x", frozenset())]}
    for node in range(1, 1 + space.cell.nodes):
        terms[node] = []
        for e in space.cell.into(node):
            op, inputs = space.ops[arch[e]], terms[space.cell.edges[e].source]
            if op == NONE or not inputs:
                continue
            if op == SKIP_CONNECT:
                terms[node] += inputs
                continue
            formula = f"{op}({_sum(inputs)})"
            used = frozenset({e} if op.startswith("conv") else ()).union(*(edges for _, edges in inputs))
            terms[node].append((formula, used))
    output = terms[space.cell.outputs[0]]
    return _sum(output), len(frozenset().union(*(edges for _, edges in output)))


def _sum(terms: Sequence[tuple[str, frozenset[int]]]) -> str:
    return "+".join(sorted(formula for formula, _ in terms))


def _plain(logits: torch.Tensor) -> list[list[float]]:
    return [[round(float(value), 6) for value in row] for row in logits]


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    judge = Judge(args.table, nas_bench_201_space())
    done = {(r["name"], r["seed"]) for r in rows(args.out)}
    for entry in QUEUE:
        for seed in args.seeds:
            if (entry.name, seed) in done or (args.only and entry.name not in args.only):
                continue
            search = search_random if entry.changes is None else search_nasi if entry.nasi else search_gradient
            wall, cpu = time.perf_counter(), time.process_time()
            arch, more = search(args, entry, seed)
            spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            row = {
                "name": entry.name,
                "seed": seed,
                "cells": entry.cells,
                "channels": entry.channels,
                **judge.row(arch),
                **{name: round(seconds, 1) for name, seconds in spent.items()},
                **more,
                "threads": args.threads,
                "provenance": provenance(),
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{entry.name}, seed {seed}: {_cells(row)}", flush=True)


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


def _cells(row: dict[str, Any]) -> str:
    accuracy = "not in the table" if row["accuracy"] is None else f"{row['accuracy'][JUDGE]:.2f}"
    percentile = "-" if row["percentile"] is None else f"{row['percentile']:.1f}"
    away = row.get("one_edge_away")
    near = "-" if away is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*away["accuracy"])
    # a search that was continued was timed for its last part only
    share = row.get("steps_here", 1) / row.get("steps", 1)
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
    parser.add_argument("--steps", type=positive, default=100, help="architectures that NASI samples")
    parser.add_argument("--epochs", type=positive, help="epochs of the other searches; default: those of the queue")
    parser.add_argument("--seconds", type=positive, default=600, help="CPU seconds of random search")
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
