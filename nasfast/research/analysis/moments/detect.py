"""Fits of the sensitivity against depth, and the detection of pathologies with its evidence (Labatie 2019)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nasfast.research.analysis.moments.networks import Run

Array = NDArray[np.float64]

ZERO_DIMENSIONAL = "zero-dimensional signal"
ONE_DIMENSIONAL = "one-dimensional signal"
EXPLODING = "exploding sensitivity"
SCALING = "scaling"
WELL_BEHAVED = "well behaved"
UNDECIDED = "undecided"

# Thresholds that stand for limits at finite depth: mu_2 / nu_2 -> 0, r_eff -> 1, chi >= exp(gamma l), |log nu_2| ~ l.
_SHARE, _RANK, _SLOPE, _SCALING = 1e-2, 1.3, 0.02, 0.05
# Smallest R^2 of a valid fit, and smallest effective rank of a rich signal.
_R2, _RICH = 0.995, 3.0
# Smallest R^2 of a steady growth.
_STEADY = 0.9
# Smallest number of records of a valid fit.
_FEW = 4


@dataclass(frozen=True)
class Line:
    """The least-squares line y = intercept + slope x and its R^2."""

    slope: float
    intercept: float
    r2: float


def fit_line(x: Array, y: Array) -> Line:
    """The straight line through the finite points; nan if there are fewer than two."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) < 2 or np.ptp(x) == 0:
        return Line(math.nan, math.nan, math.nan)
    slope, intercept = np.polyfit(x, y, 1)
    rest, spread = np.square(y - intercept - slope * x).sum(), np.square(y - y.mean()).sum()
    return Line(float(slope), float(intercept), float(1 - rest / spread) if spread > 0 else math.nan)


@dataclass(frozen=True)
class PowerLaw:
    """chi = c l^tau; tau is not fitted but predicted from the increments of the first units (theorem 4)."""

    tau: float
    c: float


def fit_power_law(depth: Array, chi: Array, increments: Array, units: int) -> PowerLaw:
    """tau = ((mean_l delta chi^{l,1})^{2H} - 1) / 2 and c = sum chi l^tau / sum l^{2 tau}.

    Args:
        depth: layers l of the records.
        chi: chi after layer l, averaged over realisations.
        increments: increments of the first unit: mean chi(y^{l,1}) divided by mean chi(y^{l,0}).
        units: number of units per residual, H.
    """
    tau = (float(np.mean(increments)) ** (2 * units) - 1) / 2
    power = np.asarray(depth, dtype=float) ** tau
    return PowerLaw(tau, float((chi * power).sum() / (power**2).sum()))


def predict_power_law(run: Run) -> PowerLaw:
    """`fit_power_law` for the run of a residual network."""
    chi, first = np.exp(run.log_chi("sum")), np.exp(run.log_chi("unit"))
    increments = first.mean(0) / np.exp(run.log_chi("input")).mean(0)
    return fit_power_law(run.depth, chi.mean(0), increments, run.cfg.residual)


def summarise(curves: Mapping[str, Array]) -> dict[str, Array]:
    """Statistics of curves over realisations; nan where no realisation has a value.

    Returns:
        `NAME_mean`, `NAME_std`, `NAME_p16` and `NAME_p84`.
    """
    result: dict[str, Array] = {}
    for name, values in curves.items():
        finite = np.where(np.isfinite(values), values, np.nan)
        with warnings.catch_warnings():
            # numpy warns of a record without a value
            warnings.simplefilter("ignore", RuntimeWarning)
            low, high = np.nanquantile(finite, (0.16, 0.84), axis=0)
            result |= {f"{name}_mean": np.nanmean(finite, 0), f"{name}_std": np.nanstd(finite, 0)}
        result |= {f"{name}_p16": low, f"{name}_p84": high}
    return result


@dataclass(frozen=True)
class Verdict:
    """The verdict on a network, and its evidence.

    Attributes:
        names: names of the pathologies, or `well behaved` or `undecided` if there are none; `scaling` is added to
            these.
        evidence: the numbers to which the rules of docs/moments.md apply.
    """

    names: tuple[str, ...]
    evidence: dict[str, float]

    def __str__(self) -> str:
        return ", ".join(self.names)


def detect(depth: Array, curves: Mapping[str, Array]) -> Verdict:
    """Apply the rules of docs/moments.md to averages over realisations.

    Args:
        depth: (records,) layers l.
        curves: `logchi`, `reff_signal`, `variance_share` (mu_2 / nu_2) and `lognu2`, each (records,) or (realisations,
            records). Records whose signal is lost in rounding are nan and left out.
    """
    mean = {name: summarise({name: np.atleast_2d(values)})[f"{name}_mean"] for name, values in curves.items()}
    valid = np.isfinite(mean["logchi"]) & np.isfinite(mean["variance_share"])
    layers, mean = np.asarray(depth, dtype=float)[valid], {name: values[valid] for name, values in mean.items()}
    if not len(layers):
        raise ValueError("detect: no record with a signal")
    half, late = layers >= layers[-1] / 2, layers > layers[-1] / 4
    log_chi, rank = mean["logchi"], mean["reff_signal"]
    exponential = fit_line(layers[late], log_chi[late])
    exponential_log = fit_line(np.log(layers[late]), log_chi[late])
    power, power_linear = fit_line(np.log(layers), log_chi), fit_line(layers, log_chi)
    evidence = {
        "share": float(mean["variance_share"][-1]),
        "share_slope": fit_line(layers[half], np.log(mean["variance_share"][half])).slope,
        "rank": float(rank[-1]),
        "rank_slope": fit_line(layers[half], rank[half]).slope,
        "slope": exponential.slope,
        "slope_r2": exponential.r2,
        "slope_r2_against_log": exponential_log.r2,
        "exponent": power.slope,
        "exponent_r2": power.r2,
        "exponent_r2_against_l": power_linear.r2,
        "log_chi": float(log_chi[-1]),
        "noise_factor_db": float(20 / math.log(10) * log_chi[-1]),
        "log_nu2_per_layer": float(mean["lognu2"][-1] / layers[-1]),
    }
    names = []
    if evidence["share"] < _SHARE and evidence["share_slope"] < 0:
        names.append(ZERO_DIMENSIONAL)
    if evidence["rank"] < _RANK and evidence["rank_slope"] < 0:
        names.append(ONE_DIMENSIONAL)
    if late.sum() >= _FEW and exponential.slope > _SLOPE and exponential.r2 > max(_R2, exponential_log.r2):
        names.append(EXPLODING)
    if not names:
        rich = len(layers) >= _FEW and power.r2 > max(_R2, power_linear.r2) and evidence["rank"] > _RICH
        names.append(WELL_BEHAVED if rich else UNDECIDED)
    # steps between stages, and the log l of residuals, do not count as scaling
    growth, growth_log = (fit_line(x[half], mean["lognu2"][half]) for x in (layers, np.log(layers)))
    steady = half.sum() >= _FEW and growth.r2 > max(_STEADY, growth_log.r2) and abs(growth.slope) > _SCALING
    if steady and abs(evidence["log_nu2_per_layer"]) > _SCALING:
        names.append(SCALING)
    return Verdict(tuple(names), evidence)


def dilution_bounds(run: Run) -> tuple[Array, Array, Array]:
    """Theorem 4: lower bound, measured mean and upper bound of delta chi^l of a residual network, for each record.

    A bound is (1 + (G^2 - 1) mu / mu' / (l + 1))^{1/2}, with the smallest and largest variances mu, mu' of the branches
    (that of the input is 1) and the smallest or largest growth G = chi^{l,H} / chi^{l-1} over the records.
    """
    growth = np.exp(2 * (run.log_chi("branch") - run.log_chi("input"))).mean(0)
    variance = np.append(np.exp(run.values["log_mu2_signal_branch"]).mean(0), 1.0)
    ratio = variance.min() / variance.max()
    low, high = (growth.min() - 1) * ratio, (growth.max() - 1) / ratio
    return (
        np.sqrt(1 + low / (run.depth + 1)),
        run.curves()["inc_residual"].mean(0),
        np.sqrt(1 + high / (run.depth + 1)),
    )
