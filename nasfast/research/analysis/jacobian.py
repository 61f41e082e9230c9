"""Dynamical isometry of any module: the eigenvalues of J J^T of its input-output Jacobian J, exactly or by probes.

phi = (1 / w_out) E tr J J^T and varphi = (1 / w_out) E tr (J J^T)^2 - phi^2; isometry is phi near 1 and varphi near 0.
DI-NAS section 3 calls the eigenvalues of J J^T singular values; here a singular value is the square root of one.
phi_min and varphi_min divide by min(w_in, w_out) instead, which leaves out the zeros that a module with more outputs
than inputs must have.

BatchNorm couples the samples of a batch. By default its statistics are taken from the given batch and then are
constants, so that every sample has its own Jacobian.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nasfast.config import nearest
from nasfast.ops import use_backend
from nasfast.ops.modules import ConvBNAct, ConvBNActSequential, InvertedResidual

Array = NDArray[np.float64]
Function = Callable[[Tensor], Tensor]
Method = Literal["exact", "probes"]
BNMode = Literal["constant", "coupled"]
_Module = TypeVar("_Module", bound=nn.Module)

MAX_EXACT = 4_000_000
"""Largest number of elements at which the Jacobian of one sample is formed."""

_CHUNK = 64
# Elements of one batch of vectors; this limits the memory that the activations of a large module take.
_BATCH_ELEMENTS = 2**21
# A density needs few starting vectors, because a large matrix averages by itself.
_LANCZOS_SAMPLES = 2
_QUANTILE_ATOMS = 512


@dataclass(frozen=True)
class Isometry:
    """Moments of the eigenvalues of J J^T over samples, and the density of the singular values.

    Attributes:
        phi, varphi: moments with the divisor w_out.
        phi_min, varphi_min: moments with the divisor min(w_in, w_out).
        phi_error, varphi_error: standard errors over samples and probes together; nan for a single exact sample.
        values, weights: singular values in ascending order and the share of each. Shares add up to 1, with the zeros of
            a module that has more outputs than inputs. `exact` has all values of all samples, `probes` has quantiles.
        largest: largest singular value over samples; with probes, a close lower bound over two samples; -inf without a
            density.
        w_in, w_out: elements of one sample's input and output; of the whole batch for bn_mode `coupled`.
        method: `exact` or `probes`.
    """

    phi: float
    varphi: float
    phi_min: float
    varphi_min: float
    phi_error: float
    varphi_error: float
    values: Array
    weights: Array
    largest: float
    w_in: int
    w_out: int
    method: Method

    def quantile(self, share: float) -> float:
        """The singular value below which this share of the singular values lies."""
        return float(self.values[min(int(np.searchsorted(np.cumsum(self.weights), share)), len(self.values) - 1)])

    def histogram(self, edges: Array) -> Array:
        """Share of the singular values between neighbouring edges, which ascend; values outside are left out."""
        return np.histogram(self.values, bins=edges, weights=self.weights)[0]


def isometry(
    module: nn.Module,
    x: Tensor,
    *,
    samples: int = 8,
    probes: int = 64,
    method: Method | None = None,
    bn_mode: BNMode = "constant",
    circular: bool = False,
    max_exact: int = MAX_EXACT,
    lanczos_steps: int = 30,
    seed: int = 0,
) -> Isometry:
    """Measure one module at the given inputs; the module is never changed.

    Small Jacobians are formed in float64, by one product with a unit vector for each row or column of the shorter side.
    Large ones are probed in float32 with random signs u (Hutchinson): tr J J^T ~ |J^T u|^2 and tr (J J^T)^2 ~
    |J J^T u|^2. The square of the first is corrected for its bias, and the density comes from Lanczos quadrature of
    J J^T.

    Args:
        module: maps (N, ...) to (N, ...) by operations with reverse- and forward-mode derivatives. Operators of nasfast
            run on their PyTorch reference; dropout and the like are off.
        x: (N, ...) floating. All of x gives BatchNorm its statistics; 64 samples or more are recommended.
        samples: number of first samples of x whose Jacobians are averaged before varphi is formed.
        probes: number of random vectors, divided over the samples.
        method: `exact`, `probes`, or None: exact if a Jacobian has at most `max_exact` elements.
        bn_mode: `constant` takes statistics of x as constants; `coupled` takes the Jacobian of the whole batch x,
            through the statistics too.
        circular: whether zero-padded convolutions wrap around instead, which leaves out the loss at borders.
        max_exact: largest number of elements of a Jacobian for which None means exact.
        lanczos_steps: Lanczos steps of the density from probes, their longest part; 0 leaves out density and largest.
        seed: seed of the probes.

    Raises:
        ValueError: an argument is wrong; the module cannot take x, or returns something else than one tensor with as
            many samples; samples are coupled by more than BatchNorm; a BatchNorm with constant statistics runs several
            times; an operation has no derivative; or an output or Jacobian is not finite.
    """
    _check(x, samples, probes, method, bn_mode)
    generator = torch.Generator().manual_seed(seed)
    with differentiable_operators():
        function, points = _function_and_points(module, x, bn_mode, circular, torch.float32, samples)
        w_in, w_out = points[0].numel(), _output_size(function, points)
        method = method or ("exact" if w_in * w_out <= max_exact else "probes")
        if method == "exact":
            function, points = _function_and_points(module, x, bn_mode, circular, torch.float64, samples)
            estimates = _exact(function, points, w_out)
        else:
            estimates = _probed(function, points, w_out, probes, min(lanczos_steps, w_out), generator)
    return _summary(*estimates, w_in, w_out, method)


@contextmanager
def differentiable_operators() -> Iterator[None]:
    """Run the operators of nasfast on their reference, which has forward-mode derivatives."""
    with use_backend("reference"), warnings.catch_warnings():
        # torch itself causes this warning in the formulas of its forward mode
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=FutureWarning)
        yield


def _check(x: Tensor, samples: int, probes: int, method: str | None, bn_mode: str) -> None:
    """Check the arguments of `isometry`."""
    if x.ndim < 2 or x.shape[0] < 1 or x[0].numel() < 1 or not x.is_floating_point():
        raise ValueError(f"isometry: x must be floating and of shape (N, ...), N >= 1, got {x.dtype} {tuple(x.shape)}")
    if not torch.isfinite(x).all():
        raise ValueError("isometry: x has elements that are not finite")
    if samples < 1 or probes < 2:
        raise ValueError(f"isometry: needs samples >= 1 and probes >= 2, got {samples} and {probes}")
    if bn_mode != "coupled" and samples > x.shape[0]:
        raise ValueError(f"isometry: samples={samples}, but x has {x.shape[0]}: pass more or lower samples")
    for name, value, valid in (("method", method, get_args(Method)), ("bn_mode", bn_mode, get_args(BNMode))):
        if value is not None and value not in valid:
            raise ValueError(f"isometry: unknown {name}={value!r}; {nearest(value, valid)}")


def _function_and_points(
    module: nn.Module, x: Tensor, bn_mode: BNMode, circular: bool, dtype: torch.dtype, samples: int
) -> tuple[Function, Tensor]:
    """A function that works on each row of its input, and the points at which to differentiate it."""
    frozen = frozen_copy(module, x, bn_mode=bn_mode, circular=circular, dtype=dtype)
    x = x.detach().to(dtype)
    if bn_mode == "coupled":
        # the whole batch is one sample
        return lambda rows: torch.stack([frozen(batch) for batch in rows]), x[None]
    return frozen, x[:samples]


@torch.no_grad()
def frozen_copy(
    module: _Module,
    x: Tensor,
    *,
    bn_mode: BNMode = "constant",
    circular: bool = False,
    dtype: torch.dtype = torch.float32,
) -> _Module:
    """A copy in evaluation mode whose BatchNorms use the statistics of the batch x, so that samples do not interact.

    Args:
        module: any module; it is not changed.
        x: (N, ...); it is cast to dtype.
        bn_mode, circular: see `isometry`; `coupled` keeps batch statistics.
        dtype: dtype of the copy.

    Raises:
        ValueError: the module cannot take x; or, where statistics are constants, a BatchNorm gets fewer than two values
            per channel or runs several times.
    """
    frozen = copy.deepcopy(module).to(dtype).requires_grad_(False).eval()
    for part in frozen.modules():
        if isinstance(part, (ConvBNAct, ConvBNActSequential, InvertedResidual)):
            part.fused = False  # a fused unit does not call its BatchNorm, whose statistics are needed here
    norms = [m for m in frozen.modules() if isinstance(m, _BatchNorm)]
    if circular:
        for conv in frozen.modules():
            if isinstance(conv, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and conv.padding_mode == "zeros":
                conv.padding_mode = "circular"
    for norm in norms:
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = None
        norm.train()
    if bn_mode == "constant" and norms:
        statistics: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}
        handles = [norm.register_forward_pre_hook(functools.partial(_record, statistics)) for norm in norms]
        apply(frozen, x.to(dtype))
        for handle in handles:
            handle.remove()
        for norm, (mean, var) in statistics.items():
            norm.running_mean, norm.running_var = mean, var
            norm.track_running_stats = True
            norm.eval()
    return frozen


def _record(statistics: dict[_BatchNorm, tuple[Tensor, Tensor]], norm: _BatchNorm, inputs: tuple[Tensor]) -> None:
    """Record the statistics of a BatchNorm's input."""
    (x,) = inputs
    if norm in statistics:
        raise ValueError("isometry: a BatchNorm runs several times, with other statistics: set bn_mode='coupled'")
    if x.numel() // x.shape[1] < 2:
        raise ValueError(
            f"isometry: BatchNorm needs two values per channel, and {tuple(x.shape)} has one: pass more samples in x"
        )
    dims = [d for d in range(x.ndim) if d != 1]
    statistics[norm] = x.mean(dims), x.var(dims, correction=0)


def apply(function: Function, x: Tensor) -> Tensor:
    """function(x), which must be one tensor."""
    try:
        y = function(x)
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("isometry:"):
            raise
        raise ValueError(
            f"isometry: the module cannot take x of shape {tuple(x.shape)} and {x.dtype}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(y, Tensor):
        raise ValueError(
            f"isometry: the module must return one tensor, got {type(y).__name__}: wrap it in a module that does"
        )
    return y


@torch.no_grad()
def _output_size(function: Function, points: Tensor) -> int:
    """Elements of one sample's output; checks that the function works row by row and gives finite values."""
    y = apply(function, points)
    if y.ndim < 1 or y.shape[0] != points.shape[0] or y.numel() == 0:
        raise ValueError(
            f"isometry: the module maps {tuple(points.shape)} to {tuple(y.shape)}; the first dimension must be samples"
        )
    if not torch.isfinite(y).all():
        raise ValueError("isometry: the output of the module is not finite: weights that are nan, or an overflow")
    alone = apply(function, points[:1])
    # the same arithmetic with another batch size may differ only by rounding
    if not torch.allclose(alone, y[:1], rtol=1e-2, atol=1e-3 * float(y.abs().max())):
        raise ValueError(
            "isometry: the result of a sample depends on other samples, and not by BatchNorm: bn_mode='coupled' takes "
            "the batch as one sample"
        )
    return y[0].numel()


class _Products:
    """Products J^T u and J v at fixed points; each row of u (K, w_out) and v (K, w_in) is a vector."""

    def __init__(self, function: Function, points: Tensor) -> None:
        self.points = points
        self.function = lambda x: function(x).reshape(x.shape[0], -1)
        with _differentiating():
            self._pull = torch.func.vjp(self.function, points)[1]

    def pull(self, u: Tensor) -> Tensor:
        """J^T u, (K, w_in)."""
        with _differentiating():
            return _finite(self._pull(u)[0].flatten(1))

    def push(self, v: Tensor) -> Tensor:
        """J v, (K, w_out)."""
        with _differentiating():
            return _finite(torch.func.jvp(self.function, (self.points,), (v.view_as(self.points),))[1])


@contextmanager
def _differentiating() -> Iterator[None]:
    """Raise ValueError where an operation has no derivative."""
    try:
        yield
    # NotImplementedError is one
    except RuntimeError as error:
        raise ValueError(
            "isometry: an operation of the module has no derivative in the mode needed (a custom operator, or a change "
            f"in place): {error}"
        ) from error


def _finite(product: Tensor) -> Tensor:
    if not torch.isfinite(product).all():
        raise ValueError("isometry: the Jacobian is not finite at these inputs")
    return product


def jacobian(function: Function, point: Tensor, w_out: int) -> Tensor:
    """The Jacobian (w_out, w_in) of a row-wise function at one point (1, ...), in the point's dtype.

    The batch has a copy of the point for each unit vector, so unlike `torch.func.jacrev` it needs no batching rules.
    """
    w_in = point.numel()
    by_rows = w_out <= w_in
    parts = []
    for units in torch.eye(min(w_in, w_out), dtype=point.dtype, device=point.device).split(_rows(point, w_out)):
        products = _Products(function, point.repeat_interleave(len(units), 0))
        parts.append(products.pull(units) if by_rows else products.push(units))
    matrix = torch.cat(parts)
    return matrix if by_rows else matrix.T


def _rows(point: Tensor, w_out: int) -> int:
    """Number of vectors of a batch."""
    return max(1, min(_CHUNK, _BATCH_ELEMENTS // max(point.numel(), w_out)))


Estimates = tuple[Array, Array, Array, Array, float]
"""(samples, estimates) of the first two moments; singular values, their weights, and the largest."""


def _exact(function: Function, points: Tensor, w_out: int) -> Estimates:
    singular = torch.stack([torch.linalg.svdvals(jacobian(function, p[None], w_out)) for p in points]).cpu().numpy()
    powers = singular**2
    firsts, seconds = powers.sum(1, keepdims=True) / w_out, (powers**2).sum(1, keepdims=True) / w_out
    values = np.sort(singular.ravel())
    zeros = 1 - singular.shape[1] / w_out
    weights = np.full(len(values), (1 - zeros) / len(values))
    if zeros:
        values, weights = np.append(0.0, values), np.append(zeros, weights)
    return firsts, seconds, values, weights, float(singular.max())


def _probed(
    function: Function, points: Tensor, w_out: int, probes: int, steps: int, generator: torch.Generator
) -> Estimates:
    # at least two per sample, because the variance of the estimate is needed
    per_sample = max(2, -(-probes // len(points)))
    firsts, seconds = [], []
    for rows in points.repeat_interleave(per_sample, 0).split(_rows(points[0], w_out)):
        products = _Products(function, rows)
        signs = torch.randint(0, 2, (len(rows), w_out), generator=generator).to(rows) * 2 - 1
        pulled = products.pull(signs)
        firsts.append(pulled.double().square().sum(1) / w_out)
        seconds.append(products.push(pulled).double().square().sum(1) / w_out)
    shape = (len(points), per_sample)
    first, second = (torch.cat(parts).cpu().numpy().reshape(shape) for parts in (firsts, seconds))
    return first, second, *_density(function, points[:_LANCZOS_SAMPLES], w_out, steps, generator)


def _density(
    function: Function, points: Tensor, w_out: int, steps: int, generator: torch.Generator
) -> tuple[Array, Array, float]:
    """Singular values, their weights and the largest one, by Lanczos quadrature with a random start per point.

    The largest Ritz value is nearer to the largest eigenvalue than the result of as many steps of power iteration,
    which stays in the same Krylov space.
    """
    if steps < 1:
        return np.empty(0), np.empty(0), -math.inf
    values, weights, largest = [], [], -math.inf
    for rows in points.split(_rows(points[0], w_out)):
        products = _Products(function, rows)
        q = torch.randn(len(rows), w_out, generator=generator, dtype=torch.float64).to(rows)
        q = q / q.norm(dim=1, keepdim=True)
        basis, diagonal, off_diagonal = [q], [], []
        for _ in range(steps):
            r = products.push(products.pull(q))
            diagonal.append((r * q).sum(1))
            size = r.norm(dim=1, keepdim=True)
            for _ in range(2):
                previous = torch.stack(basis, 1)
                r = r - torch.einsum("kmw,km->kw", previous, torch.einsum("kmw,kw->km", previous, r))
            norm = r.norm(dim=1, keepdim=True)
            # a remainder at the level of rounding is no direction: the space is complete, and later steps get no weight
            live = norm > 1e-5 * size
            q = torch.where(live, r / norm.clamp(min=1e-30), 0.0)
            off_diagonal.append(torch.where(live, norm, 0.0)[:, 0])
            basis.append(q)
        tridiagonal = torch.diag_embed(torch.stack(diagonal, 1).double())
        upper = torch.diag_embed(torch.stack(off_diagonal, 1).double()[:, : steps - 1], offset=1)
        ritz, vectors = torch.linalg.eigh(tridiagonal + upper + upper.mT)
        complete = (torch.stack(off_diagonal, 1)[:, : steps - 1] == 0).any(1)
        for nodes, share, whole in zip(ritz.clamp(min=0).sqrt(), vectors[:, 0] ** 2, complete, strict=True):
            node, weight = nodes.cpu().numpy(), share.cpu().numpy()
            largest = max(largest, float(node[weight > 1e-12].max()))
            if not whole:
                node, weight = _smoothed(node, weight)
            values.append(node)
            weights.append(weight / len(points))
    value, weight = np.concatenate(values), np.concatenate(weights)
    order = np.argsort(value)
    return value[order], weight[order], largest


def _smoothed(nodes: Array, weights: Array) -> tuple[Array, Array]:
    """Quantiles of the distribution for which a quadrature has these nodes and weights, by linear interpolation."""
    # the cumulative share at a node lies between the sums of the weights before and after it
    middles = np.cumsum(weights) - weights / 2
    shares = (np.arange(_QUANTILE_ATOMS) + 0.5) / _QUANTILE_ATOMS
    return np.interp(shares, [0.0, *middles], [0.0, *nodes]), np.full(_QUANTILE_ATOMS, 1 / _QUANTILE_ATOMS)


def _summary(
    firsts: Array, seconds: Array, values: Array, weights: Array, largest: float, w_in: int, w_out: int, method: Method
) -> Isometry:
    """The result of estimates of the first two moments; a single one per sample is exact."""
    samples, estimates = firsts.shape
    phi, second = float(firsts.mean()), float(seconds.mean())
    # the square of an estimate is too large by its variance
    bias = float((firsts.var(1, ddof=1) / estimates).sum()) / samples**2 if estimates > 1 else 0.0
    square = phi**2 - bias
    share = w_out / min(w_in, w_out)
    # to first order, varphi changes with seconds - 2 phi firsts
    influence = seconds - 2 * phi * firsts
    return Isometry(
        phi, second - square, phi * share, second * share - square * share**2,
        _standard_error(firsts), _standard_error(influence),
        values, weights, largest, w_in, w_out, method,
    )  # fmt: skip


def _standard_error(estimates: Array) -> float:
    """Standard error over samples, whose means have the scatter of probes too; for one sample, over its probes."""
    units = estimates.mean(1) if len(estimates) > 1 else estimates[0]
    return float(units.std(ddof=1) / math.sqrt(len(units))) if len(units) > 1 else math.nan
