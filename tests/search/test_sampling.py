"""Sampling under limits: always feasible, uniform, never endless."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny import tiny_space

from nasfast.search import (
    InfeasibleConstraintError,
    Limits,
    equal_cost_random,
    sample_distinct,
    sample_under,
    stratified_sample,
)
from nasfast.search import sampling as module
from nasfast.spaces import CostTable, mobilenet_v2, nas_bench_macro, shufflenet_v2

SPACES = {"mobilenet_v2": mobilenet_v2(), "bnnas": mobilenet_v2(variant="bnnas"), "shufflenet_v2": shufflenet_v2()}


def ends(space, field):
    rows = [[getattr(c, field) for c in row.values()] for row in space.option_costs()]
    fixed = getattr(space.fixed_cost, field)
    return fixed + sum(map(min, rows)), fixed + sum(map(max, rows))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(SPACES)),
    macs=st.floats(0, 1.2),
    params=st.none() | st.floats(0.3, 1.2),
    seed=st.integers(0, 99),
)
def test_always_feasible(name, macs, params, seed):
    space, rng = SPACES[name], random.Random(seed)
    low, high = ends(space, "macs")
    given_limits = {"max_macs": low + macs * (high - low)}
    if params is not None:
        low, high = ends(space, "params")
        given_limits["max_params"] = low + params * (high - low)
    limits = Limits(**given_limits)
    try:
        limits.check(space)
    except InfeasibleConstraintError:
        return
    for _ in range(5):
        arch = sample_under(space, rng, limits)
        assert limits.admits(space.cost(arch), arch)


@pytest.mark.slow
@pytest.mark.parametrize("bins", [None, 64], ids=["exact_count", "coarse_bins"])
@pytest.mark.parametrize("quantile", [{}, {"max_macs": 0.1}, {"max_macs": 0.3, "max_params": 0.2}], ids=str)
def test_uniform_over_the_feasible_set(small_space, all_archs, monkeypatch, bins, quantile):
    if bins:
        monkeypatch.setattr(module, "_MAX_BINS", {0: 1, 1: bins, 2: bins})
    module._completions.cache_clear()
    costs = [small_space.cost(a) for a in all_archs]
    at = {"max_macs": sorted(c.macs for c in costs), "max_params": sorted(c.params for c in costs)}
    limits = Limits(**{name: at[name][int(q * len(costs))] for name, q in quantile.items()})
    feasible = [a for a in all_archs if limits.admits(small_space.cost(a), a)]
    rng, draws = random.Random(0), 25 * len(feasible)
    counts = Counter(sample_under(small_space, rng, limits) for _ in range(draws))
    module._completions.cache_clear()
    assert set(counts) <= set(feasible)
    assert stats.chisquare([counts[a] for a in feasible]).pvalue > 1e-3


def test_distinct_draws_are_all_of_a_small_set_each_once(small_space, all_archs):
    limits = Limits(max_macs=sorted(small_space.cost(arch).macs for arch in all_archs)[20])
    found = sample_distinct(small_space, 1000, limits)
    assert sorted(found) == sorted(a for a in all_archs if small_space.cost(a).macs <= limits.max_macs)
    assert found[0] == sample_under(small_space, random.Random(0), limits)


@pytest.mark.parametrize("number", [4, 6, 10])
def test_many_limits_need_little_memory(small_space, number):
    """An array of counts has as many dimensions as there are limits."""
    rng = random.Random(0)
    rows = [
        tuple(tuple((v, rng.uniform(1, 2)) for v in layer.options) for layer in small_space.layers)
        for _ in range(number)
    ]
    tables = [CostTable(f"cost {i}", "unit", table) for i, table in enumerate(rows)]
    limits = Limits(tables=tuple((table, 9.5) for table in tables))
    completions = module._Completions(small_space, limits)
    assert max(counts.size for counts in completions.counts) <= 1 << 18
    arch = sample_under(small_space, random.Random(0), limits)
    assert all(table.cost(arch) <= 9.5 for table in tables)


def test_two_limits_that_leave_a_handful():
    space, rng = shufflenet_v2(), random.Random(0)
    least_params = ends(space, "params")[0]
    with pytest.raises(InfeasibleConstraintError) as caught:
        Limits(max_macs=ends(space, "macs")[0], max_params=least_params).check(space)
    words = str(caught.value).split("the smallest is ")[1].split()[0]
    tight = Limits(max_macs=int(words.replace(",", "")), max_params=least_params)
    arch = sample_under(space, rng, tight)
    assert tight.admits(space.cost(arch), arch)


@pytest.mark.parametrize("tolerance", [0.002, 0.05])
def test_equal_cost_random_is_near_and_different(tolerance):
    space, rng = mobilenet_v2(), random.Random(0)
    arch = (0, 2, 0, 0, 1, 0, 3, 0, 2, 0, 0, 5, 4, 0, 0, 1, 0, 0, 2, 0)
    target = space.cost(arch).macs
    for _ in range(20):
        other = equal_cost_random(space, rng, arch, tolerance=tolerance)
        assert other != arch
        assert abs(space.cost(other).macs - target) <= tolerance * target


def test_equal_cost_random_of_a_singular_cost_ends_with_an_error():
    space = nas_bench_macro()
    with pytest.raises(InfeasibleConstraintError, match="2000 tries found no .*raise tolerance"):
        equal_cost_random(space, random.Random(0), (0,) * 8, tolerance=0.0)


@pytest.mark.slow
def test_equal_cost_random_keeps_the_limits(small_space, all_archs):
    arch, rng = (1, 0, 2, 1, 0, 2), random.Random(0)
    cost = small_space.cost(arch)
    limits = Limits(max_macs=cost.macs, max_params=cost.params)
    near = {
        a
        for a in all_archs
        if a != arch and small_space.cost(a).macs >= 0.98 * cost.macs and limits.admits(small_space.cost(a), a)
    }
    assert near
    found = {equal_cost_random(small_space, rng, arch, tolerance=0.02, limits=limits) for _ in range(30 * len(near))}
    assert found == near
    with pytest.raises(InfeasibleConstraintError, match="raise max_macs or tolerance"):
        equal_cost_random(small_space, rng, arch, limits=Limits(max_macs=0.98 * cost.macs))
    with pytest.raises(InfeasibleConstraintError, match="max_params=1 cannot be met"):
        equal_cost_random(small_space, rng, arch, limits=Limits(max_params=1))


def test_a_stratified_sample_has_its_share_of_every_cost_and_grows_at_its_end():
    space = nas_bench_macro()
    cheapest, dearest = ends(space, "macs")
    limits = Limits(max_macs=(cheapest + 2 * dearest) / 3)
    sample = stratified_sample(space, 64, limits=limits, seed=5)
    assert len(set(sample)) == 64 and all(limits.admits(space.cost(a), a) for a in sample)
    assert stratified_sample(space, 10, limits=limits, seed=5) == sample[:10]
    assert stratified_sample(space, 10, limits=limits, seed=6) != sample[:10]
    every = sorted(space.cost(a).macs for a in product(range(3), repeat=8) if limits.admits(space.cost(a), a))
    # of 16 equal parts of the space, each has 4 of 64; the draws and the borders may move one or two
    parts = Counter(bisect_left(every, space.cost(a).macs) * 16 // len(every) for a in sample)
    assert len(parts) == 16 and max(parts.values()) <= 6
    random_parts = Counter(
        bisect_left(every, space.cost(sample_under(space, random.Random(i), limits)).macs) * 16 // len(every)
        for i in range(64)
    )
    assert max(random_parts.values()) > 6


def test_a_stratified_sample_of_all_and_of_more_than_all():
    space = tiny_space()
    assert sorted(stratified_sample(space, 81)) == list(product(*(layer.options for layer in space.layers)))
    with pytest.raises(InfeasibleConstraintError, match="82 architectures are wanted, .* have 81 different ones"):
        stratified_sample(space, 82)
    with pytest.raises(InfeasibleConstraintError, match="cannot be met"):
        stratified_sample(space, 10, limits=Limits(max_macs=1))
