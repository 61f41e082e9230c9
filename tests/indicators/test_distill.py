"""Least squares over paths, and sums of tables, against enumeration of a whole space."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scipy.stats import kendalltau
from tiny import tiny_macro_space, tiny_space

from nasfast.indicators.distill import distill, z_sum
from nasfast.indicators.registry import ScoreError
from nasfast.indicators.structure import structure_table
from nasfast.indicators.table import IndicatorTable
from nasfast.search import search_table
from nasfast.spaces import SKIP

SPACE, MACRO = tiny_space(), tiny_macro_space()
OPTIONS = [layer.options for layer in SPACE.layers]
ARCHS = list(itertools.product(*OPTIONS))


def effects(seed: int) -> list[dict[int, float]]:
    rng = random.Random(seed)
    return [{choice: rng.gauss(0, 1) for choice in values} for values in OPTIONS]


def total(rows, arch) -> float:
    return sum(row[choice] for row, choice in zip(rows, arch, strict=True))


def test_an_additive_score_is_found_exactly():
    rows = effects(0)
    paths = random.Random(1).sample(ARCHS, 30)
    table = distill(SPACE, {a: 3 + total(rows, a) for a in paths}, OPTIONS, meta={"score": "test"})
    mean = np.mean([3 + total(rows, a) for a in ARCHS])
    for arch in ARCHS:
        assert table.score(arch) + table.meta["intercept"] == pytest.approx(3 + total(rows, arch), abs=1e-10)
    assert table.meta["intercept"] == pytest.approx(mean, abs=1e-10)
    assert table.meta["r2"] == pytest.approx(1)
    assert table.meta["cross_validated_tau"] == pytest.approx(1)
    assert (table.meta["paths"], table.meta["score"], table.rule) == (30, "test", "sum")
    for row in table.scores:
        assert sum(row.values()) == pytest.approx(0, abs=1e-12)
    best = max(ARCHS, key=lambda a: total(rows, a))
    assert search_table(table, SPACE, top_k=1)[0].arch == best


def test_noisy_scores_are_fitted_as_numpys_least_squares_fits_them():
    rng = random.Random(2)
    scores = {a: total(effects(3), a) + rng.gauss(0, 1) for a in rng.sample(ARCHS, 50)}
    table = distill(SPACE, scores, OPTIONS, meta={})
    y = np.array(list(scores.values()))

    def one_hot(archs):
        return np.array(
            [[1.0, *(float(c == v) for c, values in zip(a, OPTIONS, strict=True) for v in values)] for a in archs]
        )

    # the minimum-norm solution of the redundant system: the same predictions by another way
    def predicted(train, test):
        return one_hot(test) @ np.linalg.pinv(one_hot(train)) @ np.array([scores[a] for a in train])

    paths = list(scores)
    fitted = predicted(paths, paths)
    assert [table.score(a) + table.meta["intercept"] for a in paths] == pytest.approx(fitted, abs=1e-9)
    assert table.meta["r2"] == pytest.approx(1 - np.var(y - fitted) / np.var(y))
    held_out = np.empty(len(y))
    for fold in range(5):
        train = [a for i, a in enumerate(paths) if i % 5 != fold]
        held_out[fold::5] = predicted(train, paths[fold::5])
    assert table.meta["cross_validated_tau"] == pytest.approx(kendalltau(held_out, y).statistic)
    assert table.meta["cross_validated_tau"] < 0.9


def test_a_skip_that_was_sampled_gets_a_score_of_its_own():
    values = [layer.legal for layer in SPACE.layers]
    rows = [{v: float(3 * i + v) for v in row} for i, row in enumerate(values)]
    paths = random.Random(0).sample(list(itertools.product(*values)), 60)
    table = distill(SPACE, {a: total(rows, a) for a in paths}, values, meta={})
    assert [score is not None for score in table.layer] == [SKIP in row for row in values] == [False, True] * 2
    for arch in paths:
        assert table.score(arch) + table.meta["intercept"] == pytest.approx(total(rows, arch), abs=1e-9)
    assert search_table(table, SPACE, top_k=1, allow_identity=True)[0].arch == (2, 2, 2, 2)


def test_too_few_paths_are_refused():
    with pytest.raises(ScoreError, match="8 different paths do not determine the 8 free scores"):
        distill(SPACE, {a: 1.0 for a in ARCHS[:8]}, OPTIONS, meta={})
    # enough of them, but all through the same first candidate
    with pytest.raises(ScoreError, match="27 different paths do not determine"):
        distill(SPACE, {a: 1.0 for a in ARCHS[:27]}, OPTIONS, meta={})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_names_the_candidate(bad):
    scores = {a: bad if a[2] == 1 else 0.0 for a in ARCHS}
    with pytest.raises(ScoreError, match=r"27 of 81 sampled paths .* layer 2, choice 1 \(k5 e1\)"):
        distill(SPACE, scores, OPTIONS, meta={})


def test_equal_scores_have_no_r2():
    table = distill(SPACE, dict.fromkeys(ARCHS, 2.0), OPTIONS, meta={})
    assert (table.meta["r2"], table.meta["cross_validated_tau"]) == (None, None)
    assert table.meta["intercept"] == pytest.approx(2)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_a_sum_of_tables_is_that_of_standard_scores(weight):
    for space in (SPACE, MACRO):
        archs = list(itertools.product(*(layer.options for layer in space.layers)))
        rows = [
            {c: random.Random(f"{i} {c}").gauss(5, 2) for c in layer.options} for i, layer in enumerate(space.layers)
        ]
        first, second = IndicatorTable.from_rows(space, rows, {}), structure_table(space, "sqrt_size")
        table = z_sum([(first, 1.0), (second, weight)], meta={"structure": weight})
        a, b = (np.array([t.score(arch) for arch in archs]) for t in (first, second))
        wanted = (a - a.mean()) / a.std() + weight * (b - b.mean()) / b.std()
        assert [table.score(arch) for arch in archs] == pytest.approx(wanted, abs=1e-9)


def test_a_product_table_enters_a_sum_with_its_products():
    archs = list(itertools.product(*(layer.options for layer in MACRO.layers)))
    identities = [layer.indicator_choice for layer in MACRO.layers]
    block = tuple({c: 1.0 + c + i for c in range(3) if c != identity} for i, identity in enumerate(identities))
    product = IndicatorTable(MACRO, block, tuple(None if identity is None else 3.0 for identity in identities))
    constant = IndicatorTable.from_rows(MACRO, [dict.fromkeys(range(3), 1.0)] * 4, {})
    table = z_sum([(product, 1.0), (constant, 1.0)], meta={})
    a = np.array([product.score(arch) for arch in archs])
    assert [table.score(arch) for arch in archs] == pytest.approx((a - a.mean()) / a.std(), abs=1e-9)
