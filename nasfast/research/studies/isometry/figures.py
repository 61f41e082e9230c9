"""The page of the isometry study and its figures, drawn from the rows of its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nasfast.report.page import cards_of, embedded, escape, folded, table_of
from nasfast.report.plots import GREY, SERIES, literal, new_figure
from nasfast.report.style import ON_LIGHT
from nasfast.research.studies.page import (
    Drawing,
    Form,
    Page,
    cards,
    claims_section,
    marks_section,
    number,
    write_study_page,
)

_FAIRNESS = {
    "f_var": "f_var: std of log variance",
    "f_iso": "f_iso: std of log distance ratio",
    "distortion": "distortion of distances within a candidate",
    "disagreement": "disagreement of the candidates' outputs",
}
_DENSITIES = 6


def write_isometry_page(folder: str | Path) -> Path:
    """Write `isometry.html` and its figures from the `isometry.json` of a directory; returns the page's path.

    Raises:
        OSError: there is no isometry.json.
    """
    return write_study_page(folder, "isometry")


def _page(form: Form, images: Path) -> Page:
    def image(name: str, figure: Figure, caption: str) -> str:
        return embedded(figure, caption, images / f"{name}.svg")

    sections = [("summary", "Summary", _summary(form))]
    if form["claims"]:
        sections.append(claims_section(form))
    moments = image(
        "moments",
        _moments(form),
        "Every dot is one candidate (or part); lines join the medians of a layer. Dashed: isometry.",
    )
    sections.append(("modules", "Candidates" if form["fairness"] else "Parts", moments + _rows(form)))
    densities = image(
        "densities",
        _densities(form),
        "Share of the branch's singular values per bin of 0.1, pooled over the candidates of the layer; isometry would "
        "be one spike at 1. The bin at 0 is cut off.",
    )
    sections.append(("densities", "Singular values", densities))
    if form["fairness"]:
        caption = "Spread over the candidates of a layer; 0 is fair. Solid: with indicator BN. Dotted: without it."
        sections.append(("fairness", "Fairness", image("fairness", _fairness(form), caption) + _fairness_table(form)))
        caption = "Spread of log Var(h) over random paths, by depth. Solid: with indicator BN. Dotted: without it."
        sections.append(("depth", "Fairness with depth", image("depth", _depth(form), caption)))
    caption = (
        "chi of an infinitely wide tanh network without BatchNorm: below 1 signals merge and gradients vanish, above 1 "
        "they explode. The black line is chi = 1; the dot is the initialisation that the theory asks for."
    )
    sections.append(("theory", "Mean field", image("diagram", _diagram(form["diagram"]), caption)))
    if form["convolutions"]:
        sections.append(("convolutions", "Convolutions", _convolutions(form)))
    if form["marks"]:
        sections.append(marks_section(form["marks"]))
    return Page(form["subject"].split(",")[0], "nasfast isometry", sections)


def _summary(form: Form) -> str:
    places = {(r["layer"], r["name"]) for r in form["rows"]}
    shown = [(str(len(places)), "candidates" if form["fairness"] else "parts"), *cards(form, form["marks"])]
    medians = []
    for setting in form["settings"]:
        rows = [r for r in form["rows"] if r["setting"] == setting]
        columns = _columns(rows)
        medians.append([setting, *(f"{np.median([v for v in c if v is not None]):.3f}" for c in columns)])
    explanation = (
        "phi is the mean and varphi the variance of the squared singular values of a Jacobian; an isometry has 1 and "
        "0. The branch is the candidate without skip connection or bypass. Gain: phi Var(in) / Var(out), how much "
        "faster small differences grow than the signal."
    )
    return (
        f"{cards_of(shown)}<p>{escape(form['subject'])}.</p><p>{explanation}</p>"
        + table_of(["medians", "phi, branch", "varphi, branch", "gain"], medians, text_columns=(0,))
        + "".join(f'<p class="soft">Reduced: {escape(text)}.</p>' for text in form["reduced"])
    )


def _rows(form: Form) -> str:
    header = ["layer", "name"]
    for setting in form["settings"]:
        header += [f"{setting}: phi", "varphi", "gain", "module phi", "module varphi"]
    places: dict[tuple[int, str], dict[str, Any]] = {}
    for row in form["rows"]:
        places.setdefault((row["layer"], row["name"]), {})[row["setting"]] = row
    lines = []
    for (layer, name), found in places.items():
        line = ["" if layer < 0 else layer, name]
        for setting in form["settings"]:
            row = found.get(setting)
            if row is None:
                line += [""] * 5
                continue
            branch, whole = row["branch"], row["module"] or row["branch"]
            line += [
                _with_error(branch, "phi"),
                _with_error(branch, "varphi"),
                number(row["gain"], ".3f"),
                f"{whole['phi']:.3f}",
                f"{whole['varphi']:.3f}",
            ]
        lines.append(line)
    table = table_of(header, lines, text_columns=(1,))
    return folded(f"All {len(lines)} rows", table)


def _with_error(form: Form, key: str) -> str:
    error = form[f"{key}_error"]
    return f"{form[key]:.3f}" if error is None else f"{form[key]:.3f} ± {error:.3f}"


def _places(form: Form) -> list[tuple[int, str]]:
    """The places of the horizontal axis: layers, or the parts of a module without the whole, which would dwarf them."""
    places = list(dict.fromkeys(map(_place_of, form["rows"])))
    return [place for place in places if place[1] != "whole"] or places


def _place_of(row: Form) -> tuple[int, str]:
    return (row["layer"], "") if row["layer"] >= 0 else (-1, row["name"])


def _columns(rows: Sequence[Form]) -> list[list[float | None]]:
    """phi and varphi of the branches, and gains."""
    return [[r["branch"]["phi"] for r in rows], [r["branch"]["varphi"] for r in rows], [r["gain"] for r in rows]]


def _moments(form: Form) -> Figure:
    places = _places(form)
    figure, axes = new_figure(11, 3.6 if places[0][0] >= 0 else 4.4, columns=3)
    shifts = np.linspace(-0.22, 0.22, len(form["settings"]))
    for colour, shift, setting in zip(SERIES, shifts, form["settings"], strict=False):
        rows = [row for row in form["rows"] if row["setting"] == setting and _place_of(row) in places]
        x = np.array([places.index(_place_of(row)) for row in rows])
        for ax, values in zip(axes, _columns(rows), strict=True):
            y = np.array(values, dtype=float)
            ax.scatter(x + shift, y, s=9, color=colour, alpha=0.55, lw=0)
            ticks = np.unique(x)
            ax.plot(
                ticks + shift, [np.nanmedian(y[x == t]) for t in ticks], color=colour, lw=1.2, label=literal(setting)
            )
    titles = ("phi of the branch", "varphi of the branch", "gain: phi Var(in) / Var(out)")
    for ax, title, ideal in zip(axes, titles, (1, 0, 1), strict=True):
        ax.axhline(ideal, color=GREY, lw=1, ls="--")
        ax.set(title=title)
        _name_places(ax, places)
        ax.set_ylim(0, max(ax.get_ylim()[1], ideal + 0.1))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _name_places(ax: Any, places: Sequence[tuple[int, str]]) -> None:
    if places[0][0] >= 0:
        ax.set_xlabel("layer")
        step = max(1, len(places) // 10)
        ax.set_xticks(range(0, len(places), step), [layer for layer, _ in places][::step])
    else:
        ax.set_xticks(range(len(places)), [literal(name) for _, name in places], rotation=90, fontsize=6)


def _densities(form: Form) -> Figure:
    places = _places(form)
    chosen = [places[i] for i in np.unique(np.linspace(0, len(places) - 1, min(_DENSITIES, len(places))).astype(int))]
    columns = min(3, len(chosen))
    figure, axes = new_figure(
        10, 2.4 * -(-len(chosen) // columns) + 0.4, rows=-(-len(chosen) // columns), columns=columns
    )
    edges = np.array(form["histogram_edges"])
    for ax, place in zip(axes, chosen, strict=False):
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
    for ax in axes[len(chosen) :]:
        ax.axis("off")
    for ax in axes[-columns:]:
        ax.set_xlabel("singular value", fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _fairness(form: Form) -> Figure:
    figure, axes = new_figure(10, 5.6, rows=2, columns=2)
    for ax, (key, title) in zip(axes, _FAIRNESS.items(), strict=True):
        for colour, setting in zip(SERIES, form["settings"], strict=False):
            for indicator_bn in (True, False):
                found = [f for f in form["fairness"] if f["setting"] == setting and f["indicator_bn"] == indicator_bn]
                ax.plot(
                    [f["layer"] for f in found],
                    [f[key] for f in found],
                    color=colour,
                    lw=1.4,
                    marker="o",
                    ms=2.5,
                    ls="-" if indicator_bn else ":",
                    label=literal(setting) if indicator_bn else None,
                )
        ax.set_title(title, fontsize=10)
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    for ax in axes[2:]:
        ax.set_xlabel("layer")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _fairness_table(form: Form) -> str:
    keys = ("f_mean", "f_var", "f_iso", "f_phi", "distortion", "disagreement")
    lines = [
        [m["setting"], "with" if m["indicator_bn"] else "without", *(number(m[k], ".3f") for k in keys)]
        for m in form["fairness_means"]
    ]
    return table_of(["mean over layers", "indicator BN", *keys], lines, text_columns=(0, 1))


def _depth(form: Form) -> Figure:
    figure, axes = new_figure(10, 3.8, columns=2)
    for colour, setting in zip(SERIES, form["settings"], strict=False):
        for found in (d for d in form["depth"] if d["setting"] == setting):
            style: dict[str, Any] = {"color": colour, "lw": 1.4, "ls": "-" if found["indicator_bn"] else ":"}
            axes[0].plot(found["std"], **style, label=literal(setting) if found["indicator_bn"] else None)
            axes[1].plot(found["ratio"], **style)
    axes[0].set(title="std of log Var(h) over paths", xlabel="layer")
    axes[0].set_ylim(bottom=0)
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes[1].set(title="largest Var(h) over smallest", xlabel="layer")
    axes[1].set_ylim(bottom=1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _diagram(form: Form) -> Figure:
    figure, (ax,) = new_figure(6.4, 4)
    ax.grid(False)
    chi = np.array(form["chi"], dtype=float)
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


def _convolutions(form: Form) -> str:
    lines = [
        [
            c["setting"],
            c["kind"],
            c["count"],
            f"{c['phi']:.4f}",
            f"{c['varphi']:.4f}",
            number(c["expected_varphi"], ".3f"),
        ]
        for c in form["convolutions"]
    ]
    note = "Every convolution of the supernet counts as one of stride 1 that wraps around at the border."
    header = ["setting", "kind", "count", "phi / g²", "varphi / g⁴", "closed form"]
    return f'<p class="soft">{note}</p>' + table_of(header, lines, text_columns=(0, 1))


FIGURES: dict[str, Drawing] = {}
"""The figures have no forms of their own: they are drawn from the rows of the file."""
PAGES = {"isometry": _page}
"""Stem of the files -> what makes their page."""
