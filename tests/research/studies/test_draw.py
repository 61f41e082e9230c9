"""Figures as data: what each mark draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.patches import PathPatch

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


def test_distributions():
    values = [*np.linspace(0, 2, 50), math.nan]
    histogram = {"mark": "histogram", "values": values, "colour": "#00ff00", "label": "l = 1"}
    style = {"color": "#00ff00"}
    stairs = {"mark": "stairs", "shares": [0.5, 0.5], "edges": [0, 1, 2], "label": "s", "style": style}
    ax = drawn(panel("", histogram, stairs, {"mark": "ticks", "names": ["u", "v"]})).axes[0]
    assert ax.lines[0].get_label() == f"l = 1: 1.00 ± {np.std(values[:-1]):.2f}"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["u", "v"]


def test_a_map_of_numbers():
    grid = np.array([[0.02, -0.041], [math.nan, 0.0]])
    shown = heat(grid, ["r", "s"], ["c", "d"], limit=0.041, bold=[True, False], numbers=True, ring=True)
    ax = drawn(panel("", shown)).axes[0]
    assert ax.images[0].get_clim() == (-0.041, 0.041) and ax.images[0].get_array().mask[1, 0]
    # as many digits as the largest has two of
    assert [text.get_text() for text in ax.texts] == ["0.020", "-0.041", "0.000"]
    assert [tick.get_fontweight() == "bold" for tick in ax.get_yticklabels()] == [True, False]
    assert list(ax.lines[0].get_xdata()) == [0, 1]
    ax = drawn(panel("", heat(grid, ["r", "s"], ["c", "d"], limit=0.041, unit=0.01))).axes
    assert ax[0].images[0].get_clim() == pytest.approx((-4.1, 4.1)) and ax[1].get_ylabel() == "in units of 1e-02"


def test_a_cell_as_a_graph():
    edges = [[0, 2, "sep 3", "#111111", 0.75], [1, 2, "", "#222222", 0.0], [2, 3, "skip", "#333333", 1.0]]
    graph = {"mark": "graph", "inputs": 2, "nodes": 2, "outputs": [3], "edges": edges}
    ax = drawn(panel("step 0", graph)).axes[0]
    assert [text.get_text() for text in ax.texts] == ["sep 3", "skip", "0", "1", "2", "3", "out"]
    # those to the output come first
    arcs = [patch for patch in ax.patches if isinstance(patch, PathPatch)][1:]
    assert [round(arc.get_linewidth(), 3) for arc in arcs] == [round(0.6 + 2.9 * w, 3) for w in (0.75, 0, 1)]
    assert [arc.get_linestyle() for arc in arcs] == ["solid", (0, (5, 2.5)), "solid"]
    # edges of inputs are above the nodes, the others below
    assert [text.get_position()[1] > 0 for text in ax.texts[:2]] == [True, False]
    assert [mark.get_marker() for mark in ax.lines] == ["s", "s", "o", "o", "D"]
