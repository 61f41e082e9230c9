"""Supernet training: the presets of the methods, and `train_supernet`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from nasfast.runtime import moved
from nasfast.runtime.distributed import SINGLE, World
from nasfast.settings.supernet import SupernetConfig, default_lr
from nasfast.settings.train import TrainConfig
from nasfast.spaces import SAMPLERS, Sampler, SearchSpace
from nasfast.supernet import Init, InitScheme, Supernet
from nasfast.supernet.init import SCHEMES
from nasfast.train.config import TrainStage
from nasfast.train.loop import train


def make_supernet(
    space: SearchSpace, method: str, cfg: SupernetConfig = SupernetConfig(), *, seed: int = 0
) -> tuple[Supernet, Sampler]:
    """The supernet and the sampler of a method, with the overrides of `cfg`.

    Raises:
        ValueError: unknown method.
    """
    chosen = cfg.preset(method)
    indicators = chosen.layer_indicators
    init: Init | InitScheme = chosen.init
    if cfg.shares:
        scheme = SCHEMES["aligned"]
        init = replace(
            scheme,
            alignment=cfg.shares.get("alignment", scheme.alignment),
            linear_share=cfg.shares.get("linear_share", scheme.linear_share),
        )
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
    device: str = "cpu",
    world: World = SINGLE,
) -> Path:
    """Train a supernet along sampled paths; `Supernet.freeze` chooses what trains.

    Args:
        net: the supernet; it is moved to `device`.
        loader: a `nasfast.data.Loader`, or any sized iterable of (images (N, C, H, W), labels (N,)).
        sampler: draws the paths of every step; its candidates must be those of `net`.
        cfg: the stage's settings; None takes the defaults.
        run_dir: folder that gets checkpoints/, metrics.jsonl and tensorboard/.
        resume: whether to continue from the newest good checkpoint of `run_dir`.
        device: where to train.
        world: the ranks that train together (`nasfast.runtime.distributed.start`), each with its share of every batch.

    Returns:
        Path of the final checkpoint.

    Raises:
        ValueError: the sampler and the supernet disagree about layer indicators or the space.
        TrainingDivergedError, CheckpointError, FileExistsError, Terminated, RankError: see `nasfast.train.train`.
    """
    if sampler.space.fingerprint != net.space.fingerprint:
        raise ValueError(
            f"sampler draws from space {sampler.space.name!r}, the supernet has space {net.space.name!r}: make both "
            "with the same space"
        )
    if sampler.layer_indicators and not net.layer_indicators:
        raise ValueError(
            "sampler draws layer-indicator paths, the supernet has none: build it with layer_indicators=True"
        )
    cfg = cfg or TrainConfig()
    if cfg.lr is None:
        cfg = cfg.replace(lr=default_lr(net.summary.trainable))
    return train(
        net,
        loader,
        cfg,
        TrainStage(
            "supernet",
            run_dir,
            net.space.fingerprint,
            settings={"trainable": net.summary.trainable, "roles": list(net.summary.by_role)},
            resume=resume,
        ),
        sampler=sampler,
        device=device,
        world=world,
    )


__getattr__ = partial(moved.find, __name__)
