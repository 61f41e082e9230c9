"""DI-NAS Theorem 1, tried out: how the mean inner product of N filters' responses concentrates around its expectation.

The theorem bounds P(|A_N - E A| >= e) for A_N = (1 / N) sum_p <B sigma(F_p * h), B sigma(F_p * h')> by
2 n^2 exp(-min(K^2, K) c N), K = e / (D |gamma|^2 v^2 L^2 R^2 n^2). The constants c and D are unknown, so only scalings
can be tested. K falls as gamma grows: the bound gets looser, and the paper's reading of it, that a large gamma means a
module closer to its expectation, does not follow. A_N scales exactly by gamma^2, so its relative deviation does not
depend on gamma at all. That a large gamma marks a good module stays an empirical score.

Errata of the paper: eq. 13 and 14 print sqrt(Var^2 - eps) for the normalisation, which is sqrt(Var + eps); the variance
of filters is written v and v^2, and v is their standard deviation here; eq. 24 and 25 mix Q_p and F, and both are Q_p;
C_1 is given as a quotient by sqrt(sum w_kk^2), by which the derivation multiplies; "C_0 is large enough" is not proved.
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
"""Filters: independent Gaussian; every k x k slice orthogonal; N filters as rows of orthogonal blocks of k^2 d."""

# keeps filters that a ReLU silences from 0 / 0, and nothing else
_EPS = 1e-30


@dataclass(frozen=True)
class Setting:
    """One experiment.

    Attributes:
        kind: of KINDS.
        act: of `nasfast.ops.reference.ACTIVATIONS`.
        norm: whether the responses of each filter to each input are divided by their standard deviation over positions,
            without centring, and multiplied by gamma.
        gamma, lipschitz, std: gamma of the normalisation, L of the activation L sigma, and v, where the elements of
            filters have variance v^2 / (k^2 d).
        channels, size, kernel: d, n and k of the inputs (d, n, n) and filters (d, k, k); convolution is circular.
        correlation: of the two Gaussian inputs.

    Raises:
        ValueError: unknown kind or activation, even or too large kernel.
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
        setting: of the experiment.
        expectation: E A.
        counts: the N.
        rms, e95: root mean square and 95 % quantile of the deviations for every N.
    """

    setting: Setting
    expectation: float
    counts: tuple[int, ...]
    rms: tuple[float, ...]
    e95: tuple[float, ...]

    @property
    def slope(self) -> float:
        """Of log rms against log N: -1/2 for independent filters; nan for one N or where no deviation is left."""
        if len(self.counts) < 2 or min(self.rms) <= 1e-10 * abs(self.expectation):
            return math.nan
        return float(np.polyfit(np.log(self.counts), np.log(self.rms), 1)[0])


def filters(setting: Setting, count: int, generator: torch.Generator) -> Tensor:
    """(count, d, k, k) filters with elements of variance std^2 / (k^2 d) on average, float64."""
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
    """B sigma(F_p * h), (filters, n^2), of filters (filters, d, k, k) and an input (d, n, n)."""
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
    """Measure the deviations for every N of counts, from the mean over `reference_filters`.

    Linear `flatten` filters without normalisation need no reference: every whole orthogonal block has A = E A.

    Raises:
        ValueError: no counts, or one below 1; fewer than two repeats.
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
        found = np.abs([mean_inner(count) - expectation for _ in range(repeats)])
        rms.append(float(np.sqrt(np.mean(found**2))))
        e95.append(float(np.quantile(found, 0.95)))
    return Concentration(setting, expectation, tuple(counts), tuple(rms), tuple(e95))


def exponents(setting: Setting, *, count: int = 144, repeats: int = 10, seed: int = 0) -> dict[str, float]:
    """Powers by which the deviation grows with gamma, lipschitz and std, from doubling each on the same filters.

    2, 0 and 0 with normalisation and 0, 2 and 2 without, for identity and relu. tanh has the same powers of gamma and
    lipschitz, but is no power of std.
    """

    def rms(s: Setting) -> float:
        return deviations(s, counts=(count,), repeats=repeats, reference_filters=2000, seed=seed).rms[0]

    before = rms(setting)
    return {
        name: math.log2(rms(replace(setting, **{name: 2 * getattr(setting, name)})) / before)
        for name in ("gamma", "lipschitz", "std")
    }


@dataclass(frozen=True)
class Theorem1:
    """Results of the whole experiment, one row per activation, normalisation and kind of filters."""

    rows: tuple[Concentration, ...]

    def ratio(self, row: Concentration, count: int) -> float:
        """rms at N = count over that of Gaussian filters in the same setting."""
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
    """Measure every kind of filters under every activation, with and without normalisation; seconds by default.

    Raises:
        ValueError: as `Setting` and `deviations`.
    """
    settings = [Setting(kind, act, norm) for act in acts for norm in (False, True) for kind in KINDS]
    return Theorem1(
        tuple(
            deviations(s, counts=counts, repeats=repeats, reference_filters=reference_filters, seed=seed)
            for s in settings
        )
    )
