"""Mean field of wide random networks at initialisation: variances, the edge of chaos, Jacobian spectra.

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
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from nasfast.ops import reference

Array = NDArray[np.float64]

# number of layers after which a variance that still changes counts as slow and its limit is found by bisection
_LAYERS = 300
# halvings of a bracket around a positive limit; the result is far below rounding
_HALVINGS = 80
_TOLERANCE = 1e-12
# A variance above the first counts as growing without bound, because at criticality the quadrature, exact to 1e-14,
# would stop its growth. chi at infinity and at 0 is taken at these two variances.
_UNBOUNDED, _VANISHING = 1e10, 1e-20
# normal numbers beyond it have a probability below 1e-32
_REACH = 12.0
_LEGENDRE = np.polynomial.legendre.leggauss(128)


@dataclass(frozen=True)
class Activation:
    """A scalar function for mean-field integrals.

    Attributes:
        name: name in messages.
        function: sigma, a function of tensors that autograd can differentiate.
        kinks: points other than 0 where sigma is not smooth.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    kinks: tuple[float, ...] = ()

    def value(self, x: Array) -> Array:
        """sigma(x)."""
        return self.function(torch.from_numpy(x)).numpy()

    def slope(self, x: Array) -> Array:
        """sigma'(x)."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.from_numpy(x).requires_grad_()
            return torch.autograd.grad(self.function(leaf).sum(), leaf)[0].numpy()


_KINKS = {"relu6": (6.0,), "hswish": (-3.0, 3.0)}
ACTIVATIONS = {
    name: Activation(name, function, _KINKS.get(name, ())) for name, function in reference.ACTIVATIONS.items()
}


def activation(act: str | Activation) -> Activation:
    """An activation of ACTIVATIONS by its name, or the given one."""
    if isinstance(act, Activation):
        return act
    if act not in ACTIVATIONS:
        raise ValueError(f"unknown activation {act!r}; valid: {', '.join(sorted(ACTIVATIONS))}, or pass an Activation")
    return ACTIVATIONS[act]


def normal_nodes(splits: ArrayLike) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights, (..., pieces * 128), of E f(z) on [-12, 12].

    f is smooth between the splits (..., pieces - 1), which divide the interval.
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


_AROUND_ZERO = normal_nodes([0.0])


def _expect(act: Activation, function: Callable[[Array], Array], std: ArrayLike) -> Array:
    """E function(std z) for each element of std; the function must be smooth where `act` is.

    Integrals are split at the kinks and where the argument is 0, because for a large std tanh is as steep there as a
    kink. Gauss-Hermite quadrature with 128 nodes, which is usual for smooth functions, has an error of 6e-3 for tanh'^2
    at q = 16.
    """
    std = np.asarray(std, dtype=np.float64)[..., None]
    if not act.kinks:
        nodes, weights = _AROUND_ZERO
        return (weights * function(std * nodes)).sum(-1)
    # with std = 0 there is nothing to split
    nodes, weights = normal_nodes(np.array([0.0, *act.kinks]) / np.where(std > 0, std, np.inf))
    return (weights * function(std * nodes)).sum(-1)


def _second_moment(act: Activation, q: ArrayLike) -> Array:
    return _expect(act, lambda x: act.value(x) ** 2, np.sqrt(q))


def slope_moment(act: str | Activation, q: ArrayLike, k: int) -> Array:
    """mu_k = E sigma'(sqrt(q) z)^(2 k), with the shape of q."""
    act = activation(act)
    return _expect(act, lambda x: act.slope(x) ** (2 * k), np.sqrt(q))


def variance_map(act: str | Activation, q: ArrayLike, sigma_w: ArrayLike, sigma_b: ArrayLike) -> Array:
    """The variance of the next pre-activation: sigma_w^2 E sigma(sqrt(q) z)^2 + sigma_b^2 (DI-NAS eq. 6)."""
    return np.square(sigma_w) * _second_moment(activation(act), q) + np.square(sigma_b)


def chi(act: str | Activation, q: ArrayLike, sigma_w: ArrayLike) -> Array:
    """sigma_w^2 E sigma'(sqrt(q) z)^2 (DI-NAS eq. 5): a network is ordered below 1, critical at 1, chaotic above 1."""
    return np.square(sigma_w) * slope_moment(act, q, 1)


@dataclass(frozen=True)
class FixedPoint:
    """The fixed point q* of the variance map.

    Attributes:
        q: the fixed point that is reached from q = 1; inf if the variance grows without bound.
        chi: chi at q, or its limit if q is 0 or infinite (sigma_w^2 / 2 for ReLU).
        slow: whether the variance still changed after 300 layers; q is then its limit. For example, tanh at
            sigma_w = 1, sigma_b = 0 decays to 0 like 1 / (2 l).
    """

    q: float
    chi: float
    slow: bool = False

    @property
    def depth_scale(self) -> float:
        """xi = 1 / |ln chi|: number of layers over which correlations and gradients change by e; inf at chi = 1."""
        if self.chi == 0:
            return 0.0
        return math.inf if self.chi == 1 else 1 / abs(math.log(self.chi))


def fixed_point(act: str | Activation, sigma_w: float, sigma_b: float) -> FixedPoint:
    """q* and its chi (DI-NAS eq. 5 and 7)."""
    act = activation(act)
    q, chis, slow = _fixed_points(act, np.array([sigma_w], dtype=np.float64), np.array([sigma_b], dtype=np.float64))
    return FixedPoint(float(q[0]), float(chis[0]), bool(slow[0]))


def _fixed_points(act: Activation, sigma_w: Array, sigma_b: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """q*, chi, and whether the variance changed for more than _LAYERS layers; all have shape (n,)."""
    for name, values in (("sigma_w", sigma_w), ("sigma_b", sigma_b)):
        wrong = ~(np.isfinite(values) & (values >= 0))
        if wrong.any():
            raise ValueError(f"mean field: {name} must be finite and not negative, got {values[wrong][0]}")
    q = np.ones(len(sigma_w))
    moving = np.arange(len(q))
    for _ in range(_LAYERS):
        following = variance_map(act, q[moving], sigma_w[moving], sigma_b[moving])
        settled = np.abs(following - q[moving]) <= _TOLERANCE * np.maximum(1.0, following)
        q[moving] = following
        moving = moving[~settled & (following < _UNBOUNDED)]
        if not len(moving):
            break
    if len(moving):
        q[moving] = _bisect(lambda v: variance_map(act, v, sigma_w[moving], sigma_b[moving]), q[moving])
    slow = np.zeros(len(q), dtype=bool)
    slow[moving] = True
    chis = chi(act, np.clip(q, _VANISHING, _UNBOUNDED), sigma_w)
    return np.where(q < _UNBOUNDED, q, np.inf), chis, slow


def _bisect(step: Callable[[Array], Array], near: Array) -> Array:
    """The q at which step(q) = q: below `near` if step decreases it, otherwise above; 0 if there is no other."""
    low, high = np.zeros_like(near), near.copy()
    with np.errstate(over="ignore"):
        while True:
            rising = (step(high) > high) & (high < _UNBOUNDED)
            if not rising.any():
                break
            low, high = np.where(rising, high, low), np.where(rising, 2 * high, high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = step(middle) > middle
            low, high = np.where(above, middle, low), np.where(above, high, middle)
    # smaller values are decided by rounding
    return np.where(high < _TOLERANCE, 0.0, high)


def critical_point(act: str | Activation, q: float) -> tuple[float, float]:
    """(sigma_w^2, sigma_b^2) on the critical line chi = 1 at which the fixed point is q."""
    act = activation(act)
    sigma_w2, sigma_b2 = (float(v) for v in _critical_points(act, np.asarray(q)))
    if not sigma_b2 >= 0:
        raise ValueError(f"critical_point: {act.name} has none with q* = {q}, as sigma_b^2 would be {sigma_b2:.3g}")
    return sigma_w2, sigma_b2


def _critical_points(act: Activation, q: Array) -> tuple[Array, Array]:
    sigma_w2 = 1 / slope_moment(act, q, 1)
    sigma_b2 = q - sigma_w2 * _second_moment(act, q)
    # for piecewise linear functions this is a difference of equal numbers, which must be 0
    return sigma_w2, np.where(np.abs(sigma_b2) <= _TOLERANCE * q, 0.0, sigma_b2)


def spectrum_moments(
    act: str | Activation, q: float, sigma_w: float, depth: int, *, orthogonal: bool
) -> tuple[float, float]:
    """phi and varphi of the Jacobian of `depth` equally wide layers at q (Pennington et al. 2017).

    They are the mean m1 and the variance m2 - m1^2 of the eigenvalues of J J^T, which DI-NAS eq. 8 and 10 call singular
    values: m1 = (sigma_w^2 mu_1)^L and m2 = m1^2 L (mu_2 / mu_1^2 + 1 / L - 1 - s1), with s1 = 0 for orthogonal weights
    and -1 for Gaussian ones.
    """
    if depth < 1:
        raise ValueError(f"mean field: depth must be at least 1, got {depth}")
    mu_1, mu_2 = (float(slope_moment(act, q, k)) for k in (1, 2))
    s1 = 0.0 if orthogonal else -1.0
    m1 = (sigma_w**2 * mu_1) ** depth
    return m1, m1**2 * depth * (mu_2 / mu_1**2 + 1 / depth - 1 - s1) - m1**2


def phase_diagram(act: str | Activation, sigma_w: ArrayLike, sigma_b: ArrayLike) -> tuple[Array, Array, Array]:
    """Order and chaos over a grid of W values of sigma_w and B values of sigma_b, both ascending.

    Returns:
        q* and chi, (B, W) each, with q* = inf where the variance grows without bound; and (points, 2) values of
        (sigma_w, sigma_b) with chi = 1 within the range of the grid, by ascending q*: a single point if all critical
        networks are the same, as for ReLU.
    """
    act = activation(act)
    w, b = (np.asarray(v, dtype=np.float64) for v in (sigma_w, sigma_b))
    grid_w, grid_b = (v.ravel() for v in np.meshgrid(w, b))
    q, chis, _ = _fixed_points(act, grid_w, grid_b)
    w2, b2 = _critical_points(act, np.logspace(-6, 3, 400))
    line = np.sqrt(np.stack([w2, b2], 1)[b2 >= 0])
    line = line[(line >= [w.min(), b.min()]).all(1) & (line <= [w.max(), b.max()]).all(1)]
    # piecewise linear functions have the same critical point at every q, up to rounding
    if len(line) and np.ptp(line, axis=0).max() < 1e-9:
        line = line[:1]
    return q.reshape(len(b), len(w)), chis.reshape(len(b), len(w)), line
