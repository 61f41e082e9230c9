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
    cache: dict[Arch, list[int]] = {}
    edges, kinds, rows = len(space.cell.edges), range(len(space.ops)), []
    sets = [s for size in range(1, len(kinds)) for s in itertools.combinations(kinds, size)]
    for arch in archs:
        row: list[int] = []
        for start in range(0, len(arch), edges):
            part = tuple(arch[start : start + edges])
            if part not in cache:
                lengths = [_path_lengths(space.cell, part, allowed) for allowed in sets]
                cache[part] = [*map(part.count, kinds), *(length[i] for i in (0, 1) for length in lengths)]
            row += cache[part]
        rows.append(row)
    return rows


def _path_lengths(cell: Cell, ops: Arch, allowed: Collection[int]) -> tuple[int, int]:
    """The fewest and the most edges on a path from an input to an output that has only the allowed operations."""
    lengths = {node: (0, 0) for node in range(cell.inputs)}
    # edges are sorted by target, so all edges into the source of an edge precede it
    for edge, op in zip(cell.edges, ops, strict=True):
        if op in allowed and edge.source in lengths:
            least, most = (length + 1 for length in lengths[edge.source])
            shortest, longest = lengths.get(edge.target, (least, most))
            lengths[edge.target] = min(least, shortest), max(most, longest)
    ends = [lengths[node] for node in cell.outputs if node in lengths]
    return min((e[0] for e in ends), default=len(cell.edges) + 1), max((e[1] for e in ends), default=0)
