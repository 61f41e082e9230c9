"""Everything a run depends on, as one config: its fields are the flags of the command line and the keys of its YAML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nasfast.config import ConfigBase
from nasfast.data import DataConfig
from nasfast.indicators.config import ScoreConfig
from nasfast.retrain import RetrainConfig
from nasfast.runtime.device import check_device, torch_device
from nasfast.search import SearchConfig
from nasfast.train import TrainConfig
from nasfast.train.supernet import MethodName, SupernetConfig, default_lr


@dataclass(frozen=True)
class SpaceConfig(ConfigBase):
    """The search space of a run.

    Attributes:
        name: `mobilenet_v2`, `shufflenet_v2`, `nas_bench_macro`, `digits_mini`, or the path of a YAML file.
        variant: `bnnas` is the released BN-NAS configuration of `mobilenet_v2`.
        resolution: of the images in pixels; null takes the space's.
    """

    name: str = "mobilenet_v2"
    variant: str | None = None
    resolution: int | None = None


@dataclass(frozen=True)
class RunConfig(ConfigBase):
    """Everything a run depends on; the resolved form is saved as config.yaml in the run directory.

    Attributes:
        out: run directory.
        seed: of weights, paths, data order, augmentation and search.
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads, 0 for torch's choice; bit-identical repeats need the same number.
        method: `dinas`, its paper's method to the letter (`dinas_paper`), or a baseline: `bnnas`, `fairnas`, `spos`.
        space: the search space.
        data: images.
        supernet: overrides of the method's preset.
        train: supernet training.
        score: what architectures are ranked by.
        recalibration_batches: batches for BN statistics where paths are scored by accuracy (fairnas, spos).
        search: limits and search method.
        retrain: training of the chosen architectures.
    """

    names_files: ClassVar[bool] = True

    out: str = "runs/nasfast"
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    method: MethodName = "dinas"
    space: SpaceConfig = SpaceConfig()
    data: DataConfig = DataConfig()
    supernet: SupernetConfig = SupernetConfig()
    train: TrainConfig = TrainConfig()
    score: ScoreConfig = ScoreConfig()
    recalibration_batches: int = 20
    search: SearchConfig = SearchConfig()
    retrain: RetrainConfig = RetrainConfig()

    def __post_init__(self) -> None:
        if self.threads < 0 or self.seed < 0:
            raise ValueError(f"threads and seed must not be negative, got {self.threads} and {self.seed}")
        if self.recalibration_batches < 1:
            raise ValueError(f"recalibration_batches must be at least 1, got {self.recalibration_batches}")
        check_device(self.device)

    def resolved(self) -> RunConfig:
        """Every setting that was left to the method's preset made explicit."""
        chosen = self.supernet.resolved(self.method)
        lr = default_lr(chosen.trainable) if self.train.lr is None else self.train.lr
        search_seed = self.seed if self.search.seed is None else self.search.seed
        return self.replace(
            supernet=chosen,
            train=self.train.replace(lr=lr),
            score=self.score.resolved(self.method),
            search=self.search.replace(seed=search_seed),
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.out)

    @property
    def torch_device(self) -> str:
        """The device to use.

        Raises:
            ConfigError: cuda was asked for and there is none.
        """
        return torch_device(self.device)
