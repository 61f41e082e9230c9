"""How well a predictor ranks architectures of known trained accuracy, compared with baselines that cost nothing.

`nasfast rank` runs it. It needs only numpy; Kendall's tau-b and Spearman's rho follow scipy's definitions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nasfast.display import text_table
from nasfast.indicators.accuracies import MIN_ARCHITECTURES, AccuracyError
from nasfast.indicators.structure import baselines, structure_scores
from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.runtime.arguments import check_type
from nasfast.runtime.files import write_atomic
from nasfast.spaces import Arch, ArchSpace, format_arch

_BUDGET_QUANTILES = (0.10, 0.25, 0.50, 0.75, 1.00)
_INTERVAL = (0.025, 0.975)
MIN_RESAMPLES = 10
"""Fewer bootstrap resamples give no meaningful quantiles."""

# Rows of the sign matrices in memory at a time: 256 x 2187 in float32 take 2 MB.
_CHUNK = 256


@dataclass(frozen=True)
class Estimate:
    """A correlation and its bootstrap interval; all fields are None if it is undefined (a constant ranking)."""

    value: float | None
    low: float | None
    high: float | None

    @property
    def positive(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low is not None and self.low > 0

    @classmethod
    def from_samples(cls, samples: np.ndarray) -> Estimate:
        """The estimate from a statistic (the first entry) and its bootstrap resamples (the others)."""
        if np.isnan(samples[0]):
            return cls(None, None, None)
        resampled = samples[1:][~np.isnan(samples[1:])]
        low, high = np.quantile(resampled, _INTERVAL) if len(resampled) else (samples[0], samples[0])
        return cls(float(samples[0]), float(low), float(high))

    def __str__(self) -> str:
        return "undefined" if self.value is None else f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class PredictorReport:
    """How well one predictor ranks.

    Attributes:
        name: `predictor`, or the name of a baseline of `nasfast.indicators.structure`.
        kendall: tau-b over all architectures.
        spearman: rho over all architectures.
        kendall_within_depth: mean of tau-b over the groups of equal depth, weighted by their numbers of pairs.
        kendall_by_depth: depth -> tau-b within the group; None if undefined.
        regret: for each budget of the report, the accuracy lost by taking the predictor's favourite under the budget;
            the mean over favourites if several tie.
        undefined: why estimates of this row are undefined; empty if all are defined.
    """

    name: str
    kendall: Estimate
    spearman: Estimate
    kendall_within_depth: Estimate
    kendall_by_depth: dict[int, float | None]
    regret: tuple[float, ...]
    undefined: str = ""

    @property
    def constant(self) -> bool:
        """Whether the predictor gives every architecture the same score."""
        return self.kendall.value is None


@dataclass(frozen=True)
class RankReport:
    """Rank correlation of a predictor and of the baselines with trained accuracy.

    Attributes:
        architectures: number of architectures compared.
        unscored: number of architectures that have an accuracy but no score; they are left out.
        depth_counts: depth -> number of architectures.
        budgets: MACs budgets of the regrets: the 10, 25, 50, 75 and 100 % quantiles of the MACs.
        best_accuracy: for each budget the best trained accuracy under it, in the unit of the accuracies.
        predictor: the report of the predictor.
        baselines: the reports of the baselines of `nasfast.indicators.structure`.
        above: baseline -> tau-b of the predictor minus that of the baseline. Both come from the same resamples, so
            shared noise cancels and the interval is narrower than their two intervals suggest.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.
        meta: origin of the predictor (`IndicatorTable.meta`).
    """

    architectures: int
    unscored: int
    depth_counts: dict[int, int]
    budgets: tuple[float, ...]
    best_accuracy: tuple[float, ...]
    predictor: PredictorReport
    baselines: tuple[PredictorReport, ...]
    above: dict[str, Estimate]
    resamples: int
    seed: int
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def best_baseline(self) -> PredictorReport | None:
        """The baseline with the highest tau; None if all are constant."""
        taus = self._baseline_taus
        return max((row for row in self.baselines if row.name in taus), key=lambda row: taus[row.name], default=None)

    @property
    def _baseline_taus(self) -> dict[str, float]:
        """Name -> tau-b of every baseline that is not constant."""
        return {row.name: row.kendall.value for row in self.baselines if row.kendall.value is not None}

    @property
    def verdict(self) -> str:
        """One or two sentences that say whether the predictor ranks better than every baseline."""
        if self.predictor.constant:
            return "The predictor gives every architecture the same score: it ranks nothing."
        tau = f"{self.predictor.kendall.value:+.3f}"
        taus = self._baseline_taus
        if not taus:
            return f"Every baseline is constant on these architectures; the predictor's tau is {tau}."
        labels = {name: f"{name} ({value:+.3f})" for name, value in taus.items()}
        beaten = [name for name in taus if self.above[name].positive]
        below = [labels[name] for name in taus if (self.above[name].high or 0.0) < 0]
        rest = [labels[name] for name in taus if name not in beaten and labels[name] not in below]
        if not (below or rest):
            best = max(taus, key=taus.__getitem__)
            return (
                f"The predictor beats every baseline: its tau is {tau}, that of the best, {best}, is {taus[best]:+.3f}."
            )
        clauses = []
        if below:
            clauses.append(f"it is below {', '.join(below)}")
        if rest:
            clauses.append(f"it is not above {', '.join(rest)} by more than chance allows")
        if beaten:
            clauses.append(f"it is above {', '.join(beaten)}")
        text = "; ".join(clauses)
        return f"The predictor's tau is {tau}. {text[0].upper()}{text[1:]}."

    def to_json(self) -> str:
        """The report and its verdict as JSON."""
        return json.dumps({**asdict(self), "verdict": self.verdict}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        write_atomic(Path(path), (self.to_json() + "\n").encode())

    def __str__(self) -> str:
        """The report as a text table."""
        rows = (self.predictor, *self.baselines)
        header = ["", "Kendall tau-b", "predictor minus it", "tau within equal depth", "Spearman rho"]
        table = [[*header, *(f"regret {q:.0%}" for q in _BUDGET_QUANTILES)]]
        for row in rows:
            estimates = (row.kendall, self.above.get(row.name, "-"), row.kendall_within_depth, row.spearman)
            table.append([row.name, *map(str, estimates), *(f"{regret:.2f}" for regret in row.regret)])
        unscored = f"; {self.unscored} others have no score and are left out" if self.unscored else ""
        lines = [
            f"{self.architectures} architectures, 95 % intervals from {self.resamples} bootstrap resamples{unscored}",
            *text_table(table, right=1),
            "regret: accuracy lost by the favourite under this quantile of the MACs",
        ]
        return "\n".join([*lines, *(f"{row.name}: {row.undefined}." for row in rows if row.undefined), self.verdict])


def rank(
    accuracies: Mapping[Arch, float],
    predictor: IndicatorTable | Mapping[Arch, float],
    space: ArchSpace,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> RankReport:
    """Compare a predictor's order of architectures with their trained accuracies.

    The intervals are percentile bootstrap intervals: as many architectures as there are, are drawn with replacement,
    and every statistic is recomputed. Two copies of one architecture tie in everything and so do not count in tau-b.

    Args:
        accuracies: architecture -> trained accuracy, in any unit; regrets have the same unit.
        predictor: a table of indicators, or architecture -> score.
        space: the space of the architectures, which gives the baselines.
        resamples: number of bootstrap resamples, at least 10.
        seed: seed of the bootstrap.

    Raises:
        AccuracyError: fewer than 10 architectures have both an accuracy and a score, or one of these is not finite.
        ArchError: an architecture is not of `space`.
        TableError: the table belongs to another space.
        ValueError: there are too few resamples.
        TypeError: `accuracies` or `space` is of another type.
    """
    check_type("accuracies", accuracies, Mapping, advice="give a dict of architecture -> accuracy")
    check_type("space", space, ArchSpace, advice="nasfast.spaces.get_space(NAME) makes one")
    if resamples < MIN_RESAMPLES:
        raise ValueError(f"rank: resamples must be at least {MIN_RESAMPLES}, got {resamples}; 1000 is usual")
    if isinstance(predictor, IndicatorTable) and predictor.space.fingerprint != space.fingerprint:
        raise TableError(
            f"the table was scored in space {predictor.space.name!r} ({predictor.space.fingerprint}), the accuracies "
            f"are of {space.name!r} ({space.fingerprint}): give accuracies of the table's space"
        )
    scores: Mapping[Arch, float]
    if additive := isinstance(predictor, IndicatorTable):
        scores, meta = {arch: predictor.score(arch) for arch in accuracies}, dict(predictor.meta)
    else:
        scores, meta = predictor, {}
    archs = [arch for arch in accuracies if arch in scores]
    if len(archs) < MIN_ARCHITECTURES:
        raise AccuracyError(
            f"{len(archs)} of {len(accuracies)} architectures with an accuracy have a score, at least "
            f"{MIN_ARCHITECTURES} are needed: score more of them, and check that both are of the same space"
        )
    # a nan would tie with the highest score
    for what, values in (("accuracies", accuracies), ("scores", scores)):
        bad = [arch for arch in archs if not math.isfinite(values[arch])]
        if bad:
            raise AccuracyError(
                f"{len(bad)} of {len(archs)} {what} are not finite; the first is that of [{format_arch(bad[0])}], "
                f"{values[bad[0]]}: leave these architectures out"
            )
    truth = np.array([accuracies[a] for a in archs], dtype=np.float64)
    macs = np.array([space.cost(a).macs for a in archs], dtype=np.float64)
    # sums that differ only by the order of their additions must tie
    columns = {"predictor": merge_rounding(np.array([scores[a] for a in archs], dtype=np.float64), additive=additive)}
    structural = {name: merge_rounding(np.array(structure_scores(space, name, archs))) for name in baselines(space)}
    columns |= structural
    depth = columns["depth"]

    weights = bootstrap_weights(len(archs), resamples, seed)
    budgets = np.quantile(macs, _BUDGET_QUANTILES, method="inverted_cdf")
    taus = {name: kendall_tau(x, truth, weights) for name, x in columns.items()}
    reports = [_report(name, x, taus[name], truth, depth, macs, budgets, weights) for name, x in columns.items()]
    return RankReport(
        architectures=len(archs),
        unscored=len(accuracies) - len(archs),
        depth_counts={int(d): int(n) for d, n in zip(*np.unique(depth, return_counts=True), strict=True)},
        budgets=tuple(map(float, budgets)),
        best_accuracy=tuple(float(truth[macs <= b].max()) for b in budgets),
        predictor=reports[0],
        baselines=tuple(reports[1:]),
        above={name: Estimate.from_samples(taus["predictor"] - taus[name]) for name in structural},
        resamples=resamples,
        seed=seed,
        meta=meta,
    )


def bootstrap_weights(count: int, resamples: int, seed: int) -> np.ndarray:
    """(resamples + 1, count): how often each element is in a resample; the first row is the sample itself, all 1."""
    rng = np.random.default_rng(seed)
    weights = np.ones((resamples + 1, count), dtype=np.float32)
    for row, pick in zip(weights[1:], rng.integers(count, size=(resamples, count)), strict=True):
        row[:] = np.bincount(pick, minlength=count)
    return weights


def kendall_tau(x: ArrayLike, y: ArrayLike, weights: np.ndarray) -> np.ndarray:
    """Kendall's tau-b of several weighted samples at once.

    tau_b = sum_ij w_i w_j s_ij t_ij / sqrt(sum_ij w_i w_j s_ij^2 * sum_ij w_i w_j t_ij^2), where s_ij = sign(x_i - x_j)
    and t_ij = sign(y_i - y_j). With integer weights it is exactly tau-b of the sample in which element i occurs w_i
    times.

    Args:
        x: (n,) values.
        y: (n,) values.
        weights: (samples, n).

    Returns:
        (samples,), NaN where x or y is constant.
    """
    x, y, w = _ranks(x), _ranks(y), np.asarray(weights, dtype=np.float32)
    sums = np.zeros((3, len(w)))
    for start in range(0, len(x), _CHUNK):
        rows = slice(start, start + _CHUNK)
        sign_x, sign_y = np.sign(x[rows, None] - x), np.sign(y[rows, None] - y)
        for total, matrix in zip(sums, (sign_x * sign_y, np.abs(sign_x), np.abs(sign_y)), strict=True):
            # a row's sum is an integer below 2^24 and so exact in float32; the sum over rows needs float64
            total += np.einsum("sr,sr->s", w @ matrix.T, w[:, rows], dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[0] / np.sqrt(sums[1] * sums[2])


def spearman_rho(x: ArrayLike, y: ArrayLike, weights: np.ndarray) -> np.ndarray:
    """Spearman's rho (midranks for ties) of several weighted samples; arguments and result as in `kendall_tau`."""
    w = np.asarray(weights, dtype=np.float64)
    size = w.sum(axis=1)
    a, b = (_midranks(v, w) - (size[:, None] + 1) / 2 for v in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (w * a * b).sum(axis=1) / np.sqrt((w * a * a).sum(axis=1) * (w * b * b).sum(axis=1))


def _report(
    name: str,
    x: np.ndarray,
    tau_all: np.ndarray,
    truth: np.ndarray,
    depth: np.ndarray,
    macs: np.ndarray,
    budgets: np.ndarray,
    weights: np.ndarray,
) -> PredictorReport:
    by_depth, total, pairs = {}, np.zeros(len(weights)), np.zeros(len(weights))
    for d in np.unique(depth):
        group = depth == d
        w = weights[:, group]
        tau = kendall_tau(x[group], truth[group], w)
        by_depth[int(d)] = None if np.isnan(tau[0]) else float(tau[0])
        size = w.sum(axis=1, dtype=np.float64)
        count = np.where(np.isnan(tau), 0, size * (size - 1) / 2)
        total += np.nan_to_num(tau) * count
        pairs += count
    with np.errstate(invalid="ignore", divide="ignore"):
        within = total / pairs
    regret = []
    for budget in budgets:
        under = macs <= budget
        favourites = under & (x == x[under].max())
        regret.append(float(truth[under].max() - truth[favourites].mean()))
    return PredictorReport(
        name=name,
        kendall=Estimate.from_samples(tau_all),
        spearman=Estimate.from_samples(spearman_rho(x, truth, weights)),
        kendall_within_depth=Estimate.from_samples(within),
        kendall_by_depth=by_depth,
        regret=tuple(regret),
        undefined=_why_undefined(x, truth, depth, within=bool(np.isnan(within[0]))),
    )


def _why_undefined(x: np.ndarray, truth: np.ndarray, depth: np.ndarray, *, within: bool) -> str:
    """Why estimates of a predictor with scores `x` are undefined; empty if all are defined.

    Args:
        within: whether tau within equal depth is undefined.
    """
    if np.ptp(truth) == 0:
        return "undefined, because all accuracies are equal"
    if np.ptp(x) == 0:
        return "undefined, because it is the same for all architectures"
    if not within:
        return ""
    what = "tau within equal depth is undefined, because"
    if len(np.unique(depth)) == len(depth):
        return f"{what} no two architectures have the same depth"
    return f"{what} architectures of equal depth do not differ in it, or not in accuracy"


def _ranks(values: ArrayLike) -> np.ndarray:
    """Dense ranks: small integers, whose differences are exact in float32."""
    return np.unique(np.asarray(values), return_inverse=True)[1].astype(np.float32)


def _midranks(values: ArrayLike, weights: np.ndarray) -> np.ndarray:
    """(samples, n) ranks, from 1, of each element in the samples where it occurs `weights` times."""
    dense = np.unique(np.asarray(values), return_inverse=True)[1]
    groups = np.zeros((len(weights), dense.max() + 1))
    np.add.at(groups.T, dense, weights.T)
    below = np.cumsum(groups, axis=1) - groups
    return (below + (groups + 1) / 2)[:, dense]


def merge_rounding(values: np.ndarray, *, additive: bool = True) -> np.ndarray:
    """Make values equal that differ by rounding: by less than 1e-12 of their magnitude.

    Args:
        values: (n,) scores.
        additive: whether they are sums of terms that may cancel. Then the largest magnitude of all counts. Otherwise it
            is that of the values themselves, because scores such as SynFlow's span more than twelve orders.
    """
    order = np.argsort(values, kind="stable")
    magnitude = np.abs(values[order])
    scale = magnitude.max() if additive else np.maximum(magnitude[1:], magnitude[:-1])
    steps = np.diff(values[order]) > 1e-12 * scale
    merged = np.empty_like(values)
    starts = np.concatenate(([0], np.flatnonzero(steps) + 1))
    merged[order] = values[order][starts][np.concatenate(([0], np.cumsum(steps)))]
    return merged
