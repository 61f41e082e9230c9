"""The figures of the isometry study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.colors import TwoSlopeNorm

from nasfast.research.analysis.meanfield import phase_diagram
from nasfast.research.studies.draw import GREY, INK, SERIES, Figure, level, literal
from nasfast.research.studies.isometry.measure import EDGES, Row
from nasfast.research.studies.report import Record

_DIAGRAM_ACT = "tanh"
_DENSITIES = 6

Rows = Mapping[str, Sequence[Row]]


def _places(rows: Rows) -> list[str]:
    """The places of the horizontal axis: layers, or the parts of a module without the whole, which would dwarf them."""
    places = list(dict.fromkeys(row.place for setting_rows in rows.values() for row in setting_rows))
    return [place for place in places if place != "whole"] or places


def moments(title: str, rows: Rows) -> Figure:
    """phi, varphi and the gain of every branch, by layer or part."""
    places = _places(rows)
    quantities: dict[str, tuple[float, Callable[[Row], float]]] = {
        "phi of the branch": (1, lambda row: row.branch.phi),
        "varphi of the branch": (0, lambda row: row.branch.varphi),
        "gain: phi Var(in) / Var(out)": (1, lambda row: row.gain),
    }
    caption = "Every dot is one candidate (or part); lines join the medians of a layer. Dashed: isometry."
    figure = Figure(title, caption, len(quantities), columns=3, height=3.9)
    names = [literal(place.removeprefix("layer ")) for place in places]
    for ax, (text, (ideal, value)) in zip(figure.axes, quantities.items(), strict=True):
        shifts = np.linspace(-0.22, 0.22, len(rows))
        for colour, shift, (setting, setting_rows) in zip(SERIES, shifts, rows.items(), strict=False):
            dots = [(places.index(row.place), value(row)) for row in setting_rows if row.place in places]
            x, y = np.array(dots, dtype=float).T
            ax.plot(x + shift, y, "o", color=colour, ms=3, alpha=0.55)
            medians = [np.nanmedian(y[x == at]) for at in np.unique(x)]
            ax.plot(np.unique(x) + shift, medians, color=colour, label=setting)
        level(ax, ideal, ls="--")
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        ax.set(title=text, ylim=(0, None))
    return figure


def densities(rows: Rows) -> Figure:
    """Histograms of the singular values at a few places."""
    places = _places(rows)
    panels = np.unique(np.linspace(0, len(places) - 1, min(_DENSITIES, len(places))).astype(int))
    caption = (
        "Share of the branch's singular values per bin of 0.1, pooled over the candidates of the layer; isometry would "
        "be one spike at 1. The bin at 0 is cut off."
    )
    figure = Figure("singular values", caption, len(panels), columns=3, height=2.4)
    for ax, place in zip(figure.axes, (places[i] for i in panels), strict=True):
        top = 0.0
        for colour, (setting, setting_rows) in zip(SERIES, rows.items(), strict=False):
            shares = [row.histogram for row in setting_rows if row.place == place]
            if shares:
                mean = np.mean(shares, axis=0)
                # the bin of singular values at 0 would hide the rest
                top = max(top, 1.15 * mean[1:].max())
                ax.stairs(mean, EDGES, color=colour, label=setting)
        ax.axvline(1, color=GREY, lw=1, ls="--")
        ax.set(title=literal(place), xlabel="singular value", ylim=(0, top or None))
    return figure


def spreads(title: str, caption: str, records: Sequence[Record], panels: Mapping[str, str]) -> Figure:
    """A line for every setting by layer, solid with block indicators and dotted without; a panel for every key.

    A record has the values of all layers, or is one layer's.
    """
    figure = Figure(title, caption + " Solid: with indicator BN. Dotted: without it.", len(panels))
    for ax, (key, text) in zip(figure.axes, panels.items(), strict=True):
        for colour, setting in zip(SERIES, dict.fromkeys(r["setting"] for r in records), strict=False):
            for indicator in (True, False):
                rows = [r for r in records if (r["setting"], r["block_indicator"]) == (setting, indicator)]
                all_layers = bool(rows) and "layer" not in rows[0]
                values = rows[0][key] if all_layers else [row[key] for row in rows]
                x = range(len(values)) if all_layers else [row["layer"] for row in rows]
                y = np.array(values, dtype=float)  # None becomes nan
                ax.plot(x, y, "-" if indicator else ":", color=colour, label=setting if indicator else None)
        ax.set(title=text, xlabel="layer", ylim=(1 if key == "ratio" else 0, None))
    return figure


def diagram() -> Figure:
    """Order and chaos in the mean field that the theory assumes."""
    sigma_w, sigma_b = np.linspace(0.5, 3, 51), np.linspace(0, 1, 26)
    _, chi, critical = phase_diagram(_DIAGRAM_ACT, sigma_w, sigma_b)
    caption = (
        "chi of an infinitely wide tanh network without BatchNorm: below 1 signals merge and gradients vanish, above 1 "
        "they explode. The black line is chi = 1; the dot is the initialisation that the theory asks for."
    )
    figure = Figure("mean field", caption, 1, width=6.4, height=3.6)
    (ax,) = figure.axes
    ax.grid(False)
    norm = TwoSlopeNorm(1, 0, max(2.0, chi.max()))
    image = ax.pcolormesh(sigma_w, sigma_b, chi, cmap="RdBu_r", norm=norm, shading="nearest", rasterized=True)
    ax.plot(*critical.T, color=INK)
    ax.plot(1, 0, "o", color=INK, ms=7, clip_on=False)
    ax.figure.colorbar(image, ax=ax, label="chi")
    ax.set(title=f"order and chaos of {_DIAGRAM_ACT}", xlabel="sigma_w", ylabel="sigma_b")
    return figure
