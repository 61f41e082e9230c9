"""The Pareto front against enumeration."""

from __future__ import annotations

import pytest

from nasfast.search import InfeasibleConstraintError, Limits, pareto_front, top_k
from nasfast.spaces import mobilenet_v2


def brute_force(table, space, limits, archs):
    """(MACs, score) of every non-dominated architecture, fewest MACs first."""
    costs = {a: space.cost(a) for a in archs}
    rows = sorted((costs[a].macs, -round(table.score(a), 9)) for a in archs if limits.admits(costs[a], a))
    front = []
    for macs, loss in rows:
        if not front or -loss > front[-1][1]:
            front.append((macs, -loss))
    return front


@pytest.mark.parametrize("levels", [None, 3, 1], ids=["distinct", "many_ties", "all_equal"])
@pytest.mark.parametrize(
    "quantile", [{}, {"max_macs": 0.4}, {"max_params": 0.3}, {"max_macs": 0.4, "max_params": 0.3}], ids=str
)
@pytest.mark.parametrize("seed", [0, 1])
def test_front_equals_enumeration(small_space, all_archs, make_table, levels, quantile, seed):
    table = make_table(small_space, seed, levels=levels)
    costs = [small_space.cost(a) for a in all_archs]
    at = {"max_macs": sorted(c.macs for c in costs), "max_params": sorted(c.params for c in costs)}
    limits = Limits(**{name: at[name][int(q * len(costs))] for name, q in quantile.items()})
    front = pareto_front(table, small_space, limits=limits)
    assert [(p.macs, round(p.score, 9)) for p in front] == brute_force(table, small_space, limits, all_archs)
    for point in front:
        assert small_space.cost(point.arch).macs == point.macs
        assert limits.admits(small_space.cost(point.arch), point.arch)


def test_front_of_a_large_space_ends_at_the_exact_answer(make_table):
    space, table = mobilenet_v2(), make_table(mobilenet_v2(), 3)
    for limits in (Limits(max_macs=475e6), Limits(max_macs=600e6, max_params=5.6e6)):
        front = pareto_front(table, space, limits=limits)
        (best,) = top_k(table, space, limits, k=1)
        assert (front[-1].score, front[-1].macs) == (pytest.approx(best.score, abs=1e-9), best.macs)
        assert all(a.macs < b.macs and a.score < b.score for a, b in zip(front, front[1:], strict=False))


def test_impossible_limits_are_refused(small_space, make_table):
    with pytest.raises(InfeasibleConstraintError):
        pareto_front(make_table(small_space, 0), small_space, limits=Limits(max_macs=1))
