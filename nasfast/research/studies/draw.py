"""Figures of the studies as data: a study makes panels of marks, and one function draws them from their JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import figure as mpl
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator, NullFormatter

from nasfast.report.plots import GREY, SERIES, draw_cells, literal, new_figure
from nasfast.report.style import EMPTY, INK, ON_DARK, ON_LIGHT, PAPER
from nasfast.research.studies.report import Form

__all__ = ["GREY", "INK", "SERIES", "band", "figure_of", "heat", "line", "literal", "panel"]


def panel(
    title: str,
    *marks: Form,
    x: str = "",
    y: str = "",
    log: str = "",
    ylim: tuple[float | None, float | None] = (None, None),
    legend: bool = False,
    tint: str = "",
    twin: Form | None = None,
) -> Form:
    """One panel of a figure. Text between dollars is TeX in titles and labels; `literal` keeps that of a user as it is.

    Args:
        title: above it.
        marks: what is drawn, in order: made by `line`, `band` and `heat`, or with the arguments of a key of `_MARKS`.
        x, y: labels of the axes.
        log: the logarithmic axes: some of the letters x and y.
        ylim: ends of the vertical axis; None fits an end to the data.
        legend: whether the panel has a legend of its own.
        tint: background.
        twin: a panel with the same horizontal axis, drawn against the right side.
    """
    return {**locals(), "marks": [mark for mark in marks if mark]}


def line(x: Any, y: Any, colour: str = SERIES[0], label: str = "", **style: Any) -> Form:
    """A line through points; `style` takes matplotlib's lw, ls, alpha, marker and the like."""
    return {"mark": "line", "x": x, "y": y, "label": label, "style": {"color": colour, "lw": 1.4, **style}}


def band(x: Any, low: Any, high: Any, colour: str = SERIES[0]) -> Form:
    """The area between two lines."""
    return {"mark": "band", "x": x, "low": low, "high": high, "style": {"color": colour, "alpha": 0.2, "lw": 0}}


def level(value: float, *, upright: bool = False, colour: str = GREY, **style: Any) -> Form:
    """A line across the panel at a value of the vertical axis, or with `upright` of the horizontal one."""
    return {
        "mark": "level",
        "value": value,
        "upright": upright,
        "style": {"color": colour, "lw": 1, "ls": ":", **style},
    }


def heat(
    grid: Any, rows: Sequence[str], columns: Sequence[str], *, limit: float, bold: Sequence[bool] = (), **more: Any
) -> Form:
    """A map of (rows, columns) numbers from -limit to limit, white at 0 and grey where there is none.

    Args:
        grid: (rows, columns) numbers.
        rows, columns: labels.
        limit: the largest magnitude.
        bold: which of the rows have bold labels.
        more: `ring=True` marks the largest of every row, `numbers=True` writes the numbers, `unit` divides them.
    """
    return {"mark": "heat", "grid": grid, "rows": rows, "columns": columns, "limit": limit, "bold": bold, **more}


def numbers(values: Any) -> np.ndarray:
    """Nested lists of a form as float64; None becomes nan."""
    return np.array(values, dtype=float)


def figure_of(form: Form) -> mpl.Figure:
    """Draw a `report.Figure` from its JSON."""
    shown = form["panels"]
    columns = min(form["columns"], len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, axes = new_figure(form["width"], 0.5 + form["height"] * rows, rows=rows, columns=columns)
    for ax in axes[len(shown) :]:
        ax.remove()
    for ax, each in zip(axes, shown, strict=False):
        _draw(ax, each)
    figure.suptitle(literal(form["title"]), fontsize=11)
    if form["legend"]:
        handles = {h.get_label(): h for ax in figure.axes for h in ax.get_legend_handles_labels()[0]}
        if handles:
            lines = math.ceil(len(handles) / 8)
            columns = math.ceil(len(handles) / lines)
            figure.legend(
                handles=handles.values(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
            )
    return figure


def _draw(ax: Axes, form: Form) -> None:
    for mark in form["marks"]:
        _MARKS[mark["mark"]](ax, mark)
    ax.set_title(form["title"], fontsize=10)
    ax.set(xlabel=form["x"], ylabel=form["y"])
    for axis in form["log"]:
        ax.set(**{f"{axis}scale": "log"})
        low, high = ax.get_xlim() if axis == "x" else ax.get_ylim()
        if high > 10 * low:
            # within a decade or two the labels between powers of ten would run into each other
            (ax.xaxis if axis == "x" else ax.yaxis).set_minor_formatter(NullFormatter())
    if "x" not in form["log"] and not any(mark["mark"] in ("heat", "graph", "mesh", "ticks") for mark in form["marks"]):
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=_whole(form["marks"])))
    low, high = form["ylim"]
    ax.set_ylim(bottom=low, top=high)
    if form["tint"]:
        ax.set_facecolor(form["tint"])
    handles = ax.get_legend_handles_labels()[0]
    if form["twin"]:
        other = ax.twinx()
        other.spines["top"].set_visible(False)
        _draw(other, {**form["twin"], "legend": False})
        handles += other.get_legend_handles_labels()[0]
    if form["legend"] and handles:
        ax.legend(handles=handles, fontsize=8, frameon=False)


def _whole(marks: Sequence[Form]) -> bool:
    """Whether all places on the horizontal axis are whole numbers, such as layers and steps."""
    places = [numbers(mark["x"]) for mark in marks if "x" in mark]
    return all((x == x.round()).all() for x in places)


def _line(ax: Axes, mark: Form) -> None:
    ax.plot(mark["x"], numbers(mark["y"]), label=mark["label"] or None, **mark["style"])


def _band(ax: Axes, mark: Form) -> None:
    ax.fill_between(mark["x"], numbers(mark["low"]), numbers(mark["high"]), **mark["style"])


def _level(ax: Axes, mark: Form) -> None:
    (ax.axvline if mark["upright"] else ax.axhline)(mark["value"], zorder=1, **mark["style"])


def _histogram(ax: Axes, mark: Form) -> None:
    """The distribution of values, with the normal density of the same mean and deviation."""
    values = numbers(mark["values"])
    values = values[np.isfinite(values)]
    mean, std = values.mean(), values.std()
    ax.hist(values, bins=min(50, 10 + len(values) // 20), density=True, color=mark["colour"], alpha=0.3)
    x = np.linspace(mean - 4 * std, mean + 4 * std, 200)
    density = np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    ax.plot(x, density, color=mark["colour"], lw=1.4, label=f"{mark['label']}: {mean:.2f} ± {std:.2f}")


def _stairs(ax: Axes, mark: Form) -> None:
    """Shares (bins,) between edges (bins + 1,)."""
    ax.stairs(mark["shares"], mark["edges"], label=mark["label"], **mark["style"])


def _ticks(ax: Axes, mark: Form) -> None:
    """Names of the places of the horizontal axis."""
    ax.set_xticks(range(len(mark["names"])), map(literal, mark["names"]), rotation=90, fontsize=6)


def _heat(ax: Axes, mark: Form) -> None:
    grid, unit = numbers(mark["grid"]), mark.get("unit", 1.0)
    grid, limit = grid / unit, mark["limit"] / unit
    image = draw_cells(ax, grid, "RdBu_r", vmin=-limit, vmax=limit)
    if mark.get("ring"):
        best = np.nanargmax(grid, 1)
        ax.plot(best, np.arange(len(best)), ls="", marker="o", ms=5, mfc="none", mec=ON_LIGHT)
    # two digits of the largest; adding zero turns -0.0 into 0.0
    digits = max(0, 1 - math.floor(math.log10(limit)))
    for (i, j), value in np.ndenumerate(grid) if mark.get("numbers") else ():
        if not math.isnan(value):
            colour = ON_DARK if abs(value) > 0.65 * limit else ON_LIGHT
            text = f"{round(value, digits) + 0.0:.{digits}f}"
            ax.text(j, i, text, ha="center", va="center", fontsize=7, color=colour)
    ax.set_xticks(range(len(mark["columns"])), map(literal, mark["columns"]), rotation=45, ha="right", fontsize=8)
    ax.set_yticks(range(len(mark["rows"])), map(literal, mark["rows"]), fontsize=8)
    for tick, bold in zip(ax.get_yticklabels(), mark["bold"], strict=False):
        tick.set(**({"color": SERIES[1], "fontweight": "bold"} if bold else {}))
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02, aspect=30)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("" if unit == 1 else f"in units of {unit:.0e}", fontsize=8)


def _mesh(ax: Axes, mark: Form) -> None:
    """Values z (len(y), len(x)) on a grid, white at 1; the curve (points, 2), and the point, are drawn on it."""
    ax.grid(False)
    z = numbers(mark["z"])
    norm = TwoSlopeNorm(1, 0, max(2.0, np.nanmax(z)))
    image = ax.pcolormesh(mark["x"], mark["y"], z, cmap="RdBu_r", norm=norm, shading="nearest", rasterized=True)
    if len(mark["curve"]) > 1:
        ax.plot(*np.array(mark["curve"]).T, color=ON_LIGHT, lw=1.6)
    ax.plot(*mark["point"], "o", color=ON_LIGHT, ms=7, clip_on=False)
    ax.figure.colorbar(image, ax=ax, label=mark["label"])


_NODES = {"input node": ("s", "#cfe3f3"), "intermediate node": ("o", PAPER), "output": ("D", EMPTY)}
"""Kind of node -> marker and fill."""


def _graph(ax: Axes, mark: Form) -> None:
    """A cell: nodes on a line, arcs from inputs above it, arcs from intermediate nodes below.

    An arc is the higher the more nodes it passes, so that the labels of no two edges lie in one place. `edges` are
    [source, target, label, colour, share]: the line is the wider the larger the share; without a label it is dashed.
    """
    # a node is drawn at its number, and the output after the last node
    inputs, end = mark["inputs"], mark["inputs"] + mark["nodes"]
    tops = [_arc(ax, node, end, -1, color="#c8c8c8", lw=0.8, zorder=1) for node in mark["outputs"]]
    for source, target, label, colour, share in mark["edges"]:
        style = {"color": colour, "zorder": 3} if label else {"color": GREY, "ls": (0, (5, 2.5)), "zorder": 2}
        tops.append(_arc(ax, source, target, 1 if source < inputs else -1, lw=0.6 + 2.9 * share, **style))
        box = {"fc": PAPER, "ec": "none", "pad": 0.7}
        words = {"fontsize": 8, "color": colour, "fontweight": "bold", "ha": "center", "va": "center", "zorder": 5}
        if label:
            ax.text((source + target) / 2, tops[-1], label, bbox=box, **words)
    for x in range(end + 1):
        kind = "output" if x == end else "input node" if x < inputs else "intermediate node"
        marker, fill = _NODES[kind]
        ax.plot(x, 0, ls="", marker=marker, ms=16, mfc=fill, mec=INK, mew=0.9, zorder=6)
        text, size = ("out", 6.5) if x == end else (str(x), 9)
        ax.text(x, 0, text, fontsize=size, ha="center", va="center_baseline", zorder=7)
    ax.set(xlim=(-0.4, end + 0.4), ylim=(min([*tops, -0.6]) - 0.4, max([*tops, 0.6]) + 0.4))
    ax.axis("off")


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


_MARKS: dict[str, Callable[[Axes, Form], None]] = {
    "line": _line,
    "band": _band,
    "level": _level,
    "histogram": _histogram,
    "stairs": _stairs,
    "ticks": _ticks,
    "heat": _heat,
    "mesh": _mesh,
    "graph": _graph,
}
"""Kind of mark -> the function that draws it."""
