"""Figures in pages: text of any kind, and equal figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from nasfast.report import plots
from nasfast.report.page import embedded, svg_of


def test_text_of_any_kind_is_shown_not_obeyed(tmp_path):
    figure, (ax,) = plots.new_figure(4, 2)
    ax.set_title(plots.literal("<script>\x01 & $x"))
    text = embedded(figure, "a <caption>\x03", tmp_path / "figure.svg")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "a &lt;caption&gt;" in text
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
