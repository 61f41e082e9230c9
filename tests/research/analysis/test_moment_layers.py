"""Layers and networks that carry signal and noise: torch's own derivatives, moments of known signals, the theorems."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.research.analysis.moments.networks import Draws, NetConfig, fields, gaussian, propagate
from nasfast.research.analysis.moments.pairs import (
    Pair,
    act,
    add,
    batch_norm,
    conv,
    effective_rank,
    energies,
    layer_norm,
    rescale,
    shape,
)

R, B, C = 2, 6, 4


SHAPES = {"fc": (), "conv": (5, 5)}


def pair_of(kind: str, *, channels: int = C, seed: int = 0) -> Pair:
    x, dx = torch.randn(2, B, R, channels, *SHAPES[kind], generator=torch.Generator().manual_seed(seed)).double()
    return Pair.of(x, dx)


def weights(kind: str, out: int = 3, kernel: int = 3) -> Tensor:
    size = (kernel, kernel) if kind == "conv" else ()
    return torch.randn(R, out, C, *size, generator=torch.Generator().manual_seed(1)).double()


def per_realisation(pair: Pair, function) -> Pair:
    """What torch's own forward mode makes of the same function of (B, C, ...), for every realisation."""
    results = [
        torch.func.jvp(lambda x, r=r: function(x, r), (pair.x[:, r],), (pair.dx[:, r],)) for r in range(pair.x.shape[1])
    ]
    return Pair.of(*(torch.stack(tensors, 1) for tensors in zip(*results, strict=True)))


def detached_bn(x: Tensor, eps: float) -> Tensor:
    over = [d for d in range(x.ndim) if d != 1]
    variance, mean = torch.var_mean(x.detach(), over, correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps)


def circular(x: Tensor, weight: Tensor, mode: str = "circular", stride: int = 1) -> Tensor:
    if weight.ndim == 2:
        return x @ weight.T
    pad = weight.shape[-1] // 2
    return F.conv2d(F.pad(x, (pad,) * 4, mode=mode), weight, stride=stride)


def assert_same(got: Pair, want: Pair) -> None:
    torch.testing.assert_close(got.x, want.x, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.dx * (got.log_scale[0] / 2).exp(), want.dx, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("layer", "function"),
    [
        (lambda p: batch_norm(p, 1e-3), lambda x: detached_bn(x, 1e-3)),
        (lambda p: layer_norm(p, 1e-3), lambda x: F.group_norm(x, 1, eps=1e-3)),
        (lambda p: act(p, "relu"), torch.relu),
        (lambda p: act(p, "relu6"), F.relu6),
        (lambda p: act(p, "tanh"), torch.tanh),
        (lambda p: act(p, "identity"), lambda x: 1 * x),
        (lambda p: add(p, act(p, "tanh")), lambda x: x + torch.tanh(x)),
        (rescale, lambda x: 1 * x),
    ],
    ids=["batch", "layer", "relu", "relu6", "tanh", "identity", "add", "rescale"],
)
def test_layers_against_forward_mode(kind, layer, function):
    pair = pair_of(kind)
    if layer is rescale:
        pair = Pair(pair.v.clone(), pair.log_scale)
    want = per_realisation(pair, lambda x, r: function(x))
    got = layer(pair)
    torch.testing.assert_close(got.x, want.x, rtol=1e-10, atol=1e-12)
    noise = got.dx * got.channels((got.log_scale / 2).exp()[:, None])
    torch.testing.assert_close(noise, want.dx, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("padding", "mode"), [("periodic", "circular"), ("zero", "constant"), ("reflective", "reflect")]
)
def test_convolutions(padding, mode, stride):
    pair, weight = pair_of("conv"), weights("conv")
    bias = torch.randn(R, 3).double()
    want = per_realisation(pair, lambda x, r: circular(x, weight[r], mode, stride) + bias[r].reshape(-1, 1, 1))
    assert_same(conv(pair, weight, bias, stride=stride, padding=padding), want)


def test_shifted_borders_are_a_translation():
    pair, weight = pair_of("conv"), weights("conv")
    centred, shifted = conv(pair, weight), conv(pair, weight, padding="shifted")
    torch.testing.assert_close(shifted.v, centred.v.roll((1, 1), (-2, -1)))


class Noted(Draws):
    """Draws whose weights are kept, to build the same network with torch alone."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.kept: list[Tensor] = []

    def normal(self, *size: int, std: float = 1.0) -> Tensor:
        self.kept.append(super().normal(*size, std=std))
        return self.kept[-1]


@pytest.mark.parametrize("residual", [0, 2])
@pytest.mark.parametrize("kernel", [0, 3])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_networks_against_forward_mode_and_differences(residual, kernel, norm):
    """Depth 5, the whole function at once: places, order of layers and scales, as torch's jvp of the same network."""
    cfg = NetConfig(norm=norm, residual=residual, kernel=kernel, width=5, depth=5, batch=B, every=1, act="tanh")
    draws = Noted(0, range(R), torch.float64)
    start = draws.inputs(fields(2, 8) if kernel else gaussian(6), B)
    *_, last = propagate(cfg, draws, start)
    got = last["sum" if residual else "act"]

    def network(x: Tensor, r: int) -> Tensor:
        layers = iter(draws.kept)
        x = circular(x, next(layers)[r], stride=2 if kernel else 1)
        normal = (lambda y: detached_bn(y, cfg.eps)) if norm == "batch" else (lambda y: y)
        for _ in range(cfg.depth):
            y = x
            for _ in range(residual or 1):
                if residual:
                    y = circular(torch.tanh(normal(y)), next(layers)[r])
                else:
                    y = torch.tanh(normal(circular(y, next(layers)[r])))
            x = x + y if residual else y
        return x

    want = per_realisation(start, network)
    torch.testing.assert_close(got.x, want.x, rtol=1e-10, atol=1e-12)
    noise = got.dx * got.channels((got.log_scale / 2).exp()[:, None])
    torch.testing.assert_close(noise, want.dx, rtol=1e-10, atol=1e-12)
    if norm == "none":
        step = 1e-6
        moved = [network(start.x[:, 0] + s * start.dx[:, 0], 0) for s in (step, -step)]
        torch.testing.assert_close((moved[0] - moved[1]) / (2 * step), want.dx[:, 0], rtol=1e-5, atol=1e-8)


def test_moments_of_known_signals():
    x = torch.tensor([[1.0, 4.0], [-1.0, 4.0], [3.0, 4.0], [-3.0, 4.0]]).double()[:, None]
    pair = Pair(torch.stack((x, 2 * x)), torch.tensor([math.log(9.0)]).double())
    found = {k: float(v) for k, v in energies(pair).items()}
    assert found["log_nu2_signal"] == pytest.approx(math.log((5 + 16) / 2))
    assert found["log_mu2_signal"] == pytest.approx(math.log(5 / 2))
    assert found["log_mu2_noise"] == pytest.approx(math.log(9 * 4 * (5 + 16) / 2))
    found = {k: float(v) for k, v in shape(pair).items()}
    assert found["mu4_signal"] == pytest.approx((41 + 0) / 2)
    assert found["nu1_abs_signal"] == pytest.approx((2 + 4) / 2)
    assert found["nu1_abs_squared_signal"] == pytest.approx((4 + 16) / 2)
    # the second channel is always on
    assert found["pseudo_linear"] == pytest.approx((0.5 + 0) / 2)


@pytest.mark.parametrize(("rows", "columns"), [(40, 7), (7, 40)])
def test_effective_rank_of_a_known_spectrum(rows, columns):
    values = torch.tensor([4.0, 2.0, 1.0, 1.0]).double()
    left = torch.linalg.qr(torch.cat((torch.ones(rows, 1), torch.randn(rows, 4)), 1).double())[0][:, 1:]
    right = torch.linalg.qr(torch.randn(columns, 4).double())[0]
    # singular values are roots; columns of `left` have mean 0, and a constant vector is taken off
    x = left @ torch.diag(values.sqrt()) @ right.T + torch.randn(columns)
    assert float(effective_rank(x[:, None])) == pytest.approx(8 / 4, rel=1e-6)
    images = x.reshape(rows, 1, columns).repeat(1, 2, 1)
    images[:, 1] = 0
    found = effective_rank(images)
    assert float(found[0]) == pytest.approx(2, rel=1e-6) and math.isnan(found[1])


def test_chi_is_the_gradient_relative_to_that_of_a_rescaling():
    """chi = [E |J|_F^2 / dim]^{1/2} / [mu_2(y) / mu_2(x)]^{1/2} (spec section 2), with the exact Jacobian."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()).double()
    x = torch.randn(8, 12).double()
    jacobians = torch.func.vmap(torch.func.jacrev(net))(x)
    y = net(x).detach()
    frobenius = float(jacobians.detach().square().sum((1, 2)).mean() / 16)
    expected = math.sqrt(frobenius / float(y.var(0, correction=0).mean() / x.var(0, correction=0).mean()))
    found = []
    for _ in range(300):
        dx = torch.randn(8, 12).double()
        pair = conv(Pair.of(x[:, None], dx[:, None]), net[0].weight[None].detach(), net[0].bias[None].detach())
        pair = conv(act(pair, "relu"), net[2].weight[None].detach(), net[2].bias[None].detach())
        end, start = energies(act(pair, "relu")), energies(Pair.of(x[:, None], dx[:, None]))
        found.append(float((end["log_mu2_noise"] - end["log_mu2_signal"] + start["log_mu2_signal"]).exp()))
    assert math.sqrt(np.mean(found)) == pytest.approx(expected, rel=0.05)


def one_layer(norm: str, *, draws: int, channels: int = 24, batch: int = 48) -> dict[str, float]:
    """One ReLU layer behind a fixed signal and noise of uneven spectrum: averages over draws of its weights."""
    generator = torch.Generator().manual_seed(5)
    spectrum = torch.linspace(0.3, 2, channels)
    x = (torch.randn(batch, channels, generator=generator) * spectrum).relu().double()
    dx = torch.randn(batch, channels, generator=generator).double()
    weight = torch.randn(draws, 256, channels, generator=generator).double() * math.sqrt(2 / channels)
    pair = Pair.of(*(t[:, None].expand(-1, draws, -1) for t in (x, dx)))
    y = conv(pair, weight)
    z = batch_norm(y, 0.0) if norm == "batch" else y
    # chi^2 from expectations over weights
    places = {"in": pair, "z": z, "out": act(z, "relu")}
    mean = {name: {k: float(v.exp().mean()) for k, v in energies(p).items()} for name, p in places.items()}
    chi2 = {name: found["log_mu2_noise"] / found["log_mu2_signal"] for name, found in mean.items()}
    plus, minus = (t.mean(0) for t in (y.x.clamp_min(0), (-y.x).clamp_min(0)))
    ratio = float((y.dx.square().mean(0) / y.x.var(0, correction=0)).mean())
    return {
        "inc": math.sqrt(chi2["out"] / chi2["in"]),
        "vanilla": (1 - float((plus * minus).mean()) / mean["in"]["log_mu2_signal"]) ** -0.5,
        "bn": math.sqrt(chi2["z"] / chi2["in"]),
        "bn_formula": math.sqrt(ratio / chi2["in"]),
        "phi": math.sqrt(chi2["out"] / chi2["z"]),
        "phi_formula": (1 - float(shape(z)["nu1_abs_squared_signal"].mean()) / 2) ** -0.5,
    }


def test_theorem_2():
    found = one_layer("none", draws=400)
    assert found["inc"] == pytest.approx(found["vanilla"], rel=5e-3)
    assert 1 < found["inc"] < math.sqrt(2)


def test_theorem_3():
    found = one_layer("batch", draws=400)
    assert found["bn"] == pytest.approx(found["bn_formula"], rel=5e-3)
    assert found["phi"] == pytest.approx(found["phi_formula"], rel=5e-3)
    assert found["bn"] > 1 and 1 < found["phi"] < math.sqrt(2)


def test_theorem_1_of_a_rank_one_signal():
    """All inputs alike: log nu_2 drifts by 5 / (2 N) and diffuses with variance 5 / N per layer."""
    width, depth = 64, 60
    cfg = NetConfig(width=width, depth=depth, batch=2, every=depth)
    draws = Draws(0, range(600))
    one = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0))
    pair = Pair.of(*(one.expand(1, 600, 8) for _ in range(2)))
    first = None
    for places in propagate(cfg, draws, pair):
        first = energies(places["input"])["log_nu2_signal"] if first is None else first
    logs = energies(places["act"])["log_nu2_signal"] - first
    assert float(logs.mean()) == pytest.approx(-2.5 * depth / width, rel=0.1)
    assert float(logs.std()) == pytest.approx(math.sqrt(5 * depth / width), rel=0.08)
