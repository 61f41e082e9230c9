"""The NASI study: its three kinds, each `run(cfg, out, task) -> StudyReport`, with their tables, figures and marks.

`quick` measures how well Q predicts accuracy in a small task; `search` searches a space and writes what it found;
`compare` ranks nas_bench_macro beside trivial predictors (docs/nasi.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats

from nasfast import seeds
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.rank import PredictorReport, RankReport, rank
from nasfast.indicators.table import IndicatorTable
from nasfast.research.cells.prototypes import prototypes
from nasfast.research.cells.space import CellSpace, nas_bench_201_space
from nasfast.research.nasi.search import Gates, NasiConfig, NasiResult, check_penalty, endless, solve
from nasfast.research.nasi.spaces import nasi_table, write_answer
from nasfast.research.studies.draw import GREY, SERIES, heat, line, panel
from nasfast.research.studies.nasi.config import MODES, NasiCompareConfig, NasiQuickConfig, NasiSearchConfig
from nasfast.research.studies.nasi.measure import (
    DIRECTIONS,
    EXACT_IMAGES,
    NOISE,
    NU,
    SYNTHETIC,
    ClosedForm,
    ExactTraces,
    RandomCells,
    Records,
    Searches,
    SearchKind,
    Trainer,
    claim_folder,
    closed_form,
    exact_traces,
    own_scores,
    pearson,
    random_cells,
    search_kinds,
    search_records,
    spearman,
    tenths,
)
from nasfast.research.studies.report import Check, Figure, Form, StudyReport, Table
from nasfast.research.studies.run import Task
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch, ArchSpace, SearchSpace, get_space

_EXPLANATION = (
    "Q is the squared length of one batch's gradient of the loss over all weights of an untrained network; NASI takes "
    "it for the trace norm of the neural tangent kernel. R is Q with the penalty mu on what exceeds nu. Nothing is "
    "trained in a search."
)


def quick(cfg: NasiQuickConfig, out: Path | None, task: Task) -> StudyReport:
    """The quick experiment."""
    space = nas_bench_201_space(cells=2, channels=8, resolution=12, reduce_by="conv")
    train, test = prototypes(NOISE, SYNTHETIC, 1000, seed=cfg.seed)
    trainer = Trainer(space, train, test, cfg)
    cells = random_cells(space, train, trainer, cfg, task)
    records = search_records(space, train, cfg, task)
    kinds = search_kinds(space, records, trainer, cells, cfg)
    traces = exact_traces(space, train, cfg, tenths(task("exact traces", cfg.exact), cfg.exact))
    first = records["standard", 0]
    penalised = solve(first, mu=2.0, constraint="fixed", nu=NU)
    dots = [scatter(f"Q, {mode}", q, cells.accuracy, "Q", "accuracy") for mode, q in cells.scores.items()]
    return StudyReport(
        subject=f"{cfg.cells} NAS-Bench-201 cells of two cells, 8 channels, on synthetic 12 x 12 images",
        explanation=_EXPLANATION,
        notes=(
            f"an accuracy is that of {cfg.train_steps} steps of SGD; a score is the mean of {cfg.repeats} batches of "
            f"{cfg.images}, each with an initialisation of its own",
            f"random cells: accuracy mean {np.mean(cells.accuracy):.3f}, median {np.median(cells.accuracy):.3f}, best "
            f"{np.max(cells.accuracy):.3f}",
            "several mu and nu are solved from one set of sampled architectures, because mu and nu only weight them",
        ),
        tables=(
            correlation_table(cells),
            searches_table(space, kinds),
            moved_in_quick(space, kinds),
            exact_table(traces, cfg),
            closed_form_table(closed_form(cfg, train)),
        ),
        figures=(
            Figure("Q and accuracy of random cells", _DOT, dots, columns=3),
            trace_figure(traces),
            search_steps(f"search with mu 2, nu {NU:g}, seed 0", penalised),
            logits("alpha* without a penalty, seed 0", space, solve(first, mu=0.0)),
        ),
        checks=(
            *correlation_checks(cells),
            *search_checks(kinds, cells),
            time_check(records),
        ),
    )


def search(cfg: NasiSearchConfig, out: Path | None, task: Task) -> StudyReport:
    """Searches of one space."""
    searches = Searches(cfg, task)
    folder = claim_folder(out, searches.space)
    return _found(searches, searches.all(), folder)


def _found(searches: Searches, results: Mapping[tuple[str, int], NasiResult], folder: Path | None) -> StudyReport:
    """The report of searches; writes the files of the first."""
    cfg, space, first = searches.cfg, searches.space, results["standard", 0]
    arch = searches.arch(first)
    shown = [found_table(searches, results)]
    if len(results) > 1:
        chosen: dict[str, list[Arch]] = {mode: [] for mode in cfg.mode_list}
        for (mode, _), result in results.items():
            chosen[mode].append(searches.arch(result))
        shown.append(moved_table(space, chosen))
    if cfg.sensitivity:
        shown.append(sensitivity_table(searches, first, arch))
    meta = {"steps": len(first.record.q), "seed": cfg.seed, "images": cfg.images is not None}
    files = () if folder is None else (write_answer(space, first, arch, folder, meta=meta),)
    source = "synthetic images" if cfg.images is None else "images of a folder"
    own = cfg.search(0)
    settings = f"batch {cfg.batch_size}, mu {own.mu:g}, {limit_text(own)}, gates {own.gates}"
    return StudyReport(
        subject=f"space {space.name}, {space.resolution} x {space.resolution} {source}",
        explanation=_EXPLANATION,
        notes=(f"T = {own.steps}, {settings}",),
        files=files,
        tables=tuple(shown),
        figures=(
            search_steps("the first search, step by step", first),
            logits("alpha* - alpha_0", space, first),
        ),
    )


Predictor = Mapping[Arch, float] | IndicatorTable


def compare(cfg: NasiCompareConfig, out: Path | None, task: Task) -> StudyReport:
    """Predictors of accuracy beside each other."""
    # images of another size or number of classes leave the architectures those of the published accuracies
    published = get_space(cfg.space)
    truth = read_accuracies(cfg.accuracies, published)
    searches = Searches(cfg, task)
    folder = claim_folder(out, searches.space)
    stream = endless(searches.loader(0, cfg.score_batch), searches.device)
    batches = [next(stream) for _ in range(cfg.repeats)]
    results = searches.all()
    found = _found(searches, results, folder)
    # get_space has refused a space of cells
    space = cast("SearchSpace", searches.space)
    predictors: dict[str, Predictor] = {}
    seconds: dict[str, str] = {}
    for (mode, i), result in results.items():
        table, name = nasi_table(space, result), f"NASI, {mode}, seed {cfg.seed + i}"
        predictors[name] = {arch: table.score(arch) for arch in truth}
        seconds[name] = seconds_text(result)
    if cfg.indicators is not None:
        predictors["given indicators"] = IndicatorTable.load(cfg.indicators)
    of_all = _rankings(truth, predictors, published, cfg)
    shown, drawn = [ranking_table(f"all {len(truth)} architectures", of_all, seconds)], []
    if cfg.architectures:
        rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_PICKS))
        picks = rng.choice(len(truth), min(cfg.architectures, len(truth)), replace=False)
        some = [sorted(truth)[i] for i in sorted(picks)]
        done = tenths(task("Q of architectures", len(some)), len(some))
        q, seconds["Q"] = own_scores(searches, some, batches, done)
        of_some = _rankings({arch: truth[arch] for arch in some}, {"Q": q, **predictors}, published, cfg)
        title = f"{len(some)} random architectures"
        shown.insert(0, ranking_table(f"{title}, each scored by itself", of_some, seconds))
        accuracy, macs = [truth[a] for a in some], [published.cost(a).macs for a in some]
        of_q = scatter("Q", [q[a] for a in some], accuracy, "Q", "accuracy")
        drawn.append(Figure(title, _DOT, [of_q, scatter("MACs", macs, accuracy, "MACs", "accuracy")]))
    return replace(found, tables=(*shown, *found.tables), figures=(*drawn, *found.figures))


def _rankings(
    truth: Mapping[Arch, float], predictors: Mapping[str, Predictor], space: SearchSpace, cfg: NasiCompareConfig
) -> dict[str, RankReport]:
    return {
        name: rank(truth, predictor, space, resamples=cfg.resamples, seed=cfg.seed)
        for name, predictor in predictors.items()
    }


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


_DOT = "A dot is an architecture."


def scatter(title: str, x: ArrayLike, y: ArrayLike, x_name: str, y_name: str, *, log: str = "") -> Form:
    """A panel with a dot for every architecture."""
    return panel(title, line(x, y, ls="", marker="o", ms=3.5, alpha=0.7), x=x_name, y=y_name, log=log)


def trace_figure(found: ExactTraces) -> Figure:
    """Every estimate beside the exact trace."""
    full, *estimates = found.found.values()
    kinds = list(found.found)[1:]
    shown = [scatter(k, full, v, "exact trace", k, log="xy") for k, v in zip(kinds, estimates, strict=True)]
    return Figure("estimates beside the exact trace", _DOT, shown, columns=3)


def search_steps(title: str, result: NasiResult) -> Figure:
    """A search step by step: Q, R, the limit nu, and the norm of the gradient."""
    steps = list(range(1, len(result.q) + 1))
    q, r, nu, norm = (values.tolist() for values in (result.q, result.r, result.nu, result.norms))
    dots = {"ls": "", "ms": 3}
    values = panel(
        "sampled architectures",
        line(steps, q, SERIES[0], "Q", marker="o", **dots),
        line(steps, r, SERIES[1], "R", marker="x", **dots),
        line(steps, nu, GREY, "nu"),
        x="step",
        legend=True,
    )
    norms = panel(
        "gradient of R",
        line(steps, norm, SERIES[0], "norm of the gradient", marker="o", **dots),
        line(steps, np.maximum.accumulate(norm), GREY, "largest so far"),
        x="step",
        legend=True,
    )
    caption = (
        "Q of the architecture sampled at every step, R with the penalty on what exceeds nu, and the norms by which "
        "gradients are divided: every one by the largest so far."
    )
    return Figure(title, caption, [values, norms], legend=False)


def logits(title: str, space: ArchSpace, result: NasiResult) -> Figure:
    """The logits of a result, (rows, columns) of the space; nan where a row has no such candidate."""
    values = result.delta.masked_fill(~result.logits.isfinite(), math.nan).flatten(0, 1).numpy()
    limit = float(np.nanmax(np.abs(values))) or 1.0
    shown = panel("", heat(values, space.rows, space.columns, limit=limit, ring=True))
    caption = "Rows: edges or layers; columns: candidates. Rings: the largest of every row."
    return Figure(title, caption, [shown], width=2.5 + 0.75 * len(space.columns), height=1.0 + 0.26 * len(values))


def correlation_checks(cells: RandomCells) -> list[Check]:
    """Marks of how well Q predicts the accuracy of random cells."""
    q = np.array(cells.scores["standard"])
    checks = [Check("Q over random cells: largest over smallest", 4, math.inf, float(q.max() / q.min()))]
    for mode, values in cells.scores.items():
        checks.append(Check(f"Spearman of Q and accuracy, {mode}", 0.4, 1, spearman(values, cells.accuracy)))
        if mode != "standard":
            checks += [
                Check(f"Pearson of Q, standard and {mode}", 0.5, 1, pearson(q, values)),
                Check(f"Spearman of Q, standard and {mode}", 0.6, 1, spearman(q, values)),
            ]
    return checks


def search_checks(kinds: Sequence[SearchKind], cells: RandomCells) -> list[Check]:
    """Marks of what the searches select."""
    checks = []
    for kind in kinds:
        if kind.marked:
            above = float(kind.accuracy.min() - cells.accuracy.mean())
            checks += [
                Check(f"{kind.name}: mean percentile", 0.8, 1, float(kind.percentile.mean())),
                Check(f"{kind.name}: worst accuracy minus random mean", 0, 1, above),
            ]
    return checks


def time_check(records: Records) -> Check:
    """Mark of the longest search."""
    # the processor's time, which other programs do not lengthen, or the clock's where that is less
    seconds = [min(record.seconds, record.cpu_seconds) for record in records.values()]
    return Check("seconds of a search, longest", 0, 60, max(seconds))
