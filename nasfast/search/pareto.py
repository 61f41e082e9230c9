"""The exact Pareto front of score against a cost, computed layer by layer."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from nasfast.indicators.table import IndicatorTable
from nasfast.runtime.arguments import check_type
from nasfast.search.candidate import ParetoPoint
from nasfast.search.exact import option_scores
from nasfast.search.limits import CostName, Limits, arch_sum, layer_costs
from nasfast.spaces import CostTable, LayerSpace

# The span of the sum becomes an integer of this many bits, so that equal sums are equal in any order of addition.
_SCORE_BITS = 40
# no sum of costs is as large, and numpy's integers can be compared with it
_NO_LIMIT = 2**62
# rows that are compared with all others at a time, where there are several criteria
_BLOCK = 256


def pareto_front(
    table: IndicatorTable,
    space: LayerSpace,
    *,
    limits: Limits = Limits(),
    against: CostName | CostTable = "macs",
) -> list[ParetoPoint]:
    """The non-dominated architectures within the limits, smallest cost first; of equal score and cost only one.

    Partial architectures are extended layer by layer. One is dropped if another has at most its cost and at least its
    score. Costs and scores are integers; scores are rounded to 2^-40 of their span. The cost under any other limit is a
    further criterion, except for partial architectures that no completion brings above that limit.

    Args:
        table: scores per layer and choice.
        space: the space of the table.
        limits: which architectures count.
        against: the cost: MACs, parameters, or a table. `values` of a point has the costs by the tables of `limits`,
            then by this table if it is not among them.

    Raises:
        InfeasibleConstraintError: no architecture meets the limits.
    """
    check_type("limits", limits, Limits, advice="Limits() limits nothing")
    limits.check(space)
    scores = option_scores(table, allow_identity=limits.allow_identity)
    axis = layer_costs(space, against, allow_identity=limits.allow_identity)
    limited = [(costs, min(top, _NO_LIMIT)) for _, costs, top in limits.costs(space)]
    span = sum(max(row.values()) - min(row.values()) for row in scores)
    scale = 2**_SCORE_BITS / span if span else 0.0

    cost, gain = np.zeros(1, np.int64), np.zeros(1, np.int64)
    sums = [np.zeros(1, np.int64) for _ in limited]
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for i, score_row in enumerate(scores):
        options = list(axis.rows[i])
        parent, choice = np.tile(np.arange(len(cost)), len(options)), np.repeat(options, len(cost))
        floor = min(score_row.values())
        gain = np.concatenate([gain + round((score_row[v] - floor) * scale) for v in options])
        cost = np.concatenate([cost + axis.rows[i][v] for v in options])
        sums = [
            np.concatenate([s + costs.rows[i][v] for v in options]) for s, (costs, _) in zip(sums, limited, strict=True)
        ]
        fits, criteria = np.ones(len(cost), bool), []
        for total, (costs, top) in zip(sums, limited, strict=True):
            rest = costs.rows[i + 1 :]
            fits &= total + sum(min(row.values()) for row in rest) <= top
            if costs.rows != axis.rows:
                # a partial architecture that can no longer exceed this limit is as good as one without this cost
                safe = total + sum(max(row.values()) for row in rest) <= top
                criteria.append(np.where(safe, 0, total))
        keep = np.flatnonzero(fits)
        keep = keep[_non_dominated(cost[keep], [column[keep] for column in criteria], gain[keep])]
        cost, gain, sums = cost[keep], gain[keep], [total[keep] for total in sums]
        trail.append((parent[keep], choice[keep]))

    extra = against if isinstance(against, CostTable) and against not in [t for t, _ in limits.tables] else None
    points = []
    for end in range(len(cost)):
        values, index = [], end
        for parent, choice in reversed(trail):
            values.append(int(choice[index]))
            index = parent[index]
        arch = tuple(reversed(values))
        whole = space.cost(arch)
        by_table = limits.values(arch) + (() if extra is None else (extra.cost(arch),))
        points.append(ParetoPoint(arch, arch_sum(scores, arch), whole.macs, whole.params, by_table))
    return points


def _non_dominated(cost: np.ndarray, criteria: Sequence[np.ndarray], gain: np.ndarray) -> np.ndarray:
    """Indices, by ascending cost, of the rows that no other row equals or beats in all columns."""
    criteria = [column for column in criteria if column.any()]
    order = np.lexsort((*reversed(criteria), -gain, cost))
    gain, columns = gain[order], [column[order] for column in criteria]
    if not columns:
        return order[gain > np.concatenate(([-1], np.maximum.accumulate(gain)[:-1]))]
    return order[_by_staircase(columns[0], gain) if len(columns) == 1 else _by_blocks(np.stack([*columns, -gain], 1))]


def _by_staircase(column: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Indices of the rows that no earlier row equals or beats in both columns."""
    # the staircase has the best rows so far, with an ascending column and ascending gain
    stair: list[int] = []
    stair_gain: list[int] = []
    best = []
    for index, (value, g) in enumerate(zip(column.tolist(), gain.tolist(), strict=True)):
        at = bisect.bisect_right(stair, value)
        if at and stair_gain[at - 1] >= g:
            continue
        best.append(index)
        start = bisect.bisect_left(stair, value)
        stop = start
        while stop < len(stair_gain) and stair_gain[stop] <= g:
            stop += 1
        stair[start:stop] = [value]
        stair_gain[start:stop] = [g]
    return np.array(best, dtype=np.int64)


def _at_most(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[i, j]: whether row j is at most as large as other row i in all columns."""
    return np.all(rows <= others[:, None], axis=2)


def _by_blocks(rows: np.ndarray) -> np.ndarray:
    """Indices of the rows of which no earlier row is at most as large in all columns."""
    best = np.zeros(0, dtype=np.int64)
    for start in range(0, len(rows), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(rows)))
        block = block[~np.any(_at_most(rows[best], rows[block]), axis=1)]
        beaten = np.any(np.tril(_at_most(rows[block], rows[block]), -1), axis=1)
        best = np.concatenate([best, block[~beaten]])
    return best
