"""Isometry: what orthogonal and Gaussian weights do to the candidates of a search space (DI-NAS, section 3).

phi is the mean and varphi the variance of the squared singular values of a Jacobian; an isometry has 1 and 0. Claimed:

    orthogonal weights make every candidate a dynamical isometry, phi ~ 1 and varphi ~ 0, and nearer to it than
    Gaussian ones; so candidates of a layer transmit signals equally, and differences do not add up with depth

The theory is of fully connected tanh layers; the blocks have depthwise convolutions, BatchNorm and ReLU6. The closed
forms that must hold (`closed_forms`) are pass marks; sentences of the paper stand beside what was measured.
docs/initialisation.md has the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.colors import TwoSlopeNorm
from torch import Tensor, nn

from nasfast.measure.timing import random_batch
from nasfast.ops.modules import ConvBNAct
from nasfast.report.plots import GREY, SERIES, new_figure
from nasfast.report.style import INK
from nasfast.research.analysis.fairness import SPREADS, channel_moments, depth_spread, fairness, without_block_indicator
from nasfast.research.analysis.jacobian import Isometry, apply, frozen_copy, isometry
from nasfast.research.analysis.meanfield import phase_diagram
from nasfast.research.studies.closed_forms import block_marks, convolution_marks, relative_gain, select_branch
from nasfast.research.studies.commands import SpaceConfig
from nasfast.research.studies.moments_paths import reduced_space
from nasfast.research.studies.notebook import Notebook
from nasfast.runtime.progress import Progress
from nasfast.supernet import Init, Supernet

# Samples of a batch, which give BatchNorms their statistics, and Jacobians that are averaged per candidate.
BATCH, SAMPLES = 64, 4
# A larger Jacobian is not formed, but probed with this many random vectors, and its density by so many Lanczos steps.
MAX_EXACT, PROBES, LANCZOS_STEPS = 2**16, 32, 8
# Random paths that are compared by depth; few images are enough, as variances are over channels and positions.
PATHS, DEPTH_IMAGES = 64, 16
EDGES = np.linspace(0, 5, 51)
"""Bins of the histograms of singular values."""
# A spread is clearly smaller by a fifth, as it varies by a tenth between seeds; below ROUNDING nothing is compared.
# NEAR is the largest deviation that counts as "~ 1" or "~ 0", and NEARLY_ALL the share that counts as all.
CLEARLY, ROUNDING, NEAR, NEARLY_ALL = 0.8, 1e-4, 0.1, 0.95


@dataclass(frozen=True)
class Row:
    """One candidate of one layer.

    Attributes:
        branch: isometry without the skip connection or the bypassing half; this is what is judged.
        module: isometry with it; None where both are the same.
        var_in, var_out: variance of the branch's input and output, averaged over channels.
        acts: activations in the branch.
        histogram: share of the branch's singular values in every bin of EDGES.
    """

    layer: int
    name: str
    branch: Isometry
    module: Isometry | None
    var_in: float
    var_out: float
    acts: int
    histogram: np.ndarray

    @property
    def gain(self) -> float:
        """phi Var(in) / Var(out): how much faster small differences grow than the signal; 1 for a linear branch."""
        return self.branch.phi * self.var_in / self.var_out if self.var_out > 0 else math.nan


@dataclass
class Measured:
    """What one setting of weights and activation measured.

    Attributes:
        rows: the candidates.
        spreads: with and without block indicators -> of every layer, the SPREADS over its candidates.
        depth: with and without block indicators -> `depth_spread` over random paths.
        convolutions: kind -> count, phi / g^2, varphi / g^4, and the closed form of this, None where there is none.
    """

    rows: list[Row]
    spreads: dict[bool, list[dict[str, float | None]]]
    depth: dict[bool, dict[str, list[float]]]
    convolutions: dict[str, tuple[int, float, float, float | None]]

    def mean_spread(self, spread: str, indicator: bool) -> float:
        """Mean over layers; nan where no layer has a value."""
        values = [value for layer in self.spreads[indicator] if (value := layer[spread]) is not None]
        return float(np.mean(values)) if values else math.nan


def study(cfg: SpaceConfig, notes: Notebook) -> None:
    """Every candidate of a space under orthogonal and Gaussian weights, on white noise."""
    space = reduced_space(cfg.space)
    act = space.activation
    notes.say(
        f"Isometry of the candidates of {space.name}, {len(space)} layers, {space.resolution} pixels, white noise."
    )
    notes.say(
        "phi is the mean and varphi the variance of the squared singular values of a Jacobian; an isometry has 1 and "
        "0. The branch is the candidate without skip connection or bypass. Gain: phi Var(in) / Var(out), how much "
        "faster small differences grow than the signal."
    )
    images = random_batch(space, BATCH, seed=cfg.seed)[0].contiguous()
    block_marks(act, notes, seed=cfg.seed)
    found: dict[str, Measured] = {}
    # the setting of the theory first, then that of the space, then the baseline
    settings: list[tuple[Init, str]] = [("orthogonal", "tanh"), ("orthogonal", act), ("gaussian", act)]
    for init, sigma in settings:
        name = f"{init}, {sigma}"
        net = Supernet(space, init=init, activation=sigma, layer_indicators=False, fused=False, seed=cfg.seed)
        rows, spreads = measure_supernet(net, name, seed=cfg.seed)
        depth = {
            indicator: depth_spread(net, images[:DEPTH_IMAGES], paths=PATHS, block_indicator=indicator, seed=cfg.seed)
            for indicator in (True, False)
        }
        convolutions = convolution_marks(net, name, init, notes) if sigma == act else {}
        found[name] = Measured(rows, spreads, depth, convolutions)
    _tables(found, notes)
    _claims(act, found, notes)
    _branch_figure(found, notes)
    _density_figure(found, notes)
    _spread_figures(found, notes)
    _diagram(notes)


# --- candidates ---------------------------------------------------------------------------------------------------


def measure_supernet(
    net: Supernet, name: str, *, seed: int = 0
) -> tuple[list[Row], dict[bool, list[dict[str, float | None]]]]:
    """Every candidate of every layer on white noise, and the spreads over the candidates; see `Measured`.

    `net` has plain modules (`fused=False`) and is not changed; `name` is that of the progress.
    """
    rows: list[Row] = []
    spreads: dict[bool, list[dict[str, float | None]]] = {True: [], False: []}
    # the signs of the probes begin from the same seed; a stream of its own would change the published figures
    generator = torch.Generator().manual_seed(seed)
    with Progress(name, len(net.layers)) as progress:
        for index, choice in enumerate(net.layers):
            layer = choice.layer
            h = torch.randn(BATCH, layer.in_channels, layer.size, layer.size, generator=generator)
            blocks = {layer.label(c): m for c, m in enumerate(choice.candidates) if not isinstance(m, nn.Identity)}
            own = [_measure(block, h, index, label, seed) for label, block in blocks.items()]
            rows += own
            for indicator in (True, False) if len(blocks) > 1 else ():
                candidates = [b if indicator else without_block_indicator(b) for b in blocks.values()]
                # the Jacobians were measured with the BatchNorms
                phi = [row.branch.phi for row in own] if indicator else None
                spreads[indicator].append(fairness(candidates, h, phi=phi))
            progress.update(index + 1)
    return rows, spreads


def _measure(block: nn.Module, h: Tensor, layer: int, name: str, seed: int) -> Row:
    """Measure a candidate: its branch, and the whole of it where there is more."""
    branch, part = select_branch(block)
    x = part(h)
    effort: dict[str, Any] = {"samples": SAMPLES, "probes": PROBES, "max_exact": MAX_EXACT, "seed": seed}
    found = isometry(branch, x, lanczos_steps=LANCZOS_STEPS, **effort)
    with torch.no_grad():
        y = apply(frozen_copy(branch, x), x)
    # of the whole no density is computed, because it takes most of the time
    whole = None if branch is block else isometry(block, h, lanczos_steps=0, **effort)
    acts = sum(isinstance(m, ConvBNAct) and m.act_name != "identity" for m in branch.modules())
    var_in, var_out = (channel_moments(v)[1] for v in (x, y))
    return Row(layer, name, found, whole, var_in, var_out, acts, found.histogram(EDGES))


# --- the paper's sentences beside the numbers ---------------------------------------------------------------------


def _claims(act: str, found: Mapping[str, Measured], notes: Notebook) -> None:
    """Every verdict follows from the numbers by the thresholds at the top; the last text is what a closed form says."""
    tanh, orthogonal, gaussian = found["orthogonal, tanh"], found[f"orthogonal, {act}"], found[f"gaussian, {act}"]
    pairs = [(a.branch.varphi, b.branch.varphi) for a, b in zip(orthogonal.rows, gaussian.rows, strict=True)]
    ratio = float(np.median([a / b for a, b in pairs if b > 0]))  # the estimate of a varphi of 0 may be negative
    smaller, middle = sum(a < b for a, b in pairs), float(np.median([a for a, _ in pairs]))
    gains = [(row.gain, row.acts) for row in orthogonal.rows if math.isfinite(row.gain)]
    gain, r = float(np.median([value for value, _ in gains])), relative_gain(act)
    low, center, high = np.quantile([value / r**acts for value, acts in gains], (0.05, 0.5, 0.95))
    over_r = f"over r^(activations), r = {r:.3f}: {center:.2f} ({low:.2f} to {high:.2f})"

    def isometric(phi: float, varphi: float) -> bool:
        return abs(phi - 1) <= NEAR and abs(varphi) <= NEAR

    def medians(measured: Measured) -> tuple[str, bool]:
        phi, varphi = np.median([(row.branch.phi, row.branch.varphi) for row in measured.rows], axis=0)
        return f"phi {phi:.2f}, varphi {varphi:.2f}", isometric(phi, varphi)

    def spread(name: str, indicator: bool) -> tuple[str, bool]:
        a, b = (measured.mean_spread(name, indicator) for measured in (orthogonal, gaussian))
        return f"{a:.4f} against {b:.4f}", bool(a < CLEARLY * b and b > ROUNDING)

    kinds = {
        name: (f"{phi:.3f}, {varphi:.2f}", isometric(phi, varphi))
        for name, (_, phi, varphi, _) in orthogonal.convolutions.items()
    }
    same = {
        f"{name} {_with(i)}": spread(name, i)
        for name, i in (("f_var", False), ("f_iso", False), ("f_iso", True), ("f_phi", True), ("distortion", True))
    }
    nearer = {
        "everywhere": (f"smaller in {smaller} of {len(pairs)}", smaller > NEARLY_ALL * len(pairs)),
        "clearly": (f"median ratio {ratio:.2f}", ratio < CLEARLY),
        "near 0": (f"median {middle:.2f}", abs(middle) <= NEAR),
    }
    variances = {f"f_var {_with(i)}": spread("f_var", i) for i in (True, False)}
    sentences: list[tuple[str, dict[str, tuple[str, bool]], str]] = [
        ("orthogonal convolutions are isometries: phi / g^2 = 1, varphi / g^4 = 0", kinds,
         "an expansion by t has varphi t - 1, and a depthwise filter 0 only with a single live tap"),
        ("orthogonal candidates are isometries (medians of branches)",
         {"tanh": medians(tanh), act: medians(orthogonal)}, "it assumes tanh and has no BatchNorm"),
        ("the theory without BatchNorm carries over: differences grow as the signal does",
         {"gain": (f"{gain:.2f}; {over_r}", abs(gain - 1) <= NEAR)}, "BatchNorm makes the gain r^(activations)"),
        ("orthogonal weights are nearer to isometry than Gaussian ones (varphi of branches)",
         nearer, ""),
        ("orthogonal candidates of a layer transmit signals equally, Gaussian ones do not",
         same, ""),
        ("equal variances come from the orthogonal weights", variances, "a BatchNorm at the end makes them equal"),
        ("with orthogonal weights differences between paths do not add up with depth, with Gaussian ones they do",
         {_with(i): _adds_up(orthogonal, gaussian, i) for i in (True, False)}, ""),
    ]  # fmt: skip
    for sentence, evidence, why in sentences:
        held = [name for name, (_, holds) in evidence.items() if holds]
        verdict = "holds" if len(held) == len(evidence) else f"in part: {', '.join(held)}" if held else "does not hold"
        measured = "; ".join(f"{name} {words}" for name, (words, _) in evidence.items())
        theory = f" Theory: {why}." if why and verdict != "holds" else ""
        notes.say(f"Claim: {sentence}. Verdict: {verdict}. Measured: {measured}.{theory}")


def _with(indicator: bool) -> str:
    return f"{'with' if indicator else 'without'} indicator BN"


def _adds_up(orthogonal: Measured, gaussian: Measured, indicator: bool) -> tuple[str, bool]:
    """Std of log Var(h) over paths, last quarter of the layers over first, beside what adding up gives (root of l).

    Layers without any spread are left out, because a BatchNorm at the end of a reduction sets it to 0 at any depth.
    """
    words, adds_up = [], []
    for measured in (orthogonal, gaussian):
        std = np.array(measured.depth[indicator]["std"])
        layers = np.flatnonzero(std > ROUNDING)
        growth = root = 1.0
        if len(layers) > 1:
            quarter = max(1, len(layers) // 4)
            first, last = layers[:quarter], layers[-quarter:]
            root = np.sqrt(last + 1).mean() / np.sqrt(first + 1).mean()
            growth = std[last].mean() / std[first].mean()
        words.append(f"{std.mean():.4f}, growing by {growth:.2f} ({root:.2f} if differences add up)")
        # 64 paths give the std of one layer to a tenth
        adds_up.append(bool(growth >= max(1 / CLEARLY, CLEARLY * root)))
    return " against ".join(words), adds_up == [False, True]


# --- tables and figures -------------------------------------------------------------------------------------------


def _tables(found: Mapping[str, Measured], notes: Notebook) -> None:
    columns = {"phi": ".3f", "varphi": ".3f", "gain": ".3f"}
    medians, branches, convolutions, fair, depth = [], [], [], [], []
    for setting, measured in found.items():
        values = [(row.branch.phi, row.branch.varphi, row.gain) for row in measured.rows]
        medians.append((setting, *np.nanmedian(values, axis=0)))
        for row in measured.rows:
            b, whole = row.branch, row.module or row.branch
            place = f"{row.layer} {row.name}"
            errors = b.phi_error, b.varphi_error
            branches.append((place, setting, b.phi, b.varphi, *errors, row.gain, whole.phi, whole.varphi))
        convolutions += [(setting, kind, *values) for kind, values in measured.convolutions.items()]
        for indicator in (True, False):
            fair.append((setting, _with(indicator), *(measured.mean_spread(spread, indicator) for spread in SPREADS)))
            std = measured.depth[indicator]["std"]
            layers = sorted({0, len(std) // 4, len(std) // 2, 3 * len(std) // 4, len(std) - 1})
            depth.append((setting, _with(indicator), *(std[i] for i in layers)))
    notes.table("medians over branches", {"": "", **columns}, medians)
    header = {"": "", "setting": "", "phi": ".3f", "varphi": ".3f", "±": ".3f", "± ": ".3f", "gain": ".3f"}
    title = "branches with standard errors, and whole modules"
    notes.table(title, {**header, "module phi": ".3f", "module varphi": ".3f"}, branches)
    title = "convolutions, each as one of stride 1 that wraps around at the border"
    header = {"": "", "kind": "", "count": "", "phi / g²": ".4f", "varphi / g⁴": ".4f", "closed form": ".4f"}
    notes.table(title, header, convolutions)
    header = {"": "", "indicator BN": "", **dict.fromkeys(SPREADS, ".4f")}
    notes.table("fairness, mean over layers (0 is fair)", header, fair)
    header = {"": "", "indicator BN": "", **{f"layer {i}": ".4f" for i in layers}}
    notes.table("std of log Var(h_l) over random paths", header, depth)


def _branch_figure(found: Mapping[str, Measured], notes: Notebook) -> None:
    """phi, varphi and the gain of every branch, by layer."""
    quantities: list[tuple[str, float, Callable[[Row], float]]] = [
        ("phi of the branch", 1, lambda row: row.branch.phi),
        ("varphi of the branch", 0, lambda row: row.branch.varphi),
        ("gain: phi Var(in) / Var(out)", 1, lambda row: row.gain),
    ]
    figure, axes = new_figure(11, 4.4, columns=3)
    for ax, (title, ideal, value) in zip(axes, quantities, strict=True):
        for colour, shift, (setting, measured) in zip(SERIES, (-0.22, 0, 0.22), found.items(), strict=False):
            x, y = np.array([(row.layer, value(row)) for row in measured.rows], dtype=float).T
            ax.plot(x + shift, y, "o", color=colour, ms=3, alpha=0.55)
            layers = np.unique(x)
            ax.plot(layers + shift, [np.nanmedian(y[x == at]) for at in layers], color=colour, label=setting)
        ax.axhline(ideal, color=GREY, lw=1, ls="--")
        ax.set(title=title, xlabel="layer", ylim=(0, None))
    notes.figure("candidates", "A dot is a candidate; lines join the medians of a layer. Dashed: isometry.", figure)


def _density_figure(found: Mapping[str, Measured], notes: Notebook) -> None:
    """Histograms of the singular values at six layers; the bin of singular values at 0 would hide the rest."""
    layers = sorted({row.layer for measured in found.values() for row in measured.rows})
    shown = [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, min(6, len(layers))).astype(int))]
    figure, axes = new_figure(11, 5, rows=2, columns=3)
    for ax, layer in zip(axes, shown, strict=False):
        top = 0.0
        for colour, (setting, measured) in zip(SERIES, found.items(), strict=False):
            mean = np.mean([row.histogram for row in measured.rows if row.layer == layer], axis=0)
            top = max(top, 1.15 * mean[1:].max())
            ax.stairs(mean, EDGES, color=colour, label=setting)
        ax.axvline(1, color=GREY, lw=1, ls="--")
        ax.set(title=f"layer {layer}", xlabel="singular value", ylim=(0, top or None))
    for ax in axes[len(shown) :]:
        ax.remove()
    notes.figure("singular values", "Share per bin of 0.1, pooled over the candidates of a layer.", figure)


def _spread_figures(found: Mapping[str, Measured], notes: Notebook) -> None:
    """Spreads over the candidates of a layer, and of log Var(h) over random paths, by layer."""
    figure, axes = new_figure(11, 6.7, rows=3, columns=2)
    shown = ("f_var", "f_iso", "distortion", "disagreement")
    for ax, key in zip(axes, (*shown, "std", "ratio"), strict=True):
        for colour, (setting, measured) in zip(SERIES, found.items(), strict=False):
            for indicator, ls in ((True, "-"), (False, ":")):
                values: Sequence[Any] = measured.depth[indicator].get(key, ())
                values = values if key not in shown else [layer[key] for layer in measured.spreads[indicator]]
                ax.plot(np.array(values, dtype=float), ls, color=colour, label=setting if indicator else None)
        title = {"std": "std of log Var(h) over paths", "ratio": "largest Var(h) over smallest"}.get(key, key)
        ax.set(title=title, xlabel="layer", ylim=(1 if key == "ratio" else 0, None))
    notes.figure("fairness", "0 is fair. Solid: with indicator BN; dotted: without it.", figure)


def _diagram(notes: Notebook) -> None:
    """Order and chaos in the mean field that the theory assumes."""
    sigma_w, sigma_b = np.linspace(0.5, 3, 51), np.linspace(0, 1, 26)
    _, chi, critical = phase_diagram("tanh", sigma_w, sigma_b)
    figure, (ax,) = new_figure(6.4, 4.1)
    ax.grid(False)
    norm = TwoSlopeNorm(1, 0, max(2.0, chi.max()))
    image = ax.pcolormesh(sigma_w, sigma_b, chi, cmap="RdBu_r", norm=norm, shading="nearest", rasterized=True)
    ax.plot(*critical.T, color=INK)
    ax.plot(1, 0, "o", color=INK, ms=7, clip_on=False)
    figure.colorbar(image, ax=ax, label="chi")
    ax.set(xlabel="sigma_w", ylabel="sigma_b")
    caption = (
        "chi of an infinitely wide tanh network without BatchNorm: below 1 signals merge and gradients vanish, above 1 "
        "they explode. The black line is chi = 1; the dot is the initialisation that the theory asks for."
    )
    notes.figure("mean field: order and chaos", caption, figure)
