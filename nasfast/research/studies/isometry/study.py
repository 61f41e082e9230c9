"""The isometry study: `run(config, out, task) -> StudyReport`, and its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nasfast.measure.timing import random_batch
from nasfast.research.analysis.fairness import SPREADS, depth_spread
from nasfast.research.studies.inputs import measure_inits, reduced_space, sample_shape
from nasfast.research.studies.isometry.claims import indicator_text, judge_claims
from nasfast.research.studies.isometry.config import IsometryConfig
from nasfast.research.studies.isometry.figures import densities, diagram, moments, spreads
from nasfast.research.studies.isometry.marks import block_marks, measure_convolutions
from nasfast.research.studies.isometry.measure import Measured, Row, measure_module, measure_supernet
from nasfast.research.studies.report import StudyReport, Table
from nasfast.research.studies.run import Task
from nasfast.spaces import get_space, mean_path
from nasfast.supernet import Init, Supernet

# Few images are enough, because variances are averaged over channels and positions.
_DEPTH_IMAGES = 16
_FAIRNESS = {
    "f_var": "f_var: std of log variance",
    "f_iso": "f_iso: std of log distance ratio",
    "distortion": "distortion of distances within a candidate",
    "disagreement": "disagreement of the candidates' outputs",
}
_DEPTH = {"std": "std of log Var(h) over paths", "ratio": "largest Var(h) over smallest"}
_EXPLANATION = (
    "phi is the mean and varphi the variance of the squared singular values of a Jacobian; an isometry has 1 and 0. "
    "The branch is the candidate without skip connection or bypass. Gain: phi Var(in) / Var(out), how much faster "
    "small differences grow than the signal."
)


def run(cfg: IsometryConfig, out: Path | None, task: Task) -> StudyReport:
    """Measure every candidate of a space, or the parts of a module, under orthogonal and Gaussian weights."""
    return _space(cfg, task) if cfg.module is None else _module(cfg, cfg.module, task)


def _space(cfg: IsometryConfig, task: Task) -> StudyReport:
    space = reduced_space(cfg.space, cfg.resolution, "isometry")
    # the setting of the theory first, then that of the space, then the baseline
    settings: dict[str, tuple[Init, str]] = {
        "orthogonal, tanh": ("orthogonal", "tanh"),
        f"orthogonal, {space.activation}": ("orthogonal", space.activation),
        f"gaussian, {space.activation}": ("gaussian", space.activation),
    }
    images = random_batch(space, cfg.batch, seed=cfg.seed)[0].contiguous()
    few = images[:_DEPTH_IMAGES]
    path = mean_path(space) if cfg.inputs == "propagated" else None
    rows: dict[str, list[Row]] = {}
    fairness, depth, convolutions = [], [], []
    marks = block_marks(space.activation, seed=cfg.seed)
    for setting, (init, act) in settings.items():
        net = Supernet(space, init=init, activation=act, layer_indicators=False, fused=False, seed=cfg.seed)
        rows[setting], layer_spreads = measure_supernet(net, images, cfg, setting=setting, path=path, task=task)
        fairness += layer_spreads
        for indicator in (True, False):
            spread = depth_spread(net, few, paths=cfg.paths, block_indicator=indicator, seed=cfg.seed)
            depth.append({"setting": setting, "block_indicator": indicator, **spread})
        if act == space.activation:
            kinds, kind_marks = measure_convolutions(net, setting=setting, scheme=init)
            convolutions += kinds
            marks += kind_marks
    measured = Measured(rows, fairness, depth, convolutions)
    full = get_space(cfg.space).resolution
    reduced = (
        f"{space.resolution} x {space.resolution} images" + f" instead of {full}" * (full != space.resolution),
        f"{cfg.samples} samples and {cfg.probes} random probes per candidate, {cfg.lanczos_steps} Lanczos steps per "
        f"density; statistics of {cfg.batch} samples",
        f"{cfg.paths} random paths, {len(few)} images, one seed",
    )
    inputs = "white noise at every layer" if cfg.inputs == "white" else "white images, propagated along the mean path"
    report = _report(f"space {space.name}, {len(space)} layers, inputs: {inputs}", reduced, measured)
    return replace(report, checks=tuple(marks), claims=tuple(judge_claims(space.activation, measured)))


def _module(cfg: IsometryConfig, name: str, task: Task) -> StudyReport:
    x = torch.randn(cfg.batch, *sample_shape(cfg.input), generator=torch.Generator().manual_seed(cfg.seed))

    def measure(setting: str, module: nn.Module) -> list[Row]:
        return measure_module(module, x, cfg, setting=setting, task=task)

    measured = Measured(measure_inits(name, cfg.input, cfg.seed, measure))
    reduced = f"{cfg.samples} samples and {cfg.probes} random probes per part; statistics of {cfg.batch} samples"
    return _report(f"module {name}, inputs: white noise of shape {cfg.input}", (reduced,), measured)


def _report(subject: str, reduced: Sequence[str], measured: Measured) -> StudyReport:
    """The report without marks and claims; what there is none of has neither table nor figure."""
    figures = [moments("candidates" if measured.fairness else "parts", measured.rows), densities(measured.rows)]
    if measured.fairness:
        caption = "Spread over the candidates of a layer; 0 is fair."
        figures.append(spreads("fairness", caption, measured.fairness, _FAIRNESS))
        caption = "Spread of log Var(h) over random paths, by depth."
        figures.append(spreads("fairness with depth", caption, measured.depth, _DEPTH))
    return StudyReport(
        subject=subject,
        explanation=_EXPLANATION,
        notes=tuple(f"reduced: {text}" for text in reduced),
        tables=_tables(measured),
        figures=(*figures, diagram()),
        data=measured.data(),
    )


def _tables(measured: Measured) -> list[Table]:
    def with_error(value: float, error: float) -> str:
        return f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}"

    medians = []
    for setting, rows in measured.rows.items():
        values = [(row.branch.phi, row.branch.varphi, row.gain) for row in rows]
        medians.append((setting, *np.nanmedian(values, axis=0).tolist()))
    branches = []
    for row in measured.all_rows:
        branch, whole = row.branch, row.module or row.branch
        phi, varphi = with_error(branch.phi, branch.phi_error), with_error(branch.varphi, branch.varphi_error)
        place = row.name if row.layer < 0 else f"{row.layer} {row.name}"
        branches.append((place, row.setting, phi, varphi, row.gain, whole.phi, whole.varphi))
    columns = {"phi": ".3f", "varphi": ".3f", "gain": ".3f"}
    # the last columns count the skip connection too
    branch_columns = {"": "", "setting": "", **columns, "module phi": ".3f", "module varphi": ".3f"}
    tables = [
        Table.of("medians over branches", {"": "", **columns}, medians),
        Table.of("branches, and whole modules", branch_columns, branches),
    ]
    if measured.convolutions:
        title = "convolutions, each as one of stride 1 that wraps around at the border"
        columns = {"": "", "kind": "", "count": "", "phi / g²": ".4f", "varphi / g⁴": ".4f", "closed form": ".4f"}
        tables.append(Table.of(title, columns, [tuple(c.values()) for c in measured.convolutions]))
    if measured.fairness:
        columns = {"": "", "indicator BN": "", **dict.fromkeys(SPREADS, ".4f")}
        means = [
            (mean["setting"], indicator_text(mean["block_indicator"]), *(mean[spread] for spread in SPREADS))
            for mean in measured.fairness_means
        ]
        tables.append(Table.of("fairness, mean over layers (0 is fair)", columns, means))
    if measured.depth:
        last = len(measured.depth[0]["std"]) - 1
        layers = sorted({0, (last + 1) // 4, (last + 1) // 2, 3 * (last + 1) // 4, last})
        columns = {"": "", "indicator BN": "", **{f"layer {i}": ".4f" for i in layers}}
        stds = [
            (d["setting"], indicator_text(d["block_indicator"]), *(d["std"][i] for i in layers)) for d in measured.depth
        ]
        tables.append(Table.of("std of log Var(h_l) over random paths", columns, stds))
    return tables
