"""Layers and networks that carry signal and noise: torch's own derivatives, and moments of known signals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.research.analysis.moments.networks import Draws, NetConfig, fields, gaussian, propagate
from nasfast.research.analysis.moments.pairs import (
    Pair,
    conv,
    effective_rank,
    energies,
    shape,
)

R, B, C = 2, 6, 4


def pair_of() -> Pair:
    x, dx = torch.randn(2, B, R, C, 5, 5, generator=torch.Generator().manual_seed(0)).double()
    return Pair.of(x, dx)


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


PADDINGS = {"periodic": "circular", "zero": "constant", "reflective": "reflect"}
"""Padding of a network -> torch's name."""


def convolved(x: Tensor, weight: Tensor, padding: str, stride: int = 1) -> Tensor:
    if weight.ndim == 2:
        return x @ weight.T
    pad = weight.shape[-1] // 2
    return F.conv2d(F.pad(x, (pad,) * 4, mode=PADDINGS[padding]), weight, stride=stride)


def test_shifted_borders_are_a_translation():
    pair, weight = pair_of(), torch.randn(R, 3, C, 3, 3).double()
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
@pytest.mark.parametrize(
    ("kernel", "padding"), [(0, "periodic"), (3, "periodic"), (3, "zero"), (3, "reflective")], ids=str
)
@pytest.mark.parametrize(("norm", "act"), [("none", "tanh"), ("batch", "relu"), ("layer", "tanh")])
def test_networks_against_forward_mode_and_differences(residual, kernel, padding, norm, act):
    """Depth 5, the whole function at once: places, order of layers and scales, as torch's jvp of the same network."""
    size = {"kernel": kernel, "padding": padding, "width": 5, "depth": 5, "batch": B, "every": 1}
    cfg = NetConfig(norm=norm, residual=residual, act=act, sigma_b=0.1, **size)
    draws = Noted(0, range(R), torch.float64)
    start = draws.inputs(fields(2, 8) if kernel else gaussian(6), B)
    *_, last = propagate(cfg, draws, start)
    got = last["sum" if residual else "act"]

    def network(x: Tensor, r: int) -> Tensor:
        layers = iter(draws.kept)
        x = convolved(x, next(layers)[r], padding, stride=2 if kernel else 1)

        def linear(x: Tensor) -> Tensor:
            bias, weight = next(layers)[r], next(layers)[r]
            return convolved(x, weight, padding) + bias.reshape(-1, *(1,) * (x.ndim - 2))

        normal = {
            "none": lambda y: y,
            "batch": lambda y: detached_bn(y, cfg.eps),
            "layer": lambda y: F.group_norm(y, 1, eps=cfg.eps),
        }[norm]
        unit = getattr(torch, act)
        for _ in range(cfg.depth):
            y = x
            for _ in range(residual or 1):
                y = linear(unit(normal(y))) if residual else unit(normal(linear(y)))
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
