"""Moments of search spaces: signal and noise along random paths, and in every candidate (A. Labatie, ICML 2019).

Asked, of untrained supernets with orthogonal and Gaussian weights, with tanh and with the space's activation: how much
signal is lost with depth, whether a skip connection dilutes the growth within a stage as theorem 4 says, and whether
the candidates of a layer and the paths through a space stay comparable. docs/moments.md has the answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nasfast.report.plots import GREY, SERIES, new_figure
from nasfast.research.analysis.moments.detect import detect, summarise
from nasfast.research.analysis.moments.module import hold_statistics, measure_place, push, sensitivity
from nasfast.research.analysis.moments.networks import Array, fields, standardise
from nasfast.research.studies.commands import SpaceConfig
from nasfast.research.studies.moments import EXPLANATION, curve
from nasfast.research.studies.notebook import Notebook
from nasfast.runtime.progress import Progress
from nasfast.spaces import SearchSpace, UniformSampler, get_space
from nasfast.supernet import Supernet

RESOLUTION, BATCH = 64, 32
PATHS, CANDIDATE_PATHS = 16, 4
"""Random paths, and those of them along which every candidate of every layer is measured."""


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
        layers = [np.array([v for (i, _), v in self.increments.items() if i == layer]) for layer in range(self.layers)]
        return np.array([values.std(0).mean() for values in layers])


def paths(cfg: SpaceConfig, notes: Notebook) -> None:
    """Random paths through a space."""
    space = reduced_space(cfg.space)
    size = (space.in_channels, space.resolution)
    x = standardise(fields(*size)(BATCH, torch.Generator().manual_seed(cfg.seed)))
    notes.say(
        f"Moments along {PATHS} random paths of {space.name}, {len(space)} layers, and of all candidates along "
        f"{CANDIDATE_PATHS} of them; 1/f fields of {space.resolution} x {space.resolution}, batch {BATCH}."
    )
    notes.say(EXPLANATION)
    settings: dict[str, Paths] = {}
    for act, init in product(dict.fromkeys(("tanh", space.activation)), ("orthogonal", "gaussian")):
        net = Supernet(space, init=init, activation=act, layer_indicators=False, fused=False, seed=cfg.seed)
        settings[f"{init}, {act}"] = measure_paths(space, net, x, f"{init}, {act}", cfg.seed)
    reductions = [i for i, layer in enumerate(space.layers) if not layer.normal]
    _end_table(settings, notes)
    _stage_table(settings, reductions, notes)
    _comparability_table(settings, notes)
    _layer_tables(settings, notes)
    _figure(settings, reductions, notes)


def reduced_space(name: str) -> SearchSpace:
    """A space at 64 pixels, or at its own resolution if that is smaller; it must have one activation."""
    space = get_space(name)
    space.require_one_activation("this study")
    return get_space(name, resolution=min(RESOLUTION, space.resolution))


def measure_paths(space: SearchSpace, net: Supernet, x: Tensor, name: str, seed: int) -> Paths:
    """Send images x (N, C, H, W) and noise along random paths of a supernet of plain modules."""
    net = hold_statistics(net)
    dx = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    first = push(net.stem, (x, dx))
    start = sensitivity(*first)
    sampler = UniformSampler(space, seed=seed, layer_indicators=False)
    rows: list[list[dict[str, float]]] = []
    increments: dict[tuple[int, str], list[float]] = {}
    with Progress(name, PATHS) as progress:
        for path in range(PATHS):
            pair, row = first, []
            for index, (layer, choice) in enumerate(zip(net.layers, sampler.step()[0], strict=True)):
                before, chi_before = pair, sensitivity(*pair)
                for i, candidate in enumerate(layer.candidates):
                    if path >= CANDIDATE_PATHS and i != choice:
                        continue
                    output = push(candidate, before)
                    pair = output if i == choice else pair
                    if path < CANDIDATE_PATHS:
                        place = index, layer.layer.label(i)
                        increments.setdefault(place, []).append(sensitivity(*output) - chi_before)
                row.append(measure_place(*pair, start))
            rows.append(row)
            progress.update(path + 1)
    return Paths({key: np.array([[place[key] for place in row] for row in rows]) for key in rows[0][0]}, increments)


def _end_table(settings: Mapping[str, Paths], notes: Notebook) -> None:
    """The averages over random paths behind the last layer; log chi is counted from the output of the stem."""
    rows = []
    for name, found in settings.items():
        verdict = detect(np.arange(1, found.layers + 1, dtype=float), found.curves)
        e, last = verdict.evidence, {key: values.mean(0)[-1] for key, values in found.curves.items()}
        keys = ("log_chi", "noise_factor_db", "exponent", "exponent_r2", "exponent_r2_against_l", "rank")
        values = (*(e[key] for key in keys), last["reff_noise"], e["share"], last["pseudo_linear"])
        rows.append((name, *values, str(verdict)))
    columns = {"random paths": "", "log chi(L)": ".3f", "dB": ".1f", "exponent": ".3f", "R^2": ".4f"}
    columns |= {"R^2 exponential": ".4f", "r_eff(x)": ".1f", "r_eff(dx)": ".1f", "mu_2/nu_2": ".3f"}
    notes.table("from the stem to the last layer", {**columns, "pseudo-linear": ".3f", "verdict": ""}, rows)


def _stage_table(settings: Mapping[str, Paths], reductions: Sequence[int], notes: Notebook) -> None:
    """Increments by place within a stage, beside those that theorem 4 predicts from the first.

    By the theorem the k-th residual of a stage adds a branch of variance 1 to a sum of k branches. The branch has the
    growth G of the reduction.
    """
    places: dict[int, list[int]] = {}
    layers = next(iter(settings.values())).layers
    for first, end in zip(reductions, [*reductions[1:], layers], strict=True):
        for layer in range(first, end):
            places.setdefault(layer - first, []).append(layer)
    rows: list[list[Any]] = [["reduction" if k == 0 else f"{k} later"] for k in places] + [["whole stage"]]
    for found in settings.values():
        steps = np.diff(found.curves["logchi"].mean(0), prepend=0.0)
        means = [steps[at].mean() for at in places.values()]
        growth = math.exp(2 * means[0])
        for k, (row, mean) in enumerate(zip(rows, [*means, sum(means)], strict=True)):
            row += [math.exp(mean), math.sqrt(1 + (growth - 1) / (k + 1)) if 0 < k < len(means) else None]
    columns = {"layer of a stage": ""}
    for name in settings:
        columns |= {f"{name}: delta chi": ".3f", f"{name}, diluted": ".3f"}
    notes.table("within a stage, averages over stages", columns, rows)


def _comparability_table(settings: Mapping[str, Paths], notes: Notebook) -> None:
    """How much candidates of a layer differ, and how much paths differ with depth."""
    rows = []
    for name, found in settings.items():
        quarter = max(1, found.layers // 4)
        candidates, between_paths = found.spreads(), found.curves["logchi"].std(0)
        # what the differences would grow to if every layer added its own
        alone = np.sqrt(np.cumsum(candidates**2))
        ends = [(v[:quarter].mean(), v[-quarter:].mean()) for v in (candidates, between_paths, alone)]
        (near, far), (first, last), (low, high) = ends
        rows.append((name, near, far, candidates.mean(), first, last, last / first, high / low))
    columns = {"std of log delta chi over candidates, of log chi over paths": ""}
    header = ("first quarter", "last quarter", "mean", "paths: first quarter", "paths: last quarter")
    columns |= {**dict.fromkeys(header, ".4f"), "last over first": ".2f", "if added up": ".2f"}
    notes.table("do candidates stay comparable with depth?", columns, rows)


def _layer_tables(settings: Mapping[str, Paths], notes: Notebook) -> None:
    """Averages over paths of every layer, and the increment of every candidate."""
    columns, rows = {"layer": ""}, []
    for name in settings:
        columns |= {f"{name}: log chi": ".3f", f"{name}: r_eff": ".1f"}
    means = [found.curves[key].mean(0) for found in settings.values() for key in ("logchi", "reff_signal")]
    rows = [(str(layer), *(mean[layer] for mean in means)) for layer in range(len(means[0]))]
    notes.table("averages over paths", columns, rows)
    places = list(next(iter(settings.values())).increments)
    candidates = [
        (f"{layer} {name}", *(math.exp(np.mean(found.increments[layer, name])) for found in settings.values()))
        for layer, name in places
    ]
    columns = {"layer and candidate": "", **dict.fromkeys(settings, ".3f")}
    notes.table("delta chi of every candidate", columns, candidates)


def _figure(settings: Mapping[str, Paths], reductions: Sequence[int], notes: Notebook) -> None:
    figure, axes = new_figure(11, 6.7, rows=2, columns=2)
    sensitivities, ranks, candidates, between_paths = axes
    for colour, (name, found) in zip(SERIES, settings.items(), strict=False):
        depth, curves = np.arange(1, found.layers + 1, dtype=float), summarise(found.curves)
        curve(sensitivities, depth, curves, "logchi", colour, name)
        curve(ranks, depth, curves, "reff_signal", colour, name)
        candidates.plot(depth, found.spreads(), color=colour, marker="o", ms=2.5)
        between_paths.plot(depth, found.curves["logchi"].std(0), color=colour, marker="o", ms=2.5)
    sensitivities.set(title=r"$\log\chi$", xlabel="layer")
    ranks.set(title="effective rank of the signal", xlabel="layer", yscale="log")
    candidates.set(title=r"std of $\log\,\delta\chi$ over candidates", xlabel="layer", ylim=(0, None))
    between_paths.set(title=r"std of $\log\chi$ over paths", xlabel="layer", ylim=(0, None))
    for ax in axes:
        for reduction in reductions:
            ax.axvline(reduction + 1, color=GREY, lw=0.8, alpha=0.5)
    caption = "Averages over random paths by depth; bands: 16th to 84th percentile. Grey lines: reductions."
    notes.figure("along random paths", caption, figure)
