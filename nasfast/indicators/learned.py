"""A score learned from the accuracies of a few trained architectures, by random forests; it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nasfast import extensions
from nasfast.indicators.structure import BASELINES, structure_scores
from nasfast.spaces import Arch, ArchSpace

_TREES = 100
_FOLDS = 10


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
    places = {arch: place for place, arch in enumerate(archs)}
    trained = np.array([places[arch] for arch in accuracies])
    columns = [_normal([score[arch] for arch in archs]) for score in (prior, *scores)]
    x, p = np.column_stack([features(space, archs), *columns]), columns[0]
    y = _normal(list(accuracies.values()))
    slope = max(0.0, float(p[trained] @ y / max(p[trained] @ p[trained], 1e-12)))
    unseen, predicted = [p[trained]], [p]
    make_forest = extensions.load("sklearn.ensemble:RandomForestRegressor")
    for target in (y, y - slope * p[trained]):
        forest = make_forest(n_estimators=_TREES, max_features=1 / 3, oob_score=True, random_state=seed)
        forest.fit(x[trained], target)
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
    order = np.random.default_rng(seed).permutation(len(accuracies))
    folds = dict(zip(accuracies, order % _FOLDS, strict=True))
    held_out: dict[Arch, float] = {}
    for fold in range(_FOLDS):
        rest = {arch: accuracy for arch, accuracy in accuracies.items() if folds[arch] != fold}
        learned = learned_score(space, rest, prior, scores, seed=seed)
        held_out |= {arch: learned[arch] for arch in accuracies if folds[arch] == fold}
    return held_out


def _normal(values: Sequence[float]) -> np.ndarray:
    """The normal scores of the ranks of values."""
    from scipy.stats import norm, rankdata

    return norm.ppf((rankdata(values) - 0.5) / len(values))
