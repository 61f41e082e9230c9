"""Supernet training: the presets of the methods, and `train_supernet`."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from nasfast.config import ConfigError, dump_yaml
from nasfast.runtime.arguments import check_type
from nasfast.runtime.device import torch_device
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.files import write_atomic
from nasfast.settings import CONFIG_FILE, SPACE_FILE, SupernetConfig, TrainConfig, default_lr
from nasfast.spaces import SAMPLERS, Sampler, SearchSpace, read_space
from nasfast.supernet import Init, InitScheme, Supernet
from nasfast.supernet.init import SCHEMES, aligned_scheme
from nasfast.train.batches import to_learn_from
from nasfast.train.checkpoint import CheckpointFolder
from nasfast.train.config import TrainStage
from nasfast.train.loop import train
from nasfast.train.state import with_precision

_LOG = logging.getLogger(__name__)

# What the stages after the supernet write to a run directory.
_LATER_FILES = (
    "indicators.json",
    "refined.json",
    "history.jsonl",
    "archs.json",
    "retrain",
    "rank.json",
    "report.html",
)


def make_supernet(
    space: SearchSpace, method: str, cfg: SupernetConfig = SupernetConfig(), *, seed: int = 0
) -> tuple[Supernet, Sampler]:
    """The supernet and the sampler of a method, with the overrides of `cfg`."""
    chosen = cfg.preset(method)
    indicators = chosen.layer_indicators
    init: Init | InitScheme = chosen.init
    if chosen.init == "aligned":
        overrides: dict[str, Any] = {**cfg.aligned}
        scheme = replace(aligned_scheme(len(space.layers)), **overrides)
        init = "aligned" if scheme == SCHEMES["aligned"] else scheme
    net = Supernet(space, init=init, activation=cfg.activation, layer_indicators=indicators, seed=seed)
    net.freeze(chosen.trainable, classifier=chosen.classifier)
    return net, SAMPLERS[chosen.sampler](space, seed=seed, layer_indicators=indicators)


def train_supernet(
    net: Supernet,
    loader: object,
    sampler: Sampler,
    cfg: TrainConfig | None = None,
    *,
    run_dir: str | Path = "runs/supernet",
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    world: World = SINGLE,
) -> Path:
    """Train a supernet along sampled paths; `Supernet.freeze` chooses what trains.

    `run_dir` is then a run directory of the command line: `nasfast score --out RUN_DIR` goes on from there. Its
    config.yaml has what this call knows: the supernet, the training, and the images if `loader` was made from a
    `DataConfig`; for others, give the commands that need images flags such as --data.train. Scores of paths need images
    that the supernet was not trained on: make the loader by `make_loaders(..., hold_out=True)`.

    Args:
        net: the supernet; it is moved to `device`.
        loader: a `nasfast.data.Loader`, or any sized iterable of (images (N, C, H, W), labels (N,)).
        sampler: draws the paths of every step; its candidates must be those of `net`.
        cfg: the stage's settings; None takes the defaults.
        run_dir: folder that gets checkpoints/, metrics.jsonl and tensorboard/, and space.yaml and config.yaml unless it
            has them.
        resume: whether to continue from the newest good checkpoint of `run_dir`.
        overwrite: whether to replace a supernet that `run_dir` has, with its space.yaml and config.yaml. What later
            stages wrote, such as indicators.json, archs.json and retrain/, stays and is still that of the old supernet
            until those stages run again; a warning names it.
        device: where to train.
        world: the ranks that train together (`nasfast.runtime.distributed.start`), each with its share of every batch.

    Returns:
        Path of the final checkpoint.

    Raises:
        ValueError: the sampler and the supernet disagree about layer indicators or the space, or the loader has no
            batch.
        TypeError: an argument is of another type.
        ConfigError: `run_dir` has no checkpoints, but a space.yaml of another space or a damaged one.
        TrainingDivergedError, CheckpointError, FileExistsError, Terminated, RankError: see `nasfast.train.train`.
    """
    check_type("net", net, Supernet, advice="nasfast.Supernet(space) makes one")
    check_type("sampler", sampler, Sampler, advice="nasfast.spaces.SAMPLERS[NAME](space) makes one")
    cfg = TrainConfig() if cfg is None else cfg
    check_type("cfg", cfg, TrainConfig, advice="make one with TrainConfig(epochs=...)")
    if sampler.space.fingerprint != net.space.fingerprint:
        raise ValueError(
            f"sampler draws from space {sampler.space.name!r}, the supernet has space {net.space.name!r}: make both "
            "with the same space"
        )
    if sampler.layer_indicators and not net.layer_indicators:
        raise ValueError(
            "sampler draws layer-indicator paths, the supernet has none: build it with layer_indicators=True"
        )
    if cfg.lr is None:
        cfg = cfg.replace(lr=default_lr(net.summary.trainable, len(net.space.layers)))
    stage = TrainStage(
        "supernet",
        run_dir,
        net.space.fingerprint,
        settings={"trainable": net.summary.trainable, "roles": list(net.summary.by_role)},
        resume=resume,
        overwrite=overwrite,
    )
    # refused before anything is written or replaced
    to_learn_from(loader)
    device = torch_device(device)
    cfg = with_precision(cfg, stage, device)
    with world.lock(run_dir):
        if world.is_main:
            _describe(net, loader, sampler, cfg, stage)
        return train(net, loader, cfg, stage, sampler=sampler, device=device, world=world)


def _describe(net: Supernet, loader: object, sampler: Sampler, cfg: TrainConfig, stage: TrainStage) -> None:
    """Write space.yaml and config.yaml, which the commands that go on read, where there are none or they are replaced.

    A run directory that has checkpoints is left as it is: `train` refuses it, or continues it.
    """
    run_dir = Path(stage.run_dir)
    if CheckpointFolder(run_dir / "checkpoints", stage.file_prefix).paths() and not stage.overwrite:
        return
    space, config = run_dir / SPACE_FILE, run_dir / CONFIG_FILE
    if stage.overwrite:
        if stale := [name for name in _LATER_FILES if (run_dir / name).exists()]:
            _LOG.warning(
                "%s: overwrite replaces the supernet only: %s are of the one before until their stages run again, so "
                "delete them or run those stages",
                run_dir,
                ", ".join(stale),
            )
    elif space.exists() and (saved := read_space(space)).fingerprint != net.space.fingerprint:
        raise ConfigError(
            f"{space} is of space {saved.name!r}, the supernet has space {net.space.name!r} with other contents or "
            "name: choose another run_dir, or replace the file by overwrite=True"
        )
    trainable = net.summary.trainable
    config_data: dict[str, Any] = {
        "out": str(run_dir),
        "space": {"name": str(space)},
        "supernet": {
            "init": net.init if isinstance(net.init, str) else None,
            "layer_indicators": net.layer_indicators,
            "trainable": trainable,
            "classifier": trainable == "all" or "classifier" in net.summary.by_role,
            "sampler": next((name for name, kind in SAMPLERS.items() if type(sampler) is kind), None),
            "activation": net.activation,
            "hold_out": getattr(loader, "held_out", False),
        },
        "train": cfg.to_dict(),
    }
    if (images := getattr(loader, "config", None)) is not None:
        config_data |= {"seed": getattr(loader, "seed", 0), "data": images.to_dict()}
    for path, text in ((space, net.space.to_yaml()), (config, dump_yaml(config_data))):
        if stage.overwrite or not path.exists():
            write_atomic(path, text.encode())
