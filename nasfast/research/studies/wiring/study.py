"""The wiring study: its five kinds, each `run(config, out, task) -> StudyReport`, and their tables.

`theorems` checks the theorems on local costs, `p1` to `p3` show the three patterns, and `cost` measures local costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy import stats
from torch import Tensor

from nasfast.research.analysis.moments.detect import Verdict
from nasfast.research.cells.costs import NONE
from nasfast.research.cells.derive import derivations
from nasfast.research.cells.probe import LocalCosts
from nasfast.research.cells.search import SEARCH, TRAIN
from nasfast.research.cells.space import CELLS, DARTS_OPS
from nasfast.research.studies.report import Check, StudyReport, Table, name_checks
from nasfast.research.studies.run import Task
from nasfast.research.studies.wiring import config, figures, marks
from nasfast.research.studies.wiring.config import CostConfig
from nasfast.research.studies.wiring.measure import (
    MEASURES,
    early_and_late,
    kept_edges,
    live_operations,
    measures,
    sign_window,
)
from nasfast.research.studies.wiring.searches import (
    Runner,
    Runs,
    initial_costs,
    last_cell,
    loaders,
    monte_carlo_costs,
    seed_searches,
)
from nasfast.research.studies.wiring.theorems import check_theorems
from nasfast.runtime.device import torch_device
from nasfast.settings import TaskSettings

Experiment = TypeVar("Experiment", bound=config.ExperimentConfig)
_METHODS = {"darts": "DARTS", "snas": "SNAS", "dsnas": "DSNAS", "proxyless": "ProxylessNAS"}
_EXPLANATION = (
    "C is the local cost <dL/dX, X> of what an operation, edge or cell puts out; of the last cell it is L - H, "
    "loss minus entropy of the predictions. A positive cost pushes an edge towards None, whose cost is 0, a negative "
    "one away from it. q is the probability of None."
)
_OTHER_SETTINGS = "settings are not those of the pass marks: signs are judged, thresholds are not"
_CONTROLS = {
    "simplified": ("control-simplified", CELLS["simplified"](DARTS_OPS), False),
    "modified, sampled": ("control-modified__sampled", CELLS["modified"](DARTS_OPS), True),
    "modified, (0,1) fixed": (
        "control-modified___0_1__fixed",
        CELLS["modified"](DARTS_OPS).restricted(0, 1, ("sep_conv_5x5",)),
        True,
    ),
}
"""Control for the cause of P2 -> folder of its searches, its cell, and whether draws without a path are repeated."""
_VARIANTS: dict[str, dict[str, Any]] = {
    "as above": {},
    "order conv_relu_norm": {"order": "conv_relu_norm"},
    "order conv_norm_relu": {"order": "conv_norm_relu"},
    "norm layer": {"norm": "layer"},
    "norm instance": {"norm": "instance"},
}
"""Figures 29 to 31: other orders of convolution, norm and ReLU, and other norms, at initialisation -> their changes."""
_PUBLISHED = {
    "correct, published": (-0.11, -0.11, 0.06, 0.08, 0.17, 0.19),
    "wrong, published": (0.80, 2.18, 1.70, 2.92, 0.90, 0.74),
}
"""The paper's C, L and H (section 8), each of training and search images."""


def theorems(cfg: config.TheoremsConfig, out: Path | None, task: Task) -> StudyReport:
    """The theorems."""
    residuals = check_theorems(channels=cfg.channels, batch=cfg.batch, seed=cfg.seed)
    columns = {"": "", "measured": ".2g", "at most": ".0e", "the numbers behind it": ""}
    return StudyReport(
        subject=f"theorems on real networks, {cfg.channels} channels, {cfg.batch} images, float64",
        explanation=_EXPLANATION,
        tables=(Table.of("theorems", columns, [(r.name, r.measured, r.bound, r.note) for r in residuals]),),
        checks=tuple(residual.check for residual in residuals),
    )


def _in_directory(study: Callable[[Experiment, Runner], StudyReport]) -> Callable[..., StudyReport]:
    """Make a study of searches a `run(config, out, task, tasks=None)`: in a directory, or in a temporary one."""

    def run(cfg: Experiment, out: Path | None, task: Task, tasks: TaskSettings | None = None) -> StudyReport:
        with nullcontext(str(out)) if out is not None else tempfile.TemporaryDirectory() as folder:
            return study(cfg, Runner(Path(folder), task, torch_device(cfg.device), tasks))

    return run


@_in_directory
def growth(cfg: config.GrowthConfig, runner: Runner) -> StudyReport:
    """P1."""
    (runs,) = runner.all(seed_searches(cfg, cfg.method))
    name, first = f"seed {cfg.seed}", runs[cfg.seed]
    report = _pattern_report("P1", cfg, runs)
    costs = figures.edge_costs(f"{name}: cost and loss", first), figures.output_costs(f"{name}: C = L - H", first)
    return replace(report, figures=(*report.figures, *costs))


@_in_directory
def width(cfg: config.WidthConfig, runner: Runner) -> StudyReport:
    """P2; the controls have settings of their own."""
    own = CostConfig(
        cell="modified", steps=cfg.control_steps, seeds=cfg.seeds, seed=cfg.seed, device=cfg.device, records=12
    )
    controlled = [seed_searches(own, name, cell, redraw=redraw) for name, cell, redraw in _CONTROLS.values()]
    runs, *control_runs = runner.all(seed_searches(cfg, cfg.method), *controlled)
    controls = dict(zip(_CONTROLS, control_runs, strict=True))
    report = _pattern_report("P2", cfg, runs)
    marked = cfg.control_steps == config.WidthConfig().control_steps
    return replace(
        report,
        tables=(*report.tables, control_table(controls)),
        figures=(*report.figures, figures.control("control for the cause (figures 8 and 9)", controls)),
        checks=(*report.checks, *(marks.control_checks(controls) if marked else ())),
    )


@_in_directory
def collapse(cfg: config.CollapseConfig, runner: Runner) -> StudyReport:
    """P3."""
    second: dict[str, Any] = {"second_order": cfg.second_order} if cfg.method == "darts" else {}
    two, one = seed_searches(cfg, f"{cfg.method}-bilevel", bilevel=True, **second), seed_searches(cfg, cfg.method)
    fixed = CostConfig(
        samples=300, steps=cfg.control_steps, seeds=cfg.seeds, seed=cfg.seed, device=cfg.device, records=12
    )
    tabled = seed_searches(fixed, "table", method="darts", bilevel=True, alpha_lr=0.0)
    runs, single, gates = runner.all(two, one, tabled)
    windows = {seed: sign_window(run) for seed, run in gates.items()}
    single_marks = {
        seed: {"edges that are None on one level": (0.0, 6.0, float((kept_edges(run)[-1] == 0).sum()))}
        for seed, run in single.items()
    }
    report = _pattern_report("P3", cfg, runs, single_marks)
    marked = cfg.control_steps == config.CollapseConfig().control_steps
    gate_checks = [c for seed, run in gates.items() for c in marks.sign_checks(seed, run, windows[seed])]
    own, *tables = report.tables
    gate_figures = (
        figures.output_costs("DARTS's gates, probabilities fixed (figure 10)", gates[cfg.seed]),
        figures.edge_costs("DARTS's gates: costs of training batches", gates[cfg.seed]),
    )
    return replace(
        report,
        tables=(own, measures_table("the same search on one level", single), *tables, signs_table(windows)),
        figures=(*report.figures, *gate_figures),
        checks=(*report.checks, *(gate_checks if marked else ())),
    )


@_in_directory
def cost(cfg: CostConfig, runner: Runner) -> StudyReport:
    """Local costs."""
    space = cfg.space()
    live = live_operations(space)
    initial, mean_cost = initial_costs(cfg, runner.device, range(cfg.seed, cfg.seed + cfg.nets))
    (trained,) = runner.all(seed_searches(cfg, "uniform"))
    trained_tables = []
    for seed, run in trained.items():
        loader, _ = loaders(cfg.replace(seed=seed), bilevel=False)
        table, _ = monte_carlo_costs(run.net, loader, batches=cfg.batches, seed=seed + 1, device=runner.device)
        trained_tables.append(table)
    costs = {"initialisation": initial, "trained": trained_tables}
    # figure 19: without the skip term, the costs of the cells before the last add up to next to nothing
    two, _ = initial_costs(
        cfg.replace(cells=2, reductions=False, no_skip_on_intermediate=True), runner.device, [cfg.seed]
    )
    sums = two[0].total.sum((1, 2)) / cfg.batches
    few = range(cfg.seed, cfg.seed + max(1, cfg.nets // 3))
    variants = {name: initial_costs(cfg.replace(**changes), runner.device, few) for name, changes in _VARIANTS.items()}
    share = last_cell(initial).positive(live)
    checks = (
        Check("initialisation: mean C", 0, float("inf"), mean_cost),
        Check("initialisation: share of costs > 0", 0.6, 1, share),
    )
    panels = {label: last_cell(tables).mean[0].numpy() for label, tables in costs.items()}
    return StudyReport(
        subject=f"local costs of {cfg.cells} {cfg.cell} cell(s), operations sampled uniformly",
        explanation=_EXPLANATION,
        notes=() if cfg.published else (_OTHER_SETTINGS,),
        tables=(local_costs_table(costs, live), sums_table(sums), variants_table(variants, live)),
        figures=(
            figures.cost_heatmap(space, "local costs (figure 4)", panels),
            figures.edge_costs(f"seed {cfg.seed}: operations sampled uniformly", trained[cfg.seed]),
        ),
        checks=checks if cfg.published else (),
    )


def _pattern_report(
    key: str, cfg: config.LearntConfig, runs: Runs, more: Mapping[int, Mapping[str, marks.Mark]] | None = None
) -> StudyReport:
    """The report of a pattern of marks.PATTERNS: what its searches measured, their signs, marks and architectures.

    `more` has further marks by seed.
    """
    pattern, first = marks.PATTERNS[key], runs[cfg.seed]
    data = "synthetic images" if cfg.images is None else f"images of {Path(cfg.images).name}"
    subject = (
        f"{_METHODS[cfg.method]} on {cfg.cells} {cfg.cell} cell(s), {cfg.channels} channels, {first.steps[-1]} steps, "
        f"{data}"
    )
    verdicts: dict[str, Verdict] = {}
    checks: list[Check] = []
    for seed, run in runs.items():
        values = measures(run)
        signs = {name: bool(is_seen(values)) for name, is_seen in pattern.signs.items()}
        missing = [name for name, seen in signs.items() if not seen]
        name = f"not seen: {', '.join(missing)}" if missing else pattern.name
        verdicts[f"{key}, seed {seed}"] = Verdict((name,), {**signs})
        if cfg.published:
            checks += name_checks(f"seed {seed}", {**pattern.marks(values), **(more or {}).get(seed, {})})
    cell_figures = [
        figures.probabilities(f"seed {cfg.seed}, {name} cell", first, t) for t, name in enumerate(first.space.types)
    ]
    return StudyReport(
        subject=f"{key}, {pattern.title}: {subject}",
        explanation=_EXPLANATION,
        notes=() if cfg.published else (_OTHER_SETTINGS,),
        tables=(measures_table(key, runs), derivation_table(runs)),
        figures=(figures.patterns(key, runs), *cell_figures),
        verdicts=verdicts,
        checks=tuple(checks),
    )


def _interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of Student's t over the seeds."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2 or not np.isfinite(sample).all():
        return "-"
    half = stats.t.ppf(0.975, len(sample) - 1) * sample.std(ddof=1) / np.sqrt(len(sample))
    return f"{sample.mean():.3f} ± {half:.3f}"


def measures_table(title: str, runs: Runs) -> Table:
    """The measures of every seed, and their mean with its interval."""
    by_seed = [measures(run) for run in runs.values()]
    rows = []
    for name in by_seed[0]:
        values = [seed_measures[name] for seed_measures in by_seed]
        rows.append((MEASURES[name], *(v if np.isfinite(v) else None for v in values), _interval(values)))
    columns = {"": "", **{f"seed {seed}": ".3f" for seed in runs}, "mean, 95 %": ""}
    return Table.of(title, columns, rows)


def derivation_table(runs: Runs) -> Table:
    """The cells derived by argmax with None (the rule of SNAS, DSNAS and ProxylessNAS) and by DARTS's rule."""
    rows = []
    for seed, run in runs.items():
        own, space = "darts" if run.cfg.method == "darts" else "argmax", run.space
        for rule, arch in derivations(space, run.logits).items():
            kinds = []
            for kind, part in zip(space.types, space.parts(arch), strict=True):
                ops = {edge.name: space.ops[k] for edge, k in zip(space.cell.edges, part, strict=True)}
                kinds.append(f"{kind}: " + " ".join(f"{edge}={op}" for edge, op in ops.items() if op != NONE))
            rows.append((f"seed {seed}", rule + " (its own)" * (rule == own), "; ".join(kinds)))
    return Table("cells derived; edges that are None are left out", ("", "rule", "operations"), tuple(rows))


def control_table(controls: Mapping[str, Runs]) -> Table:
    """The costs of the edges early and late, for every control and seed."""
    rows = []
    for label, runs in controls.items():
        for seed, run in runs.items():
            rows.append((label, f"seed {seed}", *(v for part in early_and_late(run) for v in part)))
    edges = [f"{e.name} {part}" for part in ("first half", "last quarter") for e in run.space.cell.edges]
    columns = {"control": "", "": "", **dict.fromkeys(edges, "+.3f")}
    return Table.of("mean cost of the edges, operations sampled uniformly", columns, rows)


def signs_table(windows: Mapping[int, Mapping[int, Any]]) -> Table:
    """C, L and H of every seed by set of images, and below them the published ones."""
    rows = []
    for seed, window in windows.items():
        for group in ("correct", "wrong"):
            values = [window[which][group][q] for q in "CLH" for which in (TRAIN, SEARCH)]
            rows.append((f"{group}, seed {seed}", *(f"{v:+.2f}" for v in values)))
    rows += [(name, *(f"{v:.2f}" for v in values)) for name, values in _PUBLISHED.items()]
    header = ("", *(f"{q} {s}" for q in "CLH" for s in ("train", "search")))
    return Table("C, L, H with DARTS's gates, probabilities fixed, middle of the run", header, tuple(rows))


def local_costs_table(costs: Mapping[str, Sequence[LocalCosts]], live: Sequence[int]) -> Table:
    """The costs of the last cell, for every state of the networks; `live` are the operations other than None."""
    columns = {"last cell": "", "networks": "", "costs > 0": ".2f", "of single networks": ".2f"}
    columns |= {"mean cost": "+.4f", "error over batches": ".4f", "clearly + / -": ""}
    rows = []
    for label, tables in costs.items():
        joined = last_cell(tables)
        shares = [last_cell([t]).positive(live) for t in tables]
        mean, error = (v[0][:, live].numpy() for v in (joined.mean, joined.error))
        clear = np.abs(mean) > 2 * error
        signs = f"{(clear & (mean > 0)).sum()} / {(clear & (mean < 0)).sum()}"
        share = joined.positive(live)
        rows.append((label, len(tables), share, np.mean(shares), np.nanmean(mean), np.nanmean(error), signs))
    return Table.of("local costs", columns, rows)


def sums_table(sums: Tensor) -> Table:
    """Figure 19."""
    rows = list(zip(("second last cell", "last cell"), sums.tolist(), strict=True))
    title = "sum of the edges' costs, two cells without skip on intermediate edges"
    return Table.of(title, {"": "", "C": "+.2e"}, rows)


def variants_table(variants: Mapping[str, tuple[Sequence[LocalCosts], float]], live: Sequence[int]) -> Table:
    """Figures 29 to 31."""
    rows = []
    for name, (tables, mean) in variants.items():
        joined = last_cell(tables)
        rows.append((name, mean, joined.positive(live), float(np.nanmean(joined.mean[0][:, live]))))
    return Table.of("at initialisation", {"": "", "C": "+.4f", "costs > 0": ".2f", "mean cost": "+.5f"}, rows)
