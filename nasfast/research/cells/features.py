"""What a cell is made of, as numbers that say how good it may be."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
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
    edges, kinds, rows = len(space.cell.edges), range(len(space.ops)), []
    sets = [s for size in range(1, len(kinds)) for s in itertools.combinations(kinds, size)]
    for arch in archs:
        row: list[int] = []
        for start in range(0, len(arch), edges):
            part = tuple(arch[start : start + edges])
            if part not in known:
                lengths = [_paths(space.cell, part, allowed) for allowed in sets]
                known[part] = [*map(part.count, kinds), *(length[i] for i in (0, 1) for length in lengths)]
            row += known[part]
        rows.append(row)
    return rows


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
