"""Several scores on the same accuracies: the same figures as `rank`, and what a narrower interval needs."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict

import numpy as np
import pytest
from scipy.stats import kendalltau

from nasfast.indicators.compare import attainable_tau, compare_scores
from nasfast.indicators.rank import rank
from nasfast.indicators.structure import structure_scores
from nasfast.spaces import nas_bench_macro

SPACE = nas_bench_macro()


def noisy(count: int, *, seed: int) -> tuple[dict, dict]:
    """Accuracies and scores of random architectures; both know the same number, with noise of their own."""
    rng = random.Random(seed)
    archs = {tuple(rng.randrange(3) for _ in range(8)): rng.gauss(0, 1) for _ in range(count)}
    return tuple({a: v + rng.gauss(0, 1) for a, v in archs.items()} for _ in range(2))


def test_rows_are_those_of_rank():
    accuracies, scores = noisy(40, seed=0)
    found = compare_scores(accuracies, {"mine": scores}, SPACE, resamples=50, seed=3, refused={"x": "has none"})
    assert [row.name for row in found.rows] == ["mine", "depth", "macs", "params", "sqrt_size"]
    report = rank(accuracies, scores, SPACE, resamples=50, seed=3)
    mine = found.rows[0]
    assert (mine.kendall, mine.spearman) == (report.predictor.kendall, report.predictor.spearman)
    # the width of an interval falls like one over the root of the number of architectures
    assert mine.wanted == math.ceil(len(accuracies) * ((mine.kendall.high - mine.kendall.low) / 0.2) ** 2)
    assert mine.above == report.above["sqrt_size"]
    for row, baseline in zip(found.rows[1:], report.baselines, strict=True):
        assert (row.kendall, row.spearman) == (baseline.kendall, baseline.spearman)
    macs = structure_scores(SPACE, "macs", accuracies)
    assert found.rows[2].kendall.value == pytest.approx(kendalltau(macs, list(accuracies.values())).statistic)
    assert (found.rows[4].above.low, found.rows[4].above.high) == (0, 0)
    assert "not computed: x: has none" in str(found)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.05])
def test_the_attainable_tau_is_that_with_the_true_accuracies(spread):
    """Networks answer images of several difficulties; the mean over draws of images is that of the measured taus."""
    rng = np.random.default_rng(0)
    estimated, measured = [], []
    for _ in range(12):
        true = rng.normal(0, spread, 200)
        easy = rng.uniform(0.2, 0.8, 800)
        right = rng.random((200, 800)) < np.clip(easy + true[:, None], 0, 1)
        estimated.append(attainable_tau(right))
        measured.append(kendalltau(true, right.mean(axis=1)).statistic if spread else 0.0)
    assert np.mean(estimated) == pytest.approx(np.mean(measured), abs=0.04 if spread else 0.2)


def test_a_constant_score_wants_nothing(tmp_path):
    accuracies, _ = noisy(20, seed=0)
    found = compare_scores(accuracies, {"flat": dict.fromkeys(accuracies, 1.0)}, SPACE, resamples=10)
    assert found.rows[0].wanted is None
    assert "undefined" in str(found)
    found.save(tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == json.loads(json.dumps(asdict(found)))


@pytest.mark.parametrize("half_width", [0, -0.1, float("nan"), float("inf")])
def test_an_interval_without_width_is_refused(half_width):
    accuracies, scores = noisy(20, seed=0)
    with pytest.raises(ValueError, match="half width of the interval must be positive"):
        compare_scores(accuracies, {"mine": scores}, SPACE, half_width=half_width)


def test_the_wanted_number_follows_from_the_architectures_that_have_a_score():
    accuracies, scores = noisy(60, seed=0)
    half = dict(list(scores.items())[:30])
    found = compare_scores(accuracies, {"half": half}, SPACE, resamples=50).rows[0].wanted
    assert found == compare_scores({a: accuracies[a] for a in half}, {"half": half}, SPACE, resamples=50).rows[0].wanted
