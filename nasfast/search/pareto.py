"""The exact Pareto front of score against MACs, computed layer by layer."""

from __future__ import annotations

import bisect

import numpy as np

from nasfast.indicators.table import IndicatorTable
from nasfast.search.candidate import ParetoPoint
from nasfast.search.exact import option_scores
from nasfast.search.limits import Limits, arch_sum, option_costs
from nasfast.spaces import SearchSpace

# The span of the sum becomes an integer of this many bits, so that equal sums are equal in any order of addition.
_SCORE_BITS = 40


def pareto_front(
    table: IndicatorTable, space: SearchSpace, *, limits: Limits | None = None, allow_identity: bool = False
) -> list[ParetoPoint]:
    """The non-dominated architectures within the limits, fewest MACs first; of equal score and MACs only one.

    Partial architectures are extended layer by layer. One is dropped if another has at most its MACs and at least its
    score. Costs and scores are integers; scores are rounded to 2^-40 of their span. Under a parameter limit the
    parameters are a third criterion, except for partial architectures that no completion brings above the limit.

    Raises:
        InfeasibleConstraintError: no architecture meets the limits.
    """
    limits = limits or Limits()
    limits.check(space, allow_identity=allow_identity)
    scores = option_scores(table, allow_identity=allow_identity)
    costs = option_costs(space, allow_identity=allow_identity)
    span = sum(max(row.values()) - min(row.values()) for row in scores)
    scale = 2**_SCORE_BITS / span if span else 0.0
    max_macs = np.inf if limits.max_macs is None else limits.max_macs - space.fixed_cost.macs
    max_params = np.inf if limits.max_params is None else limits.max_params - space.fixed_cost.params

    macs, params, gain = (np.zeros(1, np.int64) for _ in range(3))
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for i, (score_row, cost_row) in enumerate(zip(scores, costs, strict=True)):
        options = list(cost_row)
        parent = np.tile(np.arange(len(macs)), len(options))
        choice = np.repeat(options, len(macs))
        macs = np.concatenate([macs + cost_row[v].macs for v in options])
        params = np.concatenate([params + cost_row[v].params for v in options])
        floor = min(score_row.values())
        gain = np.concatenate([gain + round((score_row[v] - floor) * scale) for v in options])
        rest = costs[i + 1 :]
        fits = macs + sum(min(c.macs for c in row.values()) for row in rest) <= max_macs
        fits &= params + sum(min(c.params for c in row.values()) for row in rest) <= max_params
        # a partial architecture that can no longer exceed the parameter limit is as good as one without parameters
        safe = params + sum(max(c.params for c in row.values()) for row in rest) <= max_params
        keep = np.flatnonzero(fits)
        keep = keep[_non_dominated(macs[keep], np.where(safe, 0, params)[keep], gain[keep])]
        macs, params, gain = macs[keep], params[keep], gain[keep]
        trail.append((parent[keep], choice[keep]))

    points = []
    for end in range(len(macs)):
        values, index = [], end
        for parent, choice in reversed(trail):
            values.append(int(choice[index]))
            index = parent[index]
        arch = tuple(reversed(values))
        cost = space.cost(arch)
        points.append(ParetoPoint(arch, arch_sum(scores, arch), cost.macs, cost.params))
    return points


def _non_dominated(macs: np.ndarray, params: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Indices, by ascending MACs, of the rows that no other row equals or beats in all three columns."""
    order = np.lexsort((params, -gain, macs))
    if not params.any():
        gain = gain[order]
        return order[gain > np.concatenate(([-1], np.maximum.accumulate(gain)[:-1]))]
    # sweep by ascending MACs; the staircase has the rows kept so far, with ascending parameters and ascending gain
    stair_params: list[int] = []
    stair_gain: list[int] = []
    kept = []
    for index, p, g in zip(order.tolist(), params[order].tolist(), gain[order].tolist(), strict=True):
        at = bisect.bisect_right(stair_params, p)
        if at and stair_gain[at - 1] >= g:
            continue
        kept.append(index)
        start = bisect.bisect_left(stair_params, p)
        stop = start
        while stop < len(stair_gain) and stair_gain[stop] <= g:
            stop += 1
        stair_params[start:stop] = [p]
        stair_gain[start:stop] = [g]
    return np.array(kept, dtype=np.int64)
