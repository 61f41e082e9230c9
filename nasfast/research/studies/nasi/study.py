"""The NASI study: its three kinds, each `run(cfg, out, task) -> StudyReport`.

`quick` measures how well Q predicts accuracy in a small task; `search` searches a space and writes what it found;
`compare` ranks nas_bench_macro beside trivial predictors (docs/nasi.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from nasfast import seeds
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.rank import RankReport, rank
from nasfast.indicators.table import IndicatorTable
from nasfast.research.cells.prototypes import prototypes
from nasfast.research.cells.space import nas_bench_201_space
from nasfast.research.nasi.kinds import write_answer
from nasfast.research.nasi.search import NasiResult, endless, solve
from nasfast.research.nasi.table import nasi_table
from nasfast.research.studies.nasi import figures, marks, tables
from nasfast.research.studies.nasi.config import NasiCompareConfig, NasiQuickConfig, NasiSearchConfig
from nasfast.research.studies.nasi.enumeration import closed_form
from nasfast.research.studies.nasi.measure import (
    NOISE,
    NU,
    SYNTHETIC,
    Searches,
    Trainer,
    claim_folder,
    exact_traces,
    own_scores,
    random_cells,
    search_kinds,
    search_records,
    tenths,
)
from nasfast.research.studies.parts import Figure
from nasfast.research.studies.report import StudyReport
from nasfast.research.studies.run import Task
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch, SearchSpace, get_space

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
    dots = {f"Q, {mode}": figures.panel(q, cells.accuracy, "Q", "accuracy") for mode, q in cells.scores.items()}
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
            tables.correlation_table(cells),
            tables.searches_table(space, kinds),
            tables.moved_in_quick(space, kinds),
            tables.exact_table(traces, cfg),
            tables.closed_form_table(closed_form(cfg, train)),
        ),
        figures=(
            Figure("nasi_scatter", "Q and accuracy of random cells", {"panels": dots}),
            figures.traces(traces),
            figures.search_steps(f"search with mu 2, nu {NU:g}, seed 0", penalised),
            figures.logits("alpha* without a penalty, seed 0", space, solve(first, mu=0.0)),
        ),
        checks=(
            *marks.correlation_checks(cells),
            *marks.search_checks(kinds, cells),
            marks.time_check(records),
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
    shown = [tables.found_table(searches, results)]
    if len(results) > 1:
        chosen: dict[str, list[Arch]] = {mode: [] for mode in cfg.mode_list}
        for (mode, _), result in results.items():
            chosen[mode].append(searches.arch(result))
        shown.append(tables.moved_table(space, chosen))
    if cfg.sensitivity:
        shown.append(tables.sensitivity_table(searches, first, arch))
    meta = {"steps": len(first.record.q), "seed": cfg.seed, "images": cfg.images is not None}
    files = () if folder is None else (write_answer(space, first, arch, folder, meta=meta),)
    source = "synthetic images" if cfg.images is None else "images of a folder"
    own = cfg.search(0)
    settings = f"batch {cfg.batch_size}, mu {own.mu:g}, {tables.limit_text(own)}, gates {own.gates}"
    return StudyReport(
        subject=f"space {space.name}, {space.resolution} x {space.resolution} {source}",
        explanation=_EXPLANATION,
        notes=(f"T = {own.steps}, {settings}",),
        files=files,
        tables=tuple(shown),
        figures=(
            figures.search_steps("the first search, step by step", first),
            figures.logits("alpha* - alpha_0", space, first),
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
        seconds[name] = tables.seconds_text(result)
    if cfg.indicators is not None:
        predictors["given indicators"] = IndicatorTable.load(cfg.indicators)
    of_all = _rankings(truth, predictors, published, cfg)
    shown, drawn = [tables.ranking_table(f"all {len(truth)} architectures", of_all, seconds)], []
    if cfg.architectures:
        rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_PICKS))
        picks = rng.choice(len(truth), min(cfg.architectures, len(truth)), replace=False)
        some = [sorted(truth)[i] for i in sorted(picks)]
        done = tenths(task("Q of architectures", len(some)), len(some))
        q, seconds["Q"] = own_scores(searches, some, batches, done)
        of_some = _rankings({arch: truth[arch] for arch in some}, {"Q": q, **predictors}, published, cfg)
        title = f"{len(some)} random architectures"
        shown.insert(0, tables.ranking_table(f"{title}, each scored by itself", of_some, seconds))
        accuracy, macs = [truth[a] for a in some], [published.cost(a).macs for a in some]
        panels = {
            "Q": figures.panel([q[a] for a in some], accuracy, "Q", "accuracy"),
            "MACs": figures.panel(macs, accuracy, "MACs", "accuracy"),
        }
        drawn.append(Figure("nasi_scatter", title, {"panels": panels}))
    return replace(found, tables=(*shown, *found.tables), figures=(*drawn, *found.figures))


def _rankings(
    truth: Mapping[Arch, float], predictors: Mapping[str, Predictor], space: SearchSpace, cfg: NasiCompareConfig
) -> dict[str, RankReport]:
    return {
        name: rank(truth, predictor, space, resamples=cfg.resamples, seed=cfg.seed)
        for name, predictor in predictors.items()
    }
