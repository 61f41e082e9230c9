"""The figures of the NASI study: the numbers of each, and how it is drawn from these in its file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from nasfast.report.plots import GREY, SERIES, draw_cells, literal, new_figure
from nasfast.report.style import ON_LIGHT
from nasfast.research.nasi.search import NasiResult
from nasfast.research.studies import parts
from nasfast.research.studies.nasi.measure import ExactTraces
from nasfast.research.studies.page import Form, drawing, numbers, panels
from nasfast.spaces import ArchSpace


def panel(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, *labels: str, **form: Any) -> Form:
    """One scatter plot of `nasi_scatter`: dots, the labels of both axes, and `log=True` for logarithmic ones."""
    return {"x": x, "y": y, "labels": labels, **form}


def traces(found: ExactTraces) -> parts.Figure:
    """Every estimate beside the exact trace."""
    full, *estimates = found.found
    shown = {kind: panel(found.found[full], found.found[kind], "exact trace", kind, log=True) for kind in estimates}
    return parts.Figure("nasi_scatter", "estimates beside the exact trace", {"panels": shown})


def search_steps(title: str, result: NasiResult) -> parts.Figure:
    """A search step by step: Q, R, the limit nu, and the norm of the gradient."""
    values = {"q": result.q, "r": result.r, "nu": result.nu, "norm": result.norms}
    return parts.Figure("nasi_steps", title, {name: value.tolist() for name, value in values.items()})


def logits(title: str, space: ArchSpace, result: NasiResult) -> parts.Figure:
    """The logits of a result: `values` (rows, columns), nan where a row has no such candidate."""
    values = result.delta.masked_fill(~result.logits.isfinite(), math.nan).flatten(0, 1).tolist()
    return parts.Figure("nasi_logits", title, {"rows": space.rows, "columns": space.columns, "values": values})


@drawing("nasi_scatter", "A dot is an architecture.")
def _scatter(data: Form) -> Figure:
    figure, axes = panels(len(data["panels"]), 3, 3.7 * min(len(data["panels"]), 3), 3.1)
    for ax, (name, shown) in zip(axes, data["panels"].items(), strict=True):
        ax.plot(shown["x"], shown["y"], ls="", marker="o", ms=3.5, color=SERIES[0], alpha=0.7)
        ax.set(title=literal(name), xlabel=shown["labels"][0], ylabel=shown["labels"][1])
        if shown.get("log"):
            ax.set(xscale="log", yscale="log")
            # within a decade or two the labels would run into each other
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_minor_formatter(NullFormatter())
    return figure


@drawing(
    "nasi_steps",
    "Q of the architecture sampled at every step, R with the penalty on what exceeds nu, and the norms by which "
    "gradients are divided: every one by the largest so far.",
)
def _steps(data: Form) -> Figure:
    figure, (values, norms) = new_figure(10, 3.6, columns=2)
    steps = np.arange(1, len(data["q"]) + 1)
    values.plot(steps, numbers(data["q"]), ls="", marker="o", ms=3, color=SERIES[0], label="Q")
    values.plot(steps, numbers(data["r"]), ls="", marker="x", ms=4, color=SERIES[1], label="R")
    values.plot(steps, numbers(data["nu"]), color=GREY, lw=1.2, label="nu")
    values.set(title="sampled architectures", xlabel="step")
    values.legend(fontsize=8, frameon=False)
    norm = numbers(data["norm"])
    norms.plot(steps, norm, ls="", marker="o", ms=3, color=SERIES[0], label="norm of the gradient")
    norms.plot(steps, np.maximum.accumulate(norm), color=GREY, lw=1.2, label="largest so far")
    norms.set(title="gradient of R", xlabel="step")
    norms.legend(fontsize=8, frameon=False)
    for ax in (values, norms):
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


@drawing("nasi_logits", "Rows: edges or layers; columns: candidates. Rings: the largest of every row.")
def _logits(data: Form) -> Figure:
    values, columns = numbers(data["values"]), data["columns"]
    figure, (ax,) = new_figure(2.5 + 0.75 * len(columns), 1.4 + 0.26 * len(values))
    largest = np.nanmax(np.abs(values)) or 1.0
    image = draw_cells(ax, values, "RdBu_r", vmin=-largest, vmax=largest)
    best = np.nanargmax(values, 1)
    ax.plot(best, np.arange(len(best)), ls="", marker="o", ms=5, mfc="none", mec=ON_LIGHT)
    ax.set_xticks(range(len(columns)), [literal(c) for c in columns], rotation=45, ha="right", fontsize=8)
    ax.set_yticks(range(len(values)), [literal(r) for r in data["rows"]], fontsize=8)
    figure.colorbar(image, ax=ax, shrink=0.8)
    return figure
