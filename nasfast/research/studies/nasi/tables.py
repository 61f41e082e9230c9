"""The tables of the NASI study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import get_args

import numpy as np
import torch
from scipy import stats

from nasfast.indicators.rank import PredictorReport, RankReport
from nasfast.research.cells.space import CellSpace
from nasfast.research.nasi.search import Gates, NasiConfig, NasiResult, check_penalty
from nasfast.research.studies.nasi.config import MODES, NasiQuickConfig
from nasfast.research.studies.nasi.enumeration import DIRECTIONS, ClosedForm
from nasfast.research.studies.nasi.measure import (
    EXACT_IMAGES,
    ExactTraces,
    RandomCells,
    Searches,
    SearchKind,
    pearson,
    spearman,
)
from nasfast.research.studies.parts import Table
from nasfast.spaces import Arch, ArchSpace


def correlation_table(cells: RandomCells) -> Table:
    """How well Q, in every mode, and the number of parameters predict the accuracy of random cells."""
    q, params = np.array(cells.scores["standard"]), cells.params
    rows: list[tuple[str, ...]] = []
    for mode, values in cells.scores.items():
        correlations = (
            spearman(values, cells.accuracy),
            pearson(q, values),
            spearman(q, values),
            spearman(values, params),
        )
        extremes = (np.min(values), np.median(values), np.max(values))
        rows.append((f"Q, {mode}", *(f"{v:.3f}" for v in extremes), *(f"{c:.2f}" for c in correlations)))
    sizes = (f"{params.min():.0f}", f"{np.median(params):.0f}", f"{params.max():.0f}")
    rows.append(
        ("parameters", *sizes, f"{spearman(params, cells.accuracy):.2f}", "-", f"{spearman(params, q):.2f}", "-")
    )
    header = (
        "score",
        "smallest",
        "median",
        "largest",
        "Spearman with accuracy",
        "Pearson with standard",
        "Spearman with standard",
        "Spearman with parameters",
    )
    return Table("random cells: how well Q predicts accuracy", header, tuple(rows))


def searches_table(space: CellSpace, kinds: Sequence[SearchKind]) -> Table:
    """What the searches of every kind select."""
    rows = tuple(
        (
            kind.name,
            " ".join(f"{a:.3f}" for a in kind.accuracy),
            " ".join(f"{p:.2f}" for p in kind.percentile),
            f"{kind.percentile.mean():.2f}",
            space.format(kind.archs[0]),
        )
        for kind in kinds
    )
    edges = " ".join(e.name for e in space.cell.edges)
    header = ("search", "accuracy by seed", "percentile by seed", "mean", f"first cell, edges {edges}")
    return Table("searches", header, rows)


def moved_in_quick(space: CellSpace, kinds: Sequence[SearchKind]) -> Table:
    """`moved_table` of the searches without a penalty."""
    archs = {kind.name: kind.archs for kind in kinds}
    compared = {mode: archs["no penalty" + ("" if mode == "standard" else f", {mode}")] for mode in MODES}
    return moved_table(space, compared)


def exact_table(traces: ExactTraces, cfg: NasiQuickConfig) -> Table:
    """The rank correlations of the estimates with the exact trace."""
    found, full = traces.found, traces.found["trace_full"]
    estimates = {
        "trace_label": found["trace_label"],
        "q_sum": found["q_sum"],
        f"q_batch: the same {EXACT_IMAGES} images": found["q_batch"],
        f"q_batch: {cfg.repeats} x {cfg.images} images": traces.averaged,
        "parameters": traces.params,
    }
    rows = []
    for name, values in estimates.items():
        tau = stats.kendalltau(values, full).statistic
        of_logs = pearson(np.log(values), np.log(full))
        rows.append((name, f"{spearman(values, full):.2f}", f"{tau:.2f}", f"{of_logs:.2f}"))
    # the chain of the lower bound: sum_x |g_x|^2 <= 2 trace, and b |mean g|^2 <= sum_x |g_x|^2
    q_sum = np.array(found["q_sum"])
    loose = [np.median(q_sum / (2 * np.array(full))), np.median(EXACT_IMAGES * np.array(found["q_batch"]) / q_sum)]
    title = (
        f"{cfg.exact} cells: rank correlation with the exact trace of the kernel on {EXACT_IMAGES} images; medians of "
        f"sum |g_x|^2 over its bound 2 trace {loose[0]:.3f}, of b |mean g|^2 over its bound sum |g_x|^2 {loose[1]:.3f}"
    )
    return Table(title, ("estimate", "Spearman", "Kendall", "Pearson of logs"), tuple(rows))


def closed_form_table(found: ClosedForm) -> Table:
    """The closed form beside other directions."""
    rows = tuple((row.name, f"{row.cosine:.3f}", f"{row.expected_q:.4g}", str(row.place)) for row in found.rows)
    title = (
        f"one step from alpha_0 = 0, {len(found.q)} architectures: mean Q {float(found.q.mean()):.4g}, largest "
        f"{float(found.q.max()):.4g}; of {DIRECTIONS} random directions the best reaches {found.best_gain:.3f} "
        "of the closed form's first-order gain"
    )
    return Table(title, ("Delta", "cosine", "E[Q] at Delta of norm 1", "place of its argmax by Q"), rows)


def differing(a: Arch, b: Arch) -> int:
    """The number of values in which two architectures differ."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def moved_table(space: ArchSpace, chosen: Mapping[str, Sequence[Arch]]) -> Table:
    """How many values of the selected architectures differ between modes at one seed, and between seeds."""
    rows = []
    for mode, archs in chosen.items():
        pairs = [differing(a, b) for a, b in combinations(archs, 2)]
        rows.append((f"between seeds, {mode}", f"{np.mean(pairs):.2f}" if pairs else "-", str(len(pairs))))
    for a, b in combinations(chosen, 2):
        pairs = [differing(x, y) for x, y in zip(chosen[a], chosen[b], strict=True)]
        rows.append((f"{a} and {b}, same seed", f"{np.mean(pairs):.2f}", str(len(pairs))))
    chance = sum(1 - 1 / len(values) for values in space.options)
    rows.append(("two random architectures", f"{chance:.2f}", "-"))
    return Table(f"of {len(space)} choices, how many differ", ("", "mean", "pairs"), tuple(rows))


def found_table(searches: Searches, results: Mapping[tuple[str, int], NasiResult]) -> Table:
    """What every search found, with its costs."""
    columns = {"search": "", "architecture": "", "MACs": ",", "parameters": ",", "median Q": ".3g", "last nu": ".3g"}
    rows = []
    for (mode, i), result in results.items():
        arch = searches.arch(result)
        cost, name = searches.space.cost(arch), f"{mode}, seed {searches.cfg.seed + i}"
        limit = (float(result.q.median()), float(result.nu[-1]), f"{100 * result.above:.0f} %", result.skipped)
        rows.append((name, searches.space.format(arch), cost.macs, cost.params, *limit, seconds_text(result)))
    columns |= {"above nu": "", "skipped": "", "seconds (CPU)": ""}
    return Table.of("what was found", columns, rows)


def seconds_text(result: NasiResult) -> str:
    """The seconds of a search by the clock, and those of the processor."""
    return f"{result.record.seconds:.1f} ({result.record.cpu_seconds:.1f})"


def sensitivity_table(searches: Searches, reference: NasiResult, arch: Arch) -> Table:
    """What other settings change. Other mu, nu and T need no new samples."""
    cfg, record, rows = searches.cfg, reference.record, []
    base = cfg.search(0)
    level = float(torch.quantile(record.q[record.finite], 0.9))

    def row(name: str, result: NasiResult, seconds: str = "-") -> None:
        found = searches.arch(result)
        length = float(result.delta.norm() * reference.delta.norm())
        cosine = float((result.delta * reference.delta).sum()) / length if length else math.nan
        rows.append((name, str(differing(found, arch)), f"{cosine:.3f}", searches.space.format(found), seconds))

    for mu in (0.0, 0.5, 1.0, 2.0):
        row(f"mu {mu:g}", searches.solve(record, base.replace(mu=mu)))
    # without a penalty, which may be the search's own setting, a limit has no effect
    for mu, quantile in product((1.0, 2.0), (0.5, 0.75, 0.9)):
        changes = {"mu": mu, "constraint": "quantile", "nu": quantile}
        row(f"mu {mu:g}, nu {quantile:g} quantile", searches.solve(record, base.replace(**changes)))
    for factor in (0.5, 1.0, 2.0):
        changes = {"mu": 2.0, "constraint": "adaptive", "nu": factor * level}
        row(f"mu 2, nu adaptive from {factor:g} x 0.9 quantile", searches.solve(record, base.replace(**changes)))
    for steps in sorted({max(1, base.steps // share) for share in (10, 4, 2)}):
        row(f"T {steps}", searches.solve(record.first(steps), base))
    for batch in sorted({max(2, cfg.batch_size // 4), max(2, cfg.batch_size // 2), 2 * cfg.batch_size}):
        if batch > searches.images:
            continue
        other = searches.record(base, 0, f"batch {batch}", batch=batch)
        row(f"batch {batch}", searches.solve(other, base), f"{other.cpu_seconds:.1f}")
    (gates,) = set(get_args(Gates)) - {base.gates}
    other = searches.record(base.replace(gates=gates), 0, f"{gates} gates")
    row(f"{gates.replace('_', '-')} gates", searches.solve(other, base), f"{other.cpu_seconds:.1f}")
    title = f"sensitivity: changes to T {base.steps}, batch {cfg.batch_size}, mu {base.mu:g}, {limit_text(base)}"
    header = ("setting", f"choices of {len(arch)} that differ", "cosine of Delta", "architecture", "CPU seconds")
    return Table(title, header, tuple(rows))


def limit_text(search: NasiConfig) -> str:
    """The limit of a search in words."""
    return f"nu {search.constraint} {check_penalty(search.mu, search.constraint, search.nu):g}"


def ranking_table(title: str, reports: Mapping[str, RankReport], seconds: Mapping[str, str]) -> Table:
    """Every predictor beside the trivial ones, whose reports are in each."""
    first = next(iter(reports.values()))
    best = first.best_baseline.name if first.best_baseline else "depth"
    header = ("predictor", "Kendall's tau", "Spearman's rho", "tau within equal depth", f"tau minus that of {best}")

    def row(report: PredictorReport) -> tuple[str, str, str]:
        return str(report.kendall), str(report.spearman), str(report.kendall_within_depth)

    rows = [
        (name, *row(r.predictor), str(r.above[best]), f"{r.predictor.regret[-1]:.2f}", seconds.get(name, "-"))
        for name, r in reports.items()
    ]
    rows += [(b.name, *row(b), "-", f"{b.regret[-1]:.2f}", "0") for b in first.baselines]
    return Table(title, (*header, "points lost by its favourite", "seconds (CPU)"), tuple(rows))
