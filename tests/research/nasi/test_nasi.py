"""NASI: the estimators of the kernel's trace, the step it takes, and whole searches."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import batches, tiny_excited_space
from torch import nn
from torch.nn import functional as F

from benchmarks.straight_through import gradient_of_q
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.cells.space import Cell, CellSpace, Edge, darts_space, nas_bench_201_space
from nasfast.research.nasi.score import score, score_architecture, untrained
from nasfast.research.nasi.search import NasiConfig, NasiResult, Record, sample, search, solve
from nasfast.research.nasi.spaces import CellMixture, make_mixture
from nasfast.seeds import derive_seed
from nasfast.train.batches import as_epochs

OPS = ("none", "skip_connect", "conv_3x3")


def small_space(ops=OPS) -> CellSpace:
    edges = tuple(Edge(i, j, ops) for i, j in ((0, 1), (0, 2), (1, 2)))
    cell = Cell(1, 2, edges, (2,))
    return nas_bench_201_space(cells=2, channels=4, resolution=12).replace(cell=cell)


@pytest.fixture(scope="module")
def images():
    return prototypes(3.0, 64, 1)[0]


def loader(images, *, steps: int = 3, batch: int = 8) -> DrawnBatches:
    return DrawnBatches(*images, steps=steps, batch=batch)


def mlp(dtype=torch.float64) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 12), nn.ReLU(), nn.Linear(12, 10)).to(dtype)


def test_scores_are_sums_of_squared_gradients_sample_by_sample(images):
    x, y = images[0][:5].double(), images[1][:5]
    net = mlp()
    parameters = list(net.parameters())
    # without influence
    net.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))

    def squared(value):
        return sum(float(g.square().sum()) for g in torch.autograd.grad(value, parameters, retain_graph=True))

    logits = [net(image[None])[0] for image in x]
    labelled = sum(squared(row[label]) for row, label in zip(logits, y, strict=True)) / 5
    losses = [F.cross_entropy(row[None], label[None]) for row, label in zip(logits, y, strict=True)]
    expected = {
        "q_batch": squared(sum(losses) / 5),
        "q_sum": sum(map(squared, losses)),
        "trace_label": math.sqrt(labelled),
        "trace_full": sum(squared(value) for row in logits for value in row),
    }
    assert {kind: score(net, x, y, kind=kind, chunk=3) for kind in expected} == pytest.approx(expected, rel=1e-8)
    with pytest.raises(ValueError, match="unknown score 'q_mean'; valid: q_batch, q_sum"):
        score(net, x, y, kind="q_mean")


# --- the objective and the step -----------------------------------------------------------------------------------


def solved(q, gradients=None, **settings) -> NasiResult:
    q = torch.tensor(q, dtype=torch.float64)
    gradients = torch.ones(len(q), 1, 2, 3, dtype=torch.float64) if gradients is None else gradients
    picks = torch.zeros(len(q), 1, 2, dtype=torch.long)
    return solve(Record(q, gradients, picks, torch.zeros(1, 2, 3), 1.0, 1.0), NasiConfig(**settings))


@pytest.mark.parametrize("mu", [0, 0.1, 0.5, 1, 2])
def test_the_penalty_bends_at_nu(mu):
    q = torch.tensor([0.5, 1.5, 3.0, 7.0], dtype=torch.float64)
    found = solved(q.tolist(), mu=mu, constraint="fixed", nu=2.0)
    torch.testing.assert_close(found.r, torch.where(q <= 2, q, (1 - mu) * q + mu * 2))
    torch.testing.assert_close(found.norms, math.sqrt(6) * torch.where(q <= 2, 1, abs(1 - mu) * torch.ones_like(q)))


@pytest.mark.parametrize(
    ("constraint", "nu", "limits"),
    [("fixed", 5.0, [5, 5, 5]), ("adaptive", 5.0, [5, 3, 3]), ("quantile", 0.5, [3] * 3)],
)
def test_limits(constraint, nu, limits):
    assert solved([1.0, 3.0, 8.0], constraint=constraint, nu=nu).nu.tolist() == limits


def test_the_step_divides_by_the_largest_norm_so_far():
    units = torch.randn(3, 1, 2, 3, dtype=torch.float64)
    units /= units.flatten(1).norm(dim=1)[:, None, None, None]
    norms = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)[:, None, None, None]
    want = (units[0] + units[1] + units[2] / 2) / 3
    for scale, xi in ((1.0, 1.0), (1e6, 0.3)):
        found = solved([1.0] * 3, scale * units * norms, mu=0.0, xi=xi)
        torch.testing.assert_close(found.delta, xi * want)
    # a gradient of 0, above nu with mu 1, counts and divides nothing
    found = solved([2.0, 1.0], units[:2], mu=1.0, constraint="fixed", nu=1.0)
    torch.testing.assert_close(found.delta, units[1] / 2)


def test_steps_that_are_not_finite_are_left_out():
    gradients = torch.randn(4, 1, 2, 3, dtype=torch.float64)
    gradients[3, 0, 0, 0] = torch.inf
    found = solved([1.0, math.nan, 2.0, 3.0], gradients)
    assert found.skipped == 2 and found.q.tolist() == [1, 2]
    assert torch.equal(found.delta, solved([1.0, 2.0], gradients[[0, 2]]).delta)
    with pytest.raises(FloatingPointError, match="none of 1 sampled architectures"):
        solved([math.nan], gradients[1:2])


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


def test_soft_gates_have_the_differences_of_q(images):
    mixture, batch = CellMixture(small_space()).double(), [(images[0][:6].double(), images[1][:6])]
    alpha, step = torch.zeros(mixture.allowed.shape, dtype=torch.float64), 1e-6

    def at(logits):
        return sample(mixture, batch, NasiConfig(steps=1, gates="soft"), logits=logits)

    gradient = at(alpha).gradients[0].flatten()
    for i in np.random.default_rng(0).choice(alpha.numel(), 4, replace=False):
        moved = alpha.clone()
        moved.view(-1)[int(i)] = step
        difference = float(at(moved).q - at(-moved).q) / (2 * step)
        assert float(gradient[int(i)]) == pytest.approx(difference, rel=1e-5, abs=1e-7)


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
        pytest.param(tiny_excited_space(), 1.0, id="layers"),
    ],
)
def test_a_step_that_runs_the_drawn_path_has_the_gradient_of_all_candidates(space, temperature):
    mixture = make_mixture(space).double()
    drawn = batches(3, num_classes=space.num_classes, resolution=space.resolution)
    record = sample(mixture, drawn, NasiConfig(steps=3, temperature=temperature))
    unused = 0
    for t, (x, y) in enumerate(drawn):
        q, gradient = gradient_of_q(mixture, x.double(), y, step=t, temperature=temperature)
        torch.testing.assert_close(record.q[t], q, rtol=1e-10, atol=0)
        torch.testing.assert_close(record.gradients[t], gradient, rtol=0, atol=1e-9 * float(gradient.abs().max()))
        hard = F.one_hot(record.picks[t], mixture.allowed.shape[-1]).bool()
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
    def kept(ops) -> int:
        space = small_space(ops)
        mixture = CellMixture(space)
        # the first candidate of every edge is drawn
        alpha = torch.zeros(mixture.allowed.shape, dtype=torch.float64)
        alpha[..., space.ops.index("conv_1x1")] = 50.0
        largest, alive = 0, weakref.WeakSet()

        class Kept:
            def __init__(self, tensor):
                nonlocal largest
                self.tensor = tensor
                alive.add(self)
                largest = max(largest, len(alive))

        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            sample(mixture, loader(images), NasiConfig(steps=1), logits=alpha)
        return largest

    assert kept(("conv_1x1", "conv_3x3", "max_pool_3x3", "avg_pool_3x3")) <= 1.1 * kept(("conv_1x1", "conv_3x3"))


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
    want = solve(replace(found.record, gradients=expected), NasiConfig(mu=0.0)).delta
    torch.testing.assert_close(found.delta, want)
    torch.testing.assert_close(found.r, torch.where(above, 2 * found.nu - found.q, found.q))
    start = torch.full(mixture.allowed.shape, 0.5)
    moved = search(mixture, loader(images), NasiConfig(steps=4, mu=2.0, nu=0.5), logits=start)
    torch.testing.assert_close(moved.logits, found.logits + 0.5)
    # the record says where it was sampled
    assert torch.equal(solve(moved.record, NasiConfig(nu=0.5)).logits, moved.logits)
    with pytest.raises(ValueError, match=r"logits must be \(1, 3, 3\)"):
        search(mixture, loader(images), logits=torch.zeros(2, 3, 3))


def test_a_search_that_prefers_nothing_says_so(images):
    mixture = CellMixture(small_space())
    with pytest.raises(ValueError, match=r"100 % of 3 lie above nu = 0 \(Q from .*larger nu"):
        search(mixture, loader(images), NasiConfig(steps=3, mu=1.0, constraint="fixed", nu=0.0))
    with pytest.raises(ValueError, match="a loader has no batch"):
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
