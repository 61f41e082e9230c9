"""NASI's search of any space at initialisation (Y. Shu et al., arXiv 2109.00817); nothing is trained.

Writes what the next stage reads: in a space of layers space.yaml and indicators.json, in a space of cells
arch_nasi.json. The algorithm is `nasfast.research.nasi.search`; mu, batch and resolution of the built-in spaces are
those of section 4 of the method's description.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.nn import functional as F

from nasfast.config import ConfigError
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.table import TABLE_FILE, IndicatorTable
from nasfast.report.plots import GREY, SERIES, draw_cells, literal, new_figure
from nasfast.research.cells.config import Rule
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.nasi.search import NasiConfig, NasiResult, search
from nasfast.research.nasi.spaces import METHOD, chosen_arch, make_mixture, write_answer
from nasfast.research.studies.commands import NasiSearchConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.runtime.device import torch_device
from nasfast.runtime.files import write_atomic
from nasfast.runtime.progress import Progress
from nasfast.spaces import BUILDERS, ArchSpace, named_space, read_space

NOISE, IMAGES = 3.0, 2000
"""Of the synthetic images."""


class Preset(NamedTuple):
    """How a space is searched."""

    mu: float = 1.0
    resolution: int | None = None
    batch: int = 16
    rule: Rule | None = None
    cells: int | None = None


PRESETS = {
    "darts": Preset(2.0, 32, 64, cells=5),
    "nas_bench_201": Preset(1.0, 32, 64),
    "choice_blocks": Preset(1.0, 32, 64, "darts"),
    "mobilenet_v2": Preset(2.0, 64),
    "mobilenet_v3": Preset(2.0, 64),
    "shufflenet_v2": Preset(2.0, 64),
}


def run(cfg: NasiSearchConfig, notes: Notebook) -> None:
    """One search."""
    preset, device = PRESETS.get(cfg.space, Preset()), torch_device(cfg.device)
    source = None if cfg.images is None else FolderSource(cfg.images)
    batch, images = cfg.batch or preset.batch, IMAGES if source is None else len(source)
    if images < batch:
        raise ConfigError(f"batch must be at most {images}, the number of images, got {batch}")
    space = searched_space(cfg, None if source is None else len(source.classes))
    if notes.out is not None:
        claim_folder(notes.out, space)
    if source is None:
        loader: Any = synthetic(space, batch=batch, seed=cfg.seed)
    else:
        data, channels = DataConfig(train=cfg.images, batch_size=batch), space.in_channels
        loader = make_loader(data, source, resolution=space.resolution, in_channels=channels, seed=cfg.seed)
    own = NasiConfig(steps=cfg.steps, mu=preset.mu, seed=cfg.seed)
    notes.say(f"NASI on {space.name}, {space.resolution} x {space.resolution}; nothing is trained.")
    notes.say(
        f"Q is the squared length of one batch's gradient over all weights of an untrained network. T = {own.steps}, "
        f"batch {batch}, mu {own.mu:g}, nu {own.constraint} {own.limit:g}, gates {own.gates}."
    )
    with Progress("nasi", own.steps) as progress:
        mixture = make_mixture(space, seed=cfg.seed).to(device)
        result = search(mixture, loader, own, device=device, progress=progress.update)
    arch = chosen_arch(space, result, rule=preset.rule)
    cost, record = space.cost(arch), result.record
    rows = [
        ("architecture", space.format(arch)),
        ("MACs", f"{cost.macs:,}"),
        ("parameters", f"{cost.params:,}"),
        ("median Q, last nu", f"{float(result.q.median()):.3g}, {float(result.nu[-1]):.3g}"),
        ("steps above nu, skipped", f"{100 * result.above:.0f} %, {result.skipped}"),
        ("seconds (CPU)", f"{record.seconds:.1f} ({record.cpu_seconds:.1f})"),
    ]
    notes.table("what was found", {"": "", " ": ""}, rows)
    if notes.out is not None:
        meta = {"steps": len(record.q), "seed": cfg.seed, "images": cfg.images is not None}
        print("written:", write_answer(space, result, arch, notes.out, meta=meta))
    steps_figure("the search, step by step", result, notes)
    logits_figure("alpha* - alpha_0", space, result, notes)


def searched_space(cfg: NasiSearchConfig, classes: int | None = None) -> ArchSpace:
    """The space that a config names; `classes` are those of the images, None for the synthetic ones."""
    preset = PRESETS.get(cfg.space, Preset())
    sizes = {
        "resolution": cfg.resolution or preset.resolution,
        "num_classes": classes or (10 if cfg.space in BUILDERS else None),
        "cells": cfg.cells or preset.cells,
        "channels": cfg.channels,
    }
    return named_space(cfg.space, **{name: value for name, value in sizes.items() if value is not None})


def synthetic(space: ArchSpace, *, batch: int, seed: int) -> DrawnBatches:
    """Batches of noisy prototypes, resized to a space's resolution."""
    if space.in_channels > 3:
        raise ConfigError(f"synthetic images have up to 3 channels, {space.name} takes {space.in_channels}")
    (x, y), _ = prototypes(NOISE, IMAGES, 1, seed=seed)
    x = x[:, : space.in_channels]
    if space.resolution != x.shape[-1]:
        x = F.interpolate(x, size=(space.resolution,) * 2, mode="bilinear", align_corners=False)
    return DrawnBatches(x, y % space.num_classes, steps=100, batch=batch, seed=seed)


def claim_folder(out: Path, space: ArchSpace) -> None:
    """Write the space to the folder that gets the files, which is checked before anything is computed."""
    path, table = out / "space.yaml", out / TABLE_FILE
    if path.exists() and read_space(path) != space:
        raise FileExistsError(f"{path} is of another space: choose another --out")
    if table.exists() and IndicatorTable.load(table).meta.get("method") != METHOD:
        raise FileExistsError(f"{table} has the scores of a trained supernet: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, space.to_yaml().encode())


def steps_figure(title: str, result: NasiResult, notes: Notebook) -> None:
    """A search step by step: Q, R, the limit nu, and the norm of the gradient."""
    figure, (values, norms) = new_figure(11, 3.6, columns=2)
    steps = range(1, len(result.q) + 1)
    values.plot(steps, result.q, "o", ms=3, label="Q")
    values.plot(steps, result.r, "x", ms=3, color=SERIES[1], label="R")
    values.plot(steps, result.nu, color=GREY, label="nu")
    values.set(title="sampled architectures", xlabel="step")
    norms.plot(steps, result.norms, "o", ms=3, label="norm of the gradient")
    norms.plot(steps, result.norms.cummax(0).values, color=GREY, label="largest so far")
    norms.set(title="gradient of R", xlabel="step")
    caption = "R is Q with the penalty on what exceeds nu; gradients are divided by the largest norm so far."
    notes.figure(title, caption, figure)


def logits_figure(title: str, space: ArchSpace, result: NasiResult, notes: Notebook) -> None:
    """The logits of a result, (rows, columns) of the space; nan where a row has no such candidate."""
    values = result.delta.masked_fill(~result.logits.isfinite(), math.nan).flatten(0, 1).numpy()
    figure, (ax,) = new_figure(2.5 + 0.75 * len(space.columns), 1.5 + 0.26 * len(values))
    limit = float(np.nanmax(np.abs(values))) or 1.0
    figure.colorbar(draw_cells(ax, values, "RdBu_r", vmin=-limit, vmax=limit), ax=ax)
    ax.plot(np.nanargmax(values, 1), np.arange(len(values)), "o", ms=5, mfc="none", mec="black")
    ax.set_xticks(range(len(space.columns)), map(literal, space.columns), rotation=45, ha="right", fontsize=8)
    ax.set_yticks(range(len(space.rows)), map(literal, space.rows), fontsize=8)
    notes.figure(title, "Rows: edges or layers; columns: candidates. Rings: the largest of every row.", figure)
