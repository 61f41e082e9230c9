"""The figures of the moments study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from scipy import stats

from nasfast.research.analysis.moments.detect import predict_power_law, summarise
from nasfast.research.analysis.moments.networks import Array, Run
from nasfast.research.studies.draw import GREY, INK, SERIES, Figure, level
from nasfast.research.studies.moments.marks import SQRT2, Published

_BANDS = " Lines: means over networks; bands: 16th to 84th percentile. Dashed: the published mean."


def histograms(title: str, run: Run, reference: Published) -> Figure:
    """Figure 2: as depth grows, the log second moments of signal and noise spread over networks."""
    caption = (
        "Distribution over networks of the log second moments of signal and noise. Lines: the normal distribution of "
        "the same mean and deviation. Dashed: published mean."
    )
    figure = Figure(title, caption, 2, legend=False)
    names = {"lognu2": r"$\log\,\nu_2(x^l)$", "logmu2_noise": r"$\log\,\mu_2(dx^l)$"}
    for ax, (key, name) in zip(figure.axes, names.items(), strict=True):
        # not every depth of the run is one of the published ones
        published = dict(zip(reference["depth"], reference[f"{key}_mean"], strict=True)) if reference else {}
        for i, (colour, depth) in enumerate(zip(SERIES, run.depth, strict=False)):
            values = run.curves()[key].T[i]
            values = values[np.isfinite(values)]
            ax.hist(values, bins=min(50, 10 + len(values) // 20), density=True, color=colour, alpha=0.3)
            normal = stats.norm(values.mean(), values.std())
            x = np.linspace(values.min(), values.max(), 200)
            label = f"l = {depth:.0f}: {values.mean():.2f} ± {values.std():.2f}"
            ax.plot(x, normal.pdf(x), color=colour, label=label)
            if depth in published:
                ax.axvline(published[depth], color=colour, lw=1, ls="--")
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


def depth_curves(title: str, run: Run, reference: Published) -> Figure:
    """Figure 3, 4 or 5: averages over networks, and for figure 5 the power law that the increments predict."""
    depth, curves, vanilla = run.depth, summarise(run.curves()), run.cfg.norm == "none"
    caption = (
        "Sensitivity increments between 1 and sqrt 2 (dotted), and the effective rank, which tends to 1."
        if vanilla
        else "Increments of the sensitivity (of a resnet: of the first unit of every residual) and their two parts, "
        "the sensitivity (of a resnet with the power law predicted from the increments), effective ranks, and fourth "
        "moment and mean absolute value of the normalised signal (dotted: those of a Gaussian)."
    ) + _BANDS
    figure = Figure(title, caption, 2 if vanilla else 4, legend=False)
    increments, rank = figure.axes[0], figure.axes[1 if vanilla else 2]

    def draw(ax: Axes, names: Mapping[str, str]) -> None:
        for colour, (key, label) in zip(SERIES, names.items(), strict=False):
            _curve(ax, depth, curves, key, colour, label, reference)

    names = {"inc": r"$\delta\chi$", "inc_bn": r"$\delta_{\mathrm{BN}}\chi$", "inc_phi": r"$\delta_\phi\chi$"}
    names |= {"inc_residual": r"$\delta\chi^l$"}
    draw(increments, {key: label for key, label in names.items() if f"{key}_mean" in curves})
    for bound in (1, SQRT2):
        level(increments, bound)
    increments.set(title="increments of the sensitivity", xlabel="l")
    draw(rank, {"reff_signal": "signal"} | ({} if vanilla else {"reff_noise": "noise"}))
    rank.set(title="effective rank", xlabel="l", yscale="log")
    if vanilla:
        level(rank, 1)
        return figure
    chi, tails = figure.axes[1], figure.axes[3]
    chi.set(title=r"$\log\chi^l$", xlabel="l")
    if not run.cfg.residual:
        draw(chi, {"logchi": ""})
    else:
        law = predict_power_law(run)
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
