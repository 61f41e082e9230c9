"""How far the tables of several seeds agree, and the architectures that they rank highest together."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from nasfast.indicators.distill import z_sum
from nasfast.indicators.rank import Estimate, bootstrap_weights, kendall_tau
from nasfast.indicators.structure import structure_table
from nasfast.indicators.table import IndicatorTable
from nasfast.search import Limits, option_scores, sample_distinct, top_k
from nasfast.search.limits import arch_sum
from nasfast.spaces import Arch

STABLE_TAU = 0.7
"""A ranking counts as stable if the interval of tau between seeds is above this, and most seeds have the answer.

The tau is that of `learned`, where there is one: the structure that all seeds add would make any ranking look stable.
"""

GOAL = 0.9
"""Correlation between the mean of the seeds and that of as many others, for which `seeds_needed` counts seeds."""

_ARCHITECTURES, _RESAMPLES = 1000, 200
_TWO_SIDED = 0.975

Rows = Sequence[dict[int, float]]
"""For each layer, the score of each value."""


@dataclass(frozen=True)
class TopArchitecture:
    """An architecture among the best of all seeds.

    `mean_rank` is the mean over the seeds of its rank among all architectures that are compared; 1 is the best.
    `in_top` counts the seeds that have it among their own K best, which are proven.
    """

    arch: Arch
    mean_rank: float
    in_top: int
    macs: int
    params: int


@dataclass(frozen=True)
class Agreement:
    """How far the seeds agree.

    Attributes:
        seeds: number of seeds.
        architectures: number of random architectures within the limits, over which tau is computed.
        tau: mean tau-b between two seeds over these architectures.
        learned: the same without the structural baseline that is added to the score; None if none is.
        correlation: mean Pearson correlation between two seeds over the same architectures, without that baseline.
        top: the K architectures of the lowest mean rank, best first; the first is the answer.
    """

    seeds: int
    architectures: int
    tau: Estimate
    learned: Estimate | None
    correlation: float
    top: tuple[TopArchitecture, ...]

    @property
    def stable(self) -> bool:
        """Whether another seed would give much the same ranking; see `STABLE_TAU`."""
        low = (self.learned or self.tau).low
        return low is not None and low > STABLE_TAU and self.top[0].in_top > self.seeds / 2

    @property
    def reliability(self) -> float:
        """Expected correlation between the mean of these seeds and the mean of as many others (Spearman-Brown)."""
        r, n = self.correlation, self.seeds
        return n * r / (1 + (n - 1) * r) if r > 0 else 0.0

    @property
    def seeds_needed(self) -> int | None:
        """Number of seeds whose mean would have the reliability `GOAL`; None if the seeds have nothing in common.

        Spearman and Brown: the means of n seeds correlate with n r / (1 + (n - 1) r) if two seeds correlate with r.
        """
        r = self.correlation
        if not r > 0:
            return None
        return max(1, math.ceil(GOAL * (1 - r) / (r * (1 - GOAL)) - 1e-9)) if r < 1 else 1


def agreement(tables: Sequence[IndicatorTable], limits: Limits, *, k: int) -> Agreement:
    """Compare the tables of several seeds, at least two of one space, on random architectures within the limits.

    `k` is the number of best architectures.
    """
    if len(tables) < 2:
        raise ValueError(f"agreement needs the tables of at least two seeds, got {len(tables)}")
    space = tables[0].space
    archs = sample_distinct(space, _ARCHITECTURES, limits)
    rows = [option_scores(table, allow_identity=limits.allow_identity) for table in tables]
    scores = np.array([[arch_sum(row, arch) for arch in archs] for row in rows])
    weights = bootstrap_weights(len(archs), _RESAMPLES, 0)
    own, learned = scores, None
    if weight := tables[0].meta.get("structure"):
        # the first part, of weight 0, only says which skips have a score
        structure = z_sum([(tables[0], 0.0), (structure_table(space, "sqrt_size"), weight)], meta={})
        part = option_scores(structure, allow_identity=limits.allow_identity)
        own = scores - np.array([arch_sum(part, arch) for arch in archs])
        learned = mean_tau(own, weights)
    return Agreement(
        seeds=len(tables),
        architectures=len(archs),
        tau=mean_tau(scores, weights),
        learned=learned,
        correlation=_correlation(own),
        top=_top(tables, rows, limits, k),
    )


def mean_tau(scores: np.ndarray, weights: np.ndarray) -> Estimate:
    """Mean of tau-b over all pairs of seeds, with a 95 % interval.

    The interval is the root of the sum of two squares. One is z times the standard deviation of the mean over bootstrap
    samples of the columns. The other is t times the jackknife's standard error over the seeds, with t of Student's
    distribution with seeds - 1 degrees of freedom; it is unknown, and left out, for two seeds.

    Args:
        scores: (seeds, n).
        weights: (1 + resamples, n); the first row is all ones. No resamples leave the first term out.

    Returns:
        All fields are None if a seed gives all columns one score.
    """
    seeds = len(scores)
    pairs = list(itertools.combinations(range(seeds), 2))
    taus = np.array([kendall_tau(scores[i], scores[j], weights) for i, j in pairs])
    value = float(taus[:, 0].mean())
    if math.isnan(value):
        return Estimate(None, None, None)
    means = taus[:, 1:].mean(axis=0)
    means = means[~np.isnan(means)]
    half = float(stats.norm.ppf(_TWO_SIDED) * means.std(ddof=1)) if len(means) > 1 else 0.0
    if seeds > 2:
        pair_taus = dict(zip(pairs, taus[:, 0], strict=True))
        # the mean without each of the seeds
        jackknife = np.array([np.mean([t for pair, t in pair_taus.items() if s not in pair]) for s in range(seeds)])
        error = math.sqrt((seeds - 1) / seeds * float(((jackknife - jackknife.mean()) ** 2).sum()))
        half = math.hypot(half, float(stats.t.ppf(_TWO_SIDED, seeds - 1)) * error)
    return Estimate(value, max(-1.0, value - half), min(1.0, value + half))


def _correlation(scores: np.ndarray) -> float:
    """Mean Pearson correlation over the pairs of seeds; 0 where a seed gives all architectures one score."""
    if (scores.std(axis=1) == 0).any():
        return 0.0
    matrix = np.corrcoef(scores)
    return float(matrix[np.triu_indices(len(scores), 1)].mean())


def _top(tables: Sequence[IndicatorTable], rows: Sequence[Rows], limits: Limits, k: int) -> tuple[TopArchitecture, ...]:
    """The K architectures of the lowest mean rank among the K best of each seed and of the mean of the seeds.

    The seeds' tables are divided by their standard deviations before the mean, so that none outweighs the others.
    """
    space = tables[0].space
    mean = z_sum([(table, 1.0) for table in tables], meta={})
    best = [[candidate.arch for candidate in top_k(table, space, limits, k=k)] for table in (*tables, mean)]
    pool = list(dict.fromkeys(itertools.chain(*best)))
    scores = np.array([[arch_sum(row, arch) for arch in pool] for row in rows])
    ranks = stats.rankdata(-scores, method="min", axis=1).mean(axis=0)
    # of equal mean ranks, the one of the higher mean score comes first
    means = [arch_sum(option_scores(mean, allow_identity=limits.allow_identity), arch) for arch in pool]
    order = sorted(range(len(pool)), key=lambda i: (ranks[i], -means[i], pool[i]))[:k]
    counts = Counter(itertools.chain(*best[:-1]))
    costs = [space.cost(arch) for arch in pool]
    return tuple(
        TopArchitecture(pool[i], float(ranks[i]), counts[pool[i]], int(costs[i].macs), int(costs[i].params))
        for i in order
    )
