"""The figures of the wiring study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from nasfast.research.cells.costs import NONE
from nasfast.research.cells.probe import GROUPS
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.cells.space import CellSpace
from nasfast.research.studies.draw import INK, SERIES, Figure, heat, level
from nasfast.research.studies.wiring import measure
from nasfast.research.studies.wiring.searches import Runs

_COLOURS = {
    NONE: INK,
    "skip_connect": "#CF6BA0",
    "max_pool_3x3": "#B3202A",
    "avg_pool_3x3": "#E08E00",
    "sep_conv_3x3": "#00558C",
    "dil_conv_3x3": "#00734F",
    "dil_conv_5x5": "#45B97C",
    "sep_conv_5x5": "#3DA5E0",
    "conv_1x1": "#7A3FA0",
    "conv_3x3": "#8C5A2B",
}
"""Operation -> colour, the same in every figure; the sizes of a kind share a hue."""
# Panels whose largest values differ by more would leave the smaller ones without a visible difference.
_SCALES_APART = 5


def probabilities(title: str, run: CellSearchResult, kind: int) -> Figure:
    """Probabilities of the candidates of every edge of a type of cell (figures 3 and 12 to 14)."""
    caption = (
        "Probability of every candidate of every edge. Bold black: None. Shaded: edges between intermediate nodes."
    )
    space, p = run.space, run.probabilities[:, kind]
    edges = space.cell.edges
    figure = Figure(title, caption, len(edges), columns=5 if len(edges) > 6 else 3, height=2.1)
    for e, (ax, edge) in enumerate(zip(figure.axes, edges, strict=True)):
        for k in space.candidates[e]:
            op, steps = space.ops[k], [0, *run.steps]
            ax.plot(steps, p[:, e, k], color=_COLOURS[op], label=op, lw=2.4 if op == NONE else 1.2)
        ax.set(title=edge.name, xlabel="step", ylim=(0, min(1.02, 1.05 * p.max())))
        if space.cell.is_intermediate(edge):
            ax.set_facecolor("#fdf0e6")
    return figure


def _edge_colours(space: CellSpace) -> list[str]:
    """Blues and greens for input edges, yellow to red for intermediate ones, each in order."""
    maps = {False: (colormaps["viridis"], 0.1, 0.72), True: (colormaps["YlOrRd"], 0.4, 0.95)}
    kinds, colours = space.cell.intermediate, []
    for e, kind in enumerate(kinds):
        colour_map, low, high = maps[kind]
        colours.append(to_hex(colour_map(low + (high - low) * kinds[:e].count(kind) / max(1, kinds.count(kind) - 1))))
    return colours


def edge_costs(title: str, run: CellSearchResult) -> Figure:
    """Edge costs of the last cell and their sum, beside loss and accuracy (figures 7 and 10)."""
    caption = (
        "Mean cost of every edge, bold the means over input and over intermediate edges; their sum; the training loss "
        "and accuracy of the same steps."
    )
    figure = Figure(title, caption, 3, columns=1, height=2.4)
    each, total, learning = figure.axes
    steps, cost, count = run.steps, run.edge_costs[:, TRAIN, -1], run.outputs[:, TRAIN, :, -1]
    space, inner = run.space, np.array(run.space.cell.intermediate)
    for edge, colour, values in zip(space.cell.edges, _edge_colours(space), cost.T, strict=True):
        each.plot(steps, values, color=colour, label=edge.name, lw=1.1)
    for colour, name, same in ((SERIES[0], "mean, input", ~inner), (SERIES[1], "mean, intermediate", inner)):
        # two lines need no mean
        if same.sum() > 2:
            each.plot(steps, _mean(cost[:, same].T), color=colour, label=name, lw=2.6)
    each.set(title="mean cost per edge", ylabel="cost")
    total.plot(steps, cost.sum(1), color=INK, lw=1.8)
    total.set(title="sum over the edges", ylabel="cost")
    for ax in (each, total):
        level(ax, 0)
    learning.plot(steps, run.means(quantity="L"), label="loss")
    learning.set(title="loss and accuracy", xlabel="step", ylabel="cross-entropy (nats)", ylim=(0, None))
    right = learning.twinx()
    right.plot(steps, 100 * count[:, GROUPS.index("correct")] / count[:, 0], color=SERIES[1], label="accuracy")
    right.set(ylabel="top-1 (%)", ylim=(0, 101))
    return figure


def output_costs(title: str, run: CellSearchResult) -> Figure:
    """C, L and H of the output by group of samples."""
    caption = (
        "Cost, loss and entropy of the output, averaged over the samples of each kind. Solid: training batches; "
        "dashed: search batches."
    )
    names = {"C": "cost C = L - H", "L": "loss L", "H": "entropy H"}
    figure = Figure(title, caption, len(GROUPS), columns=3, height=3.5)
    for ax, group in zip(figure.axes, GROUPS, strict=True):
        for which, ls in ((TRAIN, "-"), (SEARCH, "--")) if run.cfg.bilevel else ((TRAIN, "-"),):
            for colour, (key, label) in zip(SERIES, names.items(), strict=False):
                values, lw = run.means(which, group, key), 2.2 if key == "C" else 1.3
                ax.plot(run.steps, values, color=colour, label=label if which == TRAIN else None, lw=lw, ls=ls)
        level(ax, 0)
        ax.set(title=f"{group} samples", xlabel="step", ylabel="nats")
    return figure


def _mean(curves: Any) -> np.ndarray:
    """Mean over the first axis of what is finite; nan where nothing is."""
    return np.ma.masked_invalid(curves).mean(axis=0).filled(np.nan)


def _runs(ax: Axes, steps: Any, curves: Sequence[np.ndarray], colour: str, label: str, ls: str = "-") -> None:
    """A thin line for each run and a bold one for their mean."""
    for values in curves:
        ax.plot(steps, values, color=colour, lw=0.8, ls=ls, alpha=0.45)
    if len(curves):
        ax.plot(steps, _mean(curves), color=colour, label=label, lw=2.3, ls=ls)


_THIN = "Thin: one run each; bold: their mean."


def patterns(title: str, runs: Runs) -> Figure:
    """Growth, width preference and collapse: costs by window, probabilities of None and edges kept by record."""
    results = list(runs.values())
    steps = [int(part[-1]) for part in measure.windows(results[0].steps)]
    records, inner = [0, *results[0].steps.tolist()], np.array(results[0].space.cell.intermediate)
    figure = Figure(title, f"Growth, width preference and collapse. {_THIN}", 4, legend=False)
    cost, none, kept_edges, positive_costs = figure.axes
    _runs(cost, steps, [measure.output_costs(run) for run in results], SERIES[2], "training set")
    held_out = [measure.output_costs(run, SEARCH) for run in results if run.cfg.bilevel]
    _runs(cost, steps, held_out, SERIES[3], "search set", "--")
    for name, colour, same in (("input edges", SERIES[0], ~inner), ("intermediate edges", SERIES[1], inner)):
        if same.any():
            _runs(none, records, [measure.none_probability(run)[:, same].mean(1) for run in results], colour, name)
            share = [100 * measure.kept_edges(run)[:, same].mean(1) for run in results]
            _runs(kept_edges, records, share, colour, f"{name} ({same.sum()})")
    _runs(positive_costs, steps, [100 * measure.positive_share(run) for run in results], SERIES[2], "")
    level(cost, 0)
    level(positive_costs, 50)
    cost.set(title="cost C of the last cell", ylabel="nats")
    none.set(title="mean probability of None", ylabel="q", ylim=(0, None))
    kept_edges.set(
        title="edges kept: most probable is not None", xlabel="step", ylabel="% of the edges", ylim=(-4, 104)
    )
    positive_costs.set(title="costs above zero", xlabel="step", ylabel="% of edges and operations", ylim=(-4, 104))
    return figure


def _limits(groups: Sequence[np.ndarray]) -> list[float]:
    """Largest magnitude of each group; the largest of all where they are near enough to share a scale."""
    limits = [float(np.abs(group[np.isfinite(group)]).max(initial=0)) or 1.0 for group in groups]
    return [max(limits)] * len(limits) if max(limits) <= _SCALES_APART * min(limits) else limits


def cost_heatmap(space: CellSpace, title: str, costs: Mapping[str, np.ndarray]) -> Figure:
    """Figure 4: mean local costs (edges, ops) of the last cell by label, nan where they are not known."""
    caption = (
        "Mean cost of every operation on every edge: red above zero, blue below. Grey: None, which costs nothing, and "
        "what is no candidate or was not measured."
    )
    rows, columns = [edge.name for edge in space.cell.edges], space.ops
    # the costs of None are zero by definition
    cells = [np.where([op == NONE for op in space.ops], np.nan, values) for values in costs.values()]
    # this many panels side by side leave room for numbers of six characters in the cells of ten operations
    side = 2 if len(columns) > 5 else 3
    figure = Figure(title, caption, len(costs), columns=side, height=1.2 + 0.24 * len(rows))
    for ax, label, values, limit in zip(figure.axes, costs, cells, _limits(cells), strict=True):
        heat(ax, values, rows, columns, limit=limit, numbers=True)
        ax.set_title(f"{label}: {(values[np.isfinite(values)] > 0).mean():.0%} of the costs > 0")
    return figure


def control(title: str, controls: Mapping[str, Runs]) -> Figure:
    """Figures 8 and 9: the costs of every edge in every run of every control, by record."""

    def by_record(run: CellSearchResult) -> np.ndarray:
        return np.stack([measure.edge_means(run, slice(r, r + 1)) for r in range(len(run.steps))])

    costs = {label: [by_record(run) for run in runs.values()] for label, runs in controls.items()}
    figure = Figure(title, f"Mean cost of every edge in each setting. {_THIN}", len(costs), columns=3, height=2.9)
    limits = _limits([np.array(each) for each in costs.values()])
    for ax, (label, runs), limit in zip(figure.axes, controls.items(), limits, strict=True):
        first = next(iter(runs.values()))
        for e, (colour, edge) in enumerate(zip(SERIES, first.space.cell.edges, strict=False)):
            _runs(ax, first.steps, [run[:, e] for run in costs[label]], colour, edge.name)
        level(ax, 0)
        ax.set(title=label, xlabel="step", ylabel="mean cost")
        if len(set(limits)) == 1:
            ax.set_ylim(-1.1 * limit, 1.1 * limit)
    return figure
