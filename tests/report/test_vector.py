"""Figures as SVG: values on hover, colours of light and dark, and text of any kind."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from nasfast.report import plots, style
from nasfast.report.page import embedded
from nasfast.report.vector import svg_of, with_value

SVG = "{http://www.w3.org/2000/svg}"


def titles(figure: Figure) -> dict[str, ElementTree.Element]:
    """Text of each hover value -> the element that has it."""
    root = ElementTree.fromstring(svg_of(figure, "name", "caption"))
    return {e.find(f"{SVG}title").text: e for e in root.iter() if e.find(f"{SVG}title") is not None}


def test_points_of_lines_have_their_values_at_their_places():
    figure, (ax,) = plots.new_figure(4, 2)
    ax.plot([0, 10], [3, 5], label="loss", color=plots.SERIES[0])
    ax.axhline(4)
    ax.set(xlabel="step", ylabel=r"$\mathrm{L}$", xlim=(0, 10), ylim=(3, 5))
    found = titles(figure)
    assert set(found) == {"loss\nstep 0, L 3", "loss\nstep 10, L 5"}
    # the axes in points of 1/72 inch, from the bottom
    box = ax.get_position()
    low, high = found["loss\nstep 0, L 3"], found["loss\nstep 10, L 5"]
    assert float(low.get("cx")) == pytest.approx(4 * 72 * box.x0, abs=0.06)
    assert float(high.get("cx")) == pytest.approx(4 * 72 * box.x1, abs=0.06)
    assert float(low.get("cy")) == pytest.approx(2 * 72 * (1 - box.y0), abs=0.06)
    assert float(high.get("cy")) == pytest.approx(2 * 72 * (1 - box.y1), abs=0.06)


def test_cells_and_bars_have_values_and_empty_cells_none():
    figure, (cells, bars) = plots.new_figure(6, 3, columns=2)
    plots.draw_cells(cells, np.array([[0.25, np.nan]]), "viridis")
    cells.set_xticks([0, 1], ["k3", "k5"])
    cells.set_yticks([0], ["layer 7"])
    plots.draw_bars(bars, [0, 1], [1, 2], ["one", "two < 3"])
    found = titles(figure)
    assert set(found) == {"layer 7, k3: 0.25", "one", "two < 3"}
    assert found["layer 7, k3: 0.25"].tag == f"{SVG}rect"


def test_near_points_share_a_value_and_the_upper_one_has_it():
    figure, (ax,) = plots.new_figure(4, 2)
    ax.scatter(np.linspace(0, 1, 5000), np.linspace(0, 1, 5000), label="cloud")
    ax.scatter([0.5], [0.5], label="best", zorder=9)
    found = titles(figure)
    assert 20 < len(found) < 200
    assert "best\nx 0.5, y 0.5" in found and "cloud\nx 0.5, y 0.5" not in found


def test_colours_are_variables_of_the_page():
    figure, (ax,) = plots.new_figure(4, 2)
    ax.plot([0, 1], [0, 1], color=plots.SERIES[1])
    ax.text(0.5, 0.5, "on a colour", color=style.ON_LIGHT)
    text = svg_of(figure, "name", "caption")
    assert "var(--cd55e00,#d55e00)" in text and "var(--c000000,#000000)" in text
    assert style.ON_LIGHT in text and style.ON_LIGHT not in style.DARK
    # every colour that has a dark form is a variable, and the page defines it
    bare = re.findall(r"(?<![,(])#[0-9a-f]{6}", text)
    assert not set(bare) & set(style.DARK)
    dark = style.STYLE.split("prefers-color-scheme: dark")[1]
    assert all(f"--c{colour[1:]}: {other};" in dark for colour, other in style.DARK.items())


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.1."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_lines_are_seen_on_both_backgrounds():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for colour in plots.SERIES:
        assert contrast(style.DARK[colour.lower()], style.DARK[style.PAPER]) > 4.5


def test_the_colours_of_blocks_do_not_change_with_the_page():
    """Their text is black or white by the colour, so it would not be readable on another one."""
    from nasfast.spaces import Block

    blocks = [Block("mbconv", kernel, 6) for kernel in (1, 3, 5, 7)] + [Block("shuffle", 3, 1), Block("identity", 1, 1)]
    assert not {plots._block_colour(block) for block in blocks} & set(style.DARK)


def test_text_of_any_kind_is_shown_not_obeyed(tmp_path):
    figure, (ax,) = plots.new_figure(4, 2)
    ax.set_title(plots.literal("<script>\x01 & $x"))
    with_value(ax.bar([0], [1]).patches[0], 'a "b" <c>\x02')
    text = embedded(figure, "a <caption>\x03", tmp_path / "figure.svg")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "a &lt;caption&gt;" in text
    assert 'a "b" &lt;c&gt;' in text
    ElementTree.parse(tmp_path / "figure.svg")


def test_a_figure_is_the_same_every_time_and_has_identifiers_of_its_own():
    def draw(name):
        figure, (ax,) = plots.new_figure(4, 2)
        ax.plot([0, 1], [0, 1], marker="o")
        return svg_of(figure, name, "caption")

    def identities(text):
        return set(re.findall(r' id="([^"]*)"', text))

    assert draw("one") == draw("one")
    assert identities(draw("one")) and not identities(draw("one")) & identities(draw("two"))
