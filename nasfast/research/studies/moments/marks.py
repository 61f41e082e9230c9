"""The pass marks of the moments study: of each family of networks, and against the published arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nasfast.research.analysis.moments.detect import (
    EXPLODING,
    ONE_DIMENSIONAL,
    WELL_BEHAVED,
    Line,
    PowerLaw,
    Verdict,
    detect,
    dilution_bounds,
    fit_line,
    fit_power_law,
    predict_power_law,
)
from nasfast.research.analysis.moments.networks import Run, read_arrays
from nasfast.research.studies.moments.config import FiguresConfig
from nasfast.research.studies.report import Check, name_checks

SQRT2 = math.sqrt(2)
# Ranks are averaged over twenty layers before they are compared. A rise within two standard errors does not count.
_AVERAGED, _SIGMAS = 20, 2.0
_CURVES = ("inc", "inc_bn", "inc_phi", "logchi", "reff_signal", "reff_noise", "mu4_z", "nu1abs_z")
# Relative deviation that is allowed beside four standard errors.
_RELATIVE = {"reff_signal": 0.03, "reff_noise": 0.03, "mu4_z": 0.03}
Published = dict[str, Any]
"""The published arrays of one figure, at the depths that a run has too, and its `name`; empty where there are none."""


def published(cfg: FiguresConfig, figure: int) -> Published:
    """Read the arrays of a figure from the folder that the config names."""
    name = cfg.published(figure)
    if cfg.reference is None or name is None or not (file := Path(cfg.reference) / f"{name}.npz").exists():
        return {}
    arrays = read_arrays(file)
    common = np.isin(arrays["depth"], cfg.network(figure).records)
    cut = {key: v[..., common] if v.shape[-1:] == common.shape else v for key, v in arrays.items()}
    return {"name": name, **cut} if common.any() else {}


def published_law(arrays: Mapping[str, np.ndarray]) -> PowerLaw:
    """The power law of figure 5, fitted to published arrays."""
    return fit_power_law(
        arrays["depth"], arrays["chi_mean"], arrays["inc_ratio_of_means"], int(arrays["units_per_residual"])
    )


def vanilla_checks(kind: str, run: Run, verdict: Verdict) -> list[Check]:
    """Marks of networks without normalisation."""
    curves = run.curves()
    inc, rank = curves["inc"].mean(0), curves["reff_signal"]
    marks = {
        "smallest increment (theorem 2: 1)": (0.95, SQRT2, inc.min()),
        "largest increment (theorem 2: sqrt 2)": (0.95, SQRT2, inc.max()),
    }
    if kind == "FC":
        marks |= {
            "increment, last half": (0.98, 1.03, inc[run.depth > run.depth[-1] / 2].mean()),
            "r_eff(L)": (1, 1.3, rank[:, -1].mean()),
            "detected one-dimensional": (1, 1, ONE_DIMENSIONAL in verdict.names),
        }
    else:
        steps = np.diff(rank.reshape(len(rank), -1, _AVERAGED // run.cfg.every).mean(2), axis=1)
        rise = steps.mean(0) / (steps.std(0, ddof=1) / math.sqrt(len(steps)))
        marks |= {
            "r_eff(L)": (1, 4, rank[:, -1].mean()),
            "largest rise of r_eff in 20 layers, in standard errors": (-math.inf, _SIGMAS, rise.max()),
        }
    return name_checks(f"{kind}, vanilla", marks)


def exploding_checks(kind: str, run: Run, verdict: Verdict) -> list[Check]:
    """Marks of networks with BatchNorm and without skip connections."""
    curves, e = run.curves(), verdict.evidence
    phi = curves["inc_phi"].mean(0)
    # theorem 3, second factor: from the mean absolute values of the normalised signal alone
    predicted = (1 - run.values["nu1_abs_squared_signal_norm"].mean(0) / 2) ** -0.5
    marks = {
        "slope of log chi": (*((0.18, 0.23) if kind == "FC" else (0.15, 0.21)), e["slope"]),
        "smallest ReLU part (theorem 3: 1)": (0.99, SQRT2, phi.min()),
        "largest ReLU part (theorem 3: sqrt 2)": (0.99, SQRT2, phi.max()),
        "ReLU part minus that of theorem 3": (-0.01, 0.01, (phi - predicted).mean()),
    }
    if kind == "FC":
        marks |= {
            "R^2 of exponential": (0.999, 1, e["slope_r2"]),
            "detected exploding": (1, 1, EXPLODING in verdict.names),
        }
    else:
        marks["mu_4(z) at L, fat tails"] = (6, math.inf, curves["mu4_z"][:, -1].mean())
    return name_checks(f"{kind}, BN feed-forward", marks)


def resnet_checks(kind: str, run: Run, verdict: Verdict) -> list[Check]:
    """Marks of residual networks with BatchNorm."""
    e, tau = verdict.evidence, predict_power_law(run).tau
    low, mean, high = dilution_bounds(run)
    marks = {
        "R^2 of power law": (0.99, 1, e["exponent_r2"]),
        "R^2 of power law minus exponential": (0, 1, e["exponent_r2"] - e["exponent_r2_against_l"]),
        "exponent minus tau": (-0.15, 0.15, e["exponent"] - tau),
        "r_eff(L)": (4, math.inf, e["rank"]),
        # both bounds hold up to small relative errors: a percent of the increment
        "increment over lower bound of theorem 4, smallest": (0.99, math.inf, (mean / low).min()),
        "increment over upper bound of theorem 4, largest": (0, 1.01, (mean / high).max()),
    }
    if kind == "FC":
        marks["detected well behaved"] = (1, 1, WELL_BEHAVED in verdict.names)
    return name_checks(f"{kind}, BN resnet", marks)


def fit_growth(run: Run) -> Line:
    """How log nu_2 grows with depth."""
    return fit_line(run.depth, run.curves()["lognu2"].mean(0))


def variant_checks(runs: Mapping[str, Run]) -> list[Check]:
    """Marks of the variants."""
    e = {name: detect(run.depth, run.curves()).evidence for name, run in runs.items()}
    growth = fit_growth(runs["ReLU resnet without BN"])
    return [
        Check("layer norm: mu_2/nu_2 at L", 0, 1e-2, e["layer norm"]["share"]),
        Check("tanh, chaotic: slope of log chi", 0.12, 0.15, e["tanh, chaotic"]["slope"]),
        Check("tanh with BN: slope of log chi", 0.085, 0.105, e["tanh with BN"]["slope"]),
        Check("ReLU resnet without BN: growth of log nu_2", 0.6, 0.7, growth.slope),
        Check("ReLU resnet without BN: linear, R^2", 0.99, 1, growth.r2),
    ]


def agreement(
    cfg: FiguresConfig, figure: int, run: Run, reference: Published
) -> tuple[list[tuple[str, ...]], list[Check]]:
    """Rows and pass marks of one figure: deviations over what scatter and rounding of the reference allow."""
    checks, name, count = [], reference["name"], float(reference["n_real"])
    rows: list[tuple[str, ...]] = []
    depth, networks = reference["depth"], run.realisations
    curves = {key: values[:, np.isin(run.depth, depth)] for key, values in run.curves().items()}

    def compare(key: str, measured: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> None:
        ratio = np.abs(measured - expected) / allowed
        i = int(np.nanargmax(ratio))
        values = f"{measured[i]:.4f}", f"{expected[i]:.4f}", f"{ratio[i]:.2f}"
        rows.append((f"{name}: {key}", f"{abs(measured[i] - expected[i]):.4f}", f"{depth[i]:.0f}", *values))
        checks.append(Check(f"{name}: {key}, largest deviation over the allowed", 0, 1, float(ratio.max())))

    if figure == 2:
        if cfg.images is not None:
            for key in ("lognu2", "logmu2_noise"):
                mean, std = reference[f"{key}_mean"], reference[f"{key}_std"]
                compare(f"mean {key}", curves[key].mean(0), mean, 4 * std * math.sqrt(1 / networks + 1 / count))
                # fat tails scatter more than a normal's std / sqrt(2 n)
                scatter = np.sqrt((reference[f"{key}_kurt"] + 2) / 4 * (1 / networks + 1 / count))
                compare(f"std {key}", curves[key].std(0), std, 4 * std * scatter)
        return rows, checks
    if cfg.images is not None:
        for key in _CURVES:
            if f"{key}_mean" not in reference or key not in curves:
                continue
            mean, std = reference[f"{key}_mean"], reference[f"{key}_std"]
            allowed = 4 * std * math.sqrt(1 / networks + 1 / count) + _RELATIVE.get(key, 0.005) * np.abs(mean)
            compare(key, curves[key].mean(0), mean, allowed + (0.02 if key == "logchi" else 0))
    # slope and exponent need the whole depth
    if figure == 4 and depth[-1] > 150:
        late = depth > 100
        log_chis = curves["logchi"].mean(0), reference["logchi_mean"]
        measured, expected = (fit_line(depth[late], log_chi[late]).slope for log_chi in log_chis)
        checks.append(Check.near(f"{name}: slope of log chi, l > 100", expected, 0.004, measured))
    if figure == 5 and cfg.depth is None:
        tau = published_law(reference).tau
        checks.append(Check.near(f"{name}: tau", tau, 0.02, predict_power_law(run).tau))
    return rows, checks


def data_checks(folder: Path) -> list[Check]:
    """Marks of the published arrays alone: the ReLU part of theorem 3, and the published fit of figure 5."""
    checks = []
    for file in sorted(folder.glob("bn_ff_*.npz")):
        arrays = read_arrays(file)
        distance = np.abs((1 - arrays["nu1abs_z_mean"] ** 2 / 2) ** -0.5 - arrays["inc_phi_mean"]).max()
        name = f"{file.stem}: ReLU part against theorem 3, largest distance"
        checks.append(Check(name, 0, 0.006, float(distance)))
    if (file := folder / "bn_res_conv.npz").exists():
        law = published_law(read_arrays(file))
        checks.append(Check("bn_res_conv: tau of the published arrays", 0.548, 0.550, law.tau))
        checks.append(Check("bn_res_conv: C of the published arrays", 1.1037, 1.1057, law.c))
    return checks
