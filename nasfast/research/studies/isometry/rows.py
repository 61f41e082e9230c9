"""The results of the isometry study, as rows of its file: candidates, spreads, convolutions, and path spreads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nasfast.research.analysis.jacobian import Isometry

EDGES = np.linspace(0, 5, 51)
"""Bins of the singular value histograms."""
SPREADS = ("f_mean", "f_var", "f_iso", "f_phi", "distortion", "disagreement")
"""The spreads of `nasfast.research.analysis.fairness.Fairness` that a row has."""


@dataclass(frozen=True)
class Row:
    """One candidate of one layer, or one part of a module, under one setting.

    Attributes:
        setting: initialisation and activation.
        layer: index, or -1 in a module that is no supernet.
        name: name of the candidate or part.
        branch: isometry without the skip connection or the bypassing half; this is what is judged.
        module: isometry with it; None where both are the same.
        var_in, var_out: variance of the branch's input and output, averaged over channels.
        acts: activations in the branch; None if unknown.
        histogram: share of the branch's singular values in every bin of EDGES.
    """

    setting: str
    layer: int
    name: str
    branch: Isometry
    module: Isometry | None
    var_in: float
    var_out: float
    acts: int | None
    histogram: tuple[float, ...]

    @property
    def gain(self) -> float:
        """phi Var(in) / Var(out): how much faster small differences grow than the signal; 1 for a linear branch."""
        return self.branch.phi * self.var_in / self.var_out if self.var_out > 0 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON, with the gain; densities are quantiles."""
        module = None if self.module is None else self.module.to_dict()
        return {**vars(self), "branch": self.branch.to_dict(), "module": module, "gain": self.gain}


@dataclass(frozen=True)
class Spread:
    """How much the candidates of one layer differ, as `nasfast.research.analysis.fairness.Fairness` measures it.

    Attributes:
        setting: initialisation and activation.
        layer: index; None in a mean over layers.
        indicator_bn: whether the candidates have their indicator BatchNorms.
        f_mean, f_var, f_iso, f_phi, distortion, disagreement: spreads; None where they are not known.
    """

    setting: str
    layer: int | None
    indicator_bn: bool
    f_mean: float | None
    f_var: float | None
    f_iso: float | None
    f_phi: float | None
    distortion: float | None
    disagreement: float | None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON; a mean has no layer."""
        form = asdict(self)
        if self.layer is None:
            del form["layer"]
        return form


def spread_means(spreads: Sequence[Spread]) -> list[Spread]:
    """Means of the spreads over layers, for every setting with and without indicator BatchNorms.

    A spread that no layer has is None.
    """
    means = []
    for setting in dict.fromkeys(s.setting for s in spreads):
        for indicator_bn in (True, False):
            found = [s for s in spreads if (s.setting, s.indicator_bn) == (setting, indicator_bn)]
            known = {key: [v for s in found if (v := getattr(s, key)) is not None] for key in SPREADS}
            mean = {key: float(np.mean(values)) if values else None for key, values in known.items()}
            means.append(Spread(setting, None, indicator_bn, **mean))
    return means


@dataclass(frozen=True)
class PathSpread:
    """How differently random paths scale a signal, by layer (`nasfast.research.analysis.fairness.DepthSpread`)."""

    setting: str
    indicator_bn: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    ratio: tuple[float, ...]


@dataclass(frozen=True)
class ConvolutionMoments:
    """phi / g^2 and varphi / g^4 of one kind of convolution.

    Attributes:
        setting: initialisation and activation.
        kind: kind of the convolutions, such as `depthwise 3 x 3`.
        count: number of convolutions of this kind.
        phi, varphi: moments of their circular Jacobians.
        expected_varphi: varphi by the closed form; None if there is none.
    """

    setting: str
    kind: str
    count: int
    phi: float
    varphi: float
    expected_varphi: float | None


def bn_text(indicator_bn: bool) -> str:
    """Whether the indicator BatchNorms are there, in words."""
    return f"{'with' if indicator_bn else 'without'} indicator BN"
