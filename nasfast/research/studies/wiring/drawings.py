"""How the figures of the wiring study are drawn, from their forms in its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from nasfast.report.plots import GREY, SERIES, draw_cells, literal, new_figure
from nasfast.report.style import EMPTY, INK, ON_DARK, ON_LIGHT, PAPER
from nasfast.research.studies.page import Form

_NONE = "none"
_OPERATIONS = {
    _NONE: ("none", INK),
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


def _numbers(values: Any) -> np.ndarray:
    """Nested lists as float64; None becomes nan."""
    return np.array(values, dtype=float)


def draw_edge_prob(data: Form) -> Figure:
    """The probability of every candidate of every edge."""
    steps, p, count = data["steps"], _numbers(data["p"]), len(data["edges"])
    columns = 5 if count > 6 else min(count, 3)
    rows = math.ceil(count / columns)
    figure, axes = new_figure(_WIDTH, 0.9 + (1.9 if columns == 5 else 2.5) * rows, rows=rows, columns=columns)
    top = min(1.02, 1.05 * np.nanmax(p))
    for e, (ax, edge, intermediate) in enumerate(zip(axes, data["edges"], data["intermediate"], strict=False)):
        for k, op in enumerate(data["ops"]):
            if not np.isnan(p[:, e, k]).all():
                bold = op == _NONE
                ax.plot(steps, p[:, e, k], color=_OPERATIONS[op][1], lw=2.4 if bold else 1.2, zorder=3 if bold else 2)
        ax.set_title(edge, fontsize=10, color=_INTERMEDIATE if intermediate else INK)
        if intermediate:
            ax.set_facecolor(_TINT)
        ax.set_ylim(0, top)
        ax.tick_params(labelsize=8, labelleft=e % columns == 0)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if e >= (rows - 1) * columns:
            ax.set_xlabel("step", fontsize=9)
        if e % columns == 0:
            ax.set_ylabel("probability", fontsize=9)
    for ax in axes[count:]:
        ax.remove()
    _legend(figure, [_line(op, 2.4 if op == _NONE else 1.6) for op in data["ops"]])
    return figure


def _line(op: str, width: float) -> Line2D:
    return Line2D([], [], color=_OPERATIONS[op][1], lw=width, label=op)


def _legend(figure: Figure, handles: Sequence[Artist], *, columns: int = 8) -> None:
    """One legend for all panels, below them, in rows of about equal length."""
    rows = math.ceil(len(handles) / columns)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=math.ceil(len(handles) / rows), fontsize=8, frameon=False
    )


def draw_wiring(data: Form) -> Figure:
    """Nodes on a line. Edges from inputs are arcs above it, edges between intermediate nodes are arcs below.

    An arc is the higher the more nodes it passes, so that the labels of no two edges lie in one place.
    """
    p = _numbers(data["p"])
    columns = min(len(data["steps"]), 2 if len(data["edges"]) > 6 else 3)
    rows = math.ceil(len(data["steps"]) / columns)
    figure, axes = new_figure(_WIDTH, 0.9 + (3.1 if columns == 2 else 2.5) * rows, rows=rows, columns=columns)
    shown: set[str] = set()
    for ax, step, probabilities in zip(axes, data["steps"], p, strict=False):
        shown |= _cell(ax, data, probabilities)
        ax.set_title(f"step {step}", fontsize=10)
    for ax in axes[len(data["steps"]) :]:
        ax.remove()
    handles = [_line(op, 2.5) for op in data["ops"] if op in shown - {_NONE}]
    if _NONE in shown:
        handles.append(Line2D([], [], color=GREY, lw=1.5, ls="--", label=_NONE))
    _legend(figure, [*handles, *(_node(kind) for kind in _NODES)])
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
        q = np.nan_to_num(chances[ops.index(_NONE)]) if _NONE in ops else 0.0
        short, colour = _OPERATIONS[op]
        dropped = op == _NONE
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


def draw_cost_heatmap(data: Form) -> Figure:
    """The mean cost of every operation on every edge."""
    edges, panels = data["edges"], data["panels"]
    grids = [_numbers(panel["mean"]) for panel in panels]
    for grid in grids:
        # the costs of None are zero by definition
        grid[:, [op == _NONE for op in data["ops"]]] = np.nan
    # this many panels side by side leave room for numbers of six characters in the cells of ten operations
    columns = min(len(panels), 2 if len(data["ops"]) > 5 else 3)
    rows = math.ceil(len(panels) / columns)
    figure, axes = new_figure(_WIDTH, 0.4 + (1.2 + 0.24 * len(edges)) * rows, rows=rows, columns=columns)
    for ax in axes[len(panels) :]:
        ax.remove()
    axes, names = axes[: len(panels)], [_OPERATIONS[op][0] for op in data["ops"]]
    limits = _limits(grids)
    for i, (ax, panel, grid, limit) in enumerate(zip(axes, panels, grids, limits, strict=True)):
        unit = 10.0 ** math.floor(math.log10(limit)) if limit < 0.01 else 1.0
        image = _heat(ax, grid / unit, limit / unit)
        positive, negative = panel["positive"], panel.get("negative")
        counts = "no costs" if positive is None else f"{positive:.0%} of the costs > 0"
        counts += "" if negative is None else f", {negative:.0%} < 0"
        ax.set_title(f"{literal(panel['label'])}: {counts}", fontsize=10)
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


def draw_edge_cost(data: Form) -> Figure:
    """The costs of the edges, their sum, and loss and accuracy."""
    steps, cost = data["steps"], _numbers(data["cost"])
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
    total.plot(steps, _numbers(data["total"]), color=INK, lw=1.8)
    total.set(ylabel="cost", title="sum over the edges")
    for ax in (costs, total):
        _zero(ax)
        ax.sharex(learning)
        ax.tick_params(labelbottom=False)
    learning.plot(steps, _numbers(data["loss"]), color=_INPUT, lw=1.5, label="loss")
    learning.set(xlabel="step", ylabel="cross-entropy (nats)", title="loss")
    learning.set_ylim(bottom=0)
    if data["accuracy"] is not None:
        other = learning.twinx()
        other.spines["top"].set_visible(False)
        other.plot(steps, 100 * _numbers(data["accuracy"]), color=_INTERMEDIATE, lw=1.5, label="accuracy")
        other.set(ylim=(0, 101), ylabel="top-1 (%)")
        learning.set_title("loss and accuracy")
        handles = [*learning.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
        learning.legend(handles=handles, loc="center right", fontsize=8, frameon=False)
    return figure


def _mean(curves: Any) -> np.ndarray:
    """Mean over the first axis of what is finite; nan where nothing is."""
    return np.ma.masked_invalid(curves).mean(axis=0).filled(np.nan)


def _zero(ax: Axes) -> None:
    ax.axhline(0, color=GREY, lw=1, ls=":", zorder=1)


def draw_clh(data: Form) -> Figure:
    """C, L and H of the output, by group of samples."""
    figure, axes = new_figure(_WIDTH, 4, columns=3)
    names = {"C": "cost C = L - H", "L": "loss L", "H": "entropy H"}
    splits = [(split, style) for split, style in (("train", "-"), ("search", "--")) if data[split] is not None]
    titles = {"all": "all samples", "correct": "correctly classified", "wrong": "wrongly classified"}
    for ax, (group, title) in zip(axes, titles.items(), strict=True):
        for split, style in splits:
            for colour, key in zip(SERIES, names, strict=False):
                width = 2.2 if key == "C" else 1.3
                ax.plot(data["steps"], _numbers(data[split][group][key]), color=colour, lw=width, ls=style)
        _zero(ax)
        ax.set(title=title, xlabel="step")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0].set_ylabel("nats")
    handles = [Line2D([], [], color=c, label=name) for c, name in zip(SERIES, names.values(), strict=False)]
    if len(splits) > 1:
        handles += [Line2D([], [], color=INK, ls=style, label=split) for split, style in splits]
    _legend(figure, handles)
    return figure


def _runs(
    ax: Axes, curves: Iterable[tuple[Sequence[float], np.ndarray]], colour: Any, label: str, *, style: str = "-"
) -> None:
    """A thin line for each run and a bold one for their mean, where they have the same steps."""
    curves = list(curves)
    for steps, values in curves:
        ax.plot(steps, values, color=colour, lw=0.8, ls=style, alpha=0.45)
    if curves and all(list(steps) == list(curves[0][0]) for steps, _ in curves):
        ax.plot(curves[0][0], _mean([values for _, values in curves]), color=colour, lw=2.3, ls=style, label=label)
    elif curves:
        ax.plot([], [], color=colour, lw=0.8, ls=style, label=label)


def draw_patterns(data: Form) -> Figure:
    """Growth, width preference and collapse of every run."""
    runs = data["runs"]
    figure, axes = new_figure(_WIDTH, 6.8, rows=2, columns=2)
    cost, none, kept, positive = axes

    def curves(steps: str, key: str, scale: float = 1.0) -> list[tuple[Sequence[float], np.ndarray]]:
        return [(run[steps], scale * _numbers(run[key])) for run in runs if run[key] is not None]

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
    _legend(figure, _run_handles([run["name"] for run in runs]))
    return figure


def _run_handles(names: Sequence[str]) -> list[Line2D]:
    thin = ", ".join(map(literal, names)) if len(names) <= _NAMED_RUNS else f"{len(names)} runs"
    return [
        Line2D([], [], color=INK, lw=0.8, alpha=0.45, label=f"one run: {thin}"),
        Line2D([], [], color=INK, lw=2.3, label="mean"),
    ]


def draw_control(data: Form) -> Figure:
    """The costs of the edges in every control."""
    panels = data["panels"]
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure, axes = new_figure(_WIDTH, 0.8 + 2.8 * rows, rows=rows, columns=columns)
    edges = list(dict.fromkeys(edge for panel in panels for edge in panel["edges"]))
    few = len(edges) <= len(SERIES)
    colours = dict(zip(edges, SERIES if few else _edge_colours([False] * len(edges)), strict=False))
    groups = [[_numbers(run) for run in panel["runs"]] for panel in panels]
    for i, (ax, panel, runs) in enumerate(zip(axes, panels, groups, strict=False)):
        for e, edge in enumerate(panel["edges"]):
            _runs(ax, [(panel["steps"], run[:, e]) for run in runs], colours[edge], edge)
        _zero(ax)
        ax.set_title(literal(panel["label"]), fontsize=10)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if i + columns >= len(panels):
            ax.set_xlabel("step")
        if i % columns == 0:
            ax.set_ylabel("mean cost")
    for ax in axes[len(panels) :]:
        ax.remove()
    if len(set(_limits(list(map(np.array, groups))))) == 1:
        low, high = (pick(ax.get_ylim()[k] for ax in axes[: len(panels)]) for k, pick in enumerate((min, max)))
        for ax in axes[: len(panels)]:
            ax.set_ylim(low, high)
    _legend(figure, [Line2D([], [], color=colours[edge], lw=2.3, label=edge) for edge in edges])
    return figure
