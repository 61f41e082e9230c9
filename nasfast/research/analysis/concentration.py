"""An experiment on DI-NAS Theorem 1: how the mean inner product of N filters' responses deviates from its expectation.

The theorem bounds P(|A_N - E A| >= e) for A_N = (1 / N) sum_p <B sigma(F_p * h), B sigma(F_p * h')> by
2 n^2 exp(-min(K^2, K) c N), K = e / (D |gamma|^2 v^2 L^2 R^2 n^2). The constants c and D are unknown, so only scalings
can be tested. K falls as gamma grows, so the bound gets looser. The paper concludes that a large gamma means a module
closer to its expectation; that does not follow. A_N is proportional to gamma^2, so its relative deviation does not
depend on gamma. That a large gamma indicates a good module is therefore an empirical observation.

Errata of the paper: eq. 13 and 14 print sqrt(Var^2 - eps) for the normalisation, which should be sqrt(Var + eps). The
variance of filters is written both v and v^2; here v is their standard deviation. Eq. 24 and 25 mix Q_p and F; both
should be Q_p. C_1 is divided by sqrt(sum w_kk^2), where the derivation multiplies. "C_0 is large enough" is not proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.ops.orthogonal import orthogonalize
from nasfast.ops.reference import ACTIVATIONS

KINDS = ("gaussian", "per_filter", "flatten")
"""Kinds of filters: independent Gaussian; every k x k slice orthogonal; rows of orthogonal matrices of size k^2 d."""

# it only avoids 0 / 0, for filters whose responses a ReLU sets to 0
_EPS = 1e-30


@dataclass(frozen=True)
class Setting:
    """One experiment.

    Attributes:
        kind: one of KINDS.
        act: one of `nasfast.ops.reference.ACTIVATIONS`.
        norm: whether the responses of each filter to each input are divided by their standard deviation over positions,
            without centring, and multiplied by gamma.
        gamma: gamma of the normalisation.
        lipschitz: L of the activation L sigma.
        std: v, where the elements of filters have variance v^2 / (k^2 d).
        channels, size, kernel: d, n and k of the inputs (d, n, n) and filters (d, k, k); convolution is circular.
        correlation: correlation of the two Gaussian inputs.

    Raises:
        ValueError: the kind or the activation is unknown, or the kernel is even or too large.
    """

    kind: str = "gaussian"
    act: str = "tanh"
    norm: bool = False
    gamma: float = 1.0
    lipschitz: float = 1.0
    std: float = 1.0
    channels: int = 4
    size: int = 8
    kernel: int = 3
    correlation: float = 0.5

    def __post_init__(self) -> None:
        for name, value, valid in (("kind", self.kind, KINDS), ("act", self.act, tuple(ACTIVATIONS))):
            if value not in valid:
                raise ValueError(f"theorem 1: unknown {name} {value!r}; valid: {', '.join(valid)}")
        if self.kernel % 2 == 0 or self.kernel > self.size:
            raise ValueError(f"theorem 1: kernel must be odd and at most size {self.size}, got {self.kernel}")


@dataclass(frozen=True)
class Concentration:
    """Deviations |A_N - E A| over repeated draws of N filters.

    Attributes:
        setting: setting of the experiment.
        expectation: E A.
        counts: the values of N.
        rms, e95: root mean square and 95 % quantile of the deviations, for every N.
    """

    setting: Setting
    expectation: float
    counts: tuple[int, ...]
    rms: tuple[float, ...]
    e95: tuple[float, ...]

    @property
    def slope(self) -> float:
        """Slope of log rms against log N: -1/2 for independent filters; nan for a single N or without deviations."""
        if len(self.counts) < 2 or min(self.rms) <= 1e-10 * abs(self.expectation):
            return math.nan
        return float(np.polyfit(np.log(self.counts), np.log(self.rms), 1)[0])


def filters(setting: Setting, count: int, generator: torch.Generator) -> Tensor:
    """Random filters (count, d, k, k) in float64, whose elements have variance std^2 / (k^2 d) on average."""
    d, k = setting.channels, setting.kernel
    fan_in = d * k * k

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if setting.kind == "gaussian":
        f = normal(count, d, k, k) / math.sqrt(fan_in)
    elif setting.kind == "per_filter":
        f = orthogonalize([normal(count, d, k, k)])[0] / math.sqrt(k * d)
    else:
        blocks = -(-count // fan_in)
        f = orthogonalize([normal(blocks, fan_in, fan_in)])[0].reshape(-1, d, k, k)[:count]
    return setting.std * f


def responses(setting: Setting, f: Tensor, h: Tensor) -> Tensor:
    """The responses B sigma(F_p * h), (filters, n^2), of filters (filters, d, k, k) to an input (d, n, n)."""
    p = setting.kernel // 2
    y = F.conv2d(F.pad(h[None], (p, p, p, p), mode="circular"), f)[0].flatten(1)
    y = setting.lipschitz * ACTIVATIONS[setting.act](y)
    if setting.norm:
        y = setting.gamma * y / (y.var(1, correction=0, keepdim=True) + _EPS).sqrt()
    return y


def deviations(
    setting: Setting,
    *,
    counts: Sequence[int] = (36, 144, 576),
    repeats: int = 100,
    reference_filters: int = 20_000,
    seed: int = 0,
) -> Concentration:
    """Measure the deviations from the mean over `reference_filters`, for every N of counts.

    Linear `flatten` filters without normalisation need no reference, because every whole orthogonal matrix has A = E A.

    Args:
        setting: setting of the experiment.
        counts: the values of N.
        repeats: number of draws for each N.
        reference_filters: number of filters whose mean estimates E A.
        seed: seed of the inputs and filters.

    Raises:
        ValueError: there are no counts, a count is below 1, or there are fewer than two repeats.
    """
    if not counts or min(counts) < 1 or repeats < 2:
        raise ValueError(f"theorem 1: needs counts of at least 1 and two repeats, got {tuple(counts)} and {repeats}")
    generator = torch.Generator().manual_seed(seed)
    shape = (setting.channels, setting.size, setting.size)
    h, other = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    h2 = setting.correlation * h + math.sqrt(1 - setting.correlation**2) * other

    def mean_inner(count: int) -> float:
        f = filters(setting, count, generator)
        return float((responses(setting, f, h) * responses(setting, f, h2)).sum(1).mean())

    constant = setting.kind == "flatten" and setting.act == "identity" and not setting.norm
    expectation = mean_inner(setting.channels * setting.kernel**2 if constant else reference_filters)
    rms, e95 = [], []
    for count in counts:
        distances = np.abs([mean_inner(count) - expectation for _ in range(repeats)])
        rms.append(float(np.sqrt(np.mean(distances**2))))
        e95.append(float(np.quantile(distances, 0.95)))
    return Concentration(setting, expectation, tuple(counts), tuple(rms), tuple(e95))


def exponents(setting: Setting, *, count: int = 144, repeats: int = 10, seed: int = 0) -> dict[str, float]:
    """Powers of gamma, lipschitz and std by which the deviation grows, measured by doubling each on the same filters.

    For identity and relu they are 2, 0 and 0 with normalisation, and 0, 2 and 2 without. tanh has the same powers of
    gamma and lipschitz, but its deviation is no power of std.

    Raises:
        ValueError: nothing deviates, as with linear `flatten` filters of whole matrices without normalisation.
    """

    def measured(s: Setting) -> Concentration:
        return deviations(s, counts=(count,), repeats=repeats, reference_filters=2000, seed=seed)

    before = measured(setting)
    if before.rms[0] < 1e-10 * abs(before.expectation):
        raise ValueError(
            f"exponents: {count} filters of this setting deviate by rounding alone: take a count that is no multiple "
            f"of {setting.channels * setting.kernel**2}"
        )
    return {
        name: math.log2(measured(replace(setting, **{name: 2 * getattr(setting, name)})).rms[0] / before.rms[0])
        for name in ("gamma", "lipschitz", "std")
    }


@dataclass(frozen=True)
class Theorem1:
    """Results of the whole experiment, one row per activation, normalisation and kind of filters."""

    rows: tuple[Concentration, ...]

    def ratio(self, row: Concentration, count: int) -> float:
        """The rms at N = count, divided by that of Gaussian filters in the same setting."""
        gaussian = replace(row.setting, kind="gaussian")
        (base,) = (r for r in self.rows if r.setting == gaussian)
        return row.rms[row.counts.index(count)] / base.rms[base.counts.index(count)]


def theorem1(
    *,
    acts: Iterable[str] = ("identity", "tanh", "relu"),
    counts: Sequence[int] = (36, 144, 576),
    repeats: int = 100,
    reference_filters: int = 20_000,
    seed: int = 0,
) -> Theorem1:
    """Measure every kind of filters under every activation, with and without normalisation; it takes seconds.

    Args:
        acts: the activations.
        counts, repeats, reference_filters, seed: see `deviations`.

    Raises:
        ValueError: see `Setting` and `deviations`.
    """
    settings = [Setting(kind, act, norm) for act in acts for norm in (False, True) for kind in KINDS]
    return Theorem1(
        tuple(
            deviations(s, counts=counts, repeats=repeats, reference_filters=reference_filters, seed=seed)
            for s in settings
        )
    )
