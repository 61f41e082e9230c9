"""The tables of the moments study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from nasfast.research.analysis.moments.detect import Verdict, power_law_of, summarise
from nasfast.research.analysis.moments.module import ModuleMoments
from nasfast.research.analysis.moments.networks import Run
from nasfast.research.studies.moments.marks import Variants
from nasfast.research.studies.moments.measure import Paths
from nasfast.research.studies.parts import Table
from nasfast.spaces import SearchSpace

_DB = 20 / math.log(10)
"""Decibels of a log chi of 1."""


def summary_table(title: str, runs: Mapping[str, Run], seconds: Mapping[str, float]) -> Table:
    """The averages over networks at four depths."""
    columns = {"": "", "l": ".0f", "log chi": ".3f", "dB": ".1f", "increment": ".4f", "BN part": ".4f"}
    columns |= {"other part": ".4f", "r_eff(x)": ".2f", "r_eff(dx)": ".2f", "mu_4(z)": ".2f", "log nu_2(x)": ".2f"}
    rows = []
    for name, found in runs.items():
        mean = {key: values.mean(0) for key, values in found.curves().items()}
        keys = ("inc", "inc_bn", "inc_phi", "reff_signal", "reff_noise", "mu4_z", "lognu2")
        for i in sorted({0, len(found.depth) // 4, len(found.depth) // 2, len(found.depth) - 1}):
            chi = mean["logchi"][i]
            # networks without BatchNorm have no parts and no normalised signal
            left_out = () if "inc_bn" in mean else ("inc_bn", "inc_phi", "mu4_z")
            values = [None if key in left_out else mean[key][i] for key in keys]
            size = (str(found.realisations), f"{seconds[name]:.1f}") if i == 0 else ("", "")
            rows.append((name if i == 0 else "", found.depth[i], chi, _DB * chi, *values, *size))
    return Table.of(title, {**columns, "networks": "", "seconds": ""}, rows)


def fit_table(runs: Mapping[str, Run], verdicts: Mapping[str, Verdict]) -> Table:
    """The fits of every run, and the verdict."""
    header = ("fits of log chi", "slope", "R^2", "exponent", "R^2", "tau", "r_eff(L)", "verdict")
    rows = []
    for name, found in runs.items():
        e = verdicts[name].evidence
        tau = f"{power_law_of(found).tau:.3f}" if found.cfg.residual else "-"
        slope, exponent = (
            (f"{e['slope']:.4f}", f"{e['slope_r2']:.5f}"),
            (f"{e['exponent']:.3f}", f"{e['exponent_r2']:.5f}"),
        )
        rows.append((name, *slope, *exponent, tau, f"{e['rank']:.2f}", str(verdicts[name])))
    return Table("exponential fit on l > L/4, power law on all l", header, tuple(rows))


def variants_table(found: Variants) -> Table:
    """What the variants of the quick experiment do."""
    growth = f"log nu_2 grows by {found.growth.slope:.3f} per residual, r_eff {found.rank:.2f}"
    rows = (
        ("layer norm", f"mu_2/nu_2 {found.layer_share:.2g}: zero-dimensional signal"),
        ("tanh, chaotic (sigma_w 2, sigma_b 0.3)", f"log chi grows by {found.tanh_slope:.3f} per layer"),
        ("tanh with BN", f"log chi grows by {found.tanh_bn_slope:.3f} per layer"),
        ("ReLU resnet without BN, H = 2", growth),
    )
    return Table("variants, averages over networks", ("", "measured"), rows)


def path_table(found: Mapping[str, Paths], verdicts: Mapping[str, Verdict]) -> Table:
    """The averages over random paths behind the last layer."""
    judged = {"log chi(L)": ("log_chi", ".3f"), "dB": ("noise_factor_db", ".1f"), "exponent": ("exponent", ".3f")}
    judged |= {
        "R^2": ("exponent_r2", ".4f"),
        "R^2 exponential": ("exponent_r2_against_l", ".4f"),
        "r_eff(x)": ("rank", ".1f"),
    }
    columns = {"random paths": "", **{text: digits for text, (_, digits) in judged.items()}}
    columns |= {"r_eff(dx)": ".1f", "mu_2/nu_2": ".3f", "pseudo-linear": ".3f", "verdict": ""}
    rows = []
    for name, paths in found.items():
        e, last = verdicts[name].evidence, {key: values.mean(0)[-1] for key, values in paths.curves.items()}
        values = [e[key] for key, _ in judged.values()]
        rows.append((name, *values, last["reff_noise"], e["share"], last["pseudo_linear"], str(verdicts[name])))
    return Table.of("from the stem to the last layer", columns, rows)


def layer_table(found: Mapping[str, Paths], space: SearchSpace) -> Table:
    """The averages over random paths, layer by layer."""
    columns = {"layer": ""}
    for name in found:
        columns |= {f"{name}: delta chi": ".3f", f"{name}: log chi": ".3f", f"{name}: r_eff": ".1f"}
    rows: list[list[str | float]] = []
    for index, layer in enumerate(space.layers):
        rows.append([f"{index} {'' if layer.normal else 'reduction'}".strip()])
        for paths in found.values():
            chi, rank = (paths.curves[key].mean(0) for key in ("logchi", "reff_signal"))
            rows[-1] += [math.exp(chi[index] - (chi[index - 1] if index else 0.0)), chi[index], rank[index]]
    return Table.of("averages over paths (increments: geometric)", columns, rows)


def stage_table(found: Mapping[str, Paths], reductions: Sequence[int]) -> Table:
    """Increments by place within a stage, beside those that theorem 4 predicts from the first.

    By the theorem the k-th residual of a stage adds a branch of variance 1 to a sum of k branches. The branch has the
    growth G of the reduction.
    """
    places: dict[int, list[int]] = {}
    for first, end in zip(reductions, [*reductions[1:], None], strict=True):
        for k, layer in enumerate(range(first, next(iter(found.values())).layers if end is None else end)):
            places.setdefault(k, []).append(layer)
    header = ("layer of a stage", *(f"{name}{text}" for name in found for text in (": delta chi", ", diluted")))
    steps = [np.diff(paths.curves["logchi"].mean(0), prepend=0.0) for paths in found.values()]
    rows: list[list[str | float | None]] = []
    for k, layers in places.items():
        rows.append(["reduction" if k == 0 else f"{k} later"])
        for step in steps:
            growth = math.exp(2 * step[places[0]].mean())
            rows[-1] += [math.exp(step[layers].mean()), math.sqrt(1 + (growth - 1) / (k + 1)) if k else None]
    rows.append(["whole stage"])
    for step in steps:
        rows[-1] += [math.exp(sum(step[layers].mean() for layers in places.values())), None]
    return Table.of("within a stage, averages over stages", dict.fromkeys(header, ".3f"), rows)


def candidate_table(found: Mapping[str, Paths]) -> Table:
    """The increment of every candidate of every layer."""
    places = list(dict.fromkeys(place for paths in found.values() for place in paths.increments))
    rows = [
        (f"{layer} {name}", *(math.exp(np.mean(paths.increments[layer, name])) for paths in found.values()))
        for layer, name in places
    ]
    columns = {"layer and candidate": "", **dict.fromkeys(found, ".3f")}
    return Table.of("delta chi of every candidate", columns, rows)


def comparability_table(found: Mapping[str, Paths]) -> Table:
    """How much candidates of a layer differ, and how much paths differ with depth."""
    first_column = "std of log delta chi over candidates, then of log chi over paths"
    header = (
        "first quarter",
        "last quarter",
        "mean",
        "paths: first quarter",
        "last quarter",
        "last over first",
        "if added up",
    )
    rows = []
    for name, paths in found.items():
        quarter = max(1, paths.layers // 4)
        candidates, between_paths = paths.spreads(), paths.curves["logchi"].std(0)
        # what the differences would grow to if every layer added its own
        alone = np.sqrt(np.cumsum(candidates**2))
        (near, far), (first, last) = ((v[:quarter].mean(), v[-quarter:].mean()) for v in (candidates, between_paths))
        spreads = [f"{value:.4f}" for value in (near, far, candidates.mean(), first, last)]
        growth = alone[-quarter:].mean() / alone[:quarter].mean()
        rows.append((name, *spreads, f"{last / first:.2f}", f"{growth:.2f}"))
    return Table("do candidates stay comparable with depth?", (first_column, *header), tuple(rows))


def probe_table(setting: str, found: ModuleMoments) -> Table:
    """The moments behind every probe of a module."""
    mean = summarise(found.curves)
    keys = ("inc", "logchi", "reff_signal", "reff_noise", "variance_share", "mu4", "pseudo_linear")
    rows = [(name, *(mean[f"{key}_mean"][i] for key in keys)) for i, name in enumerate(found.names)]
    header = ("behind", "delta chi", "log chi", "r_eff(x)", "r_eff(dx)", "mu_2/nu_2", "mu_4", "pseudo-linear")
    return Table.of(setting, dict.fromkeys(header, ".3f"), rows)
