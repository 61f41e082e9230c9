"""Mean field against published values, independent quadrature, closed forms and sampled networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from nasfast.ops import reference
from nasfast.research.analysis.meanfield import relative_gain, slope_moment, spectrum_moments
from nasfast.supernet.init import GAINS

SLOPES = {
    "tanh": lambda x: 1 / math.cosh(x) ** 2,
    "relu": lambda x: float(x > 0),
    "relu6": lambda x: float(0 < x < 6),
    "hswish": lambda x: 0.0 if x < -3 else 1.0 if x > 3 else (2 * x + 3) / 6,
}


def quad(function, points=(0.0,)) -> float:
    """E function(z), z normal, by adaptive quadrature between the points."""
    ends = [-12.0, *sorted(p for p in points if abs(p) < 12), 12.0]
    density = lambda z: function(z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    options = {"epsabs": 1e-14, "epsrel": 1e-13, "limit": 500}
    return sum(integrate.quad(density, a, b, **options)[0] for a, b in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize("q", [1e-8, 0.04, 1.0, 16.0, 100.0])
@pytest.mark.parametrize("name", SLOPES)
def test_expectations_against_adaptive_quadrature(name, q):
    scale = math.sqrt(q)
    for k in (1, 2):
        expected = quad(lambda z, k=k: SLOPES[name](scale * z) ** (2 * k), (-3 / scale, 0.0, 0.1, 3 / scale, 6 / scale))
        assert slope_moment(name, q, k) == pytest.approx(expected, rel=1e-8)


def test_gains():
    assert relative_gain("identity") == pytest.approx(1, abs=1e-12)
    assert relative_gain("relu") == pytest.approx(1 / (1 - 1 / math.pi), abs=1e-12)
    assert relative_gain("relu6") == pytest.approx(relative_gain("relu"), abs=1e-7)
    variance = quad(lambda z: math.tanh(z) ** 2)
    assert relative_gain("tanh") == pytest.approx(quad(lambda z: SLOPES["tanh"](z) ** 2) / variance, rel=1e-9)
    # those of weights are those of the critical point without biases
    for name, g in GAINS.items():
        assert slope_moment(name, 1e-20, 1) ** -0.5 == pytest.approx(g, abs=1e-12)


@pytest.mark.parametrize(
    ("q", "sigma_w2", "varphi"), [(0.1, 1.177569, 0.039709), (0.5, 1.687975, 0.299244), (1.0, 2.153303, 0.583480)]
)
def test_critical_tanh_networks(q, sigma_w2, varphi):
    """The values of the literature's critical line."""
    sigma_w = slope_moment("tanh", q, 1) ** -0.5
    assert sigma_w**2 == pytest.approx(sigma_w2, abs=1e-6)
    for depth in (1, 30):
        for orthogonal, expected in ((True, varphi), (False, varphi + 1)):
            moments = spectrum_moments("tanh", q, sigma_w, depth, orthogonal=orthogonal)
            assert moments == (pytest.approx(1, abs=1e-10), pytest.approx(depth * expected, abs=depth * 1e-6))


@pytest.mark.parametrize("orthogonal", [False, True])
def test_moments_of_half_linear_networks(orthogonal):
    """Eq. 8 of DI-NAS (Gaussian) and its orthogonal twin, with p = 1/2 (ReLU), against sampled Jacobians."""
    p, depth, width, moments = 0.5, 8, 256, []
    for _ in range(20):
        draws = [torch.randn(width, width, dtype=torch.float64) for _ in range(depth)]
        weights = reference.orthogonalize(draws) if orthogonal else [z / math.sqrt(width) for z in draws]
        jacobian = torch.eye(width, dtype=torch.float64)
        for weight in weights:
            jacobian = (torch.rand(width, 1) < p) * (weight @ jacobian)
        gram = jacobian @ jacobian.T
        moments.append((gram.trace().item() / width, gram.square().sum().item() / width))
    m1, m2 = np.mean(moments, axis=0)
    phi, varphi = spectrum_moments("relu", 1.0, 1.0, depth, orthogonal=orthogonal)
    assert phi == pytest.approx(p**depth)
    assert varphi / phi**2 == pytest.approx(depth * (1 - p) / p if orthogonal else depth / p)
    assert m1 == pytest.approx(phi, rel=0.1)
    assert (m2 / m1**2 - 1) == pytest.approx(varphi / phi**2, rel=0.15)


def test_errors_say_what_was_given():
    with pytest.raises(ValueError, match="unknown activation 'swish'; valid: hswish, identity, relu"):
        slope_moment("swish", 1.0, 1)
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        spectrum_moments("relu", 1.0, 1.0, 0, orthogonal=True)
