"""NASI: the theory it rests on, the estimators of the kernel's trace, the step it takes, and whole searches."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from benchmarks.straight_through import gradient_of_q, straight_through
from nasfast.research.cells.derive import derive
from nasfast.research.cells.gates import gumbel
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.cells.space import Cell, CellSpace, Edge, darts_space, nas_bench_201_space
from nasfast.research.nasi.score import (
    gradient_norm,
    jacobian,
    score,
    score_architecture,
    untrained,
)
from nasfast.research.nasi.search import (
    LIPSCHITZ,
    NasiConfig,
    Record,
    limits,
    one_step,
    penalised,
    relaxed_gates,
    sample,
    search,
    slope,
    solve,
)
from nasfast.research.nasi.spaces import CellMixture
from nasfast.seeds import derive_seed
from nasfast.train.batches import as_epochs

OPS = ("none", "skip_connect", "conv_3x3")


def small_space() -> CellSpace:
    edges = tuple(Edge(i, j, OPS) for i, j in ((0, 1), (0, 2), (1, 2)))
    cell = Cell(1, 2, edges, (2,))
    return nas_bench_201_space(cells=2, channels=4, resolution=12).replace(cell=cell)


@pytest.fixture(scope="module")
def images():
    return prototypes(3.0, 64, 1)[0]


def loader(images, *, steps: int = 3, batch: int = 8) -> DrawnBatches:
    return DrawnBatches(*images, steps=steps, batch=batch)


def mlp(dtype=torch.float64) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 12), nn.ReLU(), nn.Linear(12, 10)).to(dtype)


# --- theory -------------------------------------------------------------------------------------------------------


def test_gradient_descent_of_a_linear_model_follows_the_closed_form_and_keeps_the_bound():
    m, p = 6, 9
    x = torch.randn(m, p, dtype=torch.float64)
    x /= x.norm(dim=1, keepdim=True)
    y = torch.rand(m, dtype=torch.float64)
    model = nn.Linear(p, 1, bias=False, dtype=torch.float64)
    rows = torch.cat(list(jacobian(model(x)[:, 0], [model.weight], chunk=4)))
    kernel = rows @ rows.T
    eigenvalues, vectors = torch.linalg.eigh(kernel)
    assert eigenvalues[0] > 0
    rate = 0.9 / float(eigenvalues[-1])
    components = (vectors.T @ y).square()

    def closed(t: float) -> float:
        return float(((1 - rate * eigenvalues) ** (2 * t) * components).sum() / m)

    f = torch.zeros(m, dtype=torch.float64)
    for t in range(51):
        assert float((y - f).square().sum() / m) == pytest.approx(closed(t), abs=1e-8)
        f = f - rate * kernel @ (f - y)
    mean = float(eigenvalues.mean())
    for t in (0.1, 0.25, 0.5, 1, 5, 50):
        q = 2 * t if t < 0.5 else 1
        assert closed(t) <= m * (1 - rate * mean) ** q


@pytest.mark.parametrize("labels", ["true", "random"])
def test_the_trace_bounds_the_gradients_of_samples_and_those_bound_the_batches(images, labels):
    x, y = images[0][:16].double(), images[1][:16]
    if labels == "random":
        y = torch.randint(10, y.shape)
    net, b = mlp(), 4
    of_samples = score(net, x, y, kind="q_sum")
    of_batches = sum(score(net, x[i : i + b], y[i : i + b]) for i in range(0, 16, b))
    assert score(net, x, y, kind="trace_full") >= of_samples / LIPSCHITZ**2
    assert of_samples >= b * of_batches
    # gamma_L itself: the loss's gradient with respect to the logits
    logits = net(x).detach().requires_grad_()
    (of_logits,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), logits)
    assert float(of_logits.norm(dim=1).max()) <= LIPSCHITZ


def test_the_trace_is_the_sum_of_squared_jacobians_sample_by_sample(images):
    x, y = images[0][:5].double(), images[1][:5]
    net = mlp()
    parameters = list(net.parameters())
    rows = torch.cat(list(jacobian(net(x).flatten(), parameters, chunk=7)))
    by_sample = 0.0
    for image in x:
        for value in net(image[None])[0]:
            by_sample += sum(float(g.square().sum()) for g in torch.autograd.grad(value, parameters, retain_graph=True))
    assert float(torch.trace(rows @ rows.T)) == pytest.approx(by_sample, rel=1e-8)
    assert score(net, x, y, kind="trace_full", chunk=3) == pytest.approx(by_sample, rel=1e-8)
    labelled = sum(
        sum(float(g.square().sum()) for g in torch.autograd.grad(net(image[None])[0, label], parameters))
        for image, label in zip(x, y, strict=True)
    )
    assert score(net, x, y, kind="trace_label") == pytest.approx(math.sqrt(labelled / 5), rel=1e-8)


def test_scores_take_a_parameter_without_influence_and_refuse_an_unknown_name(images):
    x, y = images[0][:4], images[1][:4]
    net = mlp(torch.float32)
    before = {kind: score(net, x, y, kind=kind) for kind in ("q_batch", "q_sum", "trace_label", "trace_full")}
    net.register_parameter("unused", nn.Parameter(torch.ones(3)))
    assert {kind: score(net, x, y, kind=kind) for kind in before} == pytest.approx(before)
    with pytest.raises(ValueError, match="unknown score 'q_mean'; did you mean 'q_sum'\\? valid: q_batch, q_sum"):
        score(net, x, y, kind="q_mean")


# --- the objective and the step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0, 0.1, 0.5, 1, 2])
def test_the_penalty_bends_at_nu(mu):
    q = torch.tensor([0.5, 1.5, 3.0, 7.0], dtype=torch.float64, requires_grad=True)
    nu = 2.0
    r = penalised(q, nu, mu)
    expected = torch.where(q <= nu, q, (1 - mu) * q + mu * nu)
    torch.testing.assert_close(r, expected)
    (gradient,) = torch.autograd.grad(r.sum(), q)
    assert gradient.tolist() == [1, 1, 1 - mu, 1 - mu]
    assert slope(q.detach(), torch.full_like(q, nu), mu).tolist() == gradient.tolist()


def test_the_step_divides_by_the_largest_norm_so_far():
    g = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(one_step(g), g[0] / g.norm())
    units = torch.randn(3, 2, 3, 4, dtype=torch.float64)
    units /= units.flatten(1).norm(dim=1)[:, None, None, None]
    torch.testing.assert_close(one_step(units), units.mean(0))
    norms = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)[:, None, None, None]
    torch.testing.assert_close(one_step(units * norms), (units[0] + units[1] + units[2] / 2) / 3)
    torch.testing.assert_close(one_step(1e6 * units * norms), one_step(units * norms))
    for seed in range(5):
        many = torch.randn(7, 1, 2, 3, generator=torch.Generator().manual_seed(seed)) * torch.arange(1, 8)[
            :, None, None, None
        ].flip(0)
        assert float(one_step(many, xi=0.3).norm()) <= 0.3 + 1e-6
    # a gradient of 0, above nu with mu 1, counts and divides nothing
    torch.testing.assert_close(one_step(torch.cat([torch.zeros_like(units[:1]), units[:1]])), units[0] / 2)


def test_limits():
    q = torch.tensor([1.0, 3.0, 8.0], dtype=torch.float64)
    assert limits(q, "fixed", 5.0).tolist() == [5, 5, 5]
    assert limits(q, "adaptive", 5.0).tolist() == [5, 3, 3]
    assert limits(q, "quantile", 0.5).tolist() == [3, 3, 3]


def test_steps_that_are_not_finite_are_left_out():
    q = torch.tensor([1.0, torch.nan, 2.0, 3.0], dtype=torch.float64)
    gradients = torch.randn(4, 1, 2, 3, dtype=torch.float64)
    gradients[3, 0, 0, 0] = torch.inf
    record = Record(q, gradients, torch.zeros(4, 1, 2, dtype=torch.long), torch.zeros(1, 2, 3), 1.0, 1.0)
    found = solve(record, NasiConfig(mu=1.0, constraint="fixed", nu=100.0))
    assert found.skipped == 2 and found.q.tolist() == [1, 2]
    torch.testing.assert_close(found.delta, one_step(gradients[[0, 2]]))
    with pytest.raises(FloatingPointError, match="none of 1 sampled architectures"):
        solve(replace(record, q=q[1:2], gradients=gradients[1:2]))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"nu": 500}, "takes nu from 0 to 1, got 500"),
        ({"mu": -1}, "mu and nu must not be negative"),
        ({"temperature": 0}, "temperature must be positive"),
        ({"constraint": "fixed"}, "constraint='fixed' needs nu"),
    ],
)
def test_settings_that_cannot_be(form, message):
    with pytest.raises(ValueError, match=message):
        NasiConfig(**form)


# --- gates and searches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [
        pytest.param(small_space(), id="201"),
        pytest.param(darts_space(cells=1, channels=4, resolution=6), id="darts", marks=pytest.mark.slow),
    ],
)
def test_the_double_backward_agrees_with_differences_of_q(space, images):
    # strided cells of 6 x 6 maps have kinks close by, where a difference sees another slope
    x, y = images[0][:6, :, : space.resolution, : space.resolution].double(), images[1][:6]
    mixture = CellMixture(space).double()
    parameters = list(mixture.parameters())
    noise = gumbel(mixture.allowed.shape, torch.Generator().manual_seed(0))

    def q(alpha):
        gates = relaxed_gates(alpha, noise)
        return gradient_norm(F.cross_entropy(mixture(x, gates), y), parameters, differentiable=True)

    alpha = torch.zeros(mixture.allowed.shape, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(q(alpha), alpha)
    rng, step = np.random.default_rng(0), 1e-6
    for i in rng.choice(alpha.numel(), 4, replace=False):
        moved = torch.zeros(alpha.numel(), dtype=torch.float64)
        moved[int(i)] = step
        moved = moved.view(alpha.shape)
        difference = (q(moved) - q(-moved)).item() / (2 * step)
        assert float(gradient.flatten()[int(i)]) == pytest.approx(difference, rel=1e-5, abs=1e-7)


def test_straight_through_gates_are_the_discrete_network(images):
    space = small_space()
    x = images[0][:8].double()
    mixture = CellMixture(space).double()
    picks = torch.tensor([[2, 1, 2]])
    hard = F.one_hot(picks, len(space.ops)).double()
    gates = straight_through(mixture, torch.zeros(mixture.allowed.shape, dtype=torch.float64), 2 * hard)
    torch.testing.assert_close(mixture(x, gates), mixture(x, hard), atol=1e-6, rtol=0)
    columns = [[(int(k),) for k in picks[0]]]
    torch.testing.assert_close(mixture(x, hard, columns), mixture(x, hard), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("space", "temperature"),
    [
        pytest.param(small_space(), 1.0, id="none"),
        pytest.param(nas_bench_201_space(cells=3, channels=4, resolution=12), 0.5, id="201"),
        pytest.param(darts_space(cells=1, channels=4, resolution=12), 1.0, id="darts", marks=pytest.mark.slow),
        pytest.param(small_space().replace(order="conv_norm_relu", affine=True), 1.0, id="conv_norm_relu"),
        pytest.param(
            small_space().replace(cell=small_space().cell.restricted(0, 1, ("conv_3x3", "none"))), 0.5, id="restricted"
        ),
    ],
)
def test_a_step_that_runs_the_drawn_path_has_the_gradient_of_all_candidates(space, temperature, images):
    mixture = CellMixture(space).double()
    record = sample(mixture, loader(images), NasiConfig(steps=3, temperature=temperature))
    unused = 0
    for t, (x, y) in enumerate(loader(images).epoch(0)):
        q, gradient = gradient_of_q(mixture, x.double(), y, step=t, temperature=temperature)
        torch.testing.assert_close(record.q[t], q, rtol=1e-10, atol=0)
        torch.testing.assert_close(record.gradients[t], gradient, rtol=0, atol=1e-9 * float(gradient.abs().max()))
        hard = F.one_hot(record.picks[t], len(space.ops)).bool()
        unused += int((gradient[~hard & mixture.allowed].abs() > 1e-6 * float(q)).sum())
    # candidates that did not run have a part in it
    assert unused > 3


def test_a_node_that_nothing_enters_has_gradients_for_what_could(images):
    space = small_space()
    mixture = CellMixture(space).double()
    none, skip, conv = range(3)
    record = sample(mixture, loader(images, steps=60), NasiConfig(steps=60))
    # only the first edge enters node 1, and a ReLU behind it would have no slope at 0
    found = [t for t in range(60) if record.picks[t].tolist() in ([[none, conv, skip]], [[none, skip, skip]])]
    assert found
    for t in found:
        x, y = list(loader(images, steps=60).epoch(0))[t]
        _, gradient = gradient_of_q(mixture, x.double(), y, step=t)
        assert float(gradient[0, 0].abs().max()) > 0
        torch.testing.assert_close(record.gradients[t], gradient, rtol=1e-9, atol=1e-12)


def test_what_is_kept_for_backward_does_not_grow_with_the_candidates(images):
    x, y = images[0][:8], images[1][:8]

    def kept(ops) -> int:
        edges = tuple(Edge(i, j, ops) for i, j in ((0, 1), (0, 2), (1, 2)))
        space = nas_bench_201_space(cells=2, channels=4, resolution=12).replace(cell=Cell(1, 2, edges, (2,)))
        mixture = CellMixture(space)
        # the first candidate of every edge is drawn
        alpha = torch.zeros(mixture.allowed.shape, dtype=torch.float64)
        alpha[..., space.ops.index("conv_1x1")] = 50.0
        largest, held = 0, 0

        def pack(tensor):
            nonlocal largest, held
            held += 1
            largest = max(largest, held)
            return Kept(tensor)

        class Kept:
            def __init__(self, tensor):
                self.tensor = tensor

            def __del__(self):
                nonlocal held
                held -= 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            sample(mixture, as_epochs([(x, y)]), NasiConfig(steps=1), logits=alpha)
        return largest

    assert kept(("conv_1x1", "conv_3x3", "max_pool_3x3", "avg_pool_3x3")) <= 1.1 * kept(("conv_1x1", "conv_3x3"))


def test_gates_are_drawn_by_the_softmax_of_the_logits():
    alpha = torch.tensor([[[0.0, 1.0, -1.0, 0.5]]], dtype=torch.float64)
    draws = 4000
    noise = gumbel((draws, 1, 4), torch.Generator().manual_seed(0))
    picks = relaxed_gates(alpha, noise).argmax(-1).flatten()
    expected = draws * torch.softmax(alpha[0, 0], -1)
    assert stats.chisquare(picks.bincount(minlength=4).numpy(), expected.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("changes", [{}, {"gates": "soft"}], ids=["hard", "soft"])
def test_a_search_repeats_by_its_seed_and_changes_no_parameter(images, changes):
    space, cfg = small_space(), NasiConfig(steps=3, **changes)
    mixture = CellMixture(space)
    before = [p.clone() for p in mixture.parameters()]
    torch.manual_seed(1)
    first = search(mixture, loader(images), cfg)
    torch.manual_seed(2)
    second = search(CellMixture(space), loader(images), cfg)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, mixture.parameters(), strict=True))
    assert torch.equal(first.logits, second.logits) and torch.equal(first.q, second.q)
    other = search(mixture, loader(images), cfg.replace(seed=1))
    assert not torch.equal(first.logits, other.logits)
    assert 0 < float(first.delta.norm()) <= 1 and len(first.q) == 3


def test_labels_and_images_are_replaced_where_asked(images):
    space = small_space()
    mixture = CellMixture(space)
    plain, labels, noise = (
        sample(mixture, loader(images), NasiConfig(steps=2, **changes)).q
        for changes in ({}, {"labels": "random"}, {"images": "random"})
    )
    assert not torch.equal(plain, labels) and not torch.equal(plain, noise) and not torch.equal(labels, noise)
    # nothing of the images is left: only their shape
    twice = (2 * images[0], images[1])
    again = sample(mixture, loader(twice), NasiConfig(steps=2, images="random")).q
    assert torch.equal(noise, again)


def test_the_penalty_of_a_search_is_that_of_its_record(images):
    mixture = CellMixture(small_space())
    found = search(mixture, loader(images), NasiConfig(steps=4, mu=2.0, constraint="quantile", nu=0.5))
    above = found.q > float(found.q.median())
    expected = found.record.gradients * torch.where(above, -1.0, 1.0)[:, None, None, None]
    torch.testing.assert_close(found.delta, one_step(expected))
    torch.testing.assert_close(found.r, torch.where(above, 2 * found.nu - found.q, found.q))
    start = torch.full(mixture.allowed.shape, 0.5)
    moved = search(mixture, loader(images), NasiConfig(steps=4, mu=2.0, nu=0.5), logits=start)
    torch.testing.assert_close(moved.logits, found.logits + 0.5)
    # the record says where it was sampled
    assert torch.equal(solve(moved.record, NasiConfig(nu=0.5)).logits, moved.logits)
    first = found.record.first(2)
    assert torch.equal(first.q, found.record.q[:2]) and torch.equal(first.gradients, found.record.gradients[:2])
    with pytest.raises(ValueError, match=r"logits must be \(1, 3, 3\)"):
        search(mixture, loader(images), logits=torch.zeros(2, 3, 3))


def test_a_search_that_prefers_nothing_says_so(images):
    mixture = CellMixture(small_space())
    with pytest.raises(ValueError, match=r"100 % of 3 lie above nu = 0 \(Q from .*larger nu"):
        search(mixture, loader(images), NasiConfig(steps=3, mu=1.0, constraint="fixed", nu=0.0))
    with pytest.raises(ValueError, match="no batch in epoch 0"):
        sample(mixture, as_epochs([]), NasiConfig(steps=1))


def test_a_gpu_samples_the_same(images, gpu):
    space, cfg = small_space(), NasiConfig(steps=3)
    x, y = images
    drawn = DrawnBatches(x.double(), y, steps=3, batch=8)
    for gates in ("straight_through", "soft"):
        want = sample(CellMixture(space).double(), drawn, cfg.replace(gates=gates))
        got = sample(CellMixture(space).double().to(gpu), drawn, cfg.replace(gates=gates), device=gpu)
        torch.testing.assert_close(got.q, want.q, rtol=1e-8, atol=0)
        torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-6, atol=1e-9)


def test_edges_without_a_candidate_never_draw_it(images):
    space = small_space()
    space = space.replace(cell=space.cell.restricted(0, 1, ("conv_3x3",)))
    mixture = CellMixture(space)
    found = search(mixture, loader(images), NasiConfig(steps=4))
    column = space.ops.index("conv_3x3")
    assert (found.record.picks[:, 0, 0] == column).all()
    assert found.logits[0, 0].isfinite().tolist() == [k == column for k in range(3)]
    assert derive(space, found.logits, "argmax")[0] == column


def test_an_architecture_is_scored_as_a_network_of_its_own(images):
    space = small_space()
    x, y = images[0][:8], images[1][:8]
    arch = (2, 1, 2)
    assert score_architecture(space, arch, [(x, y)]) == score_architecture(space, arch, [(x, y)])
    both = score_architecture(space, arch, [(x, y), (x, y)], seed=3)
    alone = [score(untrained(space, arch, seed=derive_seed(3, i)), x, y) for i in range(2)]
    assert alone[0] != alone[1] and both == pytest.approx(sum(alone) / 2)


def test_prototypes_and_their_batches():
    (x, y), (held, _) = prototypes(0.0, 300, 200, seed=1)
    assert x.shape == (300, 3, 12, 12) and held.shape == (200, 3, 12, 12)
    assert float(x.std()) == pytest.approx(1, abs=1e-5) and float(held.std()) == pytest.approx(1, abs=1e-5)
    # without noise a class has 25 images, and a shift by a pixel of one window is in another
    assert all(len(torch.unique(x[y == k].flatten(1), dim=0)) <= 25 for k in range(10))
    assert torch.equal(prototypes(0.0, 300, 200, seed=1)[0][0], x)
    assert not torch.equal(prototypes(0.0, 300, 200, seed=2)[0][0], x)
    batches = DrawnBatches(x, y, steps=3, batch=8, seed=5)
    whole = list(batches.epoch(2))
    assert len(whole) == len(batches) == 3
    assert torch.equal(next(batches.epoch(2, start=2))[0], whole[2][0])
    assert not torch.equal(whole[0][0], next(batches.epoch(3))[0])
    with pytest.raises(ValueError, match="as many labels as images"):
        DrawnBatches(x, y[:5], steps=1)
    with pytest.raises(ValueError, match="needs noise >= 0"):
        prototypes(-1.0, 1, 1)
