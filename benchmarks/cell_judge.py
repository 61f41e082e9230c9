"""What a table of trained accuracies says of cells, and of scores of the candidates on their edges."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from nasfast.cells import CellSpace
from nasfast.indicators.accuracies import read_accuracies
from nasfast.spaces import Arch
from nasfast.spaces.cell_costs import NONE, SKIP_CONNECT

COLUMNS = ("cifar10-val", "cifar10-test", "cifar100-val", "cifar100-test", "imagenet-val", "imagenet-test")
JUDGE = "cifar10-val"
"""The accuracy whose percentile is reported."""


class Judge:
    """The table of accuracies.

    Args:
        path: JSON of NAS-Bench-201, with some of the cells or all.
        space: its space; the size of the network does not matter.
    """

    def __init__(self, path: str, space: CellSpace) -> None:
        self.space = space
        self.accuracies = {column: read_accuracies(path, space, column=column) for column in COLUMNS}
        self.judge = self.accuracies[JUDGE]
        self._archs, self._values = np.array(list(self.judge)), np.array(list(self.judge.values()))
        self._twins: dict[Any, Arch] = {}
        for arch in sorted(self.judge):
            self._twins.setdefault(network_of(space, arch), arch)

    def percentile(self, accuracy: float) -> float:
        """Share of the cells of the table that are not better, in percent."""
        return round(100 * float((self._values <= accuracy).mean()), 2)

    def row(self, arch: Arch) -> dict[str, Any]:
        """What the table says of a cell, and what can be said of one that it does not have."""
        ops = [self.space.ops[k] for k in arch]
        found = self._found(arch)
        near = [self.judge[other] for other in neighbours(self.space, arch) if other in self.judge]
        row: dict[str, Any] = {
            "arch": text_of(self.space, arch),
            "skips": ops.count(SKIP_CONNECT),
            "removed": ops.count(NONE),
            "looked_up": "no" if found is None else "itself" if found == arch else text_of(self.space, found),
            "accuracy": None if found is None else {c: table[found] for c, table in self.accuracies.items()},
            "percentile": None if found is None else self.percentile(self.judge[found]),
        }
        if near:
            middle = statistics.median(near)
            row["one_edge_away"] = {
                "cells": len(near),
                "accuracy": [min(near), round(middle, 3), max(near)],
                "percentile": [self.percentile(value) for value in (min(near), middle, max(near))],
            }
        return row

    def _found(self, arch: Arch) -> Arch | None:
        """The cell itself or another name of the same network, whichever the table has."""
        return arch if arch in self.judge else self._twins.get(network_of(self.space, arch))

    def best(self, scores: Sequence[Sequence[float]]) -> dict[str, Any]:
        """The best cell with an accuracy: that of the best candidate of every edge if it can be looked up.

        If it cannot, it is the cell of the table with the highest sum of its candidates' scores, of equals the first.

        Args:
            scores: (edges, ops), -inf for candidates that may not be chosen.
        """
        values = np.asarray(scores, dtype=float)
        found = self._found(tuple(values.argmax(1).tolist()))
        if found is not None:
            return self._outcome(found)
        i = int(values[np.arange(len(values)), self._archs].sum(1).argmax())
        return self._outcome(tuple(self._archs[i].tolist()))

    def known(self, scored: Mapping[Arch, float]) -> dict[str, Any]:
        """What the table says of cells that were scored one by one.

        Returns:
            `cells`: how many of them can be looked up. Of these, `tau`: Kendall's tau-b of score and accuracy, and
            `in_table`: the one with the highest score. The last two are None if the table has none of them.
        """
        pairs = [(score, found) for arch, score in scored.items() if (found := self._found(arch)) is not None]
        if not pairs:
            return {"cells": 0, "tau": None, "in_table": None}
        scores, archs = zip(*pairs, strict=True)
        tau = kendalltau(scores, [self.judge[arch] for arch in archs]).statistic if len(pairs) > 1 else np.nan
        return {
            "cells": len(pairs),
            "tau": round(float(tau), 4) if np.isfinite(tau) else None,
            "in_table": self._outcome(archs[int(np.argmax(scores))]),
        }

    def _outcome(self, arch: Arch) -> dict[str, Any]:
        value = self.judge[arch]
        return {"arch": text_of(self.space, arch), "accuracy": value, "percentile": self.percentile(value)}

    def table(self, scores: Sequence[Sequence[float]]) -> dict[str, float]:
        """How well scores of candidates rank, as Kendall's tau-b with the accuracies.

        Args:
            scores: (edges, ops).

        Returns:
            `cells`: the sum of a cell's scores, over all cells of the table. `candidates`: the scores of the candidates
            of one edge, with the mean accuracies of the cells that have them; the mean over edges.
        """
        values = np.asarray(scores)
        edges = np.arange(values.shape[0])
        within = [kendalltau(row, self.means()[e]).statistic for e, row in enumerate(values)]
        cells = kendalltau(values[edges, self._archs].sum(1), self._values).statistic
        return {"cells": round(float(cells), 4), "candidates": round(float(np.nanmean(within)), 4)}

    def means(self) -> np.ndarray:
        """(edges, ops) mean accuracy of the cells with each candidate; NaN where the table has none."""
        found = np.full((self._archs.shape[1], len(self.space.ops)), np.nan)
        for e, k in np.ndindex(found.shape):
            chosen = self._archs[:, e] == k
            if chosen.any():
                found[e, k] = self._values[chosen].mean()
        return found


def text_of(space: CellSpace, arch: Arch) -> str:
    """A cell as NAS-Bench-201 writes it."""
    groups: dict[int, list[str]] = {}
    for edge, k in zip(space.cell.edges, arch, strict=True):
        op = space.ops[k]
        groups.setdefault(edge.target, []).append(f"{'nor_' * op.startswith('conv')}{op}~{edge.source}")
    return "+".join(f"|{'|'.join(group)}|" for group in groups.values())


def neighbours(space: CellSpace, arch: Arch) -> Iterator[Arch]:
    """The cells that differ in one edge."""
    for i, options in enumerate(space.candidates):
        yield from ((*arch[:i], k, *arch[i + 1 :]) for k in options if k != arch[i])


def network_of(space: CellSpace, arch: Arch) -> tuple[str, int]:
    """The same for cells that compute the same: what reaches the output as a formula, and the number of convolutions.

    An identity is its input, a missing edge and what nothing enters or leaves are left out, and terms of a sum have no
    order. The number tells a convolution that is used twice from two convolutions of one input.
    """
    terms: dict[int, list[tuple[str, frozenset[int]]]] = {0: [("x", frozenset())]}
    for node in range(1, 1 + space.cell.nodes):
        terms[node] = []
        for e in space.cell.into(node):
            op, inputs = space.ops[arch[e]], terms[space.cell.edges[e].source]
            if op == NONE or not inputs:
                continue
            if op == SKIP_CONNECT:
                terms[node] += inputs
                continue
            formula = f"{op}({_sum(inputs)})"
            used = frozenset({e} if op.startswith("conv") else ()).union(*(edges for _, edges in inputs))
            terms[node].append((formula, used))
    output = terms[space.cell.outputs[0]]
    return _sum(output), len(frozenset().union(*(edges for _, edges in output)))


def _sum(terms: Sequence[tuple[str, frozenset[int]]]) -> str:
    return "+".join(sorted(formula for formula, _ in terms))
