"""Signal and noise through any nn.Module, by forward-mode derivatives, measured after chosen submodules.

BatchNorms use the statistics of the current batch and treat them as constants for the noise, as the theory does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nasfast.config import nearest
from nasfast.research.analysis.jacobian import Array, apply, differentiable_operators, frozen_copy
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


@dataclass(frozen=True)
class ModuleMoments:
    """Moments after the probed modules, in the order of their calls.

    Attributes:
        names: names of the modules; a module that is called several times appears as often.
        curves: (draws, len(names)) values of `logchi`, `inc` (increment of chi since the probe before), `reff_signal`,
            `reff_noise`, `variance_share`, `lognu2`, `logmu2_noise`, `mu4`, `nu1abs`, `pseudo_linear`.
    """

    names: tuple[str, ...]
    curves: dict[str, Array]


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
        "logmu2_noise": moments["log_mu2_noise"],
        "mu4": moments["mu4_signal"],
        "nu1abs": moments["nu1_abs_signal"],
        "pseudo_linear": moments["pseudo_linear"],
    }


def module_moments(
    module: nn.Module, x: Tensor, *, probes: Sequence[str] | None = None, draws: int = 1, seed: int = 0
) -> ModuleMoments:
    """Propagate inputs and white noise through a module and measure after chosen submodules; no output is kept.

    Args:
        module: a module that takes x; it is not changed.
        x: (N, C, *spatial).
        probes: names of submodules as in `named_modules`, in any order. None takes the direct children; if containers
            have a single child, it takes the children of the first container that has several. Only outputs that are
            one tensor of N samples are measured.
        draws: number of draws of white noise.
        seed: seed of the noise.

    Raises:
        ValueError: `draws` is below 1, a name is unknown, no probe is called, or see `push`.
    """
    if draws < 1:
        raise ValueError(f"module_moments: draws must be at least 1, got {draws}")
    copy = hold_statistics(module)
    modules = dict(copy.named_modules())
    probe_names = _children(copy) if probes is None else list(probes)
    for name in probe_names:
        if name not in modules:
            raise ValueError(f"module_moments: no submodule {name!r}; {nearest(name, [n for n in modules if n])}")
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[dict[str, float]]] = []
    names: list[str] = []
    for _ in range(draws):
        dx = torch.randn(x.shape, generator=generator)
        row: list[dict[str, float]] = []
        start, names = sensitivity(x, dx), []

        def record(name: str, y: object, start: float = start, row: list = row, names: list = names) -> None:
            if isinstance(y, Tensor) and y.ndim > 1 and len(y) == len(x):
                primal, tangent = forward_ad.unpack_dual(y)
                row.append(measure_place(primal, torch.zeros_like(primal) if tangent is None else tangent, start))
                names.append(name)

        handles = [
            modules[name].register_forward_hook(lambda _m, _i, y, name=name: record(name, y)) for name in probe_names
        ]
        push(copy, (x.float(), dx))
        for handle in handles:
            handle.remove()
        rows.append(row)
    if not names:
        raise ValueError(
            f"module_moments: none of the probes {', '.join(probe_names)} was called with one tensor as result"
        )
    curves = {key: np.array([[place[key] for place in row] for row in rows]) for key in rows[0][0]}
    curves["inc"] = np.exp(np.diff(curves["logchi"], axis=1, prepend=0.0))
    return ModuleMoments(tuple(names), curves)


def _children(module: nn.Module) -> list[str]:
    """Names of the probes that `module_moments` takes by default."""
    name = ""
    while len(children := list(module.named_children())) == 1:
        name, module = f"{name}{children[0][0]}.", children[0][1]
    return [f"{name}{child}" for child, _ in children] or [name.rstrip(".")]
