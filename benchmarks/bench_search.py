"""Times of the searches on the papers' spaces with random scores: top-10, Pareto front, sampling, evolution.

    python -m benchmarks.bench_search [--repeats 5] [--out FILE]

Prints JSON: seconds per call (median, 20 % and 80 % quantile over tables with different scores), and sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import seconds, write_json
from nasfast.indicators.table import IndicatorTable
from nasfast.measure.timing import summarise
from nasfast.search import Limits, SearchConfig, pareto_front, run_search, sample_under, top_k
from nasfast.spaces import SKIP, SearchSpace, mobilenet_v2, shufflenet_v2

CASES = (
    (mobilenet_v2(), Limits(max_macs=475e6)),
    (mobilenet_v2(), Limits(max_macs=600e6)),
    (mobilenet_v2(variant="bnnas"), Limits(max_macs=475e6)),
    (mobilenet_v2(variant="bnnas"), Limits(max_macs=475e6, max_params=5.2e6)),
    (shufflenet_v2(), Limits(max_macs=330e6)),
)
_SAMPLES = 100


def random_table(space: SearchSpace, seed: int) -> IndicatorTable:
    """A table of normally distributed scores around 1, like those of a trained supernet."""
    rng = random.Random(seed)
    block = tuple({c: rng.gauss(1.0, 0.2) for c in layer.options if c != SKIP} for layer in space.layers)
    layer = tuple(None if u.indicator_choice is None else rng.gauss(1.0, 0.2) for u in space.layers)
    return IndicatorTable(space, block, layer)


def bench(space: SearchSpace, limits: Limits, repeats: int) -> dict[str, Any]:
    """Measure one row: every search with one space and one limit, interleaved, on `repeats` tables."""
    times: dict[str, list[float]] = {"top_10": [], "pareto": [], "pareto_unlimited": [], "evolution": [], "sample": []}
    front_sizes, shortfalls, proven = [], [], True
    sample_under(space, random.Random(0), limits)  # builds the counts, which is needed once per space and limit
    for seed in range(repeats):
        table = random_table(space, seed)
        config = SearchConfig(
            method="evolution", top_k=1, max_macs=limits.max_macs, max_params=limits.max_params, seed=seed
        )
        elapsed, exact = seconds(lambda table=table: top_k(table, space, limits, k=10))
        times["top_10"].append(elapsed)
        proven &= all(candidate.optimal for candidate in exact)
        elapsed, front = seconds(lambda table=table: pareto_front(table, space, limits=limits))
        times["pareto"].append(elapsed)
        front_sizes.append(len(front))
        times["pareto_unlimited"].append(seconds(lambda table=table: pareto_front(table, space))[0])
        elapsed, evolved = seconds(lambda table=table, config=config: run_search(table, space, config))
        times["evolution"].append(elapsed)
        shortfalls.append(exact[0].score - evolved[0].score)
        rng = random.Random(seed)
        elapsed, _ = seconds(lambda rng=rng: [sample_under(space, rng, limits) for _ in range(_SAMPLES)])
        times["sample"].append(elapsed / _SAMPLES)
    return {
        "space": space.name,
        "repeats": repeats,
        "architectures": space.cardinality,
        **limits.maxima,
        "all_proven_optimal": proven,
        "front_points_median": statistics.median(front_sizes),
        "evolution_score_below_exact_median": statistics.median(shortfalls),
        **{name: summarise(values, "s") for name, values in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    rows = [bench(space, limits, args.repeats) for space, limits in CASES]
    print(json.dumps(rows, indent=1))
    if args.out:
        write_json(args.out, rows)


if __name__ == "__main__":
    main()
