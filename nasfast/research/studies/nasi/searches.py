"""The searches of the space that a config names, and the files of what they find."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from torch.nn import functional as F

from nasfast.config import ConfigError
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.table import IndicatorTable
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.nasi.search import NasiResult
from nasfast.research.nasi.search import search as nasi_search
from nasfast.research.nasi.spaces import METHOD, TABLE_FILE, chosen_arch, make_mixture
from nasfast.research.studies.nasi.config import MODES, NasiSearchConfig
from nasfast.research.studies.nasi.measure import NOISE, SYNTHETIC
from nasfast.research.studies.run import Task, no_task
from nasfast.runtime.device import torch_device
from nasfast.runtime.files import write_atomic
from nasfast.spaces import BUILDERS, Arch, ArchSpace, named_space, read_space


class Searches:
    """Searches of the space that a config names; `task` tells the progress."""

    def __init__(self, cfg: NasiSearchConfig, task: Task = no_task) -> None:
        self.cfg, self.device, self._task = cfg, torch_device(cfg.device), task
        self._source = None if cfg.images is None else FolderSource(cfg.images)
        images = SYNTHETIC if self._source is None else len(self._source)
        if images < cfg.batch_size:
            raise ConfigError(f"batch must be at most {images}, the number of images, got {cfg.batch_size}")
        classes = len(self._source.classes) if self._source is not None else 10 if cfg.space in BUILDERS else None
        sizes = {
            "resolution": cfg.resolution or cfg.preset.resolution,
            "num_classes": classes,
            "cells": cfg.cells or cfg.preset.cells,
            "channels": cfg.channels,
        }
        self.space = named_space(cfg.space, **{name: value for name, value in sizes.items() if value is not None})

    def loader(self, i: int, batch: int) -> Any:
        """Batches of the i-th seed."""
        space, seed = self.space, self.cfg.seed + i
        if self._source is None:
            return synthetic(space, batch=batch, seed=seed)
        data, channels = DataConfig(train=self.cfg.images, batch_size=batch), space.in_channels
        return make_loader(data, self._source, resolution=space.resolution, in_channels=channels, seed=seed)

    def all(self) -> dict[tuple[str, int], NasiResult]:
        """Every mode with every seed; searches of one seed see the same batches."""
        cfg, results = self.cfg, {}
        loaders = [self.loader(i, cfg.batch_size) for i in range(cfg.seeds)]
        for mode, i in product(cfg.mode_list, range(cfg.seeds)):
            search = cfg.search(i, **MODES[mode])
            mixture = make_mixture(self.space, seed=search.seed).to(self.device)
            done = self._task(f"{mode}, seed {search.seed}", search.steps)
            results[mode, i] = nasi_search(mixture, loaders[i], search, device=self.device, progress=done)
        return results

    def arch(self, result: NasiResult) -> Arch:
        """The architecture that a result selects."""
        return chosen_arch(self.space, result, rule=self.cfg.preset.rule)


def synthetic(space: ArchSpace, *, batch: int, seed: int) -> DrawnBatches:
    """Batches of noisy prototypes, resized to a space's resolution."""
    if space.in_channels > 3:
        raise ConfigError(f"synthetic images have up to 3 channels, {space.name} takes {space.in_channels}")
    (x, y), _ = prototypes(NOISE, SYNTHETIC, 1, seed=seed)
    x = x[:, : space.in_channels]
    if space.resolution != x.shape[-1]:
        # a batch at a time would save memory, but 2000 images of 64 x 64 are 100 MB
        x = F.interpolate(x, size=(space.resolution,) * 2, mode="bilinear", align_corners=False)
    return DrawnBatches(x, y % space.num_classes, steps=100, batch=batch, seed=seed)


def claim_folder(out: Path | None, space: ArchSpace) -> Path | None:
    """The folder that gets the files. It is checked before anything is computed."""
    if out is None:
        return None
    path, table = out / "space.yaml", out / TABLE_FILE
    if path.exists() and read_space(path) != space:
        raise FileExistsError(f"{path} is of another space: choose another --out")
    if table.exists() and IndicatorTable.load(table).meta.get("method") != METHOD:
        raise FileExistsError(f"{table} has the scores of a trained supernet: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, space.to_yaml().encode())
    return out
