"""A run as functions: each stage reads the files of the one before from the run directory and writes its own.

supernet -> checkpoints/   score -> indicators.json   search -> archs.json   retrain -> retrain/   report -> report.html
"""

from __future__ import annotations

import functools
import json
import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from nasfast.cells import CellSpace, space_kind
from nasfast.config import ConfigError, difference, load_yaml
from nasfast.data import Loader, make_loader, make_loaders, random_subset
from nasfast.indicators.scores import Evidence, check_score, get_score, score_table
from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.measure.doctor import environment
from nasfast.report import at_chance, write_report
from nasfast.retrain import RetrainResult, export_onnx, load_model, retrain
from nasfast.retrain.export import ARCH_FILE, MODEL_FILE, SPACE_FILE
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.files import read_metrics, write_atomic
from nasfast.runtime.lock import run_lock
from nasfast.search import (
    Candidate,
    History,
    InfeasibleConstraintError,
    equal_cost_random,
    evolve,
    load_candidates,
    pareto_front,
    run_search,
    save_candidates,
)
from nasfast.settings import RunConfig
from nasfast.spaces import Arch, SearchSpace, get_space, load_arch
from nasfast.supernet import Supernet
from nasfast.train.checkpoint import Checkpoint, CheckpointError, CheckpointFolder
from nasfast.train.supernet import make_supernet, train_supernet

_LOG = logging.getLogger(__name__)

Stage = TypeVar("Stage", bound=Callable[..., Any])

CONFIG_FILE, TABLE_FILE, ARCHS_FILE = "config.yaml", "indicators.json", "archs.json"

_PEER_TRIES = 20
"""Draws per random architecture that is asked for, before it counts as not there."""

_LATER = ("out", "device", "threads", "score", "search", "retrain", "recalibration_batches")
_LATER_DATA = ("train", "val", "workers", "max_bad_files", "loader", "prefetch", "cache_dir")
"""Settings, and those of `data`, that may change when a supernet resumes: of later stages, or of the machine."""


def _loaders(cfg: RunConfig, space: SearchSpace, *, hold_out: bool, world: World = SINGLE) -> tuple[Loader, Loader]:
    """Training and validation loader.

    Args:
        hold_out: validate on training images that are held out, so that the search never sees those of `data.val`.
        world: the ranks that share every batch.
    """
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    return make_loaders(
        cfg.data,
        resolution=space.resolution,
        in_channels=space.in_channels,
        seed=cfg.seed,
        hold_out=hold_out,
        rank=world.rank,
        world=world.size,
    )


def _holds_out(cfg: RunConfig) -> bool:
    return cfg.supernet.resolved(cfg.method).hold_out


def _saved_space(cfg: RunConfig) -> SearchSpace:
    path = cfg.run_dir / SPACE_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `nasfast supernet --out {cfg.out}` first")
    try:
        return SearchSpace.load(path)
    except ConfigError as error:
        raise ConfigError(f"{error}: `nasfast supernet --resume --out {cfg.out}` writes it again") from error


def _space_of_cells(cfg: RunConfig) -> CellSpace | None:
    """The space of a run directory that a search of cells wrote; None of any other."""
    path = cfg.run_dir / SPACE_FILE
    try:
        form = load_yaml(path)
    except ConfigError:
        return None  # `_saved_space` says why it cannot be read
    return CellSpace.load(path) if space_kind(form) is CellSpace else None


def _alone(*, create: bool) -> Callable[[Stage], Stage]:
    """A stage whose run directory is locked, by the process that leads the ranks; see `run_lock`."""

    def decorated(stage: Stage) -> Stage:
        @functools.wraps(stage)
        def locked(cfg: RunConfig, **kwargs: Any) -> Any:
            leads = kwargs.get("world", SINGLE).leads
            with run_lock(cfg.run_dir, create=create) if leads else nullcontext():
                return stage(cfg, **kwargs)

        return locked

    return decorated


@_alone(create=True)
def supernet(cfg: RunConfig, *, resume: bool = False, world: World = SINGLE) -> Path:
    """Train the supernet; writes config.yaml, space.yaml, environment.json, metrics and checkpoints/.

    Args:
        resume: continue from the newest good checkpoint; so does a run that torchrun began and started again.
        world: the ranks that train together; rank 0 alone reads and writes the run directory.

    Returns:
        Path of the final checkpoint.

    Raises:
        ConfigError, DataError: the settings or images cannot be used.
        TrainingDivergedError, CheckpointError, FileExistsError, Terminated, RankError: see `nasfast.train.train`.
    """
    space = get_space(cfg.space.name, resolution=cfg.space.resolution, variant=cfg.space.variant)
    loader, _ = _loaders(cfg, space, hold_out=_holds_out(cfg), world=world)
    space = space.replace(num_classes=len(loader.source.classes))
    net, sampler = make_supernet(space, cfg.method, cfg.supernet, seed=cfg.seed)
    _check_score(cfg, net)
    _check_search(cfg, space)
    if world.is_main:
        _prepare(cfg, space, resume=resume, world=world)
    _LOG.info("%s: %d layers, %.3g architectures", space.name, len(space), space.cardinality)
    _LOG.info("%s", net.summary)
    torch.manual_seed(cfg.seed)  # the state of the global generator becomes part of the checkpoints
    final = train_supernet(
        net, loader, sampler, cfg.train, run_dir=cfg.run_dir, resume=resume, device=cfg.torch_device, world=world
    )
    if world.is_main:
        _note_chance(cfg, space)
    return final


def _prepare(cfg: RunConfig, space: SearchSpace, *, resume: bool, world: World) -> None:
    """Check that the run directory can be used, and write what the supernet's training depends on."""
    run_dir = cfg.run_dir
    folder = CheckpointFolder(run_dir / "checkpoints", "supernet")
    resume = resume or world.has_begun(folder.stem)
    if folder.paths():
        if not resume:
            raise FileExistsError(f"{run_dir} holds a supernet run already: add --resume, or choose another --out")
        _check_same_space(cfg, space)
        _check_same_run(cfg)
    elif resume:
        _LOG.warning("nothing to resume in %s: starting from the beginning", run_dir)
    _save_config(cfg)
    write_atomic(run_dir / SPACE_FILE, space.to_yaml().encode())
    write_atomic(run_dir / "environment.json", (json.dumps(environment(), indent=1) + "\n").encode())


def _note_chance(cfg: RunConfig, space: SearchSpace) -> None:
    """Say so when the supernet has learnt nothing: a ranking by its indicators is then unproven."""
    top1 = [m["top1"] for m in read_metrics(cfg.run_dir) if m["stage"] == "supernet" and "top1" in m]
    if top1 and at_chance(top1[-1], space.num_classes):
        _LOG.warning(
            "the supernet's training accuracy is at chance (%.1f %%, 1 of %d classes): its scores may rank nothing. "
            "Compare with `nasfast rank` or the random baseline, or let more train (supernet.trainable)",
            100 * top1[-1],
            space.num_classes,
        )


def _check_score(cfg: RunConfig, net: Supernet) -> None:
    """Refuse a score that the supernet cannot have, before hours of training."""
    score = get_score(cfg.score.resolved(cfg.method).name)
    check_score(score, net)
    if score.held_out and not _holds_out(cfg):
        raise ConfigError(
            f"score {score.name!r} needs images the supernet is not trained on: set supernet.hold_out=true"
        )


def _check_search(cfg: RunConfig, space: SearchSpace) -> None:
    """Refuse what the search would refuse, before hours of training."""
    score = cfg.score.resolved(cfg.method)
    if not score.gives_table and cfg.search.method == "exact":
        raise ConfigError(
            f"search.method='exact' needs additive scores; {score.name!r} scores whole paths: use 'evolution', or "
            "score.distill=true"
        )
    cfg.search.limits.check(space, allow_identity=cfg.search.allow_identity)


def _check_same_space(cfg: RunConfig, space: SearchSpace) -> None:
    try:
        saved = _saved_space(cfg)
    except (FileNotFoundError, ConfigError) as error:
        # the checkpoints know their space too
        CheckpointFolder(cfg.run_dir / "checkpoints", "supernet").latest(fingerprint=space.fingerprint)
        _LOG.warning("%s", error)
        return
    if saved.fingerprint != space.fingerprint:
        changes = difference(saved.to_dict(), space.to_dict())
        raise CheckpointError(
            f"{cfg.run_dir / SPACE_FILE} differs from the space of this run: {changes}; "
            "resume with the same space and images, or choose another --out"
        )


def _check_same_run(cfg: RunConfig) -> None:
    """Refuse settings that the supernet of the run directory was not trained with, before any file is replaced.

    Every stage may change the settings of the stages after the supernet's and those of the machine.
    """
    path = cfg.run_dir / CONFIG_FILE
    if not path.exists():
        return
    form = load_yaml(path)
    if form.get("method") == "dinas" and "score" not in form:
        raise ConfigError(
            f"{path} was written when 'dinas' meant what is 'dinas_paper' now: put `method: dinas_paper` there, and "
            "the run goes on as it was"
        )
    forms = [config.resolved().to_dict() for config in (RunConfig.load(path), cfg)]
    for form in forms:
        for mapping, keys in ((form, _LATER), (form["data"], _LATER_DATA)):
            for key in keys:
                mapping.pop(key)
    if forms[0] != forms[1]:
        raise CheckpointError(
            f"{path} has other settings: {difference(*forms)}; keep those of the run, or choose another --out"
        )


def _save_config(cfg: RunConfig) -> None:
    """Keep config.yaml true: a stage that takes settings of its own writes them back once it has used them."""
    write_atomic(cfg.run_dir / CONFIG_FILE, cfg.resolved().to_yaml().encode())


def load_supernet(cfg: RunConfig) -> tuple[Supernet, Checkpoint]:
    """The trained supernet of a run directory, and the checkpoint it is from.

    Raises:
        FileNotFoundError: nothing was trained there.
        CheckpointError: no checkpoint is usable.
    """
    space = _saved_space(cfg)
    found = CheckpointFolder(cfg.run_dir / "checkpoints", "supernet").latest(fingerprint=space.fingerprint)
    if found is None:
        raise FileNotFoundError(
            f"no supernet checkpoint in {cfg.run_dir}: run `nasfast supernet --out {cfg.out}` first"
        )
    path, checkpoint = found
    step, settings = checkpoint.state["step"], checkpoint.state["settings"]
    total = settings["train"]["epochs"] * settings["batches_per_epoch"]
    if step < total:
        _LOG.warning("%s is of step %d of %d: the supernet is not trained to its end", path, step, total)
    net, _ = make_supernet(space, cfg.method, cfg.supernet, seed=cfg.seed)
    net.load_state_dict(checkpoint.part("model."))
    return net.to(device=cfg.torch_device, memory_format=torch.channels_last), checkpoint


def evidence_of(cfg: RunConfig) -> tuple[Evidence, Checkpoint]:
    """What the score of a run is computed from, and the checkpoint of the supernet.

    Raises:
        FileNotFoundError, CheckpointError: see `load_supernet`.
        ConfigError, ScoreError: the supernet cannot have this score.
    """
    settings = cfg.score.resolved(cfg.method)
    score = get_score(settings.name)
    net, checkpoint = load_supernet(cfg)
    if not score.trained:
        net, _ = make_supernet(net.space, cfg.method, cfg.supernet, seed=cfg.seed)
        net.to(device=cfg.torch_device, memory_format=torch.channels_last)
    _check_score(cfg, net)
    images, loaders = (), None
    if score.images:
        held = _holds_out(cfg)
        loaders = _loaders(cfg, net.space, hold_out=held)
        images = make_loader(
            cfg.data,
            random_subset(loaders[held].source, settings.images, cfg.seed),
            train=False,
            resolution=net.space.resolution,
            in_channels=net.space.in_channels,
        )
    evidence = Evidence(
        net,
        images,
        loaders=loaders,
        paths=settings.paths,
        recalibration_batches=cfg.recalibration_batches,
        seed=cfg.seed,
        bf16=cfg.train.precision == "bf16",
    )
    return evidence, checkpoint


@_alone(create=False)
def score(cfg: RunConfig) -> IndicatorTable | None:
    """Write indicators.json; None for scores of whole paths that are not distilled, which the search stage asks for.

    Raises:
        FileNotFoundError, CheckpointError: see `load_supernet`.
        ConfigError, ScoreError, TableError: the supernet cannot have this score, or it is not finite.
    """
    _check_same_run(cfg)
    settings = cfg.score.resolved(cfg.method)
    if not settings.gives_table:
        _LOG.info("%s scores whole paths during the search: no table", settings.name)
        return None
    evidence, checkpoint = evidence_of(cfg)
    meta = {"method": cfg.method, "seed": cfg.seed, "step": checkpoint.state["step"]}
    table = score_table(settings.name, evidence, structure=settings.structure, meta=meta)
    table.save(cfg.run_dir / TABLE_FILE)
    _save_config(cfg)
    return table


@_alone(create=False)
def search(cfg: RunConfig) -> list[Candidate]:
    """Write archs.json: the best architectures under the limits, and the Pareto front where scores are additive.

    Raises:
        FileNotFoundError: the stage before has not run.
        InfeasibleConstraintError: an unreachable limit, with the smallest attainable value.
    """
    _check_same_run(cfg)
    space, run_dir, front = _saved_space(cfg), cfg.run_dir, []
    settings = cfg.resolved().search
    scoring = cfg.score.resolved(cfg.method)
    if not scoring.gives_table:
        _check_search(cfg, space)
        evidence, checkpoint = evidence_of(cfg)
        # everything a score depends on: that of another supernet must not be taken for this one's
        scorer = f"accuracy of {checkpoint.digest}, recalibration {cfg.recalibration_batches}"
        if scoring.name != "recalibrated_accuracy":
            scorer = f"{scoring.name} of {checkpoint.digest}, {scoring.images} images"
        history = History(run_dir / "history.jsonl", space, scorer=scorer)
        found = evolve(space, functools.partial(get_score(scoring.name).function, evidence), settings, history=history)
    else:
        path = run_dir / TABLE_FILE
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: run `nasfast score --out {cfg.out}` first")
        try:
            table = IndicatorTable.load(path)
        except TableError as error:
            raise TableError(f"{error}: run `nasfast score --out {cfg.out}` again") from error
        if table.meta.get("score", scoring.name) != scoring.name:
            given = f"{path} has the score {table.meta['score']!r}, the settings say {scoring.name!r}"
            raise ConfigError(f"{given}: run `nasfast score --out {cfg.out}` with these settings first")
        history = run_dir / "history.jsonl" if settings.method == "evolution" else None
        found = run_search(table, space, settings, history=history)
        front = pareto_front(table, space, allow_identity=settings.allow_identity)
    save_candidates(run_dir / ARCHS_FILE, space, found, limits=settings.limits, pareto=front)
    _save_config(cfg)
    return found


@_alone(create=False)
def retrain_best(cfg: RunConfig, *, resume: bool = False, world: World = SINGLE) -> dict[str, RetrainResult]:
    """Retrain the best architectures, and a random one of equal cost if asked; writes retrain/NAME/.

    Where a search of cells wrote space.yaml and arch_NAME.json, each of those architectures is retrained under its name
    (`argmax`, `darts`); `retrain.top_k` and `retrain.random_architectures` are of no use there.

    Args:
        resume: continue each from its newest good checkpoint; so does a run that torchrun began and started again.
        world: the ranks that do it, together or side by side (`cfg.retrain.parallel`). Rank 0 alone reads the run
            directory; a rank that trains a network by itself writes the files of that.

    Returns:
        Results by name: `best`, `best-2`, ..., `random`, `random-2`, ...

    Raises:
        FileNotFoundError: the search has not run.
        TrainingDivergedError, CheckpointError, FileExistsError, Terminated, RankError: see `nasfast.train.train`.
    """
    found = _chosen(cfg) if world.is_main else None
    form = json.loads(world.broadcast(json.dumps(found).encode()))
    space = space_kind(form["space"]).from_dict(form["space"])
    chosen = {n: tuple(a) for n, a in form["chosen"].items()}
    side_by_side = cfg.retrain.parallel == "networks"
    team = world.alone() if side_by_side else world
    train, val = _loaders(cfg, space, hold_out=False, world=team)
    if len(train.source.classes) != space.num_classes:
        raise ConfigError(
            f"the images have {len(train.source.classes)} classes, {cfg.run_dir / SPACE_FILE} has {space.num_classes}"
        )
    net = None
    if cfg.retrain.init == "inherit" and isinstance(space, SearchSpace):
        net = load_supernet(cfg)[0] if world.is_main else make_supernet(space, cfg.method, cfg.supernet)[0]
        net.to(cfg.torch_device)
        world.send(net.state_dict().values())
    mine = list(chosen)[world.rank :: world.size] if side_by_side else list(chosen)
    results = {
        name: retrain(
            space,
            chosen[name],
            train,
            val,
            cfg.retrain,
            run_dir=cfg.run_dir,
            name=name,
            supernet=net,
            activation=cfg.supernet.activation,
            seed=cfg.seed,
            resume=resume,
            device=cfg.torch_device,
            world=team,
        )
        for name in mine
    }
    forms = world.gather(json.dumps({name: result.to_dict() for name, result in results.items()}).encode())
    results = {name: result for form in forms for name, result in json.loads(form).items()}
    if world.is_main:
        _save_config(cfg)
    return {name: RetrainResult.from_dict(results[name]) for name in chosen}


def _chosen(cfg: RunConfig) -> dict[str, Any]:
    """What to retrain, as JSON: the space, and architectures by name."""
    _check_same_run(cfg)
    if (of_cells := _space_of_cells(cfg)) is not None:
        paths = sorted(cfg.run_dir.glob("arch_*.json"))
        if not paths:
            raise FileNotFoundError(f"no arch_NAME.json in {cfg.run_dir}: a search of cells writes them at its end")
        archs = {path.stem.removeprefix("arch_"): load_arch(path, of_cells) for path in paths}
        return {"space": of_cells.to_dict(), "chosen": archs}
    space, path = _saved_space(cfg), cfg.run_dir / ARCHS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `nasfast search --out {cfg.out}` first")
    try:
        candidates = load_candidates(path, space).candidates[: cfg.retrain.top_k]
    except ConfigError as error:
        raise ConfigError(f"{error}: run `nasfast search --out {cfg.out}` again") from error
    chosen = {"best" if i == 0 else f"best-{i + 1}": c.arch for i, c in enumerate(candidates)}
    peers = _random_peers(cfg, space, candidates[0].arch)
    chosen |= {"random" if i == 0 else f"random-{i + 1}": arch for i, arch in enumerate(peers)}
    if len(candidates) < cfg.retrain.top_k:
        _LOG.warning("retrain.top_k=%d, but %s has %d architectures", cfg.retrain.top_k, path, len(candidates))
    return {"space": space.to_dict(), "chosen": chosen}


def _random_peers(cfg: RunConfig, space: SearchSpace, best: Arch) -> list[Arch]:
    """Different random architectures of the cost of `best`; fewer than asked for where there are no more."""
    wanted, rng = cfg.retrain.random_architectures, random.Random(cfg.seed)
    found: dict[Arch, None] = {}
    try:
        for _ in range(_PEER_TRIES * wanted):
            if len(found) == wanted:
                break
            arch = equal_cost_random(
                space, rng, best, limits=cfg.search.limits, allow_identity=cfg.search.allow_identity
            )
            found[arch] = None
    except InfeasibleConstraintError as error:
        _LOG.warning("no random architecture to compare with: %s", error)
    if 0 < len(found) < wanted:
        _LOG.warning(
            "retrain.random_architectures=%d, but only %d different ones of that cost were found", wanted, len(found)
        )
    return list(found)


def export(run_dir: str | Path, *, name: str = "best", onnx: bool = True) -> list[Path]:
    """The files of a retrained network; writes model.onnx beside model.safetensors if asked.

    Raises:
        FileNotFoundError: nothing was retrained under this name.
        RuntimeError: the extra `onnx` is missing, or onnxruntime disagrees with PyTorch.
    """
    folder = Path(run_dir) / "retrain" / name
    network = load_model(folder)
    files = [folder / file for file in (MODEL_FILE, ARCH_FILE, SPACE_FILE)]
    if onnx:
        with run_lock(run_dir):
            difference = export_onnx(network, folder / "model.onnx")
        _LOG.info("model.onnx agrees with PyTorch to %.1e of the largest logit", difference)
        files.append(folder / "model.onnx")
    return files


@dataclass(frozen=True)
class RunResult:
    """What a whole run leaves.

    Attributes:
        candidates: the best architectures, best first; none on other ranks than 0.
        retrained: results of retraining by name: `best`, ..., `random`.
        report: path of report.html; None on other ranks than 0.
    """

    candidates: list[Candidate]
    retrained: dict[str, RetrainResult]
    report: Path | None


@_alone(create=True)
def run(cfg: RunConfig, *, resume: bool = False, world: World = SINGLE) -> RunResult:
    """Every stage in order, from images to a retrained network and report.html.

    Args:
        resume: continue an interrupted run; what is complete is not done again.
        world: the ranks that train together; rank 0 does the other stages while the rest wait.
    """
    supernet(cfg, resume=resume, world=world)
    candidates = []
    if world.is_main:
        score(cfg)
        candidates = search(cfg)
    retrained = retrain_best(cfg, resume=resume, world=world)
    return RunResult(candidates, retrained, write_report(cfg.run_dir) if world.is_main else None)
