"""Moments: deep networks that are well behaved or pathological at initialisation (A. Labatie, ICML 2019).

A signal and an infinitesimal noise go through a random network; chi, the normalised sensitivity, is how much more the
noise grows than the signal. Claimed, and shown by `quick` (small networks, pass marks) and `figures` (the paper's
settings, beside its published arrays):

    theorem 2, figure 3   vanilla networks: increments of chi between 1 and sqrt 2; the signal becomes one-dimensional
    theorem 3, figure 4   BatchNorm without skip connections: the sensitivity explodes; its ReLU part is
                          (1 - E nu_1(|z|)^2 / 2)^(-1/2)
    theorem 4, figure 5   BatchNorm resnets are well behaved: chi ~ l^tau, tau = (increment^(2 H) - 1) / 2
    theorem 1, figure 2   log moments of signal and noise spread over networks like a normal distribution
    variants              layer norm loses the signal; tanh explodes where it is chaotic and, slower, with BatchNorm;
                          ReLU resnets without BatchNorm scale exponentially

docs/moments.md has the definitions and what holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from scipy import stats
from torch import Tensor

from nasfast.data import FolderSource
from nasfast.report.plots import GREY, SERIES, new_figure
from nasfast.report.style import INK
from nasfast.research.analysis.moments.detect import (
    EXPLODING,
    ONE_DIMENSIONAL,
    WELL_BEHAVED,
    Verdict,
    detect,
    dilution_bounds,
    fit_line,
    fit_power_law,
    predict_power_law,
    summarise,
)
from nasfast.research.analysis.moments.networks import Array, NetConfig, Run, Source, fields, gaussian, read_arrays
from nasfast.research.analysis.moments.networks import images as image_source
from nasfast.research.analysis.moments.networks import run as run_networks
from nasfast.research.studies.commands import FiguresConfig, StudyConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.runtime.device import torch_device
from nasfast.runtime.progress import Progress

FC = NetConfig(width=128, batch=64, depth=200, every=4)
CONV = NetConfig(kernel=3, width=64, batch=16, depth=120, every=4)
FC_NETWORKS, CONV_NETWORKS = 8, 5
# The effective rank of small vanilla networks scatters by 2, and five cannot show its mean.
VANILLA_CONV_NETWORKS = 20
HISTOGRAM_NETWORKS, PUBLISHED_HISTOGRAM_NETWORKS = 100, 200
FAMILIES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "BN feed-forward": {"norm": "batch"},
    "BN resnet": {"norm": "batch", "residual": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "layer norm": {"norm": "layer"},
    "tanh, chaotic": {"act": "tanh", "sigma_w": 2.0, "sigma_b": 0.3},
    "tanh with BN": {"act": "tanh", "norm": "batch"},
    "ReLU resnet without BN": {"residual": 2, "depth": 100},
}
"""Variants of the fully connected networks -> what they change."""
# the paper's settings
WIDTH, HISTOGRAM_WIDTH, HISTOGRAM_BATCH, DEPTH, RESIDUALS = 512, 128, 1024, 200, 500
FIGURES = {2: "vanilla, histograms", 3: "vanilla", 4: "BN feed-forward", 5: "BN resnet"}
COMPARED = ("inc", "inc_bn", "inc_phi", "logchi", "reff_signal", "reff_noise", "mu4_z", "nu1abs_z")
# Relative deviation from the published curves that is allowed beside four standard errors.
RELATIVE = {"reff_signal": 0.03, "reff_noise": 0.03, "mu4_z": 0.03}
SQRT2 = math.sqrt(2)
EXPLANATION = (
    "chi, the normalised sensitivity, is how much more a network amplifies noise than signal; 20 log10 chi is the loss "
    "of signal-to-noise ratio in dB. r_eff, the effective rank, is the number of directions in which a signal varies."
)
Published = Mapping[str, Any]
"""The published arrays of one figure at the depths that a run has too, and its `name`; empty where there are none."""


def quick(cfg: StudyConfig, notes: Notebook) -> None:
    """The small experiments; their sizes are fixed, because the pass marks belong to them."""
    notes.say("Moments of small networks on synthetic inputs. " + EXPLANATION)
    notes.say("FC: 192 Gaussian features, width 128, batch 64. Conv: 1/f fields of 3 x 16 x 16, width 64, batch 16.")
    sources = {"FC": gaussian(192), "conv": fields(3, 16)}
    runs = {}
    for (kind, net), (family, changes) in product({"FC": FC, "conv": CONV}.items(), FAMILIES.items()):
        count = FC_NETWORKS if kind == "FC" else VANILLA_CONV_NETWORKS if family == "vanilla" else CONV_NETWORKS
        name = f"{kind}, {family}"
        runs[name] = networks(name, net.replace(**changes), sources[kind], count, cfg.seed, notes)
        verdict = detect(runs[name].depth, runs[name].curves())
        {"vanilla": vanilla, "BN feed-forward": exploding, "BN resnet": resnet}[family](
            name, runs[name], verdict, notes
        )
    variants = {
        name: networks(name, FC.replace(**changes), sources["FC"], FC_NETWORKS, cfg.seed, notes)
        for name, changes in VARIANTS.items()
    }
    e = {name: detect(variant.depth, variant.curves()).evidence for name, variant in variants.items()}
    resnet_run = variants["ReLU resnet without BN"]
    growth = fit_line(resnet_run.depth, resnet_run.curves()["lognu2"].mean(0))
    notes.mark("layer norm: mu_2/nu_2 at L", e["layer norm"]["share"], at_least=0, at_most=1e-2)
    notes.mark("tanh, chaotic: slope of log chi", e["tanh, chaotic"]["slope"], at_least=0.12, at_most=0.15)
    notes.mark("tanh with BN: slope of log chi", e["tanh with BN"]["slope"], at_least=0.085, at_most=0.105)
    notes.mark("ReLU resnet without BN: growth of log nu_2", growth.slope, at_least=0.6, at_most=0.7)
    notes.mark("ReLU resnet without BN: linear, R^2", growth.r2, at_least=0.99, at_most=1)
    _tables(runs, notes)
    net = FC.replace(every=FC.depth // 4)
    spread = networks("FC, histograms", net, sources["FC"], HISTOGRAM_NETWORKS, cfg.seed, notes)
    _histogram_figure("FC, vanilla, width 128", spread, {}, notes)
    for name, family_run in runs.items():
        _depth_figure(name, family_run, {}, notes)


def vanilla(name: str, run: Run, verdict: Verdict, notes: Notebook) -> None:
    """Theorem 2, and the signal that becomes one-dimensional."""
    inc, rank = run.curves()["inc"].mean(0), run.curves()["reff_signal"]
    notes.mark(f"{name}: smallest increment (theorem 2: 1)", inc.min(), at_least=0.95, at_most=SQRT2)
    notes.mark(f"{name}: largest increment (theorem 2: sqrt 2)", inc.max(), at_least=0.95, at_most=SQRT2)
    if not run.cfg.kernel:
        late = inc[run.depth > run.depth[-1] / 2].mean()
        notes.mark(f"{name}: increment, last half", late, at_least=0.98, at_most=1.03)
        notes.mark(f"{name}: r_eff(L)", rank[:, -1].mean(), at_least=1, at_most=1.3)
        notes.mark(f"{name}: detected one-dimensional", ONE_DIMENSIONAL in verdict.names, at_least=1)
        return
    notes.mark(f"{name}: r_eff(L)", rank[:, -1].mean(), at_least=1, at_most=4)
    # ranks are averaged over twenty layers before they are compared; a rise within two standard errors does not count
    steps = np.diff(rank.reshape(len(rank), -1, 20 // run.cfg.every).mean(2), axis=1)
    rise = (steps.mean(0) / (steps.std(0, ddof=1) / math.sqrt(len(steps)))).max()
    notes.mark(f"{name}: largest rise of r_eff in 20 layers, in standard errors", rise, at_most=2)


def exploding(name: str, run: Run, verdict: Verdict, notes: Notebook) -> None:
    """Theorem 3, and the sensitivity that explodes."""
    curves, e = run.curves(), verdict.evidence
    phi = curves["inc_phi"].mean(0)
    # the second factor of theorem 3, from the mean absolute values of the normalised signal alone
    predicted = (1 - run.values["nu1_abs_squared_signal_norm"].mean(0) / 2) ** -0.5
    low, high = (0.15, 0.21) if run.cfg.kernel else (0.18, 0.23)
    notes.mark(f"{name}: slope of log chi", e["slope"], at_least=low, at_most=high)
    notes.mark(f"{name}: smallest ReLU part (theorem 3: 1)", phi.min(), at_least=0.99, at_most=SQRT2)
    notes.mark(f"{name}: largest ReLU part (theorem 3: sqrt 2)", phi.max(), at_least=0.99, at_most=SQRT2)
    difference = (phi - predicted).mean()
    notes.mark(f"{name}: ReLU part minus that of theorem 3", difference, at_least=-0.01, at_most=0.01)
    if run.cfg.kernel:
        notes.mark(f"{name}: mu_4(z) at L, fat tails", curves["mu4_z"][:, -1].mean(), at_least=6)
    else:
        notes.mark(f"{name}: R^2 of exponential", e["slope_r2"], at_least=0.999, at_most=1)
        notes.mark(f"{name}: detected exploding", EXPLODING in verdict.names, at_least=1)


def resnet(name: str, run: Run, verdict: Verdict, notes: Notebook) -> None:
    """Theorem 4, and the power law."""
    e, tau = verdict.evidence, predict_power_law(run).tau
    low, mean, high = dilution_bounds(run)
    notes.mark(f"{name}: R^2 of power law", e["exponent_r2"], at_least=0.99, at_most=1)
    gain = e["exponent_r2"] - e["exponent_r2_against_l"]
    notes.mark(f"{name}: R^2 of power law minus exponential", gain, at_least=0, at_most=1)
    notes.mark(f"{name}: exponent minus tau", e["exponent"] - tau, at_least=-0.15, at_most=0.15)
    notes.mark(f"{name}: r_eff(L)", e["rank"], at_least=4)
    # both bounds hold up to small relative errors: a percent of the increment
    notes.mark(f"{name}: increment over lower bound of theorem 4, smallest", (mean / low).min(), at_least=0.99)
    notes.mark(
        f"{name}: increment over upper bound of theorem 4, largest", (mean / high).max(), at_least=0, at_most=1.01
    )
    if not run.cfg.kernel:
        notes.mark(f"{name}: detected well behaved", WELL_BEHAVED in verdict.names, at_least=1)


def figures(cfg: FiguresConfig, notes: Notebook) -> None:
    """The published experiments, figures 2 to 5, beside the published arrays."""
    kind = f"{cfg.kernel} x {cfg.kernel} convolutions, {cfg.padding} borders" if cfg.kernel else "fully connected"
    notes.say(f"Published experiments, {kind}, width {WIDTH}, batch {cfg.batch}. {EXPLANATION}")
    notes.say(f"{cfg.networks} networks (paper: 1,000; FC 200), figure 2: {PUBLISHED_HISTOGRAM_NETWORKS} (10,000).")
    if cfg.images is not None:
        source = image_source(load_images(cfg.images), flat=not cfg.kernel)
    else:
        source = fields(3, 32) if cfg.kernel else gaussian(3072)
    runs, deviations = {}, []
    for number, name in FIGURES.items():
        net = published_network(cfg, number)
        count = PUBLISHED_HISTOGRAM_NETWORKS if number == 2 else cfg.networks
        found = networks(name, net, source, count, cfg.seed, notes, device=cfg.device)
        reference = published(cfg, number, net)
        if reference:
            deviations += _agreement(cfg, number, found, reference, notes)
        if number == 2:
            _histogram_figure(f"figure {number}: {name}", found, reference, notes)
        else:
            runs[name] = found
            _depth_figure(f"figure {number}: {name}", found, reference, notes)
    _tables(runs, notes)
    if deviations:
        header = ("against the published arrays", "largest deviation", "at l", "measured", "published", "/ allowed")
        notes.table("agreement", dict.fromkeys(header, ".4g"), deviations)
    if cfg.reference is not None:
        _published_marks(Path(cfg.reference), notes)


def networks(
    name: str, net: NetConfig, source: Source, count: int, seed: int, notes: Notebook, *, device: str = "cpu"
) -> Run:
    """The moments of a number of networks; chunks of them are kept in `networks` of the study's directory."""
    folder = None if notes.out is None else notes.out / "networks"
    with Progress(name, count) as progress:
        options: dict[str, Any] = {"device": str(torch_device(device)), "folder": folder, "progress": progress.update}
        return run_networks(net, source, realisations=count, seed=seed, **options)


def published_network(cfg: FiguresConfig, figure: int) -> NetConfig:
    """The network of a figure; 100 records of a curve, 4 of a histogram."""
    depth = RESIDUALS if figure == 5 else DEPTH
    return NetConfig(
        norm="batch" if figure > 3 else "none",
        residual=2 if figure == 5 else 0,
        kernel=cfg.kernel,
        width=HISTOGRAM_WIDTH if figure == 2 else WIDTH,
        depth=depth,
        batch=HISTOGRAM_BATCH if figure == 2 else cfg.batch,
        every=max(1, depth // (4 if figure == 2 else 100)),
        padding=cfg.padding,
    )


def published(cfg: FiguresConfig, figure: int, net: NetConfig) -> Published:
    """Read the arrays of a figure from the folder of the published ones."""
    kind = "conv" if cfg.kernel else "fc"
    name = {2: "vanilla_histo", 3: "vanilla", 4: "bn_ff", 5: "bn_res"}[figure] + f"_{kind}"
    if figure == 2:
        name += f"_w{HISTOGRAM_WIDTH}"
    elif cfg.batch != 64 and (cfg.kernel or figure != 4):
        return {}
    elif not cfg.kernel:
        name += f"_b{cfg.batch}" * (figure == 4)
    # without skip connections the shift of the paper's code changes nothing
    elif cfg.padding != "shifted" and (cfg.padding != "periodic" or figure == 5):
        name += f"_{cfg.padding}pad"
    if cfg.reference is None or not (file := Path(cfg.reference) / f"{name}.npz").exists():
        return {}
    arrays = read_arrays(file)
    common = np.isin(arrays["depth"], net.records)
    cut = {key: v[..., common] if v.shape[-1:] == common.shape else v for key, v in arrays.items()}
    return {"name": name, **cut} if common.any() else {}


def _agreement(
    cfg: FiguresConfig, figure: int, run: Run, reference: Published, notes: Notebook
) -> list[tuple[Any, ...]]:
    """Marks of one figure: deviations over what scatter and rounding of the reference allow; a row for each."""
    name, depth = reference["name"], reference["depth"]
    rows: list[tuple[Any, ...]] = []
    scatter = 4 * math.sqrt(1 / run.realisations + 1 / float(reference["n_real"]))
    curves = {key: values[:, np.isin(run.depth, depth)] for key, values in run.curves().items()}

    def compare(key: str, measured: Array, expected: Array, allowed: Array) -> None:
        ratio = np.abs(measured - expected) / allowed
        i = int(np.nanargmax(ratio))
        rows.append((f"{name}: {key}", abs(measured[i] - expected[i]), depth[i], measured[i], expected[i], ratio[i]))
        mark = f"{name}: {key}, largest deviation over the allowed"
        notes.mark(mark, float(ratio.max()), at_least=0, at_most=1)

    if cfg.images is not None and figure == 2:
        for key in ("lognu2", "logmu2_noise"):
            mean, std = reference[f"{key}_mean"], reference[f"{key}_std"]
            compare(f"mean {key}", curves[key].mean(0), mean, std * scatter)
            # fat tails scatter more than a normal's std / sqrt(2 n)
            fat = np.sqrt((reference[f"{key}_kurt"] + 2) / 4)
            compare(f"std {key}", curves[key].std(0), std, std * fat * scatter)
    elif cfg.images is not None:
        for key in (key for key in COMPARED if f"{key}_mean" in reference and key in curves):
            mean, std = reference[f"{key}_mean"], reference[f"{key}_std"]
            allowed = std * scatter + RELATIVE.get(key, 0.005) * np.abs(mean) + 0.02 * (key == "logchi")
            compare(key, curves[key].mean(0), mean, allowed)
    # slope and exponent need the whole depth
    if figure == 4 and depth[-1] > 150:
        late = depth > 100
        log_chis = curves["logchi"].mean(0), reference["logchi_mean"]
        measured, expected = (fit_line(depth[late], log_chi[late]).slope for log_chi in log_chis)
        mark = f"{name}: slope of log chi, l > 100"
        notes.mark(mark, measured, at_least=expected - 0.004, at_most=expected + 0.004)
    if figure == 5 and depth[-1] == 500:
        tau = _published_law(reference).tau
        notes.mark(f"{name}: tau", predict_power_law(run).tau, at_least=tau - 0.02, at_most=tau + 0.02)
    return rows


def _published_law(arrays: Published) -> Any:
    units = int(arrays["units_per_residual"])
    return fit_power_law(arrays["depth"], arrays["chi_mean"], arrays["inc_ratio_of_means"], units)


def _published_marks(folder: Path, notes: Notebook) -> None:
    """Marks of the published arrays alone: the ReLU part of theorem 3, and the published fit of figure 5."""
    for file in sorted(folder.glob("bn_ff_*.npz")):
        arrays = read_arrays(file)
        distance = np.abs((1 - arrays["nu1abs_z_mean"] ** 2 / 2) ** -0.5 - arrays["inc_phi_mean"]).max()
        notes.mark(f"{file.stem}: ReLU part against theorem 3, largest distance", distance, at_least=0, at_most=0.006)
    if (file := folder / "bn_res_conv.npz").exists():
        law = _published_law(read_arrays(file))
        notes.mark("bn_res_conv: tau of the published arrays", law.tau, at_least=0.548, at_most=0.550)
        notes.mark("bn_res_conv: C of the published arrays", law.c, at_least=1.1037, at_most=1.1057)


def load_images(folder: str) -> Tensor:
    """All images of a folder with a sub-folder per class, (count, 3, H, W) uint8."""
    source = FolderSource(folder)
    pixels = [np.asarray(source.image(i)).transpose(2, 0, 1) for i in range(len(source))]
    if len({p.shape for p in pixels}) > 1:
        raise ValueError(f"images of {folder} have different sizes: bring them to one")
    return torch.from_numpy(np.stack(pixels))


def _tables(runs: Mapping[str, Run], notes: Notebook) -> None:
    """The averages over networks at four depths, the fits, and the verdicts."""
    columns = {"": "", "l": ".0f", "log chi": ".3f", "increment": ".4f", "BN part": ".4f", "other part": ".4f"}
    columns |= {"r_eff(x)": ".2f", "r_eff(dx)": ".2f", "mu_4(z)": ".2f", "log nu_2(x)": ".2f", "networks": ".0f"}
    keys = ("logchi", "inc", "inc_bn", "inc_phi", "reff_signal", "reff_noise", "mu4_z", "lognu2")
    rows: list[Sequence[Any]] = []
    fits: list[Sequence[Any]] = []
    for name, run in runs.items():
        mean = {key: values.mean(0) for key, values in run.curves().items()}
        # networks without BatchNorm have no parts and no normalised signal
        left_out = () if "inc_bn" in mean else ("inc_bn", "inc_phi", "mu4_z")
        for i in sorted({0, len(run.depth) // 4, len(run.depth) // 2, len(run.depth) - 1}):
            values = [None if key in left_out else mean[key][i] for key in keys]
            rows.append((name, run.depth[i], *values, run.realisations))
        verdict = detect(run.depth, run.curves())
        e, tau = verdict.evidence, predict_power_law(run).tau if run.cfg.residual else None
        fits.append((name, e["slope"], e["slope_r2"], e["exponent"], e["exponent_r2"], tau, e["rank"], str(verdict)))
    notes.table("averages over networks", columns, rows)
    header = {"fits of log chi": "", "slope": ".4f", "R^2": ".5f", "exponent": ".3f", "R^2 ": ".5f", "tau": ".3f"}
    title = "exponential fit on l > L/4, power law on all l, verdict"
    notes.table(title, {**header, "r_eff(L)": ".2f", "verdict": ""}, fits)


def _histogram_figure(title: str, run: Run, reference: Published, notes: Notebook) -> None:
    """Figure 2: as depth grows, the log second moments of signal and noise spread over networks."""
    figure, axes = new_figure(11, 3.6, columns=2)
    names = {"lognu2": r"$\log\,\nu_2(x^l)$", "logmu2_noise": r"$\log\,\mu_2(dx^l)$"}
    for ax, (key, name) in zip(axes, names.items(), strict=True):
        # not every depth of the run is one of the published ones
        means = dict(zip(reference["depth"], reference[f"{key}_mean"], strict=True)) if reference else {}
        for colour, depth, values in zip(SERIES, run.depth, run.curves()[key].T, strict=False):
            values = values[np.isfinite(values)]
            ax.hist(values, bins=min(50, 10 + len(values) // 20), density=True, color=colour, alpha=0.3)
            x = np.linspace(values.min(), values.max(), 200)
            ax.plot(x, stats.norm(values.mean(), values.std()).pdf(x), color=colour, label=f"l = {depth:.0f}")
            if depth in means:
                ax.axvline(means[depth], color=colour, lw=1, ls="--")
        ax.set(title=name, xlabel="log moment", ylabel="density")
    notes.figure(title, "Over networks. Lines: normal distributions. Dashed: published means.", figure)


def _depth_figure(title: str, run: Run, reference: Published, notes: Notebook) -> None:
    """Figure 3, 4 or 5: averages over networks, and for figure 5 the power law that the increments predict."""
    curves = summarise(run.curves())
    panels: dict[str, dict[str, str]] = {
        "increments of the sensitivity": {"inc": r"$\delta\chi$", "inc_bn": "BN part", "inc_phi": "other part"},
        "effective rank": {"reff_signal": "signal", "reff_noise": "noise"},
        r"$\log\chi^l$": {"logchi": r"$\log\chi$"},
        r"$\mu_4$ of the normalised signal": {"mu4_z": r"$\mu_4(z)$"},
    }
    figure, axes = new_figure(11, 6.7, rows=2, columns=2)
    for ax, (name, keys) in zip(axes, panels.items(), strict=True):
        for colour, (key, label) in zip(SERIES, keys.items(), strict=False):
            if f"{key}_mean" in curves and not (key == "mu4_z" and run.cfg.norm == "none"):
                curve(ax, run.depth, curves, key, colour, label, reference)
        ax.set(title=name, xlabel="l", yscale="log" if "rank" in name or "mu_4" in name else "linear")
    for bound in (1, SQRT2):
        axes[0].axhline(bound, color=GREY, lw=1, ls=":")
    if run.cfg.residual:
        law = predict_power_law(run)
        predicted = np.log(law.c) + law.tau * np.log(run.depth)
        axes[2].plot(run.depth, predicted, ":", color=SERIES[1], label=f"{law.c:.2f} l^{law.tau:.3f}")
        axes[2].set(xscale="log")
    notes.figure(title, "Means over networks; bands: 16th to 84th percentile. Dashed: the published mean.", figure)


def curve(
    ax: Axes,
    depth: Array,
    curves: Mapping[str, Array],
    key: str,
    colour: str,
    label: str,
    reference: Published | None = None,
) -> None:
    """A mean with its band, and the published mean."""
    ax.fill_between(depth, curves[f"{key}_p16"], curves[f"{key}_p84"], color=colour, alpha=0.2, lw=0)
    ax.plot(depth, curves[f"{key}_mean"], color=colour, label=label)
    if reference and f"{key}_mean" in reference:
        ax.plot(reference["depth"], reference[f"{key}_mean"], color=INK, lw=1, ls="--")
