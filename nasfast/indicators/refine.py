"""Refinement of a table of scores by measured accuracies: ridge regression that starts from the score. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from nasfast.indicators.accuracies import MIN_ARCHITECTURES, AccuracyError
from nasfast.indicators.distill import z_sum
from nasfast.indicators.rank import Estimate, bootstrap_weights, kendall_tau
from nasfast.indicators.structure import structure_table
from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import Arch

_PENALTIES = np.append(10.0 ** np.arange(-2, 5.25, 0.25), np.inf)
"""Penalties of the ridge, ascending; under the last one the refined table orders as the score does."""

_FOLDS = 10


@dataclass(frozen=True)
class Refinement:
    """A table that was refined by accuracies, and what cross-validation says about it.

    Attributes:
        table: the refined table if `used`, otherwise the scores that were given; `refinement` in its meta is this text.
        used: whether the refined table ranks better by cross-validation: the whole interval of `gain` is above 0.
        architectures: number of architectures with an accuracy.
        penalty: penalty of the ridge; infinite where the accuracies give no reason to depart from the score.
        default: Kendall's tau-b between the given table's scores and the accuracies.
        refined: the same of refined tables, each of which is fitted without the architectures that it predicts.
        gain: `refined` minus `default` (0 for a constant score), from the same resamples.
    """

    table: IndicatorTable
    used: bool
    architectures: int
    penalty: float
    default: Estimate
    refined: Estimate
    gain: Estimate

    def __str__(self) -> str:
        what = "are added to the score" if self.used else "do not improve the score, which stays as it is"
        return (
            f"The accuracies of {self.architectures} architectures {what}: cross-validated tau {self.refined}, that of "
            f"the score itself {self.default}, difference {self.gain}."
        )


def refine(
    table: IndicatorTable, accuracies: Mapping[Arch, float], *, resamples: int = 1000, seed: int = 0
) -> Refinement:
    """Refine a table by the accuracies of trained architectures, if cross-validation says that this gains.

    The accuracies a are replaced by the normal scores y of their ranks, because only their order matters and a few bad
    networks would otherwise decide the fit. With the score p and the baseline `sqrt_size` q of an architecture, both in
    units of their standard deviation over the space, and one indicator variable per (layer, candidate), the fit

        y = c + s p + d (q - p) + sum over layers of w[layer, candidate]

    minimises the squared error plus penalty * (d^2 + sum of w^2). So the larger the penalty, the nearer is the order to
    that of the score. The penalty is the largest whose error in ten-fold cross-validation is above the least by at most
    one standard error of this difference. The standard error is that of the paired differences: each architecture's
    squared error minus its squared error under the best penalty. (The rule of Hastie, Tibshirani and Friedman, The
    Elements of Statistical Learning, 7.10, takes the standard error of the least error itself.) The choice of the
    penalty is a part of what `Refinement.refined` cross-validates. A gain that chance could explain is not taken,
    because with few or noisy accuracies such a gain is mostly a loss (docs/ranking.md 4).
    """
    space = table.space
    _check(accuracies)
    # neighbours in cost go to different folds
    archs = sorted(map(space.check, accuracies), key=lambda arch: (space.cost(arch).macs, arch))
    truth = np.array([accuracies[arch] for arch in archs], dtype=np.float64)
    y = stats.norm.ppf((stats.rankdata(truth) - 0.5) / len(truth))
    prior = _rows(z_sum([(table, 1.0)], meta={}))
    # the weight 0 of the table gives the sum the table's rows, which may have a skip
    structure = _rows(z_sum([(table, 0.0), (structure_table(space, "sqrt_size"), 1.0)], meta={}))
    columns = {(i, v): column for column, (i, v) in enumerate((i, v) for i, row in enumerate(prior) for v in row)}
    features = np.zeros((len(archs), 1 + len(columns)))
    p, q = (_scores(rows, archs) for rows in (prior, structure))
    features[:, 0] = q - p
    for row, arch in zip(features, archs, strict=True):
        row[[1 + columns[pair] for pair in enumerate(arch) if pair in columns]] = 1
    fixed = np.stack([np.ones_like(p), p], axis=1)

    predicted = _cross_validate(fixed, features, y)
    weights = bootstrap_weights(len(archs), resamples, seed)
    default, refined = (kendall_tau(x, truth, weights) for x in (p, predicted))
    # a constant score has no tau; it ranks like chance
    gain = Estimate.of(refined - np.nan_to_num(default))
    best = _choose_penalty(fixed, features, y)
    _, s, d, *w = ridge(fixed, features, y)[best]
    rows = [
        {v: float(s * row[v] + d * (other[v] - row[v]) + w[columns[i, v]]) for v in row}
        for i, (row, other) in enumerate(zip(prior, structure, strict=True))
    ]
    penalty = float(_PENALTIES[best])
    used = gain.positive and math.isfinite(penalty)
    better = IndicatorTable.of_rows(space, rows, dict(table.meta)) if used else table
    found = Refinement(better, used, len(archs), penalty, Estimate.of(default), Estimate.of(refined), gain)
    return replace(found, table=replace(better, meta={**table.meta, "refinement": str(found)}))


def _rows(table: IndicatorTable) -> list[dict[int, float]]:
    """For each layer the score of every value that the table scores, with the skip if it has a score."""
    return [
        row if score is None or layer.indicator_choice is None else {**row, layer.indicator_choice: score}
        for row, score, layer in zip(table.scores, table.layer, table.space.layers, strict=True)
    ]


def _scores(rows: Sequence[Mapping[int, float]], archs: Sequence[Arch]) -> np.ndarray:
    """(archs,) sums over layers; a value without a score adds nothing."""
    return np.array([sum(row.get(v, 0.0) for row, v in zip(rows, arch, strict=True)) for arch in archs])


def ridge(
    fixed: np.ndarray, features: np.ndarray, y: np.ndarray, penalties: Sequence[float] | np.ndarray = _PENALTIES
) -> np.ndarray:
    """Coefficients (penalties, fixed + features): least squares in which the features are penalised, the fixed not."""
    inverse = np.linalg.pinv(fixed)
    x, rest = features - fixed @ (inverse @ features), y - fixed @ (inverse @ y)
    squares, vectors = np.linalg.eigh(x.T @ x)
    w = ((rest @ x) @ vectors / (squares + np.asarray(penalties)[:, None])) @ vectors.T
    return np.concatenate([(y - w @ features.T) @ inverse.T, w], axis=1)


def _choose_penalty(fixed: np.ndarray, features: np.ndarray, y: np.ndarray) -> int:
    """Index of the largest penalty whose cross-validated error is near the least; see `refine`."""
    errors = np.empty((len(_PENALTIES), len(y)))
    for test in _folds(len(y)):
        coefficients = ridge(fixed[~test], features[~test], y[~test])
        errors[:, test] = (y[test] - coefficients @ np.concatenate([fixed, features], axis=1)[test].T) ** 2
    above = errors - errors[errors.mean(axis=1).argmin()]
    return int(np.flatnonzero(above.mean(axis=1) <= above.std(axis=1) / math.sqrt(len(y))).max())


def _cross_validate(fixed: np.ndarray, features: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Predictions of y by fits, choice of the penalty included, that did not see them."""
    predicted = np.empty_like(y)
    for test in _folds(len(y)):
        seen = fixed[~test], features[~test], y[~test]
        coefficients = ridge(*seen)[_choose_penalty(*seen)]
        predicted[test] = np.concatenate([fixed, features], axis=1)[test] @ coefficients
    return predicted


def _folds(count: int) -> list[np.ndarray]:
    """Masks of the test elements of each fold."""
    folds = np.arange(count) % _FOLDS
    return [folds == fold for fold in range(min(_FOLDS, count))]


def _check(accuracies: Mapping[Arch, float]) -> None:
    """Refuse accuracies that cannot refine a table; see `refine`."""
    if len(accuracies) < MIN_ARCHITECTURES:
        raise AccuracyError(
            f"{len(accuracies)} architectures with an accuracy, at least {MIN_ARCHITECTURES} are needed to refine a "
            "table: train more architectures (nasfast rank --train)"
        )
    bad = [arch for arch, accuracy in accuracies.items() if not math.isfinite(accuracy)]
    if bad:
        raise AccuracyError(f"{len(bad)} accuracies are not finite; the first is that of {bad[0]}: leave these out")
    if len(set(accuracies.values())) == 1:
        raise AccuracyError("all accuracies are equal and say nothing of the order of architectures")
