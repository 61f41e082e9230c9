from itertools import product

import pytest
import torch
from pairs import pairwise
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, assert_close
from torch.profiler import ProfilerActivity, profile

from nasfast import ops
from nasfast.ops import reference, squeeze
from nasfast.ops.modules import FusedInvertedResidual, FusedSqueezeExcitation, InvertedResidual, SqueezeExcitation

BLOCKS = [
    {"in_channels": cin, "out_channels": cout, "kernel_size": k, "stride": s, "expand": e}
    for (cin, cout), k, s, e in product([(6, 6), (6, 10)], (3, 5, 7), (1, 2), (1, 3))
]


def block_id(block):
    if isinstance(block, bool):
        return str(block)
    return "{in_channels}to{out_channels}-k{kernel_size}-s{stride}-e{expand}".format(**block)


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


def twin(module, block, backend_class=FusedInvertedResidual, **settings):
    fused = backend_class(**block, **settings)
    fused.load_state_dict(module.state_dict())
    for p, q in zip(module.parameters(), fused.parameters(), strict=True):
        q.requires_grad_(p.requires_grad)
    return fused


@pytest.mark.parametrize(
    ("block", "frozen", "training"), pairwise(BLOCKS, (True, False), (True, False)), ids=lambda value: block_id(value)
)
def test_fused_matches_plain_in_float64(block, frozen, training, backend):
    plain = randomised(block, act="tanh").train(training)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not frozen or ".bn." in name)
    fused = twin(plain, block, act="tanh").train(training)
    x = torch.randn(3, block["in_channels"], 9, 8).contiguous(memory_format=torch.channels_last)
    grad = torch.randn_like(plain(x))
    # the forward above moved the statistics of plain only
    plain.load_state_dict(fused.state_dict())
    want = results(plain.double(), x.double(), grad.double())
    with ops.use_backend(backend):
        got = results(fused, x, grad)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], FLOAT32_CHAIN, floor=8.0 if name.startswith("d") else 0.0)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trainable"])
@pytest.mark.parametrize(
    ("act", "gate", "expand"), [("relu", "hsigmoid", 3), ("silu", "sigmoid", 2.5), ("tanh", "hsigmoid", 1)]
)
def test_squeeze_and_excitation_matches_float64(act, gate, expand, frozen, backend, monkeypatch):
    """Between the depthwise unit and the projection; also its formula, written out."""
    block = {"in_channels": 6, "out_channels": 6, "kernel_size": 5, "stride": 1, "expand": expand}
    hidden = round(6 * expand)

    monkeypatch.setattr(squeeze, "_MIN_ELEMENTS", 0)
    plain = randomised(block, act="silu", se=SqueezeExcitation(hidden, 8, act=act, gate=gate))
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not frozen or ".bn." in name)
    fused = twin(plain, block, act="silu", se=FusedSqueezeExcitation(hidden, 8, act=act, gate=gate))
    x = torch.randn(3, 6, 9, 8).contiguous(memory_format=torch.channels_last)
    grad = torch.randn_like(plain(x))
    plain.load_state_dict(fused.state_dict())
    want = results(plain.double(), x.double(), grad.double())
    with ops.use_backend(backend), profile(activities=[ProfilerActivity.CPU]) as recorded:
        got = results(fused, x, grad)
    called = any(event.key == "nasfast::squeeze_excite_sums" for event in recorded.key_averages())
    assert called == (frozen and backend == "cpu")
    assert got.keys() == want.keys() and ("dse.excite.conv.bias" in got) != frozen
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], FLOAT32_CHAIN, floor=8.0 if name.startswith("d") else 0.0)

    h = torch.randn(3, hidden, 4, 5, dtype=torch.float64)
    w1, b1, w2, b2 = (p.flatten(1) if p.ndim == 4 else p for p in plain.se.parameters())
    z = reference.ACTIVATIONS[act](h.mean((2, 3)) @ w1.T + b1) @ w2.T + b2
    factor = (z / 6 + 0.5).clamp(0, 1) if gate == "hsigmoid" else 1 / (1 + torch.exp(-z))
    torch.testing.assert_close(plain.se(h), h * factor[:, :, None, None], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", BLOCKS[:2], ids=block_id)
def test_autocast_is_no_worse_than_eager(block, backend):
    plain = randomised(block, act="tanh")
    fused = twin(plain, block, act="tanh")
    exact = InvertedResidual(**block, act="tanh").double()
    exact.load_state_dict(plain.state_dict())
    x = torch.randn(4, block["in_channels"], 12, 12).contiguous(memory_format=torch.channels_last)
    grad = torch.randn_like(plain(x))
    plain.load_state_dict(fused.state_dict())
    want = results(exact, x.double(), grad.double())
    with torch.autocast("cpu", torch.bfloat16), ops.use_backend(backend):
        ours, eager = results(fused, x, grad), results(plain, x, grad)
    for name in ("y", "dx"):
        assert_close(name, ours[name], want[name], BFLOAT16_CHAIN)
        # 10 %: both round at random, in other places
        assert (ours[name] - want[name]).norm() <= 1.1 * (eager[name] - want[name]).norm(), name
