"""Refinement of a table by accuracies: ridge regression written out as least squares, and what must not happen."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scipy.stats import kendalltau, norm, rankdata
from tiny import tiny_space

from nasfast.indicators.accuracies import AccuracyError
from nasfast.indicators.refine import refine
from nasfast.indicators.structure import structure_scores
from nasfast.indicators.table import IndicatorTable
from nasfast.search import search_table
from nasfast.spaces import SKIP, ArchError

SPACE = tiny_space()
OPTIONS = [layer.options for layer in SPACE.layers]
ARCHS = list(itertools.product(*OPTIONS))
PENALTIES = [*(10 ** (i / 4) for i in range(-8, 21)), np.inf]


def effects(seed: int) -> list[dict[int, float]]:
    rng = random.Random(seed)
    return [{choice: rng.gauss(0, 1) for choice in values} for values in OPTIONS]


def total(rows, arch) -> float:
    return sum(row[choice] for row, choice in zip(rows, arch, strict=True))


def given_table() -> IndicatorTable:
    return IndicatorTable.of_rows(SPACE, effects(0), {"score": "test"})


def accuracies(count: int, *, noise: float = 0.0) -> dict:
    """A truth that the table knows a part of."""
    rng = random.Random(1)
    return {a: 80 + total(effects(0), a) + total(effects(5), a) + rng.gauss(0, noise) for a in rng.sample(ARCHS, count)}


def standard(values) -> np.ndarray:
    values = np.array(values)
    return (values - values.mean()) / values.std()


def by_least_squares(known: dict) -> tuple[float, np.ndarray]:
    """The penalty, and the prediction of every architecture, by rows sqrt(penalty) below the equations."""
    p = standard([given_table().score(a) for a in ARCHS])
    q = standard(structure_scores(SPACE, "sqrt_size", ARCHS))
    hot = [[float(c == v) for c, values in zip(a, OPTIONS, strict=True) for v in values] for a in ARCHS]
    design = np.column_stack([np.ones(len(ARCHS)), p, q - p, np.array(hot)])
    rows = [ARCHS.index(a) for a in sorted(known, key=lambda a: (SPACE.cost(a).macs, a))]
    y = norm.ppf((rankdata([known[ARCHS[i]] for i in rows]) - 0.5) / len(rows))

    def fit(chosen, penalty):
        x, kept = design[rows][chosen], slice(0, 2 if penalty == np.inf else design.shape[1])
        pull = np.zeros((design.shape[1] - 2, design.shape[1]))
        pull[:, 2:] = np.eye(len(pull)) * (0 if penalty == np.inf else penalty**0.5)
        solution = np.linalg.lstsq(
            np.concatenate([x, pull])[:, kept], np.concatenate([y[chosen], np.zeros(len(pull))]), rcond=None
        )[0]
        return design[:, kept] @ solution

    errors = np.empty((len(PENALTIES), len(y)))
    for fold in range(10):
        test = np.arange(len(y)) % 10 == fold
        for row, penalty in zip(errors, PENALTIES, strict=True):
            row[test] = (y[test] - fit(~test, penalty)[rows][test]) ** 2
    least = errors[errors.mean(axis=1).argmin()]
    within = [(e - least).mean() <= (e - least).std() / len(y) ** 0.5 for e in errors]
    penalty = max(value for value, ok in zip(PENALTIES, within, strict=True) if ok)
    return penalty, fit(np.full(len(y), True), penalty)


def test_the_refined_table_is_the_ridge_that_cross_validation_chooses():
    known = accuracies(60, noise=0.3)
    found = refine(given_table(), known, resamples=20)
    penalty, predicted = by_least_squares(known)
    assert found.penalty == pytest.approx(penalty)
    scores = np.array([found.table.score(a) for a in ARCHS])
    assert scores - scores.mean() == pytest.approx(predicted - predicted.mean(), abs=1e-9)
    assert found.used
    assert found.gain.value == pytest.approx(found.refined.value - found.default.value)
    wanted = kendalltau([given_table().score(a) for a in known], list(known.values())).statistic
    assert found.default.value == pytest.approx(wanted)
    assert found.table.meta == {"score": "test", "refinement": str(found)}


def test_only_the_order_of_accuracies_counts():
    known = accuracies(40, noise=0.3)
    rising = refine(given_table(), {a: np.exp(v) for a, v in reversed(known.items())}, resamples=20)
    assert rising == refine(given_table(), known, resamples=20)


@pytest.mark.parametrize("count", [10, 30, 81])
def test_accuracies_that_say_nothing_leave_the_score_as_it_is(count):
    rng = random.Random(2)
    used = 0
    for _ in range(20):
        found = refine(given_table(), {a: rng.random() for a in rng.sample(ARCHS, count)}, resamples=50)
        used += found.used
        if not found.used:
            assert found.table.scores == given_table().scores
            assert "do not improve the score" in found.table.meta["refinement"]
    # the lower end of a 95 % interval is above 0 by chance once in forty times
    assert used <= 1


def test_a_constant_score_is_replaced_by_what_was_measured():
    constant = IndicatorTable.of_rows(SPACE, [dict.fromkeys(row, 1.0) for row in OPTIONS], {})
    found = refine(constant, accuracies(60), resamples=10)
    assert found.used
    assert found.default.value is None
    assert found.gain.value == found.refined.value > 0.7


def test_a_skip_that_the_table_scores_is_refined_too():
    legal = [layer.legal for layer in SPACE.layers]
    every = list(itertools.product(*legal))
    table = IndicatorTable.of_rows(SPACE, [{v: float(v) for v in row} for row in legal], {})
    truth = {a: float(sum(5 * (v == SKIP) + v for v in a)) for a in random.Random(0).sample(every, 100)}
    found = refine(table, truth, resamples=10)
    assert found.used
    best = search_table(found.table, SPACE, top_k=1, allow_identity=True)[0]
    assert [v == SKIP for v in best.arch] == [SKIP in row for row in legal]


def test_accuracies_that_cannot_refine_are_refused():
    known = accuracies(9)
    with pytest.raises(AccuracyError, match="^9 architectures with an accuracy, at least 10"):
        refine(given_table(), known)
    many = accuracies(20)
    with pytest.raises(AccuracyError, match="1 accuracies are not finite; the first is that of "):
        refine(given_table(), {**many, next(iter(many)): float("nan")})
    with pytest.raises(AccuracyError, match="all accuracies are equal"):
        refine(given_table(), dict.fromkeys(many, 50.0))
    with pytest.raises(ArchError):
        refine(given_table(), {**many, (9, 9, 9, 9): 1.0})
