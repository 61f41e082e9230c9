"""Mean field of wide random networks at initialisation: moments of slopes, gains of activations, Jacobian spectra.

Quantities and names are those of Poole et al. 2016 and Pennington et al. 2017. A layer is h' = sigma(W h + b) with
sigma_w^2 = fan_in Var(W_ij), which is the v_W of DI-NAS; q is the variance of a pre-activation and z a standard normal
number. DI-NAS eq. 6 does not say where the variance is taken; it is before the activation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nasfast.ops import reference

Array = NDArray[np.float64]

# normal numbers beyond it have a probability below 1e-32
_REACH = 12.0
_LEGENDRE = np.polynomial.legendre.leggauss(128)
_KINKS: dict[str, tuple[float, ...]] = {"relu6": (6.0,), "hswish": (-3.0, 3.0)}
"""Points other than 0 where an activation is not smooth."""


def normal_nodes(splits: Sequence[float]) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights of E f(z) on [-12, 12]; f is smooth between the splits.

    Gauss-Hermite quadrature, which is usual for smooth functions, has an error of 6e-3 for tanh'^2 at q = 16.
    """
    ends = np.array([-_REACH, *sorted(x for x in splits if abs(x) < _REACH), _REACH])
    half = np.diff(ends)[:, None] / 2
    nodes = (ends[:-1, None] + half * (_LEGENDRE[0] + 1)).ravel()
    return nodes, (half * _LEGENDRE[1]).ravel() * np.exp(-(nodes**2) / 2) / math.sqrt(2 * math.pi)


def sampled(act: str, q: float) -> tuple[Array, Array, Array]:
    """sigma and sigma' of an activation at sqrt(q) z for nodes z, and the weights of the nodes in E f(z).

    For a large q tanh is as steep at 0 as a kink.
    """
    if act not in reference.ACTIVATIONS:
        raise ValueError(f"unknown activation {act!r}; valid: {', '.join(sorted(reference.ACTIVATIONS))}")
    std = math.sqrt(q)
    nodes, weights = normal_nodes([0.0, *(kink / std for kink in _KINKS.get(act, ()))])
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.from_numpy(std * nodes).requires_grad_()
        values = reference.ACTIVATIONS[act](x)
        (slopes,) = torch.autograd.grad(values.sum(), x)
    return values.detach().numpy(), slopes.numpy(), weights


def slope_moment(act: str, q: float, k: int) -> float:
    """mu_k = E sigma'(sqrt(q) z)^(2 k)."""
    _, slopes, weights = sampled(act, q)
    return float(weights @ slopes ** (2 * k))


def relative_gain(act: str) -> float:
    """r = E sigma'(z)^2 / Var sigma(z): the gain of one BatchNorm -> activation -> convolution -> BatchNorm.

    1 for the identity, 1.178 for tanh, 1.467 for ReLU; ReLU6 differs from ReLU by less than 1e-7.
    """
    values, slopes, weights = sampled(act, 1.0)
    return float(weights @ slopes**2 / (weights @ values**2 - (weights @ values) ** 2))


def spectrum_moments(act: str, q: float, sigma_w: float, depth: int, *, orthogonal: bool) -> tuple[float, float]:
    """phi and varphi of the Jacobian of `depth` equally wide layers at q (Pennington et al. 2017).

    They are the mean m1 and the variance m2 - m1^2 of the eigenvalues of J J^T, which DI-NAS eq. 8 and 10 call singular
    values: m1 = (sigma_w^2 mu_1)^L and m2 = m1^2 L (mu_2 / mu_1^2 + 1 / L - 1 - s1), with s1 = 0 for orthogonal weights
    and -1 for Gaussian ones. The network is critical at sigma_w^2 = 1 / mu_1.
    """
    if depth < 1:
        raise ValueError(f"mean field: depth must be at least 1, got {depth}")
    mu_1, mu_2 = (slope_moment(act, q, k) for k in (1, 2))
    s1 = 0.0 if orthogonal else -1.0
    m1 = (sigma_w**2 * mu_1) ** depth
    return m1, m1**2 * depth * (mu_2 / mu_1**2 + 1 / depth - 1 - s1) - m1**2
