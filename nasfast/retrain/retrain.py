"""Retraining: one architecture as a plain network in which everything trains, from fresh weights or the supernet's."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nasfast.config import ConfigBase, ConfigError
from nasfast.retrain.export import MODEL_FILE, save_model
from nasfast.runtime.arguments import check_type
from nasfast.runtime.device import torch_device
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.files import answers_from_hex, answers_to_hex, write_atomic
from nasfast.settings import ALL_LR, RetrainConfig
from nasfast.spaces import Arch, ArchSpace, Cost, arch_file_text
from nasfast.supernet import ArchNetwork, Supernet, build, inherit
from nasfast.train import Evaluation, TrainExtras, TrainStage, evaluate, recalibrate_bn
from nasfast.train.batches import as_epochs
from nasfast.train.checkpoint import CheckpointFolder
from nasfast.train.loop import train
from nasfast.train.state import check_new, with_precision

_LOG = logging.getLogger(__name__)

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class RetrainResult(ConfigBase):
    """`result.json` of a retrained network.

    Attributes:
        arch: the architecture.
        macs: MACs per image.
        params: number of parameters.
        top1, top5: validation accuracies from 0 to 1.
        loss: validation cross-entropy in nats.
        epochs: number of epochs that were asked for.
        seconds: wall time of this process's part of the training.
        images: number of validation images.
        correct: on which images the network is right; see `nasfast.runtime.files.answers_to_hex`.
        ranks: number of ranks that shared the images; images are ordered by rank, then as the loader gives them.
        stopped_after: number of epochs after which early stopping ended the training; None if it did not.
        settings: settings of the training.
    """

    arch: Arch
    macs: int
    params: int
    top1: float
    top5: float
    loss: float
    epochs: int
    seconds: float
    images: int
    correct: str
    ranks: int = 1
    stopped_after: int | None = None
    settings: RetrainConfig = RetrainConfig()

    @property
    def right(self) -> np.ndarray:
        """(images,) bool: on which images the network is right."""
        return np.array(answers_from_hex(self.correct, self.images), dtype=bool)


def retrain(
    space: ArchSpace,
    arch: Arch,
    train_loader: object,
    val_loader: object,
    cfg: RetrainConfig = RetrainConfig(),
    *,
    run_dir: str | Path,
    name: str = "best",
    supernet: Supernet | None = None,
    activation: str | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    world: World = SINGLE,
) -> RetrainResult:
    """Train the standalone network of `arch` and write `retrain/NAME/{model.safetensors, config.json, result.json}`.

    Args:
        space: a `SearchSpace`, or a `nasfast.research.cells.space.CellSpace`.
        arch: an architecture of the space.
        train_loader: training images; see `nasfast.train.train`.
        val_loader: validation images.
        cfg: settings of the stage.
        run_dir: the run directory.
        name: name of the sub-folder and of the stage in metrics.
        supernet: the supernet whose weights `cfg.init == "inherit"` takes.
        activation: activation of the blocks of layers that have none of their own; None takes the space's.
        seed: seed of fresh weights and of torch's global generator, whose state the checkpoints have.
        resume: whether to continue from the newest good checkpoint, even with more epochs; see `nasfast.train.train`.
        overwrite: whether to begin anew where there are checkpoints of this network, and delete them.
        device: where to train.
        world: the ranks that train the network together; the loaders give this rank's share of every batch.

    Raises:
        ArchError: `arch` does not belong to `space`.
        TypeError: `space` or `cfg` is of another type.
        ValueError: `cfg.init` is `inherit`, and there is no supernet or the network has cells; or `train_loader` does
            not augment by `cfg.auto_augment`.
        TrainingDivergedError, CheckpointError, RunDirectoryError, FileExistsError, Terminated, RankError: see
            `nasfast.train.train`.
    """
    check_type("space", space, ArchSpace, advice="nasfast.spaces.get_space(NAME) makes one")
    check_type("cfg", cfg, RetrainConfig, advice="make one with RetrainConfig(train=TrainConfig(...))")
    arch = space.check(arch)
    _check_augments(train_loader, cfg)
    cfg = _with_lr(cfg)
    if cfg.init == "inherit":
        network = _inherited(space, arch, supernet, train_loader, device)
    else:
        network = build(space, arch, activation=activation, init=cfg.init, seed=seed)
    network.images = getattr(val_loader, "images", None)  # a loader of another kind does not say

    evaluation = functools.partial(evaluate, loader=val_loader, device=device, world=world)
    folder = Path(run_dir) / "retrain" / name
    with world.lock(run_dir):
        earlier = _earlier_result(folder, arch) if world.is_main else None
        torch.manual_seed(seed)
        started = time.monotonic()
        stage = TrainStage(
            f"retrain/{name}",
            run_dir,
            f"{space.fingerprint}/{arch}",
            settings={**_result_settings(cfg, seed), "activation": network.activation},
            prefix=_prefix(name, arch),
            resume=resume,
            overwrite=overwrite,
            extends=True,
        )
        cfg = cfg.replace(train=with_precision(cfg.train, stage, torch_device(device)))
        extras = TrainExtras(cfg.ema, cfg.patience, mixing(cfg, space.num_classes))
        final = train(
            network, train_loader, cfg.train, stage, evaluate=evaluation, extras=extras, device=device, world=world
        )
        accuracy = evaluation(network)
        done = CheckpointFolder.step_of(final) // len(as_epochs(train_loader))
        result = _result(arch, space.cost(arch), accuracy, cfg, done, time.monotonic() - started, world)
        return _saved(network, result, earlier, folder) if world.is_main else result


def check_not_begun(run_dir: str | Path, name: str, arch: Arch, cfg: RetrainConfig, *, seed: int) -> None:
    """Refuse a retraining that has checkpoints, as `retrain` does without `resume`, before anything is loaded."""
    folder = CheckpointFolder(Path(run_dir) / "checkpoints", _prefix(name, arch))
    settings = {"train": _with_lr(cfg).train.result_settings, **_result_settings(cfg, seed)}
    unknown = ("stage", "batches_per_epoch", "activation")
    check_new(folder, f"retrain/{name}", settings, extends=True, unknown=unknown)


def _with_lr(cfg: RetrainConfig) -> RetrainConfig:
    return cfg if cfg.train.lr is not None else cfg.replace(train=cfg.train.replace(lr=ALL_LR))


def _result_settings(cfg: RetrainConfig, seed: int) -> dict[str, Any]:
    """What the result depends on besides `train` and the network."""
    return {"init": cfg.init, "seed": seed, **cfg.recipe}


def _prefix(name: str, arch: Arch) -> str:
    return f"retrain-{name}-{arch_file_text(arch)}"


def _saved(network: ArchNetwork, result: RetrainResult, earlier: RetrainResult | None, folder: Path) -> RetrainResult:
    """Write the network and its result; returns the earlier one if a finished retraining was only resumed."""
    save_model(network, folder / MODEL_FILE)
    if earlier is not None and result.replace(seconds=earlier.seconds, settings=earlier.settings) == earlier:
        return earlier
    write_atomic(folder / RESULT_FILE, (json.dumps(result.to_dict(), indent=1) + "\n").encode())
    return result


def _check_augments(loader: object, cfg: RetrainConfig) -> None:
    """Refuse a loader that does not augment as the settings say."""
    if cfg.auto_augment is not None and getattr(loader, "policy", None) != cfg.auto_augment:
        raise ValueError(
            f"retrain.auto_augment={cfg.auto_augment!r} is what the loader does, and this one does not: make it with "
            f"nasfast.data.make_loader(..., policy={cfg.auto_augment!r}), or leave auto_augment out"
        )


def mixing(cfg: RetrainConfig, num_classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """What blends the images (N, C, H, W) and labels (N,) of a batch: torchvision's MixUp, CutMix, or one by chance.

    The labels become probabilities (N, num_classes). None if the settings ask for neither.
    """
    if cfg.mixup is None and cfg.cutmix is None:
        return None
    from torchvision.transforms import v2  # imports all models of torchvision, which takes seconds

    transforms: list[v2.Transform] = []
    if cfg.mixup is not None:
        transforms.append(v2.MixUp(alpha=cfg.mixup, num_classes=num_classes))
    if cfg.cutmix is not None:
        transforms.append(v2.CutMix(alpha=cfg.cutmix, num_classes=num_classes))
    return v2.RandomChoice(transforms) if len(transforms) == 2 else transforms[0]


def _inherited(
    space: ArchSpace, arch: Arch, supernet: Supernet | None, train_loader: object, device: str
) -> ArchNetwork:
    """The network with the supernet's weights on its device, with BatchNorm statistics of its own path."""
    if not space.LAYERWISE:
        raise ValueError(
            "retrain.init='inherit': networks of cells begin with fresh weights; set e.g. retrain.init=orthogonal"
        )
    if supernet is None:
        raise ValueError("retrain.init='inherit' needs the trained supernet: run the supernet stage first")
    network = inherit(supernet, arch).to(device)
    assert isinstance(network, ArchNetwork)  # that of a space that has one
    recalibrate_bn(network, train_loader, device=device)
    return network


def _result(
    arch: Arch, cost: Cost, accuracy: Evaluation, cfg: RetrainConfig, epochs: int, seconds: float, world: World
) -> RetrainResult:
    """The result of a training of so many epochs, with the images of all ranks."""
    return RetrainResult(
        arch=arch,
        macs=cost.macs,
        params=cost.params,
        top1=accuracy.top1,
        top5=accuracy.top5,
        loss=accuracy.loss,
        epochs=cfg.train.epochs,
        seconds=seconds,
        images=accuracy.images,
        correct=answers_to_hex(b"".join(world.all_gather(bytes(accuracy.correct)))),
        ranks=world.size,
        stopped_after=epochs if epochs < cfg.train.epochs else None,
        settings=cfg.network_settings,
    )


def _earlier_result(folder: Path, arch: Arch) -> RetrainResult | None:
    """The result of the same architecture in `folder`, if there is one.

    A network of another architecture is moved to retrain-superseded/.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    try:
        earlier = RetrainResult.load(path)
    except ConfigError as error:
        _LOG.warning("%s; it is written again", error)
        return None
    if earlier.arch == arch:
        return earlier
    superseded = folder.parent.with_name("retrain-superseded")
    target = superseded / f"{folder.name}-{arch_file_text(earlier.arch)}"
    while target.exists():
        target = target.with_name(target.name + "+")
    superseded.mkdir(exist_ok=True)
    folder.rename(target)
    _LOG.info("%s gets another architecture now; the earlier network is in %s", folder, target)
    return None
