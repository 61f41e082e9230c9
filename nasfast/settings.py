"""`RunConfig`: all settings of a run. Its fields are the flags of the command line and the keys of the YAML files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nasfast.config import ConfigBase, ConfigError, difference, load_yaml
from nasfast.data import DataConfig
from nasfast.indicators.config import ScoreConfig
from nasfast.indicators.scores import check_score
from nasfast.retrain import RetrainConfig
from nasfast.runtime.device import check_device, torch_device
from nasfast.search import SearchConfig
from nasfast.spaces import SearchSpace
from nasfast.supernet import Supernet
from nasfast.train import CheckpointError, TrainConfig
from nasfast.train.supernet import MethodName, SupernetConfig, default_lr

_LATER = ("out", "device", "threads", "score", "search", "retrain", "recalibration_batches")
_LATER_DATA = ("train", "val", "workers", "max_bad_files", "loader", "prefetch", "cache_dir")
"""Settings, and settings of `data`, that may change when a run resumes: they belong to later stages or the machine."""


@dataclass(frozen=True)
class SpaceConfig(ConfigBase):
    """The search space of a run.

    Attributes:
        name: `mobilenet_v2`, `shufflenet_v2`, `nas_bench_macro`, `digits_mini`, or the path of a YAML file.
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
            raise ValueError(f"threads and seed must not be negative, got threads={self.threads}, seed={self.seed}")
        if self.recalibration_batches < 1:
            raise ValueError(f"recalibration_batches must be at least 1, got {self.recalibration_batches}")
        check_device(self.device)

    def resolved(self) -> RunConfig:
        """The same settings, with each null that the method's preset decides replaced by its value."""
        lr = default_lr(self.supernet.preset(self.method).trainable) if self.train.lr is None else self.train.lr
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
        return torch_device(self.device)


def check_same_run(path: Path, cfg: RunConfig) -> None:
    """Refuse other settings than those that the run directory's supernet was trained with, before replacing any file.

    Settings of later stages and of the machine may differ.

    Args:
        path: config.yaml of the run directory; nothing is checked if it does not exist.
        cfg: the settings of this run.

    Raises:
        CheckpointError: the settings differ.
        ConfigError: the file is damaged, or was written by a version with other methods.
    """
    if not path.exists():
        return
    form = load_yaml(path)
    if form.get("method") == "dinas" and "score" not in form:
        raise ConfigError(
            f"{path} was written by a version in which 'dinas' was the method that is 'dinas_paper' now: write "
            "`method: dinas_paper` there to continue the run unchanged"
        )
    saved, given = RunConfig.load(path).resolved().to_dict(), cfg.resolved().to_dict()
    for form in (saved, given):
        for mapping, keys in ((form, _LATER), (form["data"], _LATER_DATA)):
            for key in keys:
                mapping.pop(key)
    if saved != given:
        raise CheckpointError(
            f"{path} has other settings: {difference(saved, given)}; keep those of the run, or choose another --out"
        )


def check_scoring(cfg: RunConfig, net: Supernet) -> None:
    """Refuse a score that the supernet cannot have, before hours of training.

    Raises:
        ScoreError: there is no such score, or this supernet cannot have it.
        ConfigError: it needs images that the supernet is not trained on, and there are none.
    """
    score = cfg.score.resolved(cfg.method).score
    check_score(score, net)
    if score.held_out and not cfg.holds_out:
        raise ConfigError(
            f"score {score.name!r} needs images that the supernet is not trained on: set supernet.hold_out=true"
        )


def check_search(cfg: RunConfig, space: SearchSpace) -> None:
    """Refuse settings that the search would refuse, before hours of training.

    Raises:
        ConfigError: the search needs additive scores, and the score scores whole paths.
        InfeasibleConstraintError: no architecture meets the limits.
    """
    score = cfg.score.resolved(cfg.method)
    if not score.gives_table and cfg.search.method == "exact":
        raise ConfigError(
            f"search.method='exact' needs additive scores, and {score.name!r} scores whole paths: set "
            "search.method='evolution', or score.distill=true"
        )
    cfg.search.limits.check(space, allow_identity=cfg.search.allow_identity)
