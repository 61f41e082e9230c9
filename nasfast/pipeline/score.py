"""The score stage: checkpoints/ -> indicators.json; or from the space alone, where the score needs nothing else."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from nasfast.config import ConfigError, difference
from nasfast.indicators.scores import gives_table, score_table, untrained_table
from nasfast.indicators.table import TABLE_FILE, IndicatorTable, TableError
from nasfast.pipeline.check import check_same_run, check_search
from nasfast.pipeline.inputs import evidence_of, saved_space
from nasfast.pipeline.stage import save_config, say, scored_with, stage
from nasfast.runtime.files import write_atomic
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig
from nasfast.spaces import SearchSpace, get_space, read_cost_table

_LOG = logging.getLogger(__name__)


@stage(create=False)
def score(cfg: RunConfig) -> IndicatorTable | None:
    """Write indicators.json.

    Returns:
        The table; None for scores of whole paths that are not distilled, because the search computes those.

    Raises:
        FileNotFoundError, CheckpointError: see `load_supernet`.
        ConfigError, ScoreError, TableError: the supernet cannot have this score, the score is not finite, or the user's
            table cannot be used.
    """
    started = time.monotonic()
    check_same_run(cfg.run_dir / CONFIG_FILE, cfg)
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
        evidence, checkpoint = evidence_of(cfg)
        meta = {"method": cfg.method, "seed": cfg.seed, "step": checkpoint.state["step"], "settings": scored_with(cfg)}
        table = score_table(settings.label, evidence, structure=settings.structure or 0.0, meta=meta)
    table.save(cfg.run_dir / TABLE_FILE)
    save_config(cfg)
    beside = f" + {settings.structure:g} sqrt_size" if settings.structure and settings.table is None else ""
    say("score", started, f"{settings.label}{beside}")
    return table


@stage(create=True)
def score_untrained(cfg: RunConfig, *, num_classes: int | None = None) -> IndicatorTable:
    """Write config.yaml, space.yaml and the indicators.json of a score that needs neither training nor images.

    A table that the same settings gave is kept.

    Args:
        cfg: settings of the run; those of images and of the supernet are not used.
        num_classes: classes of the networks; None takes those of the run directory's space, or the space's own.

    Raises:
        ConfigError: the run directory has another space, or the settings cannot be used.
        CheckpointError: the run directory has a run with other settings.
        ScoreError: the score needs training or images, or a block has no such score.
        InfeasibleConstraintError: no architecture meets the limits.
    """
    started = time.monotonic()
    if cfg.supernet.activation is not None:
        raise ConfigError("supernet.activation is that of a supernet, and this trains none: set it in the space's file")
    space = _untrained_space(cfg, num_classes)
    check_same_run(cfg.run_dir / CONFIG_FILE, cfg, supernet=False)
    check_search(cfg, space)
    settings, file = cfg.score, cfg.run_dir / TABLE_FILE
    meta = {"seed": cfg.seed, "settings": scored_with(cfg)}
    with contextlib.suppress(FileNotFoundError, TableError):  # a damaged table is computed again
        table = IndicatorTable.load(file)
        if table.space == space and {key: table.meta.get(key) for key in meta} == meta:
            return table
    table = untrained_table(settings.label, space, structure=settings.structure or 0.0, seed=cfg.seed, meta=meta)
    write_atomic(cfg.run_dir / SPACE_FILE, space.to_yaml().encode())
    table.save(file)
    save_config(cfg)
    beside = f" + {settings.structure:g} sqrt_size" if settings.structure else ""
    say("score", started, f"{settings.label}{beside}, nothing was trained")
    return table


def _untrained_space(cfg: RunConfig, num_classes: int | None) -> SearchSpace:
    """The space of the settings; where `num_classes` is None, with the classes of a space in the run directory.

    Raises:
        ConfigError: the run directory has another space.
    """
    space = get_space(
        cfg.space.name, num_classes=num_classes, resolution=cfg.space.resolution, variant=cfg.space.variant
    )
    path = cfg.run_dir / SPACE_FILE
    if not path.exists():
        return space
    saved = saved_space(cfg)
    if num_classes is None:
        space = space.replace(num_classes=saved.num_classes)
    if saved.fingerprint != space.fingerprint:
        changes = difference(saved.to_dict(), space.to_dict())
        raise ConfigError(f"{path} is another space: {changes}; choose another --out")
    return space
