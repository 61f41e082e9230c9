"""What measured accuracies add to a table of scores, in lookups of trained accuracies; nothing is trained.

A draw takes N random architectures of NAS-Bench-Macro with their accuracies, to which normal noise may be added, and
refines a table by them (`nasfast.indicators.refine.refine`). Kendall's tau of the given and of the refined table is
over the other architectures; the regret is the accuracy lost by the favourite of either among all architectures under
a budget of MACs. The tables are the baseline `sqrt_size` and those that `bench_ranking` left in its file of results:
each draw takes the next seed. `--summary` prints the means over draws as Markdown.

    python -m benchmarks.bench_refine --accuracies nas_bench_macro.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from benchmarks import bench_ranking
from benchmarks.harness import positive, provenance
from nasfast.indicators.accuracies import MIN_ARCHITECTURES, read_accuracies
from nasfast.indicators.refine import refine
from nasfast.indicators.structure import structure_table
from nasfast.indicators.table import IndicatorTable
from nasfast.settings.supernet import METHODS
from nasfast.spaces import Arch, SearchSpace, nas_bench_macro

OUT = Path(__file__).parent / "results" / "refine_nas_bench_macro.jsonl"
PRIORS = {
    "sqrt_size": None,
    "before training: beta_gradient": ("initial-orthogonal", "beta_gradient", 0.0),
    "default: path_loss": ("default", "path_loss", 0.0),
    "default: path_loss + structure": ("default", "path_loss", METHODS["dinas"].structure),
}
"""Name -> (supernet, score, weight of structure) of the rows of `bench_ranking`; None is the baseline itself."""
_BUDGETS = (0.10, 0.25, 0.50, 0.75, 1.00)


def tables(path: Path, name: str, space: SearchSpace) -> list[IndicatorTable]:
    """The tables of one prior, one for each seed in the file."""
    wanted = PRIORS[name]
    if wanted is None:
        return [structure_table(space, "sqrt_size")]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [
        IndicatorTable.of_rows(space, [{int(c): v for c, v in row.items()} for row in r["table"]], {})
        for r in rows
        if (r["name"], r["score"], r["structure"]) == wanted
    ]
    if not found:
        raise ValueError(f"{path} has no table of {name}: run benchmarks.bench_ranking first")
    return found


class Lookup:
    """The architectures of known accuracy, as arrays.

    Attributes:
        archs: the architectures.
        accuracies: (n,) their accuracies.
    """

    def __init__(self, truth: Mapping[Arch, float], space: SearchSpace) -> None:
        self.archs = sorted(truth)
        self.accuracies = np.array([truth[arch] for arch in self.archs])
        macs = np.array([space.cost(arch).macs for arch in self.archs])
        self._values = np.array(self.archs).T
        self._under = [macs <= budget for budget in np.quantile(macs, _BUDGETS, method="inverted_cdf")]

    def scores(self, table: IndicatorTable) -> np.ndarray:
        """(n,) scores; every layer has the values 0, 1, 2."""
        rows = zip(table.scores, self._values, strict=True)
        return sum(np.array([row[c] for c in sorted(row)])[values] for row, values in rows)

    def regrets(self, scores: np.ndarray) -> list[float]:
        """For each budget the accuracy lost by the favourite."""
        known = [(self.accuracies[under], scores[under]) for under in self._under]
        return [float(accuracies.max() - accuracies[mine.argmax()]) for accuracies, mine in known]


def draw(table: IndicatorTable, known: Lookup, count: int, noise: float, seed: int) -> dict[str, Any]:
    """Refine a table by `count` accuracies, and compare both tables with the true accuracies."""
    rng = np.random.default_rng([seed, count])
    chosen = rng.choice(len(known.archs), count, replace=False)
    measured = known.accuracies[chosen] + noise * rng.standard_normal(count)
    start, found, refined = time.process_time(), None, table
    if count >= MIN_ARCHITECTURES:
        sample = {known.archs[i]: float(accuracy) for i, accuracy in zip(chosen, measured, strict=True)}
        found = refine(table, sample, resamples=100)
        refined = found.table
    row = {"seconds": round(time.process_time() - start, 3), "used": found is not None and found.used}
    rest = np.setdiff1d(np.arange(len(known.archs)), chosen)
    for key, predictor in (("default", table), ("refined", refined)):
        scores = known.scores(predictor)
        row[f"{key}_tau"] = kendalltau(scores[rest], known.accuracies[rest]).statistic
        row[f"{key}_regret"] = known.regrets(scores)
    if found is not None:
        row["cross_validated_tau"] = found.refined.value
    return row


def run(args: argparse.Namespace) -> None:
    space = nas_bench_macro()
    known = Lookup(read_accuracies(args.accuracies, space), space)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as file:
        head = {"provenance": provenance(), "architectures": len(known.archs), "draws": args.draws}
        file.write(json.dumps(head) + "\n")
        for name in args.priors:
            priors = tables(args.tables, name, space)
            for noise in args.noise:
                for count in args.counts:
                    rows = [draw(priors[seed % len(priors)], known, count, noise, seed) for seed in range(args.draws)]
                    form = {"prior": name, "seeds": len(priors), "noise": noise, "count": count, **columns(rows)}
                    file.write(json.dumps(form) + "\n")
                    file.flush()
                    print(f"{name}, noise {noise}, N {count}: gain {statistics.mean(form['gain']):+.3f}", flush=True)


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """Each figure as the list of its values over draws, and the gain of tau."""
    form: dict[str, list] = {key: [row[key] for row in rows] for key in rows[0]}
    gain = [row["refined_tau"] - row["default_tau"] for row in rows]
    return {key: _rounded(values) for key, values in {**form, "gain": gain}.items()}


def _rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded(v) for v in values]
    return round(values, 4) if isinstance(values, float) else values


def summary(path: Path) -> str:
    """Markdown with the means over draws."""
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    lines = [
        "| table | noise | N | used | tau: as it is | refined | gain: mean (worst to best) | draws that lose over 0.01 "
        "| cross-validated minus true tau | mean regret: as it is | refined |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        mean = {key: statistics.mean(r[key]) for key in ("default_tau", "refined_tau", "gain")}
        regret = {key: statistics.mean(map(statistics.mean, r[f"{key}_regret"])) for key in ("default", "refined")}
        honest = "-"
        if "cross_validated_tau" in r:
            pairs = zip(r["cross_validated_tau"], r["refined_tau"], r["used"], strict=True)
            errors = [cv - true for cv, true, used in pairs if used]
            honest = f"{statistics.mean(errors):+.3f}" if errors else "-"
        lines.append(
            f"| {r['prior']} | {r['noise']:g} | {r['count']} | {sum(r['used'])} of {len(r['used'])} "
            f"| {mean['default_tau']:.3f} | {mean['refined_tau']:.3f} "
            f"| {mean['gain']:+.3f} ({min(r['gain']):+.3f} to {max(r['gain']):+.3f}) "
            f"| {sum(g < -0.01 for g in r['gain'])} | {honest} | {regret['default']:.2f} | {regret['refined']:.2f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracies", help="trained accuracies of NAS-Bench-Macro, JSON")
    parser.add_argument("--tables", type=Path, default=bench_ranking.OUT, help="rows of bench_ranking")
    parser.add_argument("--priors", nargs="+", choices=PRIORS, default=list(PRIORS))
    parser.add_argument("--counts", type=positive, nargs="+", default=[8, 16, 32, 64, 128, 256], help="values of N")
    parser.add_argument(
        "--noise", type=float, nargs="+", default=[0.0, 0.5, 1.5], help="standard deviations, percentage points"
    )
    parser.add_argument("--draws", type=positive, default=30)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--summary", action="store_true", help="only print the rows of --out as Markdown")
    args = parser.parse_args(argv)
    if not args.summary:
        if not args.accuracies:
            parser.error("give --accuracies")
        run(args)
    print(summary(args.out))


if __name__ == "__main__":
    main()
