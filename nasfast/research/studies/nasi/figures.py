"""The figures of the NASI study: what they show, as data, and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from nasfast.report.plots import GREY, SERIES, draw_cells, literal, new_figure
from nasfast.report.style import ON_LIGHT
from nasfast.research.nasi.search import NasiResult
from nasfast.research.studies import parts
from nasfast.research.studies.nasi.measure import ExactTraces
from nasfast.research.studies.page import Drawing, Form
from nasfast.spaces import ArchSpace


@dataclass(frozen=True)
class Panel:
    """One scatter plot: a dot for each architecture, with the labels of both axes."""

    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    labels: tuple[str, str]


@dataclass(frozen=True)
class LogPanel(Panel):
    """A scatter plot with logarithmic axes."""

    log: bool = True


@dataclass(frozen=True)
class Scatter(parts.Figure):
    """Scatter plots side by side, by title."""

    kind: ClassVar[str] = "nasi_scatter"
    panels: Mapping[str, Panel]

    @classmethod
    def of_traces(cls, traces: ExactTraces) -> Scatter:
        """Every estimate beside the exact trace."""
        full, *estimates = traces.found
        panels = {kind: LogPanel(traces.found[full], traces.found[kind], ("exact trace", kind)) for kind in estimates}
        return cls("estimates beside the exact trace", panels)


@dataclass(frozen=True)
class SearchSteps(parts.Figure):
    """A search step by step: Q, R, the limit nu, and the norm of the gradient."""

    kind: ClassVar[str] = "nasi_steps"
    q: list[float]
    r: list[float]
    nu: list[float]
    norm: list[float]

    @classmethod
    def of(cls, title: str, result: NasiResult) -> SearchSteps:
        """The figure of a search."""
        return cls(title, *(values.tolist() for values in (result.q, result.r, result.nu, result.norms)))


@dataclass(frozen=True)
class Logits(parts.Figure):
    """The logits of a result: `values` (rows, columns), nan where a row has no such candidate."""

    kind: ClassVar[str] = "nasi_logits"
    rows: list[str]
    columns: list[str]
    values: list[list[float]]

    @classmethod
    def of(cls, title: str, space: ArchSpace, result: NasiResult) -> Logits:
        """The figure of a search."""
        values = result.delta.masked_fill(~result.logits.isfinite(), math.nan).flatten(0, 1).tolist()
        return cls(title, list(space.rows), list(space.columns), values)


def _numbers(values: Any) -> np.ndarray:
    """Nested lists as float64; None becomes nan."""
    return np.array(values, dtype=float)


def _scatter(data: Form) -> Figure:
    panels = data["panels"]
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure, axes = new_figure(3.7 * columns, 0.5 + 3.1 * rows, rows=rows, columns=columns)
    for ax, (name, panel) in zip(axes, panels.items(), strict=False):
        ax.plot(panel["x"], panel["y"], ls="", marker="o", ms=3.5, color=SERIES[0], alpha=0.7)
        ax.set(title=literal(name), xlabel=panel["labels"][0], ylabel=panel["labels"][1])
        if panel.get("log"):
            ax.set(xscale="log", yscale="log")
            # within a decade or two the labels would run into each other
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_minor_formatter(NullFormatter())
    for ax in axes[len(panels) :]:
        ax.remove()
    return figure


def _steps(data: Form) -> Figure:
    figure, (values, norms) = new_figure(10, 3.6, columns=2)
    steps = np.arange(1, len(data["q"]) + 1)
    values.plot(steps, _numbers(data["q"]), ls="", marker="o", ms=3, color=SERIES[0], label="Q")
    values.plot(steps, _numbers(data["r"]), ls="", marker="x", ms=4, color=SERIES[1], label="R")
    values.plot(steps, _numbers(data["nu"]), color=GREY, lw=1.2, label="nu")
    values.set(title="sampled architectures", xlabel="step")
    values.legend(fontsize=8, frameon=False)
    norm = _numbers(data["norm"])
    norms.plot(steps, norm, ls="", marker="o", ms=3, color=SERIES[0], label="norm of the gradient")
    norms.plot(steps, np.maximum.accumulate(norm), color=GREY, lw=1.2, label="largest so far")
    norms.set(title="gradient of R", xlabel="step")
    norms.legend(fontsize=8, frameon=False)
    for ax in (values, norms):
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def _logits(data: Form) -> Figure:
    values, columns = _numbers(data["values"]), data["columns"]
    figure, (ax,) = new_figure(2.5 + 0.75 * len(columns), 1.4 + 0.26 * len(values))
    largest = np.nanmax(np.abs(values)) or 1.0
    image = draw_cells(ax, values, "RdBu_r", vmin=-largest, vmax=largest)
    best = np.nanargmax(values, 1)
    ax.plot(best, np.arange(len(best)), ls="", marker="o", ms=5, mfc="none", mec=ON_LIGHT)
    ax.set_xticks(range(len(columns)), [literal(c) for c in columns], rotation=45, ha="right", fontsize=8)
    ax.set_yticks(range(len(values)), [literal(r) for r in data["rows"]], fontsize=8)
    figure.colorbar(image, ax=ax, shrink=0.8)
    return figure


FIGURES = {
    "nasi_scatter": Drawing(_scatter, "A dot is an architecture."),
    "nasi_steps": Drawing(
        _steps,
        "Q of the architecture sampled at every step, R with the penalty on what exceeds nu, and the norms by which "
        "gradients are divided: every one by the largest so far.",
    ),
    "nasi_logits": Drawing(_logits, "Rows: edges or layers; columns: candidates. Rings: the largest of every row."),
}
"""Kind of figure -> what draws it from its form, and its caption."""
