"""Figures as data: what each mark draws."""

from __future__ import annotations

import math

import numpy as np

from nasfast.research.studies.draw import band, figure_of, heat, level, line, panel
from nasfast.research.studies.report import Figure, plain


def drawn(*panels, **more):
    return figure_of(plain(Figure("a $5 title", "", panels, **more)))


def labels(legend) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_lines_bands_and_levels():
    x, y = [1, 2, 3], np.array([1.0, math.nan, 3.0])
    one = panel(r"$\mu_2$", line(x, y, "#ff0000", "a", lw=3, ls="--"), band(x, y - 1, y + 1), level(2), x="l", y="v")
    two = panel("q", line(x, y, label="a"), line(x, y, label="b"), log="y", ylim=(0.5, None), legend=True)
    figure = drawn(one, two)
    first, second = figure.axes
    assert (first.get_title(), first.get_xlabel(), first.get_ylabel()) == (r"$\mu_2$", "l", "v")
    # a gap stays a gap
    np.testing.assert_array_equal(first.lines[0].get_ydata(), y)
    assert (first.lines[0].get_color(), first.lines[0].get_linestyle()) == ("#ff0000", "--")
    assert list(first.lines[1].get_ydata()) == [2, 2] and len(first.collections) == 1
    assert second.get_yscale() == "log" and second.get_ylim()[0] == 0.5
    assert labels(second.get_legend()) == ["a", "b"]
    # every label once
    assert labels(figure.legends[0]) == ["a", "b"]
    assert not drawn(one, legend=False).legends
    # a title of a whole figure is text of a user
    assert figure.get_suptitle() == r"a \$5 title"


def test_a_map_of_numbers():
    grid = np.array([[0.02, -0.041], [math.nan, 0.0]])
    shown = heat(grid, ["r", "s"], ["c", "d"], limit=0.041, numbers=True, ring=True)
    ax = drawn(panel("", shown)).axes[0]
    assert ax.images[0].get_clim() == (-0.041, 0.041) and ax.images[0].get_array().mask[1, 0]
    # as many digits as the largest has two of
    assert [text.get_text() for text in ax.texts] == ["0.020", "-0.041", "0.000"]
    assert list(ax.lines[0].get_xdata()) == [0, 1]
