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
from typing import cast, get_args

import numpy as np
import torch
from scipy import stats

from nasfast import seeds
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.rank import PredictorReport, RankReport, rank
from nasfast.indicators.table import IndicatorTable
from nasfast.research.cells.prototypes import prototypes
from nasfast.research.cells.space import CellSpace, nas_bench_201_space
from nasfast.research.nasi.config import Gates
from nasfast.research.nasi.score import score_architecture
from nasfast.research.nasi.search import NasiConfig, NasiResult, endless, sample, solve
from nasfast.research.nasi.spaces import CellMixture, nasi_table, write_answer
from nasfast.research.studies.nasi.config import MODES, NasiCompareConfig, NasiQuickConfig, NasiSearchConfig
from nasfast.research.studies.nasi.figures import dots, logits, search_steps
from nasfast.research.studies.nasi.marks import correlation_checks, search_checks, time_check
from nasfast.research.studies.nasi.measure import (
    BATCH,
    EXACT_IMAGES,
    NOISE,
    NU,
    SYNTHETIC,
    TRACES,
    Images,
    RandomCells,
    SearchKind,
    ascend,
    enumerated,
    exact_traces,
    expectation,
    pearson,
    random_cells,
    search_kinds,
    search_records,
    slope,
    small_space,
    spearman,
    suffix,
    trainer_of,
)
from nasfast.research.studies.nasi.searches import Searches, claim_folder
from nasfast.research.studies.report import StudyReport, Table
from nasfast.research.studies.run import Task
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch, ArchSpace, SearchSpace, get_space

_EXPLANATION = (
    "Q is the squared length of one batch's gradient of the loss over all weights of an untrained network; NASI takes "
    "it for the trace norm of the neural tangent kernel. R is Q with the penalty mu on what exceeds nu. Nothing is "
    "trained in a search."
)
DIRECTIONS = 20000
"""Random directions that the closed form is compared with."""


def quick(cfg: NasiQuickConfig, out: Path | None, task: Task) -> StudyReport:
    """The quick experiment."""
    space = nas_bench_201_space(cells=2, channels=8, resolution=12, reduce_by="conv")
    train, test = prototypes(NOISE, SYNTHETIC, 1000, seed=cfg.seed)
    trainer = trainer_of(space, train, test, cfg)
    cells = random_cells(space, train, trainer, cfg, task)
    records = search_records(space, train, cfg, task)
    kinds = search_kinds(space, records, trainer, cells, cfg)
    traces = exact_traces(space, train, cfg, task("exact traces", cfg.exact))
    first = records["standard", 0]
    penalised = solve(first, NasiConfig(mu=2.0, constraint="fixed", nu=NU))
    archs = {kind.name: kind.archs for kind in kinds}
    unpenalised = {mode: archs["no penalty" + suffix(mode)] for mode in MODES}
    of_modes = [(f"Q, {mode}", "accuracy", q, cells.accuracy) for mode, q in cells.scores.items()]
    of_traces = [("exact trace", kind, traces["trace_full"], traces[kind]) for kind in TRACES[1:]]
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
            moved_table(space, unpenalised),
            exact_table(traces, cfg),
            closed_form_table(cfg, train),
        ),
        figures=(
            dots("Q and accuracy of random cells", of_modes),
            dots("estimates beside the exact trace", of_traces, scale="log"),
            search_steps(f"search with mu 2, nu {NU:g}, seed 0", penalised),
            logits("alpha* without a penalty, seed 0", space, solve(first, NasiConfig(mu=0.0))),
        ),
        checks=(
            *correlation_checks(cells),
            *search_checks(kinds, cells),
            time_check(records),
        ),
        data={"accuracy": cells.accuracy, "scores": cells.scores, "traces": traces},
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
        done = task("Q of architectures", len(some))
        start, cpu = time.perf_counter(), time.process_time()
        q: dict[Arch, float] = {}
        for i, arch in enumerate(some, 1):
            q[arch] = score_architecture(searches.space, arch, batches, seed=cfg.seed)
            done(i)
        seconds["Q"] = f"{time.perf_counter() - start:.1f} ({time.process_time() - cpu:.1f})"
        of_some = _rankings({arch: truth[arch] for arch in some}, {"Q": q, **predictors}, published, cfg)
        title = f"{len(some)} random architectures"
        shown.insert(0, ranking_table(f"{title}, each scored by itself", of_some, seconds))
        accuracy, macs = [truth[a] for a in some], [published.cost(a).macs for a in some]
        of_q = ("Q", "accuracy", [q[a] for a in some], accuracy)
        drawn.append(dots(title, [of_q, ("MACs", "accuracy", macs, accuracy)]))
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
    sizes = ("smallest", "median", "largest")
    columns = {"score": "", **dict.fromkeys(sizes, ".3f"), "Spearman with accuracy": ".2f"}
    columns |= dict.fromkeys(("Pearson with standard", "Spearman with standard", "Spearman with parameters"), ".2f")
    rows: list[tuple[str | float | None, ...]] = []
    for mode, values in cells.scores.items():
        known = (spearman(values, cells.accuracy), pearson(q, values), spearman(q, values), spearman(values, params))
        rows.append((f"Q, {mode}", np.min(values), np.median(values), np.max(values), *known))
    extremes = (f"{params.min():.0f}", f"{np.median(params):.0f}", f"{params.max():.0f}")
    rows.append(("parameters", *extremes, spearman(params, cells.accuracy), None, spearman(params, q), None))
    return Table.of("random cells: how well Q predicts accuracy", columns, rows)


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


def exact_table(found: Mapping[str, Sequence[float]], cfg: NasiQuickConfig) -> Table:
    """The rank correlations of the estimates with the exact trace."""
    full = found["trace_full"]
    names = {kind: kind for kind in ("trace_label", "q_sum")}
    names |= {"q_batch": f"q_batch: the same {EXACT_IMAGES} images", "params": "parameters"}
    names["averaged"] = f"q_batch: {cfg.repeats} x {cfg.images} images"
    rows = []
    for kind in ("trace_label", "q_sum", "q_batch", "averaged", "params"):
        tau = float(stats.kendalltau(found[kind], full).statistic)
        of_logs = pearson(np.log(found[kind]), np.log(full))
        rows.append((names[kind], spearman(found[kind], full), tau, of_logs))
    # the chain of the lower bound: sum_x |g_x|^2 <= 2 trace, and b |mean g|^2 <= sum_x |g_x|^2
    q_sum = np.array(found["q_sum"])
    loose = [np.median(q_sum / (2 * np.array(full))), np.median(EXACT_IMAGES * np.array(found["q_batch"]) / q_sum)]
    title = (
        f"{cfg.exact} cells: rank correlation with the exact trace of the kernel on {EXACT_IMAGES} images; medians of "
        f"sum |g_x|^2 over its bound 2 trace {loose[0]:.3f}, of b |mean g|^2 over its bound sum |g_x|^2 {loose[1]:.3f}"
    )
    return Table.of(title, {"estimate": "", "Spearman": ".2f", "Kendall": ".2f", "Pearson of logs": ".2f"}, rows)


def closed_form_table(cfg: NasiQuickConfig, train: Images) -> Table:
    """The step of the method beside other directions, by what the enumeration of 27 architectures gives for each.

    Of a direction from alpha_0 = 0: its cosine with the closed form, E[Q] there, and the place of its argmax by Q.
    """
    space = small_space()
    mixture = CellMixture(space, seed=cfg.seed).double()
    x, y = train[0][:BATCH].double(), train[1][:BATCH]
    archs, q = enumerated(mixture, space, x, y)
    start = torch.zeros(mixture.allowed.shape, dtype=torch.float64)
    exact = slope(archs, q, start)
    step = exact / exact.norm()
    rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_DIRECTIONS))
    random = torch.from_numpy(rng.standard_normal((DIRECTIONS, exact.numel())))
    best = float((random @ exact.flatten() / random.norm(dim=1)).max()) / float(exact.norm())
    directions = {"closed form, exact gradient": step}
    for gates in get_args(Gates):
        search = NasiConfig(steps=cfg.steps, mu=0.0, seed=cfg.seed, gates=gates)
        found = solve(sample(mixture, [(x, y)], search), search).delta
        directions[f"{gates.replace('_', '-')}, T = {cfg.steps}"] = found / found.norm()
    directions["largest E[Q] of norm 1, ascent"] = ascend(archs, q, start)
    rows = []
    for name, direction in directions.items():
        chosen = archs.index(tuple(direction[0].argmax(-1).tolist()))
        cosine, expected = float((direction * step).sum()), float(expectation(archs, q, direction))
        rows.append((name, f"{cosine:.3f}", f"{expected:.4g}", str(int((q > q[chosen]).sum()) + 1)))
    title = (
        f"one step from alpha_0 = 0, {len(q)} architectures: mean Q {float(q.mean()):.4g}, largest "
        f"{float(q.max()):.4g}; of {DIRECTIONS} random directions the best reaches {best:.3f} "
        "of the closed form's first-order gain"
    )
    return Table(title, ("Delta", "cosine", "E[Q] at Delta of norm 1", "place of its argmax by Q"), tuple(rows))


def differing(a: Arch, b: Arch) -> int:
    """The number of values in which two architectures differ."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def moved_table(space: ArchSpace, chosen: Mapping[str, Sequence[Arch]]) -> Table:
    """How many values of the selected architectures differ between modes at one seed, and between seeds."""
    rows: list[tuple[str, float | None, int | None]] = []
    for mode, archs in chosen.items():
        pairs = [differing(a, b) for a, b in combinations(archs, 2)]
        rows.append((f"between seeds, {mode}", float(np.mean(pairs)) if pairs else None, len(pairs)))
    for a, b in combinations(chosen, 2):
        pairs = [differing(x, y) for x, y in zip(chosen[a], chosen[b], strict=True)]
        rows.append((f"{a} and {b}, same seed", float(np.mean(pairs)), len(pairs)))
    rows.append(("two random architectures", sum(1 - 1 / len(values) for values in space.options), None))
    return Table.of(f"of {len(space)} choices, how many differ", {"": "", "mean": ".2f", "pairs": ""}, rows)


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
