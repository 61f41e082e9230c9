"""Fairness of the candidates of a layer at initialisation: spreads of their outputs over the candidates.

DI-NAS section 3 claims that orthogonal candidates transmit signals equally; this module measures what "equally" may
mean. Every spread is over the candidates m of one layer on a common input, so 0 is perfect fairness:

- mean_m and var_m of each channel over batch and positions, averaged over channels; f_mean = std_m(mean_m) /
  sqrt(mean_m var_m) and f_var = std_m(log var_m);
- rho_m(i, j) = (||f_m(h_i) - f_m(h_j)||^2 / w_out) / (||h_i - h_j||^2 / w_in) is how much a candidate increases the
  distance of two samples; f_iso = std_m(log mean_ij rho_m), and distortion_m is the coefficient of variation of rho_m
  over pairs;
- disagreement = mean over pairs of candidates and samples of ||f - f'||^2 / (||f||^2 + ||f'||^2): 1 for unrelated
  outputs, 0 for equal ones;
- f_phi = std_m log phi_m, where phi_m is the mean squared singular value of a candidate's Jacobian
  (`nasfast.research.analysis.jacobian.isometry`).

A BatchNorm at the end makes f_mean and f_var nearly 0 for any weights, so measure without it too
(`without_block_indicator`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from nasfast.research.analysis.jacobian import apply, frozen_copy
from nasfast.spaces import UniformSampler
from nasfast.supernet import Supernet

SPREADS = ("f_mean", "f_var", "f_iso", "f_phi", "distortion", "disagreement")


@torch.no_grad()
def fairness(
    candidates: Sequence[nn.Module], h: Tensor, *, phi: Sequence[float] | None = None
) -> dict[str, float | None]:
    """Measure the candidates of one layer on a common input; BatchNorms use the statistics of that input.

    Args:
        candidates: modules that map (N, C, ...) to results (N, C', ...) of one shape; they are not changed.
        h: (N, C, ...) floating, N at least 4; 64 or more are recommended.
        phi: phi of each candidate's Jacobian, for f_phi.

    Returns:
        SPREADS; see the module's docstring. f_phi is None without phi, `distortion` is the mean over candidates, and
        f_var and f_iso are not finite if a candidate gives all samples one result.
    """
    distances = _pair_distances(h)
    if not float(distances.min()) > 0:
        raise ValueError("fairness: two samples of h are equal or not finite: give different finite samples")
    outputs = [apply(frozen_copy(module, h, dtype=h.dtype), h) for module in candidates]
    for i, y in enumerate(outputs):
        if not torch.isfinite(y).all():
            raise ValueError(f"fairness: the result of candidate {i} is not finite")

    def disagreement(a: Tensor, b: Tensor) -> float:
        difference, total = (a - b).flatten(1).square().sum(1), (a.square() + b.square()).flatten(1).sum(1)
        return float((difference / total.clamp(min=1e-30)).mean())

    rhos = [_pair_distances(y) / distances for y in outputs]
    mean, var = np.array([channel_moments(y) for y in outputs]).T
    return {
        "f_mean": float(mean.std() / math.sqrt(var.mean())),
        "f_var": float(np.log(var).std()),
        "f_iso": float(np.log([float(rho.mean()) for rho in rhos]).std()),
        "f_phi": None if phi is None else float(np.log(phi).std()),
        "distortion": float(np.mean([float(rho.std() / rho.mean()) for rho in rhos])),
        "disagreement": float(np.mean([disagreement(a, b) for a, b in combinations(outputs, 2)])),
    }


def channel_moments(y: Tensor) -> tuple[float, float]:
    """Mean and variance of every channel over samples and positions, averaged over channels."""
    dims = [d for d in range(y.ndim) if d != 1]
    return float(y.double().mean(dims).mean()), float(y.double().var(dims, correction=0).mean())


def _pair_distances(h: Tensor) -> Tensor:
    """Mean squared distance of every pair of samples, per element."""
    flat = h.flatten(1)
    # differences are squared directly, because the form by inner products loses the digits of close pairs
    rows = [(flat[i + 1 :] - flat[i]).square().mean(1) for i in range(len(flat) - 1)]
    return torch.cat(rows).double()


def without_block_indicator(module: nn.Module) -> nn.Module:
    """A copy of a block of plain modules whose block indicator is the identity."""
    module = copy.deepcopy(module)
    indicator = getattr(module, "block_indicator", None)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child is indicator:
                setattr(parent, name, nn.Identity())
    return module


@torch.no_grad()
def depth_spread(
    net: Supernet, images: Tensor, *, paths: int = 64, block_indicator: bool = True, seed: int = 0
) -> dict[str, list[float]]:
    """Follow random paths through a supernet and compare the variances of their signals.

    Args:
        net: the supernet, which is not changed; it must have plain modules (`fused=False`) if block_indicator is false.
        images: (N, C, H, W).
        paths: number of uniformly random paths, at least two, without layer indicators.
        block_indicator: whether blocks keep their block indicators.
        seed: seed of the paths.

    Returns:
        For every layer the `std` over paths of log Var(h_l), h_l the output of the layer, whose variance is averaged
        over channels; and the `ratio` of the largest Var(h_l) to the smallest.
    """
    layers = [list(layer.candidates) for layer in net.layers]
    if not block_indicator:
        layers = [[without_block_indicator(c) for c in candidates] for candidates in layers]
    sampler = UniformSampler(net.space, seed=seed, layer_indicators=False)
    first, logs = net.stem(images), np.zeros((paths, len(layers)))
    for i in range(paths):
        h = first
        for index, (candidates, choice) in enumerate(zip(layers, sampler.step()[0], strict=True)):
            h = h if choice < 0 else candidates[choice](h)
            var = channel_moments(h)[1]
            if not 0 < var < math.inf:
                raise ValueError(f"depth_spread: the variance after layer {index} is {var} on path {i}")
            logs[i, index] = math.log(var)
    return {"std": logs.std(0).tolist(), "ratio": np.exp(logs.max(0) - logs.min(0)).tolist()}
