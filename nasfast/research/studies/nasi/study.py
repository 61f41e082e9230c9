"""The NASI study: its three kinds, each `run(cfg, out, task) -> StudyReport`, with marks, tables and figures.

`quick` measures how well Q predicts accuracy in a small task; `search` searches a space and writes what it found;
`compare` ranks nas_bench_macro beside trivial predictors (docs/nasi.md).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats

from nasfast import seeds
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.rank import PredictorReport, RankReport, rank
from nasfast.indicators.table import IndicatorTable
from nasfast.research.cells.prototypes import prototypes
from nasfast.research.cells.space import CellSpace, nas_bench_201_space
from nasfast.research.nasi.score import score_architecture
from nasfast.research.nasi.search import NasiConfig, NasiResult, endless, solve
from nasfast.research.nasi.spaces import nasi_table, write_answer
from nasfast.research.studies.nasi.config import MODES, NasiCompareConfig, NasiQuickConfig, NasiSearchConfig
from nasfast.research.studies.nasi.figures import dots, logits, search_steps
from nasfast.research.studies.nasi.marks import marks
from nasfast.research.studies.nasi.measure import (
    DIRECTIONS,
    EXACT_IMAGES,
    NOISE,
    NU,
    SYNTHETIC,
    TRACES,
    ClosedForm,
    RandomCells,
    SearchKind,
    cell_trainer,
    closed_form,
    exact_traces,
    pearson,
    random_cells,
    search_kinds,
    search_records,
    spearman,
    suffix,
)
from nasfast.research.studies.nasi.searches import Searches, claim_folder
from nasfast.research.studies.report import StudyReport, Table
from nasfast.research.studies.run import Task
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch, ArchSpace, get_space

_EXPLANATION = (
    "Q is the squared length of one batch's gradient of the loss over all weights of an untrained network; NASI takes "
    "it for the trace norm of the neural tangent kernel. R is Q with the penalty mu on what exceeds nu. Nothing is "
    "trained in a search."
)


def quick(cfg: NasiQuickConfig, out: Path | None, task: Task) -> StudyReport:
    """The quick experiment."""
    space = nas_bench_201_space(cells=2, channels=8, resolution=12, reduce_by="conv")
    train, test = prototypes(NOISE, SYNTHETIC, 1000, seed=cfg.seed)
    trainer = cell_trainer(space, train, test, cfg)
    cells = random_cells(space, train, trainer, cfg, task)
    records = search_records(space, train, cfg, task)
    kinds = search_kinds(space, records, trainer, cells, cfg)
    traces = exact_traces(space, train, cfg, task("exact traces", cfg.exact))
    first = records["standard", 0]
    penalised = solve(first, NasiConfig(mu=2.0, constraint="fixed", nu=NU))
    archs = {kind.name: kind.archs for kind in kinds}
    unpenalised = {mode: archs["no penalty" + suffix(mode)] for mode in MODES}
    accuracy_panels = [(f"Q, {mode}", "accuracy", q, cells.accuracy) for mode, q in cells.scores.items()]
    trace_panels = [("exact trace", kind, traces["trace_full"], traces[kind]) for kind in TRACES[1:]]
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
            difference_table(space, unpenalised),
            exact_table(traces, cfg),
            closed_form_table(closed_form(cfg, train)),
        ),
        figures=(
            dots("Q and accuracy of random cells", accuracy_panels),
            dots("estimates beside the exact trace", trace_panels, scale="log"),
            search_steps(f"search with mu 2, nu {NU:g}, seed 0", penalised),
            logits("alpha* without a penalty, seed 0", space, solve(first, NasiConfig(mu=0.0))),
        ),
        checks=tuple(marks(cells, kinds, records)),
        data={"accuracy": cells.accuracy, "scores": cells.scores, "traces": traces},
    )


def search(cfg: NasiSearchConfig, out: Path | None, task: Task) -> StudyReport:
    """Searches of one space."""
    searches = Searches(cfg, task)
    folder = claim_folder(out, searches.space)
    return _search_report(searches, searches.all(), folder)


def _search_report(
    searches: Searches, results: Mapping[tuple[str, int], NasiResult], folder: Path | None
) -> StudyReport:
    """The report of searches; writes the files of the first."""
    cfg, space, first = searches.cfg, searches.space, results["standard", 0]
    arch = searches.arch(first)
    tables = [architecture_table(searches, results)]
    if len(results) > 1:
        by_mode: dict[str, list[Arch]] = {mode: [] for mode in cfg.mode_list}
        for (mode, _), result in results.items():
            by_mode[mode].append(searches.arch(result))
        tables.append(difference_table(space, by_mode))
    meta = {"steps": len(first.record.q), "seed": cfg.seed, "images": cfg.images is not None}
    files = () if folder is None else (write_answer(space, first, arch, folder, meta=meta),)
    source = "synthetic images" if cfg.images is None else "images of a folder"
    own = cfg.search(0)
    settings = f"batch {cfg.batch_size}, mu {own.mu:g}, nu {own.constraint} {own.limit:g}, gates {own.gates}"
    return StudyReport(
        subject=f"space {space.name}, {space.resolution} x {space.resolution} {source}",
        explanation=_EXPLANATION,
        notes=(f"T = {own.steps}, {settings}",),
        files=files,
        tables=tuple(tables),
        figures=(search_steps("the first search, step by step", first), logits("alpha* - alpha_0", space, first)),
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
    report = _search_report(searches, results, folder)
    predictors: dict[str, Predictor] = {}
    seconds: dict[str, str] = {}
    for (mode, i), result in results.items():
        table, name = nasi_table(searches.space, result), f"NASI, {mode}, seed {cfg.seed + i}"
        predictors[name] = {arch: table.score(arch) for arch in truth}
        seconds[name] = seconds_text(result)
    if cfg.indicators is not None:
        predictors["given indicators"] = IndicatorTable.load(cfg.indicators)

    def ranking(title: str, accuracies: Mapping[Arch, float], predictors: Mapping[str, Predictor]) -> Table:
        reports = {
            name: rank(accuracies, predictor, published, resamples=cfg.resamples, seed=cfg.seed)
            for name, predictor in predictors.items()
        }
        return ranking_table(title, reports, seconds)

    tables, plots = [ranking(f"all {len(truth)} architectures", truth, predictors)], []
    if cfg.architectures:
        rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_PICKS))
        picks = rng.choice(len(truth), min(cfg.architectures, len(truth)), replace=False)
        sample = [sorted(truth)[i] for i in sorted(picks)]
        done = task("Q of architectures", len(sample))
        start, cpu = time.perf_counter(), time.process_time()
        q: dict[Arch, float] = {}
        for i, arch in enumerate(sample, 1):
            q[arch] = score_architecture(searches.space, arch, batches, seed=cfg.seed)
            done(i)
        seconds["Q"] = f"{time.perf_counter() - start:.1f} ({time.process_time() - cpu:.1f})"
        title, accuracies = f"{len(sample)} random architectures", {arch: truth[arch] for arch in sample}
        tables.insert(0, ranking(f"{title}, each scored by itself", accuracies, {"Q": q, **predictors}))
        accuracy, macs = list(accuracies.values()), [published.cost(arch).macs for arch in sample]
        plots.append(dots(title, [("Q", "accuracy", list(q.values()), accuracy), ("MACs", "accuracy", macs, accuracy)]))
    return replace(report, tables=(*tables, *report.tables), figures=(*plots, *report.figures))


def correlation_table(cells: RandomCells) -> Table:
    """How well Q, in every mode, and the number of parameters predict the accuracy of random cells."""
    q, params = np.array(cells.scores["standard"]), cells.params
    sizes = ("smallest", "median", "largest")
    columns = {"score": "", **dict.fromkeys(sizes, ".3f"), "Spearman with accuracy": ".2f"}
    columns |= dict.fromkeys(("Pearson with standard", "Spearman with standard", "Spearman with parameters"), ".2f")
    rows: list[tuple[str | float | None, ...]] = []
    for mode, values in cells.scores.items():
        correlations = (
            spearman(values, cells.accuracy),
            pearson(q, values),
            spearman(q, values),
            spearman(values, params),
        )
        rows.append((f"Q, {mode}", np.min(values), np.median(values), np.max(values), *correlations))
    extremes = (f"{params.min():.0f}", f"{np.median(params):.0f}", f"{params.max():.0f}")
    rows.append(("parameters", *extremes, spearman(params, cells.accuracy), None, spearman(params, q), None))
    return Table.of("random cells: how well Q predicts accuracy", columns, rows)


def searches_table(space: CellSpace, kinds: Sequence[SearchKind]) -> Table:
    """What the searches of every kind select."""
    edges = " ".join(e.name for e in space.cell.edges)
    rows = []
    for kind in kinds:
        accuracy = " ".join(f"{a:.3f}" for a in kind.accuracy)
        percentile = " ".join(f"{p:.2f}" for p in kind.percentile)
        rows.append((kind.name, accuracy, percentile, kind.percentile.mean(), space.format(kind.archs[0])))
    columns = {"search": "", "accuracy by seed": "", "percentile by seed": "", "mean": ".2f"}
    return Table.of("searches", {**columns, f"first cell, edges {edges}": ""}, rows)


def exact_table(traces: Mapping[str, Sequence[float]], cfg: NasiQuickConfig) -> Table:
    """The rank correlations of the estimates with the exact trace."""
    full = traces["trace_full"]
    names = {
        "trace_label": "trace_label",
        "q_sum": "q_sum",
        "q_batch": f"q_batch: the same {EXACT_IMAGES} images",
        "averaged": f"q_batch: {cfg.repeats} x {cfg.images} images",
        "params": "parameters",
    }
    rows = []
    for kind, name in names.items():
        tau = float(stats.kendalltau(traces[kind], full).statistic)
        log_correlation = pearson(np.log(traces[kind]), np.log(full))
        rows.append((name, spearman(traces[kind], full), tau, log_correlation))
    # the chain of the lower bound: sum_x |g_x|^2 <= 2 trace, and b |mean g|^2 <= sum_x |g_x|^2
    q_sum = np.array(traces["q_sum"])
    loose = [np.median(q_sum / (2 * np.array(full))), np.median(EXACT_IMAGES * np.array(traces["q_batch"]) / q_sum)]
    title = (
        f"{cfg.exact} cells: rank correlation with the exact trace of the kernel on {EXACT_IMAGES} images; medians of "
        f"sum |g_x|^2 over its bound 2 trace {loose[0]:.3f}, of b |mean g|^2 over its bound sum |g_x|^2 {loose[1]:.3f}"
    )
    return Table.of(title, {"estimate": "", "Spearman": ".2f", "Kendall": ".2f", "Pearson of logs": ".2f"}, rows)


def closed_form_table(step: ClosedForm) -> Table:
    """The step of the method beside other directions, by what the enumeration of 27 architectures gives for each."""
    title = (
        f"one step from alpha_0 = 0, {len(step.q)} architectures: mean Q {float(step.q.mean()):.4g}, largest "
        f"{float(step.q.max()):.4g}; of {DIRECTIONS} random directions the best reaches {step.best_random:.3f} "
        "of the closed form's first-order gain"
    )
    columns = {"Delta": "", "cosine": ".3f", "E[Q] at Delta of norm 1": ".4g", "place of its argmax by Q": ""}
    return Table.of(title, columns, [(name, *values) for name, values in step.directions.items()])


def difference_table(space: ArchSpace, by_mode: Mapping[str, Sequence[Arch]]) -> Table:
    """How many values of the selected architectures differ between modes at one seed, and between seeds."""

    def difference(a: Arch, b: Arch) -> int:
        return sum(x != y for x, y in zip(a, b, strict=True))

    rows: list[tuple[str, float | None, int | None]] = []
    for mode, archs in by_mode.items():
        pairs = [difference(a, b) for a, b in combinations(archs, 2)]
        rows.append((f"between seeds, {mode}", float(np.mean(pairs)) if pairs else None, len(pairs)))
    for a, b in combinations(by_mode, 2):
        pairs = [difference(x, y) for x, y in zip(by_mode[a], by_mode[b], strict=True)]
        rows.append((f"{a} and {b}, same seed", float(np.mean(pairs)), len(pairs)))
    rows.append(("two random architectures", sum(1 - 1 / len(values) for values in space.options), None))
    return Table.of(f"of {len(space)} choices, how many differ", {"": "", "mean": ".2f", "pairs": ""}, rows)


def architecture_table(searches: Searches, results: Mapping[tuple[str, int], NasiResult]) -> Table:
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
