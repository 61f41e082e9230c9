"""A synthetic run directory with every file of a finished run."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from nasfast.indicators.rank import rank
from nasfast.indicators.table import IndicatorTable
from nasfast.search import Limits, equal_cost_random, pareto_front, save_candidates, search_table
from nasfast.spaces import SearchSpace, mobilenet_v2


def write_run(folder, space: SearchSpace, *, max_macs: float) -> None:
    """Every file of a run in `folder`, made up but of the right form."""
    rng = random.Random(0)
    space.save(folder / "space.yaml")
    (folder / "config.yaml").write_text("method: dinas\nseed: 0\nsearch:\n  max_macs: 475000000.0\n")
    environment = {"python": "3.11.7", "torch": "2.13.0", "device": "cpu", "threads": 2, "isa": ["avx2", "fma"]}
    (folder / "environment.json").write_text(json.dumps(environment))

    lines = []
    for stage, steps, best in (("supernet", 900, 0.4), ("retrain/best", 600, 0.75), ("retrain/random", 600, 0.71)):
        for step in range(0, steps, 3):
            done = step / steps
            lines.append(
                {
                    "stage": stage,
                    "step": step,
                    "epoch": step // 100,
                    "lr": 0.05 * (1 + math.cos(math.pi * done)),
                    "loss": 2.3 - 2.2 * best * (1 - math.exp(-4 * done)) + rng.gauss(0, 0.07),
                    "top1": None if step % 2 else best * (1 - math.exp(-4 * done)) + rng.gauss(0, 0.03),
                    "images_per_s": rng.gauss(1500, 40),
                }
            )
            if step % 99 == 0:
                top1 = best * (1 - math.exp(-4 * done))
                evaluation = {"eval_top1": top1, "eval_top5": min(1, top1 + 0.2), "eval_loss": 2.3 - 2.1 * top1}
                lines.append({"stage": stage, "step": step, **evaluation})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    block = tuple({c: abs(rng.gauss(0.6, 0.2)) for c in layer.options if c >= 0} for layer in space.layers)
    layer = tuple(None if u.indicator_choice is None else abs(rng.gauss(0.9, 0.15)) for u in space.layers)
    table = IndicatorTable(space, block, layer, {"method": "dinas"})
    table.save(folder / "indicators.json")

    found = search_table(table, space, max_macs=max_macs)
    front = pareto_front(table, space)
    save_candidates(folder / "archs.json", space, found, limits=Limits(max_macs=max_macs), pareto=front)
    for name, arch, top1 in (
        ("best", found[0].arch, 0.7512),
        ("random", equal_cost_random(space, rng, found[0].arch), 0.7103),
        ("random-2", equal_cost_random(space, rng, found[0].arch), 0.7003),
        ("random-3", equal_cost_random(space, rng, found[0].arch), 0.7203),
    ):
        target = folder / "retrain" / name
        target.mkdir(parents=True)
        cost = space.cost(arch)
        result = {"arch": list(arch), "macs": cost.macs, "params": cost.params, "top1": top1, "top5": 0.92}
        right = np.random.default_rng(len(name)).permutation(10_000) < round(10_000 * top1)
        result |= {"images": len(right), "correct": np.packbits(right).tobytes().hex(), "ranks": 1}
        (target / "result.json").write_text(json.dumps({**result, "loss": 1.0, "epochs": 6, "seconds": 812.3}))

    archs = [tuple(rng.choice(u.options) for u in space.layers) for _ in range(60)]
    accuracies = {a: 70 + 3 * table.score(a) + rng.gauss(0, 2) for a in archs}
    rank(accuracies, table, space, resamples=50).save(folder / "rank.json")


@pytest.fixture(scope="session")
def make_run():
    return write_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo_run")
    write_run(folder, mobilenet_v2(), max_macs=520e6)
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    """A copy of the finished run, which a test may change."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))
