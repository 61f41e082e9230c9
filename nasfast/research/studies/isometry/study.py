"""The isometry study: `run(config, out, task) -> StudyReport`, with its tables and figures; `claims` has the claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from nasfast.measure.timing import random_batch
from nasfast.research.analysis.fairness import depth_spread
from nasfast.research.analysis.meanfield import PhaseDiagram, phase_diagram
from nasfast.research.studies.draw import SERIES, level, line, literal, panel
from nasfast.research.studies.inputs import maker, sample_shape
from nasfast.research.studies.isometry.claims import bn_text, claims_of, spread_means
from nasfast.research.studies.isometry.config import IsometryConfig
from nasfast.research.studies.isometry.measure import (
    EDGES,
    SPREADS,
    Row,
    block_marks,
    measure_convolutions,
    measure_module,
    measure_supernet,
)
from nasfast.research.studies.report import Figure, Form, StudyReport, Table
from nasfast.research.studies.run import Task
from nasfast.spaces import SearchSpace, get_space, mean_path
from nasfast.supernet import Init, Supernet, initialize

# Few images are enough, because variances are averaged over channels and positions.
_DEPTH_IMAGES = 16
_DIAGRAM_ACT = "tanh"
_DENSITIES = 6
_FAIRNESS = {
    "f_var": "f_var: std of log variance",
    "f_iso": "f_iso: std of log distance ratio",
    "distortion": "distortion of distances within a candidate",
    "disagreement": "disagreement of the candidates' outputs",
}


_EXPLANATION = (
    "phi is the mean and varphi the variance of the squared singular values of a Jacobian; an isometry has 1 and 0. "
    "The branch is the candidate without skip connection or bypass. Gain: phi Var(in) / Var(out), how much faster "
    "small differences grow than the signal."
)
_MOMENTS = {"phi": ".3f", "varphi": ".3f", "gain": ".3f"}


def run(cfg: IsometryConfig, out: Path | None, task: Task) -> StudyReport:
    """Measure every candidate of a space, or the parts of a module, under orthogonal and Gaussian weights.

    Raises:
        ConfigError: unknown space, a module that cannot be imported or made, or an unusable input shape.
        ValueError: a module that cannot take the input, cannot be differentiated, or whose Jacobian is not finite.
    """
    return _space(cfg, cfg.resolve(), task) if cfg.module is None else _module(cfg, cfg.module, task)


def _space(cfg: IsometryConfig, space: SearchSpace, task: Task) -> StudyReport:
    own = space.activation
    # the setting of the theory first, then that of the space, then the baseline
    settings: dict[str, tuple[Init, str]] = {
        "orthogonal, tanh": ("orthogonal", "tanh"),
        f"orthogonal, {own}": ("orthogonal", own),
        f"gaussian, {own}": ("gaussian", own),
    }
    images, _ = random_batch(space, cfg.batch, seed=cfg.seed)
    images = images.contiguous()
    few = images[:_DEPTH_IMAGES]
    rows, spreads, depth, convolutions = [], [], [], []
    marks = block_marks(own, seed=cfg.seed)
    for setting, (init, act) in settings.items():
        net = Supernet(space, init=init, activation=act, layer_indicators=False, fused=False, seed=cfg.seed)
        path = mean_path(space) if cfg.inputs == "propagated" else None
        of_setting, spreads_of_setting = measure_supernet(
            net, images, cfg.effort, setting=setting, path=path, task=task
        )
        rows += of_setting
        spreads += spreads_of_setting
        for indicator_bn in (True, False):
            found = depth_spread(net, few, paths=cfg.paths, indicator_bn=indicator_bn, seed=cfg.seed)
            depth.append({"setting": setting, "indicator_bn": indicator_bn, **asdict(found)})
        if act == own:
            kinds, of_convolutions = measure_convolutions(net, setting=setting, scheme=init)
            convolutions += kinds
            marks += of_convolutions
    inputs = "white noise at every layer" if cfg.inputs == "white" else "white images, propagated along the mean path"
    report = _report(
        f"space {space.name}, {len(space)} layers, inputs: {inputs}",
        _reductions(cfg, space, len(few)),
        list(settings),
        rows,
        fairness=spreads,
        depth=depth,
        convolutions=convolutions,
    )
    return replace(report, checks=tuple(marks), claims=tuple(claims_of(own, rows, spreads, depth, convolutions)))


def _report(
    subject: str,
    reduced: Sequence[str],
    settings: Sequence[str],
    rows: Sequence[Row],
    *,
    fairness: Sequence[Form] = (),
    depth: Sequence[Form] = (),
    convolutions: Sequence[Form] = (),
) -> StudyReport:
    """The report without marks and claims; what there is none of has neither table nor figure."""
    figures = [_moments_figure("candidates" if fairness else "parts", settings, rows), _densities(settings, rows)]
    tables = [_medians_table(settings, rows), _rows_table(rows)]
    if convolutions:
        tables.append(_convolutions_table(convolutions))
    if fairness:
        figures += [_fairness_figure(settings, fairness), _depth_figure(settings, depth)]
        tables.append(_fairness_table(spread_means(fairness)))
    if depth:
        tables.append(_depth_table(depth))
    return StudyReport(
        subject=subject,
        explanation=_EXPLANATION,
        notes=tuple(f"reduced: {text}" for text in reduced),
        tables=tuple(tables),
        figures=(*figures, _diagram(phase_diagram(_DIAGRAM_ACT, np.linspace(0.5, 3, 51), np.linspace(0, 1, 26)))),
        data={
            "settings": settings,
            "rows": rows,
            "histogram_edges": EDGES,
            "fairness": fairness,
            "fairness_means": spread_means(fairness),
            "depth": depth,
            "convolutions": convolutions,
        },
    )


def _medians_table(settings: Sequence[str], rows: Sequence[Row]) -> Table:
    lines = []
    for setting in settings:
        values = [(r.branch.phi, r.branch.varphi, r.gain) for r in rows if r.setting == setting]
        lines.append((setting, *np.nanmedian(values, axis=0).tolist()))
    return Table.of("medians over branches", {"": "", **_MOMENTS}, lines)


def _rows_table(rows: Sequence[Row]) -> Table:
    """Every candidate or part under every setting; the last columns count the skip connection too."""
    lines = []
    for row in rows:
        place = row.name if row.layer < 0 else f"{row.layer} {row.name}"
        moments = (
            _with_error(row.branch.phi, row.branch.phi_error),
            _with_error(row.branch.varphi, row.branch.varphi_error),
        )
        whole = row.module or row.branch
        lines.append((place, row.setting, *moments, row.gain, whole.phi, whole.varphi))
    columns = {"": "", "setting": "", **_MOMENTS, "module phi": ".3f", "module varphi": ".3f"}
    return Table.of("branches, and whole modules", columns, lines)


def _with_error(value: float, error: float) -> str:
    return f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}"


def _convolutions_table(convolutions: Sequence[Form]) -> Table:
    columns = {"": "", "kind": "", "count": "", "phi / g²": ".4f", "varphi / g⁴": ".4f", "closed form": ".4f"}
    lines = [tuple(c.values()) for c in convolutions]
    return Table.of("convolutions, each as one of stride 1 that wraps around at the border", columns, lines)


def _fairness_table(means: Sequence[Form]) -> Table:
    lines = [(m["setting"], bn_text(m["indicator_bn"]), *(m[key] for key in SPREADS)) for m in means]
    columns = {"": "", "indicator BN": "", **dict.fromkeys(SPREADS, ".4f")}
    return Table.of("fairness, mean over layers (0 is fair)", columns, lines)


def _depth_table(depth: Sequence[Form]) -> Table:
    layers = len(depth[0]["std"])
    shown = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers - 1})
    columns = {"": "", "indicator BN": "", **{f"layer {i}": ".4f" for i in shown}}
    lines = [(d["setting"], bn_text(d["indicator_bn"]), *(d["std"][i] for i in shown)) for d in depth]
    return Table.of("std of log Var(h_l) over random paths", columns, lines)


def _reductions(cfg: IsometryConfig, space: SearchSpace, images: int) -> tuple[str, ...]:
    """What is smaller than in the paper, so that a study takes minutes."""
    full = get_space(cfg.space).resolution
    smaller = f" instead of {full}" if full != space.resolution else ""
    return (
        f"{space.resolution} x {space.resolution} images{smaller}",
        f"{cfg.samples} samples and {cfg.probes} random probes per candidate, {cfg.lanczos_steps} Lanczos steps per "
        f"density; statistics of {cfg.batch} samples",
        f"{cfg.paths} random paths, {images} images, one seed",
    )


def _module(cfg: IsometryConfig, name: str, task: Task) -> StudyReport:
    make = maker(name)
    x = torch.randn(cfg.batch, *sample_shape(cfg.input), generator=torch.Generator().manual_seed(cfg.seed))
    rows = []
    settings: dict[str, Init | None] = {"as it is": None, "orthogonal": "orthogonal", "gaussian": "gaussian"}
    for setting, init in settings.items():
        module = make()
        try:
            if init is not None:
                initialize(module, init, seed=cfg.seed)
            rows += measure_module(module, x, cfg.effort, setting=setting, task=task)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"module {name!r}, input {cfg.input}, {setting}: {error}") from error
    reduced = f"{cfg.samples} samples and {cfg.probes} random probes per part; statistics of {cfg.batch} samples"
    return _report(f"module {name}, inputs: white noise of shape {cfg.input}", (reduced,), list(settings), rows)


def _places(rows: Sequence[Row]) -> list[str]:
    """The places of the horizontal axis: layers, or the parts of a module without the whole, which would dwarf them."""
    places = list(dict.fromkeys(map(_place, rows)))
    return [place for place in places if place != "whole"] or places


def _place(row: Row) -> str:
    return f"layer {row.layer}" if row.layer >= 0 else row.name


def _moments_figure(title: str, settings: Sequence[str], rows: Sequence[Row]) -> Figure:
    places = _places(rows)
    panels = []
    names = [place.removeprefix("layer ") for place in places]
    quantities = {
        "phi of the branch": lambda row: row.branch.phi,
        "varphi of the branch": lambda row: row.branch.varphi,
        "gain: phi Var(in) / Var(out)": lambda row: row.gain,
    }
    for (text, value), ideal in zip(quantities.items(), (1, 0, 1), strict=True):
        marks: list[Form] = [{"mark": "ticks", "names": names}]
        for colour, shift, setting in zip(SERIES, np.linspace(-0.22, 0.22, len(settings)), settings, strict=False):
            own = [(places.index(_place(r)), value(r)) for r in rows if r.setting == setting and _place(r) in places]
            x, y = np.array(own, dtype=float).T
            medians = [np.nanmedian(y[x == at]) for at in np.unique(x)]
            marks.append(line(x + shift, y, colour, ls="", marker="o", ms=3, alpha=0.55))
            marks.append(line(np.unique(x) + shift, medians, colour, setting))
        panels.append(panel(text, *marks, level(ideal, ls="--"), ylim=(0, None)))
    caption = "Every dot is one candidate (or part); lines join the medians of a layer. Dashed: isometry."
    return Figure(title, caption, panels, columns=3, height=3.9)


def _densities(settings: Sequence[str], rows: Sequence[Row]) -> Figure:
    places, panels = _places(rows), []
    chosen = np.unique(np.linspace(0, len(places) - 1, min(_DENSITIES, len(places))).astype(int))
    for place in (places[i] for i in chosen):
        marks, top = [], 0.0
        for colour, setting in zip(SERIES, settings, strict=False):
            shares = [row.histogram for row in rows if row.setting == setting and _place(row) == place]
            if shares:
                mean = np.mean(shares, axis=0)
                # the bin of singular values at 0 would hide the rest
                top = max(top, 1.15 * mean[1:].max())
                style = {"color": colour, "lw": 1.2}
                marks.append({"mark": "stairs", "shares": mean, "edges": EDGES, "label": setting, "style": style})
        one = level(1, upright=True, ls="--")
        panels.append(panel(literal(place), *marks, one, x="singular value", ylim=(0, top or None)))
    caption = (
        "Share of the branch's singular values per bin of 0.1, pooled over the candidates of the layer; isometry would "
        "be one spike at 1. The bin at 0 is cut off."
    )
    return Figure("singular values", caption, panels, columns=3, height=2.4)


def _both(settings: Sequence[str], found: Sequence[Form], y: str) -> list[Form]:
    """A line for every setting: solid with indicator BatchNorms, dotted without; one number for each row, or a list."""
    marks = []
    for colour, setting in zip(SERIES, settings, strict=False):
        for indicator_bn in (True, False):
            rows = [f for f in found if (f["setting"], f["indicator_bn"]) == (setting, indicator_bn)]
            values = rows[0][y] if rows and "layer" not in rows[0] else [row[y] for row in rows]
            x = [row.get("layer", 0) for row in rows] if len(rows) == len(values) else range(len(values))
            label = setting if indicator_bn else ""
            marks.append(line(list(x), values, colour, label, ls="-" if indicator_bn else ":"))
    return marks


_LINES = " Solid: with indicator BN. Dotted: without it."


def _fairness_figure(settings: Sequence[str], fairness: Sequence[Form]) -> Figure:
    panels = [
        panel(title, *_both(settings, fairness, key), x="layer", ylim=(0, None)) for key, title in _FAIRNESS.items()
    ]
    return Figure("fairness", "Spread over the candidates of a layer; 0 is fair." + _LINES, panels)


def _depth_figure(settings: Sequence[str], depth: Sequence[Form]) -> Figure:
    panels = [
        panel("std of log Var(h) over paths", *_both(settings, depth, "std"), x="layer", ylim=(0, None)),
        panel("largest Var(h) over smallest", *_both(settings, depth, "ratio"), x="layer", ylim=(1, None)),
    ]
    return Figure("fairness with depth", "Spread of log Var(h) over random paths, by depth." + _LINES, panels)


def _diagram(found: PhaseDiagram) -> Figure:
    mesh = {"mark": "mesh", "x": found.sigma_w, "y": found.sigma_b, "z": np.round(found.chi, 6)}
    mesh |= {"curve": found.critical, "point": (1, 0), "label": "chi"}
    caption = (
        "chi of an infinitely wide tanh network without BatchNorm: below 1 signals merge and gradients vanish, above 1 "
        "they explode. The black line is chi = 1; the dot is the initialisation that the theory asks for."
    )
    title = f"order and chaos of {_DIAGRAM_ACT}"
    return Figure("mean field", caption, [panel(title, mesh, x="sigma_w", y="sigma_b")], width=6.4, height=3.6)
