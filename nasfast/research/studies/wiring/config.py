"""The settings of the wiring study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.costs import SKIP_CONNECT
from nasfast.research.cells.space import CELLS, Cell, CellSpace, Norm, Order, at_thirds
from nasfast.research.studies.config import StudyConfig
from nasfast.settings import TrainConfig, check_common, check_device

CellName = Literal["minimal", "simplified", "modified", "darts", "nas_bench_201"]


@dataclass(frozen=True)
class TheoremsConfig(StudyConfig):
    """The theorems on real networks, in float64.

    Attributes:
        channels: number of channels of the cells.
        batch: number of images.
    """

    channels: int = 8
    batch: int = 32

    def _check_values(self) -> None:
        check_common(self.threads, self.seed, channels=self.channels, batch=self.batch)


@dataclass(frozen=True)
class ExperimentConfig(StudyConfig):
    """What the experiments have in common. The pass marks belong to the defaults, and hold for nothing else.

    Attributes:
        cell: `minimal`, `simplified`, `modified`, `darts` or `nas_bench_201`.
        cells: number of cells, one after another.
        channels: number of channels of every node in the first cell.
        reductions: whether the cells at a third and at two thirds are reduction cells, which needs at least three
            cells.
        order: order of convolution, norm and ReLU in the operations.
        norm: kind of the norms in the operations.
        no_skip_on_intermediate: whether intermediate edges lack the skip connection among their candidates.
        images: folder with one sub-folder per class, such as CIFAR-10's training images; null takes synthetic ones.
        resolution: height and width of the images from a folder.
        samples: number of synthetic training images; a search on two levels holds out as many again.
        noise: noise of the synthetic images, in standard deviations of their prototypes' pixels.
        batch_size: number of images per step.
        steps: number of steps of the search; rounded to hundreds above 100, and to whole epochs with a folder.
        lr: learning rate of the weights at the start.
        lr_end: learning rate of the weights at the end.
        weight_decay: weight decay of the weights.
        records: number of times that probabilities and costs are recorded.
        seeds: number of searches; their seeds begin with `seed`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        seed: the first seed.
    """

    cell: CellName = "darts"
    cells: int = 1
    channels: int = 6
    reductions: bool = False
    order: Order = "relu_conv_norm"
    norm: Norm = "batch"
    no_skip_on_intermediate: bool = False
    images: str | None = None
    resolution: int = 32
    samples: int = 400
    noise: float = 4.0
    batch_size: int = 64
    steps: int = 1500
    lr: float = 0.4
    lr_end: float = 1e-3
    weight_decay: float = 3e-4
    records: int = 75
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0

    def _check_values(self) -> None:
        check_device(self.device)
        check_common(
            self.threads,
            self.seed,
            cells=self.cells,
            channels=self.channels,
            samples=self.samples,
            steps=self.steps,
            records=self.records,
            seeds=self.seeds,
            resolution=self.resolution,
        )
        if self.batch_size < 2:
            raise ValueError(
                f"batch_size must be at least 2 (BatchNorm needs more than one image), got {self.batch_size}"
            )
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise must not be negative, got {self.noise}")
        if self.reductions and self.cells < 3:
            raise ValueError(f"reductions need at least 3 cells, of which one is normal, got cells={self.cells}")

    @property
    def published(self) -> bool:
        """Whether the pass marks belong to these settings."""
        free = ("seeds", "seed", "threads", "device")
        return self.to_dict() == type(self)(**{name: getattr(self, name) for name in free}).to_dict()

    def space(self, cell: Cell | None = None) -> CellSpace:
        """The space of the network that is searched; `cell` replaces the cell of the config."""
        # imported here, because they import torch, and help must not wait for that
        from nasfast.research.cells.prototypes import CLASSES, SIZE
        from nasfast.research.studies.wiring.searches import image_folder

        cell = cell or CELLS[self.cell]()
        if self.no_skip_on_intermediate:
            cell = cell.without_on_intermediate(SKIP_CONNECT)
        return CellSpace(
            name=self.cell,
            cell=cell,
            cells=self.cells,
            channels=self.channels,
            reductions=at_thirds(self.cells) if self.reductions else (),
            order=self.order,
            norm=self.norm,
            resolution=SIZE if self.images is None else self.resolution,
            num_classes=CLASSES if self.images is None else len(image_folder(self.images).classes),
        )

    @property
    def weights(self) -> TrainConfig:
        """How the weights learn; the number of epochs is left open."""
        return TrainConfig(
            lr=self.lr, lr_end=self.lr_end, weight_decay=self.weight_decay, label_smoothing=0.0, clip_norm=5.0
        )

    def search(self, **changes: Any) -> CellSearchConfig:
        """How operations are chosen: uniformly, without learning an architecture."""
        return CellSearchConfig(method="uniform", records=self.records, seed=self.seed).replace(**changes)


@dataclass(frozen=True)
class LearntConfig(ExperimentConfig):
    """Experiments that learn an architecture.

    Attributes:
        method: estimator of the architecture's gradient.
        alpha_lr: learning rate of the logits' Adam.
        alpha_mean: mean of the normal distribution that the logits start from.
        alpha_std: standard deviation of that distribution.
    """

    method: Literal["darts", "snas", "dsnas", "proxyless"] = "dsnas"
    alpha_lr: float = 0.02
    alpha_mean: float = 0.0
    alpha_std: float = 1e-3

    def search(self, **changes: Any) -> CellSearchConfig:
        """How the architecture learns, by default on one level."""
        return CellSearchConfig(
            method=self.method,
            alpha_lr=self.alpha_lr,
            alpha_mean=self.alpha_mean,
            alpha_std=self.alpha_std,
            records=self.records,
            seed=self.seed,
        ).replace(**changes)


@dataclass(frozen=True)
class GrowthConfig(LearntConfig):
    """P1, growing: one DARTS cell, one level."""


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
class CollapseConfig(LearntConfig):
    """P3, collapse: the search of P1 on two levels, and costs of DARTS's gates on training and held-out images.

    Attributes:
        control_steps: number of steps of the second part.
        second_order: with method darts, the architecture's gradient looks one step of the weights ahead.
    """

    control_steps: int = 300
    second_order: bool = False

    def _check_values(self) -> None:
        super()._check_values()
        check_common(0, 0, control_steps=self.control_steps)
        if self.second_order and self.method != "darts":
            raise ValueError(f"second_order belongs to method='darts', got {self.method!r}")


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
