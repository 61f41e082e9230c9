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
from nasfast.indicators.registry import configured_score, gives_table
from nasfast.indicators.table import REFINED_FILE, TABLE_FILE, IndicatorTable, TableError
from nasfast.pipeline.inputs import Inputs, read_inputs, read_layers
from nasfast.pipeline.run import Run, log_stage, read_result
from nasfast.search import Candidate, History, Limits, evolve, pareto_front, run_search, save_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.settings import SPACE_FILE, RunConfig
from nasfast.spaces import SearchSpace

_LOG = logging.getLogger(__name__)


def score_untrained(run: Run, *, num_classes: int | None = None) -> IndicatorTable:
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
    run.check_open()
    started, cfg, settings, file = time.monotonic(), run.cfg, run.cfg.score, run.dir / TABLE_FILE
    if cfg.supernet.activation is not None:
        raise ConfigError("supernet.activation is that of a supernet, and this trains none: set it in the space's file")
    space = _untrained_space(cfg, num_classes)
    run.check_settings(supernet=False)
    Inputs.checked(cfg, space)
    meta = {"seed": cfg.seed, "settings": cfg.score_settings}
    with contextlib.suppress(FileNotFoundError, TableError):  # a damaged table is computed again
        table = IndicatorTable.load(file)
        if table.space == space and {key: table.meta.get(key) for key in meta} == meta:
            return table
    from nasfast.indicators.scores import untrained_table  # imports torch, as below
    from nasfast.runtime.device import use_threads

    use_threads(cfg.threads)
    table = untrained_table(settings.label, space, structure=settings.structure or 0.0, seed=cfg.seed, meta=meta)
    run.save_space(space)
    table.save(file)
    run.save_config(search=False)
    log_stage("score", started, f"{settings.words}, nothing was trained")
    return table


def _untrained_space(cfg: RunConfig, num_classes: int | None) -> SearchSpace:
    """The space of the settings; where `num_classes` is None, with the classes of a space in the run directory."""
    space, path = cfg.space.get(num_classes), cfg.run_dir / SPACE_FILE
    if not path.exists():
        if num_classes is None:
            _LOG.warning(
                "the classifier has %d classes, as the space says: --num_classes N makes it yours", space.num_classes
            )
        return space
    saved = read_layers(cfg.run_dir)
    if num_classes is None:
        space = space.replace(num_classes=saved.num_classes)
    if saved.fingerprint != space.fingerprint:
        changes = difference(saved.to_dict(), space.to_dict())
        raise ConfigError(f"{path} is another space: {changes}; choose another --out")
    return space


def search(run: Run) -> list[Candidate]:
    """Write archs.json: the best architectures under the limits, and the Pareto front where scores are additive.

    Raises:
        FileNotFoundError: the stage before has not run.
        InfeasibleConstraintError: no architecture meets a limit; the text gives the smallest attainable value.
        ConfigError, TableError: a table cannot be used; that of scores has another score, or is damaged.
        AccuracyError: `search.refine` is not a file of accuracies of the space.
    """
    run.check_open()
    started, cfg, settings, inputs = time.monotonic(), run.cfg, run.cfg.search, read_inputs(run.cfg)
    space, limits, front, fronts = inputs.space, inputs.limits, [], []
    for sentence in limits.met_by_all(space):
        _LOG.info("%s", sentence)
    has_table = gives_table(cfg.score)
    if has_table:
        table = _load_table(cfg)
        history = run.dir / "history.jsonl" if settings.method == "evolution" else None
        candidates = run_search(table, space, settings, history=history)
        # the fronts are of the whole space, and their points have the costs by all tables, as candidates have
        free = Limits(tables=tuple((cost, None) for cost, _ in limits.tables), allow_identity=limits.allow_identity)
        front_against = functools.partial(pareto_front, table, space, limits=free)
        front = front_against()
        fronts = [front_against(against=cost) for cost, _ in limits.tables]
    else:
        candidates = _search_paths(cfg, space)
        # what refined an earlier search says nothing about this one
        (run.dir / REFINED_FILE).unlink(missing_ok=True)
    save_candidates(
        run.dir / ARCHS_FILE,
        space,
        candidates,
        limits=limits,
        pareto=front,
        table_fronts=fronts,
        settings=settings,
        scored_with=None if has_table else cfg.score_settings,
    )
    run.save_config(search=False)
    proof = "highest score proven" if candidates[0].optimal else candidates[0].status
    log_stage("search", started, f"{space.cardinality:,.0f} architectures, {proof}")
    return candidates


def _search_paths(cfg: RunConfig, space: SearchSpace) -> list[Candidate]:
    """The best by evolution, which scores each path by itself; history.jsonl has the scores."""
    from nasfast.pipeline.evidence import load_evidence  # imports torch

    evidence, checkpoint = load_evidence(cfg, space)
    # the name has all that a score depends on, so that scores of another supernet are not taken for this one's
    scorer = f"accuracy of {checkpoint.digest}, recalibration {cfg.recalibration_batches}"
    score = configured_score(cfg.score)
    if score.name != "recalibrated_accuracy":
        scorer = f"{score.name} of {checkpoint.digest}, {cfg.score.images} images"
    history = History(cfg.run_dir / "history.jsonl", space, scorer=scorer)
    return evolve(space, functools.partial(score.function, evidence), cfg.search, history=history)


def _load_table(cfg: RunConfig) -> IndicatorTable:
    """The table of the score stage, refined if `search.refine` is given; refined.json is what the search had then."""
    path, refined_path, name = cfg.run_dir / TABLE_FILE, cfg.run_dir / REFINED_FILE, cfg.score.label
    command = f"nasfast score --out {cfg.out}"
    table = read_result(path, IndicatorTable.load, command)
    if (score := table.meta.get("score", name)) != name:
        raise ConfigError(
            f"{path} has the score {score!r}, the settings say {name!r}: run `{command}` with these settings first"
        )
    if cfg.search.refine is None:
        refined_path.unlink(missing_ok=True)
        return table
    from nasfast.indicators.refine import refine  # imports scipy.stats, which takes half a second

    refinement = refine(table, read_accuracies(cfg.search.refine, table.space), seed=cfg.seed)
    _LOG.info("%s", refinement)
    refinement.table.save(refined_path)
    return refinement.table
