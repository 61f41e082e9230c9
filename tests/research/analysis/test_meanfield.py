"""Mean field against published-by-formula values, independent quadrature, closed forms and sampled networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize

from nasfast.ops import reference
from nasfast.research.analysis.meanfield import (
    ACTIVATIONS,
    chi,
    critical_point,
    fixed_point,
    phase_diagram,
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


@pytest.mark.parametrize(
    ("sigma_w", "sigma_b", "q", "slope"),
    [
        (0.9, 0.1, 0.040217, 0.752654),
        (1.0, 0.3, 0.276299, 0.700258),
        (1.5, 0.0, 0.793354, 1.139323),
        (1.5, 0.3, 0.960844, 1.060981),
        (2.0, 0.3, 2.253753, 1.327070),
    ],
)
def test_tanh_fixed_points(sigma_w, sigma_b, q, slope):
    found = fixed_point("tanh", sigma_w, sigma_b)
    assert found.q == pytest.approx(q, abs=1e-5)
    assert found.chi == pytest.approx(slope, abs=1e-5)
    assert not found.slow
    assert found.depth_scale == pytest.approx(1 / abs(math.log(slope)), rel=1e-4)
    # against a root of adaptive quadrature
    excess = lambda v: sigma_w**2 * quad(lambda z: math.tanh(math.sqrt(v) * z) ** 2) + sigma_b**2 - v  # noqa: E731
    assert found.q == pytest.approx(optimize.brentq(excess, q / 2, 2 * q, xtol=1e-12), abs=1e-8)


@pytest.mark.parametrize("sigma_w", [0.0, 0.5, 1.2, 1.41])
@pytest.mark.parametrize("sigma_b", [0.1, 1.0])
def test_relu_fixed_points_are_closed_forms(sigma_w, sigma_b):
    found = fixed_point("relu", sigma_w, sigma_b)
    assert found.q == pytest.approx(sigma_b**2 / (1 - sigma_w**2 / 2), rel=1e-8)
    assert found.chi == pytest.approx(sigma_w**2 / 2, abs=1e-12)


def test_the_critical_tanh_network_decays_slowly_to_zero():
    found = fixed_point("tanh", 1.0, 0.0)
    assert (found.q, found.slow) == (0.0, True)
    assert found.chi == pytest.approx(1, abs=1e-12)
    q = 1.0
    for _ in range(1000):
        q = variance_map("tanh", q, 1.0, 0.0)
    assert q == pytest.approx(1 / 2000, rel=0.05)
    # just above, a small positive fixed point: q = 2 q^2 - (17 / 3) q^3 ... over sigma_w^2 - 1 = 2e-4
    assert fixed_point("tanh", 1.0001, 0.0).q == pytest.approx(1e-4, rel=0.01)
    # geometric decay is not slow
    assert not fixed_point("tanh", 0.9, 0.0).slow
    assert fixed_point("tanh", 0.9, 0.0).q < 1e-10


@pytest.mark.parametrize("q", [1e-8, 0.04, 1.0, 16.0, 100.0])
@pytest.mark.parametrize("name", ["tanh", "relu", "relu6"])
def test_expectations_against_adaptive_quadrature(name, q):
    act, scale = ACTIVATIONS[name], math.sqrt(q)
    at = lambda f: quad(lambda z: float(f(np.array(scale * z))), (0.0, 0.1, 6 / scale))  # noqa: E731
    assert variance_map(act, q, 1.0, 0.0) == pytest.approx(at(lambda x: act.value(x) ** 2), rel=1e-8)
    assert slope_moment(act, q, 1) == pytest.approx(at(lambda x: act.slope(x) ** 2), rel=1e-8)
    assert slope_moment(act, q, 2) == pytest.approx(at(lambda x: act.slope(x) ** 4), rel=1e-8)


@pytest.mark.parametrize(
    ("q", "sigma_w2", "sigma_b2", "varphi"),
    [
        (0.1, 1.177569, 0.000832, 0.039709),
        (0.5, 1.687975, 0.038041, 0.299244),
        (1.0, 2.153303, 0.150965, 0.583480),
    ],
)
def test_tanh_critical_line(q, sigma_w2, sigma_b2, varphi):
    assert critical_point("tanh", q) == pytest.approx((sigma_w2, sigma_b2), abs=1e-6)
    sigma_w, sigma_b = (math.sqrt(v) for v in critical_point("tanh", q))
    found = fixed_point("tanh", sigma_w, sigma_b)
    assert (found.q, found.chi) == (pytest.approx(q, abs=1e-8), pytest.approx(1, abs=1e-8))
    for depth in (1, 30):
        for orthogonal, expected in ((True, varphi), (False, varphi + 1)):
            moments = spectrum_moments("tanh", q, sigma_w, depth, orthogonal=orthogonal)
            assert moments == (pytest.approx(1, abs=1e-10), pytest.approx(depth * expected, abs=depth * 1e-6))


def test_gains_are_those_of_the_critical_point_without_biases():
    for name, g in GAINS.items():
        assert float(slope_moment(name, 1e-20, 1)) ** -0.5 == pytest.approx(g, abs=1e-12)


@pytest.mark.slow
def test_phase_diagram_is_the_fixed_points():
    w, b = np.linspace(0.5, 3, 30), np.linspace(0, 1, 30)
    diagrams = {}
    for name in ACTIVATIONS:
        q, slopes, _ = diagrams[name] = phase_diagram(name, w, b)
        for i_b, i_w in ((0, 0), (0, 29), (29, 0), (10, 15)):
            found = fixed_point(name, w[i_w], b[i_b])
            assert q[i_b, i_w] == pytest.approx(found.q)
            assert slopes[i_b, i_w] == pytest.approx(found.chi)
    critical = diagrams["tanh"][2]
    assert len(critical) > 50
    for sigma_w, sigma_b in critical[::20]:
        assert fixed_point("tanh", sigma_w, sigma_b).chi == pytest.approx(1, abs=1e-4)
    _, slopes, critical = diagrams["relu"]
    np.testing.assert_allclose(critical, [[math.sqrt(2), 0]])
    np.testing.assert_allclose(slopes, np.broadcast_to(w**2 / 2, (30, 30)))


def network(depth: int, width: int, sigma_w: float, orthogonal: bool) -> list[torch.Tensor]:
    draws = [torch.randn(width, width, dtype=torch.float64) for _ in range(depth)]
    return [
        sigma_w * (q if orthogonal else z / math.sqrt(width))
        for q, z in zip(reference.orthogonalize(draws) if orthogonal else draws, draws, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "sigma_w", "sigma_b"), [("tanh", 1.5, 0.3), ("tanh", 1.0, 0.3), ("relu", math.sqrt(2), 0.0)]
)
def test_gradients_of_a_wide_network_grow_by_chi(name, sigma_w, sigma_b):
    """N = 512, L = 50: ||D W v||^2 / ||v||^2 per layer for random v, geometric mean over the layers."""
    act, width, depth = ACTIVATIONS[name], 512, 50
    q = fixed_point(name, sigma_w, sigma_b).q
    h = torch.randn(width, 8, dtype=torch.float64) * math.sqrt(q)
    logs = []
    for weight in network(depth, width, sigma_w, orthogonal=False):
        slope = torch.tensor(act.slope(h.numpy()))
        # one random direction per input
        tangent = torch.randn(width, 8, dtype=torch.float64)
        logs.append(((slope * (weight @ tangent)).square().sum(0) / tangent.square().sum(0)).log().mean().item())
        h = weight @ reference.ACTIVATIONS[name](h) + sigma_b * torch.randn(width, 1, dtype=torch.float64)
    measured = math.exp(sum(logs) / depth)
    assert measured == pytest.approx(float(chi(name, q, sigma_w)), rel=0.03)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: critical_point("swish", 1.0),
            "unknown activation 'swish'; valid: hswish, identity, relu, relu6, silu, tanh",
        ),
        (lambda: phase_diagram("tanh", [1.0], [0.0, math.nan]), "sigma_b must be finite and not negative, got nan"),
        (lambda: spectrum_moments("relu", 1.0, 1.0, 0, orthogonal=True), "depth must be at least 1, got 0"),
    ],
)
def test_errors_say_what_was_given(call, message):
    with pytest.raises(ValueError, match=message):
        call()
