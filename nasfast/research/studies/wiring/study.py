"""The wiring study: its five kinds, each `run(config, out, task) -> StudyReport`.

`theorems` checks the theorems on local costs, `p1` to `p3` show the three patterns, and `cost` measures local costs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nasfast.research.cells.montecarlo import monte_carlo
from nasfast.research.cells.search import CellSearchResult
from nasfast.research.cells.space import CELLS, DARTS_OPS
from nasfast.research.studies.parts import Check
from nasfast.research.studies.report import StudyReport
from nasfast.research.studies.run import Task
from nasfast.research.studies.wiring import figures, marks, tables
from nasfast.research.studies.wiring.config import (
    CollapseConfig,
    CostConfig,
    ExperimentConfig,
    GrowthConfig,
    LearntConfig,
    TheoremsConfig,
    WidthConfig,
)
from nasfast.research.studies.wiring.measure import (
    Runner,
    Search,
    initial_costs,
    last_cell,
    live_operations,
    loaders,
    runner_of,
    searches_of,
    sign_window,
)
from nasfast.research.studies.wiring.theorems import check_theorems
from nasfast.settings import TaskSettings

Experiment = TypeVar("Experiment", bound=ExperimentConfig)

_METHODS = {"darts": "DARTS", "snas": "SNAS", "dsnas": "DSNAS", "proxyless": "ProxylessNAS"}
_EXPLANATION = (
    "C is the local cost <dL/dX, X> of what an operation, edge or cell puts out; of the last cell it is L - H, "
    "loss minus entropy of the predictions. A positive cost pushes an edge towards None, whose cost is 0, a negative "
    "one away from it. q is the probability of None."
)
_CONTROLS = {
    "simplified": CELLS["simplified"](DARTS_OPS),
    "modified, sampled": CELLS["modified"](DARTS_OPS),
    "modified, (0,1) fixed": CELLS["modified"](DARTS_OPS).restricted(0, 1, ("sep_conv_5x5",)),
}


def theorems(cfg: TheoremsConfig, out: Path | None, task: Task) -> StudyReport:
    """The theorems."""
    rows = check_theorems(channels=cfg.channels, batch=cfg.batch, seed=cfg.seed)
    return StudyReport(
        subject=f"theorems on real networks, {cfg.channels} channels, {cfg.batch} images, float64",
        explanation=_EXPLANATION,
        tables=(tables.theorems_table(rows),),
        checks=tuple(row.check for row in rows),
    )


def _with_runner(study: Callable[[Experiment, Runner], StudyReport]) -> Callable[..., StudyReport]:
    """A study of searches as `run(config, out, task, tasks=None)`, which gives it a `Runner` in its directory."""

    def run(cfg: Experiment, out: Path | None, task: Task, tasks: TaskSettings | None = None) -> StudyReport:
        with runner_of(cfg, out, task, tasks) as runner:
            return study(cfg, runner)

    run.__doc__ = study.__doc__
    return run


def _subject(cfg: LearntConfig, found: CellSearchResult) -> str:
    data = "synthetic images" if cfg.images is None else f"images of {Path(cfg.images).name}"
    return (
        f"{_METHODS[cfg.method]} on {cfg.cells} {cfg.cell} cell(s), {cfg.channels} channels, {found.steps[-1]} steps, "
        f"{data}"
    )


def _notes(cfg: ExperimentConfig) -> tuple[str, ...]:
    if cfg.published:
        return ()
    return ("settings are not those of the pass marks: signs are judged, thresholds are not",)


def _growth(cfg: GrowthConfig, runner: Runner) -> StudyReport:
    """P1."""
    runs = runner.all(searches_of(cfg, cfg.method))
    checks = []
    if cfg.published:
        checks = [check for seed, found in runs.items() for check in marks.growth_checks(seed, found)]
    first, name = next(iter(runs.values())), f"seed {cfg.seed}"
    return StudyReport(
        subject=f"P1, growing: {_subject(cfg, first)}",
        explanation=_EXPLANATION,
        notes=_notes(cfg),
        tables=(tables.measures_table("P1", runs), tables.derivation_table(runs)),
        figures=(
            figures.patterns("P1", runs),
            *figures.architecture_figures(name, first),
            figures.edge_costs(f"{name}: cost and loss", first),
            figures.output_cost_figure(f"{name}: C = L - H", first),
        ),
        verdicts=marks.verdicts("P1", runs),
        checks=tuple(checks),
    )


def _width(cfg: WidthConfig, runner: Runner) -> StudyReport:
    """P2."""
    searches, controlled = searches_of(cfg, cfg.method), _control_searches(cfg)
    runner.prepare(search for of_seeds in (searches, *controlled.values()) for search in of_seeds.values())
    runs = runner.all(searches)
    controls = {label: runner.all(of_seeds) for label, of_seeds in controlled.items()}
    checks = []
    if cfg.published:
        checks = [check for seed, found in runs.items() for check in marks.width_checks(seed, found)]
    if cfg.control_steps == WidthConfig().control_steps:
        checks += marks.control_checks(controls)
    first = next(iter(runs.values()))
    return StudyReport(
        subject=f"P2, width preference: {_subject(cfg, first)}",
        explanation=_EXPLANATION,
        notes=_notes(cfg),
        tables=(tables.measures_table("P2", runs), tables.derivation_table(runs), tables.control_table(controls)),
        figures=(
            figures.patterns("P2", runs),
            *figures.architecture_figures(f"seed {cfg.seed}", first),
            figures.control("control for the cause (figures 8 and 9)", controls),
        ),
        verdicts=marks.verdicts("P2", runs),
        checks=tuple(checks),
    )


def _control_searches(cfg: WidthConfig) -> dict[str, dict[int, Search]]:
    """The searches of every control, with settings of their own, by seed."""
    control = CostConfig(
        cell="modified", steps=cfg.control_steps, seeds=cfg.seeds, seed=cfg.seed, device=cfg.device, records=12
    )
    found: dict[str, dict[int, Search]] = {}
    for label, cell in _CONTROLS.items():
        name = "control-" + "".join(c if c.isalnum() else "_" for c in label)
        found[label] = {}
        for i in range(cfg.seeds):
            of_seed = control.of_seed(i)
            how = of_seed.search(method="uniform", redraw=label != "simplified")
            found[label][of_seed.seed] = Search(name, of_seed, how, cell)
    return found


def _collapse(cfg: CollapseConfig, runner: Runner) -> StudyReport:
    """P3."""
    second = {"second_order": cfg.second_order} if cfg.method == "darts" else {}
    two, one = searches_of(cfg, f"{cfg.method}-bilevel", bilevel=True, **second), searches_of(cfg, cfg.method)
    fixed = CostConfig(
        samples=300, steps=cfg.control_steps, seeds=cfg.seeds, seed=cfg.seed, device=cfg.device, records=12
    )
    tabled = searches_of(fixed, "table", method="darts", bilevel=True, alpha_lr=0.0)
    runner.prepare(search for of_seeds in (two, one, tabled) for search in of_seeds.values())
    runs, single, gates = (runner.all(of_seeds) for of_seeds in (two, one, tabled))
    windows = {seed: sign_window(found) for seed, found in gates.items()}
    checks = []
    if cfg.published:
        checks = [c for seed, found in runs.items() for c in marks.collapse_checks(seed, found, single[seed])]
    if cfg.control_steps == CollapseConfig().control_steps:
        checks += [c for seed, found in gates.items() for c in marks.sign_checks(seed, found, windows[seed])]
    first, first_gates = next(iter(runs.values())), next(iter(gates.values()))
    return StudyReport(
        subject=f"P3, collapse on two levels: {_subject(cfg, first)}",
        explanation=_EXPLANATION,
        notes=_notes(cfg),
        tables=(
            tables.measures_table("P3", runs),
            tables.measures_table("the same search on one level", single),
            tables.derivation_table(runs),
            tables.signs_table(windows),
        ),
        figures=(
            figures.patterns("P3", runs),
            *figures.architecture_figures(f"seed {cfg.seed}", first),
            figures.output_cost_figure("DARTS's gates, probabilities fixed (figure 10)", first_gates),
            figures.edge_costs("DARTS's gates: costs of training batches", first_gates),
        ),
        verdicts=marks.verdicts("P3", runs),
        checks=tuple(checks),
    )


def _cost(cfg: CostConfig, runner: Runner) -> StudyReport:
    """Local costs."""
    space = cfg.space()
    initial, mean_cost = initial_costs(cfg, runner, space, range(cfg.seed, cfg.seed + cfg.nets))
    trained = runner.all(searches_of(cfg, "uniform"))
    late = []
    for seed, found in trained.items():
        loader, _ = loaders(cfg.replace(seed=seed), bilevel=False)
        late.append(monte_carlo(found.net, loader, batches=cfg.batches, seed=seed + 1, device=runner.device)[0])
    costs = {"initialisation": initial, "trained": late}
    checks = []
    if cfg.published:
        share = last_cell(initial).positive(live_operations(space))
        checks = [
            Check("initialisation: mean C", 0, float("inf"), mean_cost),
            Check("initialisation: share of costs > 0", 0.6, 1, share),
        ]
    panels = {label: last_cell(tables_of).mean[0].numpy() for label, tables_of in costs.items()}
    first = next(iter(trained.values()))
    return StudyReport(
        subject=f"local costs of {cfg.cells} {cfg.cell} cell(s), operations sampled uniformly",
        explanation=_EXPLANATION,
        notes=_notes(cfg),
        tables=(
            tables.local_costs_table(space, costs),
            tables.sums_table(cfg, runner),
            tables.variants_table(cfg, runner),
        ),
        figures=(
            figures.cost_heatmap(space, "local costs (figure 4)", panels),
            figures.edge_costs(f"seed {cfg.seed}: operations sampled uniformly", first),
        ),
        checks=tuple(checks),
    )


growth = _with_runner(_growth)
width = _with_runner(_width)
collapse = _with_runner(_collapse)
cost = _with_runner(_cost)
