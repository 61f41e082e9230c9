"""The figures of the wiring study: the numbers of each from searches, and how it is drawn from these in its file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from nasfast.report.plots import GREY, SERIES, draw_cells, literal, new_figure
from nasfast.report.style import EMPTY, INK, ON_DARK, ON_LIGHT, PAPER
from nasfast.research.cells.costs import NONE
from nasfast.research.cells.probe import GROUPS
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult
from nasfast.research.cells.space import CellSpace
from nasfast.research.studies import parts
from nasfast.research.studies.page import Form, drawing, legend, numbers, panels
from nasfast.research.studies.wiring.measure import (
    edge_means,
    intermediate_edges,
    kept_edges,
    live_operations,
    none_probability,
    output_costs,
    positive_share,
    window_steps,
)

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

_INPUT, _INTERMEDIATE = SERIES[0], SERIES[1]
_TINT = "#fdf0e6"
"""Background of the panels of intermediate edges."""
# Panels whose largest values differ by more would leave the smaller ones without a visible difference.
_SCALES_APART = 5
# Width in inches of a figure that fills the page.
_WIDTH = 11
# Up to so many runs are named in a legend; of more it gives the number.
_NAMED_RUNS = 6


def architecture_figures(title: str, found: CellSearchResult) -> list[parts.Figure]:
    """Probabilities per edge, and the graph at five steps, for every type of cell (figures 3 and 12 to 14).

    p (records + 1, edges, ops) is nan where an edge has no such candidate.
    """
    space, steps = found.space, _steps(found)
    cell = space.cell
    figures = []
    at = np.unique(np.linspace(0, len(steps) - 1, 5).round().astype(int))
    for t, kind in enumerate(space.types):
        name = title if len(space.types) == 1 else f"{title}, {kind} cell"
        p = np.where(np.isfinite(found.logits[t]), found.probabilities[:, t], np.nan)
        curves = {"steps": steps, "ops": space.ops, "p": p, **_edges(space)}
        graph = {"inputs": cell.inputs, "nodes": cell.nodes, "outputs": cell.outputs}
        graph |= {"steps": [steps[i] for i in at], "ops": space.ops, "p": p[at]}
        graph["edges"] = [[e.source, e.target] for e in cell.edges]
        figures.append(parts.Figure("edge_prob", f"{name}: probabilities", curves))
        figures.append(parts.Figure("wiring", f"{name}: wiring", graph))
    return figures


def edge_costs(title: str, found: CellSearchResult) -> parts.Figure:
    """Edge costs of the last cell (records, edges) and their sum, beside loss and accuracy (figures 7 and 10)."""
    cost, count = found.edge_costs[:, TRAIN, -1], found.outputs[:, TRAIN, :, -1]
    accuracy = count[:, GROUPS.index("correct")] / count[:, 0]
    learning = {"loss": found.means(quantity="L"), "accuracy": accuracy}
    data = {"steps": found.steps, "cost": cost, "total": cost.sum(1), **learning, **_edges(found.space)}
    return parts.Figure("edge_cost", title, data)


def output_cost_figure(title: str, found: CellSearchResult) -> parts.Figure:
    """C, L and H of the output by group of samples; `search` only where there are two levels."""

    def curves(which: int) -> dict[str, dict[str, np.ndarray]]:
        return {group: {q: found.means(which, group, q) for q in "CLH"} for group in GROUPS}

    search = curves(SEARCH) if found.cfg.bilevel else None
    return parts.Figure("clh", title, {"steps": found.steps, "train": curves(TRAIN), "search": search})


def patterns(title: str, runs: Mapping[int, CellSearchResult]) -> parts.Figure:
    """Growth, width preference and collapse: costs by window, probabilities of None and edges kept by record."""
    inner = intermediate_edges(next(iter(runs.values())).space)
    rows = []
    for seed, found in runs.items():
        q, kept = none_probability(found), kept_edges(found)
        row: dict[str, Any] = {"name": f"seed {seed}", "steps": window_steps(found), "q_steps": _steps(found)}
        for kind, edges in (("in", ~inner), ("int", inner)):
            row |= {f"q_{kind}": q[:, edges].mean(1), f"kept_{kind}": kept[:, edges].sum(1)}
        row |= {"C": output_costs(found), "positive": positive_share(found)}
        rows.append({**row, "search_C": output_costs(found, SEARCH) if found.cfg.bilevel else None})
    return parts.Figure("patterns", title, {"runs": rows, "n_in": int((~inner).sum()), "n_int": int(inner.sum())})


def cost_heatmap(space: CellSpace, title: str, costs: Mapping[str, np.ndarray]) -> parts.Figure:
    """Figure 4: mean local costs (edges, ops) of the last cell by label, nan where they are not known."""
    live, heat = live_operations(space), []
    for label, values in costs.items():
        known = values[:, live][np.isfinite(values[:, live])]
        shown = values.copy()
        shown[:, space.ops.index(NONE)] = np.nan
        heat.append({"label": label, "mean": shown, "positive": float((known > 0).mean())})
    return parts.Figure("cost_heatmap", title, {"ops": space.ops, "panels": heat, **_edges(space)})


def control(title: str, controls: Mapping[str, Mapping[int, CellSearchResult]]) -> parts.Figure:
    """Figures 8 and 9: the costs (records, edges) of every run of every control."""
    shown = []
    for label, runs in controls.items():
        first = next(iter(runs.values()))
        costs = [
            np.stack([edge_means(found, slice(r, r + 1)) for r in range(len(found.steps))]) for found in runs.values()
        ]
        edges = _edges(first.space)["edges"]
        shown.append({"label": label, "steps": first.steps, "edges": edges, "runs": costs})
    return parts.Figure("control", title, {"panels": shown})


def _edges(space: CellSpace) -> dict[str, Any]:
    return {"edges": [e.name for e in space.cell.edges], "intermediate": list(space.cell.intermediate)}


def _steps(found: CellSearchResult) -> list[int]:
    return [0, *found.steps.tolist()]


@drawing(
    "edge_prob",
    "Probability of every candidate of every edge. Bold black: None. Shaded, with coloured titles: edges between "
    "intermediate nodes.",
)
def _draw_edge_prob(data: Form) -> Figure:
    """The probability of every candidate of every edge."""
    steps, p, count = data["steps"], numbers(data["p"]), len(data["edges"])
    columns = 5 if count > 6 else min(count, 3)
    figure, axes = panels(count, columns, _WIDTH, 1.9 if columns == 5 else 2.5, top=0.9)
    top = min(1.02, 1.05 * np.nanmax(p))
    for e, (ax, edge, intermediate) in enumerate(zip(axes, data["edges"], data["intermediate"], strict=False)):
        for k, op in enumerate(data["ops"]):
            if not np.isnan(p[:, e, k]).all():
                bold = op == NONE
                ax.plot(steps, p[:, e, k], color=_OPERATIONS[op][1], lw=2.4 if bold else 1.2, zorder=3 if bold else 2)
        ax.set_title(edge, fontsize=10, color=_INTERMEDIATE if intermediate else INK)
        if intermediate:
            ax.set_facecolor(_TINT)
        ax.set_ylim(0, top)
        ax.tick_params(labelsize=8, labelleft=e % columns == 0)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if e + columns >= count:
            ax.set_xlabel("step", fontsize=9)
        if e % columns == 0:
            ax.set_ylabel("probability", fontsize=9)
    legend(figure, [_line(op, 2.4 if op == NONE else 1.6) for op in data["ops"]])
    return figure


def _line(op: str, width: float) -> Line2D:
    return Line2D([], [], color=_OPERATIONS[op][1], lw=width, label=op)


@drawing(
    "wiring",
    "The most probable operation of every edge; the line is the wider the less probable None is. Dashed grey: None "
    "is the most probable. Arcs above the nodes come from inputs, those below from intermediate nodes; thin light "
    "arcs lead to the output.",
)
def _draw_wiring(data: Form) -> Figure:
    """Nodes on a line. Edges from inputs are arcs above it, edges between intermediate nodes are arcs below.

    An arc is the higher the more nodes it passes, so that the labels of no two edges lie in one place.
    """
    p = numbers(data["p"])
    columns = 2 if len(data["edges"]) > 6 else 3
    height = 3.1 if min(columns, len(data["steps"])) == 2 else 2.5
    figure, axes = panels(len(data["steps"]), columns, _WIDTH, height, top=0.9)
    shown: set[str] = set()
    for ax, step, probabilities in zip(axes, data["steps"], p, strict=False):
        shown |= _cell(ax, data, probabilities)
        ax.set_title(f"step {step}", fontsize=10)
    handles = [_line(op, 2.5) for op in data["ops"] if op in shown - {NONE}]
    if NONE in shown:
        handles.append(Line2D([], [], color=GREY, lw=1.5, ls="--", label=NONE))
    legend(figure, [*handles, *(_node(kind) for kind in _NODES)])
    return figure


_NODES = {"input node": ("s", "#cfe3f3"), "intermediate node": ("o", PAPER), "output": ("D", EMPTY)}
"""Kind of node -> marker and fill."""


def _node(kind: str) -> Line2D:
    marker, fill = _NODES[kind]
    return Line2D([], [], ls="", marker=marker, ms=8, mfc=fill, mec=INK, mew=0.8, label=kind)


def _cell(ax: Axes, data: Form, p: np.ndarray) -> set[str]:
    """Draw a cell whose edges have probabilities (E, K); returns the operations that it shows."""
    inputs, ops = data["inputs"], data["ops"]
    # a node is drawn at its number, and the output after the last node
    end = inputs + data["nodes"]
    tops = [_arc(ax, node, end, -1, color="#c8c8c8", lw=0.8, zorder=1) for node in data["outputs"]]
    shown = set()
    for (source, target), chances in zip(data["edges"], p, strict=True):
        if np.isnan(chances).all():
            continue
        op = ops[int(np.nanargmax(chances))]
        shown.add(op)
        q = np.nan_to_num(chances[ops.index(NONE)]) if NONE in ops else 0.0
        short, colour = _OPERATIONS[op]
        dropped = op == NONE
        style = {"color": GREY, "ls": (0, (5, 2.5)), "zorder": 2} if dropped else {"color": colour, "zorder": 3}
        tops.append(_arc(ax, source, target, 1 if source < inputs else -1, lw=0.6 + 2.9 * (1 - q), **style))
        if not dropped:
            box = {"fc": PAPER, "ec": "none", "pad": 0.7}
            ax.text(
                (source + target) / 2,
                tops[-1],
                short,
                fontsize=8,
                color=colour,
                fontweight="bold",
                ha="center",
                va="center",
                zorder=5,
                bbox=box,
            )
    for x in range(end + 1):
        marker, fill = _NODES["output" if x == end else "input node" if x < inputs else "intermediate node"]
        ax.plot(x, 0, ls="", marker=marker, ms=16, mfc=fill, mec=INK, mew=0.9, zorder=6)
        text, size = ("out", 6.5) if x == end else (str(x), 9)
        ax.text(x, 0, text, fontsize=size, ha="center", va="center_baseline", zorder=7)
    ax.set(xlim=(-0.4, end + 0.4), ylim=(min([*tops, -0.6]) - 0.4, max([*tops, 0.6]) + 0.4))
    ax.axis("off")
    return shown


def _arc(ax: Axes, start: float, end: float, side: int, **style: Any) -> float:
    """Draw an arc above (side 1) or below (-1) the line of nodes; returns the height of its top."""
    top = side * (0.6 + end - start)
    # longer arcs start further left, so that the arcs of one node nest instead of crossing
    port = 0.16 - 0.05 * (end - start)
    start, end = start + port, end - port
    # the middle of a cubic lies at three quarters of its control points' height
    points = [(start, 0), (start, top / 0.75), (end, top / 0.75), (end, 0)]
    path = Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    ax.add_patch(PathPatch(path, fill=False, capstyle="butt", **style))
    return top


@drawing(
    "cost_heatmap",
    "Mean cost of every operation on every edge: red above zero, blue below. Grey: None, which costs nothing, and "
    "what is no candidate or was not measured. Bold, coloured: edges between intermediate nodes.",
)
def _draw_cost_heatmap(data: Form) -> Figure:
    """The mean cost of every operation on every edge."""
    edges, shown = data["edges"], data["panels"]
    grids = [numbers(panel["mean"]) for panel in shown]
    for grid in grids:
        # the costs of None are zero by definition
        grid[:, [op == NONE for op in data["ops"]]] = np.nan
    # this many panels side by side leave room for numbers of six characters in the cells of ten operations
    columns = 2 if len(data["ops"]) > 5 else 3
    figure, axes = panels(len(shown), columns, _WIDTH, 1.2 + 0.24 * len(edges), top=0.4)
    names = [_OPERATIONS[op][0] for op in data["ops"]]
    limits = _limits(grids)
    for i, (ax, panel, grid, limit) in enumerate(zip(axes, shown, grids, limits, strict=True)):
        unit = 10.0 ** math.floor(math.log10(limit)) if limit < 0.01 else 1.0
        image = _heat(ax, grid / unit, limit / unit)
        ax.set_title(f"{literal(panel['label'])}: {panel['positive']:.0%} of the costs > 0", fontsize=10)
        ax.set_xticks(range(len(names)), names, fontsize=8 if len(names) <= 8 else 7)
        ax.set_yticks(range(len(edges)), edges, fontsize=8)
        for tick, intermediate in zip(ax.get_yticklabels(), data["intermediate"], strict=True):
            if intermediate:
                tick.set(color=_INTERMEDIATE, fontweight="bold")
        one_scale = len(set(limits)) == 1
        if not one_scale or i == 0:
            bar = figure.colorbar(image, ax=list(axes) if one_scale else ax, pad=0.02, aspect=30)
            bar.ax.tick_params(labelsize=8)
            bar.set_label("cost" if unit == 1 else f"cost in units of {unit:.0e}", fontsize=8)
    return figure


def _heat(ax: Axes, grid: np.ndarray, limit: float) -> AxesImage:
    """Image between -limit and limit, white at zero, with its numbers written in it; cells without one are grey."""
    image = draw_cells(ax, grid, "RdBu_r", vmin=-limit, vmax=limit)
    # two digits of the largest; adding zero turns -0.0 into 0.0
    digits = max(0, 1 - math.floor(math.log10(limit)))
    for (i, j), value in np.ndenumerate(grid):
        if not math.isnan(value):
            ax.text(
                j,
                i,
                f"{round(value, digits) + 0.0:.{digits}f}",
                ha="center",
                va="center",
                fontsize=7,
                color=ON_DARK if abs(value) > 0.65 * limit else ON_LIGHT,
            )
    return image


def _limits(groups: Sequence[np.ndarray]) -> list[float]:
    """Largest magnitude of each group; the largest of all where they are near enough to share a scale."""
    limits = [float(np.abs(group[np.isfinite(group)]).max(initial=0)) or 1.0 for group in groups]
    return [max(limits)] * len(limits) if max(limits) <= _SCALES_APART * min(limits) else limits


def _edge_colours(intermediate: Sequence[bool]) -> list[Any]:
    """Blues and greens for input edges, yellow to red for intermediate ones, each in order."""
    maps = {False: (colormaps["viridis"], 0.1, 0.72), True: (colormaps["YlOrRd"], 0.4, 0.95)}
    colours = []
    for e, kind in enumerate(intermediate):
        colour_map, low, high = maps[bool(kind)]
        same = [i for i, other in enumerate(intermediate) if bool(other) == bool(kind)]
        colours.append(colour_map(low + (high - low) * (same.index(e) / max(1, len(same) - 1))))
    return colours


@drawing(
    "edge_cost",
    "Mean cost of every edge, bold the means over input and over intermediate edges; their sum; the training loss "
    "and accuracy of the same steps.",
)
def _draw_edge_cost(data: Form) -> Figure:
    """The costs of the edges, their sum, and loss and accuracy."""
    steps, cost = data["steps"], numbers(data["cost"])
    figure, (costs, total, learning) = new_figure(_WIDTH, 7.8, rows=3)
    for edge, colour, values in zip(data["edges"], _edge_colours(data["intermediate"]), cost.T, strict=True):
        costs.plot(steps, values, color=colour, lw=1.1, label=edge)
    for kind, (name, colour) in enumerate((("mean, input", _INPUT), ("mean, intermediate", _INTERMEDIATE))):
        same = [e for e, intermediate in enumerate(data["intermediate"]) if intermediate == bool(kind)]
        # two lines need no mean
        if len(same) > 2:
            costs.plot(steps, _mean(cost[:, same].T), color=colour, lw=2.6, label=name)
    costs.set(ylabel="cost", title="mean cost per edge")
    costs.legend(
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        fontsize=8,
        frameon=False,
        ncols=2 if len(data["edges"]) > 8 else 1,
    )
    total.plot(steps, numbers(data["total"]), color=INK, lw=1.8)
    total.set(ylabel="cost", title="sum over the edges")
    for ax in (costs, total):
        _zero(ax)
        ax.sharex(learning)
        ax.tick_params(labelbottom=False)
    learning.plot(steps, numbers(data["loss"]), color=_INPUT, lw=1.5, label="loss")
    learning.set(xlabel="step", ylabel="cross-entropy (nats)", title="loss and accuracy")
    learning.set_ylim(bottom=0)
    other = learning.twinx()
    other.spines["top"].set_visible(False)
    other.plot(steps, 100 * numbers(data["accuracy"]), color=_INTERMEDIATE, lw=1.5, label="accuracy")
    other.set(ylim=(0, 101), ylabel="top-1 (%)")
    handles = [*learning.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    learning.legend(handles=handles, loc="center right", fontsize=8, frameon=False)
    return figure


def _mean(curves: Any) -> np.ndarray:
    """Mean over the first axis of what is finite; nan where nothing is."""
    return np.ma.masked_invalid(curves).mean(axis=0).filled(np.nan)


def _zero(ax: Axes) -> None:
    ax.axhline(0, color=GREY, lw=1, ls=":", zorder=1)


@drawing(
    "clh",
    "Cost, loss and entropy of the output, averaged over the samples of each kind. Solid: training batches; "
    "dashed: search batches.",
)
def _draw_clh(data: Form) -> Figure:
    """C, L and H of the output, by group of samples."""
    figure, axes = new_figure(_WIDTH, 4, columns=3)
    names = {"C": "cost C = L - H", "L": "loss L", "H": "entropy H"}
    splits = [(split, style) for split, style in (("train", "-"), ("search", "--")) if data[split] is not None]
    titles = {"all": "all samples", "correct": "correctly classified", "wrong": "wrongly classified"}
    for ax, (group, title) in zip(axes, titles.items(), strict=True):
        for split, style in splits:
            for colour, key in zip(SERIES, names, strict=False):
                width = 2.2 if key == "C" else 1.3
                ax.plot(data["steps"], numbers(data[split][group][key]), color=colour, lw=width, ls=style)
        _zero(ax)
        ax.set(title=title, xlabel="step")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0].set_ylabel("nats")
    handles = [Line2D([], [], color=c, label=name) for c, name in zip(SERIES, names.values(), strict=False)]
    if len(splits) > 1:
        handles += [Line2D([], [], color=INK, ls=style, label=split) for split, style in splits]
    legend(figure, handles)
    return figure


def _runs(
    ax: Axes, curves: Sequence[tuple[Sequence[float], np.ndarray]], colour: Any, label: str, *, style: str = "-"
) -> None:
    """A thin line for each run and a bold one for their mean; all have the same steps."""
    for steps, values in curves:
        ax.plot(steps, values, color=colour, lw=0.8, ls=style, alpha=0.45)
    if curves:
        ax.plot(curves[0][0], _mean([values for _, values in curves]), color=colour, lw=2.3, ls=style, label=label)


@drawing(
    "patterns",
    "Growth, width preference and collapse. Thin: one run each; bold: their mean.",
)
def _draw_patterns(data: Form) -> Figure:
    """Growth, width preference and collapse of every run."""
    runs = data["runs"]
    figure, axes = new_figure(_WIDTH, 6.8, rows=2, columns=2)
    cost, none, kept, positive = axes

    def curves(steps: str, key: str, scale: float = 1.0) -> list[tuple[Sequence[float], np.ndarray]]:
        return [(run[steps], scale * numbers(run[key])) for run in runs if run[key] is not None]

    _runs(cost, curves("steps", "C"), SERIES[2], "training set")
    _runs(cost, curves("steps", "search_C"), SERIES[3], "search set", style="--")
    _zero(cost)
    cost.set(title="cost C of the last cell", ylabel="nats")
    kinds = {"in": ("input edges", _INPUT, data["n_in"]), "int": ("intermediate edges", _INTERMEDIATE, data["n_int"])}
    for kind, (name, colour, count) in kinds.items():
        if count:
            _runs(none, curves("q_steps", f"q_{kind}"), colour, name)
            _runs(kept, curves("q_steps", f"kept_{kind}", 100 / count), colour, f"{name} ({count})")
    none.set(title="mean probability of None", ylabel="q")
    kept.set(title="edges kept: most probable is not None", ylabel="% of the edges", ylim=(-4, 104))
    _runs(positive, curves("steps", "positive", 100), SERIES[2], "mean")
    positive.axhline(50, color=GREY, lw=1, ls=":")
    positive.set(title="costs above zero", ylabel="% of edges and operations", ylim=(-4, 104))
    none.set_ylim(bottom=0)
    for ax in axes:
        ax.set_xlabel("step")
    for ax in (cost, none, kept):
        ax.legend(fontsize=8, frameon=False)
    legend(figure, _run_handles([run["name"] for run in runs]))
    return figure


def _run_handles(names: Sequence[str]) -> list[Line2D]:
    thin = ", ".join(map(literal, names)) if len(names) <= _NAMED_RUNS else f"{len(names)} runs"
    return [
        Line2D([], [], color=INK, lw=0.8, alpha=0.45, label=f"one run: {thin}"),
        Line2D([], [], color=INK, lw=2.3, label="mean"),
    ]


@drawing(
    "control",
    "Mean cost of every edge in each setting. Thin: one run each; bold: their mean.",
)
def _draw_control(data: Form) -> Figure:
    """The costs of the edges in every control."""
    shown = data["panels"]
    columns = min(len(shown), 3)
    figure, axes = panels(len(shown), columns, _WIDTH, 2.8, top=0.8)
    edges = list(dict.fromkeys(edge for panel in shown for edge in panel["edges"]))
    few = len(edges) <= len(SERIES)
    colours = dict(zip(edges, SERIES if few else _edge_colours([False] * len(edges)), strict=False))
    groups = [[numbers(run) for run in panel["runs"]] for panel in shown]
    for i, (ax, panel, runs) in enumerate(zip(axes, shown, groups, strict=True)):
        for e, edge in enumerate(panel["edges"]):
            _runs(ax, [(panel["steps"], run[:, e]) for run in runs], colours[edge], edge)
        _zero(ax)
        ax.set_title(literal(panel["label"]), fontsize=10)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if i + columns >= len(shown):
            ax.set_xlabel("step")
        if i % columns == 0:
            ax.set_ylabel("mean cost")
    if len(set(_limits(list(map(np.array, groups))))) == 1:
        low, high = (pick(ax.get_ylim()[k] for ax in axes) for k, pick in enumerate((min, max)))
        for ax in axes:
            ax.set_ylim(low, high)
    legend(figure, [Line2D([], [], color=colours[edge], lw=2.3, label=edge) for edge in edges])
    return figure
