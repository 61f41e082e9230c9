"""A score learned from the accuracies of a few trained architectures, by random forests; it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nasfast import extensions
from nasfast.indicators.structure import BASELINES, structure_scores
from nasfast.spaces import Arch, ArchSpace

_TREES = 100
_FOLDS = 10
_SHARE = 1 / 3
"""Share of the features among which each split of a tree chooses."""


def features(space: ArchSpace, archs: Sequence[Arch]) -> np.ndarray:
    """(archs, features) float64: the structural baselines, and what `ArchSpace.encode` says."""
    counts = [structure_scores(space, name, archs) for name in BASELINES]
    return np.column_stack([*counts, np.array(space.encode(archs), dtype=np.float64)])


def learned_score(
    space: ArchSpace,
    accuracies: Mapping[Arch, float],
    prior: Mapping[Arch, float],
    scores: Sequence[Mapping[Arch, float]] = (),
    *,
    seed: int = 0,
) -> dict[Arch, float]:
    """A score of all architectures of `prior`, from the accuracies of some of them.

    A random forest (Breiman 2001; scikit-learn's) predicts the normal scores of the accuracies' ranks, because only
    their order matters; a second forest predicts what a line in the prior leaves of them. Both see `features`, the
    scores and the prior, the latter as normal scores. The learned score is the sum of the prior and both forests, whose
    weights are the non-negative ones of least squared error (stacking, Breiman 1996). For it, a forest predicts each
    trained architecture by the trees that did not see it, so a forest that learns nothing gets no weight, and the
    order stays that of the prior.

    Args:
        space: the space of the architectures.
        accuracies: architecture -> trained accuracy, in any unit; the prior has all of them.
        prior: architecture -> the score that ranks without any training; larger is better.
        scores: more scores of the architectures of `prior`.
        seed: seed of the forests.

    Raises:
        ModuleNotFoundError: scikit-learn is missing.
    """
    archs = list(prior)
    trained = np.array([archs.index(arch) for arch in accuracies])
    columns = [_normal([score[arch] for arch in archs]) for score in (prior, *scores)]
    x, p = np.column_stack([features(space, archs), *columns]), columns[0]
    y = _normal(list(accuracies.values()))
    slope = max(0.0, float(p[trained] @ y / max(p[trained] @ p[trained], 1e-12)))
    unseen, predicted = [p[trained]], [p]
    for target in (y, y - slope * p[trained]):
        forest = _forest(seed).fit(x[trained], target)
        unseen.append(np.nan_to_num(forest.oob_prediction_))
        predicted.append(forest.predict(x))
    from scipy.optimize import nnls  # half a second, as scipy.stats

    weights, _ = nnls(np.column_stack(unseen), y)
    if not weights[0]:  # the prior orders what the forests do not
        weights[0] = 1e-6
    return dict(zip(archs, map(float, np.column_stack(predicted) @ weights), strict=True))


def held_out_score(
    space: ArchSpace,
    accuracies: Mapping[Arch, float],
    prior: Mapping[Arch, float],
    scores: Sequence[Mapping[Arch, float]] = (),
    *,
    seed: int = 0,
) -> dict[Arch, float]:
    """The `learned_score` of each architecture that has an accuracy, learned without it, in ten folds."""
    archs, found = list(accuracies), dict[Arch, float]()
    folds = np.random.default_rng(seed).permutation(len(archs)) % _FOLDS
    for fold in range(_FOLDS):
        known = {arch: accuracies[arch] for arch, of in zip(archs, folds, strict=True) if of != fold}
        learned = learned_score(space, known, prior, scores, seed=seed)
        found |= {arch: learned[arch] for arch, of in zip(archs, folds, strict=True) if of == fold}
    return found


def _normal(values: Sequence[float]) -> np.ndarray:
    """The normal scores of the ranks of values."""
    from scipy.stats import norm, rankdata

    return norm.ppf((rankdata(values) - 0.5) / len(values))


def _forest(seed: int) -> Any:
    make = extensions.load("sklearn.ensemble:RandomForestRegressor")
    return make(n_estimators=_TREES, max_features=_SHARE, oob_score=True, random_state=seed)
