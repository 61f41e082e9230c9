"""The stage search, and the table of a score that needs neither training nor images. No torch where a table is saved.

indicators.json -> archs.json
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time

from nasfast.config import ConfigError, difference
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.registry import gives_table, score_of
from nasfast.indicators.table import REFINED_FILE, TABLE_FILE, IndicatorTable, TableError
from nasfast.pipeline.check import check_search, check_settings, without_supernet
from nasfast.pipeline.stage import result_of, save_config, saved_space, say, scored_with, stage
from nasfast.runtime.files import write_atomic
from nasfast.search import Candidate, History, Limits, evolve, pareto_front, run_search, save_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.search.limits import read_limits
from nasfast.settings import SPACE_FILE, RunConfig
from nasfast.spaces import SearchSpace, get_space

_LOG = logging.getLogger(__name__)


@stage(create=True, threads=False)
def score_untrained(cfg: RunConfig, *, num_classes: int | None = None) -> IndicatorTable:
    """Write config.yaml, space.yaml and the indicators.json of a score that needs neither training nor images.

    A table that the same settings gave is kept. Settings of images and of the supernet are not used, but images must be
    those of networks that are trained already. `num_classes` of None takes the classes of the run directory's space, or
    the space's own.

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
    check_settings(cfg, supernet=False)
    check_search(cfg, space)
    settings, file = cfg.score, cfg.run_dir / TABLE_FILE
    meta = {"seed": cfg.seed, "settings": scored_with(cfg)}
    with contextlib.suppress(FileNotFoundError, TableError):  # a damaged table is computed again
        table = IndicatorTable.load(file)
        if table.space == space and {key: table.meta.get(key) for key in meta} == meta:
            return table
    # both import torch
    from nasfast.indicators.scores import untrained_table
    from nasfast.runtime.device import use_threads

    use_threads(cfg.threads)
    table = untrained_table(settings.label, space, structure=settings.structure or 0.0, seed=cfg.seed, meta=meta)
    write_atomic(cfg.run_dir / SPACE_FILE, space.to_yaml().encode())
    table.save(file)
    save_config(cfg)
    say("score", started, f"{label_of(cfg)}, nothing was trained")
    return table


def label_of(cfg: RunConfig) -> str:
    score = cfg.score
    return score.label + (f" + {score.structure:g} sqrt_size" if score.structure and score.table is None else "")


def _untrained_space(cfg: RunConfig, num_classes: int | None) -> SearchSpace:
    """The space of the settings; where `num_classes` is None, with the classes of a space in the run directory."""
    space = get_space(
        cfg.space.name, num_classes=num_classes, resolution=cfg.space.resolution, variant=cfg.space.variant
    )
    path = cfg.run_dir / SPACE_FILE
    if not path.exists():
        if num_classes is None:
            _LOG.warning(
                "the classifier has %d classes, as the space says: --num_classes N makes it yours", space.num_classes
            )
        return space
    saved = saved_space(cfg)
    if num_classes is None:
        space = space.replace(num_classes=saved.num_classes)
    if saved.fingerprint != space.fingerprint:
        changes = difference(saved.to_dict(), space.to_dict())
        raise ConfigError(f"{path} is another space: {changes}; choose another --out")
    return space


@stage(create=False, threads=False)
def search(cfg: RunConfig) -> list[Candidate]:
    """Write archs.json: the best architectures under the limits, and the Pareto front where scores are additive.

    Raises:
        FileNotFoundError: the stage before has not run.
        InfeasibleConstraintError: no architecture meets a limit; the text gives the smallest attainable value.
        ConfigError, TableError: a table cannot be used; that of scores has another score, or is damaged.
        AccuracyError: `search.refine` is not a file of accuracies of the space.
    """
    started = time.monotonic()
    check_settings(cfg, supernet=not without_supernet(cfg))
    space, run_dir, settings = saved_space(cfg), cfg.run_dir, cfg.search
    check_search(cfg, space)
    limits, front, fronts = read_limits(settings, space), [], []
    for sentence in limits.met_by_all(space):
        _LOG.info("%s", sentence)
    scoring = cfg.score
    if not gives_table(scoring):
        from nasfast.pipeline.inputs import load_evidence  # imports torch

        evidence, checkpoint = load_evidence(cfg)
        # the name has all that a score depends on, so that scores of another supernet are not taken for this one's
        scorer = f"accuracy of {checkpoint.digest}, recalibration {cfg.recalibration_batches}"
        if scoring.name != "recalibrated_accuracy":
            scorer = f"{scoring.name} of {checkpoint.digest}, {scoring.images} images"
        history = History(run_dir / "history.jsonl", space, scorer=scorer)
        score_path = functools.partial(score_of(scoring).function, evidence)
        candidates = evolve(space, score_path, settings, history=history)
        # what refined an earlier search says nothing about this one
        (run_dir / REFINED_FILE).unlink(missing_ok=True)
    else:
        table = _searched_table(cfg)
        kept = run_dir / "history.jsonl" if settings.method == "evolution" else None
        candidates = run_search(table, space, settings, history=kept)
        # the fronts are of the whole space, and their points have the costs by all tables, as candidates have
        free = Limits(tables=tuple((cost, None) for cost, _ in limits.tables), allow_identity=limits.allow_identity)
        front_against = functools.partial(pareto_front, table, space, limits=free)
        front = front_against()
        fronts = [front_against(against=cost) for cost, _ in limits.tables]
    save_candidates(
        run_dir / ARCHS_FILE,
        space,
        candidates,
        limits=limits,
        pareto=front,
        table_fronts=fronts,
        settings=settings,
        scored_with=None if gives_table(scoring) else scored_with(cfg),
    )
    save_config(cfg)
    proof = "highest score proven" if candidates[0].optimal else candidates[0].status
    say("search", started, f"{space.cardinality:,.0f} architectures, {proof}")
    return candidates


def _searched_table(cfg: RunConfig) -> IndicatorTable:
    """The table of the score stage, refined if `search.refine` is given; refined.json is what the search had then."""
    path, refined, name = cfg.run_dir / TABLE_FILE, cfg.run_dir / REFINED_FILE, cfg.score.label
    command = f"nasfast score --out {cfg.out}"
    table = result_of(path, IndicatorTable.load, command)
    if (given := table.meta.get("score", name)) != name:
        raise ConfigError(
            f"{path} has the score {given!r}, the settings say {name!r}: run `{command}` with these settings first"
        )
    if cfg.search.refine is None:
        refined.unlink(missing_ok=True)
        return table
    from nasfast.indicators.refine import refine  # imports scipy.stats, which takes half a second

    refinement = refine(table, read_accuracies(cfg.search.refine, table.space), seed=cfg.seed)
    _LOG.info("%s", refinement)
    refinement.table.save(refined)
    return refinement.table
