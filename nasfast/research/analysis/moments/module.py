"""Signal and noise through any nn.Module, by forward-mode derivatives.

BatchNorms use the statistics of the current batch and treat them as constants for the noise, as the theory does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nasfast.research.analysis.jacobian import apply, differentiable_operators, frozen_copy
from nasfast.research.analysis.moments.pairs import Pair, energies, ranks, shape

Function = Callable[[Tensor], Tensor]
_Module = TypeVar("_Module", bound=nn.Module)


def hold_statistics(module: _Module) -> _Module:
    """A copy in evaluation mode whose BatchNorms use the statistics of each batch as constants of the derivative.

    One forward pass is enough, because every BatchNorm takes its statistics from its input just before it uses them.
    """
    copy = frozen_copy(module, torch.empty(0), bn_mode="coupled")
    for norm in copy.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.track_running_stats = True
            norm.eval()
            norm.register_forward_pre_hook(_set_statistics)
    return copy


def _set_statistics(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Set a BatchNorm's running statistics to those of its input."""
    x = forward_ad.unpack_dual(inputs[0]).primal if forward_ad._current_level >= 0 else inputs[0]
    over = [d for d in range(x.ndim) if d != 1]
    if x.numel() // x.shape[1] < 2:
        raise ValueError(f"isometry: BatchNorm needs two values per channel, and {tuple(x.shape)} has one: pass more")
    norm.running_var, norm.running_mean = torch.var_mean(x, over, correction=0)


def push(function: Function, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(f(x), J dx) in one forward pass; J dx is zero if f does not depend on x.

    Args:
        function: a function of one tensor, with forward-mode derivatives; a module should come from `hold_statistics`.
        pair: x and dx, (N, ...).

    Raises:
        ValueError: the function cannot take x, returns no tensor, or has an operation without derivative.
    """
    with differentiable_operators(), torch.no_grad(), forward_ad.dual_level():
        y, dy = forward_ad.unpack_dual(apply(function, forward_ad.make_dual(*pair)))
        return y, torch.zeros_like(y) if dy is None else dy


def sensitivity(x: Tensor, dx: Tensor) -> float:
    """log [mu_2(dx) / mu_2(x)]^{1/2}; log chi of a module is its difference between output and input."""
    moments = energies(Pair.of(x[:, None], dx[:, None]))
    return float(moments["log_mu2_noise"] - moments["log_mu2_signal"]) / 2


def measure_place(x: Tensor, dx: Tensor, start: float) -> dict[str, float]:
    """The values of the curves at one place, from signal and noise (N, C, *spatial).

    `start` is the `sensitivity` of the inputs.
    """
    pair = Pair.of(x[:, None], dx[:, None])
    moments = {k: float(v) for part in (energies, ranks, shape) for k, v in part(pair).items()}
    return {
        "logchi": (moments["log_mu2_noise"] - moments["log_mu2_signal"]) / 2 - start,
        "reff_signal": moments["reff_signal"],
        "reff_noise": moments["reff_noise"],
        "variance_share": math.exp(moments["log_mu2_signal"] - moments["log_nu2_signal"]),
        "lognu2": moments["log_nu2_signal"],
        "pseudo_linear": moments["pseudo_linear"],
    }
