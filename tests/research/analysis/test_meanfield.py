"""Mean field against independent quadrature, closed forms and sampled networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from nasfast.ops import reference
from nasfast.research.analysis.meanfield import (
    ACTIVATIONS,
    slope_moment,
    spectrum_moments,
    variance_map,
)
from nasfast.supernet.init import GAINS


def quad(function, points=(0.0,)) -> float:
    """E function(z), z normal, by adaptive quadrature between the points."""
    ends = [-12.0, *sorted(p for p in points if abs(p) < 12), 12.0]
    density = lambda z: function(z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    options = {"epsabs": 1e-14, "epsrel": 1e-13, "limit": 500}
    return sum(integrate.quad(density, a, b, **options)[0] for a, b in zip(ends, ends[1:], strict=False))


def test_activations_agree_with_the_operators():
    x = np.linspace(-9, 9, 1001)
    assert ACTIVATIONS.keys() == reference.ACTIVATIONS.keys()
    for name, act in ACTIVATIONS.items():
        leaf = torch.tensor(x, requires_grad=True)
        value = reference.ACTIVATIONS[name](leaf)
        np.testing.assert_allclose(act.value(x), value.detach().numpy(), atol=1e-15)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        kink = np.isin(x, [0.0, *act.kinks])
        np.testing.assert_allclose(act.slope(x)[~kink], slope.numpy()[~kink], atol=1e-15)


@pytest.mark.parametrize("q", [1e-8, 0.04, 1.0, 16.0, 100.0])
@pytest.mark.parametrize("name", ["tanh", "relu", "relu6"])
def test_expectations_against_adaptive_quadrature(name, q):
    act, scale = ACTIVATIONS[name], math.sqrt(q)
    at = lambda f: quad(lambda z: float(f(np.array(scale * z))), (0.0, 0.1, 6 / scale))  # noqa: E731
    assert variance_map(name, q, 1.0, 0.0) == pytest.approx(at(lambda x: act.value(x) ** 2), rel=1e-8)
    assert slope_moment(name, q, 1) == pytest.approx(at(lambda x: act.slope(x) ** 2), rel=1e-8)
    assert slope_moment(name, q, 2) == pytest.approx(at(lambda x: act.slope(x) ** 4), rel=1e-8)


@pytest.mark.parametrize(
    ("q", "sigma_w2", "sigma_b2", "varphi"),
    [
        (0.1, 1.177569, 0.000832, 0.039709),
        (0.5, 1.687975, 0.038041, 0.299244),
        (1.0, 2.153303, 0.150965, 0.583480),
    ],
)
def test_tanh_critical_line(q, sigma_w2, sigma_b2, varphi):
    """Points of the line chi = 1 that are fixed points of the variance, and the spectra there."""
    sigma_w = math.sqrt(sigma_w2)
    assert variance_map("tanh", q, sigma_w, math.sqrt(sigma_b2)) == pytest.approx(q, abs=1e-5)
    for depth in (1, 30):
        phi, found = spectrum_moments("tanh", q, sigma_w, depth, orthogonal=True)
        assert (phi, found) == pytest.approx((1, depth * varphi), rel=1e-4)
        _, gaussian = spectrum_moments("tanh", q, sigma_w, depth, orthogonal=False)
        assert gaussian == pytest.approx(depth * (varphi + 1), rel=1e-4)


def test_gains_are_those_of_the_critical_point_without_biases():
    for name, g in GAINS.items():
        assert float(slope_moment(name, 1e-20, 1)) ** -0.5 == pytest.approx(g, abs=1e-12)


def network(depth: int, width: int, sigma_w: float, orthogonal: bool) -> list[torch.Tensor]:
    draws = [torch.randn(width, width, dtype=torch.float64) for _ in range(depth)]
    return [
        sigma_w * (q if orthogonal else z / math.sqrt(width))
        for q, z in zip(reference.orthogonalize(draws) if orthogonal else draws, draws, strict=True)
    ]


@pytest.mark.parametrize("orthogonal", [False, True])
def test_moments_of_half_linear_networks(orthogonal):
    """Eq. 8 of DI-NAS (Gaussian) and its orthogonal twin, with p = 1/2 (ReLU), against sampled Jacobians."""
    p, depth, width, draws = 0.5, 8, 256, 20
    m1, m2 = [], []
    for _ in range(draws):
        jacobian = torch.eye(width, dtype=torch.float64)
        for weight in network(depth, width, 1.0, orthogonal):
            jacobian = (torch.rand(width, 1) < p) * (weight @ jacobian)
        gram = jacobian @ jacobian.T
        m1.append(gram.trace().item() / width)
        m2.append(gram.square().sum().item() / width)
    m1, m2 = sum(m1) / draws, sum(m2) / draws
    phi, varphi = spectrum_moments("relu", 1.0, 1.0, depth, orthogonal=orthogonal)
    assert phi == pytest.approx(p**depth)
    assert varphi / phi**2 == pytest.approx(depth * (1 - p) / p if orthogonal else depth / p)
    assert m1 == pytest.approx(phi, rel=0.1)
    assert (m2 / m1**2 - 1) == pytest.approx(varphi / phi**2, rel=0.15)


def test_errors_say_what_was_given():
    with pytest.raises(
        ValueError, match="unknown activation 'swish'; valid: hswish, identity, relu, relu6, silu, tanh"
    ):
        slope_moment("swish", 1.0, 1)
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        spectrum_moments("relu", 1.0, 1.0, 0, orthogonal=True)
