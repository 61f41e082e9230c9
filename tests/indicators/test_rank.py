"""Rank correlations against scipy, and what the report says about predictors without information."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from scipy import stats

from nasfast.indicators.accuracies import AccuracyError
from nasfast.indicators.rank import kendall_tau, rank, spearman_rho
from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.spaces import digits_mini, nas_bench_macro

SPACE = nas_bench_macro()


def depth(arch):
    return sum(c != 0 for c in arch)


@pytest.fixture(scope="module")
def archs():
    rng = random.Random(0)
    return list({tuple(rng.randrange(3) for _ in range(8)) for _ in range(300)})


@pytest.fixture(scope="module")
def accuracies(archs):
    rng = random.Random(1)
    return {a: 60 + 4 * depth(a) + rng.gauss(0, 2) for a in archs}


@pytest.mark.parametrize("levels", [3, 10_000], ids=["ties", "distinct"])
def test_correlations_equal_scipy_on_the_resampled_data(levels):
    rng = np.random.default_rng(0)
    # more than one chunk of the sign matrices
    x, y = rng.integers(levels, size=300), rng.integers(levels, size=300) + 0.5
    weights = np.stack([np.bincount(rng.integers(300, size=300), minlength=300) for _ in range(5)])
    for row, tau, rho in zip(weights, kendall_tau(x, y, weights), spearman_rho(x, y, weights), strict=True):
        a, b = np.repeat(x, row), np.repeat(y, row)
        assert tau == pytest.approx(stats.kendalltau(a, b).statistic, abs=1e-12)
        assert rho == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_perfect_and_reversed_predictors(accuracies):
    best = rank(accuracies, accuracies, SPACE, resamples=20)
    assert best.predictor.kendall.value == best.predictor.spearman.value == pytest.approx(1)
    assert best.predictor.kendall_within_depth.value == pytest.approx(1)
    assert best.predictor.regret == (0.0,) * 5
    assert "beats every baseline" in best.verdict
    worst = rank(accuracies, {a: -v for a, v in accuracies.items()}, SPACE, resamples=20)
    assert worst.predictor.kendall.value == pytest.approx(-1)
    assert worst.predictor.regret[-1] == pytest.approx(max(accuracies.values()) - min(accuracies.values()))


def test_interval_covers_the_value_and_the_seed_decides(accuracies):
    rng = random.Random(2)
    scores = {a: v + rng.gauss(0, 8) for a, v in accuracies.items()}
    first, second = (rank(accuracies, scores, SPACE, resamples=200, seed=3) for _ in range(2))
    assert first == second
    estimate = first.predictor.kendall
    assert estimate.low < estimate.value < estimate.high
    # the standard error of tau on about 290 architectures is a few hundredths
    assert 0.04 < estimate.high - estimate.low < 0.3


def test_within_depth_is_the_pair_weighted_mean(accuracies):
    rng = random.Random(4)
    scores = {a: rng.random() for a in accuracies}
    report = rank(accuracies, scores, SPACE, resamples=10)
    total = pairs = 0
    for d, tau in report.predictor.kendall_by_depth.items():
        group = [a for a in accuracies if depth(a) == d]
        assert report.depth_counts[d] == len(group)
        if len(group) > 1:
            expected = stats.kendalltau([scores[a] for a in group], [accuracies[a] for a in group]).statistic
            assert tau == pytest.approx(expected)
            total += tau * len(group) * (len(group) - 1)
            pairs += len(group) * (len(group) - 1)
        else:
            assert tau is None
    assert report.predictor.kendall_within_depth.value == pytest.approx(total / pairs)


def test_a_depth_counter_is_exposed(accuracies):
    report = rank(accuracies, {a: depth(a) for a in accuracies}, SPACE, resamples=20)
    assert report.predictor.kendall == report.baselines[0].kendall
    assert report.predictor.kendall_within_depth.value is None
    assert "It is not above depth" in report.verdict
    said = "tau within equal depth is undefined, because architectures of equal depth do not differ in it"
    said += ", or not in accuracy"
    assert f"\npredictor: {said}.\ndepth: {said}.\nThe predictor's tau" in str(report)
    assert json.loads(report.to_json())["predictor"]["undefined"] == said


def test_a_constant_predictor_is_reported_not_fatal(accuracies):
    report = rank(accuracies, dict.fromkeys(accuracies, 0.5), SPACE, resamples=20)
    assert report.predictor.constant
    assert "\npredictor: undefined, because it is the same for all architectures.\n" in str(report)
    assert "ranks nothing" in report.verdict
    form = json.loads(report.to_json())
    assert form["predictor"]["kendall"] == {"value": None, "low": None, "high": None}
    # with every architecture a favourite, the expected pick is the mean
    assert report.predictor.regret[-1] == pytest.approx(max(accuracies.values()) - np.mean(list(accuracies.values())))


def test_sums_that_differ_only_by_rounding_are_ties(accuracies):
    scores = {a: 0.7 + 1e-16 * i for i, a in enumerate(accuracies)}
    assert rank(accuracies, scores, SPACE, resamples=10).predictor.constant


def test_scores_of_many_orders_of_magnitude_are_not_ties(accuracies):
    """Such as SynFlow's: here from 1e-100 to 1e100."""
    order = sorted(accuracies, key=accuracies.__getitem__)
    scores = {arch: 10.0 ** (200 * i / len(order) - 100) for i, arch in enumerate(order)}
    found = rank(accuracies, scores, SPACE, resamples=10).predictor.spearman.value
    assert found == pytest.approx(stats.spearmanr(list(scores.values()), [accuracies[a] for a in order]).statistic)
    assert found > 0.99


def test_architectures_without_a_score_are_counted(accuracies, archs):
    report = rank(accuracies, {a: accuracies[a] for a in archs[:50]}, SPACE, resamples=10)
    assert (report.architectures, report.unscored) == (50, len(archs) - 50)
    with pytest.raises(AccuracyError, match="^0 of .*at least 10 are needed.*same space"):
        rank(accuracies, {}, SPACE)
    assert rank(accuracies, {a: accuracies[a] for a in archs[:10]}, SPACE, resamples=10).architectures == 10
    with pytest.raises(AccuracyError, match="^9 of "):
        rank(accuracies, {a: accuracies[a] for a in archs[:9]}, SPACE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(accuracies, archs, value):
    """A nan would sort above the best architecture and tie with it."""
    text = f"1 of {len(archs)} {{}} are not finite; the first is that of .{' '.join(map(str, archs[3]))}., {value}"
    with pytest.raises(AccuracyError, match=text.format("scores")):
        rank(accuracies, {**accuracies, archs[3]: value}, SPACE)
    with pytest.raises(AccuracyError, match=text.format("accuracies")):
        rank({**accuracies, archs[3]: value}, accuracies, SPACE)


@pytest.mark.parametrize("resamples", [0, 9, -1])
def test_too_few_resamples_are_refused(accuracies, resamples):
    with pytest.raises(ValueError, match=f"resamples must be at least 10, got {resamples}"):
        rank(accuracies, accuracies, SPACE, resamples=resamples)


def test_a_table_of_another_space_is_refused(accuracies):
    space = digits_mini()
    block = tuple({c: 1.0 for c in u.options if c != u.indicator_choice} for u in space.layers)
    table = IndicatorTable(space, block, (None,) * len(space))
    with pytest.raises(TableError, match="scored in space 'digits_mini'.*'nas_bench_macro'"):
        rank(accuracies, table, SPACE)


def test_beating_a_baseline_is_decided_by_the_paired_difference(accuracies):
    """A predictor that is depth and a little more: its interval overlaps depth's, the difference is above 0."""
    rng = random.Random(5)

    def knowing(share):
        """Depth, and of a share of the architectures a little of the rest of the accuracy."""
        rest = {a: 0.001 * (rng.random() < share) * (v - 60 - 4 * depth(a)) for a, v in accuracies.items()}
        return rank(accuracies, {a: depth(a) + rest[a] for a in accuracies}, SPACE)

    report = knowing(0.2)
    for baseline in report.baselines:
        difference = report.predictor.kendall.value - baseline.kendall.value
        assert report.above[baseline.name].value == pytest.approx(difference)
    assert report.above["depth"].low > 0
    assert report.predictor.kendall.low < report.baselines[0].kendall.high
    # above it in this sample, and not by more than chance allows
    report = knowing(0.01)
    assert report.above["depth"].value > 0 >= report.above["depth"].low
    assert "It is not above depth" in report.verdict
    # the reverse of depth is below it, and not only not above it
    report = rank(accuracies, {a: -depth(a) for a in accuracies}, SPACE, resamples=200)
    assert "It is below depth (" in report.verdict
    # the predictor is depth with its ties broken at random
    noise = rank(accuracies, {a: depth(a) + 0.001 * rng.random() for a in accuracies}, SPACE, resamples=200)
    assert noise.above["depth"].low <= 0
    assert "It is below depth" in noise.verdict
    assert "it is above" in noise.verdict
    assert "params" in noise.verdict
