"""The moments study: its three kinds, each `run(config, out, task) -> StudyReport`, and their tables.

`quick` is a small version of Labatie's experiments with pass marks, `figures` the published settings beside the
published arrays, `module` the same measurements in a search space's candidates or in any module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from nasfast.research.analysis.moments.detect import Verdict, detect, predict_power_law, summarise
from nasfast.research.analysis.moments.module import ModuleMoments, module_moments
from nasfast.research.analysis.moments.networks import NetConfig, Run, fields, gaussian
from nasfast.research.studies.draw import Figure
from nasfast.research.studies.inputs import measure_inits, reduced_space, sample_shape
from nasfast.research.studies.moments.config import FiguresConfig, ModuleConfig, QuickConfig
from nasfast.research.studies.moments.figures import depth_curves, histograms, space_curves
from nasfast.research.studies.moments.marks import (
    agreement,
    data_checks,
    exploding_checks,
    fit_growth,
    published,
    resnet_checks,
    vanilla_checks,
    variant_checks,
)
from nasfast.research.studies.moments.measure import Paths, Runner, input_source, measure_paths, module_inputs
from nasfast.research.studies.report import Check, StudyReport, Table
from nasfast.research.studies.run import Task
from nasfast.runtime.device import torch_device
from nasfast.spaces import SearchSpace
from nasfast.supernet import Init, Supernet

_DB = 20 / math.log(10)
"""Decibels of a log chi of 1."""
_EXPLANATION = (
    "chi, the normalised sensitivity, is how much more a network amplifies noise than signal; 20 log10 chi is the loss "
    "of signal-to-noise ratio in dB. r_eff, the effective rank, is the number of directions in which a signal varies."
)
_QUICK = {
    "FC": NetConfig(width=128, batch=64, depth=200, every=4),
    "conv": NetConfig(kernel=3, width=64, batch=16, depth=120, every=4),
}
_QUICK_SEEDS = {"FC": 8, "conv": 5}
# The effective rank of these small vanilla networks scatters by 2 between networks, and five cannot show its mean.
_VANILLA_CONV_SEEDS = 20
_HISTOGRAM_SEEDS = 100
_FAMILIES: dict[str, tuple[dict[str, Any], Callable[[str, Run, Verdict], list[Check]]]] = {
    "vanilla": ({}, vanilla_checks),
    "BN feed-forward": ({"norm": "batch"}, exploding_checks),
    "BN resnet": ({"norm": "batch", "residual": 2}, resnet_checks),
}
"""The networks of the paper -> their changes, and their marks."""
_VARIANTS: dict[str, dict[str, Any]] = {
    "layer norm": {"norm": "layer"},
    "tanh, chaotic": {"act": "tanh", "sigma_w": 2.0, "sigma_b": 0.3},
    "tanh with BN": {"act": "tanh", "norm": "batch"},
    "ReLU resnet without BN": {"residual": 2, "depth": 100},
}
"""Variants of the fully connected networks -> their changes."""
_FIGURE_NAMES = {2: "vanilla, histograms", 3: "vanilla", 4: "BN feed-forward", 5: "BN resnet"}


def quick(cfg: QuickConfig, out: Path | None, task: Task) -> StudyReport:
    """The small experiments."""
    runner = Runner(out, task, "cpu", cfg.seed)
    sources = {"FC": gaussian(192), "conv": fields(3, 16)}
    runs: dict[str, Run] = {}
    verdicts: dict[str, Verdict] = {}
    checks: list[Check] = []
    for kind, (family, (changes, family_checks)) in product(_QUICK, _FAMILIES.items()):
        name = f"{kind}, {family}"
        seeds = _VANILLA_CONV_SEEDS if name == "conv, vanilla" else _QUICK_SEEDS[kind]
        run = runs[name] = runner.run(name, _QUICK[kind].replace(**changes), sources[kind], seeds)
        verdicts[name] = detect(run.depth, run.curves())
        checks += family_checks(kind, run, verdicts[name])
    variants = {
        name: runner.run(name, _QUICK["FC"].replace(**changes), sources["FC"], _QUICK_SEEDS["FC"])
        for name, changes in _VARIANTS.items()
    }
    histogram_net = _QUICK["FC"].replace(every=_QUICK["FC"].depth // 4)
    spread = runner.run("FC, histograms", histogram_net, sources["FC"], _HISTOGRAM_SEEDS)
    return StudyReport(
        subject="quick experiment on synthetic inputs",
        explanation=_EXPLANATION,
        notes=(
            "FC: 192 Gaussian features, width 128, batch 64; conv: 3 x 16 x 16 fields of amplitude 1/f, 3 x 3, width "
            "64, batch 16, periodic borders",
        ),
        tables=(summary_table("averages over networks", runs), fit_table(runs, verdicts), variant_table(variants)),
        figures=(
            histograms("FC, vanilla, width 128", spread, {}),
            *(depth_curves(name, run, {}) for name, run in runs.items()),
        ),
        verdicts=verdicts,
        checks=(*checks, *variant_checks(variants)),
    )


def figures(cfg: FiguresConfig, out: Path | None, task: Task) -> StudyReport:
    """The published experiments."""
    runner = Runner(out, task, str(torch_device(cfg.device)), cfg.seed)
    source = input_source(cfg)
    runs, checks, deviations = {}, [], []
    plots: list[Figure] = []
    notes = [f"{cfg.realisations} networks (paper: 1,000, FC 200), figure 2: {cfg.histogram_realisations} (10,000)"]
    for number in cfg.figures:
        name = _FIGURE_NAMES[number]
        count = cfg.histogram_realisations if number == 2 else cfg.realisations
        run = runner.run(name, cfg.network(number), source, count)
        reference = published(cfg, number)
        title = f"figure {number}: {name}"
        if number == 2:
            plots.append(histograms(title, run, reference))
            notes.append(f"figure 2 took {run.seconds:.1f} s")
        else:
            runs[name] = run
            plots.append(depth_curves(title, run, reference))
        if reference:
            rows, figure_checks = agreement(cfg, number, run, reference)
            deviations += rows
            checks += figure_checks
    verdicts = {name: detect(run.depth, run.curves()) for name, run in runs.items()}
    tables = []
    if runs:
        tables.append(summary_table("averages over networks", runs))
        tables.append(fit_table(runs, verdicts))
    if deviations:
        header = ("against the published arrays", "largest deviation", "at l", "measured", "published", "/ allowed")
        tables.append(Table("agreement", header, tuple(deviations)))
    if cfg.reference is not None:
        checks += data_checks(Path(cfg.reference))
    kind = f"{cfg.kernel} x {cfg.kernel} convolutions, {cfg.padding} borders" if cfg.kernel else "fully connected"
    inputs = "synthetic inputs" if cfg.images is None else f"images of {Path(cfg.images).name}"
    return StudyReport(
        subject=f"published experiments, {kind}, width {cfg.width}, batch {cfg.batch}, {inputs}",
        explanation=_EXPLANATION,
        notes=tuple(notes),
        tables=tuple(tables),
        figures=tuple(plots),
        verdicts=verdicts,
        checks=tuple(checks),
    )


def module(cfg: ModuleConfig, out: Path | None, task: Task) -> StudyReport:
    """A search space, or any module."""
    return _space(cfg, task) if cfg.module is None else _module(cfg, cfg.module, task)


def _space(cfg: ModuleConfig, task: Task) -> StudyReport:
    space = reduced_space(cfg.space, cfg.resolution, "moments")
    x = module_inputs(cfg, (space.in_channels, space.resolution, space.resolution))
    settings: dict[str, Paths] = {}
    inits: tuple[Init, ...] = ("orthogonal", "gaussian")
    for act, init in product(dict.fromkeys(("tanh", space.activation)), inits):
        name = f"{init}, {act}"
        net = Supernet(space, init=init, activation=act, layer_indicators=False, fused=False, seed=cfg.seed)
        settings[name] = measure_paths(cfg, space, net, x, task(name, cfg.paths))
    depth = np.arange(1, len(space) + 1, dtype=float)
    verdicts = {name: detect(depth, paths.curves) for name, paths in settings.items()}
    reductions = [i for i, layer in enumerate(space.layers) if not layer.normal]
    curves = {
        name: summarise(paths.curves) | {"paths_std": paths.curves["logchi"].std(0), "candidates_std": paths.spreads()}
        for name, paths in settings.items()
    }
    inputs = "1/f fields" if cfg.images is None else f"images of {Path(cfg.images).name}"
    return StudyReport(
        subject=f"space {space.name}, {len(space)} layers, {inputs}, {space.resolution} x {space.resolution}",
        explanation=_EXPLANATION,
        notes=(
            f"{cfg.paths} random paths, all candidates along {cfg.candidate_paths} of them; batch {cfg.batch}",
            "log chi is counted from the output of the stem; verdicts are of the average over paths",
        ),
        tables=(
            path_table(settings, verdicts),
            layer_table(settings, space),
            stage_table(settings, reductions),
            candidate_table(settings),
            comparability_table(settings),
        ),
        figures=(space_curves("along random paths", depth, curves, [i + 1 for i in reductions]),),
        data={"curves": curves},
        verdicts=verdicts,
    )


def _module(cfg: ModuleConfig, name: str, task: Task) -> StudyReport:
    x = module_inputs(cfg, sample_shape(cfg.input))
    probes = None if cfg.probes is None else [probe.strip() for probe in cfg.probes.split(",")]

    def measure(setting: str, net: nn.Module) -> ModuleMoments:
        moments = module_moments(net, x, probes=probes, draws=cfg.draws, seed=cfg.seed)
        task(setting, 1)(1)
        return moments

    settings = measure_inits(name, cfg.input, cfg.seed, measure)
    depth = np.arange(1, len(next(iter(settings.values())).names) + 1, dtype=float)
    curves = {
        setting: summarise({k: moments.curves[k] for k in ("logchi", "reff_signal", "reff_noise")})
        for setting, moments in settings.items()
    }
    return StudyReport(
        subject=f"module {cfg.module}, input {cfg.input}, batch {cfg.batch}",
        explanation=_EXPLANATION,
        notes=(f"{cfg.draws} draws of white noise; depth counts probes",),
        tables=tuple(probe_table(setting, moments) for setting, moments in settings.items()),
        figures=(space_curves("behind the probes", depth, curves, []),),
        data={"curves": curves},
        verdicts={setting: detect(depth, moments.curves) for setting, moments in settings.items()},
    )


def variant_table(variants: Mapping[str, Run]) -> Table:
    """What the variants do."""
    e = {name: detect(run.depth, run.curves()).evidence for name, run in variants.items()}
    resnet = "ReLU resnet without BN"
    growth = fit_growth(variants[resnet]).slope
    rows = {
        "layer norm": f"mu_2/nu_2 {e['layer norm']['share']:.2g}: zero-dimensional signal",
        "tanh, chaotic (sigma_w 2, sigma_b 0.3)": f"log chi grows by {e['tanh, chaotic']['slope']:.3f} per layer",
        "tanh with BN": f"log chi grows by {e['tanh with BN']['slope']:.3f} per layer",
        f"{resnet}, H = 2": f"log nu_2 grows by {growth:.3f} per residual, r_eff {e[resnet]['rank']:.2f}",
    }
    return Table("variants, averages over networks", ("", "measured"), tuple(rows.items()))


def summary_table(title: str, runs: Mapping[str, Run]) -> Table:
    """The averages over networks at four depths."""
    columns = {"": "", "l": ".0f", "log chi": ".3f", "dB": ".1f", "increment": ".4f", "BN part": ".4f"}
    columns |= {"other part": ".4f", "r_eff(x)": ".2f", "r_eff(dx)": ".2f", "mu_4(z)": ".2f", "log nu_2(x)": ".2f"}
    rows = []
    for name, run in runs.items():
        mean = {key: values.mean(0) for key, values in run.curves().items()}
        keys = ("inc", "inc_bn", "inc_phi", "reff_signal", "reff_noise", "mu4_z", "lognu2")
        for i in sorted({0, len(run.depth) // 4, len(run.depth) // 2, len(run.depth) - 1}):
            chi = mean["logchi"][i]
            # networks without BatchNorm have no parts and no normalised signal
            left_out = () if "inc_bn" in mean else ("inc_bn", "inc_phi", "mu4_z")
            values = [None if key in left_out else mean[key][i] for key in keys]
            size = (str(run.realisations), f"{run.seconds:.1f}") if i == 0 else ("", "")
            rows.append((name if i == 0 else "", run.depth[i], chi, _DB * chi, *values, *size))
    return Table.of(title, {**columns, "networks": "", "seconds": ""}, rows)


def fit_table(runs: Mapping[str, Run], verdicts: Mapping[str, Verdict]) -> Table:
    """The fits of every run, and the verdict."""
    header = ("fits of log chi", "slope", "R^2", "exponent", "R^2", "tau", "r_eff(L)", "verdict")
    rows = []
    for name, run in runs.items():
        e = verdicts[name].evidence
        tau = f"{predict_power_law(run).tau:.3f}" if run.cfg.residual else "-"
        slope = f"{e['slope']:.4f}", f"{e['slope_r2']:.5f}"
        exponent = f"{e['exponent']:.3f}", f"{e['exponent_r2']:.5f}"
        rows.append((name, *slope, *exponent, tau, f"{e['rank']:.2f}", str(verdicts[name])))
    return Table("exponential fit on l > L/4, power law on all l", header, tuple(rows))


def path_table(settings: Mapping[str, Paths], verdicts: Mapping[str, Verdict]) -> Table:
    """The averages over random paths behind the last layer."""
    columns = {"random paths": "", "log chi(L)": ".3f", "dB": ".1f", "exponent": ".3f", "R^2": ".4f"}
    columns |= {"R^2 exponential": ".4f", "r_eff(x)": ".1f", "r_eff(dx)": ".1f", "mu_2/nu_2": ".3f"}
    keys = ("log_chi", "noise_factor_db", "exponent", "exponent_r2", "exponent_r2_against_l", "rank")
    rows = []
    for name, paths in settings.items():
        e, last = verdicts[name].evidence, {key: values.mean(0)[-1] for key, values in paths.curves.items()}
        values = (*(e[key] for key in keys), last["reff_noise"], e["share"], last["pseudo_linear"])
        rows.append((name, *values, str(verdicts[name])))
    return Table.of("from the stem to the last layer", {**columns, "pseudo-linear": ".3f", "verdict": ""}, rows)


def layer_table(settings: Mapping[str, Paths], space: SearchSpace) -> Table:
    """The averages over random paths, layer by layer."""
    columns = {"layer": ""}
    for name in settings:
        columns |= {f"{name}: delta chi": ".3f", f"{name}: log chi": ".3f", f"{name}: r_eff": ".1f"}
    rows: list[list[str | float]] = []
    for index, layer in enumerate(space.layers):
        rows.append([f"{index} {'' if layer.normal else 'reduction'}".strip()])
        for paths in settings.values():
            chi, rank = (paths.curves[key].mean(0) for key in ("logchi", "reff_signal"))
            rows[-1] += [math.exp(chi[index] - (chi[index - 1] if index else 0.0)), chi[index], rank[index]]
    return Table.of("averages over paths (increments: geometric)", columns, rows)


def stage_table(settings: Mapping[str, Paths], reductions: Sequence[int]) -> Table:
    """Increments by place within a stage, beside those that theorem 4 predicts from the first.

    By the theorem the k-th residual of a stage adds a branch of variance 1 to a sum of k branches. The branch has the
    growth G of the reduction.
    """
    places: dict[int, list[int]] = {}
    for first, end in zip(reductions, [*reductions[1:], None], strict=True):
        for k, layer in enumerate(range(first, next(iter(settings.values())).layers if end is None else end)):
            places.setdefault(k, []).append(layer)
    header = ("layer of a stage", *(f"{name}{text}" for name in settings for text in (": delta chi", ", diluted")))
    steps = [np.diff(paths.curves["logchi"].mean(0), prepend=0.0) for paths in settings.values()]
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


def candidate_table(settings: Mapping[str, Paths]) -> Table:
    """The increment of every candidate of every layer."""
    places = list(dict.fromkeys(place for paths in settings.values() for place in paths.increments))
    rows = [
        (f"{layer} {name}", *(math.exp(np.mean(paths.increments[layer, name])) for paths in settings.values()))
        for layer, name in places
    ]
    columns = {"layer and candidate": "", **dict.fromkeys(settings, ".3f")}
    return Table.of("delta chi of every candidate", columns, rows)


def comparability_table(settings: Mapping[str, Paths]) -> Table:
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
    for name, paths in settings.items():
        quarter = max(1, paths.layers // 4)
        candidates, between_paths = paths.spreads(), paths.curves["logchi"].std(0)
        # what the differences would grow to if every layer added its own
        alone = np.sqrt(np.cumsum(candidates**2))
        (near, far), (first, last) = ((v[:quarter].mean(), v[-quarter:].mean()) for v in (candidates, between_paths))
        spreads = [f"{value:.4f}" for value in (near, far, candidates.mean(), first, last)]
        growth = alone[-quarter:].mean() / alone[:quarter].mean()
        rows.append((name, *spreads, f"{last / first:.2f}", f"{growth:.2f}"))
    return Table("do candidates stay comparable with depth?", (first_column, *header), tuple(rows))


def probe_table(setting: str, moments: ModuleMoments) -> Table:
    """The moments behind every probe of a module."""
    mean = summarise(moments.curves)
    keys = ("inc", "logchi", "reff_signal", "reff_noise", "variance_share", "mu4", "pseudo_linear")
    rows = [(name, *(mean[f"{key}_mean"][i] for key in keys)) for i, name in enumerate(moments.names)]
    header = ("behind", "delta chi", "log chi", "r_eff(x)", "r_eff(dx)", "mu_2/nu_2", "mu_4", "pseudo-linear")
    return Table.of(setting, dict.fromkeys(header, ".3f"), rows)
