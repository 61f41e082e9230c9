"""Signal and noise through any nn.Module, by forward-mode derivatives, with probes at chosen modules.

BatchNorms take the statistics of the batch at hand and hold them constant for the noise, as the theory does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nasfast.analysis.jacobian import Array, applied, frozen_copy
from nasfast.analysis.moments.pairs import Pair
from nasfast.analysis.moments.statistics import energies, ranks, shape
from nasfast.config import nearest
from nasfast.ops import use_backend

Function = Callable[[Tensor], Tensor]


def held(module: nn.Module, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy in evaluation mode whose BatchNorms normalise by the statistics of each batch, constant for derivatives.

    A forward pass is one pass: every BatchNorm reads its statistics off its input just before it needs them.
    """
    copy = frozen_copy(module, torch.empty(0), bn_mode="coupled", dtype=dtype)
    for norm in copy.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.track_running_stats = True
            norm.eval()
            norm.register_forward_pre_hook(_hold)
    return copy


def _hold(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    x = forward_ad.unpack_dual(inputs[0]).primal if forward_ad._current_level >= 0 else inputs[0]
    over = [d for d in range(x.ndim) if d != 1]
    if x.numel() // x.shape[1] < 2:
        raise ValueError(f"isometry: BatchNorm needs two values per channel, and {tuple(x.shape)} has one: pass more")
    norm.running_var, norm.running_mean = torch.var_mean(x, over, correction=0)


@contextmanager
def _differentiating() -> Iterator[None]:
    with use_backend("reference"), torch.no_grad(), warnings.catch_warnings(), forward_ad.dual_level():
        # torch's own, from the formulas of its forward mode
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=FutureWarning)
        yield


def push(function: Function, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(f(x), J dx) in one forward pass; a noise that f does not depend on comes back as zeros.

    Args:
        function: of one tensor, with forward-mode derivatives; a module should be `held`.
        pair: x and dx, (N, ...).

    Raises:
        ValueError: the function cannot take x, returns no tensor or has an operation without derivative.
    """
    with _differentiating():
        y, dy = forward_ad.unpack_dual(applied(function, forward_ad.make_dual(*pair)))
        return y, torch.zeros_like(y) if dy is None else dy


def as_pair(x: Tensor, dx: Tensor) -> Pair:
    """One realisation: (N, C, *spatial) as a Pair."""
    return Pair.of(x[:, None], dx[:, None])


def sensitivity(x: Tensor, dx: Tensor) -> float:
    """log [mu_2(dx) / mu_2(x)]^{1/2}; chi of a module is its difference between output and input."""
    found = energies(as_pair(x, dx))
    return float(found["log_mu2_noise"] - found["log_mu2_signal"]) / 2


def module_chi(module: nn.Module, x: Tensor, dx: Tensor | None = None, *, draws: int = 4, seed: int = 0) -> float:
    """delta chi of any module: how much more it amplifies noise than signal.

    Args:
        module: maps (N, C, ...) to (N, C', ...); not changed. In evaluation mode, BatchNorms on the statistics of x.
        x: the signal.
        dx: the noise; None takes white noise, averaged over `draws`.
        draws: of white noise.
        seed: of white noise.

    Returns:
        chi; > 1 amplifies noise, 20 log10 chi is the loss of signal-to-noise ratio in dB.

    Raises:
        ValueError: as `push`; `draws` below 1.
    """
    if draws < 1:
        raise ValueError(f"module_chi: draws must be at least 1, got {draws}")
    copy = held(module)
    generator = torch.Generator().manual_seed(seed)
    noises = [torch.randn(x.shape, generator=generator) for _ in range(draws)] if dx is None else [dx]
    squares = []
    for noise in noises:
        y, dy = push(copy, (x.float(), noise.float()))
        squares.append(math.exp(2 * (sensitivity(y, dy) - sensitivity(x, noise))))
    return math.sqrt(sum(squares) / len(squares))


@dataclass(frozen=True)
class ModuleMoments:
    """Moments behind the probed modules, in the order in which they were called.

    Attributes:
        names: of the modules; one that is called several times appears as often.
        curves: (draws, len(names)) each: `logchi`, `inc` (of chi since the probe before), `reff_signal`, `reff_noise`,
            `variance_share`, `lognu2`, `logmu2_noise`, `mu4`, `nu1abs`, `pseudo_linear`.
    """

    names: tuple[str, ...]
    curves: dict[str, Array]


def statistics_of(x: Tensor, dx: Tensor, start: float) -> dict[str, float]:
    """Curves' values at one place: (N, C, *spatial) signal and noise, `start` the `sensitivity` of the inputs."""
    pair = as_pair(x, dx)
    found = {k: float(v) for part in (energies, ranks, shape) for k, v in part(pair).items()}
    return {
        "logchi": (found["log_mu2_noise"] - found["log_mu2_signal"]) / 2 - start,
        "reff_signal": found["reff_signal"],
        "reff_noise": found["reff_noise"],
        "variance_share": math.exp(found["log_mu2_signal"] - found["log_nu2_signal"]),
        "lognu2": found["log_nu2_signal"],
        "logmu2_noise": found["log_mu2_noise"],
        "mu4": found["mu4_signal"],
        "nu1abs": found["nu1_abs_signal"],
        "pseudo_linear": found["pseudo_linear"],
    }


def module_moments(
    module: nn.Module, x: Tensor, *, probes: Sequence[str] | None = None, draws: int = 1, seed: int = 0
) -> ModuleMoments:
    """Propagate inputs and white noise through a module and measure behind chosen submodules; none is kept.

    Args:
        module: takes x; not changed.
        x: (N, C, *spatial).
        probes: names as of `named_modules`, in any order; None takes the direct children (of a chain of containers:
            those of the first that has several). Only outputs that are one tensor of N samples are measured.
        draws: of white noise.
        seed: of the noise.

    Raises:
        ValueError: an unknown name, probes that are never called, or as `push`.
    """
    copy = held(module)
    modules = dict(copy.named_modules())
    chosen = _children(copy) if probes is None else list(probes)
    for name in chosen:
        if name not in modules:
            raise ValueError(f"module_moments: no submodule {name!r}; {nearest(name, [n for n in modules if n])}")
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[dict[str, float]]] = []
    names: list[str] = []
    for _ in range(draws):
        dx = torch.randn(x.shape, generator=generator)
        start, found, names = sensitivity(x, dx), [], []

        def note(name: str, y: object, start: float = start, found: list = found, names: list = names) -> None:
            if isinstance(y, Tensor) and y.ndim > 1 and len(y) == len(x):
                primal, tangent = forward_ad.unpack_dual(y)
                found.append(statistics_of(primal, torch.zeros_like(primal) if tangent is None else tangent, start))
                names.append(name)

        handles = [modules[name].register_forward_hook(lambda _m, _i, y, name=name: note(name, y)) for name in chosen]
        push(copy, (x.float(), dx))
        for handle in handles:
            handle.remove()
        rows.append(found)
    if not names:
        raise ValueError(f"module_moments: none of the probes {', '.join(chosen)} was called with one tensor as result")
    curves = {key: np.array([[place[key] for place in found] for found in rows]) for key in rows[0][0]}
    curves["inc"] = np.exp(np.diff(curves["logchi"], axis=1, prepend=0.0))
    return ModuleMoments(tuple(names), curves)


def _children(module: nn.Module) -> list[str]:
    name = ""
    while len(children := list(module.named_children())) == 1:
        name, module = f"{name}{children[0][0]}.", children[0][1]
    return [f"{name}{child}" for child, _ in children] or [name.rstrip(".")]
