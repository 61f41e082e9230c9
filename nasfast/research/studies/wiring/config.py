"""The settings of the wiring study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.studies.config import StudyConfig
from nasfast.settings import check_common, check_device

CellName = Literal["minimal", "simplified", "modified", "darts", "nas_bench_201"]


@dataclass(frozen=True)
class ExperimentConfig(StudyConfig):
    """What the experiments have in common. The pass marks belong to the defaults, and hold for nothing else.

    Attributes:
        cell: `minimal`, `simplified`, `modified`, `darts` or `nas_bench_201`.
        cells: number of cells, one after another.
        channels: number of channels of every node.
        samples: number of synthetic training images; a search on two levels holds out as many again.
        noise: noise of the images, in standard deviations of their prototypes' pixels.
        steps: number of steps of the search; rounded to hundreds above 100.
        lr: learning rate of the weights at the start.
        records: number of times that probabilities and costs are recorded.
        seeds: number of searches; their seeds begin with `seed`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        seed: the first seed.
    """

    cell: CellName = "darts"
    cells: int = 1
    channels: int = 6
    samples: int = 400
    noise: float = 4.0
    steps: int = 1500
    lr: float = 0.4
    records: int = 75
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0

    def _check_values(self) -> None:
        check_device(self.device)
        names = ("cells", "channels", "samples", "steps", "records", "seeds")
        check_common(self.threads, self.seed, **{name: getattr(self, name) for name in names})
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise must not be negative, got {self.noise}")

    @property
    def published(self) -> bool:
        """Whether the pass marks belong to these settings."""
        free = ("seeds", "seed", "threads", "device")
        return self == type(self)(**{name: getattr(self, name) for name in free})

    def search(self, **changes: Any) -> CellSearchConfig:
        """How operations are chosen: uniformly, without learning an architecture."""
        return CellSearchConfig(method="uniform", records=self.records, seed=self.seed).replace(**changes)


@dataclass(frozen=True)
class LearntConfig(ExperimentConfig):
    """Experiments that learn an architecture; P1, growing: one DARTS cell, one level.

    Attributes:
        method: estimator of the architecture's gradient.
        alpha_lr: learning rate of the logits' Adam.
    """

    method: Literal["darts", "snas", "dsnas", "proxyless"] = "dsnas"
    alpha_lr: float = 0.02

    def search(self, **changes: Any) -> CellSearchConfig:
        """How the architecture learns, by default on one level."""
        return super().search(method=self.method, alpha_lr=self.alpha_lr, **changes)


@dataclass(frozen=True)
class WidthConfig(LearntConfig):
    """P2, width preference: the search of P1, and the control for its cause on cells with one input.

    Attributes:
        control_steps: number of steps of every control.
    """

    control_steps: int = 600

    def _check_values(self) -> None:
        super()._check_values()
        check_common(0, 0, control_steps=self.control_steps)


@dataclass(frozen=True)
class CollapseConfig(WidthConfig):
    """P3, collapse: the search of P1 on two levels, and costs of DARTS's gates on training and held-out images.

    Attributes:
        control_steps: number of steps of the second part.
    """

    control_steps: int = 300


@dataclass(frozen=True)
class CostConfig(ExperimentConfig):
    """Local costs at initialisation and after training, operations sampled uniformly.

    Attributes:
        nets: number of networks at initialisation.
        batches: number of batches for each of them, and for the trained network.
    """

    cell: CellName = "minimal"
    channels: int = 8
    samples: int = 1000
    noise: float = 3.0
    steps: int = 600
    lr: float = 0.1
    nets: int = 10
    batches: int = 60

    def _check_values(self) -> None:
        super()._check_values()
        check_common(0, 0, nets=self.nets, batches=self.batches)
