"""What surrounds a forward of a fused model: autocast, checkpoints, threads, compilers, errors."""

import copy
import threading
import warnings

import pytest
import torch
from fused_models import (
    Body,
    Candidate,
    Fickle,
    added_in_place,
    check_same,
    conv,
    disturb,
    fuse_all,
    make,
    observe,
    set_mode,
    unit,
    whole,
)
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, assert_close
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import nasfast


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that a forward keeps for backward, parameters and the input left out."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    assert y.requires_grad
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("name", ["small mobilenet_v2", "small resnet"])
def test_saves_no_more_for_backward(name):
    plain = set_mode(make(name), "frozen convolutions")
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    x = torch.randn(4, 3, 64, 64)
    # besides values, two float64 numbers per channel instead of two float32 ones
    statistics = sum(8 * m.num_features for m in plain.modules() if isinstance(m, nn.BatchNorm2d))
    assert saved_bytes(fused, x) <= saved_bytes(plain, x) + statistics


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(reentrant, executed):
    plain = disturb(nn.Sequential(Candidate(3), Candidate(5)).double())
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    check_same(observe(Checkpointed(*fused), x), observe(Checkpointed(*plain), x))
    assert executed == [(3, True)] * 4


@pytest.mark.parametrize("tolerance", [FLOAT32_CHAIN, BFLOAT16_CHAIN], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [conv(4, 4, 1), conv(4, 4, 3, padding=1)], ids=str)
def test_recomputation_changes_statistics_too(layer, tolerance, executed):
    """It ends as soon as everything was saved again; the chain is the last that saves."""
    dtype = torch.float32 if tolerance is FLOAT32_CHAIN else torch.bfloat16
    plain = nn.Sequential(copy.deepcopy(layer).requires_grad_(False), disturb(nn.BatchNorm2d(4)))
    plain.to(dtype)
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    for model in (plain, fused):
        for scale in (1, 2, 5):
            x = torch.arange(200, dtype=dtype).sin().reshape(2, 4, 5, 5) * scale
            checkpoint(model, x + scale, use_reentrant=False).sum().backward()
    assert executed == [(1, False)] * 6
    for name, buffer in plain.named_buffers():
        assert_close(name, fused.get_buffer(name), buffer.double(), tolerance)


def test_autocast(executed):
    plain = set_mode(disturb(make("small mobilenet_v2")), "frozen convolutions").eval()
    fused = copy.deepcopy(plain)
    report = fuse_all(fused)
    x = torch.randn(2, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = plain(x), fused(x)
    assert got.dtype == want.dtype == torch.bfloat16
    assert sum(stages for stages, _ in executed) == report.fused
    assert_close("autocast", got, want.double(), BFLOAT16_CHAIN)


def test_residual_types():
    """In place the result keeps the type of the chain; otherwise types promote."""
    for forward, dtype in ((added_in_place, torch.bfloat16), (lambda m, x: whole(m, x) + x, torch.float32)):
        model = Body(forward)
        fuse_all(model)
        x = torch.randn(2, 4, 9, 9)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == dtype


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_without_gradients(scope, executed):
    plain = disturb(nn.Sequential(Candidate(3), unit()).double())
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    with scope():
        want, got = plain(x), fused(x)
    assert not got.requires_grad
    assert got.is_inference() == want.is_inference()
    assert_close("result", got, want)
    check_same(dict(fused.named_buffers()), dict(plain.named_buffers()))
    assert executed == [(3, True), (1, False)]


@pytest.mark.parametrize(
    "x",
    [torch.randn(1, 4, 1, 1), torch.randn(2, 3, 9, 9), torch.randn(4, 9, 9)],
    ids=["one value per channel", "wrong channels", "no batch"],
)
def test_errors_are_those_of_the_model(x):
    plain = nn.Sequential(unit(), unit())
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    with pytest.raises((ValueError, RuntimeError)) as want:
        plain(x)
    with pytest.raises(want.type) as got:
        fused(x)
    assert str(got.value) == str(want.value)


def test_an_input_that_is_changed_in_place_meanwhile():
    class Changing(Fickle):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv1(x)
            if self.way == "change":
                x.zero_()
            return self.bn1(y)

    plain = Changing().requires_grad_(False)
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    plain.way = fused.way = "change"
    want, got = (model(torch.ones(2, 4, 9, 9)) for model in (plain, fused))
    torch.testing.assert_close(got, want)


def test_tracers_see_the_plain_model(executed):
    model = nn.Sequential(unit(), unit()).eval()
    fuse_all(model)
    x = torch.randn(2, 4, 9, 9)
    want = model(x)
    executed.clear()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), want)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.jit.trace(model, x, check_trace=False)(x), want)
    assert executed == []


def test_functional_parameters(executed):
    model = nn.Sequential(unit(), unit()).double().eval()
    fuse_all(model)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    other = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    got = torch.func.functional_call(model, other, (x,))
    assert len(executed) == 1
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sin().sum())(other)
    assert len(executed) == 1
    nasfast.unfuse(model)
    assert_close("result", got, torch.func.functional_call(model, other, (x,)))
    want = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sin().sum())(other)
    check_same(gradients, want)


@pytest.mark.parametrize("training", [True, False])
def test_forward_mode_gradients(training, executed):
    model = disturb(nn.Sequential(unit())).requires_grad_(False).train(training)
    fuse_all(model)
    x, direction = torch.randn(2, 2, 4, 5, 5)
    results = []
    for _ in range(2):
        with forward_ad.dual_level():
            results.append(forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction))).tangent)
        nasfast.unfuse(model)
    assert executed == []
    assert_close("tangent", *results)


def test_two_threads(executed):
    model = nn.Sequential(Candidate(3), Candidate(5)).double().eval()
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    want = model(x)
    fuse_all(model)
    results = []
    threads = [threading.Thread(target=lambda: results.extend(model(x) for _ in range(20))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    for result in results:
        assert_close("result", result, want)


def test_report_as_text(monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", "reference")
    model = nn.Sequential(unit(nn.GELU()), unit(padding_mode="reflect"), unit(dilation=2), Candidate(5)).requires_grad_(
        False
    )
    model[3].expand.requires_grad_()
    assert str(fuse_all(model)) == (
        "5 of 6 convolutions are in 3 chains that can run fused; backend: reference (float32 on cpu)\n"
        "no forward has run yet; what is expected:\n"
        "  0  3x3 4->4: fused\n"
        "  1  3x3 4->4 relu: fused\n"
        "  3  1x1 4->8 relu6, dw5x5 8 relu6, 1x1 8->4, + residual: fused\n"
        "not fused:\n"
        "  Conv2d: has dilation=(2, 2): 2.0\n"
        "  BatchNorm2d: not behind a fused convolution: 2.1\n"
        "note: 1 convolution in chains will train, so a fused chain keeps the inputs for backward, as PyTorch does; to "
        "save that memory, freeze with requires_grad_(False): 3.expand\n"
        "note: 1 convolution in chains on PyTorch's convolution, because the fused operator has no such convolution: "
        "1.0"
    )
    monkeypatch.setenv("NASFAST_BACKEND", "cuda")
    assert "backend: none (float32 on cpu: conv_bn_act_chain: backend 'cuda'" in str(fuse_all(model))
    assert str(fuse_all(nn.Linear(2, 2))).startswith(
        "0 of 0 convolutions are in 0 chains that can run fused; backend: none"
    )
