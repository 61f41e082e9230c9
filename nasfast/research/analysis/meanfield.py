"""Mean field of wide random networks at initialisation: variances and the moments of Jacobian spectra.

Quantities and names are those of Poole et al. 2016 and Pennington et al. 2017. A layer is h' = sigma(W h + b) with
sigma_w^2 = fan_in Var(W_ij), which is the v_W of DI-NAS, and sigma_b^2 = Var(b); q is the variance of a pre-activation
and z a standard normal number. DI-NAS eq. 6 does not say where the variance is taken; it is before the activation.
Functions of q take numbers or arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# normal numbers beyond it have a probability below 1e-32
_REACH = 12.0
_LEGENDRE = np.polynomial.legendre.leggauss(128)


@dataclass(frozen=True)
class Activation:
    """A scalar function for mean-field integrals.

    Attributes:
        name: name in messages.
        value, slope: sigma and sigma'; they map arrays to arrays of the same shape.
        kinks: points other than 0 where sigma is not smooth.
    """

    name: str
    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    kinks: tuple[float, ...] = ()


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _hswish_slope(x: Array) -> Array:
    return np.where(x < 3, np.where(x > -3, x / 3 + 0.5, 0.0), 1.0)


ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("identity", lambda x: x, np.ones_like),
        Activation("tanh", np.tanh, lambda x: 1 - np.square(np.tanh(x))),
        Activation("relu", lambda x: np.maximum(x, 0.0), lambda x: np.where(x > 0, 1.0, 0.0)),
        Activation("relu6", lambda x: np.clip(x, 0.0, 6.0), lambda x: np.where((x > 0) & (x < 6), 1.0, 0.0), (6.0,)),
        Activation("hswish", lambda x: x * np.clip(x / 6 + 0.5, 0.0, 1.0), _hswish_slope, (-3.0, 3.0)),
        Activation("silu", lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x))),
    )
}


def activation(name: str) -> Activation:
    """An activation of ACTIVATIONS.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; valid: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def normal_nodes(splits: ArrayLike) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights of E f(z) on [-12, 12], for a function f that is smooth between splits.

    Args:
        splits: (..., pieces - 1) points that divide the interval.

    Returns:
        Nodes and weights, (..., pieces * 128).
    """
    # a split outside the interval makes a piece of width 0
    inner = np.clip(np.sort(np.asarray(splits, dtype=np.float64), axis=-1), -_REACH, _REACH)
    reach = np.full_like(inner[..., :1], _REACH)
    ends = np.concatenate([-reach, inner, reach], axis=-1)
    x, w = _LEGENDRE
    half = np.diff(ends)[..., None] / 2
    pieces = ends[..., :-1, None] + half * (x + 1)
    weights = half * w * np.exp(-(pieces**2) / 2) / math.sqrt(2 * math.pi)
    shape = (*inner.shape[:-1], pieces.shape[-1] * pieces.shape[-2])
    return pieces.reshape(shape), weights.reshape(shape)


def _expect(act: Activation, function: Callable[[Array], Array], std: ArrayLike) -> Array:
    """E function(std z) for each element of std; the function must be smooth where `act` is.

    Integrals are split at the kinks and where the argument is 0, because for a large std tanh is as steep there as a
    kink. Gauss-Hermite quadrature with 128 nodes, which is usual for smooth functions, has an error of 6e-3 for tanh'^2
    at q = 16.
    """
    std = np.asarray(std, dtype=np.float64)[..., None]
    # with std = 0 there is nothing to split
    nodes, weights = normal_nodes(np.array([0.0, *act.kinks]) / np.where(std > 0, std, np.inf))
    return (weights * function(std * nodes)).sum(-1)


def slope_moment(act: str, q: ArrayLike, k: int) -> Array:
    """mu_k = E sigma'(sqrt(q) z)^(2 k), with the shape of q.

    A network is ordered where chi = sigma_w^2 mu_1 (DI-NAS eq. 5) is below 1, critical at 1, and chaotic above 1.
    """
    return _expect(activation(act), lambda x: activation(act).slope(x) ** (2 * k), np.sqrt(q))


def variance_map(act: str, q: ArrayLike, sigma_w: ArrayLike, sigma_b: ArrayLike) -> Array:
    """The variance of the next pre-activation: sigma_w^2 E sigma(sqrt(q) z)^2 + sigma_b^2 (DI-NAS eq. 6)."""
    second = _expect(activation(act), lambda x: activation(act).value(x) ** 2, np.sqrt(q))
    return np.square(sigma_w) * second + np.square(sigma_b)


def spectrum_moments(act: str, q: float, sigma_w: float, depth: int, *, orthogonal: bool) -> tuple[float, float]:
    """Mean and variance of the eigenvalues of J J^T, phi and varphi, of `depth` equally wide layers at q.

    phi = (sigma_w^2 mu_1)^L and varphi = phi^2 L (mu_2 / mu_1^2 - 1 - s1), with s1 = 0 for orthogonal weights and -1
    for Gaussian ones (Pennington et al. 2017). "Singular values" in DI-NAS eq. 8 and 10 are these eigenvalues.

    Raises:
        ValueError: the activation is unknown, or the depth is below 1.
    """
    if depth < 1:
        raise ValueError(f"mean field: depth must be at least 1, got {depth}")
    mu_1, mu_2 = (float(slope_moment(act, q, k)) for k in (1, 2))
    phi = (sigma_w**2 * mu_1) ** depth
    return phi, phi**2 * depth * (mu_2 / mu_1**2 - (1.0 if orthogonal else 0.0))
