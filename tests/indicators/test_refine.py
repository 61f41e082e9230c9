"""Refinement of a table by accuracies: what it gains, and what must not happen."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scipy.stats import kendalltau
from tiny import tiny_space

from nasfast.indicators.accuracies import AccuracyError
from nasfast.indicators.refine import refine
from nasfast.indicators.table import IndicatorTable
from nasfast.search import search_table
from nasfast.spaces import SKIP, ArchError

pytestmark = pytest.mark.usefixtures("small_forests")
SPACE = tiny_space()
OPTIONS = [layer.options for layer in SPACE.layers]
ARCHS = list(itertools.product(*OPTIONS))


def effects(seed: int) -> list[dict[int, float]]:
    rng = random.Random(seed)
    return [{choice: rng.gauss(0, 1) for choice in values} for values in OPTIONS]


def total(rows, arch) -> float:
    return sum(row[choice] for row, choice in zip(rows, arch, strict=True))


def given_table() -> IndicatorTable:
    return IndicatorTable.from_rows(SPACE, effects(0), {"score": "test"})


def accuracies(count: int, *, noise: float = 0.0) -> dict:
    """A truth that the table knows a part of."""
    rng = random.Random(1)
    return {a: 80 + total(effects(0), a) + total(effects(5), a) + rng.gauss(0, noise) for a in rng.sample(ARCHS, count)}


def test_the_refined_table_is_nearer_to_the_truth():
    known = accuracies(60, noise=0.3)
    found = refine(given_table(), known, resamples=20)
    others = [a for a in ARCHS if a not in known]
    true = [total(effects(0), a) + total(effects(5), a) for a in others]
    before, after = (kendalltau([t.score(a) for a in others], true).statistic for t in (given_table(), found.table))
    assert found.used and after > before + 0.1
    assert found.gain.value == pytest.approx(found.refined.value - found.default.value)
    wanted = kendalltau([given_table().score(a) for a in known], list(known.values())).statistic
    assert found.default.value == pytest.approx(wanted)
    assert found.table.meta == {"score": "test", "refinement": str(found)}


def test_only_the_order_of_accuracies_counts():
    known = accuracies(40, noise=0.3)
    rising = refine(given_table(), {a: np.exp(v) for a, v in reversed(known.items())}, resamples=20)
    assert rising == refine(given_table(), known, resamples=20)


@pytest.mark.parametrize("count", [10, 81])
def test_accuracies_that_say_nothing_leave_the_score_as_it_is(count):
    rng = random.Random(2)
    used = 0
    for _ in range(2):
        found = refine(given_table(), {a: rng.random() for a in rng.sample(ARCHS, count)}, resamples=50)
        used += found.used
        if not found.used:
            assert found.table.scores == given_table().scores
            assert "do not improve the score" in found.table.meta["refinement"]
    assert not used


def test_a_constant_score_is_replaced_by_what_was_measured():
    constant = IndicatorTable.from_rows(SPACE, [dict.fromkeys(row, 1.0) for row in OPTIONS], {})
    found = refine(constant, accuracies(60), resamples=10)
    assert found.used
    assert found.default.value is None
    assert found.gain.value == found.refined.value > 0.7


def test_a_skip_that_the_table_scores_is_refined_too():
    legal = [layer.legal for layer in SPACE.layers]
    every = list(itertools.product(*legal))
    table = IndicatorTable.from_rows(SPACE, [{v: float(v) for v in row} for row in legal], {})
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
