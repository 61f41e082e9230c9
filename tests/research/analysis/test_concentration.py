"""Theorem 1: what its bound says about scalings, measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nasfast.research.analysis.concentration import KINDS, Setting, deviations, exponents, filters, responses, theorem1

ACTS = ("identity", "tanh", "relu")


@pytest.fixture(scope="module")
def table():
    return theorem1()


def row(table, kind: str, act: str, norm: bool):
    (found,) = (r for r in table.rows if r.setting == Setting(kind, act, norm))
    return found


@pytest.mark.slow
def test_every_row_falls_like_the_root_of_the_number_of_filters(table):
    slopes = {(r.setting.kind, r.setting.act, r.setting.norm): r.slope for r in table.rows}
    # no deviation is left to have a slope
    assert math.isnan(slopes.pop(("flatten", "identity", False)))
    assert len(slopes) == 3 * 3 * 2 - 1
    assert slopes == {key: pytest.approx(-0.5, abs=0.1) for key in slopes}
    assert sum(slopes.values()) / len(slopes) == pytest.approx(-0.5, abs=0.03)


@pytest.mark.slow
def test_whole_orthogonal_blocks_of_linear_filters_do_not_deviate(table):
    assert max(row(table, "flatten", "identity", False).rms) < 1e-10
    # N = 35 of 36 rows deviates
    assert deviations(Setting("flatten", "identity"), counts=(35,), repeats=5).rms[0] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "act", "norm", "ratio"),
    [
        ("per_filter", "identity", False, 0.7),
        ("flatten", "tanh", False, 0.45),
        ("flatten", "identity", True, 0.14),
        ("flatten", "tanh", True, 0.44),
        ("flatten", "relu", True, 0.85),
        ("per_filter", "identity", True, 1.0),
        ("per_filter", "tanh", True, 1.0),
    ],
)
def test_orthogonal_filters_against_gaussian(table, kind, act, norm, ratio):
    # the root mean square of 100 repeats is known to 7 %, a ratio to 10 %, and the mean of three ratios to 6 %
    found = row(table, kind, act, norm)
    ratios = [table.ratio(found, count) for count in found.counts]
    assert sum(ratios) / len(ratios) == pytest.approx(ratio, rel=0.2)


@pytest.mark.slow
def test_ratio_of_gaussian_to_itself_and_quantiles(table):
    for found in table.rows:
        if found.setting.kind == "gaussian":
            assert table.ratio(found, 144) == 1
        # of a normal distribution 1.96 times the deviation
        for rms, e95 in zip(found.rms, found.e95, strict=True):
            if rms > 1e-10:
                assert 1.4 < e95 / rms < 2.6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ACTS)
def test_deviations_scale_exactly_and_gamma_is_no_quality(kind, act):
    powers = exponents(Setting(kind, act, True), count=50, repeats=4)
    assert powers["gamma"] == pytest.approx(2, abs=1e-6)
    assert powers["lipschitz"] == pytest.approx(0, abs=1e-6)
    # tanh is no power, so normalisation does not cancel the scale of its filters
    assert (abs(powers["std"]) < 1e-6) == (act != "tanh")
    powers = exponents(Setting(kind, act, False), count=50, repeats=4)
    assert powers["gamma"] == 0
    assert powers["lipschitz"] == pytest.approx(2, abs=1e-6)
    if act != "tanh":
        assert powers["std"] == pytest.approx(2, abs=1e-6)
    one, ten = (deviations(Setting(kind, act, True, gamma=g), counts=(50,), repeats=4) for g in (1.0, 10.0))
    assert one.rms[0] / one.expectation == pytest.approx(ten.rms[0] / ten.expectation, rel=1e-9)


def test_what_does_not_deviate_has_no_exponents():
    with pytest.raises(ValueError, match="72 filters.*rounding alone: take a count that is no multiple of 36"):
        exponents(Setting("flatten", "identity", False), count=72, repeats=4)


@pytest.mark.parametrize("kind", KINDS)
def test_filters_have_the_stated_variance(kind):
    setting = Setting(kind, std=3.0)
    f = filters(setting, 20_000, torch.Generator().manual_seed(0))
    assert f.shape == (20_000, 4, 3, 3)
    assert f.var().item() == pytest.approx(9 / 36, rel=0.02)


def test_responses_are_a_circular_convolution():
    setting = Setting(act="identity", channels=2, size=5)
    h, f = torch.randn(2, 5, 5, dtype=torch.float64), torch.randn(1, 2, 3, 3, dtype=torch.float64)
    expected = sum(
        f[0, c, i, j] * torch.roll(h[c], (1 - i, 1 - j), (0, 1)) for c in range(2) for i in range(3) for j in range(3)
    )
    torch.testing.assert_close(responses(setting, f, h)[0], expected.flatten())
    norm = responses(replace(setting, norm=True, gamma=2.0), f, h)
    assert norm.std(correction=0).item() == pytest.approx(2)


def test_seeds_decide():
    setting = Setting("per_filter")
    run = lambda seed: deviations(setting, counts=(9,), repeats=3, reference_filters=50, seed=seed)  # noqa: E731
    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Setting("flaten"), "unknown kind 'flaten'; valid: gaussian, per_filter, flatten"),
        (lambda: Setting(act="swish"), "unknown act 'swish'"),
        (lambda: Setting(kernel=4), "kernel must be odd and at most size 8, got 4"),
        (lambda: Setting(kernel=9), "at most size 8, got 9"),
        (lambda: deviations(Setting(), counts=()), r"counts of at least 1 and two repeats, got \(\) and 100"),
        (lambda: deviations(Setting(), repeats=1), "two repeats"),
    ],
)
def test_errors_say_what_was_given(call, message):
    with pytest.raises(ValueError, match=message):
        call()
