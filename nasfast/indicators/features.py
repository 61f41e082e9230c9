"""Features of architectures, which say what an architecture is made of and need no network. They need no torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from nasfast.indicators.structure import BASELINES, structure_scores
from nasfast.spaces import Arch, ArchSpace, LayerSpace

if TYPE_CHECKING:
    from nasfast.research.cells.space import Cell, CellSpace


def features(space: ArchSpace, archs: Sequence[Arch]) -> np.ndarray:
    """(archs, features) float64: the baselines, and `graph_features` of cells or `layer_features` of layers."""
    counts = np.array([structure_scores(space, name, archs) for name in BASELINES]).T
    if isinstance(space, LayerSpace):
        rest = layer_features(space, archs)
    else:  # the other kind of spaces is that of cells
        rest = graph_features(cast("CellSpace", space), archs)
    return np.concatenate([counts, rest], axis=1)


def layer_features(space: LayerSpace, archs: Iterable[Arch]) -> np.ndarray:
    """(archs, features): for each layer and option whether it is chosen, and how often each label is chosen."""
    pairs = [(i, v) for i, layer in enumerate(space.layers) for v in layer.legal]
    labels = sorted({space.label(i, v) for i, v in pairs})
    rows = []
    for arch in archs:
        chosen = [space.label(i, v) for i, v in enumerate(arch)]
        rows.append([*(arch[i] == v for i, v in pairs), *map(chosen.count, labels)])
    return np.array(rows, dtype=np.float64)


def graph_features(space: CellSpace, archs: Iterable[Arch]) -> np.ndarray:
    """(archs, features): neural graph features of each type of cell, 65 for the cells of NAS-Bench-201.

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
    return np.array(rows, dtype=np.float64)


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
