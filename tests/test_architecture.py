"""The picture in ARCHITECTURE.md is that of today's imports."""

from __future__ import annotations

from draw_architecture import PICTURE, layers, part_imports, picture, reduced


def test_the_picture_is_drawn_from_todays_imports():
    assert PICTURE.read_text() == picture(part_imports()), "draw it again: python tests/draw_architecture.py"


def test_an_arrow_that_a_longer_way_implies_is_left_out():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_an_arrow_across_a_height_passes_a_place_of_its_own():
    rows, steps = layers({"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()})
    assert [set(row) for row in rows] == [{"c", "d"}, {"b", ("a", "d", 1)}, {"a"}]
    assert steps["a"] == {"b", ("a", "d", 1)} and steps["a", "d", 1] == {"d"}
