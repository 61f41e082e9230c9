"""Figures of the studies: axes of matplotlib in the look of the reports, and what several figures draw alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import AutoLocator, MaxNLocator

from nasfast.report.plots import GREY, SERIES, draw_cells, literal, new_figure
from nasfast.report.style import INK, ON_DARK, ON_LIGHT

__all__ = ["GREY", "INK", "SERIES", "Figure", "heat", "level", "literal"]


class Figure:
    """A figure of a study. Text between dollars is TeX in titles and labels; `literal` keeps that of a user as it is.

    Args:
        title: above the figure.
        caption: below it.
        panels: number of `axes`, in which the study draws.
        columns: number of panels side by side.
        width, height: inches of the figure, and of a row of panels.
        legend: whether there is one for all panels, of every label once; otherwise panels with labels have their own.
    """

    def __init__(
        self,
        title: str,
        caption: str,
        panels: int,
        *,
        columns: int = 2,
        width: float = 11.0,
        height: float = 3.1,
        legend: bool = True,
    ) -> None:
        self.title, self.caption, self._legend = title, caption, legend
        columns = min(columns, panels)
        rows = math.ceil(panels / columns)
        self._drawing, axes = new_figure(width, 0.5 + height * rows, rows=rows, columns=columns)
        for ax in axes[panels:]:
            ax.remove()
        self.axes = list(axes[:panels])
        self._drawing.suptitle(literal(title), fontsize=11)

    def drawing(self) -> Drawing:
        """The figure with its legends, and with whole numbers below panels whose points are at layers or steps."""
        self._drawing.legends.clear()
        handles: dict[object, Artist] = {}
        for ax in self._drawing.axes:
            ax.title.set_fontsize(10)
            if isinstance(ax.xaxis.get_major_locator(), AutoLocator):
                places = np.concatenate([line.get_xdata() for line in ax.lines] or [[0.5]])
                ax.xaxis.set_major_locator(MaxNLocator(6, integer=bool((places == places.round()).all())))
            own = {handle.get_label(): handle for handle in ax.get_legend_handles_labels()[0]}
            handles |= own
            if own and not self._legend:
                ax.legend(handles=own.values(), fontsize=8, frameon=False)
        if handles and self._legend:
            columns = math.ceil(len(handles) / math.ceil(len(handles) / 8))
            self._drawing.legend(
                handles=handles.values(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
            )
        return self._drawing


def level(ax: Axes, value: float, colour: str = GREY, ls: str = ":") -> None:
    """A line across the axes at a value."""
    ax.axhline(value, color=colour, lw=1, ls=ls, zorder=1)


def heat(
    ax: Axes, grid: np.ndarray, rows: Sequence[str], columns: Sequence[str], *, limit: float, numbers: bool = False
) -> None:
    """A map of (rows, columns) numbers from -limit to limit, white at 0 and grey where there is none.

    `numbers` writes them, in units of a power of ten if they are small; otherwise the largest of every row has a ring.
    """
    unit = 10.0 ** math.floor(math.log10(limit)) if numbers and limit < 0.01 else 1.0
    grid, limit = grid / unit, limit / unit
    image = draw_cells(ax, grid, "RdBu_r", vmin=-limit, vmax=limit)
    if not numbers:
        ax.plot(np.nanargmax(grid, 1), np.arange(len(grid)), "o", ms=5, mfc="none", mec=ON_LIGHT)
    # two digits of the largest; adding zero turns -0.0 into 0.0
    digits = max(0, 1 - math.floor(math.log10(limit)))
    for (i, j), value in np.ndenumerate(grid) if numbers else ():
        if not math.isnan(value):
            colour = ON_DARK if abs(value) > 0.65 * limit else ON_LIGHT
            text = f"{round(value, digits) + 0.0:.{digits}f}"
            ax.text(j, i, text, ha="center", va="center", fontsize=7, color=colour)
    ax.set_xticks(range(len(columns)), map(literal, columns), rotation=45, ha="right", fontsize=8)
    ax.set_yticks(range(len(rows)), map(literal, rows), fontsize=8)
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02, aspect=30)
    bar.set_label("" if unit == 1 else f"in units of {unit:.0e}", fontsize=8)
