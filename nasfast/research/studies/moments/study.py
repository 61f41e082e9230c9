"""The moments study: its three kinds, each `run(config, out, task) -> StudyReport`, with all they measure and show.

`quick` is a small version of Labatie's experiments with pass marks, `figures` the published settings beside the
published arrays, `module` the same measurements in a search space's candidates or in any module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.config import ConfigError
from nasfast.data import FolderSource
from nasfast.research.analysis.moments.detect import (
    EXPLODING,
    ONE_DIMENSIONAL,
    WELL_BEHAVED,
    PowerLaw,
    Verdict,
    detect,
    dilution_bounds,
    fit_line,
    fit_power_law,
    power_law_of,
    summarise,
)
from nasfast.research.analysis.moments.module import (
    ModuleMoments,
    held,
    module_moments,
    push,
    sensitivity,
    statistics_of,
)
from nasfast.research.analysis.moments.networks import (
    Array,
    NetConfig,
    Run,
    Source,
    fields,
    gaussian,
    images,
    read_arrays,
    run,
    standardised,
)
from nasfast.research.studies.draw import GREY, INK, SERIES, Figure, level
from nasfast.research.studies.inputs import initialised, reduced_space, sample_shape
from nasfast.research.studies.moments.config import FiguresConfig, ModuleConfig, QuickConfig
from nasfast.research.studies.report import Check, StudyReport, Table, checks_of
from nasfast.research.studies.run import Done, Task
from nasfast.runtime.device import torch_device
from nasfast.spaces import SearchSpace, UniformSampler
from nasfast.supernet import Init, Supernet

_SQRT2 = math.sqrt(2)
_DB = 20 / math.log(10)
"""Decibels of a log chi of 1."""
# Ranks are averaged over twenty layers before they are compared. A rise within two standard errors does not count.
_AVERAGED, _SIGMAS = 20, 2.0

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
_FIGURE_NAMES = {2: "vanilla, histograms", 3: "vanilla", 4: "BN feed-forward", 5: "BN resnet"}
_BANDS = " Lines: means over networks; bands: 16th to 84th percentile. Dashed: the published mean."
_COMPARED = ("inc", "inc_bn", "inc_phi", "logchi", "reff_signal", "reff_noise", "mu4_z", "nu1abs_z")
# Relative deviation that is allowed beside four standard errors.
_RELATIVE = {"reff_signal": 0.03, "reff_noise": 0.03, "mu4_z": 0.03}

Runner = Callable[[str, NetConfig, Source, int], Run]
"""Given a name, a configuration, its inputs and a number of networks, runs them."""
Published = dict[str, Any]
"""The published arrays of one figure, at the depths that a run has too, and its `name`; empty where there are none."""


def runner_of(out: Path | None, seed: int, device: str, task: Task) -> Runner:
    """Runs networks, tells the progress, and continues from what is in the directory `out`, if there is one."""

    def runner(name: str, cfg: NetConfig, source: Source, realisations: int) -> Run:
        return run(
            cfg,
            source,
            realisations=realisations,
            seed=seed,
            device=device,
            folder=None if out is None else out / "networks",
            progress=task(name, realisations),
        )

    return runner


def load_images(folder: str) -> Tensor:
    """All images of a folder, (count, 3, H, W) uint8."""
    source = FolderSource(folder)
    pixels = [np.asarray(source.image(i)).transpose(2, 0, 1) for i in range(len(source))]
    if len({p.shape for p in pixels}) > 1:
        raise ValueError(f"images of {folder} have different sizes: bring them to one")
    return torch.from_numpy(np.stack(pixels))


def source_of(cfg: FiguresConfig) -> Source:
    """The inputs of the networks: images of a folder, or synthetic ones."""
    if cfg.images is not None:
        return images(load_images(cfg.images), flat=not cfg.kernel)
    return fields(3, 32) if cfg.kernel else gaussian(3072)


def published(cfg: FiguresConfig, figure: int) -> Published:
    """Read the arrays of a figure from the folder that the config names."""
    name = cfg.published(figure)
    if cfg.reference is None or name is None or not (file := Path(cfg.reference) / f"{name}.npz").exists():
        return {}
    found = read_arrays(file)
    shared = np.isin(found["depth"], cfg.network(figure).records)
    cut = {key: v[..., shared] if v.shape[-1:] == shared.shape else v for key, v in found.items()}
    return {"name": name, **cut} if shared.any() else {}


def published_law(arrays: Mapping[str, np.ndarray]) -> PowerLaw:
    """The power law of figure 5, fitted to published arrays."""
    return fit_power_law(
        arrays["depth"], arrays["chi_mean"], arrays["inc_ratio_of_means"], int(arrays["units_per_residual"])
    )


def module_inputs(cfg: ModuleConfig, shape: Sequence[int]) -> Tensor:
    """Standardised inputs (batch, *shape) of a space or module."""
    generator = torch.Generator().manual_seed(cfg.seed)
    if len(shape) != 3:
        if cfg.images is not None:
            raise ConfigError(f"images need an input of three dimensions, got {list(shape)}")
        return torch.randn(cfg.batch, *shape, generator=generator)
    channels, *size = shape
    if cfg.images is None:
        x = fields(channels, max(size))(cfg.batch, generator)[..., : size[0], : size[1]]
    else:
        x = images(load_images(cfg.images))(cfg.batch, generator)
        if x.shape[1] != channels:
            raise ConfigError(f"images have {x.shape[1]} channels, the input {channels}")
        x = F.interpolate(x, tuple(size), mode="bilinear", antialias=True)
    return standardised(x)


@dataclass(frozen=True)
class Paths:
    """What random paths through a supernet measured.

    Attributes:
        curves: name of a statistic -> (paths, layers).
        increments: (layer, candidate) -> log delta chi, one value for each path along which it was measured.
    """

    curves: dict[str, Array]
    increments: dict[tuple[int, str], list[float]]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.curves["logchi"].shape[1]

    def spreads(self) -> Array:
        """(layers,) std over candidates of log delta chi, averaged over paths."""
        values = [np.array([v for (at, _), v in self.increments.items() if at == i]) for i in range(self.layers)]
        return np.array([v.std(0).mean() for v in values])


def measure_paths(cfg: ModuleConfig, space: SearchSpace, net: Supernet, x: Tensor, progress: Done) -> Paths:
    """Send images x (N, C, H, W) and noise along random paths of a supernet of plain modules."""
    net = held(net)
    dx = torch.randn(x.shape, generator=torch.Generator().manual_seed(cfg.seed))
    first = push(net.stem, (x, dx))
    start = sensitivity(*first)
    sampler = UniformSampler(space, seed=cfg.seed, layer_indicators=False)
    rows = []
    increments: dict[tuple[int, str], list[float]] = {}
    for i_path in range(cfg.paths):
        pair, row = first, []
        for index, (layer, choice) in enumerate(zip(net.layers, sampler.step()[0], strict=True)):
            before, following = sensitivity(*pair), pair
            everyone = i_path < cfg.candidate_paths
            for i, candidate in enumerate(layer.candidates):
                if not (everyone or i == choice):
                    continue
                output = push(candidate, pair)
                following = output if i == choice else following
                if everyone:
                    name = layer.layer.label(i)
                    increments.setdefault((index, name), []).append(sensitivity(*output) - before)
            pair = following
            row.append(statistics_of(*pair, start))
        rows.append(row)
        progress(i_path + 1)
    return Paths({key: np.array([[place[key] for place in row] for row in rows]) for key in rows[0][0]}, increments)


def quick(cfg: QuickConfig, out: Path | None, task: Task) -> StudyReport:
    """The small experiments."""
    runner = runner_of(out, cfg.seed, "cpu", task)
    sources = {"FC": gaussian(192), "conv": fields(3, 16)}
    runs: dict[str, Run] = {}
    verdicts: dict[str, Verdict] = {}
    checks: list[Check] = []
    for kind, base in _QUICK.items():
        families = {
            "vanilla": (base, vanilla_checks),
            "BN feed-forward": (base.replace(norm="batch"), exploding_checks),
            "BN resnet": (base.replace(norm="batch", residual=2), resnet_checks),
        }
        for family, (net, checks_of_family) in families.items():
            seeds = _VANILLA_CONV_SEEDS if (kind, family) == ("conv", "vanilla") else _QUICK_SEEDS[kind]
            name = f"{kind}, {family}"
            found = runs[name] = runner(name, net, sources[kind], seeds)
            verdicts[name] = detect(found.depth, found.curves())
            checks += checks_of_family(kind, found, verdicts[name])
    variants, of_variants = _variants(runner, sources["FC"])
    histogram_net = _QUICK["FC"].replace(every=_QUICK["FC"].depth // 4)
    spread = runner("FC, histograms", histogram_net, sources["FC"], _HISTOGRAM_SEEDS)
    return StudyReport(
        subject="quick experiment on synthetic inputs",
        explanation=_EXPLANATION,
        notes=(
            "FC: 192 Gaussian features, width 128, batch 64; conv: 3 x 16 x 16 fields of amplitude 1/f, 3 x 3, width "
            "64, batch 16, periodic borders",
        ),
        tables=(
            summary_table("averages over networks", runs),
            fit_table(runs, verdicts),
            variants,
        ),
        figures=(
            histograms("FC, vanilla, width 128", spread, {}),
            *(curves_of(name, found, {}) for name, found in runs.items()),
        ),
        verdicts=verdicts,
        checks=(*checks, *of_variants),
    )


_VARIANTS: dict[str, dict[str, Any]] = {
    "layer norm": {"norm": "layer"},
    "tanh, chaotic": {"act": "tanh", "sigma_w": 2.0, "sigma_b": 0.3},
    "tanh with BN": {"act": "tanh", "norm": "batch"},
    "ReLU resnet without BN": {"residual": 2, "depth": 100},
}
"""Variants of the fully connected networks -> their changes."""


def _variants(runner: Runner, source: Source) -> tuple[Table, list[Check]]:
    """What the variants do, and their marks."""
    runs = {
        name: runner(name, _QUICK["FC"].replace(**changes), source, _QUICK_SEEDS["FC"])
        for name, changes in _VARIANTS.items()
    }
    layer, chaotic, tanh_bn, plain = (detect(found.depth, found.curves()).evidence for found in runs.values())
    resnet = runs["ReLU resnet without BN"]
    growth = fit_line(resnet.depth, resnet.curves()["lognu2"].mean(0))
    rows = (
        ("layer norm", f"mu_2/nu_2 {layer['share']:.2g}: zero-dimensional signal"),
        ("tanh, chaotic (sigma_w 2, sigma_b 0.3)", f"log chi grows by {chaotic['slope']:.3f} per layer"),
        ("tanh with BN", f"log chi grows by {tanh_bn['slope']:.3f} per layer"),
        (
            "ReLU resnet without BN, H = 2",
            f"log nu_2 grows by {growth.slope:.3f} per residual, r_eff {plain['rank']:.2f}",
        ),
    )
    checks = [
        Check("layer norm: mu_2/nu_2 at L", 0, 1e-2, layer["share"]),
        Check("tanh, chaotic: slope of log chi", 0.12, 0.15, chaotic["slope"]),
        Check("tanh with BN: slope of log chi", 0.085, 0.105, tanh_bn["slope"]),
        Check("ReLU resnet without BN: growth of log nu_2", 0.6, 0.7, growth.slope),
        Check("ReLU resnet without BN: linear, R^2", 0.99, 1, growth.r2),
    ]
    return Table("variants, averages over networks", ("", "measured"), rows), checks


def figures(cfg: FiguresConfig, out: Path | None, task: Task) -> StudyReport:
    """The published experiments."""
    runner = runner_of(out, cfg.seed, str(torch_device(cfg.device)), task)
    source = source_of(cfg)
    runs, checks, compared = {}, [], []
    drawn: list[Figure] = []
    notes = [f"{cfg.realisations} networks (paper: 1,000, FC 200), figure 2: {cfg.histogram_realisations} (10,000)"]
    for number in cfg.figures:
        name = _FIGURE_NAMES[number]
        count = cfg.histogram_realisations if number == 2 else cfg.realisations
        found = runner(name, cfg.network(number), source, count)
        reference = published(cfg, number)
        title = f"figure {number}: {name}"
        if number == 2:
            drawn.append(histograms(title, found, reference))
            notes.append(f"figure 2 took {found.seconds:.1f} s")
        else:
            runs[name] = found
            drawn.append(curves_of(title, found, reference))
        if reference:
            rows, of_figure = agreement(cfg, number, found, reference)
            compared += rows
            checks += of_figure
    verdicts = {name: detect(found.depth, found.curves()) for name, found in runs.items()}
    shown = []
    if runs:
        shown.append(summary_table("averages over networks", runs))
        shown.append(fit_table(runs, verdicts))
    if compared:
        header = ("against the published arrays", "largest deviation", "at l", "measured", "published", "/ allowed")
        shown.append(Table("agreement", header, tuple(compared)))
    if cfg.reference is not None:
        checks += data_checks(Path(cfg.reference))
    kind = f"{cfg.kernel} x {cfg.kernel} convolutions, {cfg.padding} borders" if cfg.kernel else "fully connected"
    inputs = "synthetic inputs" if cfg.images is None else f"images of {Path(cfg.images).name}"
    return StudyReport(
        subject=f"published experiments, {kind}, width {cfg.width}, batch {cfg.batch}, {inputs}",
        explanation=_EXPLANATION,
        notes=tuple(notes),
        tables=tuple(shown),
        figures=tuple(drawn),
        verdicts=verdicts,
        checks=tuple(checks),
    )


def module(cfg: ModuleConfig, out: Path | None, task: Task) -> StudyReport:
    """A search space, or any module."""
    return _space(cfg, task) if cfg.module is None else _module(cfg, cfg.module, task)


def _space(cfg: ModuleConfig, task: Task) -> StudyReport:
    space = reduced_space(cfg.space, cfg.resolution, "moments")
    x = module_inputs(cfg, (space.in_channels, space.resolution, space.resolution))
    settings: list[tuple[Init, str]] = [
        (init, act) for act in dict.fromkeys(("tanh", space.activation)) for init in ("orthogonal", "gaussian")
    ]
    found: dict[str, Paths] = {}
    for init, act in settings:
        name = f"{init}, {act}"
        net = Supernet(space, init=init, activation=act, layer_indicators=False, fused=False, seed=cfg.seed)
        found[name] = measure_paths(cfg, space, net, x, task(name, cfg.paths))
    depth = np.arange(1, len(space) + 1, dtype=float)
    verdicts = {name: detect(depth, paths.curves) for name, paths in found.items()}
    reductions = [i for i, layer in enumerate(space.layers) if not layer.normal]
    curves = {
        name: {
            **summarise(paths.curves),
            "paths_std": paths.curves["logchi"].std(0),
            "candidates_std": paths.spreads(),
        }
        for name, paths in found.items()
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
            path_table(found, verdicts),
            layer_table(found, space),
            stage_table(found, reductions),
            candidate_table(found),
            comparability_table(found),
        ),
        figures=(space_curves("along random paths", depth, curves, [i + 1 for i in reductions]),),
        data={"curves": curves},
        verdicts=verdicts,
    )


def _module(cfg: ModuleConfig, name: str, task: Task) -> StudyReport:
    x = module_inputs(cfg, sample_shape(cfg.input))
    probes = None if cfg.probes is None else [probe.strip() for probe in cfg.probes.split(",")]

    def measured(setting: str, net: nn.Module) -> ModuleMoments:
        found = module_moments(net, x, probes=probes, draws=cfg.draws, seed=cfg.seed)
        task(setting, 1)(1)
        return found

    found = initialised(name, cfg.input, cfg.seed, measured)
    depth = np.arange(1, len(next(iter(found.values())).names) + 1, dtype=float)
    curves = {
        setting: summarise({k: of.curves[k] for k in ("logchi", "reff_signal", "reff_noise")})
        for setting, of in found.items()
    }
    return StudyReport(
        subject=f"module {cfg.module}, input {cfg.input}, batch {cfg.batch}",
        explanation=_EXPLANATION,
        notes=(f"{cfg.draws} draws of white noise; depth counts probes",),
        tables=tuple(probe_table(setting, of) for setting, of in found.items()),
        figures=(space_curves("behind the probes", depth, curves, []),),
        data={"curves": curves},
        verdicts={setting: detect(depth, of.curves) for setting, of in found.items()},
    )


def summary_table(title: str, runs: Mapping[str, Run]) -> Table:
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
            size = (str(found.realisations), f"{found.seconds:.1f}") if i == 0 else ("", "")
            rows.append((name if i == 0 else "", found.depth[i], chi, _DB * chi, *values, *size))
    return Table.of(title, {**columns, "networks": "", "seconds": ""}, rows)


def fit_table(runs: Mapping[str, Run], verdicts: Mapping[str, Verdict]) -> Table:
    """The fits of every run, and the verdict."""
    header = ("fits of log chi", "slope", "R^2", "exponent", "R^2", "tau", "r_eff(L)", "verdict")
    rows = []
    for name, found in runs.items():
        e = verdicts[name].evidence
        tau = f"{power_law_of(found).tau:.3f}" if found.cfg.residual else "-"
        slope = f"{e['slope']:.4f}", f"{e['slope_r2']:.5f}"
        exponent = f"{e['exponent']:.3f}", f"{e['exponent_r2']:.5f}"
        rows.append((name, *slope, *exponent, tau, f"{e['rank']:.2f}", str(verdicts[name])))
    return Table("exponential fit on l > L/4, power law on all l", header, tuple(rows))


def path_table(found: Mapping[str, Paths], verdicts: Mapping[str, Verdict]) -> Table:
    """The averages over random paths behind the last layer."""
    columns = {"random paths": "", "log chi(L)": ".3f", "dB": ".1f", "exponent": ".3f", "R^2": ".4f"}
    columns |= {"R^2 exponential": ".4f", "r_eff(x)": ".1f", "r_eff(dx)": ".1f", "mu_2/nu_2": ".3f"}
    judged = ("log_chi", "noise_factor_db", "exponent", "exponent_r2", "exponent_r2_against_l", "rank")
    rows = []
    for name, paths in found.items():
        e, last = verdicts[name].evidence, {key: values.mean(0)[-1] for key, values in paths.curves.items()}
        values = (*(e[key] for key in judged), last["reff_noise"], e["share"], last["pseudo_linear"])
        rows.append((name, *values, str(verdicts[name])))
    return Table.of("from the stem to the last layer", {**columns, "pseudo-linear": ".3f", "verdict": ""}, rows)


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


def histograms(title: str, found: Run, reference: Published) -> Figure:
    """Figure 2: as depth grows, the log second moments of signal and noise spread over networks."""
    caption = (
        "Distribution over networks of the log second moments of signal and noise. Lines: the normal distribution of "
        "the same mean and deviation. Dashed: published mean."
    )
    figure = Figure(title, caption, 2, legend=False)
    names = {"lognu2": r"$\log\,\nu_2(x^l)$", "logmu2_noise": r"$\log\,\mu_2(dx^l)$"}
    for ax, (key, name) in zip(figure.axes, names.items(), strict=True):
        for i, (colour, depth) in enumerate(zip(SERIES, found.depth, strict=False)):
            values = found.curves()[key].T[i]
            values = values[np.isfinite(values)]
            ax.hist(values, bins=min(50, 10 + len(values) // 20), density=True, color=colour, alpha=0.3)
            normal = stats.norm(values.mean(), values.std())
            x = np.linspace(values.min(), values.max(), 200)
            label = f"l = {depth:.0f}: {values.mean():.2f} ± {values.std():.2f}"
            ax.plot(x, normal.pdf(x), color=colour, label=label)
            if reference:
                ax.axvline(reference[f"{key}_mean"][i], color=colour, lw=1, ls="--")
        ax.set(title=name, xlabel="log moment", ylabel="density")
    return figure


def _curve(
    ax: Axes,
    depth: Array,
    curves: Mapping[str, Array],
    key: str,
    colour: str,
    label: str = "",
    reference: Published | None = None,
) -> None:
    """A mean with its band, and the published mean."""
    ax.fill_between(depth, curves[f"{key}_p16"], curves[f"{key}_p84"], color=colour, alpha=0.2, lw=0)
    ax.plot(depth, curves[f"{key}_mean"], color=colour, label=label or None)
    if reference and f"{key}_mean" in reference:
        ax.plot(reference["depth"], reference[f"{key}_mean"], color=INK, lw=1, ls="--")


def curves_of(title: str, found: Run, reference: Published) -> Figure:
    """Figure 3, 4 or 5: averages over networks, and for figure 5 the power law that the increments predict."""
    depth, curves, vanilla = found.depth, summarise(found.curves()), found.cfg.norm == "none"
    caption = (
        "Sensitivity increments between 1 and sqrt 2 (dotted), and the effective rank, which tends to 1."
        if vanilla
        else "Increments of the sensitivity (of a resnet: of the first unit of every residual) and their two parts, "
        "the sensitivity (of a resnet with the power law predicted from the increments), effective ranks, and fourth "
        "moment and mean absolute value of the normalised signal (dotted: those of a Gaussian)."
    ) + _BANDS
    figure = Figure(title, caption, 2 if vanilla else 4, legend=False)
    increments, *others, rank = figure.axes if vanilla else (figure.axes[i] for i in (0, 1, 3, 2))

    def draw(ax: Axes, names: Mapping[str, str]) -> None:
        for colour, (key, label) in zip(SERIES, names.items(), strict=False):
            _curve(ax, depth, curves, key, colour, label, reference)

    names = {"inc": r"$\delta\chi$", "inc_bn": r"$\delta_{\mathrm{BN}}\chi$", "inc_phi": r"$\delta_\phi\chi$"}
    names |= {"inc_residual": r"$\delta\chi^l$"}
    draw(increments, {key: label for key, label in names.items() if f"{key}_mean" in curves})
    for bound in (1, _SQRT2):
        level(increments, bound)
    increments.set(title="increments of the sensitivity", xlabel="l")
    draw(rank, {"reff_signal": "signal"} | ({} if vanilla else {"reff_noise": "noise"}))
    rank.set(title="effective rank", xlabel="l", yscale="log")
    if vanilla:
        level(rank, 1)
        return figure
    chi, tails = others
    chi.set(title=r"$\log\chi^l$", xlabel="l")
    if not found.cfg.residual:
        draw(chi, {"logchi": ""})
    else:
        law = power_law_of(found)
        for part, alpha in (("p16", 0.4), ("p84", 0.4), ("mean", 1)):
            chi.plot(depth, np.exp(curves[f"logchi_{part}"]), color=SERIES[0], alpha=alpha)
        chi.plot(depth, law.c * depth**law.tau, ":", color=SERIES[1], label=f"{law.c:.2f} l^{law.tau:.3f}")
        if reference:
            chi.plot(reference["depth"], reference["chi_mean"], color=INK, lw=1, ls="--")
        chi.set(title=r"$\chi^l$", xscale="log", yscale="log")
    _curve(tails, depth, curves, "mu4_z", SERIES[0], r"$\mu_4(z^l)$", reference)
    level(tails, 3, SERIES[0])
    # there is nothing to see below a Gaussian's 3
    tails.set(title="the normalised signal", xlabel="l", ylabel=r"$\mu_4$", yscale="log", ylim=(2, None))
    absolute = tails.twinx()
    _curve(absolute, depth, curves, "nu1abs_z", SERIES[1], "", reference)
    level(absolute, math.sqrt(2 / math.pi), SERIES[1])
    absolute.set(ylabel=r"$\nu_1(|z^l|)$", ylim=(0, 1))
    return figure


def space_curves(
    title: str, depth: Array, settings: Mapping[str, Mapping[str, Array]], reductions: Sequence[int]
) -> Figure:
    """Averages over paths or noise draws by depth, for every setting; `reductions` are depths."""
    titles = {
        "logchi": r"$\log\chi$",
        "reff_signal": "effective rank of the signal",
        "candidates_std": r"std of $\log\,\delta\chi$ over candidates",
        "paths_std": r"std of $\log\chi$ over paths",
    }
    paths = all("paths_std" in curves for curves in settings.values())
    titles = titles if paths else dict(list(titles.items())[:2])
    caption = (
        "Averages over random paths, or noise draws, by depth; bands: 16th to 84th percentile. Grey lines: reductions."
    )
    figure = Figure(title, caption, len(titles))
    for ax, (key, text) in zip(figure.axes, titles.items(), strict=True):
        for colour, (name, curves) in zip(SERIES, settings.items(), strict=False):
            if key.endswith("_std"):
                ax.plot(depth, curves[key], color=colour, marker="o", ms=2.5)
            else:
                _curve(ax, depth, curves, key, colour, name)
        for reduction in reductions:
            ax.axvline(reduction, color=GREY, lw=0.8, alpha=0.5)
        ax.set(title=text, xlabel="layer" if paths else "probe", yscale="log" if key == "reff_signal" else "linear")
        if key.endswith("_std"):
            ax.set_ylim(bottom=0)
    return figure


def vanilla_checks(kind: str, found: Run, verdict: Verdict) -> list[Check]:
    """Marks of networks without normalisation."""
    curves = found.curves()
    inc, rank = curves["inc"].mean(0), curves["reff_signal"]
    marks = {
        "smallest increment (theorem 2: 1)": (0.95, _SQRT2, inc.min()),
        "largest increment (theorem 2: sqrt 2)": (0.95, _SQRT2, inc.max()),
    }
    if kind == "FC":
        marks |= {
            "increment, last half": (0.98, 1.03, inc[found.depth > found.depth[-1] / 2].mean()),
            "r_eff(L)": (1, 1.3, rank[:, -1].mean()),
            "detected one-dimensional": (1, 1, ONE_DIMENSIONAL in verdict.names),
        }
    else:
        steps = np.diff(rank.reshape(len(rank), -1, _AVERAGED // found.cfg.every).mean(2), axis=1)
        rise = steps.mean(0) / (steps.std(0, ddof=1) / math.sqrt(len(steps)))
        marks |= {
            "r_eff(L)": (1, 4, rank[:, -1].mean()),
            "largest rise of r_eff in 20 layers, in standard errors": (-math.inf, _SIGMAS, rise.max()),
        }
    return checks_of(f"{kind}, vanilla", marks)


def exploding_checks(kind: str, found: Run, verdict: Verdict) -> list[Check]:
    """Marks of networks with BatchNorm and without skip connections."""
    curves, e = found.curves(), verdict.evidence
    phi = curves["inc_phi"].mean(0)
    # theorem 3, second factor: from the mean absolute values of the normalised signal alone
    predicted = (1 - found.values["nu1_abs_squared_signal_norm"].mean(0) / 2) ** -0.5
    marks = {
        "slope of log chi": (*((0.18, 0.23) if kind == "FC" else (0.15, 0.21)), e["slope"]),
        "smallest ReLU part (theorem 3: 1)": (0.99, _SQRT2, phi.min()),
        "largest ReLU part (theorem 3: sqrt 2)": (0.99, _SQRT2, phi.max()),
        "ReLU part minus that of theorem 3": (-0.01, 0.01, (phi - predicted).mean()),
    }
    if kind == "FC":
        marks |= {
            "R^2 of exponential": (0.999, 1, e["slope_r2"]),
            "detected exploding": (1, 1, EXPLODING in verdict.names),
        }
    else:
        marks["mu_4(z) at L, fat tails"] = (6, math.inf, curves["mu4_z"][:, -1].mean())
    return checks_of(f"{kind}, BN feed-forward", marks)


def resnet_checks(kind: str, found: Run, verdict: Verdict) -> list[Check]:
    """Marks of residual networks with BatchNorm."""
    e, tau = verdict.evidence, power_law_of(found).tau
    low, mean, high = dilution_bounds(found)
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
    return checks_of(f"{kind}, BN resnet", marks)


def agreement(
    cfg: FiguresConfig, figure: int, found: Run, reference: Published
) -> tuple[list[tuple[str, ...]], list[Check]]:
    """Rows and pass marks of one figure: deviations over what scatter and rounding of the reference allow."""
    checks, name, count = [], reference["name"], float(reference["n_real"])
    rows: list[tuple[str, ...]] = []
    depth, networks = reference["depth"], found.realisations
    curves = {key: values[:, np.isin(found.depth, depth)] for key, values in found.curves().items()}

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
        for key in _COMPARED:
            if f"{key}_mean" not in reference or key not in curves:
                continue
            mean, std = reference[f"{key}_mean"], reference[f"{key}_std"]
            allowed = 4 * std * math.sqrt(1 / networks + 1 / count) + _RELATIVE.get(key, 0.005) * np.abs(mean)
            compare(key, curves[key].mean(0), mean, allowed + (0.02 if key == "logchi" else 0))
    # slope and exponent need the whole depth
    if figure == 4 and depth[-1] > 150:
        late = depth > 100
        mine, theirs = (
            fit_line(depth[late], v[late]).slope for v in (curves["logchi"].mean(0), reference["logchi_mean"])
        )
        checks.append(Check(f"{name}: slope of log chi, l > 100", theirs - 0.004, theirs + 0.004, mine))
    if figure == 5 and cfg.depth is None:
        tau = published_law(reference).tau
        checks.append(Check(f"{name}: tau", tau - 0.02, tau + 0.02, power_law_of(found).tau))
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
