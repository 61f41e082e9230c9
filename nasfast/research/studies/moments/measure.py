"""What the moments study measures: networks, random paths through a supernet, and their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.config import ConfigError
from nasfast.data import FolderSource
from nasfast.research.analysis.moments.module import hold_statistics, measure_place, push, sensitivity
from nasfast.research.analysis.moments.networks import (
    Array,
    NetConfig,
    Run,
    Source,
    fields,
    gaussian,
    images,
    run,
    standardise,
)
from nasfast.research.studies.moments.config import FiguresConfig, ModuleConfig
from nasfast.research.studies.run import Done, Task
from nasfast.spaces import SearchSpace, UniformSampler
from nasfast.supernet import Supernet


@dataclass(frozen=True)
class Runner:
    """Runs networks, tells the progress, and continues from what is in the directory `out`, if there is one."""

    out: Path | None
    task: Task
    device: str
    seed: int

    def run(self, name: str, cfg: NetConfig, source: Source, realisations: int) -> Run:
        """The moments of a number of networks; `name` is that of the progress."""
        folder, progress = None if self.out is None else self.out / "networks", self.task(name, realisations)
        return run(
            cfg,
            source,
            realisations=realisations,
            seed=self.seed,
            device=self.device,
            folder=folder,
            progress=progress,
        )


def load_images(folder: str) -> Tensor:
    """All images of a folder, (count, 3, H, W) uint8."""
    source = FolderSource(folder)
    pixels = [np.asarray(source.image(i)).transpose(2, 0, 1) for i in range(len(source))]
    if len({p.shape for p in pixels}) > 1:
        raise ValueError(f"images of {folder} have different sizes: bring them to one")
    return torch.from_numpy(np.stack(pixels))


def input_source(cfg: FiguresConfig) -> Source:
    """The inputs of the networks: images of a folder, or synthetic ones."""
    if cfg.images is not None:
        return images(load_images(cfg.images), flat=not cfg.kernel)
    return fields(3, 32) if cfg.kernel else gaussian(3072)


def module_inputs(cfg: ModuleConfig, shape: Sequence[int]) -> Tensor:
    """Standardised inputs (batch, *shape) of a space or module."""
    generator = torch.Generator().manual_seed(cfg.seed)
    if len(shape) != 3:
        if cfg.images is not None:
            raise ConfigError(f"images need an input of three dimensions, got {list(shape)}")
        return torch.randn(cfg.batch, *shape, generator=generator)
    channels, *size = shape
    if cfg.images is None:
        x = fields(channels, max(size))(cfg.batch, generator)[..., : size[0], : size[1]]
    else:
        x = images(load_images(cfg.images))(cfg.batch, generator)
        if x.shape[1] != channels:
            raise ConfigError(f"images have {x.shape[1]} channels, the input {channels}")
        x = F.interpolate(x, tuple(size), mode="bilinear", antialias=True)
    return standardise(x)


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


def measure_paths(cfg: ModuleConfig, space: SearchSpace, net: Supernet, x: Tensor, progress: Done) -> Paths:
    """Send images x (N, C, H, W) and noise along random paths of a supernet of plain modules."""
    net = hold_statistics(net)
    dx = torch.randn(x.shape, generator=torch.Generator().manual_seed(cfg.seed))
    first = push(net.stem, (x, dx))
    start = sensitivity(*first)
    sampler = UniformSampler(space, seed=cfg.seed, layer_indicators=False)
    rows = []
    increments: dict[tuple[int, str], list[float]] = {}
    for path in range(cfg.paths):
        pair, row = first, []
        all_candidates = path < cfg.candidate_paths
        for index, (layer, choice) in enumerate(zip(net.layers, sampler.step()[0], strict=True)):
            layer_input, chi_input = pair, sensitivity(*pair)
            for i, candidate in enumerate(layer.candidates):
                if not (all_candidates or i == choice):
                    continue
                output = push(candidate, layer_input)
                pair = output if i == choice else pair
                if all_candidates:
                    increment = sensitivity(*output) - chi_input
                    increments.setdefault((index, layer.layer.label(i)), []).append(increment)
            row.append(measure_place(*pair, start))
        rows.append(row)
        progress(path + 1)
    return Paths({key: np.array([[place[key] for place in row] for row in rows]) for key in rows[0][0]}, increments)
