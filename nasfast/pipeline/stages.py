"""The stages supernet, score and search: settings in, files out; each reads the files of the one before.

supernet -> checkpoints/   score -> indicators.json   search -> archs.json
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from nasfast.config import ConfigError, difference
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.refine import refine
from nasfast.indicators.scores import gives_table, score_of, score_table, untrained_table
from nasfast.indicators.table import REFINED_FILE, TABLE_FILE, IndicatorTable, TableError
from nasfast.measure.doctor import environment
from nasfast.pipeline.check import already_begun, check_scoring, check_search, check_settings, without_supernet
from nasfast.pipeline.inputs import configured_space, evidence_of, result_of, saved_space
from nasfast.pipeline.resolve import resolved
from nasfast.report import at_chance, training_top1
from nasfast.runtime.arguments import check_type
from nasfast.runtime.device import use_threads
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.files import read_metrics, write_atomic
from nasfast.runtime.lock import run_lock
from nasfast.runtime.progress import duration
from nasfast.runtime.termination import Terminated
from nasfast.runtime.tracking import tracked
from nasfast.search import Candidate, History, Limits, evolve, pareto_front, run_search, save_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.search.limits import read_limits
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig
from nasfast.spaces import SearchSpace, get_space, read_cost_table
from nasfast.train import CheckpointError
from nasfast.train.checkpoint import CheckpointFolder
from nasfast.train.supernet import make_supernet, train_supernet

_LOG = logging.getLogger(__name__)
StageFunction = TypeVar("StageFunction", bound=Callable[..., Any])


def say(stage: str, started: float, text: str) -> None:
    """The line of a stage that has ended; `started` is its beginning by `time.monotonic`."""
    _LOG.info("%-8s  %s, %s", stage, text, duration(time.monotonic() - started))


def stage(*, create: bool) -> Callable[[StageFunction], StageFunction]:
    """What every stage does first: resolve its settings, use their threads, lock the run directory on the leading rank,
    and track. All that it calls takes resolved settings.

    The exception of a signal gets the name of its stage as `stage`.

    Args:
        create: whether to create the run directory; see `run_lock`.
    """

    def decorate(function: StageFunction) -> StageFunction:
        @functools.wraps(function)
        def wrapped(cfg: RunConfig, **kwargs: Any) -> Any:
            check_type("cfg", cfg, RunConfig, advice="RunConfig.load(FILE) and RunConfig.from_dict(MAPPING) make one")
            cfg = resolved(cfg)
            use_threads(cfg.threads)
            leads = kwargs.get("world", SINGLE).leads
            with run_lock(cfg.run_dir, create=create) if leads else nullcontext():
                with tracked(cfg.track, cfg.run_dir, cfg.to_dict()):
                    try:
                        return function(cfg, **kwargs)
                    except (Terminated, KeyboardInterrupt) as stopped:
                        # `run` calls other stages, and the innermost is named
                        vars(stopped).setdefault("stage", function.__name__.removesuffix("_best"))
                        raise

        return wrapped  # type: ignore[return-value]  # functools.wraps keeps the signature

    return decorate


def save_config(cfg: RunConfig) -> None:
    """Write the settings to config.yaml; a stage does so once it has used them, because they may be new."""
    write_atomic(cfg.run_dir / CONFIG_FILE, cfg.to_yaml().encode())


def scored_with(cfg: RunConfig) -> dict[str, Any]:
    """The settings of scores, which a result keeps, because config.yaml may get others later."""
    return {"score": cfg.score.to_dict(), "recalibration_batches": cfg.recalibration_batches}


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
        evidence, checkpoint = evidence_of(cfg)
        meta = {"method": cfg.method, "seed": cfg.seed, "step": checkpoint.state["step"], "settings": scored_with(cfg)}
        table = score_table(settings.label, evidence, structure=settings.structure or 0.0, meta=meta)
    table.save(cfg.run_dir / TABLE_FILE)
    save_config(cfg)
    say("score", started, _label(cfg))
    return table


@stage(create=True)
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
    table = untrained_table(settings.label, space, structure=settings.structure or 0.0, seed=cfg.seed, meta=meta)
    write_atomic(cfg.run_dir / SPACE_FILE, space.to_yaml().encode())
    table.save(file)
    save_config(cfg)
    say("score", started, f"{_label(cfg)}, nothing was trained")
    return table


def _label(cfg: RunConfig) -> str:
    score = cfg.score
    return score.label + (f" + {score.structure:g} sqrt_size" if score.structure and score.table is None else "")


def _untrained_space(cfg: RunConfig, num_classes: int | None) -> SearchSpace:
    """The space of the settings; where `num_classes` is None, with the classes of a space in the run directory."""
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
    check_settings(cfg, supernet=not without_supernet(cfg))
    space, run_dir, settings = saved_space(cfg), cfg.run_dir, cfg.search
    check_search(cfg, space)
    limits, front, fronts = read_limits(settings, space), [], []
    for sentence in limits.met_by_all(space):
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
    refinement = refine(table, read_accuracies(cfg.search.refine, table.space), seed=cfg.seed)
    _LOG.info("%s", refinement)
    refinement.table.save(refined)
    return refinement.table
