"""The learning rate at every step, by hand."""

from __future__ import annotations

import math

import pytest

from nasfast.train.schedule import lr_at


def test_half_a_cosine_from_the_peak_to_zero():
    rates = [lr_at(step, total=8, peak=2.0) for step in range(9)]
    assert rates[0] == 2.0
    assert rates[4] == pytest.approx(1.0)
    assert rates[2] == pytest.approx(1 + math.sqrt(0.5))
    assert rates[8] == pytest.approx(0.0)
    assert rates == sorted(rates, reverse=True)


def test_linear_warm_up():
    rates = [lr_at(step, total=10, peak=1.0, warmup=4) for step in range(10)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4] == 1.0
    assert rates[7] == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 5 / 6)))


def test_a_warm_up_as_long_as_the_run_and_steps_beyond_the_end():
    assert lr_at(4, total=5, peak=1.0, warmup=5) == 1.0
    assert lr_at(5, total=5, peak=1.0, warmup=5) == 1.0
    assert lr_at(99, total=5, peak=1.0) == pytest.approx(0.0)
