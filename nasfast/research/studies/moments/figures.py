"""The figures of the moments study: the numbers of each, and how it is drawn from these in its file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nasfast.report.plots import GREY, SERIES, literal, new_figure
from nasfast.report.style import INK
from nasfast.research.analysis.moments.detect import power_law_of, summarise
from nasfast.research.analysis.moments.networks import Run
from nasfast.research.studies import parts
from nasfast.research.studies.moments.measure import NOT_PUBLISHED, Array, Paths, Published
from nasfast.research.studies.page import Form, drawing, legend, numbers

_BANDS = " Lines: means over networks; bands: 16th to 84th percentile. Dashed: the published mean."


def histograms(title: str, found: Run, reference: Published = NOT_PUBLISHED) -> parts.Figure:
    """Figure 2 of a run: `values` are (depths, networks) log moments by name."""
    curves = found.curves()
    values = {name: curves[name].T for name in ("lognu2", "logmu2_noise")}
    return parts.Figure("histograms", title, {"depth": found.depth, "values": values, "reference": reference})


def curves_of(title: str, found: Run, reference: Published = NOT_PUBLISHED) -> parts.Figure:
    """Figure 3, 4 or 5 of a run: averages over networks, and for figure 5 the power law that the increments predict."""
    data = {"curves": {"depth": found.depth, **summarise(found.curves())}, "reference": reference}
    if found.cfg.residual:
        return parts.Figure("resnet", title, {**data, "power_law": power_law_of(found)})
    return parts.Figure("vanilla" if found.cfg.norm == "none" else "normalised", title, data)


def along_paths(depth: Array, found: Mapping[str, Paths], reductions: Sequence[int]) -> parts.Figure:
    """Averages over random paths by depth, for every setting; `reductions` are depths."""
    settings = {
        name: {
            **summarise({key: paths.curves[key] for key in ("logchi", "reff_signal", "reff_noise")}),
            "paths_std": paths.curves["logchi"].std(0),
            "candidates_std": paths.spreads(),
        }
        for name, paths in found.items()
    }
    return space_curves("along random paths", depth, settings, [i + 1 for i in reductions])


def space_curves(
    title: str, depth: Array, settings: Mapping[str, Mapping[str, Array]], reductions: Sequence[int]
) -> parts.Figure:
    """Averages over paths or noise draws by depth, for every setting."""
    return parts.Figure("space", title, {"depth": depth, "settings": settings, "reductions": reductions})


@drawing(
    "histograms",
    "Distribution over networks of the log second moments of signal and noise. Lines: the normal distribution of "
    "the same mean and deviation. Dashed: published mean.",
)
def _histograms(data: Form) -> Figure:
    """Figure 2: as depth grows, both moments spread in log space."""
    figure, axes = new_figure(10, 3.8, columns=2)
    titles = {"lognu2": r"$\log\,\nu_2(x^l)$", "logmu2_noise": r"$\log\,\mu_2(dx^l)$"}
    for ax, (key, title) in zip(axes, titles.items(), strict=True):
        for i, (colour, depth) in enumerate(zip(SERIES, data["depth"], strict=False)):
            values = numbers(data["values"][key][i])
            values = values[np.isfinite(values)]
            mean, std = values.mean(), values.std()
            ax.hist(values, bins=min(50, 10 + len(values) // 20), density=True, color=colour, alpha=0.3)
            x = np.linspace(mean - 4 * std, mean + 4 * std, 200)
            density = np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
            ax.plot(x, density, color=colour, lw=1.4, label=f"l = {depth:.0f}: {mean:.2f} ± {std:.2f}")
            if data["reference"]:
                ax.axvline(data["reference"][f"{key}_mean"][i], color=colour, lw=1, ls="--")
        ax.set(title=title, xlabel="log moment", ylabel="density")
        ax.legend(fontsize=8, frameon=False)
    return figure


def _curve(ax: Axes, data: Form, key: str, colour: str, label: str | None = None) -> None:
    depth, curves = data["depth"] if "depth" in data else data["curves"]["depth"], data["curves"]
    mean, low, high = (numbers(curves[f"{key}_{part}"]) for part in ("mean", "p16", "p84"))
    ax.fill_between(depth, low, high, color=colour, alpha=0.2, lw=0)
    ax.plot(depth, mean, color=colour, lw=1.5, label=label)
    reference = data.get("reference")
    if reference and f"{key}_mean" in reference:
        ax.plot(reference["depth"], reference[f"{key}_mean"], color=INK, lw=1, ls="--")


@drawing(
    "vanilla",
    "Sensitivity increments between 1 and sqrt 2 (dotted), and the effective rank, which tends to 1." + _BANDS,
)
def _vanilla(data: Form) -> Figure:
    """Figure 3."""
    figure, (increments, ranks) = new_figure(10, 3.6, columns=2)
    _increments(increments, data, {"inc": r"$\delta\chi^l$"})
    _curve(ranks, data, "reff_signal", SERIES[0])
    ranks.axhline(1, color=GREY, lw=1, ls=":")
    ranks.set(title=r"$r_{\mathrm{eff}}(x^l)$", xlabel="l", yscale="log")
    return figure


def _increments(ax: Axes, data: Form, names: Mapping[str, str]) -> None:
    for colour, (key, label) in zip(SERIES, names.items(), strict=False):
        _curve(ax, data, key, colour, label)
    for bound in (1, math.sqrt(2)):
        ax.axhline(bound, color=GREY, lw=1, ls=":")
    ax.set(title="increments of the sensitivity", xlabel="l")
    ax.legend(fontsize=8, frameon=False)


@drawing(
    "normalised",
    "Increments of the sensitivity and their two parts, the sensitivity, effective ranks, and fourth moment and "
    "mean absolute value of the normalised signal (dotted: those of a Gaussian)." + _BANDS,
)
def _normalised(data: Form) -> Figure:
    """Figure 4."""
    figure, axes = new_figure(11, 6.4, rows=2, columns=2)
    names = {"inc": r"$\delta\chi$", "inc_bn": r"$\delta_{\mathrm{BN}}\chi$", "inc_phi": r"$\delta_\phi\chi$"}
    _increments(axes[0], data, names)
    _curve(axes[1], data, "logchi", SERIES[0])
    axes[1].set(title=r"$\log\chi^l$", xlabel="l")
    _ranks_and_tails(axes[2], axes[3], data)
    return figure


def _ranks_and_tails(ranks: Axes, tails: Axes, data: Form) -> None:
    _curve(ranks, data, "reff_signal", SERIES[0], "signal")
    _curve(ranks, data, "reff_noise", SERIES[1], "noise")
    ranks.set(title="effective rank", xlabel="l", yscale="log")
    ranks.legend(fontsize=8, frameon=False)
    _curve(tails, data, "mu4_z", SERIES[0], r"$\mu_4(z^l)$")
    tails.axhline(3, color=SERIES[0], lw=1, ls=":")
    tails.set(title="the normalised signal", xlabel="l", yscale="log", ylabel=r"$\mu_4$")
    # there is nothing to see below a Gaussian's 3
    tails.set_ylim(bottom=2, top=max(tails.get_ylim()[1], 20))
    other = tails.twinx()
    _curve(other, data, "nu1abs_z", SERIES[1], r"$\nu_1(|z^l|)$")
    other.axhline(math.sqrt(2 / math.pi), color=SERIES[1], lw=1, ls=":")
    other.set(ylim=(0, 1), ylabel=r"$\nu_1(|z|)$")
    handles = [*tails.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    tails.legend(handles=handles, fontsize=8, frameon=False, loc="center right")


@drawing(
    "resnet",
    "The same at the first unit of every residual; the sensitivity of the residuals with the power law predicted "
    "from the increments." + _BANDS,
)
def _resnet(data: Form) -> Figure:
    """Figure 5."""
    figure, axes = new_figure(11, 6.4, rows=2, columns=2)
    names = {"inc": r"$\delta\chi^{l,1}$", "inc_bn": r"$\delta_{\mathrm{BN}}\chi^{l,1}$"}
    _increments(axes[0], data, {**names, "inc_phi": r"$\delta_\phi\chi^{l,1}$", "inc_residual": r"$\delta\chi^l$"})
    depth = numbers(data["curves"]["depth"])
    for part, alpha in (("p16", 0.4), ("mean", 1.0), ("p84", 0.4)):
        axes[1].plot(depth, np.exp(numbers(data["curves"][f"logchi_{part}"])), color=SERIES[0], lw=1.5, alpha=alpha)
    law = data["power_law"]
    axes[1].plot(
        depth,
        law["c"] * depth ** law["tau"],
        color=SERIES[1],
        lw=1.5,
        ls=":",
        label=f"{law['c']:.2f} l^{law['tau']:.3f}",
    )
    if data["reference"]:
        axes[1].plot(data["reference"]["depth"], data["reference"]["chi_mean"], color=INK, lw=1, ls="--")
    axes[1].set(title=r"$\chi^l$", xlabel="l", xscale="log", yscale="log")
    axes[1].legend(fontsize=8, frameon=False)
    _ranks_and_tails(axes[2], axes[3], data)
    return figure


@drawing(
    "space",
    "Averages over random paths, or noise draws, by depth; bands: 16th to 84th percentile. Grey lines: reductions.",
)
def _space(data: Form) -> Figure:
    with_spread = all("paths_std" in curves for curves in data["settings"].values())
    figure, axes = new_figure(11, 6.4 if with_spread else 3.6, rows=1 + with_spread, columns=2)
    for colour, (name, curves) in zip(SERIES, data["settings"].items(), strict=False):
        setting = {"depth": data["depth"], "curves": curves}
        _curve(axes[0], setting, "logchi", colour, literal(name))
        _curve(axes[1], setting, "reff_signal", colour)
        if with_spread:
            axes[2].plot(data["depth"], curves["candidates_std"], color=colour, lw=1.4, marker="o", ms=2.5)
            axes[3].plot(data["depth"], curves["paths_std"], color=colour, lw=1.4, marker="o", ms=2.5)
    titles = (
        r"$\log\chi$",
        "effective rank of the signal",
        r"std of $\log\,\delta\chi$ over candidates",
        r"std of $\log\chi$ over paths",
    )
    for ax, title in zip(axes, titles, strict=False):
        for reduction in data["reductions"]:
            ax.axvline(reduction, color=GREY, lw=0.8, alpha=0.5)
        ax.set(title=title, xlabel="layer" if with_spread else "probe")
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes[1].set_yscale("log")
    for ax in axes[2:]:
        ax.set_ylim(bottom=0)
    legend(figure, axes[0].get_legend_handles_labels()[0], columns=4)
    return figure
