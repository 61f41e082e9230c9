"""`RunConfig`: all settings of a run. Its fields are the flags of the command line and the keys of the YAML files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from nasfast.config import ConfigBase
from nasfast.indicators.config import ScoreConfig
from nasfast.search.config import SearchConfig
from nasfast.settings.checks import check_device
from nasfast.settings.data import DataConfig, check_policy
from nasfast.settings.retrain import RetrainConfig
from nasfast.settings.supernet import MethodName, SupernetConfig, default_lr
from nasfast.settings.train import TrainConfig
from nasfast.spaces import named_space


@dataclass(frozen=True)
class SpaceConfig(ConfigBase):
    """The search space of a run.

    Attributes:
        name: `mobilenet_v2`, `mobilenet_v3`, `shufflenet_v2`, `nas_bench_macro`, `digits_macro`, `digits_mini`, or the
            path of a YAML file.
        variant: `bnnas` is the released BN-NAS configuration of `mobilenet_v2`.
        resolution: height and width of the images in pixels; null takes the space's.
    """

    name: str = "mobilenet_v2"
    variant: str | None = None
    resolution: int | None = None


@dataclass(frozen=True)
class RunConfig(ConfigBase):
    """All settings of a run; the resolved form is saved as config.yaml in the run directory.

    Attributes:
        out: run directory.
        seed: seed of the weights, paths, data order, augmentation and search.
        device: `auto`, `cpu` or `cuda`.
        threads: number of CPU threads in every stage; 0 takes torch's choice. Bit-identical repeats need the same
            number.
        method: `dinas`, `dinas_paper` (as its paper describes it), or a baseline: `bnnas`, `fairnas`, `spos`.
        space: the search space.
        data: the images and how they are fed.
        supernet: overrides of the method's preset.
        train: training of the supernet.
        score: the score that ranks architectures.
        recalibration_batches: number of batches for BN statistics where paths are scored by accuracy (fairnas, spos).
        search: limits and search method.
        retrain: training of the chosen architectures.
        track: where metrics go besides metrics.jsonl and TensorBoard: any of `wandb`, `mlflow`. Each needs its package;
            a failure is a warning, and the training goes on.
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
    track: tuple[Literal["wandb", "mlflow"], ...] = ()

    def _check_values(self) -> None:
        if self.threads < 0 or self.seed < 0:
            raise ValueError(f"threads and seed must not be negative, got threads={self.threads}, seed={self.seed}")
        if self.recalibration_batches < 1:
            raise ValueError(f"recalibration_batches must be at least 1, got {self.recalibration_batches}")
        check_device(self.device)
        check_policy(self.data.loader, self.retrain.auto_augment)

    def resolved(self) -> RunConfig:
        """The same settings, with each null that the method's preset decides replaced by its value.

        Raises:
            ConfigError: the learning rate depends on the space, and that cannot be read.
        """
        lr = self.train.lr
        if lr is None:
            # whichever variant, resolution and classes: they do not change on which side of DEEP_LAYERS a space is
            lr = default_lr(self.supernet.preset(self.method).trainable, len(named_space(self.space.name)))
        search_seed = self.seed if self.search.seed is None else self.search.seed
        return self.replace(
            supernet=self.supernet.resolved(self.method),
            train=self.train.replace(lr=lr),
            score=self.score.resolved(self.method),
            search=self.search.replace(seed=search_seed),
        )

    @property
    def run_dir(self) -> Path:
        """The run directory as a path."""
        return Path(self.out)

    @property
    def holds_out(self) -> bool:
        """Whether some of the training images are kept out of supernet training."""
        return self.supernet.preset(self.method).hold_out

    @property
    def torch_device(self) -> str:
        """The device to use, `cpu` or `cuda`.

        Raises:
            ConfigError: `device` is cuda and torch sees no GPU.
        """
        # imported here, because it imports torch, and help must not wait for that
        from nasfast.runtime.device import torch_device

        return torch_device(self.device)
