"""Cells and their spaces as data: edges, errors, and closed-form costs against what networks do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pairs import pairwise
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nasfast.research.cells.costs import OPERATIONS, operation_cost
from nasfast.research.cells.network import CellStandalone
from nasfast.research.cells.operations import Style, make_operation
from nasfast.research.cells.space import (
    CELLS,
    Cell,
    CellSpace,
    Edge,
    darts_cell,
    darts_space,
    minimal_cell,
    modified_cell,
    nas_bench_201_space,
    simplified_cell,
)
from nasfast.spaces import ArchError, ArchSpace, Cost

S1 = CellSpace("s1", minimal_cell(), cells=1, channels=8, resolution=12)


# --- cells


@pytest.mark.parametrize(
    ("cell", "edges", "intermediate", "outputs"),
    [
        ("minimal", "02 12 03 13 23", [4], (2, 3)),
        ("simplified", "01 02 12", [2], (1, 2)),
        ("modified", "01 02 12", [2], (2,)),
        ("darts", "02 12 03 13 23 04 14 24 34 05 15 25 35 45", [4, 7, 8, 11, 12, 13], (2, 3, 4, 5)),
        ("nas_bench_201", "01 02 12 03 13 23", [2, 4, 5], (3,)),
    ],
)
def test_edges_are_those_of_the_table(cell, edges, intermediate, outputs):
    cell = CELLS[cell]()
    assert " ".join(f"{e.source}{e.target}" for e in cell.edges) == edges
    assert [i for i, inner in enumerate(cell.intermediate) if inner] == intermediate
    assert cell.outputs == outputs


def test_operations_in_the_order_of_the_figures():
    """The columns of every table, and the values of architectures in files."""
    names = "none skip_connect max_pool_3x3 avg_pool_3x3 sep_conv_3x3 dil_conv_3x3 dil_conv_5x5 sep_conv_5x5"
    assert " ".join(S1.ops) == names
    assert nas_bench_201_space().ops == ("none", "skip_connect", "avg_pool_3x3", "conv_1x1", "conv_3x3")


def test_cells_with_other_candidates():
    edges = (Edge(1, 2), Edge(0, 2), Edge(0, 1))
    assert Cell(1, 2, edges, (2,)) == modified_cell(), "edges are sorted"
    space = S1.replace(cell=minimal_cell().restricted(0, 2, ("skip_connect", "sep_conv_5x5")))
    assert (space.candidates, space.cardinality) == (((1, 7), *[tuple(range(8))] * 4), 2 * 8**4)
    with pytest.raises(ValueError, match=r"no edge \(2,3\); it has \(0,1\), \(0,2\), \(1,2\)"):
        simplified_cell().restricted(2, 3, ("none",))
    cell = darts_cell().without_on_intermediate("skip_connect")
    for edge, inner in zip(cell.edges, cell.intermediate, strict=True):
        assert ("skip_connect" in edge.ops, len(edge.ops)) == (not inner, 8 - inner)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Edge(2, 2), "from a node to a later one, got 2 to 2"),
        (lambda: Edge(0, 1, ("sepconv_3x3",)), r"\(0,1\): unknown operation 'sepconv_3x3'; did you mean 'sep_conv"),
        (lambda: Edge(0, 1, ()), "at least one"),
        (lambda: Edge(0, 1, ("none", "none")), "different operations"),
        (lambda: Cell(3, 1, (Edge(0, 3),), (3,)), "1 or 2 inputs"),
        (lambda: Cell(1, 1, (Edge(0, 1), Edge(0, 1, ("none",))), (1,)), "one edge from a node to another"),
        (lambda: Cell(2, 1, (Edge(0, 1), Edge(0, 2)), (2,)), r"edge \(0,1\): goes to one of the nodes 2 to 2"),
        (lambda: Cell(1, 2, (Edge(0, 2),), (2,)), r"nodes \[1\] of the cell have no edge into them"),
        (lambda: Cell(1, 1, (Edge(0, 1),), (0,)), "outputs must be some of the nodes 1 to 1"),
        (lambda: Cell(1, 1, (Edge(0, 1),), ()), "outputs must be some"),
        (lambda: S1.replace(cells=0), "cell space 's1': cells must be positive, got 0"),
        (lambda: S1.replace(reductions=(1,)), "from 0 to 0, got"),
        (lambda: S1.replace(cells=3, reductions=(1, 1)), "different indices"),
        (lambda: S1.replace(preprocess=False), "without preprocessing cells need one input"),
        (lambda: nas_bench_201_space().replace(reduce_by="cell"), "reduce_by='conv' or 'residual' alone"),
        (lambda: darts_space().replace(reduce_by="conv"), "reduce_by='conv' needs preprocess=False"),
    ],
)
def test_impossible_cells_and_spaces_say_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- spaces


def test_the_skeleton_of_darts():
    """Costs of whole networks, below, check what follows from it."""
    s8 = darts_space()
    assert (s8.cells, s8.channels, s8.reductions, s8.types) == (8, 16, (2, 5), ("normal", "reduction"))
    assert [s8.cell_channels(i) for i in range(8)] == [16, 16, 32, 32, 32, 64, 64, 64]
    assert [s8.cell_size(i) for i in range(8)] == [32, 32, 32, 16, 16, 16, 8, 8]
    # the stem twice, then the cell before the last one and the last one; the older is halved behind a reduction
    assert [s8.cell_inputs(i) for i in (0, 1, 3)] == [((48, 1), (48, 1)), ((48, 1), (64, 1)), ((64, 2), (128, 1))]
    assert (s8.features, len(s8), s8.classifier_bias) == (256, 28, False)
    s8n = darts_space(reductions=False)
    assert (s8n.reductions, s8n.types, len(s8n)) == ((), ("normal",), 14)


def test_nas_bench_201():
    space = nas_bench_201_space()
    assert (space.cells, space.reductions, len(space), space.cardinality) == (15, (5, 10), 6, 5**6)
    assert [space.cell_size(i) for i in (4, 5, 9, 10)] == [32, 16, 16, 8]
    assert [space.cell_channels(i) for i in (4, 5, 9, 10)] == [16, 32, 32, 64]
    assert {space.edge_stride(5, e) for e in range(6)} == {1}
    # the published costs of the cells without any operation and of 3 x 3 convolutions: 7.783 and 220.120 million MACs
    assert space.cost((0,) * 6) == Cost(7_783_040, 73_306)
    assert space.cost((4,) * 6) == Cost(220_119_680, 1_531_546)


def test_errors_name_the_cell_and_the_edge():
    space = darts_space(cells=3).replace(cell=darts_cell().restricted(0, 2, ("none", "skip_connect")))
    with pytest.raises(
        ArchError, match=r"reduction cell, edge \(0,2\) of space .*: choice 4 is not one of 0 \(none\), 1"
    ):
        space.check((0,) * 14 + (4,) + (0,) * 13)


# --- costs


def measured(module: nn.Module, *shape: int) -> tuple[Cost, torch.Size]:
    """MACs and parameters of a module on one image, and the shape of its output; nothing is computed on `meta`."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        out = module(torch.empty(1, *shape, device="meta"))
    flops = counter.get_total_flops()
    assert flops % 2 == 0
    return Cost(flops // 2, sum(p.numel() for p in module.parameters())), out.shape


@pytest.mark.parametrize(("op", "size", "stride"), pairwise(OPERATIONS[1:], [8, 9], [1, 2]), ids=str)
def test_every_operation_costs_what_the_table_says(op, size, stride):
    out = -(-size // stride)
    for pool_norm in (True, False):
        style = Style(affine=True, pool_norm=pool_norm, track_running_stats=True, fused=False)
        with torch.device("meta"):
            module = make_operation(op, 6, stride, style).eval()
        cost = operation_cost(op, 6, stride, out, pool_norm=pool_norm)
        assert measured(module, 6, size, size) == (cost, (1, 6, out, out))


def test_whole_networks_cost_the_sum(space):
    arch = ArchSpace.random(space, np.random.default_rng(0))
    with torch.device("meta"):
        network = CellStandalone(space, arch).eval()
    cost, out = measured(network, space.in_channels, space.resolution, space.resolution)
    assert cost == space.cost(arch)
    assert out == (1, space.num_classes)


def test_random_architectures_reach_their_output():
    space = nas_bench_201_space(cells=1, channels=4)
    rng = np.random.default_rng(0)
    archs = [space.random(rng) for _ in range(200)]
    for arch in archs:
        reached = {0}
        for edge, k in zip(space.cell.edges, arch, strict=True):
            if edge.source in reached and space.ops[k] != "none":
                reached.add(edge.target)
        assert 3 in reached
    assert any(space.ops.index("none") in arch for arch in archs)
    cell = modified_cell().restricted(0, 2, ("none",)).restricted(1, 2, ("none",))
    with pytest.raises(ValueError, match="no operation other than none leads to some output"):
        CellSpace(name="cut", cell=cell).random(rng)
