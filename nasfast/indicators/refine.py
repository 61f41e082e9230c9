"""Refinement of a table of scores by measured accuracies, by the forests of `nasfast.indicators.learned`. No torch."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nasfast.indicators.accuracies import MIN_ARCHITECTURES, AccuracyError
from nasfast.indicators.distill import distill, z_sum
from nasfast.indicators.learned import learned_score
from nasfast.indicators.rank import Estimate, bootstrap_weights, kendall_tau
from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import Arch

_SAMPLED = 500
"""Architectures for which the forests predict; the table is fitted to these predictions."""

_FOLDS = 5


@dataclass(frozen=True)
class Refinement:
    """A table that was refined by accuracies, and what cross-validation says about it.

    Attributes:
        table: the refined table if `used`, otherwise the scores that were given; `refinement` in its meta is this text.
        used: whether the refined table ranks better by cross-validation: the whole interval of `gain` is above 0.
        architectures: number of architectures with an accuracy.
        default: Kendall's tau-b between the given table's scores and the accuracies.
        refined: the same of refined tables, each of which is fitted without the architectures that it predicts.
        gain: `refined` minus `default` (0 for a constant score), from the same resamples.
    """

    table: IndicatorTable
    used: bool
    architectures: int
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

    `learned_score` starts from the table's score and predicts the trained and 500 random architectures, or more in
    spaces of more candidates. The refined table is the additive one that is nearest to the predictions (`distill`),
    because the exact search takes no other. In five folds, tables that are fitted without a fold order its
    architectures. A gain that chance could explain is not taken, because with few or noisy accuracies such a gain is
    mostly a loss (docs/ranking.md 4).

    Raises:
        AccuracyError: there are fewer than 10 accuracies, one is not finite, or all are equal.
        ArchError: an architecture is not of the table's space.
        ModuleNotFoundError: scikit-learn is missing.
    """
    space = table.space
    _check_accuracies(accuracies)
    # neighbours in cost go to different folds
    archs = sorted(map(space.check, accuracies), key=lambda arch: (space.cost(arch).macs, arch))
    truth = np.array([accuracies[arch] for arch in archs], dtype=np.float64)
    rows = _rows(z_sum([(table, 1.0)], meta={}))
    rng = random.Random(seed)
    count = max(_SAMPLED, 4 * sum(map(len, rows)))
    sampled = [tuple(rng.choice(list(row)) for row in rows) for _ in range(count)]
    points = list(dict.fromkeys([*archs, *sampled]))
    prior = dict(zip(points, map(float, _scores(rows, points)), strict=True))

    def fit(trained: Sequence[Arch]) -> IndicatorTable:
        learned = learned_score(space, {arch: accuracies[arch] for arch in trained}, prior, seed=seed)
        return distill(space, learned, [tuple(row) for row in rows], meta={})

    predicted = np.empty_like(truth)
    for fold in range(_FOLDS):
        rest = [arch for i, arch in enumerate(archs) if i % _FOLDS != fold]
        predicted[fold::_FOLDS] = _scores(_rows(fit(rest)), archs[fold::_FOLDS])
    weights = bootstrap_weights(len(archs), resamples, seed)
    default, refined = (kendall_tau(x, truth, weights) for x in (_scores(rows, archs), predicted))
    # a constant score has no tau; it ranks like chance
    gain = Estimate.from_samples(refined - np.nan_to_num(default))
    estimates = (Estimate.from_samples(default), Estimate.from_samples(refined), gain)
    refinement = Refinement(fit(archs) if gain.positive else table, gain.positive, len(archs), *estimates)
    meta = {**table.meta, "refinement": str(refinement)}
    return replace(refinement, table=replace(refinement.table, meta=meta))


def _rows(table: IndicatorTable) -> list[dict[int, float]]:
    """For each layer the score of every value that the table scores, with the skip if it has a score."""
    return [
        row if score is None or layer.indicator_choice is None else {**row, layer.indicator_choice: score}
        for row, score, layer in zip(table.scores, table.layer, table.space.layers, strict=True)
    ]


def _scores(rows: Sequence[Mapping[int, float]], archs: Sequence[Arch]) -> np.ndarray:
    """(archs,) sums over layers; a value without a score adds nothing."""
    return np.array([sum(row.get(v, 0.0) for row, v in zip(rows, arch, strict=True)) for arch in archs])


def _check_accuracies(accuracies: Mapping[Arch, float]) -> None:
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
