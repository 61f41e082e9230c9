"""cross_entropy and clipped_sgd: PyTorch, and Triton on the GPU or under its interpreter, against float64."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE

from nasfast.ops import _triton, training
from nasfast.train.sgd import ClippedSGD

pytestmark = pytest.mark.usefixtures("device")
needs_triton = pytest.mark.skipif(_triton.why_missing() is not None, reason=str(_triton.why_missing()))
BACKENDS = ["reference", pytest.param("triton", marks=needs_triton)]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Under the interpreter, the Triton kernels serve CPU tensors."""
    if DEVICE == "cpu" and _triton.why_missing() is None and not _triton.interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")


def drawn(n, classes, dtype=torch.float32, scale=3.0, shift=0.0):
    generator = torch.Generator().manual_seed(n * classes)
    logits = (scale * torch.randn(n, classes, generator=generator) + shift).to(dtype)
    labels = torch.randint(classes, (n,), generator=generator)
    labels[::2] = logits[::2].argmax(1)  # some are correct
    return logits.to(DEVICE), labels.to(DEVICE)


def exact(logits, labels, smoothing):
    leaf = logits.double().cpu().requires_grad_()
    labels = labels.cpu()
    loss = F.cross_entropy(leaf, labels, label_smoothing=smoothing)
    loss.backward()
    return loss.item(), (leaf.argmax(1) == labels).sum().item(), leaf.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("n", "classes", "smoothing", "dtype"),
    [
        *(
            (*shape, smoothing, dtype)
            for shape, smoothing, dtype in product(
                [(1, 2), (5, 10), (7, 1000), (3, 1)], (0.0, 0.1), (torch.float32, torch.bfloat16)
            )
        ),
        (1030, 3, 0.1, torch.float32),
    ],
)
def test_loss_gradient_and_count_are_those_of_float64(n, classes, smoothing, dtype, backend):
    logits, labels = drawn(n, classes, dtype)
    outcome, gradient = training.cross_entropy(logits, labels, label_smoothing=smoothing, backend=backend)
    loss, correct, wanted = exact(logits, labels, smoothing)
    assert outcome.dtype == torch.float32 and gradient.dtype == dtype
    assert outcome[0].item() == pytest.approx(loss, rel=3e-6, abs=1e-6)
    assert outcome[1].item() == correct
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    error = (gradient.double().cpu() - wanted).abs() - rounding * wanted.abs()
    assert error.max() <= 1e-7 / n


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_far_from_zero_lose_no_digits(backend):
    logits, labels = drawn(4, 50, shift=1e4)
    outcome, _ = training.cross_entropy(logits, labels, backend=backend)
    assert outcome[0].item() == pytest.approx(exact(logits, labels, 0.0)[0], rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tie_is_the_first_of_the_classes(backend):
    logits = torch.tensor([[1.0, 5.0, 5.0], [5.0, 5.0, 1.0]], device=DEVICE)
    for labels, correct in (([1, 0], 2), ([2, 1], 0)):
        outcome, _ = training.cross_entropy(logits, torch.tensor(labels, device=DEVICE), backend=backend)
        assert outcome[1].item() == correct


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_not_a_number_reaches_the_loss_and_its_row_of_the_gradient(backend, smoothing):
    logits, labels = drawn(3, 10)
    logits[1, 4] = math.nan
    outcome, gradient = training.cross_entropy(logits, labels, label_smoothing=smoothing, backend=backend)
    assert outcome[0].isnan() and gradient[1].isnan().all() and gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_class_that_is_impossible_costs_nothing_unless_it_is_the_label(backend):
    logits, labels = drawn(2, 4)
    logits[:, 3], labels[:] = -math.inf, 1
    outcome, gradient = training.cross_entropy(logits, labels, backend=backend)
    assert outcome[0].item() == pytest.approx(exact(logits, labels, 0.0)[0], rel=1e-5) and gradient.isfinite().all()


@needs_triton
def test_a_label_that_is_no_class_makes_the_loss_nan():
    logits, labels = drawn(3, 10)
    for wrong in (10, -1, -100):
        labels[1] = wrong
        assert training.cross_entropy(logits, labels, backend="triton")[0][0].isnan()


@needs_triton
def test_more_classes_than_fit_registers_are_refused_by_name_and_fall_back():
    logits, labels = drawn(1, (1 << 14) + 1)
    with pytest.raises(RuntimeError, match="serves up to 16384 classes, got 16385"):
        training.cross_entropy(logits, labels, backend="triton")
    assert training.cross_entropy(logits, labels)[0][0].isfinite()


# ---- clipped_sgd


def parameters(seed, shapes=((3,), (2049,), (4, 3, 3, 3), (5000,))):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in shapes]
    made[2].data = made[2].data.to(memory_format=torch.channels_last)
    return made


def set_gradients(tensors, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(tensors):
        gradient = (scale * torch.randn(p.shape, generator=generator)).to(DEVICE)
        p.grad = None if (i + seed) % 4 == 0 else torch.empty_like(p).copy_(gradient)


def sgd(tensors, nesterov, kind=ClippedSGD, dtype=None):
    if dtype is not None:
        tensors = [torch.nn.Parameter(p.detach().to(dtype)) for p in tensors]
    groups = [{"params": tensors[:2], "weight_decay": 0.1}, {"params": tensors[2:], "weight_decay": 0.0}]
    return tensors, kind(groups, lr=0.3, momentum=0.9, nesterov=nesterov)


def fused(monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", "triton")


@needs_triton
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_steps_are_those_of_float64(clip, nesterov, monkeypatch):
    fused(monkeypatch)
    ours, optimizer = sgd(parameters(0), nesterov)
    exact, reference = sgd(parameters(0), nesterov, torch.optim.SGD, torch.float64)
    for step in range(4):
        set_gradients(ours, step, scale=0.1)
        for p, q in zip(ours, exact, strict=True):
            q.grad = None if p.grad is None else p.grad.double()
        used = [q for q in exact if q.grad is not None]
        want = torch.nn.utils.clip_grad_norm_(used, clip or math.inf)
        reference.step()
        norm = optimizer.clipped_step(clip)
        assert norm.dtype == torch.float32 and norm.item() == pytest.approx(want.item(), rel=1e-6)
        for p, q in zip(ours, exact, strict=True):
            assert (p.double() - q).abs().max() <= 1e-6 * q.abs().max()
    for p, q in zip(ours, exact, strict=True):
        assert optimizer.state[p].keys() == reference.state[q].keys()


@needs_triton
def test_it_is_the_kernels_that_update(monkeypatch):
    fused(monkeypatch)
    ours, optimizer = sgd(parameters(0), nesterov=True)
    set_gradients(ours, 1, scale=1.0)
    monkeypatch.setattr(optimizer, "step", lambda: pytest.fail("PyTorch's step"))
    before = [p.detach().clone() for p in ours]
    optimizer.clipped_step(1.0)
    for p, old in zip(ours, before, strict=True):
        assert torch.equal(p, old) == (p.grad is None)


@needs_triton
def test_a_gradient_that_is_not_finite_shows_in_the_norm_and_in_every_parameter(monkeypatch):
    fused(monkeypatch)
    ours, optimizer = sgd(parameters(0), nesterov=False)
    set_gradients(ours, 1, scale=1.0)
    ours[0].grad[1] = math.nan
    assert optimizer.clipped_step(1.0).isnan()
    assert all(p.isnan().all() for p in ours if p.grad is not None)


@needs_triton
def test_other_types_and_strides_go_to_pytorch():
    parameter = torch.nn.Parameter(torch.randn(4, 4, device=DEVICE))
    parameter.grad = torch.randn(4, 4, device=DEVICE).t()
    with pytest.raises(RuntimeError, match="gradients have the same strides"):
        training.clipped_sgd_serves([parameter], [parameter.grad], backend="triton")
    double = torch.nn.Parameter(torch.ones(2, dtype=torch.float64, device=DEVICE))
    double.grad = torch.ones_like(double)
    assert not training.clipped_sgd_serves([double], [double.grad]) and not training.clipped_sgd_serves([], [])


@needs_triton
def test_momentum_that_began_on_pytorch_has_the_strides_of_its_parameter(monkeypatch):
    """A gradient of other strides goes to PyTorch, whose momentum then has these; the next one does not."""
    shape = (4, 3, 3, 3)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape, device=DEVICE)) for _ in range(2))
    optimizer, reference = (
        kind([p], lr=0.3, momentum=0.9) for kind, p in ((ClippedSGD, ours), (torch.optim.SGD, theirs))
    )
    for step in range(3):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        theirs.grad = gradient.clone()
        ours.grad = gradient.to(memory_format=torch.channels_last) if step == 0 else gradient
        reference.step()
        optimizer.clipped_step(None)
        fused(monkeypatch)
        torch.testing.assert_close(ours, theirs)


@needs_triton
def test_where_all_operators_run_on_triton_other_updates_are_pytorchs(monkeypatch):
    fused(monkeypatch)
    monkeypatch.setattr(training, "_MOST_ELEMENTS", 4)
    ours, optimizer = sgd(parameters(0), nesterov=False)
    set_gradients(ours, 1, scale=1.0)
    stepped = []
    monkeypatch.setattr(optimizer, "step", lambda: stepped.append(1))
    optimizer.clipped_step(1.0)
    assert stepped


def test_without_the_kernels_a_step_is_pytorchs_bit_for_bit(monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", "reference")
    results = []
    for clipped in (True, False):
        ours, optimizer = sgd(parameters(0), True, ClippedSGD if clipped else torch.optim.SGD)
        for step in range(3):
            set_gradients(ours, step, scale=1.0)
            if clipped:
                norm = optimizer.clipped_step(0.5)
            else:
                norm = torch.nn.utils.clip_grad_norm_([p for p in ours if p.grad is not None], 0.5)
                optimizer.step()
        results.append((norm, ours, optimizer.state_dict()["state"].keys()))
    (norm, ours, keys), (want, theirs, others) = results
    assert torch.equal(norm, want) and keys == others
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
