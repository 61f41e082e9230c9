"""What the moments study measures: runs of random networks, published arrays, and paths through a search space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from nasfast.config import ConfigError
from nasfast.data import FolderSource
from nasfast.research.analysis.moments.detect import PowerLaw, fit_power_law
from nasfast.research.analysis.moments.inputs import Source, fields, gaussian, images, standardised
from nasfast.research.analysis.moments.module import held, push, sensitivity, statistics_of
from nasfast.research.analysis.moments.networks import NetConfig, Run, run
from nasfast.research.studies.moments.config import FiguresConfig, ModuleConfig
from nasfast.research.studies.run import Done, Task
from nasfast.spaces import SearchSpace, UniformSampler
from nasfast.supernet import Supernet

Array = NDArray[np.float64]
_RESULTS = "results.jsonl"


class Runner:
    """Runs networks, reports the progress, and resumes from a file.

    Args:
        out: directory of the file results.jsonl; None keeps nothing.
        seed: seed of weights, inputs and noise.
        device: device of the networks.
        task: tells the progress.
    """

    def __init__(self, out: Path | None, seed: int, device: str, task: Task) -> None:
        self._file = None if out is None else out / _RESULTS
        self._seed, self._device, self._task = seed, device, task
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, cfg: NetConfig, source: Source, realisations: int) -> Run:
        """Run networks of one configuration, and note the seconds that they took under `name`."""
        progress = self._task(name, realisations)
        found = run(
            cfg,
            source,
            realisations=realisations,
            seed=self._seed,
            device=self._device,
            file=self._file,
            progress=progress,
        )
        self.seconds[name] = found.seconds
        return found


def load_images(folder: str) -> Tensor:
    """All images of a folder, (count, 3, H, W) uint8.

    Raises:
        DataError: no such folder, or one without classes.
        ValueError: images of different sizes.
    """
    source = FolderSource(folder)
    pixels = [np.asarray(source.image(i)).transpose(2, 0, 1) for i in range(len(source))]
    if len({p.shape for p in pixels}) > 1:
        raise ValueError(f"images of {folder} have different sizes: bring them to one")
    return torch.from_numpy(np.stack(pixels))


def source_of(cfg: FiguresConfig) -> Source:
    """The inputs of the networks: images of a folder, or synthetic ones."""
    if cfg.images is not None:
        return images(load_images(cfg.images), flat=not cfg.kernel)
    return fields(3, 32) if cfg.kernel else gaussian(3072)


Published = dict[str, Any]
"""The published arrays of one figure, at the depths that a run has too, and its `name`; empty where there are none."""


def published(cfg: FiguresConfig, figure: int) -> Published:
    """Read the arrays of a figure from the folder that the config names."""
    name = cfg.published(figure)
    if cfg.reference is None or name is None or not (file := Path(cfg.reference) / f"{name}.npz").exists():
        return {}
    with np.load(file, allow_pickle=False) as arrays:
        found = {key: arrays[key] for key in arrays.files}
    shared = np.isin(found["depth"], cfg.network(figure).records)
    cut = {key: v[..., shared] if v.shape[-1:] == shared.shape else v for key, v in found.items()}
    return {"name": name, **cut} if shared.any() else {}


def published_law(arrays: Mapping[str, np.ndarray]) -> PowerLaw:
    """The power law of figure 5, fitted to published arrays."""
    return fit_power_law(
        arrays["depth"], arrays["chi_mean"], arrays["inc_ratio_of_means"], int(arrays["units_per_residual"])
    )


def module_inputs(cfg: ModuleConfig, shape: Sequence[int]) -> Tensor:
    """Standardised inputs (batch, *shape) of a space or module.

    Raises:
        ConfigError: images for an input that is none.
        DataError: the image folder cannot be used.
    """
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
    return standardised(x)


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
        values = [np.array([v for (at, _), v in self.increments.items() if at == i]) for i in range(self.layers)]
        return np.array([v.std(0).mean() for v in values])


def measure_paths(cfg: ModuleConfig, space: SearchSpace, net: Supernet, x: Tensor, progress: Done) -> Paths:
    """Send signal and noise along random paths of a supernet.

    Args:
        cfg: how many paths, and along how many of them every candidate is measured.
        space: space of the supernet.
        net: a supernet of plain modules.
        x: (N, C, H, W) images.
        progress: told the paths that are done.
    """
    net = held(net)
    dx = torch.randn(x.shape, generator=torch.Generator().manual_seed(cfg.seed))
    first = push(net.stem, (x, dx))
    start = sensitivity(*first)
    sampler = UniformSampler(space, seed=cfg.seed, layer_indicators=False)
    rows = []
    increments: dict[tuple[int, str], list[float]] = {}
    for i_path in range(cfg.paths):
        pair, row = first, []
        for index, (layer, choice) in enumerate(zip(net.layers, sampler.step()[0], strict=True)):
            before, following = sensitivity(*pair), pair
            everyone = i_path < cfg.candidate_paths
            for i, candidate in enumerate(layer.candidates):
                if not (everyone or i == choice):
                    continue
                output = push(candidate, pair)
                following = output if i == choice else following
                if everyone:
                    name = layer.layer.label(i)
                    increments.setdefault((index, name), []).append(sensitivity(*output) - before)
            pair = following
            row.append(statistics_of(*pair, start))
        rows.append(row)
        progress(i_path + 1)
    return Paths({key: np.array([[place[key] for place in row] for row in rows]) for key in rows[0][0]}, increments)
