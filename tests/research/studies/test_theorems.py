"""The theorems of the wiring study on real networks, and the functions that measure them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nasfast.research.cells.space import CELLS, Cell, CellSpace, Edge, minimal_cell
from nasfast.research.studies.wiring.theorems import (
    EXACT,
    STATISTICS,
    Residual,
    Step,
    check_theorems,
    chosen_gates,
    make_batch,
    make_net,
    mixed_gates,
    norm_residual,
    one_hot_gates,
    set_eps,
    take_step,
    theorem_2,
    theorem_3,
)

SMALL = CellSpace("minimal", minimal_cell(), cells=2, channels=4, resolution=8)


def stepped(space: CellSpace = SMALL, make=mixed_gates, *, eps: float = 1e-5, seed: int = 0) -> Step:
    return take_step(make_net(space, eps=eps, seed=seed), make(space, seed), *make_batch(space, 16, seed))


def test_a_residual_passes_within_its_bound():
    check = Residual("a", -1.0, 1.0).check
    assert check.passed and (check.name, check.low, check.high, check.measured) == ("a", -1.0, 1.0, -1.0)
    assert Residual("", 0.0, 0.0).check.passed
    assert not Residual("", -1.1, 1.0).check.passed and not Residual("", math.nan, 1.0).check.passed


@pytest.mark.parametrize(
    "form",
    [
        {"cells": 2, "channels": 4, "batch": 16, "resolution": 8, "seed": 2},
        {"cells": 3, "channels": 4, "batch": 16, "resolution": 8, "classes": 3, "seed": 1},
    ],
)
def test_they_hold(form):
    rows = check_theorems(**form)
    assert [str(row) for row in rows if not row.check.passed] == []
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert [name[:2] for name in names] == sorted(name[:2] for name in names)
    assert {name[:2] for name in names} == {"T1", "T2", "T3", "T4", "T5"}


def test_one_cell_has_none_before_the_last():
    with pytest.raises(ValueError, match="the theorems need at least 2 cells, got 1"):
        check_theorems(cells=1)


# --- what the rows are made of


def test_a_step_is_that_of_the_network():
    """Gradients of gates and nodes by finite differences and by hand."""
    net, gates = make_net(SMALL), mixed_gates(SMALL, 0)
    x, y = make_batch(SMALL, 16, 0)
    step = take_step(net, gates, x, y)
    for at in ((0, 0, 4), (1, 4, 1), (1, 2, 7)):
        moved = []
        for sign in (1, -1):
            other = gates.clone()
            other[at] += sign * 1e-6
            moved.append(F.cross_entropy(net(x, other), y).item())
        assert step.costs[at].item() == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-5, abs=1e-9)
    # the cost of a node is that of what enters it
    for i, nodes in enumerate(step.nodes):
        for j in (2, 3):
            of_node = (step.gradients[i][j] * nodes[j]).sum()
            entering = (step.gates * step.costs)[i, list(SMALL.cell.into(j))].sum()
            torch.testing.assert_close(of_node, entering, rtol=0, atol=1e-14)
    assert step.scale == pytest.approx((gates * step.costs).sum(-1).abs().max().item())


def test_a_network_whose_edges_are_all_none_has_no_costs():
    step = take_step(make_net(SMALL), chosen_gates(SMALL, ["none"] * 5), *make_batch(SMALL, 4, 0))
    assert not step.costs.any()
    assert step.scale == 0


def test_gates_are_what_they_say():
    space = SMALL.replace(cell=SMALL.cell.restricted(0, 2, ("none", "sep_conv_3x3")))
    mixed, one = mixed_gates(space, 0), one_hot_gates(space, 0)
    for gates in (mixed, one):
        assert gates.shape == (2, 5, 8)
        torch.testing.assert_close(gates.sum(-1), torch.ones(2, 5, dtype=torch.float64))
        assert not gates[:, 0, [1, 2, 3, 5, 6, 7]].any()
    assert (mixed[:, 1:] > 0).all()
    assert set(one.flatten().tolist()) == {0.0, 1.0}
    drawn = torch.stack([one_hot_gates(space, seed) for seed in range(200)]).mean((0, 1))
    assert (drawn[1:] > 0.05).all()
    assert (drawn[1:] < 0.2).all()


def test_networks_have_the_eps_and_random_scales():
    net = make_net(SMALL.replace(affine=True), eps=1e-3)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {norm.eps for norm in norms} == {1e-3}
    assert all(norm.weight.std() > 0 and norm.bias.std() > 0 for norm in norms)
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    set_eps(net, 1e-7)
    assert {norm.eps for norm in norms} == {1e-7}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", list(STATISTICS))
def test_residual_of_a_norm(kind, affine):
    norm = SMALL.replace(norm=kind)
    module = make_net(norm.replace(affine=affine), eps=0.1).cells[0].preprocess[0].norm
    x = torch.randn(5, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    out = module(x)
    gradient = torch.randn(out.shape, dtype=torch.float64)
    (of_x,) = torch.autograd.grad(out, x, gradient)
    measured = (of_x * x).sum().item()
    assert norm_residual(module, kind, x, out, gradient).item() == pytest.approx(measured, abs=1e-12)
    assert abs(measured) > 1e-3


# --- that the measurements can fail


def test_a_node_passes_the_cost_of_a_skip():
    """Theorem 1 leaves out identity skips: with one, the total is that of the skip."""
    step = stepped()
    for i in range(SMALL.cells):
        skip = (step.gates * step.costs)[i, 4, SMALL.ops.index("skip_connect")].item()
        assert step.skip_costs(i).item() == skip
        assert abs(step.path_total(i, 2)) < 0.02 * abs(skip)


def test_paths_without_a_norm_do_not_block():
    """Pools without batch norm are homogeneous, and pass everything."""
    space = SMALL.replace(pool_norm=False)
    ops = ("sep_conv_3x3", "sep_conv_3x3", "none", "none", "avg_pool_3x3")
    step = take_step(make_net(space), chosen_gates(space, ops), *make_batch(space, 16, 0))
    assert abs(step.path_total(1, 2)) > 0.01 * step.scale
    torch.testing.assert_close(step.path_total(1, 2), step.costs[1, 4, 3].item(), rtol=0, atol=EXACT)


def test_a_bias_before_the_activation_does_not_block():
    """A bias makes a map that is not positively homogeneous; if only norms follow, they remove it again."""
    for order, blocks in (("relu_conv_norm", True), ("conv_relu_norm", False)):
        net = make_net(SMALL.replace(order=order))
        for module in list(net.cells[1].edges.modules()):
            if isinstance(module, nn.Conv2d):
                module.bias = nn.Parameter(torch.randn(module.out_channels, dtype=torch.float64))
        step = take_step(net, mixed_gates(SMALL, 0), *make_batch(SMALL, 16, 0))
        assert abs(step.path_total(0, 2)) < 1e-3 * step.scale
        assert (abs(step.path_total(1, 2)) < 1e-3 * step.scale) == blocks


def test_cells_that_theorem_2_is_about():
    for name in ("minimal", "simplified", "modified", "nas_bench_201"):
        space = SMALL.replace(name=name, cell=CELLS[name]())
        assert all(row.check.passed for row in theorem_2(space, batch=16, seed=0)), name
    # the output is not the last node, and none of the others alone
    cell = Cell(1, 3, tuple(Edge(i, j) for j in (1, 2, 3) for i in range(j)), (3, 1))
    assert all(row.check.passed for row in theorem_2(SMALL.replace(name="odd", cell=cell), batch=16, seed=0))


def test_theorem_2_needs_the_skips():
    step = stepped(seed=3)
    for i in range(SMALL.cells):
        gap = (step.gates * step.costs)[i].sum() - step.output_cost(i)
        assert gap.item() == pytest.approx(step.skip_costs(i).item(), rel=0.05)
    without = replace(step, costs=step.costs.clone())
    without.costs[:, 4, SMALL.ops.index("skip_connect")] = 0
    assert without.skip_costs(1) == 0


def test_theorem_3_fails_where_cells_take_their_inputs_as_they_are():
    """Without ReLU, convolution and norm before it, nothing keeps an earlier cell's output from costing something."""
    ops = ("skip_connect", "avg_pool_3x3", "sep_conv_3x3")
    cell = Cell(1, 2, tuple(Edge(i, j, ops) for j in (1, 2) for i in range(j)), (2,))
    space = SMALL.replace(cell=cell, stem_multiplier=1)
    cost, *_ = theorem_3(space, batch=16, seed=0)
    assert cost.check.passed
    cost, *_ = theorem_3(space.replace(preprocess=False), batch=16, seed=0)
    assert not cost.check.passed


def test_theorem_4_fails_behind_a_head():
    """Norm and ReLU between the last cell and the classifier take its cost away."""
    step = stepped(SMALL.replace(head=True))
    loss = F.cross_entropy(step.logits, step.labels)
    log_pi = step.logits.log_softmax(1)
    gap = loss + (log_pi.exp() * log_pi).sum(1).mean()
    assert abs(gap) > 1e-3
    assert abs(step.output_cost(1)) < 1e-3 * abs(gap)


def test_instance_norms_with_scale_and_shift_cost_something():
    """And without them a network with global pooling answers 0 whatever it sees."""
    step = stepped(SMALL.replace(norm="instance"))
    assert step.logits.abs().max() < EXACT
    assert step.costs.abs().max() < EXACT
    assert stepped(SMALL.replace(norm="instance", affine=True)).costs.abs().max() > 1e-3
