"""The figures of the report; each function takes plain data and returns a matplotlib figure.

They do not use pyplot, so they need no display and no global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from nasfast.indicators.table import IndicatorTable
from nasfast.report.style import EMPTY, INK, ON_DARK, ON_LIGHT
from nasfast.spaces import SKIP, Arch, SearchSpace

# Okabe and Ito's palette, whose colours can be distinguished with any colour vision.
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#8a8a8a"
SERIES = (_BLUE, _RED, _GREEN, _PURPLE, _ORANGE)
MARKERS = "osD^v<>P*X"
_KERNEL_COLOURS = {1: _PURPLE, 3: _BLUE, 5: _ORANGE, 7: _GREEN}
# Number of points drawn of a training curve; longer curves are averaged in windows.
_CURVE_POINTS = 400
# Scores of a heat map that spread less than this would look equal with two decimals.
_FINE_SPREAD = 0.05


def training_curves(metrics: Sequence[Mapping[str, Any]], stages: Sequence[str]) -> Figure:
    """Loss and accuracy against the step, for the given stages of metrics.jsonl.

    The seeds of a network, and all random networks, share a colour.
    """
    figure, (loss, accuracy) = new_figure(10, 3.6, columns=2)
    series = [_series(stage) for stage in stages]
    names = list(dict.fromkeys(series))
    colours = dict(zip(names, np.resize(SERIES, len(names)), strict=True))
    for i, (stage, name) in enumerate(zip(stages, series, strict=True)):
        lines, colour = [m for m in metrics if m["stage"] == stage], colours[name]
        # the legend leaves out what begins with "_"
        label = f"_{stage}" if name in series[:i] else literal(name)
        steps, values = _smoothed(lines, "loss")
        loss.plot(steps, values, color=colour, label=f"{label}, training")
        _plot_evaluation(loss, lines, "eval_loss", colour, f"{label}, validation")
        steps, values = _smoothed(lines, "top1")
        accuracy.plot(steps, 100 * values, color=colour, alpha=0.6, lw=1.2, label=f"{label}, training")
        _plot_evaluation(accuracy, lines, "eval_top1", colour, f"{label}, validation", scale=100)
    loss.set(xlabel="step", ylabel="cross-entropy (nats)", title="Loss")
    accuracy.set(xlabel="step", ylabel="top-1 (%)", title="Accuracy")
    for ax in (loss, accuracy):
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8, frameon=False)
    return figure


def _series(stage: str) -> str:
    """The name that a stage has in the legend, without its seed or the number of a random network."""
    name = stage.partition("-seed-")[0]
    return "retrain/random" if name.startswith("retrain/random-") else name


def indicator_heatmap(table: IndicatorTable, arch: Arch | None = None) -> Figure:
    """Block scores by layer (rows) and choice (columns), with the layer indicators as a separate column.

    The choices of `arch` get a frame.
    """
    layers = table.space.layers
    labels = list(dict.fromkeys(layer.label(c) for layer in layers for c in layer.options if c != SKIP))
    grid = np.full((len(layers), len(labels)), np.nan)
    for i, (layer, scores) in enumerate(zip(layers, table.block, strict=True)):
        for choice, score in scores.items():
            grid[i, labels.index(layer.label(choice))] = score
    column = np.array([[np.nan if s is None else s] for s in table.layer])
    with_layer = not np.isnan(column).all()
    figure, axes = new_figure(
        3.4 + 0.75 * (len(labels) + 2 * with_layer),
        1.4 + 0.27 * len(layers),
        columns=1 + with_layer,
        width_ratios=[len(labels), 1.3][: 1 + with_layer],
        sharey=True,
    )
    axes[0].set_yticks(range(len(layers)), [_layer_name(i, layer) for i, layer in enumerate(layers)], fontsize=8)
    gammas = table.rule == "product"
    title = "block score $S_v$ = mean |γ|" if gammas else literal(f"score: {table.meta.get('score', 'of the user')}")
    _heat(figure, axes[0], grid, title, "viridis")
    axes[0].set_xticks(range(len(labels)), map(literal, labels), fontsize=9)
    if with_layer:
        _heat(figure, axes[1], column, "$S_u$" if gammas else "identity", "magma")
        axes[1].set_xticks([0], ["layer"], fontsize=9)
    for i, choice in enumerate(arch or ()):
        if choice != SKIP:
            x = labels.index(layers[i].label(choice))
            axes[0].add_patch(Rectangle((x - 0.47, i - 0.44), 0.94, 0.88, fill=False, ec=_RED, lw=2))
    if arch:
        axes[0].set_xlabel("framed: the best architecture", fontsize=9)
    return figure


def score_cost(
    front: Sequence[tuple[float, float]],
    cloud: Sequence[tuple[float, float]],
    candidates: Sequence[tuple[float, float]],
    *,
    label: str,
    limit: float | None = None,
) -> Figure:
    """Score against a cost; the first three arguments are lists of (cost, score).

    Args:
        front: non-dominated points, smallest cost first.
        cloud: random architectures.
        candidates: the result of the search, best first.
        label: name and unit of the cost.
        limit: limit of the search, which is drawn as a line; None for none.
    """
    figure, (ax,) = new_figure(8, 4.6)
    if cloud:
        costs, scores = np.array(cloud).T
        ax.scatter(costs, scores, s=7, color=GREY, alpha=0.35, lw=0, label=f"{len(cloud)} random architectures")
    if front:
        costs, scores = np.array(front).T
        ax.step(costs, scores, where="post", color=_BLUE, lw=1.6, label=f"Pareto front ({len(front)})")
        ax.scatter(costs, scores, s=9, color=_BLUE, zorder=3)
    if candidates:
        costs, scores = np.array(candidates).T
        ax.scatter(costs[1:], scores[1:], s=45, color=_ORANGE, ec=INK, lw=0.6, zorder=4, label="top K")
        ax.scatter(costs[:1], scores[:1], s=170, marker="*", color=_RED, ec=INK, lw=0.6, zorder=5, label="best")
    if limit is not None:
        ax.axvline(limit, color=INK, lw=1, ls="--", label=f"limit {limit:,.4g}")
    ax.set(xlabel=literal(label), ylabel="score", title="Score against cost")
    legend = ax.legend(fontsize=8, frameon=False, loc="lower right")
    if cloud:
        # the dots of the cloud are too faint and too small for a legend, which has None only for what it cannot draw
        legend.legend_handles[0].set(sizes=[30], alpha=1)  # type: ignore[union-attr]
    return figure


def architecture_strip(space: SearchSpace, arch: Arch) -> Figure:
    """The searchable layers from left to right, and their MACs below.

    A block's height shows its output channels (square-root scale), its colour the kernel and its shade the expansion.
    An arrow marks a stride above 1, a dashed outline a skipped layer.
    """
    layers = list(zip(space.layers, arch, strict=True))
    width = max(6.0, 1.6 + 0.52 * len(layers))
    figure, (strip, bars) = new_figure(width, 4.6, rows=2, sharex=True, height_ratios=[2.1, 1])
    macs = [layer.cost(choice).macs / 1e6 for layer, choice in layers]
    widest = math.sqrt(max(layer.out_channels for layer, _ in layers))
    colours: dict[str, str] = {}
    for i, (layer, choice) in enumerate(layers):
        height = math.sqrt(layer.out_channels) / widest
        skipped = choice == SKIP or (layer.choices[choice].kind == "identity" and layer.normal)
        colour = "none" if skipped else _block_colour(layer.choices[choice])
        text = "skip" if skipped else layer.label(choice)
        outline = "--" if skipped else "-"
        block = Rectangle((i - 0.4, -height / 2), 0.8, height, fc=colour, ec=INK, lw=0.8, ls=outline)
        strip.add_patch(block)
        dark = not skipped and np.dot(to_rgb(colour), (0.299, 0.587, 0.114)) < 0.55
        ink = INK if skipped else ON_DARK if dark else ON_LIGHT
        strip.text(i, 0, literal(text), rotation=90, ha="center", va="center", fontsize=8, color=ink)
        if layer.stride > 1:
            strip.annotate(f"s{layer.stride}\n▼", (i - 0.5, height / 2 + 0.03), ha="center", va="bottom", fontsize=8)
        first = i == 0 or layer.out_channels != space.layers[i - 1].out_channels
        if first:
            strip.text(i - 0.4, -height / 2 - 0.04, f"{layer.out_channels} ch", fontsize=8, va="top")
        if not skipped:
            colours.setdefault(text, colour)
    strip.set(ylim=(-0.68, 0.74), xlim=(-0.8, len(layers) - 0.2))
    strip.axis("off")
    cost = space.fixed_cost + sum((layer.cost(c) for layer, c in layers), type(space.fixed_cost)())
    strip.set_title(f"{literal(space.name)}: {cost.macs / 1e6:,.1f} M MACs, {cost.params / 1e6:,.2f} M parameters")
    handles = [Patch(fc=colours[text], ec=INK, lw=0.6, label=literal(text)) for text in sorted(colours)]
    figure.legend(handles=handles, ncols=max(1, len(handles)), fontsize=8, frameon=False, loc="outside lower center")
    bars.bar(range(len(layers)), macs, width=0.8, color=GREY)
    bars.set(ylabel="M MACs", xlabel="layer", xticks=range(len(layers)))
    bars.tick_params(labelsize=8)
    return figure


def new_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, **layout: Any
) -> tuple[Figure, Sequence[Axes]]:
    """A figure of this size in inches and its axes, row by row, in the style of the report.

    `layout` goes to `Figure.subplots`.
    """
    figure = Figure(figsize=(width, height), dpi=144, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **layout).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
        ax.set_axisbelow(True)
    return figure, axes


def _smoothed(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the lines that have `key`, averaged in windows if there are more than `_CURVE_POINTS`."""
    points = np.array([(m["step"], m[key]) for m in lines if m.get(key) is not None], dtype=float).reshape(-1, 2)
    window = max(1, len(points) // _CURVE_POINTS)
    if window > 1:
        whole = len(points) // window * window
        points = points[:whole].reshape(-1, window, 2).mean(axis=1)
    return points[:, 0], points[:, 1]


def _plot_evaluation(
    ax: Axes, lines: Sequence[Mapping[str, Any]], key: str, colour: str, label: str, *, scale: float = 1.0
) -> None:
    points = [(m["step"], scale * m[key]) for m in lines if m.get(key) is not None]
    if points:
        ax.plot(*zip(*points, strict=True), color=colour, ls="--", marker="o", ms=4, lw=1, label=label)


def draw_cells(ax: Axes, grid: np.ndarray, colours: str, **limits: Any) -> AxesImage:
    """Draw a grid as coloured cells, with `vmin` and `vmax` of the colours; cells that are nan look empty."""
    ax.set_facecolor(EMPTY)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    cmap = colormaps[colours].with_extremes(bad=(0, 0, 0, 0))
    # "none" keeps one pixel per cell in a vector figure, which stays sharp at any size
    return ax.imshow(np.ma.masked_invalid(grid), aspect="auto", cmap=cmap, interpolation="none", **limits)


def _heat(figure: Figure, ax: Axes, grid: np.ndarray, title: str, colours: str) -> None:
    """Draw a grid as coloured cells with their numbers and a colour bar."""
    image = draw_cells(ax, grid, colours)
    low, high = image.get_clim()
    digits = 3 if high - low < _FINE_SPREAD else 2
    for (i, j), value in np.ndenumerate(grid):
        if not math.isnan(value):
            ink = ON_LIGHT if high > low and (value - low) / (high - low) > 0.6 else ON_DARK
            ax.text(j, i, f"{value:.{digits}f}", ha="center", va="center", fontsize=7, color=ink)
    ax.set_title(title, fontsize=10)
    bar = figure.colorbar(image, ax=ax, pad=0.02, aspect=40)
    # without offset, because "+1" above ticks of thousandths hides that all scores are near 1
    bar.formatter = ScalarFormatter(useOffset=False)
    bar.update_ticks()
    bar.ax.tick_params(labelsize=8)


def literal(text: str) -> str:
    """Text of a user's file, escaped so that it is not read as a formula."""
    return text.replace("$", r"\$")


def _layer_name(index: int, layer: Any) -> str:
    kind = "" if layer.normal else "  reduction" if layer.stride > 1 else "  widening"
    return f"{index}: {layer.out_channels} ch{kind}"


def _block_colour(block: Any) -> str:
    """The colour of a block: hue by kernel, shade by expansion; other kinds have their own hue."""
    if block.kind == "identity":
        return "#d0d0d0"
    base = np.array(to_rgb(_RED if block.kind == "shuffle_xception" else _KERNEL_COLOURS.get(block.kernel, GREY)))
    shade = min(1.0, 0.35 + 0.65 * block.expand / 6) if block.kind == "mbconv" else 1.0
    base = 1 - (1 - base) * 0.97 * shade
    return "#" + "".join(f"{round(255 * v):02x}" for v in base)
