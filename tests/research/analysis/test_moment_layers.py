"""Layers and networks that carry signal and noise: torch's own derivatives, moments of known signals, the theorems."""

from __future__ import annotations

import math

import pytest
import torch
from pairs import pairwise
from torch import Tensor
from torch.nn import functional as F

from nasfast.research.analysis.moments.networks import Draws, NetConfig, fields, gaussian, propagate
from nasfast.research.analysis.moments.pairs import (
    Pair,
    act,
    batch_norm,
    conv,
    effective_rank,
    energies,
    shape,
)

R, B, C = 2, 6, 4


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


NORMS = {"none": lambda x, eps: x, "batch": detached_bn, "layer": lambda x, eps: F.group_norm(x, 1, eps=eps)}


def linear(x: Tensor, weight: Tensor, mode: str, stride: int = 1) -> Tensor:
    if weight.ndim == 2:
        return x @ weight.T
    pad = weight.shape[-1] // 2
    return F.conv2d(F.pad(x, (pad,) * 4, mode=mode), weight, stride=stride)


def test_shifted_borders_are_a_translation():
    generator = torch.Generator().manual_seed(0)
    pair = Pair.of(*torch.randn(2, B, R, C, 5, 5, generator=generator))
    weight = torch.randn(R, 3, C, 3, 3, generator=generator)
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


@pytest.mark.parametrize(
    ("norm", "residual", "kernel", "act", "padding"),
    pairwise(list(NORMS), [0, 2], [0, 3], ["tanh", "relu"], ["periodic", "zero"]),
)
def test_networks_against_forward_mode_and_differences(norm, residual, kernel, act, padding):
    """Depth 5, the whole function at once: places, order of layers and scales, as torch's jvp of the same network."""
    cfg = NetConfig(norm=norm, residual=residual, kernel=kernel, act=act, padding=padding, sigma_b=0.3)
    cfg = cfg.replace(width=5, depth=5, batch=B, every=1)
    draws = Noted(0, range(R), torch.float64)
    start = draws.inputs(fields(2, 8) if kernel else gaussian(6), B)
    *_, last = propagate(cfg, draws, start)
    got = last["sum" if residual else "act"]
    activation, mode = getattr(torch, act), {"periodic": "circular", "zero": "constant"}[padding]

    def network(x: Tensor, r: int) -> Tensor:
        drawn = iter(draws.kept)
        x = linear(x, next(drawn)[r], mode, stride=2 if kernel else 1)

        def layer(y: Tensor) -> Tensor:
            bias, weight = next(drawn)[r], next(drawn)[r]
            return linear(y, weight, mode) + bias.view(-1, *(1,) * (y.ndim - 2))

        for _ in range(cfg.depth):
            y = x
            for _ in range(residual or 1):
                if residual:
                    y = layer(activation(NORMS[norm](y, cfg.eps)))
                else:
                    y = activation(NORMS[norm](layer(y), cfg.eps))
            x = x + y if residual else y
        return x

    want = per_realisation(start, network)
    torch.testing.assert_close(got.x, want.x, rtol=1e-10, atol=1e-12)
    noise = got.dx * got.channels((got.log_scale / 2).exp()[:, None])
    torch.testing.assert_close(noise, want.dx, rtol=1e-10, atol=1e-12)
    if (norm, act) == ("none", "tanh"):
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
