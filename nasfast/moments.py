"""The moments study: well behaved or pathological at initialisation, in the paper's networks and in ours.

`quick_study` is a small version of Labatie's experiments with pass marks, `figures_study` the published settings beside
the published arrays, `module_study` the same measurements in a search space's candidates or in any module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.analysis.moments import (
    NetConfig,
    Padding,
    PowerLaw,
    Run,
    Source,
    Verdict,
    detect,
    dilution_bounds,
    fields,
    fit_line,
    fit_power_law,
    gaussian,
    held,
    images,
    module_moments,
    power_law_of,
    push,
    run,
    standardised,
    summarise,
)
from nasfast.analysis.moments.detect import EXPLODING, ONE_DIMENSIONAL, WELL_BEHAVED
from nasfast.analysis.moments.module import sensitivity, statistics_of
from nasfast.config import ConfigBase, ConfigError
from nasfast.data import FolderSource
from nasfast.runtime.device import check_device, torch_device
from nasfast.spaces import SearchSpace, UniformSampler, get_space
from nasfast.study import Check, StudyReport, Table, Task, check_common, maker, run_study, sample_shape
from nasfast.supernet import Init, Supernet, initialize

_RESULTS = "results.jsonl"
_EXPLANATION = (
    "chi, the normalised sensitivity, is how much more a network amplifies noise than signal; 20 log10 chi is the loss "
    "of signal-to-noise ratio in dB. r_eff, the effective rank, is the number of directions in which a signal varies."
)
_SQRT2 = math.sqrt(2)


class _Runner:
    """Runs networks, telling its progress, and resumes them from a file."""

    def __init__(self, out: str | Path | None, seed: int, device: str, task: Task) -> None:
        self._file = None if out is None else Path(out) / _RESULTS
        self._seed, self._device, self.task = seed, device, task
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, cfg: NetConfig, source: Source, realisations: int) -> Run:
        found = run(
            cfg, source, realisations=realisations, seed=self._seed, device=self._device, file=self._file,
            progress=self.task(name, realisations),
        )  # fmt: skip
        self.seconds[name] = found.seconds
        return found


def _report(cfg: Any, out: str | Path | None, study: Callable[[Any, _Runner], dict[str, Any]]) -> StudyReport:
    device = torch_device(getattr(cfg, "device", "cpu"))

    def measured(task: Task) -> dict[str, Any]:
        found = study(cfg, _Runner(out, cfg.seed, device, task))
        verdicts = {name: verdict.to_dict() for name, verdict in found["verdicts"].items()}
        return {**found, "verdicts": verdicts, "explanation": _EXPLANATION}

    return run_study("moments", cfg, measured, device=device)


def _families(base: NetConfig) -> dict[str, NetConfig]:
    return {
        "vanilla": base,
        "BN feed-forward": base.replace(norm="batch"),
        "BN resnet": base.replace(norm="batch", residual=2),
    }


def _curves_figure(title: str, found: Run, reference: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The data of figure 3, 4 or 5."""
    cfg = found.cfg
    data = {"depth": found.depth, **summarise(found.curves())}
    kind = "resnet" if cfg.residual else "vanilla" if cfg.norm == "none" else "normalised"
    figure = {"kind": kind, "title": title, "curves": data, "reference": dict(reference or {})}
    if kind == "resnet":
        figure["power_law"] = asdict(power_law_of(found))
    return figure


def _histogram_figure(title: str, found: Run, reference: Mapping[str, Any] | None = None) -> dict[str, Any]:
    curves = found.curves()
    data = {name: curves[name].T for name in ("lognu2", "logmu2_noise")}
    return {
        "kind": "histograms", "title": title, "depth": found.depth, "values": data, "reference": dict(reference or {}),
    }  # fmt: skip


def _summary_table(title: str, runs: Mapping[str, Run], seconds: Mapping[str, float]) -> Table:
    header = ("", "l", "log chi", "dB", "increment", "BN part", "other part", "r_eff(x)", "r_eff(dx)", "mu_4(z)",
              "log nu_2(x)", "networks", "seconds")  # fmt: skip
    rows = []
    for name, found in runs.items():
        mean = {key: values.mean(0) for key, values in found.curves().items()}
        for i in sorted({0, len(found.depth) // 4, len(found.depth) // 2, len(found.depth) - 1}):
            first = i == 0
            normed = "inc_bn" in mean
            rows.append((
                name if first else "", f"{found.depth[i]:.0f}", f"{mean['logchi'][i]:.3f}",
                f"{20 / math.log(10) * mean['logchi'][i]:.1f}", f"{mean['inc'][i]:.4f}",
                f"{mean['inc_bn'][i]:.4f}" if normed else "-", f"{mean['inc_phi'][i]:.4f}" if normed else "-",
                f"{mean['reff_signal'][i]:.2f}", f"{mean['reff_noise'][i]:.2f}",
                f"{mean['mu4_z'][i]:.2f}" if normed else "-",
                f"{mean['lognu2'][i]:.2f}", str(found.realisations) if first else "",
                f"{seconds[name]:.1f}" if first else "",
            ))  # fmt: skip
    return Table(title, header, tuple(rows))


def _fit_table(runs: Mapping[str, Run], verdicts: Mapping[str, Verdict]) -> Table:
    header = ("fits of log chi", "slope", "R^2", "exponent", "R^2", "tau", "r_eff(L)", "verdict")
    rows = []
    for name, found in runs.items():
        e = verdicts[name].evidence
        tau = f"{power_law_of(found).tau:.3f}" if found.cfg.residual else "-"
        rows.append((
            name, f"{e['slope']:.4f}", f"{e['slope_r2']:.5f}", f"{e['exponent']:.3f}", f"{e['exponent_r2']:.5f}", tau,
            f"{e['rank']:.2f}", str(verdicts[name]),
        ))  # fmt: skip
    return Table("exponential fit on l > L/4, power law on all l", header, tuple(rows))


@dataclass(frozen=True)
class QuickConfig(ConfigBase):
    """The quick experiment, whose sizes are those of its pass marks.

    Attributes:
        threads: CPU threads, 0 for torch's choice.
        seed: of weights, inputs and noise.
    """

    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self.threads, self.seed)


_QUICK = {
    "FC": NetConfig(width=128, batch=64, depth=200, every=4),
    "conv": NetConfig(kernel=3, width=64, batch=16, depth=120, every=4),
}
_QUICK_SEEDS = {"FC": 8, "conv": 5}
# The effective rank of these small vanilla networks scatters by 2 between networks, and five cannot show its mean.
_VANILLA_CONV_SEEDS = 20
_HISTOGRAM_SEEDS = 100
# Twenty layers are averaged before ranks are compared; a rise within two standard errors is none.
_AVERAGED, _SIGMAS = 20, 2.0


def quick_study(cfg: QuickConfig = QuickConfig(), *, out: str | Path | None = None) -> StudyReport:
    """Small synthetic versions of figures 2 to 5 and of the variants, with pass marks, in about a minute of one core.

    Args:
        out: directory whose results.jsonl is appended to and continued from.
    """
    return _report(cfg, out, _quick)


def _quick(cfg: QuickConfig, runner: _Runner) -> dict[str, Any]:
    sources = {"FC": gaussian(192), "conv": fields(3, 16)}
    runs, checks = {}, []
    for kind, base in _QUICK.items():
        for family, net in _families(base).items():
            seeds = _VANILLA_CONV_SEEDS if (kind, family) == ("conv", "vanilla") else _QUICK_SEEDS[kind]
            name = f"{kind}, {family}"
            runs[name] = runner(name, net, sources[kind], seeds)
    verdicts = {name: detect(found.depth, found.curves()) for name, found in runs.items()}
    for kind in _QUICK:
        of_kind = {family: f"{kind}, {family}" for family in ("vanilla", "BN feed-forward", "BN resnet")}
        checks += _vanilla_checks(kind, runs[of_kind["vanilla"]], verdicts[of_kind["vanilla"]])
        checks += _exploding_checks(kind, runs[of_kind["BN feed-forward"]], verdicts[of_kind["BN feed-forward"]])
        checks += _resnet_checks(kind, runs[of_kind["BN resnet"]], verdicts[of_kind["BN resnet"]])
    variants, of_variants = _variants(runner, sources["FC"])
    histogram_net = _QUICK["FC"].replace(every=_QUICK["FC"].depth // 4)
    histograms = runner("FC, histograms", histogram_net, sources["FC"], _HISTOGRAM_SEEDS)
    figures = [_histogram_figure("FC, vanilla, width 128", histograms)]
    figures += [_curves_figure(name, found) for name, found in runs.items()]
    return {
        "subject": "quick experiment on synthetic inputs",
        "notes": (
            "FC: 192 Gaussian features, width 128, batch 64; conv: 3 x 16 x 16 fields of amplitude 1/f, 3 x 3, width "
            "64, batch 16, periodic borders",
        ),
        "tables": (
            _summary_table("averages over networks", runs, runner.seconds),
            _fit_table(runs, verdicts),
            Table("variants, averages over networks", ("", "measured"), variants),
        ),
        "figures": tuple(figures),
        "verdicts": verdicts,
        "checks": (*checks, *of_variants),
    }


def _vanilla_checks(kind: str, found: Run, verdict: Verdict) -> list[Check]:
    curves = found.curves()
    inc, rank = curves["inc"].mean(0), curves["reff_signal"]
    checks = [
        Check(f"{kind}, vanilla: smallest increment (theorem 2: 1)", 0.95, _SQRT2, float(inc.min())),
        Check(f"{kind}, vanilla: largest increment (theorem 2: sqrt 2)", 0.95, _SQRT2, float(inc.max())),
    ]
    if kind == "FC":
        late = found.depth > found.depth[-1] / 2
        checks += [
            Check("FC, vanilla: increment, last half", 0.98, 1.03, float(inc[late].mean())),
            Check("FC, vanilla: r_eff(L)", 1, 1.3, float(rank[:, -1].mean())),
            Check("FC, vanilla: detected one-dimensional", 1, 1, float(ONE_DIMENSIONAL in verdict.names)),
        ]
    else:
        window = _AVERAGED // found.cfg.every
        steps = np.diff(rank.reshape(len(rank), -1, window).mean(2), axis=1)
        rise = steps.mean(0) / (steps.std(0, ddof=1) / math.sqrt(len(steps)))
        checks += [
            Check("conv, vanilla: r_eff(L)", 1, 4, float(rank[:, -1].mean())),
            Check("conv, vanilla: largest rise of r_eff in 20 layers, in standard errors", -math.inf, _SIGMAS,
                  float(rise.max())),
        ]  # fmt: skip
    return checks


def _exploding_checks(kind: str, found: Run, verdict: Verdict) -> list[Check]:
    curves, e = found.curves(), verdict.evidence
    low, high = (0.18, 0.23) if kind == "FC" else (0.15, 0.21)
    phi = curves["inc_phi"].mean(0)
    # theorem 3, second factor: from the mean absolute values of the normalised signal alone
    predicted = (1 - found.values["nu1_abs_squared_signal_norm"].mean(0) / 2) ** -0.5
    checks = [
        Check(f"{kind}, BN feed-forward: slope of log chi", low, high, e["slope"]),
        Check(f"{kind}, BN feed-forward: smallest ReLU part (theorem 3: 1)", 0.99, _SQRT2, float(phi.min())),
        Check(f"{kind}, BN feed-forward: largest ReLU part (theorem 3: sqrt 2)", 0.99, _SQRT2, float(phi.max())),
        Check(f"{kind}, BN feed-forward: ReLU part minus that of theorem 3", -0.01, 0.01,
              float((phi - predicted).mean())),
    ]  # fmt: skip
    if kind == "FC":
        checks += [
            Check("FC, BN feed-forward: R^2 of exponential", 0.999, 1, e["slope_r2"]),
            Check("FC, BN feed-forward: detected exploding", 1, 1, float(EXPLODING in verdict.names)),
        ]
    else:
        checks.append(Check("conv, BN feed-forward: mu_4(z) at L, fat tails", 6, math.inf,
                            float(curves["mu4_z"][:, -1].mean())))  # fmt: skip
    return checks


def _resnet_checks(kind: str, found: Run, verdict: Verdict) -> list[Check]:
    e, tau = verdict.evidence, power_law_of(found).tau
    low, mean, high = dilution_bounds(found)
    checks = [
        Check(f"{kind}, BN resnet: R^2 of power law", 0.99, 1, e["exponent_r2"]),
        Check(f"{kind}, BN resnet: R^2 of power law minus exponential", 0, 1,
              e["exponent_r2"] - e["exponent_r2_against_l"]),
        Check(f"{kind}, BN resnet: exponent minus tau", -0.15, 0.15, e["exponent"] - tau),
        Check(f"{kind}, BN resnet: r_eff(L)", 4, math.inf, e["rank"]),
        # both bounds hold up to small relative errors: a percent of the increment
        Check(f"{kind}, BN resnet: increment over lower bound of theorem 4, smallest", 0.99, math.inf,
              float((mean / low).min())),
        Check(f"{kind}, BN resnet: increment over upper bound of theorem 4, largest", 0, 1.01,
              float((mean / high).max())),
    ]  # fmt: skip
    if kind == "FC":
        checks.append(Check("FC, BN resnet: detected well behaved", 1, 1, float(WELL_BEHAVED in verdict.names)))
    return checks


def _variants(runner: _Runner, source: Source) -> tuple[tuple[tuple[str, str], ...], list[Check]]:
    base = _QUICK["FC"]

    def measured(name: str, net: NetConfig) -> tuple[Run, dict[str, float]]:
        found = runner(name, net, source, _QUICK_SEEDS["FC"])
        return found, detect(found.depth, found.curves()).evidence

    _, layer = measured("layer norm", base.replace(norm="layer"))
    _, chaotic = measured("tanh, chaotic", base.replace(act="tanh", sigma_w=2.0, sigma_b=0.3))
    _, tanh_bn = measured("tanh with BN", base.replace(act="tanh", norm="batch"))
    resnet, plain = measured("ReLU resnet without BN", base.replace(residual=2, depth=100))
    growth = fit_line(resnet.depth, resnet.curves()["lognu2"].mean(0))
    texts = (
        ("layer norm", f"mu_2/nu_2 {layer['share']:.2g}: zero-dimensional signal"),
        ("tanh, chaotic (sigma_w 2, sigma_b 0.3)", f"log chi grows by {chaotic['slope']:.3f} per layer"),
        ("tanh with BN", f"log chi grows by {tanh_bn['slope']:.3f} per layer"),
        (
            "ReLU resnet without BN, H = 2",
            f"log nu_2 grows by {growth.slope:.3f} per residual, r_eff {plain['rank']:.2f}",
        ),
    )
    return texts, [
        Check("layer norm: mu_2/nu_2 at L", 0, 1e-2, layer["share"]),
        Check("tanh, chaotic: slope of log chi", 0.12, 0.15, chaotic["slope"]),
        Check("tanh with BN: slope of log chi", 0.085, 0.105, tanh_bn["slope"]),
        Check("ReLU resnet without BN: growth of log nu_2", 0.6, 0.7, growth.slope),
        Check("ReLU resnet without BN: linear, R^2", 0.99, 1, growth.r2),
    ]


@dataclass(frozen=True)
class FiguresConfig(ConfigBase):
    """The published experiments, figures 2 to 5; the defaults are the paper's but for the number of networks.

    Attributes:
        figures: which.
        kernel: 0 for fully connected, 3 for the paper's convolutions (hours on a CPU).
        width, batch: of figures 3 to 5.
        histogram_width, histogram_batch: of figure 2.
        depth: null takes the paper's: 200, and 500 residuals in figure 5. A smaller one is compared as far as it goes.
        every: layers between records; null takes a hundredth of the depth (figure 2: a quarter).
        padding: of convolutions; `shifted` is that of the paper's code, periodic with all of the border on one side.
        realisations: networks in figures 3 to 5.
        histogram_realisations: networks in figure 2.
        images: folder with one sub-folder per class, such as CIFAR-10's training images; null takes synthetic inputs.
        reference: folder of the published summaries (`vanilla_fc.npz` and so on) to compare with and draw.
        dtype: of signal and noise.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        threads: CPU threads, 0 for torch's choice.
        seed: of weights, inputs and noise.
    """

    figures: tuple[int, ...] = (2, 3, 4, 5)
    kernel: int = 0
    width: int = 512
    batch: int = 64
    histogram_width: int = 128
    histogram_batch: int = 1024
    depth: int | None = None
    every: int | None = None
    padding: Padding = "shifted"
    realisations: int = 10
    histogram_realisations: int = 200
    images: str | None = None
    reference: str | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "cpu"
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_device(self.device)
        check_common(
            self.threads, self.seed, realisations=self.realisations, histogram_realisations=self.histogram_realisations
        )
        if not self.figures or not set(self.figures) <= {2, 3, 4, 5}:
            raise ValueError(f"figures must be some of 2, 3, 4 and 5, got {list(self.figures)}")
        if self.reference is not None and not Path(self.reference).is_dir():
            raise ValueError(f"reference must be a folder of .npz files, got {self.reference!r}")

    def network(self, figure: int) -> NetConfig:
        """The network of a figure."""
        residual = 2 if figure == 5 else 0
        depth = self.depth or (500 if residual else 200)
        # 100 records, but 4 of the histograms
        every = self.every or max(1, depth // (4 if figure == 2 else 100))
        width, batch = (self.histogram_width, self.histogram_batch) if figure == 2 else (self.width, self.batch)
        return NetConfig(
            norm="batch" if figure > 3 else "none", residual=residual, kernel=self.kernel, width=width, depth=depth,
            batch=batch, every=every, padding=self.padding, dtype=self.dtype,
        )  # fmt: skip

    def published(self, figure: int) -> str | None:
        """Name of the published arrays of these settings, None where there are none."""
        kind = "conv" if self.kernel else "fc"
        if self.kernel not in (0, 3):
            return None
        if figure == 2:
            return f"vanilla_histo_{kind}_w{self.histogram_width}"
        if self.width != 512 or (self.batch != 64 and (self.kernel or figure != 4)):
            return None
        name = {3: "vanilla", 4: "bn_ff", 5: "bn_res"}[figure] + f"_{kind}"
        if not self.kernel:
            return f"{name}_b{self.batch}" if figure == 4 else name
        # a translation is nothing to a network without skip connections
        if self.padding == "shifted" or (self.padding == "periodic" and figure != 5):
            return name
        return f"{name}_{self.padding}pad"


_FIGURE_NAMES = {2: "vanilla, histograms", 3: "vanilla", 4: "BN feed-forward", 5: "BN resnet"}


def figures_study(cfg: FiguresConfig = FiguresConfig(), *, out: str | Path | None = None) -> StudyReport:
    """The paper's experiments, drawn, judged, and compared with its published arrays where these are given.

    Args:
        out: directory whose results.jsonl is appended to: a study that was stopped continues, and one of more networks
            adds to those there.

    Raises:
        DataError: the image folder cannot be used.
        ValueError: a batch of more images than there are.
    """
    return _report(cfg, out, _figures)


def load_images(folder: str) -> Tensor:
    """All images of a folder, (count, 3, H, W) uint8.

    Raises:
        DataError: no such folder, or one without classes.
        ValueError: images of different sizes.
    """
    source = FolderSource(folder)
    pixels = [np.asarray(source.image(i)).transpose(2, 0, 1) for i in range(len(source))]
    if len({p.shape for p in pixels}) > 1:
        raise ValueError(f"images of {folder} have different sizes: bring them to one")
    return torch.from_numpy(np.stack(pixels))


def _source(cfg: FiguresConfig) -> Source:
    if cfg.images is not None:
        return images(load_images(cfg.images), flat=not cfg.kernel)
    return fields(3, 32) if cfg.kernel else gaussian(3072)


def _figures(cfg: FiguresConfig, runner: _Runner) -> dict[str, Any]:
    source = _source(cfg)
    runs, figures, checks, compared = {}, [], [], []
    for number in cfg.figures:
        name = _FIGURE_NAMES[number]
        count = cfg.histogram_realisations if number == 2 else cfg.realisations
        found = runner(name, cfg.network(number), source, count)
        reference = _reference(cfg, number)
        title = f"figure {number}: {name}"
        if number == 2:
            figures.append(_histogram_figure(title, found, reference))
        else:
            runs[name] = found
            figures.append(_curves_figure(title, found, reference))
        if reference:
            rows, of_figure = _agreement(cfg, number, found, reference)
            compared += rows
            checks += of_figure
    verdicts = {name: detect(found.depth, found.curves()) for name, found in runs.items()}
    tables = (
        [_summary_table("averages over networks", runs, runner.seconds), _fit_table(runs, verdicts)] if runs else []
    )
    if compared:
        header = ("against the published arrays", "largest deviation", "at l", "measured", "published", "/ allowed")
        tables.append(Table("agreement", header, tuple(compared)))
    if cfg.reference is not None:
        checks += _data_checks(Path(cfg.reference))
    kind = f"{cfg.kernel} x {cfg.kernel} convolutions, {cfg.padding} borders" if cfg.kernel else "fully connected"
    inputs = "synthetic inputs" if cfg.images is None else f"images of {Path(cfg.images).name}"
    notes = [f"{cfg.realisations} networks (paper: 1,000, FC 200), figure 2: {cfg.histogram_realisations} (10,000)"]
    notes += [f"figure 2 took {runner.seconds[_FIGURE_NAMES[2]]:.1f} s"] if 2 in cfg.figures else []
    return {
        "subject": f"published experiments, {kind}, width {cfg.width}, batch {cfg.batch}, {inputs}",
        "notes": tuple(notes),
        "tables": tuple(tables),
        "figures": tuple(figures),
        "verdicts": verdicts,
        "checks": tuple(checks),
    }


def _reference(cfg: FiguresConfig, figure: int) -> dict[str, np.ndarray]:
    name = cfg.published(figure)
    if cfg.reference is None or name is None or not (file := Path(cfg.reference) / f"{name}.npz").exists():
        return {}
    with np.load(file, allow_pickle=False) as arrays:
        published = {key: arrays[key] for key in arrays.files}
    # the published records that this run has too
    shared = np.isin(published["depth"], cfg.network(figure).records)
    cut = {key: v[..., shared] if v.shape[-1:] == shared.shape else v for key, v in published.items()}
    return {"name": name, **cut} if shared.any() else {}


_COMPARED = ("inc", "inc_bn", "inc_phi", "logchi", "reff_signal", "reff_noise", "mu4_z", "nu1abs_z")
# Allowed beside four standard errors: relative, and absolute for log chi.
_RELATIVE = {"reff_signal": 0.03, "reff_noise": 0.03, "mu4_z": 0.03}


def _agreement(
    cfg: FiguresConfig, figure: int, found: Run, reference: Mapping[str, Any]
) -> tuple[list[tuple[str, ...]], list[Check]]:
    """Rows and pass marks of one figure: deviations over what scatter and rounding of the reference allow."""
    rows, checks, name, count = [], [], reference["name"], float(reference["n_real"])
    depth, networks = reference["depth"], found.realisations
    curves = {key: values[:, np.isin(found.depth, depth)] for key, values in found.curves().items()}

    def compare(key: str, measured: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> None:
        ratio = np.abs(measured - expected) / allowed
        i = int(np.nanargmax(ratio))
        rows.append((
            f"{name}: {key}", f"{abs(measured[i] - expected[i]):.4f}", f"{depth[i]:.0f}", f"{measured[i]:.4f}",
            f"{expected[i]:.4f}", f"{ratio[i]:.2f}",
        ))  # fmt: skip
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
    # a slope and an exponent are those of the whole depth
    if figure == 4 and depth[-1] > 150:
        late = depth > 100
        mine, theirs = (
            fit_line(depth[late], v[late]).slope for v in (curves["logchi"].mean(0), reference["logchi_mean"])
        )
        checks.append(Check(f"{name}: slope of log chi, l > 100", theirs - 0.004, theirs + 0.004, mine))
    if figure == 5 and cfg.depth is None:
        tau = _published_law(reference).tau
        checks.append(Check(f"{name}: tau", tau - 0.02, tau + 0.02, power_law_of(found).tau))
    return rows, checks


def _published_law(reference: Mapping[str, Any]) -> PowerLaw:
    return fit_power_law(
        reference["depth"], reference["chi_mean"], reference["inc_ratio_of_means"], int(reference["units_per_residual"])
    )


def _data_checks(folder: Path) -> list[Check]:
    """What must hold in the published arrays alone: theorem 3's ReLU part, and the published fit of figure 5."""
    checks = []
    for file in sorted(folder.glob("bn_ff_*.npz")):
        with np.load(file, allow_pickle=False) as arrays:
            predicted = (1 - arrays["nu1abs_z_mean"] ** 2 / 2) ** -0.5
            distance = float(np.abs(predicted - arrays["inc_phi_mean"]).max())
        checks.append(Check(f"{file.stem}: ReLU part against theorem 3, largest distance", 0, 0.006, distance))
    if (file := folder / "bn_res_conv.npz").exists():
        with np.load(file, allow_pickle=False) as arrays:
            law = _published_law(arrays)
        checks.append(Check("bn_res_conv: tau of the published arrays", 0.548, 0.550, law.tau))
        checks.append(Check("bn_res_conv: C of the published arrays", 1.1037, 1.1057, law.c))
    return checks


@dataclass(frozen=True)
class ModuleConfig(ConfigBase):
    """What `moments module` measures.

    Attributes:
        space: `mobilenet_v2`, `shufflenet_v2`, `nas_bench_macro`, `digits_mini`, or the path of a YAML file.
        module: instead of a space: `package.module:factory`, a function without arguments that returns an nn.Module, or
            an nn.Module.
        input: shape of one sample of the module, such as "3,224,224".
        probes: of the module, such as "layer1,layer2": behind which submodules; null takes its children.
        resolution: of a space's images; null takes 64, or the space's where that is smaller.
        batch: samples, which give BatchNorms their statistics.
        images: folder with one sub-folder per class; null takes synthetic fields of amplitude 1/f (white noise for
            inputs that are no images).
        paths: random paths through a space.
        candidate_paths: of these, those along which every candidate of every layer is measured.
        draws: of the noise in a module.
        threads: CPU threads, 0 for torch's choice.
        seed: of weights, inputs, noise and paths.
    """

    space: str = "mobilenet_v2"
    module: str | None = None
    input: str = "3,224,224"
    probes: str | None = None
    resolution: int | None = None
    batch: int = 32
    images: str | None = None
    paths: int = 16
    candidate_paths: int = 4
    draws: int = 4
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self.threads, self.seed, paths=self.paths, candidate_paths=self.candidate_paths, draws=self.draws)
        if self.batch < 2 or self.paths < 2:
            raise ValueError(f"batch and paths must be at least 2, got {self.batch} and {self.paths}")
        if self.candidate_paths > self.paths:
            raise ValueError(f"candidate_paths must be at most paths, got {self.candidate_paths} and {self.paths}")

    def inputs(self, shape: Sequence[int]) -> Tensor:
        """Standardised (batch, *shape).

        Raises:
            ConfigError: images for an input that is none.
            DataError: the image folder cannot be used.
        """
        generator = torch.Generator().manual_seed(self.seed)
        if len(shape) != 3:
            if self.images is not None:
                raise ConfigError(f"images need an input of three dimensions, got {list(shape)}")
            return torch.randn(self.batch, *shape, generator=generator)
        channels, *size = shape
        if self.images is None:
            x = fields(channels, max(size))(self.batch, generator)[..., : size[0], : size[1]]
        else:
            x = images(load_images(self.images))(self.batch, generator)
            if x.shape[1] != channels:
                raise ConfigError(f"images have {x.shape[1]} channels, the input {channels}")
            x = F.interpolate(x, tuple(size), mode="bilinear", antialias=True)
        return standardised(x)


def module_study(cfg: ModuleConfig = ModuleConfig()) -> StudyReport:
    """chi, effective rank and a verdict along random paths of a space and per candidate, or behind parts of a module.

    Raises:
        ConfigError: unknown space, a module that cannot be imported or made, or an unusable input.
        ValueError: a module that cannot take the input or has no forward-mode derivative.
    """
    return _report(cfg, None, _space if cfg.module is None else _module)


_DEFAULT_RESOLUTION = 64


def _space(cfg: ModuleConfig, runner: _Runner) -> dict[str, Any]:
    space = get_space(cfg.space)
    space = get_space(cfg.space, resolution=cfg.resolution or min(_DEFAULT_RESOLUTION, space.resolution))
    x = cfg.inputs((space.in_channels, space.resolution, space.resolution))
    own = space.activation
    settings: list[tuple[Init, str]] = [
        (i, a) for a in dict.fromkeys(("tanh", own)) for i in ("orthogonal", "gaussian")
    ]
    found = {}
    for init, act in settings:
        name = f"{init}, {act}"
        net = Supernet(space, init=init, activation=act, layer_indicators=False, fused=False, seed=cfg.seed)
        found[name] = _paths(cfg, space, net, x, runner.task(name, cfg.paths))
    depth = np.arange(1, len(space) + 1, dtype=float)
    verdicts = {name: detect(depth, curves) for name, (curves, _) in found.items()}
    reductions = [i for i, layer in enumerate(space.layers) if not layer.normal]
    inputs = "1/f fields" if cfg.images is None else f"images of {Path(cfg.images).name}"
    return {
        "subject": f"space {space.name}, {len(space)} layers, {inputs}, {space.resolution} x {space.resolution}",
        "notes": (
            f"{cfg.paths} random paths, all candidates along {cfg.candidate_paths} of them; batch {cfg.batch}",
            "log chi is counted from the output of the stem; verdicts are of the average over paths",
        ),
        "tables": (
            _path_table(found, verdicts),
            _layer_table(found, space),
            _stage_table(found, reductions),
            _candidate_table(found),
            _comparability_table(found),
        ),
        "figures": (_space_figure(depth, found, reductions),),
        "verdicts": verdicts,
    }


Found = tuple[dict[str, np.ndarray], dict[tuple[int, str], list[float]]]
"""Curves (paths, layers), and log delta chi of (layer, candidate), one value per path measured."""


def _paths(cfg: ModuleConfig, space: SearchSpace, net: Supernet, x: Tensor, progress: Callable[[int], None]) -> Found:
    net = held(net)
    dx = torch.randn(x.shape, generator=torch.Generator().manual_seed(cfg.seed))
    first = push(net.stem, (x, dx))
    start = sensitivity(*first)
    sampler = UniformSampler(space, seed=cfg.seed, layer_indicators=False)
    rows, increments = [], {}
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
    return {key: np.array([[place[key] for place in row] for row in rows]) for key in rows[0][0]}, increments


def _path_table(found: Mapping[str, Found], verdicts: Mapping[str, Verdict]) -> Table:
    header = ("random paths", "log chi(L)", "dB", "exponent", "R^2", "R^2 exponential", "r_eff(x)", "r_eff(dx)",
              "mu_2/nu_2", "pseudo-linear", "verdict")  # fmt: skip
    rows = []
    for name, (curves, _) in found.items():
        e, mean = verdicts[name].evidence, {key: values.mean(0) for key, values in curves.items()}
        rows.append((
            name, f"{e['log_chi']:.3f}", f"{e['noise_factor_db']:.1f}", f"{e['exponent']:.3f}",
            f"{e['exponent_r2']:.4f}", f"{e['exponent_r2_against_l']:.4f}", f"{e['rank']:.1f}",
            f"{mean['reff_noise'][-1]:.1f}", f"{e['share']:.3f}", f"{mean['pseudo_linear'][-1]:.3f}",
            str(verdicts[name]),
        ))  # fmt: skip
    return Table("from the stem to the last layer", header, tuple(rows))


def _layer_table(found: Mapping[str, Found], space: SearchSpace) -> Table:
    header = ("layer", *(f"{name}: {key}" for name in found for key in ("delta chi", "log chi", "r_eff")))
    rows = []
    for index, layer in enumerate(space.layers):
        cells = [f"{index} {'' if layer.normal else 'reduction'}".strip()]
        for curves, _ in found.values():
            mean = {key: curves[key].mean(0) for key in ("logchi", "reff_signal")}
            increment = mean["logchi"][index] - (mean["logchi"][index - 1] if index else 0.0)
            cells += [f"{math.exp(increment):.3f}", f"{mean['logchi'][index]:.3f}", f"{mean['reff_signal'][index]:.1f}"]
        rows.append(tuple(cells))
    return Table("averages over paths (increments: geometric)", header, tuple(rows))


def _stage_table(found: Mapping[str, Found], reductions: Sequence[int]) -> Table:
    """Increments by place within a stage, beside what theorem 4 makes of the first: every residual of a stage adds a
    branch of variance 1 and growth G, that of the reduction, to a sum of k branches."""
    places: dict[int, list[int]] = {}
    for first, end in zip(reductions, [*reductions[1:], None], strict=True):
        for k, layer in enumerate(
            range(first, len(next(iter(found.values()))[0]["logchi"][0]) if end is None else end)
        ):
            places.setdefault(k, []).append(layer)
    header = ("layer of a stage", *(f"{name}{text}" for name in found for text in (": delta chi", ", diluted")))
    steps = {name: np.diff(curves["logchi"].mean(0), prepend=0.0) for name, (curves, _) in found.items()}
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


def _candidate_table(found: Mapping[str, Found]) -> Table:
    places = list(dict.fromkeys(place for _, increments in found.values() for place in increments))
    rows = [
        (f"{layer} {name}", *(f"{math.exp(np.mean(increments[layer, name])):.3f}" for _, increments in found.values()))
        for layer, name in places
    ]
    return Table("delta chi of every candidate", ("layer and candidate", *found), tuple(rows))


def _spreads(increments: Mapping[tuple[int, str], Sequence[float]], layers: int) -> np.ndarray:
    """std over candidates of log delta chi, averaged over paths; (layers,)."""
    values = [np.array([v for (at, _), v in increments.items() if at == i]) for i in range(layers)]
    return np.array([v.std(0).mean() for v in values])


def _comparability_table(found: Mapping[str, Found]) -> Table:
    header = (
        "std of log delta chi over candidates, then of log chi over paths", "first quarter", "last quarter", "mean",
        "paths: first quarter", "last quarter", "last over first", "if added up",
    )  # fmt: skip
    rows = []
    for name, (curves, increments) in found.items():
        layers = curves["logchi"].shape[1]
        quarter = max(1, layers // 4)
        candidates, paths = _spreads(increments, layers), curves["logchi"].std(0)
        # what differences that every layer adds by itself would grow to
        alone = np.sqrt(np.cumsum(candidates**2))
        first, last = paths[:quarter].mean(), paths[-quarter:].mean()
        rows.append((
            name, f"{candidates[:quarter].mean():.4f}", f"{candidates[-quarter:].mean():.4f}",
            f"{candidates.mean():.4f}", f"{first:.4f}", f"{last:.4f}", f"{last / first:.2f}",
            f"{alone[-quarter:].mean() / alone[:quarter].mean():.2f}",
        ))  # fmt: skip
    return Table("do candidates stay comparable with depth?", header, tuple(rows))


def _space_figure(depth: np.ndarray, found: Mapping[str, Found], reductions: Sequence[int]) -> dict[str, Any]:
    settings = {
        name: {
            **summarise({key: curves[key] for key in ("logchi", "reff_signal", "reff_noise")}),
            "paths_std": curves["logchi"].std(0),
            "candidates_std": _spreads(increments, len(depth)),
        }
        for name, (curves, increments) in found.items()
    }
    return {"kind": "space", "title": "along random paths", "depth": depth, "settings": settings,
            "reductions": [i + 1 for i in reductions]}  # fmt: skip


def _module(cfg: ModuleConfig, runner: _Runner) -> dict[str, Any]:
    make, x = maker(cfg.module), cfg.inputs(sample_shape(cfg.input))
    probes = None if cfg.probes is None else [name.strip() for name in cfg.probes.split(",")]
    tables, verdicts, settings = [], {}, {}
    for setting in ("as it is", "orthogonal", "gaussian"):
        module = make()
        try:
            if setting != "as it is":
                initialize(module, setting, seed=cfg.seed)
            found = module_moments(module, x, probes=probes, draws=cfg.draws, seed=cfg.seed)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"module {cfg.module!r}, input {cfg.input}, {setting}: {error}") from error
        depth, mean = np.arange(1, len(found.names) + 1, dtype=float), summarise(found.curves)
        verdicts[setting] = detect(depth, found.curves)
        settings[setting] = {k: v for k, v in mean.items() if k.startswith(("logchi", "reff"))}
        rows = [
            (name, *(f"{mean[f'{key}_mean'][i]:.3f}" for key in ("inc", "logchi", "reff_signal", "reff_noise",
                                                                "variance_share", "mu4", "pseudo_linear")))
            for i, name in enumerate(found.names)
        ]  # fmt: skip
        header = ("behind", "delta chi", "log chi", "r_eff(x)", "r_eff(dx)", "mu_2/nu_2", "mu_4", "pseudo-linear")
        tables.append(Table(setting, header, tuple(rows)))
        runner.task(setting, 1)(1)
    figure = {"kind": "space", "title": "behind the probes", "depth": depth, "settings": settings, "reductions": []}
    return {
        "subject": f"module {cfg.module}, input {cfg.input}, batch {cfg.batch}",
        "notes": (f"{cfg.draws} draws of white noise; depth counts probes",),
        "tables": tuple(tables),
        "figures": (figure,),
        "verdicts": verdicts,
    }
