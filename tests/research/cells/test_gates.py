"""The four estimators: their formulas against autograd and written-out costs, and the distributions they draw from."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from tiny import batches
from torch import Tensor
from torch.nn import functional as F

from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.gates import Draw, draw_gates, draw_once, gumbel, keep_pair_share, logits_gradient
from nasfast.research.cells.search import CellSearch, CellSearchEngine
from nasfast.research.cells.space import CellSpace, minimal_cell

OPS = ("none", "skip_connect", "avg_pool_3x3", "sep_conv_3x3", "dil_conv_3x3")
# one edge restricted, one fixed
CELL = minimal_cell(OPS).restricted(0, 3, ("none", "avg_pool_3x3", "dil_conv_3x3")).restricted(1, 3, ("sep_conv_3x3",))
SHARED = CellSpace("shared", CELL, cells=3, channels=4, num_classes=4, resolution=8)
REDUCED = SHARED.replace(name="reduced", reductions=(1,))
SPACES = pytest.mark.parametrize("space", [SHARED, REDUCED], ids=lambda s: s.name)

METHODS = {
    "darts": CellSearchConfig(method="darts", temperature=0.8),
    "snas": CellSearchConfig(method="snas"),
    "dsnas": CellSearchConfig(method="dsnas"),
    "proxyless": CellSearchConfig(method="proxyless"),
    "two paths": CellSearchConfig(method="proxyless", two_path=True),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_search(space: CellSpace, **settings) -> CellSearch:
    """A float64 search whose logits are far from equal."""
    cfg = CellSearchConfig(**{"alpha_std": 1.0, "alpha_lr": 0.1, **settings})
    return CellSearch(space, cfg, 4, fused=False).double()


def learned(search: CellSearch, *, step: int = 0) -> tuple[Tensor, Draw, Tensor, Tensor, Tensor]:
    """The gradient that a step of the engine finds for the logits; its gates and costs; images and labels."""
    seen: list[Tensor] = []
    search.update = lambda gradient, draw: seen.append(gradient)
    search.record = lambda which, draw, cost, *_: seen.extend([draw, cost])
    search.done.fill_(step)
    (x, y), *_ = batches(1, resolution=8)
    CellSearchEngine(search, torch.optim.SGD(search.parameters(), lr=0.1), None).forward_backward(x.double(), y)
    draw, cost, gradient = seen
    return gradient, draw, cost, x.double(), y


def of_cells(space: CellSpace, values: Tensor) -> Tensor:
    return values[[space.cell_type(i) for i in range(space.cells)]]


def all_costs(search: CellSearch, gates: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(types, edges, ops) <dL/dX_target, O(X_source)> of every candidate, written out, summed over cells of a type."""
    space, net = search.space, search.net
    nodes: list[list[Tensor]] = []
    loss = F.cross_entropy(net(x, of_cells(space, gates).requires_grad_(), gates > 0, nodes=nodes), y)
    total = torch.zeros_like(gates)
    for i, cell in enumerate(net.cells):
        for e, edge in enumerate(space.cell.edges):
            source, target = nodes[i][edge.source], nodes[i][edge.target]
            if not target.requires_grad:
                continue
            (gradient,) = torch.autograd.grad(loss, target, retain_graph=True, allow_unused=True)
            for k in space.candidates[e]:
                operation = cell.operation(e, k)
                if operation is not None and gradient is not None:
                    total[space.cell_type(i), e, k] += (gradient * operation(source)).sum().detach()
    return total


# --- formulas on networks


@SPACES
@pytest.mark.parametrize(("method", "step"), [("darts", 0), ("snas", 0), ("snas", 2)])
def test_darts_and_snas_are_autograd_through_the_softmax(space, method, step):
    """The temperature of SNAS is 0.6, and then half way to 0.2; its noise turns the probabilities into the gates."""
    search = make_search(space, method=method, temperature=0.6, final_temperature=0.2)
    gradient, draw, _, x, y = learned(search, step=step)
    temperature = 0.6 - 0.4 * step / 4
    logits = search.logits.clone().requires_grad_()
    # known up to a constant of each edge, which softmax does not see; a gate that rounding made 0 has no gradient
    noise = torch.where(search.allowed, temperature * draw.gates.log() - logits.detach(), 0.0)
    gates = torch.softmax((logits + (noise if method == "snas" else 0)) / temperature, -1)
    F.cross_entropy(search.net(x, of_cells(space, gates)), y).backward()
    torch.testing.assert_close(gradient, logits.grad, rtol=0, atol=1e-10)
    assert logits.grad.abs().amax((1, 2)).min() > 1e-5, "nothing to compare"
    assert torch.allclose(gates, (search.logits / temperature).softmax(-1), atol=0.1) == (method == "darts")


@SPACES
def test_dsnas_is_the_score_function_times_the_cost(space):
    search = make_search(space, method="dsnas")
    gradient, draw, _, x, y = learned(search, step=1)
    cost = (draw.gates * all_costs(search, draw.gates, x, y)).sum(-1)
    assert cost.abs().max() > 1e-3, "nothing to compare"
    logits = search.logits.clone().requires_grad_()
    # a fixed edge: log 1
    score = torch.log_softmax(logits, -1).masked_fill(draw.gates == 0, 0.0).sum(-1)
    (score * cost).sum().backward()
    torch.testing.assert_close(gradient, logits.grad, rtol=0, atol=1e-10)


@SPACES
@pytest.mark.parametrize("two_path", [False, True])
@pytest.mark.parametrize("step", [0, 1])
def test_proxyless_is_its_formula(space, two_path, step):
    """On the probabilities of the candidates, or of the pair that was drawn."""
    search = make_search(space, method="proxyless", two_path=two_path)
    gradient, draw, _, x, y = learned(search, step=step)
    c, p = all_costs(search, draw.gates, x, y), search.logits.softmax(-1)
    for t, e in [(t, e) for t in range(len(p)) for e in range(len(CELL.edges))]:
        known = (draw.runs | draw.measures)[t, e].nonzero().flatten().tolist()
        assert len(known) == min(2 if two_path else 5, len(CELL.edges[e].ops))
        q, want = p[t, e, known] / p[t, e, known].sum(), torch.zeros(len(OPS), dtype=torch.float64)
        want[known] = q * (c[t, e, known] - (q * c[t, e, known]).sum())
        torch.testing.assert_close(gradient[t, e], want, rtol=0, atol=1e-10)
    assert gradient.abs().max() > 1e-4, "nothing to compare"


@SPACES
@pytest.mark.parametrize("none", [0.0, 50.0])
def test_costs_measured_beside_are_those_of_operations_that_run_with_gate_zero(space, none):
    """This includes nodes that nothing enters: with 50, every edge draws None if it can."""
    search = make_search(space, method="proxyless")
    search.alpha[..., 0] += none
    _, draw, cost, x, y = learned(search)
    gates = search.spread(draw.gates)
    F.cross_entropy(search.net(x, gates), y).backward()
    torch.testing.assert_close(cost, gates.grad, rtol=0, atol=1e-10)
    assert (draw.gates[:, :2, 0] == 1).all() == (none > 0)
    # earlier cells get no gradient through values of 0, because the next cell's ReLU has slope 0 there
    assert (cost * (draw.gates == 0)[0])[-1, :2].any()


# --- distributions, of many edges at once

LOGITS = torch.tensor([1.0, -0.5, 0.3, -torch.inf, 0.0], dtype=torch.float64)
P = LOGITS.softmax(-1)


def chi_square(counts: Tensor, p: Tensor) -> float:
    expected = counts.sum() * p
    return float(((counts - expected) ** 2 / expected).sum())


def test_operations_are_drawn_by_their_probability():
    draw = draw_once(METHODS["dsnas"], LOGITS.expand(1, 40_000, 5), generator(1), 0.0)
    counts = draw.gates[0].sum(0)
    assert counts[3] == 0
    # three degrees of freedom, one in 10,000
    assert chi_square(counts[P > 0], P[P > 0]) < 21.1
    assert torch.equal(draw.gates == 1, draw.runs)


def test_snas_becomes_one_hot():
    """As the temperature goes to 0, the frequencies are p."""
    draw = draw_once(METHODS["snas"].replace(final_temperature=1e-7), LOGITS.expand(1, 40_000, 5), generator(), 1.0)
    torch.testing.assert_close(draw.gates.sum(-1), torch.ones(1, 40_000, dtype=torch.float64))
    assert (draw.gates.max(-1).values > 1 - 1e-6).double().mean() > 0.9999
    counts = F.one_hot(draw.gates[0].argmax(-1), 5).sum(0)
    assert counts[3] == 0
    assert chi_square(counts[P > 0], P[P > 0]) < 21.1


def test_snas_temperature_falls_linearly():
    for progress, temperature in ((0.0, 1.0), (0.5, 0.515), (0.75, 0.2725), (1.0, 0.03)):
        draw = draw_once(METHODS["snas"], LOGITS.expand(1, 1, 5), generator(3), progress)
        assert draw.temperature == pytest.approx(temperature)
        noisy = LOGITS + gumbel((1, 1, 5), generator(3))
        torch.testing.assert_close(draw.gates, (noisy / temperature).softmax(-1))


def test_pairs_are_drawn_by_their_probability():
    count = 4000
    draw = draw_once(METHODS["two paths"], LOGITS.expand(1, count, 5), generator(), 0.0)
    pairs = [tuple(row.nonzero().flatten().tolist()) for row in (draw.runs | draw.measures)[0]]
    possible = list(combinations([0, 1, 2, 4], 2))
    counts = torch.tensor([pairs.count(pair) for pair in possible])
    assert counts.sum() == count
    # one after the other, without putting the first back
    by = torch.tensor([float(P[i] * P[j] * (1 / (1 - P[i]) + 1 / (1 - P[j]))) for i, j in possible])
    # five degrees of freedom, one in 10,000
    assert chi_square(counts.double(), by.double()) < 25.8
    torch.testing.assert_close(draw.weights.sum(-1), torch.ones(1, count, dtype=torch.float64))
    # which of the two runs
    spread = (draw.weights * (1 - draw.weights)).sum((0, 1)).sqrt()
    assert ((draw.gates - draw.weights).sum((0, 1)).abs() <= 4 * spread).all()


# --- what DSNAS clamps


def test_clipped():
    """The norm of the gradient of all logits is at most 10."""
    logits = torch.zeros(1, 14, 8, dtype=torch.float64)
    draw = draw_once(METHODS["dsnas"], logits, generator(), 0.0)
    free = draw.gates - draw.weights
    assert (5 * free).norm() > 10
    for scale, want in ((5.0, free * 10 / free.norm()), (0.1, 0.1 * free), (0.0, 0 * free)):
        torch.testing.assert_close(logits_gradient(METHODS["dsnas"], draw, scale * draw.gates), want)


def test_clamped_after_the_sum_over_cells():
    search = make_search(SHARED, method="dsnas")
    draw = draw_gates(SHARED, search.cfg, search.logits, step=0, progress=0.0)
    cost = of_cells(SHARED, draw.gates) * torch.tensor([4.0, 4.0, -1.0], dtype=torch.float64)[:, None, None]
    collected = search.collect(cost)
    torch.testing.assert_close(collected, 7 * draw.gates)
    gradient = logits_gradient(search.cfg, draw, collected)
    torch.testing.assert_close(gradient, 5 * (draw.gates - draw.weights))


# --- what an edge lacks


def masked_logits() -> Tensor:
    """(2, 30, 5) logits: of three edges, the second lacks two candidates, and the third has only one."""
    logits = torch.randn(2, 30, 5, generator=generator(), dtype=torch.float64)
    logits[:, 1::3, [0, 3]] = -torch.inf
    logits[:, 2::3, [0, 1, 3, 4]] = -torch.inf
    return logits


@pytest.mark.parametrize("name", list(METHODS))
def test_what_an_edge_lacks_is_neither_drawn_nor_measured_nor_learnt(name):
    logits = masked_logits()
    lacking = logits == -torch.inf
    for seed in range(5):
        draw = draw_once(METHODS[name], logits, generator(seed), 0.5)
        assert not draw.gates[lacking].any()
        assert not draw.weights[lacking].any()
        torch.testing.assert_close(draw.gates.sum(-1), torch.ones(2, 30, dtype=torch.float64))
        assert not ((draw.runs | draw.measures) & lacking).any() and not (draw.runs & draw.measures).any()
        columns = (~lacking).sum(-1)
        others = {"proxyless": columns - 1, "two paths": (columns - 1).clamp(max=1)}.get(name, 0 * columns)
        assert torch.equal(draw.measures.sum(-1), others)
        assert torch.equal(draw.runs.sum(-1), columns if name in ("darts", "snas") else columns.clamp(max=1))
        cost = torch.randn(2, 30, 5, generator=generator(seed), dtype=torch.float64)
        gradient = logits_gradient(METHODS[name], draw, cost)
        assert not gradient[lacking].any()
        # a fixed edge has nothing to learn
        torch.testing.assert_close(gradient[:, 2::3], torch.zeros(2, 10, 5, dtype=torch.float64), rtol=0, atol=1e-12)
        assert gradient[:, ::3].abs().sum() > 1
        # softmax does not see a constant
        torch.testing.assert_close(gradient.sum(-1), torch.zeros(2, 30, dtype=torch.float64), rtol=0, atol=1e-12)


# --- what an update does to the logits


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_two_paths_leave_the_other_probabilities(weight_decay):
    """The optimiser is Adam, whose momentum and decay would move every logit."""
    search = make_search(REDUCED, method="proxyless", two_path=True, alpha_weight_decay=weight_decay)
    moved, rng = torch.zeros(search.logits.shape, dtype=torch.bool), generator(7)
    for step in range(30):
        draw = draw_gates(REDUCED, search.cfg, search.logits, step=step, progress=0.0)
        before = search.logits.softmax(-1)
        cost = torch.randn(before.shape, generator=rng, dtype=torch.float64)
        search.update(logits_gradient(search.cfg, draw, cost), draw)
        after = search.logits.softmax(-1)
        pair = draw.weights > 0
        torch.testing.assert_close(after[~pair], before[~pair], rtol=0, atol=1e-12)
        torch.testing.assert_close((after * pair).sum(-1), (before * pair).sum(-1), rtol=0, atol=1e-12)
        moved |= (after - before).abs() > 1e-4
    free = torch.tensor([len(edge.ops) > 1 for edge in CELL.edges])
    assert moved[:, free].double().mean() > 0.5
    assert not moved[:, ~free].any()


def test_two_paths_move_the_pair_as_the_optimiser_says():
    before = masked_logits()
    draw = draw_once(METHODS["two paths"], before, generator(), 0.0)
    after = before + 0.1 * torch.randn(before.shape, generator=generator(1), dtype=torch.float64)
    updated = keep_pair_share(before, after, draw)
    for got, want, pair in zip(updated.flatten(0, 1), after.flatten(0, 1), draw.weights.flatten(0, 1) > 0, strict=True):
        torch.testing.assert_close(got[pair].softmax(0), want[pair].softmax(0))
    assert torch.equal(updated == -torch.inf, before == -torch.inf)


@pytest.mark.parametrize(("method", "weight_decay"), [("darts", 0.0), ("dsnas", 0.3)])
def test_updates_are_adam_on_what_an_edge_has(method, weight_decay):
    """The oracle is PyTorch's Adam on the allowed logits alone; the other logits are left out."""
    search = make_search(SHARED, method=method, alpha_weight_decay=weight_decay)
    parameter = search.logits[search.allowed].clone().requires_grad_()
    adam = torch.optim.Adam([parameter], lr=0.1, betas=(0.5, 0.999), weight_decay=weight_decay)
    for step in range(5):
        draw = draw_gates(SHARED, search.cfg, search.logits, step=step, progress=step / 5)
        cost = torch.randn(search.logits.shape, generator=generator(step), dtype=torch.float64)
        gradient = logits_gradient(search.cfg, draw, cost)
        parameter.grad = gradient[search.allowed].clone()
        adam.step()
        search.update(gradient, draw)
    torch.testing.assert_close(search.logits[search.allowed], parameter.detach(), rtol=0, atol=1e-12)
    assert (search.logits[~search.allowed] == -torch.inf).all()
    assert torch.isfinite(search.alpha).all()
