"""The pass marks of the quick experiment of the NASI study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from nasfast.research.studies.nasi.measure import RandomCells, Records, SearchKind, pearson, spearman
from nasfast.research.studies.report import Check


def marks(cells: RandomCells, kinds: Sequence[SearchKind], records: Records) -> Iterator[Check]:
    """How well Q predicts the accuracy of random cells, what the searches select, and how long they take."""
    q = np.array(cells.scores["standard"])
    yield Check("Q over random cells: largest over smallest", 4, math.inf, float(q.max() / q.min()))
    for mode, values in cells.scores.items():
        yield Check(f"Spearman of Q and accuracy, {mode}", 0.4, 1, spearman(values, cells.accuracy))
        if mode != "standard":
            yield Check(f"Pearson of Q, standard and {mode}", 0.5, 1, pearson(q, values))
            yield Check(f"Spearman of Q, standard and {mode}", 0.6, 1, spearman(q, values))
    for kind in kinds:
        if kind.marked:
            above = float(kind.accuracy.min() - cells.accuracy.mean())
            yield Check(f"{kind.name}: mean percentile", 0.8, 1, float(kind.percentile.mean()))
            yield Check(f"{kind.name}: worst accuracy minus random mean", 0, 1, above)
    # the processor's time, which other programs do not lengthen, or the clock's where that is less
    seconds = [min(record.seconds, record.cpu_seconds) for record in records.values()]
    yield Check("seconds of a search, longest", 0, 60, max(seconds))
