"""The theorems of the wiring study on real networks, and the functions that measure them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nasfast.research.cells.space import Cell, CellSpace, Edge, minimal_cell
from nasfast.research.studies import theorems
from nasfast.research.studies.commands import StudyConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.research.studies.theorem_steps import (
    STATISTICS,
    Step,
    chosen_gates,
    make_batch,
    make_net,
    mixed_gates,
    norm_residual,
    take_step,
)
from nasfast.research.studies.theorems import EXACT, theorem_3

SMALL = CellSpace("minimal", minimal_cell(), cells=2, channels=4, resolution=8)


def stepped(space: CellSpace = SMALL, make=mixed_gates, *, eps: float = 1e-5, seed: int = 0) -> Step:
    return take_step(make_net(space, eps=eps, seed=seed), make(space, seed), *make_batch(space, 16, seed))


@pytest.mark.parametrize(("cells", "classes", "seed"), [(2, 10, 2), (3, 3, 1)])
def test_they_hold(monkeypatch, cells, classes, seed):
    sizes = {"NET_CELLS": cells, "CLASSES": classes, "CHANNELS": 4, "BATCH": 16, "RESOLUTION": 8}
    for name, value in sizes.items():
        monkeypatch.setattr(theorems, name, value)
    cfg = StudyConfig(seed=seed)
    notes = Notebook("theorems", cfg)
    theorems.theorems(cfg, notes)
    assert notes.missed == []
    names = [mark["name"] for mark in notes.marks]
    assert len(set(names)) == len(names) == 31
    assert [name[:2] for name in names] == sorted(name[:2] for name in names)
    assert {name[:2] for name in names} == {"T1", "T2", "T3", "T4", "T5"}


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


def test_theorem_3_fails_where_cells_take_their_inputs_as_they_are():
    """Without ReLU, convolution and norm before it, nothing keeps an earlier cell's output from costing something."""
    ops = ("skip_connect", "avg_pool_3x3", "sep_conv_3x3")
    cell = Cell(1, 2, tuple(Edge(i, j, ops) for j in (1, 2) for i in range(j)), (2,))
    space = SMALL.replace(cell=cell, stem_multiplier=1)
    data = make_batch(space, 16, 0)
    cost, *_ = theorem_3(space, data, 0)
    assert abs(cost.measured) < cost.bound
    cost, *_ = theorem_3(space.replace(preprocess=False), data, 0)
    assert abs(cost.measured) > cost.bound


def test_theorem_4_fails_behind_a_head():
    """Norm and ReLU between the last cell and the classifier take its cost away."""
    step = stepped(SMALL.replace(head=True))
    loss = F.cross_entropy(step.logits, step.labels)
    log_pi = step.logits.log_softmax(1)
    gap = loss + (log_pi.exp() * log_pi).sum(1).mean()
    assert abs(gap) > 1e-3
    assert abs(step.output_cost(1)) < 1e-3 * abs(gap)
