"""Draws docs/architecture.svg from the imports: `python tests/draw_architecture.py`.

The parts of the picture are the packages and modules at the top of nasfast, and `_APART`. A part is drawn above all
parts that it imports. An arrow is left out if a longer way of arrows implies it, so that the picture can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import pairwise
from math import fsum
from pathlib import Path

from imports import imports_in, read_sources

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"

_BOX, _GAP, _RISE = (118, 30), 18, 74
_MARGIN = 20
_APART = {"indicators.table", "settings.run"}
"""Modules with a box of their own: `nasi` writes a table, and a score of `indicators` runs `nasi`. The settings of a
run contain those of `indicators`, which read those of the supernet."""


def part_of(module: str) -> str:
    """`nasfast.train.loop` -> `train`; "" for nasfast itself."""
    name = module.removeprefix("nasfast").removeprefix(".")
    return name if name in _APART else name.split(".")[0]


def part_imports() -> dict[str, set[str]]:
    """Every part with the parts that it imports."""
    sources = read_sources()
    graph: dict[str, set[str]] = {part_of(name.removesuffix(".__init__")): set() for name in sources}
    for found in imports_in(sources):
        if found.target.startswith("nasfast.") and not found.typing_only:
            graph[part_of(found.module)].add(part_of(found.target))
    # nasfast/__init__.py only names the others
    graph.pop("")
    return {part: {target for target in targets if target in graph} - {part} for part, targets in graph.items()}


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The graph without arrows that a longer way implies."""

    def below(part: str) -> set[str]:
        return set().union(*({target} | below(target) for target in graph[part]))

    return {
        part: {t for t in targets if not any(t in below(other) for other in targets if other != t)}
        for part, targets in graph.items()
    }


Node = str | tuple[str, str, int]
"""A part, or the place where the arrow of (part, target) crosses a height."""


def layers(graph: Mapping[str, set[str]]) -> tuple[list[list[Node]], dict[Node, set[Node]]]:
    """Nodes by height, and arrows from each height to the one below.

    A part is one level above the highest part that it imports. Nodes of a height are ordered to shorten the arrows.
    """
    height: dict[str, int] = {}

    def visit(part: str) -> int:
        if part not in height:
            height[part] = 1 + max((visit(target) for target in graph[part]), default=-1)
        return height[part]

    rows: list[list[Node]] = [[] for _ in range(1 + max(map(visit, graph)))]
    steps: dict[Node, set[Node]] = {}
    for part in sorted(graph):
        rows[height[part]].append(part)
        for target in sorted(graph[part]):
            way = [part, *((part, target, level) for level in range(height[part] - 1, height[target], -1)), target]
            for above, below in pairwise(way):
                steps.setdefault(above, set()).add(below)
            for node in way[1:-1]:
                rows[node[2]].append(node)
    for _ in range(12):
        for downward in (False, True):
            for row in reversed(rows) if downward else rows:
                place = {node: (i + 0.5) / len(r) for r in rows for i, node in enumerate(r)}
                row.sort(key=lambda node: _middle(node, steps, place, downward))
    return rows, steps


def _middle(node: Node, steps: Mapping[Node, set[Node]], place: Mapping[Node, float], downward: bool) -> float:
    others = {user for user, below in steps.items() if node in below} if downward else steps.get(node, set())
    # fsum, because the order of a set changes from run to run, and with it the rounding of a sum
    return fsum(place[other] for other in others) / len(others) if others else place[node]


def picture(graph: Mapping[str, set[str]]) -> str:
    """The SVG text; equal imports give equal text."""
    rows, steps = layers(reduced(graph))
    widths = [[_BOX[0] if isinstance(node, str) else 0 for node in row] for row in rows]
    width = max(sum(row) + _GAP * (len(row) - 1) for row in widths) + 2 * _MARGIN
    height = (len(rows) - 1) * _RISE + _BOX[1] + 2 * _MARGIN
    at: dict[Node, tuple[float, float]] = {}
    for level, (row, sizes) in enumerate(zip(rows, widths, strict=True)):
        space = (width - 2 * _MARGIN - sum(sizes)) / (len(row) + 1)
        x = float(_MARGIN)
        for node, size in zip(row, sizes, strict=True):
            at[node] = (x + space + size / 2, height - _MARGIN - _BOX[1] / 2 - _RISE * level)
            x += space + size
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
        'font-size="13">',
        '<defs><marker id="tip" markerWidth="7" markerHeight="6" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#667"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for node, targets in steps.items():
        for target in sorted(targets, key=str):
            lines.append(_arrow(at[node], at[target], isinstance(node, str), isinstance(target, str)))
    for part, (x, y) in at.items():
        if isinstance(part, str):
            lines.append(
                f'<rect x="{x - _BOX[0] / 2:.1f}" y="{y - _BOX[1] / 2:.1f}" width="{_BOX[0]}" height="{_BOX[1]}" '
                'rx="5" fill="#eef2fa" stroke="#446"/>'
            )
            lines.append(f'<text x="{x:.1f}" y="{y + 4.5:.1f}" text-anchor="middle">{escape(part)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _arrow(start: tuple[float, float], end: tuple[float, float], from_part: bool, to_part: bool) -> str:
    """One curve; between two heights where an arrow only passes it has no tip."""
    (x, y), (tx, ty) = start, end
    y, ty = y + from_part * _BOX[1] / 2, ty - to_part * _BOX[1] / 2
    bend = (ty - y) * 0.5
    tip = ' marker-end="url(#tip)"' if to_part else ""
    return (
        f'<path d="M{x:.1f},{y:.1f} C{x:.1f},{y + bend:.1f} {tx:.1f},{ty - bend:.1f} {tx:.1f},{ty:.1f}" fill="none" '
        f'stroke="#99a"{tip}/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(part_imports()))
