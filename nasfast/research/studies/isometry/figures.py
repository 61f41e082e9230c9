"""The figures of the isometry study, drawn from the rows of its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nasfast.report.plots import GREY, SERIES, literal, new_figure
from nasfast.report.style import ON_LIGHT
from nasfast.research.studies.page import Form, drawing, legend, numbers, panels

_FAIRNESS = {
    "f_var": "f_var: std of log variance",
    "f_iso": "f_iso: std of log distance ratio",
    "distortion": "distortion of distances within a candidate",
    "disagreement": "disagreement of the candidates' outputs",
}
_DENSITIES = 6


def _places(form: Form) -> list[tuple[int, str]]:
    """The places of the horizontal axis: layers, or the parts of a module without the whole, which would dwarf them."""
    places = list(dict.fromkeys(map(_place_of, form["rows"])))
    return [place for place in places if place[1] != "whole"] or places


def _place_of(row: Form) -> tuple[int, str]:
    return (row["layer"], "") if row["layer"] >= 0 else (-1, row["name"])


@drawing(
    "isometry_moments", "Every dot is one candidate (or part); lines join the medians of a layer. Dashed: isometry."
)
def _moments(form: Form) -> Figure:
    places = _places(form)
    figure, axes = new_figure(11, 3.6 if places[0][0] >= 0 else 4.4, columns=3)
    shifts = np.linspace(-0.22, 0.22, len(form["settings"]))
    for colour, shift, setting in zip(SERIES, shifts, form["settings"], strict=False):
        rows = [row for row in form["rows"] if row["setting"] == setting and _place_of(row) in places]
        x = np.array([places.index(_place_of(row)) for row in rows])
        values = [(r["branch"]["phi"], r["branch"]["varphi"], r["gain"]) for r in rows]
        for ax, y in zip(axes, numbers(values).T, strict=True):
            ax.scatter(x + shift, y, s=9, color=colour, alpha=0.55, lw=0)
            ticks = np.unique(x)
            medians = [np.nanmedian(y[x == t]) for t in ticks]
            ax.plot(ticks + shift, medians, color=colour, lw=1.2, label=literal(setting))
    titles = ("phi of the branch", "varphi of the branch", "gain: phi Var(in) / Var(out)")
    for ax, title, ideal in zip(axes, titles, (1, 0, 1), strict=True):
        ax.axhline(ideal, color=GREY, lw=1, ls="--")
        ax.set(title=title)
        _name_places(ax, places)
        ax.set_ylim(0, max(ax.get_ylim()[1], ideal + 0.1))
    legend(figure, axes[0].get_legend_handles_labels()[0])
    return figure


def _name_places(ax: Any, places: Sequence[tuple[int, str]]) -> None:
    if places[0][0] >= 0:
        ax.set_xlabel("layer")
        step = max(1, len(places) // 10)
        ax.set_xticks(range(0, len(places), step), [layer for layer, _ in places][::step])
    else:
        ax.set_xticks(range(len(places)), [literal(name) for _, name in places], rotation=90, fontsize=6)


@drawing(
    "isometry_densities",
    "Share of the branch's singular values per bin of 0.1, pooled over the candidates of the layer; isometry would be "
    "one spike at 1. The bin at 0 is cut off.",
)
def _densities(form: Form) -> Figure:
    places = _places(form)
    chosen = [places[i] for i in np.unique(np.linspace(0, len(places) - 1, min(_DENSITIES, len(places))).astype(int))]
    figure, axes = panels(len(chosen), 3, 10, 2.4, top=0.4)
    edges = np.array(form["histogram_edges"])
    for ax, place in zip(axes, chosen, strict=True):
        drawn = []
        for colour, setting in zip(SERIES, form["settings"], strict=False):
            rows = [row for row in form["rows"] if row["setting"] == setting and _place_of(row) == place]
            shares = [row["histogram"] for row in rows]
            if shares:
                drawn.append(np.mean(shares, axis=0))
                ax.stairs(drawn[-1], edges, color=colour, lw=1.2, label=literal(setting))
        ax.axvline(1, color=GREY, lw=1, ls="--")
        ax.set_title(f"layer {place[0]}" if place[0] >= 0 else literal(place[1]), fontsize=9)
        ax.set_xlim(0, edges[-1])
        # the bin of singular values at 0 would hide the rest
        ax.set_ylim(0, 1.15 * max((max(share[1:]) for share in drawn), default=1))
        ax.tick_params(labelsize=8)
    for ax in axes[-min(3, len(chosen)) :]:
        ax.set_xlabel("singular value", fontsize=8)
    legend(figure, axes[0].get_legend_handles_labels()[0])
    return figure


@drawing(
    "isometry_fairness",
    "Spread over the candidates of a layer; 0 is fair. Solid: with indicator BN. Dotted: without it.",
)
def _fairness(form: Form) -> Figure:
    figure, axes = new_figure(10, 5.6, rows=2, columns=2)
    for ax, (key, title) in zip(axes, _FAIRNESS.items(), strict=True):
        for colour, setting in zip(SERIES, form["settings"], strict=False):
            for indicator_bn in (True, False):
                found = [f for f in form["fairness"] if f["setting"] == setting and f["indicator_bn"] == indicator_bn]
                style = _style(colour, setting, indicator_bn)
                ax.plot([f["layer"] for f in found], [f[key] for f in found], marker="o", ms=2.5, **style)
        ax.set_title(title, fontsize=10)
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    for ax in axes[2:]:
        ax.set_xlabel("layer")
    legend(figure, axes[0].get_legend_handles_labels()[0])
    return figure


def _style(colour: str, setting: str, indicator_bn: bool) -> dict[str, Any]:
    return {
        "color": colour,
        "lw": 1.4,
        "ls": "-" if indicator_bn else ":",
        "label": literal(setting) if indicator_bn else None,
    }


@drawing(
    "isometry_depth",
    "Spread of log Var(h) over random paths, by depth. Solid: with indicator BN. Dotted: without it.",
)
def _depth(form: Form) -> Figure:
    figure, axes = new_figure(10, 3.8, columns=2)
    for colour, setting in zip(SERIES, form["settings"], strict=False):
        for found in (d for d in form["depth"] if d["setting"] == setting):
            style = _style(colour, setting, found["indicator_bn"])
            axes[0].plot(found["std"], **style)
            axes[1].plot(found["ratio"], **style)
    axes[0].set(title="std of log Var(h) over paths", xlabel="layer")
    axes[0].set_ylim(bottom=0)
    axes[1].set(title="largest Var(h) over smallest", xlabel="layer")
    axes[1].set_ylim(bottom=1)
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    legend(figure, axes[0].get_legend_handles_labels()[0])
    return figure


@drawing(
    "isometry_diagram",
    "chi of an infinitely wide tanh network without BatchNorm: below 1 signals merge and gradients vanish, above 1 "
    "they explode. The black line is chi = 1; the dot is the initialisation that the theory asks for.",
)
def _diagram(form: Form) -> Figure:
    form = form["diagram"]
    figure, (ax,) = new_figure(6.4, 4)
    ax.grid(False)
    chi = numbers(form["chi"])
    image = ax.pcolormesh(
        form["sigma_w"],
        form["sigma_b"],
        chi,
        cmap="RdBu_r",
        norm=TwoSlopeNorm(1, 0, max(2.0, np.nanmax(chi))),
        shading="nearest",
        rasterized=True,
    )
    line = np.array(form["critical"])
    if len(line) > 1:
        ax.plot(*line.T, color=ON_LIGHT, lw=1.6)
    ax.plot(1, 0, "o", color=ON_LIGHT, ms=7, clip_on=False)
    ax.annotate("q* = 0", (1, 0), (-42, 6), textcoords="offset points", fontsize=9, color=ON_LIGHT)
    ax.set(xlabel="sigma_w", ylabel="sigma_b", title=f"order and chaos of {literal(form['act'])}")
    figure.colorbar(image, ax=ax, label="chi")
    return figure
