"""The figures of the NASI study."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from nasfast.research.nasi.search import NasiResult
from nasfast.research.studies.draw import GREY, SERIES, Figure, heat
from nasfast.spaces import ArchSpace


def dots(title: str, panels: Sequence[tuple[str, str, ArrayLike, ArrayLike]], scale: str = "linear") -> Figure:
    """A dot for every architecture; a panel has the names of both axes, and the places on them."""
    figure = Figure(title, "A dot is an architecture.", len(panels), columns=3)
    for ax, (x_name, y_name, x, y) in zip(figure.axes, panels, strict=True):
        ax.plot(x, y, "o", ms=3.5, alpha=0.7)
        ax.set(xlabel=x_name, ylabel=y_name, xscale=scale, yscale=scale)
    return figure


def search_steps(title: str, result: NasiResult) -> Figure:
    """A search step by step: Q, R, the limit nu, and the norm of the gradient."""
    caption = (
        "Q of the architecture sampled at every step, R with the penalty on what exceeds nu, and the norms by which "
        "gradients are divided: every one by the largest so far."
    )
    figure, steps = Figure(title, caption, 2, legend=False), range(1, len(result.q) + 1)
    values, norms = figure.axes
    values.plot(steps, result.q, "o", ms=3, label="Q")
    values.plot(steps, result.r, "x", ms=3, color=SERIES[1], label="R")
    values.plot(steps, result.nu, color=GREY, label="nu")
    values.set(title="sampled architectures", xlabel="step")
    norms.plot(steps, result.norms, "o", ms=3, label="norm of the gradient")
    norms.plot(steps, result.norms.cummax(0).values, color=GREY, label="largest so far")
    norms.set(title="gradient of R", xlabel="step")
    return figure


def logits(title: str, space: ArchSpace, result: NasiResult) -> Figure:
    """The logits of a result, (rows, columns) of the space; nan where a row has no such candidate."""
    values = result.delta.masked_fill(~result.logits.isfinite(), math.nan).flatten(0, 1).numpy()
    caption = "Rows: edges or layers; columns: candidates. Rings: the largest of every row."
    width, height = 2.5 + 0.75 * len(space.columns), 1.0 + 0.26 * len(values)
    figure = Figure(title, caption, 1, width=width, height=height)
    heat(figure.axes[0], values, space.rows, space.columns, limit=float(np.nanmax(np.abs(values))) or 1.0)
    return figure
