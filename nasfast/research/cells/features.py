"""What a cell is made of, as numbers that say how good it may be."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from nasfast.spaces import Arch

if TYPE_CHECKING:
    from nasfast.research.cells.space import Cell, CellSpace


def graph_features(space: CellSpace, archs: Iterable[Arch]) -> list[list[int]]:
    """[architecture][feature]: neural graph features of each type of cell, 65 for the cells of NAS-Bench-201.

    They are the number of edges with each operation and, for each set of operations except all and none, the fewest and
    the most edges on a path from an input to an output whose operations are in the set: one more than the edges of the
    cell, and 0, where there is no such path. Kadlecova et al., Surprisingly Strong Performance Prediction with Neural
    Graph Features (ICML 2024), section 3, without the degrees of nodes.
    """
    known: dict[Arch, list[int]] = {}
    edges, rows = len(space.cell.edges), []
    for arch in archs:
        row: list[int] = []
        for start in range(0, len(arch), edges):
            part = tuple(arch[start : start + edges])
            if part not in known:
                known[part] = _of_cell(space.cell, part, range(len(space.ops)))
            row += known[part]
        rows.append(row)
    return rows


def _of_cell(cell: Cell, ops: Arch, kinds: Sequence[int]) -> list[int]:
    """The features of one cell; `ops` has the operation of each edge, one of `kinds`."""
    sets = [s for size in range(1, len(kinds)) for s in itertools.combinations(kinds, size)]
    lengths = [_paths(cell, ops, allowed) for allowed in sets]
    return [*map(ops.count, kinds), *(least for least, _ in lengths), *(most for _, most in lengths)]


def _paths(cell: Cell, ops: Arch, allowed: Collection[int]) -> tuple[int, int]:
    """The fewest and the most edges on a path from an input to an output that has only the allowed operations."""
    reached = {node: (0, 0) for node in range(cell.inputs)}
    # edges are sorted by target, so all paths to the source of an edge are known
    for edge, op in zip(cell.edges, ops, strict=True):
        if op in allowed and edge.source in reached:
            least, most = (length + 1 for length in reached[edge.source])
            before = reached.get(edge.target, (least, most))
            reached[edge.target] = min(least, before[0]), max(most, before[1])
    ends = [reached[node] for node in cell.outputs if node in reached]
    return min((e[0] for e in ends), default=len(cell.edges) + 1), max((e[1] for e in ends), default=0)
