"""Random architectures within cost limits, drawn by counting instead of rejection.

Only 0.3 % of the paths of the BN-NAS space are below 475e6 MACs. So proposals are drawn layer by layer, weighted by the
number of ways to fill the remaining layers within the remaining budget.
"""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Sequence

import numpy as np

from nasfast.search.limits import InfeasibleConstraintError, Limits
from nasfast.spaces import Arch, Cost, LayerSpace

# Bins of the budget per dimension, by the number of limits. With one limit, bins are finer than the greatest common
# divisor of the MACs and parameters in every built-in space, which makes the count exact. With two or three, 20 layers
# take 45 MB. With more, there are as many bins as keep each array of counts at _MAX_COUNTS numbers.
_MAX_BINS = {0: 1, 1: 1 << 17, 2: 512, 3: 64}
_MAX_COUNTS = 1 << 18
# A proposal is accepted with probability 1 (exact count) to about 0.2 (20 layers, coarse bins, tight limits).
_MAX_TRIES = 200
# Tries of equal_cost_random, whose proposals respect the MACs but not the parameters; a try takes about 0.1 ms.
_EQUAL_COST_TRIES = 2000
# Largest difference in MACs between a random architecture and the one it is compared with, as a fraction.
EQUAL_COST_TOLERANCE = 0.01
# Uniform draws from which stratified_sample takes its architectures.
_POOL = 4096
# Draws per architecture that equal_cost_peers is asked for, after which it takes those it has.
_PEER_TRIES = 20

_LOG = logging.getLogger(__name__)


class _Completions:
    """Numbers of ways to complete an architecture, computed from the last layer backwards.

    A cost counts as its excess over the layer's minimum, rounded down to bins. `counts[i][b]` is the number of ways to
    fill layers i, i+1, ... with at most b bins of each cost. Rounding down keeps every feasible architecture possible.
    """

    def __init__(self, space: LayerSpace, limits: Limits) -> None:
        limits.check(space)
        self.space = space
        self.costs = space.option_costs(allow_identity=limits.allow_identity)
        self.options = [tuple(row) for row in self.costs]
        rows = limits.costs(space)
        bins = _MAX_BINS.get(len(rows)) or max(1, int(_MAX_COUNTS ** (1 / len(rows))) - 1)
        steps, self.budget, self.floors, self.units, self.exact = [], [], [], [], True
        for _, costs, maximum in rows:
            floors = [min(row.values()) for row in costs.rows]
            excess = [[row[v] - low for v in row] for row, low in zip(costs.rows, floors, strict=True)]
            room = min(maximum - sum(floors), sum(map(max, excess)))
            divisor = math.gcd(*(e for row in excess for e in row)) or 1
            coarse = max(1, math.ceil(room // divisor / bins))
            self.exact &= coarse == 1
            unit = divisor * coarse
            steps.append([[e // unit for e in row] for row in excess])
            self.budget.append(room // unit)
            self.floors.append(sum(floors))
            self.units.append(unit)
        self.steps = [[tuple(s[i][j] for s in steps) for j in range(len(v))] for i, v in enumerate(self.options)]
        self.counts = self._count()

    def _count(self) -> list[np.ndarray]:
        """The counts for each layer; see the class."""
        counts = [np.ones([b + 1 for b in self.budget])]
        for layer_steps in reversed(self.steps):
            rest, total = counts[-1], np.zeros_like(counts[-1])
            for step in layer_steps:
                if all(s <= b for s, b in zip(step, self.budget, strict=True)):
                    # the ellipsis makes this a view even without limits, where the array has no dimension
                    shifted = total[tuple(slice(s, None) for s in step) + (...,)]
                    shifted += rest[tuple(slice(0, b + 1 - s) for s, b in zip(step, self.budget, strict=True))]
            counts.append(total)
        return counts[::-1]

    def draw(self, rng: random.Random, *, at_least: int = 0) -> Arch | None:
        """Draw an architecture uniformly from those whose rounded costs fit the budget.

        Args:
            rng: source of randomness.
            at_least: number of bins of the first cost that must be used.

        Returns:
            The architecture, or None if none fits.
        """
        # inclusion-exclusion over the two ends of the interval of the first cost
        corners = [(1, list(self.budget))]
        if at_least > 0:
            corners.append((-1, [at_least - 1, *self.budget[1:]]))
        arch = []
        for values, steps, counts in zip(self.options, self.steps, self.counts[1:], strict=True):
            weights = []
            for step in steps:
                ways = 0.0
                for sign, corner in corners:
                    room = tuple(c - s for c, s in zip(corner, step, strict=True))
                    ways += sign * float(counts[room]) if min(room, default=0) >= 0 else 0.0
                weights.append(max(ways, 0.0))
            if not sum(weights) > 0:
                return None
            index = rng.choices(range(len(values)), weights)[0]
            arch.append(values[index])
            for _, corner in corners:
                corner[:] = [c - s for c, s in zip(corner, steps[index], strict=True)]
        return tuple(arch)

    def cost(self, arch: Arch) -> Cost:
        """The cost of an architecture, fixed parts included."""
        return sum((row[v] for row, v in zip(self.costs, arch, strict=True)), self.space.fixed_cost)


@functools.lru_cache(maxsize=2)
def _completions(space: LayerSpace, limits: Limits) -> _Completions:
    return _Completions(space, limits)


def sample_under(space: LayerSpace, rng: random.Random, limits: Limits = Limits()) -> Arch:
    """Draw an architecture uniformly from all within the limits.

    With no limit, or one limit that 131072 bins resolve (MACs or parameters of every built-in space), the count is
    exact and the first proposal is taken. Otherwise proposals are uniform over a slightly larger set (costs rounded
    down to bins, 512 per cost under two limits). Those above a limit are rejected, so the result is still uniform. If
    200 in a row are rejected (two limits that leave a handful of architectures, or many limits), the result is the
    feasible architecture of smallest random weight, which is not uniform.

    Raises:
        InfeasibleConstraintError: no architecture meets the limits.
    """
    completions = _completions(space, limits)
    for _ in range(_MAX_TRIES):
        arch = completions.draw(rng)
        if arch is not None and limits.admits(completions.cost(arch), arch):
            return arch
    weights = [{v: rng.random() for v in values} for values in completions.options]
    return limits.program(space).minimiser(weights)


def sample_distinct(space: LayerSpace, count: int, limits: Limits = Limits(), *, seed: int = 0) -> list[Arch]:
    """The different ones of `count` draws of `sample_under`, in the order of their first draw."""
    rng = random.Random(seed)
    return list(dict.fromkeys(sample_under(space, rng, limits) for _ in range(count)))


def equal_cost_random(
    space: LayerSpace,
    rng: random.Random,
    arch: Sequence[int],
    *,
    tolerance: float = EQUAL_COST_TOLERANCE,
    limits: Limits = Limits(),
) -> Arch:
    """A random architecture with about the MACs of `arch`: the baseline that a search result is compared with.

    It is drawn uniformly from the architectures within the limits, except `arch`, whose MACs differ from those of
    `arch` by at most `tolerance`.

    Args:
        rng: source of randomness.
        arch: the architecture to match.
        tolerance: largest difference, as a fraction of the MACs of `arch`.
        limits: limits of the search that gave `arch`.

    Raises:
        InfeasibleConstraintError: 2000 tries gave no such architecture, or no architecture meets the limits.
        ValueError: the tolerance is negative.
    """
    arch = tuple(arch)
    if tolerance < 0:
        raise ValueError(f"equal_cost_random: tolerance must not be negative, got {tolerance}")
    limits.check(space)
    target = space.cost(arch).macs
    low, high = math.ceil(target * (1 - tolerance)), math.floor(target * (1 + tolerance))
    if limits.max_macs is not None:
        high = min(high, math.floor(limits.max_macs))
    if high < low:
        raise InfeasibleConstraintError(
            f"the given architecture has {target:,} MACs, which within {tolerance:.2%} is above max_macs="
            f"{limits.max_macs:,.0f}: raise max_macs or tolerance"
        )
    # a count under both limits has too few bins for a narrow range of MACs, so the limit on parameters is tried
    completions = _completions(space, Limits(max_macs=high, allow_identity=limits.allow_identity))
    least = math.ceil((low - space.fixed_cost.macs - completions.floors[0]) / completions.units[0])
    if not completions.exact:
        # rounding took less than one bin from each layer's excess
        least -= len(space)
    for _ in range(_EQUAL_COST_TRIES):
        other = completions.draw(rng, at_least=least)
        if other is None or other == arch:
            continue
        cost = completions.cost(other)
        if low <= cost.macs <= high and limits.admits(cost, other):
            return other
    raise InfeasibleConstraintError(
        f"{_EQUAL_COST_TRIES} tries found no architecture of space {space.name!r} within the limits, other than the "
        f"given one, that has {target:,} MACs within {tolerance:.2%}: raise tolerance or the limits"
    )


def equal_cost_peers(space: LayerSpace, rng: random.Random, arch: Arch, count: int, *, limits: Limits) -> list[Arch]:
    """Up to `count` different results of `equal_cost_random`; a warning says so if there are fewer."""
    peers: dict[Arch, None] = {}
    try:
        for _ in range(_PEER_TRIES * count):
            if len(peers) == count:
                break
            peers[equal_cost_random(space, rng, arch, limits=limits)] = None
    except InfeasibleConstraintError as error:
        _LOG.warning("no random architecture to compare with: %s", error)
    if 0 < len(peers) < count:
        _LOG.warning(
            "found only %d of %d different random architectures of equal cost: the space has hardly more",
            len(peers),
            count,
        )
    return list(peers)


def stratified_sample(space: LayerSpace, count: int, *, limits: Limits = Limits(), seed: int = 0) -> list[Arch]:
    """Different random architectures within the limits, spread evenly over their MACs.

    Of 4096 uniform draws, ordered by MACs, those at the quantiles of a van der Corput sequence (with a random shift)
    are taken. So every part of the range of MACs has its share at every count, and a larger count only adds to the
    end of the list.

    Args:
        count: number of architectures.
        limits: which architectures may be drawn.
        seed: seed of the draws and of the shift.

    Raises:
        InfeasibleConstraintError: the draws have fewer different architectures, or none meets the limits.
    """
    rng = random.Random(seed)
    draws = {sample_under(space, rng, limits) for _ in range(_POOL)}
    if len(draws) < count:
        raise InfeasibleConstraintError(
            f"{count} architectures are wanted, {_POOL} draws from space {space.name!r} within the limits have "
            f"{len(draws)} different ones: ask for at most that many, or raise the limits"
        )
    pool = sorted(draws, key=lambda arch: (space.cost(arch).macs, arch))
    shift, number, sample = rng.random(), 0, dict[Arch, None]()
    while len(sample) < count:
        sample[pool[int((_van_der_corput(number) + shift) % 1 * len(pool))]] = None
        number += 1
    return list(sample)


def _van_der_corput(number: int) -> float:
    """The binary digits of a number, mirrored at the point: 0, 1/2, 1/4, 3/4, 1/8, ..."""
    value, unit = 0.0, 0.5
    while number:
        value += unit * (number & 1)
        number, unit = number >> 1, unit / 2
    return value
