"""The stages supernet and score: settings in, files out; each reads the files of the one before.

supernet -> checkpoints/   score -> indicators.json
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch

from nasfast.config import ConfigError, difference
from nasfast.indicators.registry import gives_table
from nasfast.indicators.scores import score_table
from nasfast.indicators.table import TABLE_FILE, IndicatorTable
from nasfast.measure.doctor import environment
from nasfast.pipeline.check import already_begun, check_scoring, check_search, check_settings
from nasfast.pipeline.inputs import configured_space, load_evidence
from nasfast.pipeline.searching import label_of
from nasfast.pipeline.stage import save_config, saved_space, say, scored_with, stage
from nasfast.report.evidence import at_chance, training_top1
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.files import CheckpointError, read_metrics, write_atomic
from nasfast.search.limits import read_limits
from nasfast.settings import SPACE_FILE, RunConfig
from nasfast.spaces import SearchSpace, read_cost_table
from nasfast.train.checkpoint import CheckpointFolder
from nasfast.train.supernet import make_supernet, train_supernet

_LOG = logging.getLogger(__name__)


@stage(create=True)
def supernet(cfg: RunConfig, *, resume: bool = False, world: World = SINGLE) -> Path:
    """Train the supernet; writes config.yaml, space.yaml, environment.json, metrics and checkpoints/.

    With `resume`, or where torchrun starts the run again, it continues from the newest good checkpoint. It returns the
    path of the final one.

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
    for sentence in read_limits(cfg.search, space).met_by_all(space):
        _LOG.warning("%s", sentence)
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
            raise already_begun(cfg, "a supernet run", lambda cfg: _check_continues(cfg, space))
        _check_continues(cfg, space)
    elif resume:
        _LOG.warning("nothing to resume in %s: starting from the beginning", run_dir)
    save_config(cfg)
    write_atomic(run_dir / SPACE_FILE, space.to_yaml().encode())
    write_atomic(run_dir / "environment.json", (json.dumps(environment(), indent=1) + "\n").encode())


def _learnt(cfg: RunConfig, space: SearchSpace) -> str:
    """How accurate the supernet's paths are; a warning says if it has learnt nothing, for its scores are unproven."""
    top1 = training_top1(read_metrics(cfg.run_dir))
    if top1 is None:
        return ""
    if at_chance(top1, space.num_classes):
        _LOG.warning(
            "the supernet's training accuracy is at chance (%.1f %%, %d classes): its scores may rank nothing. "
            "Compare with `nasfast rank` or the random baseline, or let more parameters train (supernet.trainable)",
            100 * top1,
            space.num_classes,
        )
    return f", top-1 {top1:.1%} of paths"


def _check_continues(cfg: RunConfig, space: SearchSpace) -> None:
    """Refuse to resume with another space or other settings than those of the run directory."""
    try:
        saved = saved_space(cfg)
    except (FileNotFoundError, ConfigError) as error:
        # checkpoints have the fingerprint of their space, so they can be compared instead
        CheckpointFolder(cfg.run_dir / "checkpoints", "supernet").latest(fingerprint=space.fingerprint)
        _LOG.warning("%s", error)
    else:
        if saved.fingerprint != space.fingerprint:
            changes = difference(saved.to_dict(), space.to_dict())
            raise CheckpointError(
                f"{cfg.run_dir / SPACE_FILE} differs from the space of this run: {changes}; "
                "resume with the same space and images, or choose another --out"
            )
    check_settings(cfg)


@stage(create=False)
def score(cfg: RunConfig) -> IndicatorTable | None:
    """Write indicators.json, and return its table.

    It is None for scores of whole paths that are not distilled, because the search computes those.

    Raises:
        FileNotFoundError, CheckpointError: see `load_supernet`.
        ConfigError, ScoreError, TableError: the supernet cannot have this score, the score is not finite, or the user's
            table cannot be used.
    """
    started = time.monotonic()
    check_settings(cfg)
    check_search(cfg, saved_space(cfg))  # the settings are kept, and a search that takes them would refuse them
    settings = cfg.score
    if not gives_table(settings):
        _LOG.info("%s scores whole paths during the search: no table is written", settings.name)
        return None
    if settings.table is not None:
        costs = read_cost_table(settings.table, saved_space(cfg))
        meta: dict[str, Any] = {"score": settings.label, "settings": scored_with(cfg)}
        table = IndicatorTable.of_costs(saved_space(cfg), costs, meta)
    else:
        evidence, checkpoint = load_evidence(cfg)
        meta = {"method": cfg.method, "seed": cfg.seed, "step": checkpoint.state["step"], "settings": scored_with(cfg)}
        table = score_table(settings.label, evidence, structure=settings.structure or 0.0, meta=meta)
    table.save(cfg.run_dir / TABLE_FILE)
    save_config(cfg)
    say("score", started, label_of(cfg))
    return table
