"""Structural baselines against sums written out by hand."""

from __future__ import annotations

import random

import pytest

from nasfast.indicators.structure import BASELINES, baselines, structure_rows, structure_scores, structure_table
from nasfast.research.cells.space import darts_space, nas_bench_201_space
from nasfast.spaces import SKIP, digits_mini, mobilenet_v2, nas_bench_macro, shufflenet_v2


def random_archs(space, number, seed=0):
    rng = random.Random(seed)
    return [tuple(rng.choice(sorted(row)) for row in space.operators) for _ in range(number)]


def test_sqrt_size_of_nas_bench_macro_by_hand():
    space = nas_bench_macro()
    # inputs: 32 x 32 x 32, 64 x 16 x 16 (twice), 128 x 8 x 8 (three times), 256 x 4 x 4 (twice)
    arch = (1, 0, 2, 0, 1, 2, 0, 1)
    root = [181.01933598375618, 128, 128, 90.50966799187809, 90.50966799187809, 90.50966799187809, 64, 64]
    by_hand = root[0] + 1.2 * root[2] + root[4] + 1.2 * root[5] + root[7]
    assert structure_scores(space, "sqrt_size", [arch]) == [pytest.approx(by_hand, rel=1e-12)]
    assert structure_scores(space, "depth", [arch]) == [5.0]
    assert structure_scores(space, "sqrt_size", [(0,) * 8]) == [0.0]


def test_the_bonus_follows_the_macs_of_the_candidates():
    """Between the cheapest and the dearest candidate the factor is linear in the MACs."""
    space = mobilenet_v2(resolution=64)
    layer, row = space.layers[5], structure_rows(space, "sqrt_size")[5]
    root = (layer.in_channels * layer.size**2) ** 0.5
    macs = {c: layer.cost(c).macs for c in range(6)}
    low, high = min(macs.values()), max(macs.values())
    assert row[0] == pytest.approx(root)
    assert row[5] == pytest.approx(1.2 * root)
    assert all(row[c] == pytest.approx(root * (1 + 0.2 * (macs[c] - low) / (high - low))) for c in range(6))
    assert row[SKIP] == 0


@pytest.mark.parametrize(
    "space",
    [
        nas_bench_macro(),
        mobilenet_v2(resolution=64, variant="bnnas"),
        shufflenet_v2(resolution=64),
        digits_mini(),
        nas_bench_201_space(cells=5),
        darts_space(cells=4),
    ],
    ids=lambda space: space.name,
)
@pytest.mark.parametrize("name", ["macs", "params"])
def test_costs_are_those_of_the_network_without_its_fixed_part(space, name):
    archs = random_archs(space, 20)
    fixed = getattr(space.fixed_cost, name)
    for arch, value in zip(archs, structure_scores(space, name, archs), strict=True):
        assert value == getattr(space.cost(arch), name) - fixed


def test_cells_by_hand():
    """NAS-Bench-201, 5 cells: one of 16 x 32 x 32, two of 32 x 16 x 16, two of 64 x 8 x 8."""
    space = nas_bench_201_space(cells=5)
    assert space.ops == ("none", "skip_connect", "avg_pool_3x3", "conv_1x1", "conv_3x3")
    root = 128 + 2 * 90.50966799187809 + 2 * 64
    arch = (4, 1, 3, 0, 2, 3)
    assert structure_scores(space, "sqrt_size", [arch]) == [pytest.approx((1.2 + 1 + 1) * root)]
    assert structure_scores(space, "depth", [arch]) == [3.0]


def test_operations_of_cells_are_counted_with_a_sign_that_is_fixed():
    space = nas_bench_201_space()
    counts = {name: structure_scores(space, name, [(4, 1, 3, 0, 2, 4)]) for name in baselines(space)[4:]}
    assert counts == {
        "fewer none": [-1], "fewer skip_connect": [-1], "fewer avg_pool_3x3": [-1], "more conv_1x1": [1],
        "more conv_3x3": [2],
    }  # fmt: skip
    assert baselines(nas_bench_macro()) == tuple(BASELINES)


def test_intermediate_edges_of_reduction_cells_have_smaller_inputs():
    space = darts_space(cells=3, channels=8)
    edges = len(space.cell.edges)
    reduction = space.operators[edges:]
    sizes = [next(iter(options.values())).inputs for options in reduction]
    # cells 1 and 2 reduce: 16 x 32 x 32 and 32 x 16 x 16; behind their input edges maps are halved
    assert {s for s, inner in zip(sizes, space.cell.intermediate, strict=True) if not inner} == {(16384, 8192)}
    assert {s for s, inner in zip(sizes, space.cell.intermediate, strict=True) if inner} == {(4096, 2048)}


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize(
    "space", [nas_bench_macro(), mobilenet_v2(resolution=64, variant="bnnas")], ids=lambda s: s.name
)
def test_the_table_scores_as_the_baseline(space, name):
    table = structure_table(space, name)
    archs = random_archs(space, 50)
    assert [table.score(a) for a in archs] == pytest.approx(structure_scores(space, name, archs))


def test_an_unknown_baseline_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown baseline 'flops'.*depth"):
        structure_rows(nas_bench_macro(), "flops")
