"""Fused modules are their plain twins: results, gradients, state and statistics."""

from functools import partial
from itertools import product

import pytest
import torch
from pairs import pairwise
from tolerances import FLOAT32_CHAIN, assert_close
from torch import nn

from nasfast import ops
from nasfast.ops import reference, squeeze
from nasfast.ops.modules import BNAct2d, ConvBNAct, InvertedResidual, SqueezeExcitation

BLOCKS = [
    {"in_channels": cin, "out_channels": cout, "kernel_size": k, "stride": s, "expand": e}
    for (cin, cout), k, s, e in product([(6, 6), (6, 10)], (3, 5, 7), (1, 2), (1, 3))
]


def randomised(block, **settings):
    """A plain block with BatchNorm parameters away from their defaults."""
    module = InvertedResidual(**block, **settings)
    for name, parameter in module.named_parameters():
        if ".bn." in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return module


def results(module, x, grad):
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(grad)
    gradients = {f"d{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y, "dx": x.grad, **gradients, **{n: b for n, b in module.named_buffers() if b.is_floating_point()}}


def check_twins(plain, fused, *, frozen, backend):
    """The fused block has the results and gradients of the plain one in float64; returns its results."""
    fused.load_state_dict(plain.state_dict())
    for module in (plain, fused):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not frozen or ".bn." in name)
    x = torch.randn(3, 6, 9, 8).contiguous(memory_format=torch.channels_last)
    grad = torch.randn_like(plain(x))
    # the forward above moved the statistics of plain only
    plain.load_state_dict(fused.state_dict())
    want = results(plain.double(), x.double(), grad.double())
    with ops.use_backend(backend):
        got = results(fused, x, grad)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], FLOAT32_CHAIN, floor=8.0 if name.startswith("d") else 0.0)
    return got


TWINS = [("cpu", *each) for each in pairwise(BLOCKS, (True, False), (True, False))]
TWINS += [("reference", *each[1:]) for each in TWINS[::8]]


@pytest.mark.parametrize(("backend", "block", "frozen", "training"), TWINS, ids=str)
def test_fused_matches_plain_in_float64(backend, block, frozen, training, native):
    plain, fused = randomised(block, act="tanh"), InvertedResidual(**block, act="tanh", fused=True)
    check_twins(plain.train(training), fused.train(training), frozen=frozen, backend=backend)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trainable"])
@pytest.mark.parametrize(
    ("act", "gate", "expand"), [("relu", "hsigmoid", 3), ("silu", "sigmoid", 2.5), ("tanh", "hsigmoid", 1)]
)
def test_squeeze_and_excitation_matches_float64(act, gate, expand, frozen, backend, monkeypatch):
    """Between the depthwise unit and the projection; also its formula, written out."""
    block = {"in_channels": 6, "out_channels": 6, "kernel_size": 5, "stride": 1, "expand": expand}
    hidden = round(6 * expand)

    monkeypatch.setattr(squeeze, "_MIN_ELEMENTS", 0)
    sums, called = getattr(torch.ops.nasfast, "squeeze_excite_sums", None), []
    record = lambda *arguments: called.append(arguments) or sums(*arguments)  # noqa: E731
    monkeypatch.setattr(torch.ops.nasfast, "squeeze_excite_sums", record, raising=False)
    plain = randomised(block, act="silu", se=SqueezeExcitation(hidden, 8, act=act, gate=gate))
    se = SqueezeExcitation(hidden, 8, act=act, gate=gate, fused=True)
    fused = InvertedResidual(**block, act="silu", se=se, fused=True)
    got = check_twins(plain, fused, frozen=frozen, backend=backend)
    assert bool(called) == (frozen and backend == "cpu") and ("dse.excite.conv.bias" in got) != frozen

    h = torch.randn(3, hidden, 4, 5, dtype=torch.float64)
    w1, b1, w2, b2 = (p.flatten(1) if p.ndim == 4 else p for p in plain.se.parameters())
    z = reference.ACTIVATIONS[act](h.mean((2, 3)) @ w1.T + b1) @ w2.T + b2
    factor = (z / 6 + 0.5).clamp(0, 1) if gate == "hsigmoid" else 1 / (1 + torch.exp(-z))
    torch.testing.assert_close(plain.se(h), h * factor[:, :, None, None], rtol=1e-12, atol=1e-12)


BLOCK = {"kernel_size": 3, "stride": 1, "act": "tanh"}
MADE = [
    partial(ConvBNAct, 5, 6, 3, stride=2, act="tanh"),
    partial(ConvBNAct, 5, 5, 3, groups=5, act="identity"),
    partial(InvertedResidual, 5, 5, expand=1, **BLOCK),
    partial(InvertedResidual, 5, 5, expand=2, **BLOCK),
]


def bns(module):
    return [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]


def check_same(plain, fused, x):
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("make", MADE)
def test_twins_share_state_and_statistics(make, tracked, backend, monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", backend)
    plain = make(track_running_stats=tracked)
    fused = make(track_running_stats=tracked, fused=True)
    assert list(plain.state_dict()) == list(fused.state_dict())
    assert any("running" in name or "tracked" in name for name in plain.state_dict()) == tracked
    fused.load_state_dict(plain.state_dict())
    for momentum in (0.1, None, 0.0):
        for bn in bns(plain) + bns(fused):
            bn.momentum = momentum
        for training in (True, True, False):
            check_same(plain.train(training), fused.train(training), torch.randn(4, 5, 7, 7))


def test_units_in_different_modes_follow_batch_norm(backend, monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", backend)
    plain, fused = (InvertedResidual(5, 5, expand=2, **BLOCK, fused=fused) for fused in (False, True))
    fused.load_state_dict(plain.state_dict())

    def change(module, bn_change):
        bn_change(module.depthwise.bn)
        return module

    changes = [
        lambda bn: bn.eval(),
        lambda bn: setattr(bn, "momentum", None),
        lambda bn: setattr(bn, "eps", 0.1),
        lambda bn: setattr(bn, "track_running_stats", False),
        lambda bn: bn.train(),
    ]
    for bn_change in changes:
        check_same(change(plain, bn_change), change(fused, bn_change), torch.randn(4, 5, 7, 7))


def test_bn_act_module_is_a_batch_norm(backend, monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", backend)
    plain, ours = nn.BatchNorm2d(5), BNAct2d(5, act="relu6")
    assert list(plain.state_dict()) == list(ours.state_dict())
    x, residual = torch.randn(4, 5, 7, 7), torch.randn(4, 5, 7, 7)
    for training, momentum in product((True, False), (0.1, None)):
        for bn in (plain, ours):
            bn.train(training).momentum = momentum
        torch.testing.assert_close(ours(x, residual), plain(x).clamp(0, 6) + residual, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert "act=relu6" in repr(ours)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ConvBNAct(3, 4, 3, act="gelu"),
            "act must be one of identity, relu, relu6, tanh, hswish, silu, got 'gelu'",
        ),
        (lambda: BNAct2d(3, act="gelu"), "act must be one of"),
        (lambda: SqueezeExcitation(8, 8, act="elu"), "act must be one of .*hswish, silu, got 'elu'"),
        (lambda: SqueezeExcitation(8, 8, gate="tanh"), "gate must be one of hsigmoid, sigmoid, got 'tanh'"),
        (lambda: InvertedResidual(3, 4, kernel_size=4, stride=1, expand=3), "kernel_size must be odd, got 4"),
        (lambda: InvertedResidual(3, 4, kernel_size=3, stride=1, expand=0), "expand must be at least 1, got 0"),
    ],
)
def test_wrong_settings_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()
