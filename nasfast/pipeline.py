"""The stages of a run as functions; each reads the files of the stage before from the run directory and writes its own.

supernet -> checkpoints/   score -> indicators.json   search -> archs.json   retrain -> retrain/   report -> report.html
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from nasfast.config import ConfigError, difference, portable
from nasfast.display import Tabular
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.refine import refine
from nasfast.indicators.scores import gives_table, score_of, score_table, untrained_table
from nasfast.indicators.table import REFINED_FILE, TABLE_FILE, IndicatorTable, TableError
from nasfast.measure.doctor import environment
from nasfast.report import at_chance, write_report
from nasfast.retrain import RetrainResult, export_onnx, export_program, load_model, retrain
from nasfast.retrain.card import write_card
from nasfast.retrain.export import FORM_FILE, MODEL_FILE, ONNX_FILE, PROGRAM_FILE, model_folder
from nasfast.runtime.arguments import check_type
from nasfast.runtime.device import use_threads
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.files import read_metrics, write_atomic
from nasfast.runtime.lock import run_lock
from nasfast.runtime.onnx import require_onnx
from nasfast.runtime.progress import duration, followed_by
from nasfast.runtime.termination import Terminated
from nasfast.runtime.tracking import tracked
from nasfast.search import Candidate, History, Limits, evolve, pareto_front, run_search, save_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.search.limits import read_limits
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig, TaskSettings
from nasfast.spaces import Arch, ArchSpace, SearchSpace, format_arch, get_space, read_cost_table, space_kind
from nasfast.stages.apart import FOLDER as TASKS_FOLDER
from nasfast.stages.apart import retrain_apart
from nasfast.stages.checks import (
    already_begun,
    check_one_process,
    check_same_run,
    check_scoring,
    check_search,
    without_supernet,
)
from nasfast.stages.chosen import to_export, to_retrain, warn_if_superseded, warn_if_unnamed, with_seeds
from nasfast.stages.inputs import configured_space, evidence_of, load_supernet, retrain_loaders, saved_space
from nasfast.train.checkpoint import CheckpointError, CheckpointFolder
from nasfast.train.supernet import make_supernet, train_supernet

_LOG = logging.getLogger(__name__)
StageFunction = TypeVar("StageFunction", bound=Callable[..., Any])


def _say(stage: str, started: float, text: str) -> None:
    """The line of a stage that has ended; `started` is its beginning by `time.monotonic`."""
    _LOG.info("%-8s  %s, %s", stage, text, duration(time.monotonic() - started))


def _stage(*, create: bool) -> Callable[[StageFunction], StageFunction]:
    """What every stage does first: use the config's threads, lock the run directory on the leading rank, and track.

    The exception of a signal gets the name of its stage as `stage`.

    Args:
        create: whether to create the run directory; see `run_lock`.
    """

    def decorate(function: StageFunction) -> StageFunction:
        @functools.wraps(function)
        def stage(cfg: RunConfig, **kwargs: Any) -> Any:
            check_type("cfg", cfg, RunConfig, advice="RunConfig.load(FILE) and RunConfig.from_dict(MAPPING) make one")
            use_threads(cfg.threads)
            leads = kwargs.get("world", SINGLE).leads
            with run_lock(cfg.run_dir, create=create) if leads else nullcontext():
                with tracked(cfg.track, cfg.run_dir, portable(cfg.to_dict())):
                    try:
                        return function(cfg, **kwargs)
                    except (Terminated, KeyboardInterrupt) as stopped:
                        # `run` calls other stages, and the innermost is named
                        vars(stopped).setdefault("stage", function.__name__.removesuffix("_best"))
                        raise

        return stage  # type: ignore[return-value]  # functools.wraps keeps the signature

    return decorate


@_stage(create=True)
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
        _say("supernet", started, f"{cfg.train.epochs} epochs{_learnt(cfg, space)}")
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
    _save_config(cfg)
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


def _save_config(cfg: RunConfig) -> None:
    """Write the settings to config.yaml; a stage does so once it has used them, because they may be new."""
    write_atomic(cfg.run_dir / CONFIG_FILE, cfg.resolved().to_yaml().encode())


@_stage(create=False)
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
    settings = cfg.score.resolved(cfg.method)
    if not gives_table(settings):
        _LOG.info("%s scores whole paths during the search: no table is written", settings.name)
        return None
    if settings.table is not None:
        costs = read_cost_table(settings.table, saved_space(cfg))
        meta: dict[str, Any] = {"score": settings.label, "settings": _scored_with(cfg)}
        table = IndicatorTable.of_costs(saved_space(cfg), costs, meta)
    else:
        evidence, checkpoint = evidence_of(cfg)
        meta = {"method": cfg.method, "seed": cfg.seed, "step": checkpoint.state["step"], "settings": _scored_with(cfg)}
        table = score_table(settings.label, evidence, structure=settings.structure or 0.0, meta=meta)
    table.save(cfg.run_dir / TABLE_FILE)
    _save_config(cfg)
    beside = f" + {settings.structure:g} sqrt_size" if settings.structure and settings.table is None else ""
    _say("score", started, f"{settings.label}{beside}")
    return table


@_stage(create=True)
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
    settings, file = cfg.score.resolved(cfg.method), cfg.run_dir / TABLE_FILE
    meta = {"seed": cfg.seed, "settings": _scored_with(cfg)}
    with contextlib.suppress(FileNotFoundError, TableError):  # a damaged table is computed again
        table = IndicatorTable.load(file)
        if table.space == space and {key: table.meta.get(key) for key in meta} == meta:
            return table
    table = untrained_table(settings.label, space, structure=settings.structure or 0.0, seed=cfg.seed, meta=meta)
    write_atomic(cfg.run_dir / SPACE_FILE, space.to_yaml().encode())
    table.save(file)
    _save_config(cfg)
    beside = f" + {settings.structure:g} sqrt_size" if settings.structure else ""
    _say("score", started, f"{settings.label}{beside}, nothing was trained")
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


@_stage(create=False)
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
    space, run_dir, settings = saved_space(cfg), cfg.run_dir, cfg.resolved().search
    check_search(cfg, space)
    limits, front, fronts = read_limits(settings, space), [], []
    for sentence in limits.met_by_all(space, allow_identity=settings.allow_identity):
        _LOG.info("%s", sentence)
    scoring = cfg.score.resolved(cfg.method)
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
        scored_with=None if gives_table(scoring) else _scored_with(cfg),
    )
    _save_config(cfg)
    proof = "highest score proven" if candidates[0].optimal else candidates[0].status
    _say("search", started, f"{space.cardinality:,.0f} architectures, {proof}")
    return candidates


def _scored_with(cfg: RunConfig) -> dict[str, Any]:
    """The settings of scores, which a result keeps, because config.yaml may get others later."""
    score = cfg.score.resolved(cfg.method).to_dict()
    return portable({"score": score, "recalibration_batches": cfg.recalibration_batches})


def _table(cfg: RunConfig) -> IndicatorTable:
    """The table of the score stage.

    Raises:
        FileNotFoundError, TableError, ConfigError: it is missing, damaged, or of another score.
    """
    path, name = cfg.run_dir / TABLE_FILE, cfg.score.resolved(cfg.method).label
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


@_stage(create=False)
def retrain_best(
    cfg: RunConfig,
    *,
    archs: Sequence[Arch | str] = (),
    pareto: bool = False,
    resume: bool = False,
    world: World = SINGLE,
    tasks: TaskSettings | None = None,
) -> dict[str, RetrainResult]:
    """Retrain the best architectures, and random ones of equal cost if asked; writes retrain/NAME/.

    Where a search of cells wrote space.yaml and arch_NAME.json, each of these architectures is retrained under its name
    (`argmax`, `darts`); `retrain.top_k` and `retrain.random_architectures` have no effect there.

    Args:
        cfg: settings of the run.
        archs: retrain these architectures of the run's space instead, as values or text, named like `arch-1_0_2_1`.
        pareto: retrain every point of the Pareto fronts in archs.json instead, named in the same way.
        resume: whether to continue each from its newest good checkpoint. A run that torchrun starts again continues in
            any case.
        world: the ranks that retrain, together or each its own networks (`cfg.retrain.parallel`). Only rank 0 reads the
            run directory; a rank that trains a network by itself writes the files of that network.
        tasks: where each network is trained in a process of its own, with the same bytes; None for this process.

    Returns:
        Results by name: `best`, `best-2`, ..., `random`, ..., and with `retrain.seeds` also `best-seed-1` and the like.

    Raises:
        FileNotFoundError: the search has not run.
        ArchError, ConfigError: one of `archs` is not in the space; there are both `tasks` and several ranks.
        TaskError: see `nasfast.stages.apart.retrain_apart`. CheckpointError and others: see `nasfast.train.train`.
    """
    started = time.monotonic()
    check_one_process(tasks, world.size)
    form: Any = None
    if world.is_main:
        found, names = to_retrain(cfg, archs, pareto=pareto)
        form = {"space": found.to_dict(), "trainings": with_seeds(names, cfg)}
    form = json.loads(world.broadcast(json.dumps(form).encode()))
    space = space_kind(form["space"]).from_dict(form["space"])
    trainings = {name: (tuple(arch), seed) for name, (arch, seed) in form["trainings"].items()}
    if tasks is None:
        results = _retrain_here(cfg, space, trainings, resume=resume, world=world)
    else:
        results = retrain_apart(cfg, space, trainings, tasks, resume=resume)
    if world.is_main:
        # the logs of tasks, these or those of an earlier call, were for networks that failed
        shutil.rmtree(cfg.run_dir / TASKS_FOLDER, ignore_errors=True)
        _save_config(cfg)
        _say("retrain", started, f"{len(results)} networks, {cfg.retrain.train.epochs} epochs each")
    return results


def _retrain_here(
    cfg: RunConfig, space: ArchSpace, trainings: Mapping[str, tuple[Arch, int]], *, resume: bool, world: World
) -> dict[str, RetrainResult]:
    """Retrain architectures with their seeds in the processes of this run; see `retrain_best`."""
    side_by_side = cfg.retrain.parallel == "networks"
    team = world.alone() if side_by_side else world
    loaders = {s: retrain_loaders(cfg, space, seed=s, world=team) for s in sorted({s for _, s in trainings.values()})}
    net = None
    if cfg.retrain.init == "inherit" and isinstance(space, SearchSpace):
        net = load_supernet(cfg)[0] if world.is_main else make_supernet(space, cfg.method, cfg.supernet)[0]
        net.to(cfg.torch_device)
        world.send(net.state_dict().values())
    mine = list(trainings)[world.rank :: world.size] if side_by_side else list(trainings)
    results = {}
    for number, name in enumerate(mine, 1):
        with followed_by(len(mine) - number):
            results[name] = retrain(
                space,
                trainings[name][0],
                *loaders[trainings[name][1]],
                cfg.retrain,
                run_dir=cfg.run_dir,
                name=name,
                supernet=net,
                activation=cfg.supernet.activation,
                seed=trainings[name][1],
                resume=resume,
                device=cfg.torch_device,
                world=team,
            )
    forms = world.gather(json.dumps({name: result.to_dict() for name, result in results.items()}).encode())
    everyone = {name: result for form in forms for name, result in json.loads(form).items()}
    return {name: RetrainResult.from_dict(everyone[name]) for name in trainings}


def export(
    run_dir: str | Path,
    *,
    name: str = "best",
    arch: Arch | str | None = None,
    pareto: bool = False,
    onnx: bool = True,
) -> list[Path]:
    """The files of retrained networks, with a model card; a warning says if one is not what the last search found.

    Args:
        run_dir: the run directory.
        name: which network: `best`, `best-2`, ..., `random`, ...
        arch: the network of this architecture instead, whatever its name.
        pareto: the networks of all points of the Pareto fronts in archs.json instead; a warning says if some of them
            were not retrained.
        onnx: whether to write model.onnx beside model.safetensors.

    Raises:
        FileNotFoundError: the run directory does not exist, or no such network was retrained.
        RuntimeError: the extra `onnx` is missing, or an exported program disagrees with PyTorch.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} does not exist or is no directory: give the directory of a run (--out)")
    if onnx:
        try:
            require_onnx()
        except RuntimeError as error:
            raise RuntimeError(f"{error}, or export without model.onnx (--onnx false)") from error
    names = to_export(run_dir, arch=arch, pareto=pareto) if arch is not None or pareto else [name]
    files = []
    for one in names:
        folder = model_folder(run_dir / "retrain", one)
        network = load_model(folder)
        warn_if_superseded(run_dir, one, network)
        warn_if_unnamed(one, network, folder)
        files += [folder / MODEL_FILE, folder / FORM_FILE]
        writers = {PROGRAM_FILE: export_program} | ({ONNX_FILE: export_onnx} if onnx else {})
        with run_lock(run_dir):
            files.append(write_card(network, folder, run_dir=run_dir))
            for file, write in writers.items():
                difference = write(network, folder / file)
                _LOG.info("%s: %s agrees with PyTorch to %.1e of the largest logit", one, file, difference)
                files.append(folder / file)
    return files


@dataclass(frozen=True, repr=False)
class RunResult(Tabular):
    """The results of a whole run.

    Attributes:
        candidates: the best architectures, best first; empty on ranks other than 0.
        retrained: results of retraining by name: `best`, ..., `random`.
        report: path of report.html; None on ranks other than 0.
    """

    candidates: list[Candidate]
    retrained: dict[str, RetrainResult]
    report: Path | None

    @property
    def caption(self) -> str:
        return f"{len(self.retrained)} retrained networks; report: {self.report}"

    def records(self) -> list[dict[str, Any]]:
        """One row per retrained network."""
        return [
            {
                "network": name,
                **{key: getattr(r, key) for key in ("top1", "top5", "macs", "params", "epochs")},
                "arch": format_arch(r.arch),
            }
            for name, r in self.retrained.items()
        ]


@_stage(create=True)
def run(cfg: RunConfig, *, resume: bool = False, world: World = SINGLE, tasks: TaskSettings | None = None) -> RunResult:
    """Run all stages in order, from images to a retrained network and report.html.

    Args:
        cfg: settings of the run.
        resume: whether to continue an interrupted run; complete parts are not repeated.
        world: the ranks that train together; rank 0 runs the other stages while the others wait.
        tasks: where networks are retrained; see `retrain_best`.

    Raises:
        TypeError: `cfg` is not a RunConfig.
    """
    check_one_process(tasks, world.size)
    supernet(cfg, resume=resume, world=world)
    candidates = []
    if world.is_main:
        score(cfg)
        candidates = search(cfg)
    retrained = retrain_best(cfg, resume=resume, world=world, tasks=tasks)
    return RunResult(candidates, retrained, write_report(cfg.run_dir) if world.is_main else None)
