from itertools import product

import pytest
import torch
from torch import nn

from nasfast.ops.modules import (
    BNAct2d,
    ConvBNAct,
    FusedConvBNAct,
    FusedInvertedResidual,
    InvertedResidual,
    SqueezeExcitation,
)


def pairs():
    """Plain modules and their fused twins, the twin loaded from the plain one."""
    yield ConvBNAct, FusedConvBNAct, lambda cls, **kw: cls(5, 6, 3, stride=2, act="tanh", **kw)
    yield ConvBNAct, FusedConvBNAct, lambda cls, **kw: cls(5, 5, 3, groups=5, act="identity", **kw)
    for expand in (1, 2):
        yield (
            InvertedResidual,
            FusedInvertedResidual,
            lambda cls, expand=expand, **kw: cls(5, 5, kernel_size=3, stride=1, expand=expand, act="tanh", **kw),
        )


PAIRS = list(pairs())


def bns(module):
    return [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]


def check_same(plain, fused, x):
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize(("plain_class", "fused_class", "make"), PAIRS)
def test_twins_share_state_and_statistics(plain_class, fused_class, make, tracked, backend, monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", backend)
    plain = make(plain_class, track_running_stats=tracked)
    fused = make(fused_class, track_running_stats=tracked)
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
    block = {"kernel_size": 3, "stride": 1, "expand": 2, "act": "tanh"}
    plain, fused = InvertedResidual(5, 5, **block), FusedInvertedResidual(5, 5, **block)
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


def test_shapes_and_attributes():
    block = InvertedResidual(6, 6, kernel_size=5, stride=1, expand=3)
    assert block.hidden_channels == 18 and block.has_residual
    assert type(block.project.act) is nn.Identity and type(block.expand.act) is nn.ReLU6
    strided = InvertedResidual(6, 8, kernel_size=7, stride=2, expand=1)
    assert strided.expand is None and not strided.has_residual
    assert strided(torch.randn(2, 6, 9, 8)).shape == (2, 8, 5, 4)


def test_plain_modules_call_no_nasfast_operator(monkeypatch):
    from nasfast.ops import modules

    def forbidden(*args, **kwargs):
        raise AssertionError("a plain module called a nasfast operator")

    for name in ("bn_act", "conv_bn_act_chain"):
        monkeypatch.setattr(modules, name, forbidden)
    InvertedResidual(6, 6, kernel_size=3, stride=1, expand=3)(torch.randn(2, 6, 5, 5))
    with pytest.raises(AssertionError):
        FusedInvertedResidual(6, 6, kernel_size=3, stride=1, expand=3)(torch.randn(2, 6, 5, 5))


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
