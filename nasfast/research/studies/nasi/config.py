"""The settings of the NASI study, and the spaces that it searches by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from nasfast.config import nearest
from nasfast.indicators.accuracies import MIN_ARCHITECTURES
from nasfast.research.cells.config import Rule
from nasfast.research.nasi.config import NasiConfig
from nasfast.research.studies.config import StudyConfig
from nasfast.settings import check_common, check_device
from nasfast.spaces import named_space

MODES: dict[str, dict[str, Any]] = {
    "standard": {},
    "random labels": {"labels": "random"},
    "random images": {"images": "random"},
}
"""What a search sees of the data -> settings of `NasiConfig`."""

MOST_CELLS = 10_000
"""Largest number of different random cells; drawing the last ones of a space would take very long."""


@dataclass(frozen=True)
class NasiQuickConfig(StudyConfig):
    """The quick experiment; its pass marks belong to the defaults.

    Attributes:
        cells: number of random NAS-Bench-201 cells that are scored and trained, all different.
        images: number of images in a batch that scores an architecture.
        repeats: number of initialisations of a score, each with a batch of its own.
        train_steps: number of SGD steps for every trained cell.
        steps: number of architectures that a search samples.
        seeds: number of searches of every kind; their seeds begin with `seed`.
        exact: number of small architectures, all different, whose exact NTK trace is computed.
        threads: CPU threads, 0 for torch's choice. Small maps gain little from more than one. Rounding depends on the
            number, and so do the accuracies of short trainings.
        seed: first seed of the searches; also the seed of images, cells and weights.
    """

    cells: int = 40
    images: int = 256
    repeats: int = 3
    train_steps: int = 200
    steps: int = 100
    seeds: int = 3
    exact: int = 50
    threads: int = 1
    seed: int = 0

    def _check_values(self) -> None:
        check_common(
            self.threads,
            self.seed,
            images=self.images,
            repeats=self.repeats,
            train_steps=self.train_steps,
            steps=self.steps,
            seeds=self.seeds,
        )
        for name in ("cells", "exact"):
            if not 3 <= getattr(self, name) <= MOST_CELLS:
                raise ValueError(
                    f"{name} must be from 3, as a correlation needs, to {MOST_CELLS}, a part of the 15,625 cells of "
                    f"NAS-Bench-201 from which different ones are drawn, got {getattr(self, name)}"
                )


@dataclass(frozen=True)
class Preset:
    """How a space is searched; the settings of the built-in ones are those of section 4 of the method's description."""

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
"""Built-in spaces with settings of their own."""
CELL_PRESETS = ("darts", "nas_bench_201", "choice_blocks")


@dataclass(frozen=True)
class NasiSearchConfig(StudyConfig):
    """Searches of one space.

    Attributes:
        space: `darts`, `nas_bench_201`, `choice_blocks` (as NAS-Bench-1Shot1's first), `nas_bench_macro`,
            `mobilenet_v2`, `mobilenet_v3`, `shufflenet_v2`, `digits_mini`, or the path of a YAML file.
        images: folder with one sub-folder per class, augmented as for training; null takes synthetic images.
        resolution: height and width of the images; null takes the space's, and 64 for mobilenet_v2, mobilenet_v3 and
            shufflenet_v2.
        cells: number of cells of darts, nas_bench_201 and choice_blocks; null takes the space's.
        channels: number of channels of their first cell; null takes the space's.
        steps: T, the number of sampled architectures.
        batch: number of images for each architecture; null takes 64 for built-in cells, else 16.
        mu: weight of the penalty on Q above nu; null takes 2 for darts, mobilenet_v2, mobilenet_v3 and
            shufflenet_v2, else 1.
        modes: which data a search gets, comma-separated: `standard`, `random labels`, `random images`.
        seeds: number of searches in every mode; their seeds begin with `seed`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        seed: the first of the seeds.
    """

    space: str = "nas_bench_201"
    images: str | None = None
    resolution: int | None = None
    cells: int | None = None
    channels: int | None = None
    steps: int = 100
    batch: int | None = None
    mu: float | None = None
    modes: str = "standard"
    seeds: int = 1
    device: str = "cpu"
    seed: int = 0

    def _check_values(self) -> None:
        check_device(self.device)
        sizes = {name: getattr(self, name) for name in ("resolution", "cells", "channels", "batch")}
        explicit = {name: value for name, value in sizes.items() if value is not None}
        check_common(self.threads, self.seed, seeds=self.seeds, steps=self.steps, **explicit)
        for mode in self.mode_list:
            if mode not in MODES:
                raise ValueError(f"modes: unknown {mode!r}; {nearest(mode, MODES)}")
        if "standard" not in self.mode_list or len(set(self.mode_list)) < len(self.mode_list):
            raise ValueError(f"modes must contain 'standard', and each only once, got {self.modes!r}")
        if self.batch == 1:
            raise ValueError("batch must be at least 2 (BatchNorm needs more than one image), got 1")
        if self.space not in CELL_PRESETS:
            for name in ("cells", "channels"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to {', '.join(CELL_PRESETS)}, not to {self.space}")
        self.search(0)

    @property
    def mode_list(self) -> tuple[str, ...]:
        """The modes, in order."""
        return tuple(mode.strip() for mode in self.modes.split(","))

    def search(self, i: int, **changes: Any) -> NasiConfig:
        """The settings of the i-th search of a mode."""
        mu = self.preset.mu if self.mu is None else self.mu
        return NasiConfig(steps=self.steps, mu=mu, seed=self.seed + i, **changes)

    @cached_property
    def preset(self) -> Preset:
        """How the space is searched where the config leaves it open."""
        named_space(self.space)  # raises where it is neither built in nor a readable file
        return PRESETS.get(self.space, Preset())

    @property
    def batch_size(self) -> int:
        """Images for each sampled architecture."""
        return self.batch or self.preset.batch


@dataclass(frozen=True)
class NasiCompareConfig(NasiSearchConfig):
    """NASI beside other predictors of trained accuracy on nas_bench_macro, with the attributes of a search.

    Attributes:
        accuracies: JSON of trained accuracies, nas-bench-macro_cifar10.json of NAS-Bench-Macro.
        indicators: an indicators.json of the same space to compare with, such as a trained supernet's.
        architectures: number of random architectures whose own Q is computed, each as a network of its own; 0 for none,
            else at least 10.
        repeats: number of initialisations of each network, each with a batch of its own.
        score_batch: number of images in each of these batches.
        resamples: number of resamples of the bootstrap.
    """

    space: Literal["nas_bench_macro"] = "nas_bench_macro"
    accuracies: str = "nas-bench-macro_cifar10.json"
    indicators: str | None = None
    architectures: int = 150
    repeats: int = 3
    score_batch: int = 32
    resamples: int = 1000

    def _check_values(self) -> None:
        super()._check_values()
        check_common(0, 0, repeats=self.repeats, score_batch=self.score_batch)
        if self.architectures != 0 and self.architectures < MIN_ARCHITECTURES:
            raise ValueError(f"architectures must be 0 or at least {MIN_ARCHITECTURES}, got {self.architectures}")
