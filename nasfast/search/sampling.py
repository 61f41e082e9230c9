"""Random architectures within cost limits, without trying until one fits.

Only 0.3 % of the paths of the BN-NAS space are below 475e6 MACs, so proposals come from a count of completions: how
many ways the remaining layers can be filled within the remaining budget.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence

import numpy as np

from nasfast.search.limits import InfeasibleConstraintError, Limits, option_costs
from nasfast.spaces import Arch, Cost, SearchSpace

# Bins of the budget per dimension, by the number of limits. One limit: finer than the greatest common divisor of the
# costs in every built-in space, which makes the count exact; two: 45 MB for 20 layers.
_MAX_BINS = {0: 1, 1: 1 << 17, 2: 512}
# Proposals are accepted with probability 1 (exact count) to about 0.2 (20 layers, coarse bins, tight limits).
_MAX_TRIES = 200
# Of equal_cost_random, whose proposals know the MACs but not the parameters; a try takes about 0.1 ms.
_EQUAL_COST_TRIES = 2000
# How near in MACs a random architecture is to the one it is compared with, as a fraction.
EQUAL_COST_TOLERANCE = 0.01


class _Completions:
    """Counts of completions, from the last layer backwards.

    A cost enters as its excess over the layer's minimum, rounded down to bins; `counts[i][b]` is the number of ways to
    fill layers i, i+1, ... with at most b bins of each cost. Rounding down keeps every feasible architecture possible.
    """

    def __init__(self, space: SearchSpace, limits: Limits, *, allow_identity: bool) -> None:
        limits.check(space, allow_identity=allow_identity)
        self.space = space
        self.costs = option_costs(space, allow_identity=allow_identity)
        self.options = [tuple(row) for row in self.costs]
        rows = limits.rows(space, allow_identity=allow_identity)
        steps, self.budget, self.floors, self.units, self.exact = [], [], [], [], True
        for table, maximum in rows:
            floors = [min(row.values()) for row in table]
            excess = [[row[v] - low for v in row] for row, low in zip(table, floors, strict=True)]
            room = min(maximum - sum(floors), sum(map(max, excess)))
            divisor = math.gcd(*(e for row in excess for e in row)) or 1
            coarse = max(1, math.ceil(room // divisor / _MAX_BINS[len(rows)]))
            self.exact &= coarse == 1
            unit = divisor * coarse
            steps.append([[e // unit for e in row] for row in excess])
            self.budget.append(room // unit)
            self.floors.append(sum(floors))
            self.units.append(unit)
        self.steps = [[tuple(s[i][j] for s in steps) for j in range(len(v))] for i, v in enumerate(self.options)]
        self.counts = self._count()

    def _count(self) -> list[np.ndarray]:
        counts = [np.ones([b + 1 for b in self.budget])]
        for layer_steps in reversed(self.steps):
            after, total = counts[-1], np.zeros_like(counts[-1])
            for step in layer_steps:
                if all(s <= b for s, b in zip(step, self.budget, strict=True)):
                    # the ellipsis makes this a view even when there is no limit and the array has no dimension
                    shifted = total[(..., *(slice(s, None) for s in step))]
                    shifted += after[(..., *(slice(0, b + 1 - s) for s, b in zip(step, self.budget, strict=True)))]
            counts.append(total)
        return counts[::-1]

    def draw(self, rng: random.Random, *, at_least: int = 0) -> Arch | None:
        """One architecture, uniform among those whose rounded costs fit the budget.

        Args:
            rng: source of randomness.
            at_least: bins of the first cost that must be used.

        Returns:
            None if none fits.
        """
        # inclusion-exclusion over the two ends of the interval of the first cost
        corners = [(1, list(self.budget))]
        if at_least > 0:
            corners.append((-1, [at_least - 1, *self.budget[1:]]))
        arch = []
        for values, steps, after in zip(self.options, self.steps, self.counts[1:], strict=True):
            weights = []
            for step in steps:
                ways = 0.0
                for sign, corner in corners:
                    left = tuple(c - s for c, s in zip(corner, step, strict=True))
                    ways += sign * float(after[left]) if min(left, default=0) >= 0 else 0.0
                weights.append(max(ways, 0.0))
            if not sum(weights) > 0:
                return None
            chosen = rng.choices(range(len(values)), weights)[0]
            arch.append(values[chosen])
            for _, corner in corners:
                corner[:] = [c - s for c, s in zip(corner, steps[chosen], strict=True)]
        return tuple(arch)

    def cost(self, arch: Arch) -> Cost:
        return sum((row[v] for row, v in zip(self.costs, arch, strict=True)), self.space.fixed_cost)


@functools.lru_cache(maxsize=2)
def _completions(space: SearchSpace, limits: Limits, allow_identity: bool) -> _Completions:
    return _Completions(space, limits, allow_identity=allow_identity)


def sample_under(
    space: SearchSpace, rng: random.Random, limits: Limits | None = None, *, allow_identity: bool = False
) -> Arch:
    """A random architecture within the limits, uniform over all of them.

    With no limit, or one limit that is resolved by 131072 bins (every built-in space), the count is exact and the first
    proposal is taken. Otherwise proposals are uniform over a slightly larger set (costs rounded down to bins, 512 per
    cost under two limits) and those above a limit are refused, which is still uniform. If 200 are refused in a row
    (two limits that leave a handful of architectures), the answer is the feasible architecture of smallest random
    weight: always feasible, no longer uniform.

    Args:
        space: where to sample.
        rng: source of randomness.
        limits: None for none.
        allow_identity: whether normal layers may be skipped.

    Raises:
        InfeasibleConstraintError: no architecture meets the limits.
    """
    limits = limits or Limits()
    completions = _completions(space, limits, allow_identity)
    for _ in range(_MAX_TRIES):
        arch = completions.draw(rng)
        if limits.admits(completions.cost(arch)):
            return arch
    weights = [{v: rng.random() for v in values} for values in completions.options]
    return limits.program(space, allow_identity=allow_identity).minimise(weights).arch


def equal_cost_random(
    space: SearchSpace,
    rng: random.Random,
    arch: Sequence[int],
    *,
    tolerance: float = EQUAL_COST_TOLERANCE,
    limits: Limits | None = None,
    allow_identity: bool = False,
) -> Arch:
    """A random architecture of about the MACs of `arch`: the baseline a search result is compared with.

    Uniform over the architectures within the limits, other than `arch`, whose MACs differ from its by at most
    `tolerance`.

    Args:
        space: where to sample.
        rng: source of randomness.
        arch: the architecture to match.
        tolerance: largest difference, as a fraction of the MACs of `arch`.
        limits: of the search that found `arch`; None for none.
        allow_identity: whether normal layers may be skipped.

    Raises:
        InfeasibleConstraintError: none was found in 2000 tries, or no architecture meets the limits.
        ValueError: negative tolerance.
    """
    arch, limits = tuple(arch), limits or Limits()
    if tolerance < 0:
        raise ValueError(f"equal_cost_random: tolerance must not be negative, got {tolerance}")
    limits.check(space, allow_identity=allow_identity)
    target = space.cost(arch).macs
    low, high = math.ceil(target * (1 - tolerance)), math.floor(target * (1 + tolerance))
    if limits.max_macs is not None:
        high = min(high, math.floor(limits.max_macs))
    if high < low:
        raise InfeasibleConstraintError(
            f"the given architecture has {target:,} MACs, which within {tolerance:.2%} is above max_macs="
            f"{limits.max_macs:,.0f}: raise max_macs or tolerance"
        )
    # a count under both limits has too few bins to meet a narrow range of MACs: parameters are tried instead
    completions = _completions(space, Limits(max_macs=high), allow_identity)
    least = math.ceil((low - space.fixed_cost.macs - completions.floors[0]) / completions.units[0])
    if not completions.exact:
        # each layer's excess lost less than one bin to rounding
        least -= len(space)
    for _ in range(_EQUAL_COST_TRIES):
        other = completions.draw(rng, at_least=least)
        if other is None or other == arch:
            continue
        cost = completions.cost(other)
        if low <= cost.macs <= high and limits.admits(cost):
            return other
    raise InfeasibleConstraintError(
        f"{_EQUAL_COST_TRIES} tries found no architecture of space {space.name!r} within the limits, other than the "
        f"given one, that has {target:,} MACs within {tolerance:.2%}: raise tolerance or the limits"
    )
