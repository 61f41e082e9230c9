"""The wiring study: its five kinds, each `run(config, out, task) -> StudyReport`, with tables, figures and marks.

`theorems` checks the theorems on local costs, `p1` to `p3` show the three patterns, and `cost` measures local costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from scipy import stats

from nasfast.research.analysis.moments.detect import Verdict
from nasfast.research.cells.costs import NONE
from nasfast.research.cells.derive import derivations
from nasfast.research.cells.probe import GROUPS, LocalCosts
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.cells.space import CELLS, DARTS_OPS, CellSpace
from nasfast.research.studies.draw import INK, SERIES, heat, level, line, panel
from nasfast.research.studies.report import Check, Figure, Form, StudyReport, Table, checks_of
from nasfast.research.studies.run import Task
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
    edge_means,
    half_and_quarter,
    initial_costs,
    intermediate_edges,
    kept_edges,
    last_cell,
    live_operations,
    loaders,
    measures,
    monte_carlo,
    none_probability,
    output_costs,
    positive_share,
    runner_of,
    searches_of,
    sign_window,
    window_steps,
)
from nasfast.research.studies.wiring.theorems import Residual, check_theorems
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
        tables=(theorems_table(rows),),
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
        checks = [check for seed, found in runs.items() for check in growth_checks(seed, found)]
    first, name = next(iter(runs.values())), f"seed {cfg.seed}"
    return StudyReport(
        subject=f"P1, growing: {_subject(cfg, first)}",
        explanation=_EXPLANATION,
        notes=_notes(cfg),
        tables=(measures_table("P1", runs), derivation_table(runs)),
        figures=(
            patterns("P1", runs),
            *architecture_figures(name, first),
            edge_costs(f"{name}: cost and loss", first),
            output_cost_figure(f"{name}: C = L - H", first),
        ),
        verdicts=verdicts("P1", runs),
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
        checks = [check for seed, found in runs.items() for check in width_checks(seed, found)]
    if cfg.control_steps == WidthConfig().control_steps:
        checks += control_checks(controls)
    first = next(iter(runs.values()))
    return StudyReport(
        subject=f"P2, width preference: {_subject(cfg, first)}",
        explanation=_EXPLANATION,
        notes=_notes(cfg),
        tables=(measures_table("P2", runs), derivation_table(runs), control_table(controls)),
        figures=(
            patterns("P2", runs),
            *architecture_figures(f"seed {cfg.seed}", first),
            control("control for the cause (figures 8 and 9)", controls),
        ),
        verdicts=verdicts("P2", runs),
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
        checks = [c for seed, found in runs.items() for c in collapse_checks(seed, found, single[seed])]
    if cfg.control_steps == CollapseConfig().control_steps:
        checks += [c for seed, found in gates.items() for c in sign_checks(seed, found, windows[seed])]
    first, first_gates = next(iter(runs.values())), next(iter(gates.values()))
    return StudyReport(
        subject=f"P3, collapse on two levels: {_subject(cfg, first)}",
        explanation=_EXPLANATION,
        notes=_notes(cfg),
        tables=(
            measures_table("P3", runs),
            measures_table("the same search on one level", single),
            derivation_table(runs),
            signs_table(windows),
        ),
        figures=(
            patterns("P3", runs),
            *architecture_figures(f"seed {cfg.seed}", first),
            output_cost_figure("DARTS's gates, probabilities fixed (figure 10)", first_gates),
            edge_costs("DARTS's gates: costs of training batches", first_gates),
        ),
        verdicts=verdicts("P3", runs),
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
            local_costs_table(space, costs),
            sums_table(cfg, runner),
            variants_table(cfg, runner),
        ),
        figures=(
            cost_heatmap(space, "local costs (figure 4)", panels),
            edge_costs(f"seed {cfg.seed}: operations sampled uniformly", first),
        ),
        checks=tuple(checks),
    )


growth = _with_runner(_growth)
width = _with_runner(_width)
collapse = _with_runner(_collapse)
cost = _with_runner(_cost)


MEASURES = {
    "C_first": "C, first part",
    "C_last": "C, last part",
    "positive_first": "costs > 0, first part",
    "positive_last": "costs > 0, last part",
    "intermediate_minus_input_cost": "cost of intermediate minus input edges of a node",
    "q_in_start": "q of input edges, start",
    "q_in_peak": "peak",
    "q_in_end": "end",
    "kept_in": "input edges kept",
    "n_in": "of",
    "q_int_start": "q of intermediate edges, start",
    "q_int_peak": "peak (intermediate)",
    "q_int_end": "end (intermediate)",
    "kept_int": "intermediate edges kept",
    "n_int": "of (intermediate)",
    "search_C_first": "held-out C, first part",
    "search_C_last": "held-out C, last part",
    "search_C_smallest": "held-out C, smallest part",
    "search_minus_train_C": "held-out minus training C, smallest",
}
"""Name of a measure -> its words in the tables."""


def _interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of Student's t over the seeds."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2 or not np.isfinite(sample).all():
        return "-"
    half = stats.t.ppf(0.975, len(sample) - 1) * sample.std(ddof=1) / np.sqrt(len(sample))
    return f"{sample.mean():.3f} ± {half:.3f}"


def theorems_table(rows: Sequence[Residual]) -> Table:
    """The theorems, with what was measured and its bound."""
    columns = {"": "", "measured": ".2g", "at most": ".0e", "the numbers behind it": ""}
    return Table.of("theorems", columns, [(row.name, row.measured, row.bound, row.note) for row in rows])


def measures_table(title: str, runs: Mapping[int, CellSearchResult]) -> Table:
    """The measures of every seed, and their mean with its interval."""
    of = [measures(found) for found in runs.values()]
    rows = []
    for name in of[0]:
        values = [m[name] for m in of]
        rows.append((MEASURES.get(name, name), *(v if np.isfinite(v) else None for v in values), _interval(values)))
    columns = {"": "", **{f"seed {seed}": ".3f" for seed in runs}, "mean, 95 %": ""}
    return Table.of(title, columns, rows)


def derivation_table(runs: Mapping[int, CellSearchResult]) -> Table:
    """The cells derived by argmax with None (the rule of SNAS, DSNAS and ProxylessNAS) and by DARTS's rule."""
    rows = []
    for seed, found in runs.items():
        own = "darts" if found.cfg.method == "darts" else "argmax"
        for rule, arch in derivations(found.space, found.logits).items():
            text = "; ".join(
                f"{kind}: "
                + " ".join(
                    f"{e.name}={found.space.ops[k]}"
                    for e, k in zip(found.space.cell.edges, part, strict=True)
                    if found.space.ops[k] != NONE
                )
                for kind, part in zip(found.space.types, found.space.parts(arch), strict=True)
            )
            rows.append((f"seed {seed}", rule + (" (its own)" if rule == own else ""), text))
    return Table("cells derived; edges that are None are left out", ("", "rule", "operations"), tuple(rows))


def control_table(controls: Mapping[str, Mapping[int, CellSearchResult]]) -> Table:
    """The costs of the edges early and late, for every control and seed."""
    rows = []
    for label, runs in controls.items():
        for seed, found in runs.items():
            early, late = (edge_means(found, part) for part in half_and_quarter(found))
            rows.append((label, f"seed {seed}", *(f"{v:+.3f}" for v in (*early, *late))))
    edges = [e.name for e in found.space.cell.edges]
    header = ("control", "", *(f"{e} {part}" for part in ("first half", "last quarter") for e in edges))
    return Table("mean cost of the edges, operations sampled uniformly", header, tuple(rows))


def signs_table(windows: Mapping[int, Mapping[int, Any]]) -> Table:
    """C, L and H of every seed by set of images, and below them the published ones."""
    rows = []
    for seed, window in windows.items():
        for group in ("correct", "wrong"):
            values = [window[which][group][q] for q in "CLH" for which in (TRAIN, SEARCH)]
            rows.append((f"{group}, seed {seed}", *(f"{v:+.2f}" for v in values)))
    rows.append(("correct, published", *"-0.11 -0.11 0.06 0.08 0.17 0.19".split()))
    rows.append(("wrong, published", *"0.80 2.18 1.70 2.92 0.90 0.74".split()))
    header = ("", *(f"{q} {s}" for q in "CLH" for s in ("train", "search")))
    return Table("C, L, H with DARTS's gates, probabilities fixed, middle of the run", header, tuple(rows))


def local_costs_table(space: CellSpace, costs: Mapping[str, Sequence[LocalCosts]]) -> Table:
    """The costs of the last cell, for every state of the networks."""
    columns = {"last cell": "", "networks": "", "costs > 0": ".2f", "of single networks": ".2f"}
    columns |= {"mean cost": "+.4f", "error over batches": ".4f", "clearly + / -": ""}
    live, rows = live_operations(space), []
    for label, tables in costs.items():
        joined = last_cell(tables)
        shares = [last_cell([t]).positive(live) for t in tables]
        mean, error = (v[0][:, live].numpy() for v in (joined.mean, joined.error))
        clear = np.abs(mean) > 2 * error
        signs = f"{(clear & (mean > 0)).sum()} / {(clear & (mean < 0)).sum()}"
        share = joined.positive(live)
        rows.append((label, len(tables), share, np.mean(shares), np.nanmean(mean), np.nanmean(error), signs))
    return Table.of("local costs", columns, rows)


def sums_table(cfg: CostConfig, runner: Runner) -> Table:
    """Figure 19: without the skip term, the costs of the cells before the last add up to next to nothing."""
    two = cfg.replace(cells=2, reductions=False, no_skip_on_intermediate=True)
    tables, _ = initial_costs(two, runner, two.space(), [cfg.seed])
    sums = tables[0].total.sum((1, 2)) / cfg.batches
    columns = {"": "", "C": "+.2e"}
    rows = zip(("second last cell", "last cell"), sums.tolist(), strict=True)
    return Table.of("sum of the edges' costs, two cells without skip on intermediate edges", columns, list(rows))


def variants_table(cfg: CostConfig, runner: Runner) -> Table:
    """Figures 29 to 31: other orders of convolution, norm and ReLU, and other norms, at initialisation."""
    rows = []
    variants: list[dict[str, Any]] = [{"order": "conv_relu_norm"}, {"order": "conv_norm_relu"}, {"norm": "layer"}]
    for changes in [{}, *variants, {"norm": "instance"}]:
        other = cfg.replace(**changes)
        space = other.space()
        tables, mean = initial_costs(other, runner, space, range(cfg.seed, cfg.seed + max(1, cfg.nets // 3)))
        joined, live = last_cell(tables), live_operations(space)
        name = ", ".join(f"{k} {v}" for k, v in changes.items()) or "as above"
        rows.append((name, mean, joined.positive(live), float(np.nanmean(joined.mean[0][:, live]))))
    return Table.of("at initialisation", {"": "", "C": "+.4f", "costs > 0": ".2f", "mean cost": "+.5f"}, rows)


_OPERATIONS = {
    NONE: ("none", INK),
    "skip_connect": ("skip", "#CF6BA0"),
    "max_pool_3x3": ("max 3", "#B3202A"),
    "avg_pool_3x3": ("avg 3", "#E08E00"),
    "sep_conv_3x3": ("sep 3", "#00558C"),
    "dil_conv_3x3": ("dil 3", "#00734F"),
    "dil_conv_5x5": ("dil 5", "#45B97C"),
    "sep_conv_5x5": ("sep 5", "#3DA5E0"),
    "conv_1x1": ("conv 1", "#7A3FA0"),
    "conv_3x3": ("conv 3", "#8C5A2B"),
}
"""Operation -> short name and colour, the same in every figure; the sizes of a kind share a hue."""

# Panels whose largest values differ by more would leave the smaller ones without a visible difference.
_SCALES_APART = 5


def architecture_figures(title: str, found: CellSearchResult) -> list[Figure]:
    """Probabilities per edge, and the graph at five steps, for every type of cell (figures 3 and 12 to 14)."""
    space, steps = found.space, [0, *found.steps.tolist()]
    figures = []
    for t, kind in enumerate(space.types):
        name = title if len(space.types) == 1 else f"{title}, {kind} cell"
        # nan where an edge has no such candidate
        p = np.where(np.isfinite(found.logits[t]), found.probabilities[:, t], np.nan)
        figures += [
            _probabilities(f"{name}: probabilities", space, steps, p),
            _wiring(f"{name}: wiring", space, steps, p),
        ]
    return figures


def _probabilities(title: str, space: CellSpace, steps: Sequence[int], p: np.ndarray) -> Figure:
    panels, top = [], min(1.02, 1.05 * np.nanmax(p))
    for e, edge in enumerate(space.cell.edges):
        marks = []
        for k, op in enumerate(space.ops):
            bold = {"lw": 2.4, "zorder": 3} if op == NONE else {"lw": 1.2}
            if not np.isnan(p[:, e, k]).all():
                marks.append(line(steps, p[:, e, k], _OPERATIONS[op][1], op, **bold))
        tint = "#fdf0e6" if space.cell.is_intermediate(edge) else ""
        panels.append(panel(edge.name, *marks, x="step", ylim=(0, top), tint=tint))
    caption = (
        "Probability of every candidate of every edge. Bold black: None. Shaded: edges between intermediate nodes."
    )
    return Figure(title, caption, panels, columns=5 if len(panels) > 6 else 3, height=2.1)


def _wiring(title: str, space: CellSpace, steps: Sequence[int], p: np.ndarray) -> Figure:
    cell, panels = space.cell, []
    for i in np.unique(np.linspace(0, len(steps) - 1, 5).round().astype(int)):
        edges = []
        for edge, chances in zip(cell.edges, p[i], strict=True):
            if np.isnan(chances).all():
                continue
            op = space.ops[int(np.nanargmax(chances))]
            short, colour = _OPERATIONS[op]
            none = np.nan_to_num(chances[space.ops.index(NONE)]) if NONE in space.ops else 0.0
            edges.append([edge.source, edge.target, "" if op == NONE else short, colour, 1 - none])
        shape = {"inputs": cell.inputs, "nodes": cell.nodes, "outputs": cell.outputs}
        panels.append(panel(f"step {steps[i]}", {"mark": "graph", "edges": edges, **shape}))
    caption = (
        "The most probable operation of every edge; the line is the wider the less probable None is. Dashed grey: None "
        "is the most probable. Arcs above the nodes come from inputs (squares), those below from intermediate nodes; "
        "thin light arcs lead to the output."
    )
    return Figure(title, caption, panels, columns=2 if len(cell.edges) > 6 else 3, height=2.9)


def _edge_colours(space: CellSpace) -> list[str]:
    """Blues and greens for input edges, yellow to red for intermediate ones, each in order."""
    maps = {False: (colormaps["viridis"], 0.1, 0.72), True: (colormaps["YlOrRd"], 0.4, 0.95)}
    kinds, colours = space.cell.intermediate, []
    for e, kind in enumerate(kinds):
        colour_map, low, high = maps[kind]
        colours.append(to_hex(colour_map(low + (high - low) * kinds[:e].count(kind) / max(1, kinds.count(kind) - 1))))
    return colours


def edge_costs(title: str, found: CellSearchResult) -> Figure:
    """Edge costs of the last cell and their sum, beside loss and accuracy (figures 7 and 10)."""
    steps, cost, count = found.steps, found.edge_costs[:, TRAIN, -1], found.outputs[:, TRAIN, :, -1]
    space, inner = found.space, intermediate_edges(found.space)
    edges = zip(space.cell.edges, _edge_colours(space), cost.T, strict=True)
    marks = [line(steps, values, colour, edge.name, lw=1.1) for edge, colour, values in edges]
    for colour, name, same in ((SERIES[0], "mean, input", ~inner), (SERIES[1], "mean, intermediate", inner)):
        # two lines need no mean
        if same.sum() > 2:
            marks.append(line(steps, _mean(cost[:, same].T), colour, name, lw=2.6))
    accuracy = 100 * count[:, GROUPS.index("correct")] / count[:, 0]
    panels = [
        panel("mean cost per edge", *marks, level(0), y="cost"),
        panel("sum over the edges", line(steps, cost.sum(1), INK, lw=1.8), level(0), y="cost"),
        panel(
            "loss and accuracy",
            line(steps, found.means(quantity="L"), SERIES[0], "loss"),
            x="step",
            y="cross-entropy (nats)",
            ylim=(0, None),
            twin=panel("", line(steps, accuracy, SERIES[1], "accuracy"), y="top-1 (%)", ylim=(0, 101)),
        ),
    ]
    caption = (
        "Mean cost of every edge, bold the means over input and over intermediate edges; their sum; the training loss "
        "and accuracy of the same steps."
    )
    return Figure(title, caption, panels, columns=1, height=2.4)


def output_cost_figure(title: str, found: CellSearchResult) -> Figure:
    """C, L and H of the output by group of samples."""
    names = {"C": "cost C = L - H", "L": "loss L", "H": "entropy H"}
    titles = {"all": "all samples", "correct": "correctly classified", "wrong": "wrongly classified"}
    panels = []
    for group, text in titles.items():
        marks = []
        for which, ls in ((TRAIN, "-"), (SEARCH, "--")) if found.cfg.bilevel else ((TRAIN, "-"),):
            for colour, (key, label) in zip(SERIES, names.items(), strict=False):
                values, lw = found.means(which, group, key), 2.2 if key == "C" else 1.3
                marks.append(line(found.steps, values, colour, label if which == TRAIN else "", lw=lw, ls=ls))
        panels.append(panel(text, *marks, level(0), x="step", y="nats"))
    caption = (
        "Cost, loss and entropy of the output, averaged over the samples of each kind. Solid: training batches; "
        "dashed: search batches."
    )
    return Figure(title, caption, panels, columns=3, height=3.5)


def _mean(curves: Any) -> np.ndarray:
    """Mean over the first axis of what is finite; nan where nothing is."""
    return np.ma.masked_invalid(curves).mean(axis=0).filled(np.nan)


def _runs(steps: Any, curves: Sequence[np.ndarray], colour: str, label: str, ls: str = "-") -> list[Form]:
    """A thin line for each run and a bold one for their mean."""
    if not len(curves):
        return []
    thin = [line(steps, values, colour, lw=0.8, ls=ls, alpha=0.45) for values in curves]
    return [*thin, line(steps, _mean(curves), colour, label, lw=2.3, ls=ls)]


_THIN = "Thin: one run each; bold: their mean."


def patterns(title: str, runs: Mapping[int, CellSearchResult]) -> Figure:
    """Growth, width preference and collapse: costs by window, probabilities of None and edges kept by record."""
    found = list(runs.values())
    space, steps, records = found[0].space, window_steps(found[0]), [0, *found[0].steps.tolist()]
    inner = intermediate_edges(space)
    none, kept = [], []
    for name, colour, same in (("input edges", SERIES[0], ~inner), ("intermediate edges", SERIES[1], inner)):
        if same.any():
            none += _runs(records, [none_probability(run)[:, same].mean(1) for run in found], colour, name)
            share = [100 * kept_edges(run)[:, same].mean(1) for run in found]
            kept += _runs(records, share, colour, f"{name} ({same.sum()})")
    held = [output_costs(run, SEARCH) for run in found if run.cfg.bilevel]
    cost = _runs(steps, [output_costs(run) for run in found], SERIES[2], "training set")
    cost += _runs(steps, held, SERIES[3], "search set", "--")
    positive = _runs(steps, [100 * positive_share(run) for run in found], SERIES[2], "")
    panels = [
        panel("cost C of the last cell", *cost, level(0), x="step", y="nats", legend=True),
        panel("mean probability of None", *none, x="step", y="q", ylim=(0, None), legend=True),
        panel(
            "edges kept: most probable is not None", *kept, x="step", y="% of the edges", ylim=(-4, 104), legend=True
        ),
        panel("costs above zero", *positive, level(50), x="step", y="% of edges and operations", ylim=(-4, 104)),
    ]
    return Figure(title, f"Growth, width preference and collapse. {_THIN}", panels, legend=False)


def _limits(groups: Sequence[np.ndarray]) -> list[float]:
    """Largest magnitude of each group; the largest of all where they are near enough to share a scale."""
    limits = [float(np.abs(group[np.isfinite(group)]).max(initial=0)) or 1.0 for group in groups]
    return [max(limits)] * len(limits) if max(limits) <= _SCALES_APART * min(limits) else limits


def cost_heatmap(space: CellSpace, title: str, costs: Mapping[str, np.ndarray]) -> Figure:
    """Figure 4: mean local costs (edges, ops) of the last cell by label, nan where they are not known."""
    live, panels = live_operations(space), []
    rows, columns = [edge.name for edge in space.cell.edges], [_OPERATIONS[op][0] for op in space.ops]
    # the costs of None are zero by definition
    shown = [np.where([op == NONE for op in space.ops], np.nan, values) for values in costs.values()]
    for label, values, limit in zip(costs, shown, _limits(shown), strict=True):
        known = values[:, live][np.isfinite(values[:, live])]
        unit = 10.0 ** math.floor(math.log10(limit)) if limit < 0.01 else 1.0
        grid = heat(values, rows, columns, limit=limit, unit=unit, bold=space.cell.intermediate, numbers=True)
        panels.append(panel(f"{label}: {(known > 0).mean():.0%} of the costs > 0", grid))
    caption = (
        "Mean cost of every operation on every edge: red above zero, blue below. Grey: None, which costs nothing, and "
        "what is no candidate or was not measured. Bold, coloured: edges between intermediate nodes."
    )
    # this many panels side by side leave room for numbers of six characters in the cells of ten operations
    return Figure(title, caption, panels, columns=2 if len(columns) > 5 else 3, height=1.2 + 0.24 * len(rows))


def control(title: str, controls: Mapping[str, Mapping[int, CellSearchResult]]) -> Figure:
    """Figures 8 and 9: the costs (records, edges) of every run of every control."""
    panels = []
    costs = {
        label: [np.stack([edge_means(run, slice(r, r + 1)) for r in range(len(run.steps))]) for run in runs.values()]
        for label, runs in controls.items()
    }
    limits = _limits([np.array(each) for each in costs.values()])
    same = 1.1 * limits[0] if len(set(limits)) == 1 else None
    for label, runs in controls.items():
        first = next(iter(runs.values()))
        edges = zip(SERIES, first.space.cell.edges, strict=False)
        marks = [
            m
            for e, (colour, edge) in enumerate(edges)
            for m in _runs(first.steps, [run[:, e] for run in costs[label]], colour, edge.name)
        ]
        ylim = (None if same is None else -same, same)
        panels.append(panel(label, *marks, level(0), x="step", y="mean cost", ylim=ylim))
    return Figure(title, f"Mean cost of every edge in each setting. {_THIN}", panels, columns=3, height=2.9)


PATTERNS: dict[str, tuple[str, dict[str, Callable[[Mapping[str, float]], bool]]]] = {
    "P1": (
        "growing",
        {
            "C turns from positive to negative": lambda m: m["C_first"] > 0 > m["C_last"],
            "None gains at first": lambda m: m["q_in_peak"] > 1.02 * m["q_in_start"],
            "and loses in the end": lambda m: m["q_in_end"] < m["q_in_start"],
            "fewer costs are positive": lambda m: m["positive_last"] < m["positive_first"],
        },
    ),
    "P2": (
        "width preferred",
        {
            "intermediate edges are less probable": lambda m: m["q_int_end"] > m["q_in_end"],
            "fewer of them are kept": lambda m: m["kept_int"] / m["n_int"] < m["kept_in"] / m["n_in"],
            "they cost more than input edges of their nodes": lambda m: m["intermediate_minus_input_cost"] > 0,
        },
    ),
    "P3": (
        "collapsed",
        {
            "all edges are None": lambda m: m["kept_in"] + m["kept_int"] == 0,
            "held-out C stays positive": lambda m: m["search_C_smallest"] > 0,
            "training C is below it": lambda m: m["search_minus_train_C"] > 0,
        },
    ),
}
"""Pattern -> its name where all signs are seen in the measures of a search, and the signs."""


def verdicts(pattern: str, runs: Mapping[int, CellSearchResult]) -> dict[str, Verdict]:
    """The signs of a pattern in the search of every seed; where some are not seen, they are named instead."""
    name, signs = PATTERNS[pattern]
    found = {}
    for seed, result in runs.items():
        seen = {what: bool(is_so(measures(result))) for what, is_so in signs.items()}
        missing = [what for what, is_so in seen.items() if not is_so]
        names = f"not seen: {', '.join(missing)}" if missing else name
        found[f"{pattern}, seed {seed}"] = Verdict((names,), {**seen})
    return found


def growth_checks(seed: int, found: CellSearchResult) -> list[Check]:
    """Marks of P1, for one seed."""
    m = measures(found)
    marks = {
        "C of the first part": (0, math.inf, m["C_first"]),
        "C of the last part": (-math.inf, 0, m["C_last"]),
        "peak of q of input edges": (0.13, 1, m["q_in_peak"]),
        "q of input edges at the end": (0, 0.06, m["q_in_end"]),
        "input edges kept": (m["n_in"], m["n_in"], m["kept_in"]),
    }
    return checks_of(f"seed {seed}", marks)


def width_checks(seed: int, found: CellSearchResult) -> list[Check]:
    """Marks of P2, for one seed."""
    m = measures(found)
    marks = {
        "intermediate edges kept": (0, 2, m["kept_int"]),
        "input edges kept": (m["n_in"], m["n_in"], m["kept_in"]),
        "cost of intermediate minus input edges of a node": (0, math.inf, m["intermediate_minus_input_cost"]),
    }
    return checks_of(f"seed {seed}", marks)


def control_checks(controls: Mapping[str, Mapping[int, CellSearchResult]]) -> list[Check]:
    """Marks of the control for the cause of P2, for every control and seed."""
    checks = []
    for label, runs in controls.items():
        for seed, found in runs.items():
            early, late = (edge_means(found, part) for part in half_and_quarter(found))
            sign = (-math.inf, 0.0) if label.endswith("fixed") else (0.0, math.inf)
            marks = {"cost of (1,2) minus (0,2), last quarter": (*sign, float(late[2] - late[1]))}
            if label == "modified, sampled":
                marks["cost of (1,2) minus (0,1), first half"] = (0.0, math.inf, float(early[2] - early[0]))
            checks += checks_of(f"{label}, seed {seed}", marks)
    return checks


def collapse_checks(seed: int, found: CellSearchResult, one_level: CellSearchResult) -> list[Check]:
    """Marks of P3, for one seed: its search on two levels, and the same search on one."""
    m = measures(found)
    total = m["n_in"] + m["n_int"]
    dropped = float((kept_edges(one_level)[-1] == 0).sum())
    marks = {
        "edges that are None": (total - 1, total, total - m["kept_in"] - m["kept_int"]),
        "held-out C, smallest part": (0, math.inf, m["search_C_smallest"]),
        "held-out minus training C, smallest part": (0, math.inf, m["search_minus_train_C"]),
        "edges that are None on one level": (0, 6, dropped),
    }
    return checks_of(f"seed {seed}", marks)


def sign_checks(seed: int, found: CellSearchResult, window: Mapping[int, Any]) -> list[Check]:
    """Marks of the signs of C, L and H with DARTS's gates."""
    train, search = window[TRAIN], window[SEARCH]
    curve = found.means(SEARCH)
    late = len(curve) // 2

    def apart(group: str, quantity: str) -> float:
        return search[group][quantity] - train[group][quantity]

    marks = {
        "correct C, training": (-math.inf, 0, train["correct"]["C"]),
        "correct C, held out": (-math.inf, 0, search["correct"]["C"]),
        "wrong L, held out minus training": (0, math.inf, apart("wrong", "L")),
        "wrong H, held out minus training": (-math.inf, 0, apart("wrong", "H")),
        "wrong C, held out minus training": (0.5, math.inf, apart("wrong", "C")),
        "held-out C, second half minus first": (0, math.inf, float(curve[late:].mean() - curve[:late].mean())),
    }
    return checks_of(f"table, seed {seed}", marks)
