"""The supernet stage: images -> config.yaml, space.yaml, environment.json, metrics and checkpoints/."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import torch

from nasfast.config import ConfigError, difference
from nasfast.measure.doctor import environment
from nasfast.pipeline.check import already_begun, check_same_run, check_scoring
from nasfast.pipeline.inputs import configured_space, saved_space
from nasfast.pipeline.stage import save_config, say, stage
from nasfast.report import at_chance
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.files import read_metrics, write_atomic
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig
from nasfast.spaces import SearchSpace
from nasfast.train import CheckpointError
from nasfast.train.checkpoint import CheckpointFolder
from nasfast.train.supernet import make_supernet, train_supernet

_LOG = logging.getLogger(__name__)


@stage(create=True)
def supernet(cfg: RunConfig, *, resume: bool = False, world: World = SINGLE) -> Path:
    """Train the supernet; writes config.yaml, space.yaml, environment.json, metrics and checkpoints/.

    Args:
        cfg: settings of the run.
        resume: whether to continue from the newest good checkpoint. A run that torchrun starts again continues in any
            case.
        world: the ranks that train together; only rank 0 reads and writes the run directory.

    Returns:
        Path of the final checkpoint.

    Raises:
        ConfigError, DataError: the settings or images cannot be used.
        TrainingDivergedError, CheckpointError, FileExistsError, Terminated, RankError: see `nasfast.train.train`.
    """
    started = time.monotonic()
    space, loader = configured_space(cfg, world=world)
    net, sampler = make_supernet(space, cfg.method, cfg.supernet, seed=cfg.seed)
    check_scoring(cfg, net)
    if world.is_main:
        _prepare(cfg, space, resume=resume, world=world)
    _LOG.info("%s: %d layers, %.3g architectures", space.name, len(space), space.cardinality)
    _LOG.info("%s", net.summary)
    torch.manual_seed(cfg.seed)  # checkpoints have the state of the global generator
    final = train_supernet(
        net, loader, sampler, cfg.train, run_dir=cfg.run_dir, resume=resume, device=cfg.torch_device, world=world
    )
    if world.is_main:
        say("supernet", started, f"{cfg.train.epochs} epochs{_learnt(cfg, space)}")
    return final


def _prepare(cfg: RunConfig, space: SearchSpace, *, resume: bool, world: World) -> None:
    """Check that the run directory can be used, and write the config, the space and the environment."""
    run_dir = cfg.run_dir
    folder = CheckpointFolder(run_dir / "checkpoints", "supernet")
    resume = resume or world.has_begun(folder.stem)
    if folder.paths():
        if not resume:
            raise already_begun(run_dir, "a supernet run", lambda: _check_same_run(cfg, space))
        _check_same_run(cfg, space)
    elif resume:
        _LOG.warning("nothing to resume in %s: starting from the beginning", run_dir)
    save_config(cfg)
    write_atomic(run_dir / SPACE_FILE, space.to_yaml().encode())
    write_atomic(run_dir / "environment.json", (json.dumps(environment(), indent=1) + "\n").encode())


def _learnt(cfg: RunConfig, space: SearchSpace) -> str:
    """How accurate the supernet's paths are; a warning says if it has learnt nothing, for its scores are unproven."""
    top1 = [m["top1"] for m in read_metrics(cfg.run_dir) if m["stage"] == "supernet" and "top1" in m]
    if top1 and at_chance(top1[-1], space.num_classes):
        _LOG.warning(
            "the supernet's training accuracy is at chance (%.1f %%, %d classes): its scores may rank nothing. "
            "Compare with `nasfast rank` or the random baseline, or let more parameters train (supernet.trainable)",
            100 * top1[-1],
            space.num_classes,
        )
    return f", top-1 {top1[-1]:.1%} of paths" if top1 else ""


def _check_same_run(cfg: RunConfig, space: SearchSpace) -> None:
    """Refuse to resume with another space or other settings than those of the run directory."""
    _check_same_space(cfg, space)
    check_same_run(cfg.run_dir / CONFIG_FILE, cfg)


def _check_same_space(cfg: RunConfig, space: SearchSpace) -> None:
    """Refuse to resume with another space than that of the run directory."""
    try:
        saved = saved_space(cfg)
    except (FileNotFoundError, ConfigError) as error:
        # checkpoints have the fingerprint of their space, so they can be compared instead
        CheckpointFolder(cfg.run_dir / "checkpoints", "supernet").latest(fingerprint=space.fingerprint)
        _LOG.warning("%s", error)
        return
    if saved.fingerprint != space.fingerprint:
        changes = difference(saved.to_dict(), space.to_dict())
        raise CheckpointError(
            f"{cfg.run_dir / SPACE_FILE} differs from the space of this run: {changes}; "
            "resume with the same space and images, or choose another --out"
        )
