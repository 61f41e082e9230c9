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


def summary_table(title: str, runs: Mapping[str, Run], seconds: Mapping[str, float]) -> Table:
    """The averages over networks at four depths."""
    header = (
        "",
        "l",
        "log chi",
        "dB",
        "increment",
        "BN part",
        "other part",
        "r_eff(x)",
        "r_eff(dx)",
        "mu_4(z)",
        "log nu_2(x)",
        "networks",
        "seconds",
    )
    rows = []
    for name, found in runs.items():
        mean = {key: values.mean(0) for key, values in found.curves().items()}
        for i in sorted({0, len(found.depth) // 4, len(found.depth) // 2, len(found.depth) - 1}):
            first = i == 0
            normed = "inc_bn" in mean
            rows.append(
                (
                    name if first else "",
                    f"{found.depth[i]:.0f}",
                    f"{mean['logchi'][i]:.3f}",
                    f"{20 / math.log(10) * mean['logchi'][i]:.1f}",
                    f"{mean['inc'][i]:.4f}",
                    f"{mean['inc_bn'][i]:.4f}" if normed else "-",
                    f"{mean['inc_phi'][i]:.4f}" if normed else "-",
                    f"{mean['reff_signal'][i]:.2f}",
                    f"{mean['reff_noise'][i]:.2f}",
                    f"{mean['mu4_z'][i]:.2f}" if normed else "-",
                    f"{mean['lognu2'][i]:.2f}",
                    str(found.realisations) if first else "",
                    f"{seconds[name]:.1f}" if first else "",
                )
            )
    return Table(title, header, tuple(rows))


def fit_table(runs: Mapping[str, Run], verdicts: Mapping[str, Verdict]) -> Table:
    """The fits of every run, and the verdict."""
    header = ("fits of log chi", "slope", "R^2", "exponent", "R^2", "tau", "r_eff(L)", "verdict")
    rows = []
    for name, found in runs.items():
        e = verdicts[name].evidence
        tau = f"{power_law_of(found).tau:.3f}" if found.cfg.residual else "-"
        rows.append(
            (
                name,
                f"{e['slope']:.4f}",
                f"{e['slope_r2']:.5f}",
                f"{e['exponent']:.3f}",
                f"{e['exponent_r2']:.5f}",
                tau,
                f"{e['rank']:.2f}",
                str(verdicts[name]),
            )
        )
    return Table("exponential fit on l > L/4, power law on all l", header, tuple(rows))


def variants_table(found: Variants) -> Table:
    """What the variants of the quick experiment do."""
    rows = (
        ("layer norm", f"mu_2/nu_2 {found.layer_share:.2g}: zero-dimensional signal"),
        ("tanh, chaotic (sigma_w 2, sigma_b 0.3)", f"log chi grows by {found.tanh_slope:.3f} per layer"),
        ("tanh with BN", f"log chi grows by {found.tanh_bn_slope:.3f} per layer"),
        (
            "ReLU resnet without BN, H = 2",
            f"log nu_2 grows by {found.growth.slope:.3f} per residual, r_eff {found.rank:.2f}",
        ),
    )
    return Table("variants, averages over networks", ("", "measured"), rows)


def path_table(found: Mapping[str, Paths], verdicts: Mapping[str, Verdict]) -> Table:
    """The averages over random paths behind the last layer."""
    header = (
        "random paths",
        "log chi(L)",
        "dB",
        "exponent",
        "R^2",
        "R^2 exponential",
        "r_eff(x)",
        "r_eff(dx)",
        "mu_2/nu_2",
        "pseudo-linear",
        "verdict",
    )
    rows = []
    for name, paths in found.items():
        e, mean = verdicts[name].evidence, {key: values.mean(0) for key, values in paths.curves.items()}
        rows.append(
            (
                name,
                f"{e['log_chi']:.3f}",
                f"{e['noise_factor_db']:.1f}",
                f"{e['exponent']:.3f}",
                f"{e['exponent_r2']:.4f}",
                f"{e['exponent_r2_against_l']:.4f}",
                f"{e['rank']:.1f}",
                f"{mean['reff_noise'][-1]:.1f}",
                f"{e['share']:.3f}",
                f"{mean['pseudo_linear'][-1]:.3f}",
                str(verdicts[name]),
            )
        )
    return Table("from the stem to the last layer", header, tuple(rows))


def layer_table(found: Mapping[str, Paths], space: SearchSpace) -> Table:
    """The averages over random paths, layer by layer."""
    header = ("layer", *(f"{name}: {key}" for name in found for key in ("delta chi", "log chi", "r_eff")))
    rows = []
    for index, layer in enumerate(space.layers):
        cells = [f"{index} {'' if layer.normal else 'reduction'}".strip()]
        for paths in found.values():
            mean = {key: paths.curves[key].mean(0) for key in ("logchi", "reff_signal")}
            increment = mean["logchi"][index] - (mean["logchi"][index - 1] if index else 0.0)
            cells += [f"{math.exp(increment):.3f}", f"{mean['logchi'][index]:.3f}", f"{mean['reff_signal'][index]:.1f}"]
        rows.append(tuple(cells))
    return Table("averages over paths (increments: geometric)", header, tuple(rows))


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
    steps = {name: np.diff(paths.curves["logchi"].mean(0), prepend=0.0) for name, paths in found.items()}
    rows = []
    for k, layers in places.items():
        cells = ["reduction" if k == 0 else f"{k} later"]
        for step in steps.values():
            growth = math.exp(2 * step[places[0]].mean())
            diluted = f"{math.sqrt(1 + (growth - 1) / (k + 1)):.3f}" if k else "-"
            cells += [f"{math.exp(step[layers].mean()):.3f}", diluted]
        rows.append(tuple(cells))
    whole = [f"{math.exp(np.sum([step[layers].mean() for layers in places.values()])):.3f}" for step in steps.values()]
    rows.append(("whole stage", *(cell for value in whole for cell in (value, "-"))))
    return Table("within a stage, averages over stages", header, tuple(rows))


def candidate_table(found: Mapping[str, Paths]) -> Table:
    """The increment of every candidate of every layer."""
    places = list(dict.fromkeys(place for paths in found.values() for place in paths.increments))
    rows = [
        (
            f"{layer} {name}",
            *(f"{math.exp(np.mean(paths.increments[layer, name])):.3f}" for paths in found.values()),
        )
        for layer, name in places
    ]
    return Table("delta chi of every candidate", ("layer and candidate", *found), tuple(rows))


def comparability_table(found: Mapping[str, Paths]) -> Table:
    """How much candidates of a layer differ, and how much paths differ with depth."""
    header = (
        "std of log delta chi over candidates, then of log chi over paths",
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
        first, last = between_paths[:quarter].mean(), between_paths[-quarter:].mean()
        rows.append(
            (
                name,
                f"{candidates[:quarter].mean():.4f}",
                f"{candidates[-quarter:].mean():.4f}",
                f"{candidates.mean():.4f}",
                f"{first:.4f}",
                f"{last:.4f}",
                f"{last / first:.2f}",
                f"{alone[-quarter:].mean() / alone[:quarter].mean():.2f}",
            )
        )
    return Table("do candidates stay comparable with depth?", header, tuple(rows))


def probe_table(setting: str, found: ModuleMoments) -> Table:
    """The moments behind every probe of a module."""
    mean = summarise(found.curves)
    keys = ("inc", "logchi", "reff_signal", "reff_noise", "variance_share", "mu4", "pseudo_linear")
    rows = [(name, *(f"{mean[f'{key}_mean'][i]:.3f}" for key in keys)) for i, name in enumerate(found.names)]
    header = ("behind", "delta chi", "log chi", "r_eff(x)", "r_eff(dx)", "mu_2/nu_2", "mu_4", "pseudo-linear")
    return Table(setting, header, tuple(rows))
