"""Sums of zero-cost scores on cells of NAS-Bench-201: choose on some cells, judge on others.

    python -m benchmarks.bench_cell_scores score --images cifar10/train --table nas_bench_201.json
    python -m benchmarks.bench_cell_scores judge --table nas_bench_201.json

`score` appends one line per cell: scores of its untrained networks of two sizes. A third of the cells is for choosing.
No cell is among those that earlier sums were chosen or judged on. `judge` looks at all sums of ranks of these scores on
the cells for choosing, and compares the best of each family with `log_volume+synflow-ntk_q` on the other cells.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import ROOT, provenance
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.rank import kendall_tau
from nasfast.indicators.scores import NetworkEvidence, parts_of, rank_sum
from nasfast.indicators.structure import structure_scores
from nasfast.research.cells.space import CellSpace, nas_bench_201_space
from nasfast.research.zero_cost import ZERO_COST, ScoreError
from nasfast.research.zero_cost.az_nas import _entropies
from nasfast.runtime.files import write_atomic
from nasfast.spaces import Arch, format_arch

SCORES = ROOT / "benchmarks" / "results" / "cell_scores.jsonl"
OUT = ROOT / "benchmarks" / "results" / "cell_sums.json"
TODAY = "small log_volume+small synflow-small ntk_q"
AZ_NAS = "full expressivity+full progressivity+full trainability+macs"

_AZ_NAS = (("expressivity", "progressivity"), ("trainability",))
COMPUTED = {
    "small": (("log_volume",), ("synflow",), ("ntk_q",), *_AZ_NAS),
    "full": (("log_volume",), ("synflow",), *_AZ_NAS),
}
"""Scores, together if they come from one run, of networks of 5 cells of 8 channels and of 15 cells of 16."""


def _names(size: str) -> tuple[str, ...]:
    return tuple(f"{size} {name}" for name in itertools.chain(*COMPUTED[size]))


FAMILIES = {
    "of small networks": _names("small"),
    "of full networks": _names("full"),
    "of both": (*_names("small"), *_names("full")[2:]),
}
"""Every sum of any number of these; `ntk_q` has a minus, all others a plus."""


def spaces() -> dict[str, CellSpace]:
    return {"small": nas_bench_201_space(cells=5, channels=8), "full": nas_bench_201_space()}


def cells(path: Path, count: int) -> list[Arch]:
    """Cells in random order that no earlier choice or judgement saw."""
    truth = read_accuracies(path, spaces()["full"], column="cifar10-val")
    every = sorted(truth)
    chosen_on = set(random.Random(100).sample(every, 160))
    left = [arch for arch in every if arch not in chosen_on]
    judged_on = {arch for seed in range(3) for arch in random.Random(seed).sample(left, 300)}
    return random.Random(7).sample([arch for arch in left if arch not in judged_on], count)


def score(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    done = {row["arch"] for row in read_lines(args.scores)}
    loader = make_loader(
        DataConfig(train=str(args.images), batch_size=64), FolderSource(str(args.images)), resolution=32, seed=0
    )
    evidence = {name: NetworkEvidence(space, loader, seed=0) for name, space in spaces().items()}
    for place, arch in enumerate(cells(args.table, args.cells)):
        if format_arch(arch) in done:
            continue
        row: dict[str, Any] = {"arch": format_arch(arch), "choose": place % 3 == 0, "scores": {}, "cpu_s": {}}
        for size, names in COMPUTED.items():
            for group in names:
                start = time.process_time()
                try:
                    values = computed(group, evidence[size].network(arch), *evidence[size].batches[0])
                except ScoreError:
                    values = [None] * len(group)
                row["scores"] |= {f"{size} {name}": value for name, value in zip(group, values, strict=True)}
                row["cpu_s"][size + " " + " ".join(group)] = round(time.process_time() - start, 3)
        with args.scores.open("a") as file:
            file.write(json.dumps(row) + "\n")


def computed(names: Sequence[str], network: nn.Module, images: Tensor, labels: Tensor) -> list[float]:
    if "progressivity" not in names:
        return [ZERO_COST[name](network, images, labels) for name in names]
    entropies = _entropies(network, images)
    return [sum(entropies), min(after - before for before, after in itertools.pairwise(entropies))]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Part:
    """Cells with their accuracies and scores; a cell without a score is lower than all others."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], space: CellSpace, truth: Mapping[Arch, float]) -> None:
        self.archs = [space.parse(row["arch"]) for row in rows]
        self.y = np.array([truth[arch] for arch in self.archs])
        macs = dict(zip(self.archs, structure_scores(space, "macs", self.archs), strict=True))
        self.parts: dict[str, dict[Arch, float]] = {"macs": macs}
        self.failed: dict[str, set[Arch]] = {"macs": set()}
        for name in rows[0]["scores"]:
            values = {arch: row["scores"][name] for arch, row in zip(self.archs, rows, strict=True)}
            lowest = min(v for v in values.values() if v is not None)
            self.parts[name] = {a: lowest - abs(lowest) - 1 if v is None else v for a, v in values.items()}
            self.failed[name] = {arch for arch, value in values.items() if value is None}
        rng = np.random.default_rng(0)
        self.resamples = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=2000)

    def values(self, name: str) -> np.ndarray:
        signs, names = zip(*parts_of(name), strict=True)
        total = rank_sum([self.parts[part] for part in names], signs)
        failed = set().union(*(self.failed[part] for part in names))
        return np.array([-1e9 if arch in failed else round(total[arch], 9) for arch in self.archs])

    def tau(self, name: str) -> float:
        return float(kendall_tau(self.values(name), self.y, np.ones((1, len(self.y))))[0])

    def interval(self, name: str, other: str | None = None) -> dict[str, float]:
        """tau, or its difference from that of another sum on the same resamples, with a 95 % interval."""
        weights = np.concatenate([np.ones((1, len(self.y)), dtype=int), self.resamples])
        taus = kendall_tau(self.values(name), self.y, weights)
        if other is not None:
            taus = taus - kendall_tau(self.values(other), self.y, weights)
        low, high = np.quantile(taus[1:], (0.025, 0.975))
        return {"value": round(float(taus[0]), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def sums(names: Sequence[str]) -> list[str]:
    found = []
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            ordered = sorted(chosen, key=lambda name: name.endswith("ntk_q"))
            text = "".join(("-" if name.endswith("ntk_q") else "+") + name for name in ordered)
            found.append(text.removeprefix("+"))
    return found


def judge(args: argparse.Namespace) -> None:
    space, rows = spaces()["full"], read_lines(args.scores)
    found: dict[str, Any] = {"provenance": provenance(), "columns": {}}
    choose = [row for row in rows if row["choose"]]
    others = [row for row in rows if not row["choose"]]
    truth = read_accuracies(args.table, space, column="cifar10-val")
    part, best = Part(choose, space, truth), {}
    for family, names in FAMILIES.items():
        taus = {name: part.tau(name) for name in sums(names)}
        ordered = sorted(taus, key=taus.__getitem__, reverse=True)
        best[family] = ordered[0]
        found[family] = {"looked_at": len(taus), "best": {name: round(taus[name], 4) for name in ordered[:5]}}
    found["today"] = round(part.tau(TODAY), 4)
    found["cells"] = {"choose": len(choose), "judge": len(others)}
    for column in ("cifar10-val", "cifar100-val", "imagenet-val"):
        judged = Part(others, space, read_accuracies(args.table, space, column=column))
        names = dict.fromkeys([TODAY, *best.values(), AZ_NAS, *(judged.parts if column == "cifar10-val" else ())])
        found["columns"][column] = [
            {"sum": name, "tau": judged.interval(name), "above_today": judged.interval(name, TODAY)} for name in names
        ]
    found["failed"] = {name: sum(row["scores"][name] is None for row in rows) for name in rows[0]["scores"]}
    found["cpu_s_per_cell"] = {
        name: round(sum(row["cpu_s"][name] for row in rows) / len(rows), 3) for name in rows[0]["cpu_s"]
    }
    found["cpu_s"] = round(sum(sum(row["cpu_s"].values()) for row in rows))
    write_atomic(args.out, (json.dumps(found, indent=1) + "\n").encode())
    print(json.dumps(found, indent=1))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("score", "judge"))
    parser.add_argument("--images", type=Path, help="score: folder of CIFAR-10's training images")
    parser.add_argument("--table", type=Path, required=True, help="JSON of NAS-Bench-201")
    parser.add_argument("--cells", type=int, default=600, help="score: number of cells")
    parser.add_argument("--scores", type=Path, default=SCORES)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    {"score": score, "judge": judge}[args.part](args)


if __name__ == "__main__":
    main()
