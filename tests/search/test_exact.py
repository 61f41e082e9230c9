"""The integer program against enumeration."""

from __future__ import annotations

import itertools
import re

import pytest

from nasfast.indicators.table import TableError
from nasfast.search import InfeasibleConstraintError, Limits, option_scores, search_table, top_k
from nasfast.spaces import SKIP, mobilenet_v2, nas_bench_macro, shufflenet_v2


def brute_force(table, space, limits, archs):
    """All architectures within the limits, best first, by the documented order; scores rounded as ties are."""
    scores = option_scores(table, allow_identity=any(SKIP in arch for arch in archs))
    rows = []
    for arch in archs:
        cost = space.cost(arch)
        if limits.admits(cost, arch):
            rows.append((-round(sum(r[v] for r, v in zip(scores, arch, strict=True)), 9), cost.macs, arch))
    return [arch for _, _, arch in sorted(rows)]


def quantile_limits(space, archs, macs=None, params=None):
    """Limits at exact costs of architectures, so that equality with the limit is tested."""
    costs = [space.cost(a) for a in archs]
    at = {"max_macs": (macs, sorted(c.macs for c in costs)), "max_params": (params, sorted(c.params for c in costs))}
    return Limits(**{name: values[int(q * (len(values) - 1))] for name, (q, values) in at.items() if q is not None})


@pytest.mark.parametrize("levels", [None, 3, 1], ids=["distinct", "many_ties", "all_equal"])
@pytest.mark.parametrize("quantiles", [{}, {"macs": 0.3}, {"params": 0.2}, {"macs": 0.3, "params": 0.3}], ids=str)
def test_top_k_equals_enumeration(small_space, all_archs, make_table, levels, quantiles):
    table = make_table(small_space, 0, levels=levels)
    limits = quantile_limits(small_space, all_archs, **quantiles)
    found = top_k(table, small_space, limits, k=12)
    expected = brute_force(table, small_space, limits, all_archs)
    assert [c.arch for c in found] == expected[:12]
    rest = top_k(table, small_space, limits, k=5, without={*expected[:3], expected[4], (99,)})
    assert [c.arch for c in rest] == [expected[3], *expected[5:9]]
    for candidate in found:
        assert candidate.score == pytest.approx(table.score(candidate.arch), rel=1e-12)
        assert (candidate.macs, candidate.params) == (
            small_space.cost(candidate.arch).macs,
            small_space.cost(candidate.arch).params,
        )
        assert candidate.optimal
        assert 0 <= candidate.gap < 1e-6
        assert candidate.bound >= candidate.score
        assert limits.admits(small_space.cost(candidate.arch), candidate.arch)


def test_limit_equal_to_the_minimum_is_met_in_a_large_space(make_table):
    space = mobilenet_v2()
    least = sum(min(c.macs for c in row.values()) for row in space.option_costs()) + space.fixed_cost.macs
    (only,) = top_k(make_table(space, 0), space, Limits(max_macs=least), k=2)
    assert only.macs == least


@pytest.mark.parametrize("seed", [0, 1])
def test_identity_only_when_allowed(small_space, make_table, seed):
    table = make_table(small_space, seed)
    options = [
        (SKIP, *layer.options) if layer.indicator_choice == SKIP else layer.options for layer in small_space.layers
    ]
    archs = list(itertools.product(*options))
    limits = Limits(max_macs=sorted(small_space.cost(a).macs for a in archs)[len(archs) // 3], allow_identity=True)
    found = top_k(table, small_space, limits, k=5)
    assert [c.arch for c in found] == brute_force(table, small_space, limits, archs)[:5]
    assert any(SKIP in c.arch for c in found)
    assert not any(SKIP in c.arch for c in top_k(table, small_space, Limits(), k=5))


def test_allow_identity_without_layer_indicators_is_refused(small_space, make_table):
    table = make_table(small_space, 0)
    bare = type(table)(small_space, table.block, (None,) * len(small_space))
    with pytest.raises(TableError, match="layer 1 has no layer indicator"):
        top_k(bare, small_space, Limits(allow_identity=True))


def test_table_of_another_space_is_refused(small_space, make_table):
    with pytest.raises(TableError, match="'small'.*'nas_bench_macro'"):
        search_table(make_table(small_space, 0), nas_bench_macro())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_macs=460908959), r"max_macs=460,908,959 .* have 460,908,960 MACs"),
        (Limits(max_params=5e6), r"max_params=5,000,000 .* have 5,151,552 parameters"),
        (Limits(max_macs=475e6, max_params=5e6), r"max_params=5,000,000 .* have 5,151,552 parameters"),
    ],
    ids=["macs", "params", "both_one_impossible"],
)
def test_impossible_limits_name_the_smallest_attainable_value(limits, message, make_table):
    space = mobilenet_v2()
    with pytest.raises(InfeasibleConstraintError, match=message):
        top_k(make_table(space, 0), space, limits)


def test_limits_impossible_only_together(make_table):
    space = shufflenet_v2()
    # fewest MACs and fewest parameters are different architectures here
    floor = {
        f: sum(min(getattr(c, f) for c in row.values()) for row in space.option_costs()) + getattr(space.fixed_cost, f)
        for f in ("macs", "params")
    }
    limits = Limits(max_macs=floor["macs"], max_params=floor["params"])
    with pytest.raises(InfeasibleConstraintError, match="cannot both be met") as caught:
        limits.check(space)
    macs, params = (int(n.replace(",", "")) for n in re.findall(r"the smallest is ([\d,]+)", str(caught.value)))
    Limits(max_macs=macs, max_params=floor["params"]).check(space)
    Limits(max_macs=floor["macs"], max_params=params).check(space)
    with pytest.raises(InfeasibleConstraintError):
        Limits(max_macs=macs - 1, max_params=floor["params"]).check(space)
    with pytest.raises(InfeasibleConstraintError):
        Limits(max_macs=floor["macs"], max_params=params - 1).check(space)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_refuse_meaningless_values(value):
    with pytest.raises(ValueError, match="max_macs must be positive and finite"):
        Limits(max_macs=value)
