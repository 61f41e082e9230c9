"""The moments study: its three kinds, each `run(config, out, task) -> StudyReport`.

`quick` is a small version of Labatie's experiments with pass marks, `figures` the published settings beside the
published arrays, `module` the same measurements in a search space's candidates or in any module.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nasfast.research.analysis.moments.detect import Verdict, detect, fit_line, summarise
from nasfast.research.analysis.moments.inputs import Source, fields, gaussian
from nasfast.research.analysis.moments.module import module_moments
from nasfast.research.analysis.moments.networks import NetConfig, Run
from nasfast.research.studies.inputs import maker, sample_shape
from nasfast.research.studies.moments import figures as figures_of
from nasfast.research.studies.moments import marks, tables
from nasfast.research.studies.moments.config import FiguresConfig, ModuleConfig, QuickConfig
from nasfast.research.studies.moments.measure import (
    Paths,
    Runner,
    measure_paths,
    module_inputs,
    published,
    source_of,
)
from nasfast.research.studies.parts import Figure, Table
from nasfast.research.studies.report import StudyReport
from nasfast.research.studies.run import Task
from nasfast.runtime.device import torch_device
from nasfast.spaces import get_space
from nasfast.supernet import Init, Supernet, initialize

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
_DEFAULT_RESOLUTION = 64


def _families(base: NetConfig) -> dict[str, NetConfig]:
    return {
        "vanilla": base,
        "BN feed-forward": base.replace(norm="batch"),
        "BN resnet": base.replace(norm="batch", residual=2),
    }


def quick(cfg: QuickConfig, out: Path | None, task: Task) -> StudyReport:
    """The small experiments."""
    runner = Runner(out, cfg.seed, "cpu", task)
    sources = {"FC": gaussian(192), "conv": fields(3, 16)}
    runs: dict[str, Run] = {}
    for kind, base in _QUICK.items():
        for family, net in _families(base).items():
            seeds = _VANILLA_CONV_SEEDS if (kind, family) == ("conv", "vanilla") else _QUICK_SEEDS[kind]
            name = f"{kind}, {family}"
            runs[name] = runner(name, net, sources[kind], seeds)
    verdicts = {name: detect(found.depth, found.curves()) for name, found in runs.items()}
    checks = []
    for kind in _QUICK:
        for family, checks_of in (
            ("vanilla", marks.vanilla_checks),
            ("BN feed-forward", marks.exploding_checks),
            ("BN resnet", marks.resnet_checks),
        ):
            name = f"{kind}, {family}"
            checks += checks_of(kind, runs[name], verdicts[name])
    variants = _variants(runner, sources["FC"])
    histogram_net = _QUICK["FC"].replace(every=_QUICK["FC"].depth // 4)
    histograms = runner("FC, histograms", histogram_net, sources["FC"], _HISTOGRAM_SEEDS)
    return StudyReport(
        subject="quick experiment on synthetic inputs",
        explanation=_EXPLANATION,
        notes=(
            "FC: 192 Gaussian features, width 128, batch 64; conv: 3 x 16 x 16 fields of amplitude 1/f, 3 x 3, width "
            "64, batch 16, periodic borders",
        ),
        tables=(
            tables.summary_table("averages over networks", runs, runner.seconds),
            tables.fit_table(runs, verdicts),
            tables.variants_table(variants),
        ),
        figures=(
            figures_of.histograms("FC, vanilla, width 128", histograms),
            *(figures_of.curves_of(name, found) for name, found in runs.items()),
        ),
        verdicts=verdicts,
        checks=(*checks, *marks.variant_checks(variants)),
    )


def _variants(runner: Runner, source: Source) -> marks.Variants:
    base = _QUICK["FC"]

    def run_of(name: str, net: NetConfig) -> tuple[Run, Verdict]:
        found = runner(name, net, source, _QUICK_SEEDS["FC"])
        return found, detect(found.depth, found.curves())

    _, layer = run_of("layer norm", base.replace(norm="layer"))
    _, chaotic = run_of("tanh, chaotic", base.replace(act="tanh", sigma_w=2.0, sigma_b=0.3))
    _, tanh_bn = run_of("tanh with BN", base.replace(act="tanh", norm="batch"))
    resnet, plain = run_of("ReLU resnet without BN", base.replace(residual=2, depth=100))
    return marks.Variants(
        layer_share=layer.evidence["share"],
        tanh_slope=chaotic.evidence["slope"],
        tanh_bn_slope=tanh_bn.evidence["slope"],
        growth=fit_line(resnet.depth, resnet.curves()["lognu2"].mean(0)),
        rank=plain.evidence["rank"],
    )


def figures(cfg: FiguresConfig, out: Path | None, task: Task) -> StudyReport:
    """The published experiments."""
    runner = Runner(out, cfg.seed, str(torch_device(cfg.device)), task)
    source = source_of(cfg)
    runs, checks, compared = {}, [], []
    drawn: list[Figure] = []
    for number in cfg.figures:
        name = _FIGURE_NAMES[number]
        count = cfg.histogram_realisations if number == 2 else cfg.realisations
        found = runner(name, cfg.network(number), source, count)
        reference = published(cfg, number)
        title = f"figure {number}: {name}"
        if number == 2:
            drawn.append(figures_of.histograms(title, found, reference))
        else:
            runs[name] = found
            drawn.append(figures_of.curves_of(title, found, reference))
        if reference:
            rows, of_figure = marks.agreement(cfg, number, found, reference)
            compared += rows
            checks += of_figure
    verdicts = {name: detect(found.depth, found.curves()) for name, found in runs.items()}
    shown = []
    if runs:
        shown.append(tables.summary_table("averages over networks", runs, runner.seconds))
        shown.append(tables.fit_table(runs, verdicts))
    if compared:
        header = ("against the published arrays", "largest deviation", "at l", "measured", "published", "/ allowed")
        shown.append(Table("agreement", header, tuple(compared)))
    if cfg.reference is not None:
        checks += marks.data_checks(Path(cfg.reference))
    kind = f"{cfg.kernel} x {cfg.kernel} convolutions, {cfg.padding} borders" if cfg.kernel else "fully connected"
    inputs = "synthetic inputs" if cfg.images is None else f"images of {Path(cfg.images).name}"
    notes = [f"{cfg.realisations} networks (paper: 1,000, FC 200), figure 2: {cfg.histogram_realisations} (10,000)"]
    notes += [f"figure 2 took {runner.seconds[_FIGURE_NAMES[2]]:.1f} s"] if 2 in cfg.figures else []
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
    space = get_space(cfg.space)
    space.require_one_activation("the study of moments")
    space = get_space(cfg.space, resolution=cfg.resolution or min(_DEFAULT_RESOLUTION, space.resolution))
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
    inputs = "1/f fields" if cfg.images is None else f"images of {Path(cfg.images).name}"
    return StudyReport(
        subject=f"space {space.name}, {len(space)} layers, {inputs}, {space.resolution} x {space.resolution}",
        explanation=_EXPLANATION,
        notes=(
            f"{cfg.paths} random paths, all candidates along {cfg.candidate_paths} of them; batch {cfg.batch}",
            "log chi is counted from the output of the stem; verdicts are of the average over paths",
        ),
        tables=(
            tables.path_table(found, verdicts),
            tables.layer_table(found, space),
            tables.stage_table(found, reductions),
            tables.candidate_table(found),
            tables.comparability_table(found),
        ),
        figures=(figures_of.along_paths(depth, found, reductions),),
        verdicts=verdicts,
    )


def _module(cfg: ModuleConfig, name: str, task: Task) -> StudyReport:
    make, x = maker(name), module_inputs(cfg, sample_shape(cfg.input))
    probes = None if cfg.probes is None else [name.strip() for name in cfg.probes.split(",")]
    shown, verdicts, settings = [], {}, {}
    inits: dict[str, Init | None] = {"as it is": None, "orthogonal": "orthogonal", "gaussian": "gaussian"}
    for setting, init in inits.items():
        net = make()
        try:
            if init is not None:
                initialize(net, init, seed=cfg.seed)
            found = module_moments(net, x, probes=probes, draws=cfg.draws, seed=cfg.seed)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"module {name!r}, input {cfg.input}, {setting}: {error}") from error
        depth = np.arange(1, len(found.names) + 1, dtype=float)
        verdicts[setting] = detect(depth, found.curves)
        mean = summarise(found.curves)
        settings[setting] = {key: values for key, values in mean.items() if key.startswith(("logchi", "reff"))}
        shown.append(tables.probe_table(setting, found))
        task(setting, 1)(1)
    return StudyReport(
        subject=f"module {cfg.module}, input {cfg.input}, batch {cfg.batch}",
        explanation=_EXPLANATION,
        notes=(f"{cfg.draws} draws of white noise; depth counts probes",),
        tables=tuple(shown),
        figures=(figures_of.space_curves("behind the probes", depth, settings, []),),
        verdicts=verdicts,
    )
