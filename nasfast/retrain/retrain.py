"""Retraining: one Arch as a plain network, nothing frozen, from fresh weights or the supernet's."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from nasfast.config import ConfigBase, ConfigError
from nasfast.retrain.export import MODEL_FILE, save_model
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.files import write_atomic
from nasfast.runtime.lock import run_lock
from nasfast.spaces import Arch, ArchSpace, SearchSpace, format_arch
from nasfast.supernet import Supernet, build, inherit
from nasfast.train import TrainConfig, evaluate, recalibrate_bn
from nasfast.train.loop import train
from nasfast.train.supernet import default_lr

_LOG = logging.getLogger(__name__)

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class RetrainConfig(ConfigBase):
    """The retraining stage.

    Attributes:
        init: fresh weights by `orthogonal`, `delta_orthogonal`, `gaussian` or `he`, or `inherit` the supernet's.
        top_k: how many of the best architectures to retrain.
        random_architectures: how many random architectures of about the best one's MACs are retrained to compare with.
            Of one alone nobody knows whether it is a good or a bad one of its cost; 0 for no comparison.
        parallel: with several processes, `batch`: all of them train each network, with a share of every batch; or
            `networks`: each trains networks of its own, as a single process would.
        train: the training settings.
    """

    init: Literal["orthogonal", "delta_orthogonal", "gaussian", "he", "inherit"] = "orthogonal"
    top_k: int = 1
    random_architectures: int = 3
    parallel: Literal["batch", "networks"] = "batch"
    train: TrainConfig = TrainConfig(epochs=20, lr=0.1)

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.random_architectures < 0:
            raise ValueError(f"random_architectures must not be negative, got {self.random_architectures}")


@dataclass(frozen=True)
class RetrainResult(ConfigBase):
    """`result.json` of a retrained network.

    Attributes:
        arch: the architecture.
        macs: per image.
        params: parameters.
        top1, top5: validation accuracies in [0, 1].
        loss: validation cross-entropy in nats.
        epochs: trained.
        seconds: wall time of this process's part of the training.
        images: validated on; 0 in results of earlier versions, which have no record of single images.
        correct: hexadecimal digits whose bits say, image by image, whether the network is right (numpy.packbits).
        ranks: that shared the images: their order is by rank, then by that of the loader.
    """

    arch: Arch
    macs: int
    params: int
    top1: float
    top5: float
    loss: float
    epochs: int
    seconds: float
    images: int = 0
    correct: str = ""
    ranks: int = 1


def _initial_network(
    space: ArchSpace,
    arch: Arch,
    cfg: RetrainConfig,
    train_loader: object,
    *,
    supernet: Supernet | None,
    activation: str | None,
    seed: int,
    device: str,
) -> nn.Module:
    """The standalone network of `arch` before its training: inherited from the supernet, or with fresh weights."""
    if cfg.init == "inherit":
        if not isinstance(space, SearchSpace):
            raise ValueError("retrain.init='inherit': networks of cells begin with fresh weights, e.g. 'orthogonal'")
        if supernet is None:
            raise ValueError("retrain.init='inherit' needs the trained supernet: run the supernet stage first")
        network = inherit(supernet, arch).to(device)
        recalibrate_bn(network, train_loader, device=device)
        return network
    return build(space, arch, activation=activation, init=cfg.init, seed=seed)


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
    device: str = "cpu",
    world: World = SINGLE,
) -> RetrainResult:
    """Train the standalone network of `arch` and write `retrain/NAME/{model.safetensors, arch.json, result.json}`.

    Args:
        space: a `SearchSpace`, or a `nasfast.cells.CellSpace`.
        arch: one of its architectures.
        name: of the sub-folder and of the stage in metrics.
        supernet: whose weights `cfg.init == "inherit"` takes.
        activation: of the blocks; None takes the space's.
        seed: of fresh weights, and of torch's global generator, which becomes part of the checkpoints.
        world: the ranks that train the network together; the loaders give this rank's share of every batch.

    Raises:
        ArchError: `arch` does not belong to `space`.
        ValueError: `inherit` without a supernet, or for a network of cells.
        TrainingDivergedError, CheckpointError, RunDirectoryError, FileExistsError, Terminated, RankError: see
            `nasfast.train.train`.
    """
    arch = space.check(arch)
    settings = cfg.train if cfg.train.lr is not None else cfg.train.replace(lr=default_lr("all"))
    network = _initial_network(
        space, arch, cfg, train_loader, supernet=supernet, activation=activation, seed=seed, device=device
    )
    evaluation = partial(evaluate, loader=val_loader, device=device, world=world)
    folder = Path(run_dir) / "retrain" / name
    with run_lock(run_dir) if world.leads else nullcontext():
        earlier = _earlier_result(folder, arch) if world.is_main else None
        torch.manual_seed(seed)
        started = time.monotonic()
        train(
            network,
            train_loader,
            settings,
            stage=f"retrain/{name}",
            run_dir=run_dir,
            fingerprint=f"{space.fingerprint}/{arch}",
            evaluate=evaluation,
            settings={"init": cfg.init, "seed": seed, "activation": network.activation},
            prefix=f"retrain-{name}-{_file_text(arch)}",
            resume=resume,
            device=device,
            world=world,
        )
        measured, cost = evaluation(network), space.cost(arch)
        result = RetrainResult(
            arch=arch,
            macs=cost.macs,
            params=cost.params,
            top1=measured.top1,
            top5=measured.top5,
            loss=measured.loss,
            epochs=settings.epochs,
            seconds=time.monotonic() - started,
            images=measured.images,
            correct=_packed(world.gather(bytes(measured.correct))),
            ranks=world.size,
        )
        if not world.is_main:
            return result
        save_model(network, folder / MODEL_FILE)
        if earlier is not None and result.replace(seconds=earlier.seconds) == earlier:
            return earlier  # a finished retraining was resumed
        write_atomic(folder / RESULT_FILE, (json.dumps(result.to_dict(), indent=1) + "\n").encode())
        return result


def _packed(shares: Sequence[bytes]) -> str:
    """Bits of all ranks' images, one byte 0 or 1 for each, as hexadecimal digits."""
    return np.packbits(np.frombuffer(b"".join(shares), dtype=np.uint8)).tobytes().hex()


def _earlier_result(folder: Path, arch: Arch) -> RetrainResult | None:
    """What `folder` holds of the same architecture; a network of another one is moved to retrain-superseded/ first."""
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
    target = superseded / f"{folder.name}-{_file_text(earlier.arch)}"
    while target.exists():
        target = target.with_name(target.name + "+")
    superseded.mkdir(exist_ok=True)
    folder.rename(target)
    _LOG.info("%s holds another architecture now; the earlier network is in %s", folder, target)
    return None


def _file_text(arch: Arch) -> str:
    return format_arch(arch).replace(" ", "_")
