"""The search of cells: every method learns, repeats and resumes bit for bit, and what it records adds up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import batches
from torch import Tensor
from torch.nn import functional as F

from nasfast.research.cells.derive import derivations, derive
from nasfast.research.cells.gates import draw_gates, uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.search import (
    SEARCH,
    TRAIN,
    CellSearch,
    CellSearchConfig,
    CellSearchEngine,
    CellSearchResult,
    search_cells,
)
from nasfast.research.cells.space import CellSpace, darts_space, minimal_cell, simplified_cell
from nasfast.research.studies.wiring_cost import monte_carlo_costs
from nasfast.train import CheckpointError, TrainConfig
from nasfast.train.batches import as_epochs
from nasfast.train.checkpoint import load_checkpoint
from nasfast.train.log import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

SPACE = CellSpace(
    "s1",
    minimal_cell(("none", "skip_connect", "avg_pool_3x3", "sep_conv_3x3")),
    cells=1,
    channels=4,
    num_classes=4,
    resolution=8,
)
WEIGHTS = TrainConfig(epochs=2, lr=0.1, lr_end=0.01, label_smoothing=0.0, checkpoint_every=3)

LEVELS = {
    "darts": {"method": "darts"},
    "snas": {"method": "snas"},
    "dsnas": {"method": "dsnas"},
    "proxyless": {"method": "proxyless"},
    "proxyless, two paths": {"method": "proxyless", "two_path": True},
    "uniform": {"method": "uniform"},
    "darts, two levels": {"method": "darts", "bilevel": True},
    "darts, second order": {"method": "darts", "bilevel": True, "second_order": True},
    "snas, two levels": {"method": "snas", "bilevel": True},
    "dsnas, two levels": {"method": "dsnas", "bilevel": True},
    "proxyless, two levels": {"method": "proxyless", "bilevel": True},
}


@pytest.fixture(params=sorted(LEVELS))
def form(request) -> dict:
    return LEVELS[request.param]


def data(count: int = 4, seed: int = 0) -> list:
    return batches(count, resolution=8, seed=seed)


def searched(run_dir, *, space: CellSpace = SPACE, weights: TrainConfig = WEIGHTS, **settings) -> CellSearchResult:
    """Eight steps, a checkpoint at the third; five held-out batches: their epochs are not those of training."""
    own = {key: settings.pop(key) for key in ("resume", "fused", "progress") if key in settings}
    cfg = CellSearchConfig(**{"alpha_lr": 0.1, "records": 4, **settings})
    held_out = data(5, seed=1) if cfg.bilevel else None
    return search_cells(space, data(), cfg, weights, held_out=held_out, run_dir=run_dir, **{"fused": False, **own})


def assert_same(one: CellSearchResult, other: CellSearchResult) -> None:
    for name, value in one.arrays().items():
        assert np.array_equal(value, other.arrays()[name]), name
    for a, b in zip(one.net.state_dict().values(), other.net.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_every_method_learns_and_its_records_add_up(form, tmp_path, fused):
    """Eight steps in three records: steps 0 to 2, 3 to 5, and 6 and 7."""
    found = searched(tmp_path, fused=fused, records=3, **form)
    assert np.isfinite(found.probabilities).all()
    np.testing.assert_allclose(found.probabilities.sum(-1), 1)
    assert np.array_equal(found.probabilities[-1], torch.tensor(found.logits).softmax(-1).numpy())
    moved = abs(found.probabilities[-1] - found.probabilities[0]).max()
    assert moved == 0 if form["method"] == "uniform" else moved > 1e-3
    lines = list(read_metrics(tmp_path))
    assert ({line["stage"] for line in lines}, lines[-1]["step"]) == ({"cells"}, 8)
    assert found.steps.tolist() == [3, 6, 8]
    counted = found.outputs[..., 3]
    levels = 1 + form.get("bilevel", False)
    assert counted[:, :levels, 0].tolist() == [[24.0] * levels, [24.0] * levels, [16.0] * levels]
    np.testing.assert_allclose(found.outputs[:, :, 1] + found.outputs[:, :, 2], found.outputs[:, :, 0])
    # C = L - H, section 4.2
    np.testing.assert_allclose(found.outputs[..., 0], found.outputs[..., 1] - found.outputs[..., 2], atol=1e-5)
    assert levels == 2 or not (found.outputs[:, SEARCH].any() or found.costs[:, SEARCH].any())
    count = found.costs[:, :levels, 2]
    edges, steps = 5, np.array([3, 3, 2])[:, None]
    every = {"darts": 4, "snas": 4, "proxyless": 2 if form.get("two_path") else 4}.get(form["method"], 1)
    assert (count.sum((2, 3, 4)) == edges * every * steps).all()
    assert not found.costs[:, :, 0, ..., 0].any(), "None has no cost"
    if every == 4:
        assert (count == steps[..., None, None, None]).all()


@pytest.mark.slow
def test_a_resumed_search_is_the_unbroken_one(form, tmp_path):
    """Stop in a step and resume from the checkpoint before it: Adam, held-out batches, gates and records continue."""
    form = {**form, "fused": True}

    class Stop(Exception):
        pass

    def progress(done: int) -> None:
        if done == 5:
            raise Stop

    reference = searched(tmp_path / "unbroken", progress=lambda done: None, **form)
    with pytest.raises(Stop):
        searched(tmp_path / "broken", progress=progress, **form)
    again = searched(tmp_path / "broken", resume=True, progress=lambda done: None, **form)
    assert_same(again, reference)
    last = "checkpoints/cells-00000008.safetensors"
    one, other = (load_checkpoint(tmp_path / d / last).tensors for d in ("unbroken", "broken"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    learns = form["method"] != "uniform"
    assert (one["model.adam_step"].item(), bool(one["model.adam_square"].any())) == (8 * learns, learns)


def test_it_learns_the_images(tmp_path):
    found = searched(tmp_path, method="dsnas", weights=WEIGHTS.replace(epochs=15))
    loss = found.means(TRAIN, "all", "L")
    assert loss[-1] < 0.7 * loss[0]
    cell = found.net.cells[0].edges[0]["sep_conv_3x3"].body[0].weight
    assert not torch.equal(cell, CellSupernet(SPACE, fused=False).cells[0].edges[0]["sep_conv_3x3"].body[0].weight)


def test_other_settings_do_not_resume(tmp_path):
    searched(tmp_path, method="dsnas")
    with pytest.raises(FileExistsError, match="'cells'"):
        searched(tmp_path, method="dsnas")
    with pytest.raises(CheckpointError, match=r"search.alpha_lr was 0.1, now 0.2"):
        searched(tmp_path, method="dsnas", alpha_lr=0.2, resume=True)
    with pytest.raises(CheckpointError):
        searched(tmp_path, method="dsnas", space=SPACE.replace(channels=6), resume=True)


@pytest.mark.parametrize(
    ("bilevel", "held_out", "message"),
    [
        (True, None, "bilevel=True needs a held_out loader"),
        (False, data(), "bilevel=False needs no held_out loader"),
        (True, [], "a loader has no batch"),
    ],
)
def test_loaders_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, bilevel, held_out, message):
    with pytest.raises(ValueError, match=message):
        search_cells(SPACE, data(), CellSearchConfig(bilevel=bilevel), WEIGHTS, held_out=held_out, run_dir=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"alpha_lr": -1.0}, "alpha_lr must not be negative, got -1"),
        ({"alpha_std": math.nan}, "alpha_std must not be negative, got nan"),
        ({"records": 0}, "records must be positive"),
        ({"method": "darts", "second_order": True}, "second_order belongs to method='darts' with bilevel=True"),
        ({"method": "dsnas", "two_path": True}, "two_path belongs to method='proxyless', got 'dsnas'"),
        ({"method": "darts", "redraw": True}, "redraw belongs to methods that sample one operation, got 'darts'"),
    ],
)
def test_settings_that_cannot_be(form, message):
    with pytest.raises(ValueError, match=message):
        CellSearchConfig(**form)


# --- what the logits do


def test_redraw_lets_something_into_every_output():
    space = SPACE.replace(cell=simplified_cell(("none", "skip_connect")))
    for redraw in (True, False):
        cfg = CellSearchConfig(method="dsnas", redraw=redraw)
        draws = [draw_gates(space, cfg, uniform_logits(space), step=i, progress=0.0).runs[0] for i in range(40)]
        picks = {tuple(runs.int().argmax(-1).tolist()) for runs in draws}
        assert any(a == 0 or b == c == 0 for a, b, c in picks) != redraw
        assert len(picks) > 2, "redraw still gives different draws"


def test_redraw_ends():
    space = SPACE.replace(cell=simplified_cell().restricted(0, 1, ("none",)))
    cfg = CellSearchConfig(method="uniform", redraw=True)
    with pytest.raises(RuntimeError, match="redraw: in each of 1000 draws some output node had no operation but None"):
        draw_gates(space, cfg, uniform_logits(space), step=0, progress=0.0)


# --- what is recorded


@pytest.mark.parametrize("method", ["dsnas", "darts"])
def test_costs_of_a_record_are_those_of_its_steps(method, tmp_path):
    """Weights and logits do not move, so every step can be computed again."""
    still = WEIGHTS.replace(lr=1e-30, lr_end=0.0, weight_decay=0.0)
    found = searched(tmp_path, method=method, weights=still, alpha_lr=0.0, records=2)
    net, cfg, loader = CellSupernet(SPACE, fused=False), found.cfg, data() * 2
    costs, edges, loss = [], [], []
    for step, (x, y) in enumerate(loader):
        draw = draw_gates(SPACE, cfg, torch.tensor(found.logits), step=step, progress=0.0, purpose=1)
        gates = draw.gates.float().requires_grad_()
        value = F.cross_entropy(net(x, gates), y)
        (c,) = torch.autograd.grad(value, gates)
        costs.append(torch.stack([c, c**2, torch.ones_like(c)]).double() * draw.runs)
        edges.append((draw.gates * c).sum(-1))
        loss.append(value.item())
    for record, part in ((0, slice(0, 4)), (1, slice(4, 8))):
        want = torch.stack(costs[part]).sum(0).numpy()
        np.testing.assert_allclose(found.costs[record, TRAIN], want, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(
            found.edge_costs[record, TRAIN], torch.stack(edges[part]).mean(0).numpy(), rtol=1e-3, atol=1e-6
        )
        assert found.means(TRAIN, "all", "L")[record] == pytest.approx(np.mean(loss[part]), rel=1e-5)


# --- second order


def test_second_order_is_the_formula(tmp_path):
    """A step of DARTS in float64, from a state with momentum; the same with autograd and vectors written out."""
    space = SPACE.replace(cell=simplified_cell(("none", "skip_connect", "sep_conv_3x3")), channels=2)
    cfg = CellSearchConfig(method="darts", bilevel=True, second_order=True, temperature=1.0)
    search = CellSearch(space, cfg, 4, fused=False).double()
    (x, y), (xs, ys) = [(a.double(), b) for a, b in data(2)]
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in search.parameters() if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in search.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.2,
        momentum=0.9,
    )
    for p in search.parameters():
        optimizer.state[p]["momentum_buffer"] = 0.1 * torch.randn(p.shape, dtype=torch.float64)

    names = [name for name, _ in search.net.named_parameters()]
    start = [p.detach().clone() for p in search.net.parameters()]
    momenta = [optimizer.state[p]["momentum_buffer"] for p in search.net.parameters()]
    logits = search.logits.clone()

    def gradients(weights: list[Tensor], images: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor]:
        a = logits.clone().requires_grad_()
        w = [t.detach().clone().requires_grad_() for t in weights]
        gates = a.softmax(-1)[[0]]
        predicted = torch.func.functional_call(search.net, dict(zip(names, w, strict=True)), (images, gates))
        *of_weights, of_logits = torch.autograd.grad(F.cross_entropy(predicted, labels), [*w, a])
        return of_weights, of_logits

    g, _ = gradients(start, x, y)
    decay = [0.05 if w.ndim > 1 else 0.0 for w in start]
    ahead = [w - 0.2 * (0.9 * m + gw + d * w) for w, m, gw, d in zip(start, momenta, g, decay, strict=True)]
    v, first = gradients(ahead, xs, ys)
    e = 0.01 / math.sqrt(sum(float((t**2).sum()) for t in v))
    plus = gradients([w + e * t for w, t in zip(start, v, strict=True)], x, y)[1]
    minus = gradients([w - e * t for w, t in zip(start, v, strict=True)], x, y)[1]
    want = first - 0.2 * (plus - minus) / (2 * e)

    seen = []
    search.update = lambda gradient, draw: seen.append(gradient)
    engine = CellSearchEngine(search, optimizer, as_epochs([(xs, ys)]))
    engine.forward_backward(x, y)
    torch.testing.assert_close(seen[0], want, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(first, want, rtol=1e-2), "the second order is nothing here"
    for p, before, gw in zip(search.net.parameters(), start, g, strict=True):
        assert torch.equal(p, before), "the weights were not put back"
        torch.testing.assert_close(p.grad, gw, rtol=1e-6, atol=1e-9)


# --- estimates with operations drawn uniformly


def test_monte_carlo_is_the_mean_over_draws(fused):
    net, loader = CellSupernet(SPACE, fused=fused), data(3)
    table, outputs = monte_carlo_costs(net, loader, count=7, seed=4)
    cfg = CellSearchConfig(method="uniform", seed=4)
    total, count = torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)
    for i in range(7):
        x, y = loader[i % 3]
        gates = draw_gates(SPACE, cfg, uniform_logits(SPACE), step=i, progress=0.0).gates.float().requires_grad_()
        (c,) = torch.autograd.grad(F.cross_entropy(net(x, gates), y), gates)
        total, count = total + c * gates.detach(), count + gates.detach()
    torch.testing.assert_close(table.total.float(), total, rtol=1e-4, atol=1e-6)
    assert torch.equal(table.count.float(), count)
    assert outputs[0, 3] == 7 * 8
    again, _ = monte_carlo_costs(net, loader, count=7, seed=4)
    assert torch.equal(again.total, table.total)


# --- the architecture that is found


@pytest.mark.parametrize(
    ("rows", "argmax", "darts"),
    [
        (
            {"(0,2)": [0.4, 0.3, 0.2, 0.1], "(1,2)": [0.1, 0.6, 0.2, 0.1], "(0,3)": [0.1, 0.2, 0.3, 0.4],
             "(1,3)": [0.7, 0.1, 0.1, 0.1], "(2,3)": [0.2, 0.2, 0.5, 0.1]},
            (0, 1, 3, 0, 2), (1, 1, 3, 0, 2),
        ),
        # the softmax is over all operations, None included; then the best but None
        (
            {"(0,2)": [0.9, 0.05, 0.03, 0.02], "(1,2)": [0.9, 0.02, 0.03, 0.05], "(0,3)": [0.6, 0.3, 0.05, 0.05],
             "(1,3)": [0.1, 0.25, 0.4, 0.25], "(2,3)": [0.1, 0.3, 0.25, 0.35]},
            (0, 0, 0, 2, 3), (1, 3, 0, 2, 3),
        ),
    ],
)  # fmt: skip
def test_both_rules_by_hand(rows, argmax, darts):
    """Columns: none, skip_connect, avg_pool_3x3, sep_conv_3x3."""
    logits = torch.tensor([[rows[edge.name] for edge in SPACE.cell.edges]]).log()
    assert derivations(SPACE, logits.numpy()) == {"argmax": argmax, "darts": darts}


def test_darts_keeps_two_edges_into_every_node():
    space = darts_space()
    logits = torch.randn(2, 14, 8, generator=torch.Generator().manual_seed(0))
    for part in space.parts(derive(space, logits, "darts")):
        assert [sum(part[e] != 0 for e in space.cell.into(node)) for node in range(2, 6)] == [2] * 4


def test_edges_without_none_cannot_be_dropped():
    space = SPACE.replace(cell=simplified_cell(("skip_connect", "conv_1x1")))
    assert derive(space, torch.zeros(1, 3, 2), "darts") == (0, 0, 0)
    space = SPACE.replace(cell=minimal_cell(("skip_connect", "sep_conv_3x3")))
    with pytest.raises(ValueError, match=r"edge \(.,3\) has no candidate none to be dropped to"):
        derive(space, torch.zeros(1, 5, 2), "darts")
    assert list(derivations(space, torch.zeros(1, 5, 2))) == ["argmax"]
    with pytest.raises(ValueError, match="unknown rule 'top2'; valid: argmax, darts"):
        derive(SPACE, torch.zeros(1, 5, 4), "top2")


def test_an_edge_that_was_removed_stays_so():
    space = SPACE.replace(cell=SPACE.cell.restricted(2, 3, ("none",)))
    found = derivations(space, uniform_logits(space))
    assert found["argmax"][4] == found["darts"][4] == 0
    assert 0 not in found["darts"][:4]
