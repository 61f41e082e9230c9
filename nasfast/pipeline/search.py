"""The search stage: indicators.json -> archs.json; for a score of whole paths, checkpoints/ -> archs.json."""

from __future__ import annotations

import functools
import logging
import time

from nasfast.config import ConfigError
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.refine import refine
from nasfast.indicators.scores import gives_table, score_of
from nasfast.indicators.table import REFINED_FILE, TABLE_FILE, IndicatorTable, TableError
from nasfast.pipeline.check import check_same_run, check_search, without_supernet
from nasfast.pipeline.inputs import evidence_of, saved_space
from nasfast.pipeline.stage import save_config, say, scored_with, stage
from nasfast.search import Candidate, History, Limits, evolve, pareto_front, run_search, save_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.search.limits import read_limits
from nasfast.settings import CONFIG_FILE, RunConfig

_LOG = logging.getLogger(__name__)


@stage(create=False)
def search(cfg: RunConfig) -> list[Candidate]:
    """Write archs.json: the best architectures under the limits, and the Pareto front where scores are additive.

    Raises:
        FileNotFoundError: the stage before has not run.
        InfeasibleConstraintError: no architecture meets a limit; the text gives the smallest attainable value.
        ConfigError, TableError: a table cannot be used; that of scores has another score, or is damaged.
        AccuracyError: `search.refine` is not a file of accuracies of the space.
    """
    started = time.monotonic()
    check_same_run(cfg.run_dir / CONFIG_FILE, cfg, supernet=not without_supernet(cfg))
    space, run_dir, settings = saved_space(cfg), cfg.run_dir, cfg.search
    check_search(cfg, space)
    limits, front, fronts = read_limits(settings, space), [], []
    for sentence in limits.met_by_all(space, allow_identity=settings.allow_identity):
        _LOG.info("%s", sentence)
    scoring = cfg.score
    if not gives_table(scoring):
        evidence, checkpoint = evidence_of(cfg)
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
        free = Limits(tables=tuple((cost, None) for cost, _ in limits.tables))
        front_against = functools.partial(
            pareto_front, table, space, limits=free, allow_identity=settings.allow_identity
        )
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


def _table(cfg: RunConfig) -> IndicatorTable:
    """The table of the score stage.

    Raises:
        FileNotFoundError, TableError, ConfigError: it is missing, damaged, or of another score.
    """
    path, name = cfg.run_dir / TABLE_FILE, cfg.score.label
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `nasfast score --out {cfg.out}` first")
    try:
        table = IndicatorTable.load(path)
    except TableError as error:
        raise TableError(f"{error}: run `nasfast score --out {cfg.out}` again") from error
    if table.meta.get("score", name) != name:
        given = f"{path} has the score {table.meta['score']!r}, the settings say {name!r}"
        raise ConfigError(f"{given}: run `nasfast score --out {cfg.out}` with these settings first")
    return table


def _searched_table(cfg: RunConfig) -> IndicatorTable:
    """The table of the score stage, refined if `search.refine` is given; refined.json is what the search had then."""
    table, path = _table(cfg), cfg.run_dir / REFINED_FILE
    if cfg.search.refine is None:
        path.unlink(missing_ok=True)
        return table
    refinement = refine(table, read_accuracies(cfg.search.refine, table.space), seed=cfg.seed)
    _LOG.info("%s", refinement)
    refinement.table.save(path)
    return refinement.table
