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
from typing import Any, ClassVar, Literal, TypeVar

import torch

from nasfast.cells import CellSpace, space_kind
from nasfast.config import ConfigBase, ConfigError, difference, load_yaml
from nasfast.data import DataConfig, Loader, make_loaders
from nasfast.device import check_device, torch_device
from nasfast.distributed import SINGLE, World
from nasfast.doctor import environment
from nasfast.files import read_metrics, write_atomic
from nasfast.indicators.accuracy import path_accuracy
from nasfast.indicators.bn_gamma import score as score_supernet
from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.lock import run_lock
from nasfast.report import at_chance, write_report
from nasfast.retrain import RetrainConfig, RetrainResult, export_onnx, load_model, retrain
from nasfast.retrain.export import ARCH_FILE, MODEL_FILE, SPACE_FILE
from nasfast.search import (
    Candidate,
    History,
    InfeasibleConstraintError,
    SearchConfig,
    equal_cost_random,
    evolve,
    load_candidates,
    pareto_front,
    run_search,
    save_candidates,
)
from nasfast.spaces import Arch, SearchSpace, get_space, load_arch
from nasfast.supernet import Supernet
from nasfast.train import TrainConfig
from nasfast.train.checkpoint import Checkpoint, CheckpointError, CheckpointFolder
from nasfast.train.supernet import METHODS, SupernetConfig, default_lr, make_supernet, train_supernet

_LOG = logging.getLogger(__name__)

Stage = TypeVar("Stage", bound=Callable[..., Any])

CONFIG_FILE, TABLE_FILE, ARCHS_FILE = "config.yaml", "indicators.json", "archs.json"

_PEER_TRIES = 20
"""Draws per random architecture that is asked for, before it counts as not there."""

_LATER = ("out", "device", "threads", "search", "retrain", "recalibration_batches")
_LATER_DATA = ("train", "val", "workers", "max_bad_files", "loader", "prefetch", "cache_dir")
"""Settings, and those of `data`, that may change when a supernet resumes: of later stages, or of the machine."""


@dataclass(frozen=True)
class SpaceConfig(ConfigBase):
    """The search space of a run.

    Attributes:
        name: `mobilenet_v2`, `shufflenet_v2`, `nas_bench_macro`, `digits_mini`, or the path of a YAML file.
        variant: `bnnas` is the released BN-NAS configuration of `mobilenet_v2`.
        resolution: of the images in pixels; null takes the space's.
    """

    name: str = "mobilenet_v2"
    variant: str | None = None
    resolution: int | None = None


@dataclass(frozen=True)
class RunConfig(ConfigBase):
    """Everything a run depends on; the resolved form is saved as config.yaml in the run directory.

    Attributes:
        out: run directory.
        seed: of weights, paths, data order, augmentation and search.
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads, 0 for torch's choice; bit-identical repeats need the same number.
        method: `dinas`, or a baseline: `bnnas`, `fairnas`, `spos`.
        space: the search space.
        data: images.
        supernet: overrides of the method's preset.
        train: supernet training.
        recalibration_batches: batches for BN statistics where paths are scored by accuracy (fairnas, spos).
        search: limits and search method.
        retrain: training of the chosen architectures.
    """

    names_files: ClassVar[bool] = True

    out: str = "runs/nasfast"
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    method: Literal["dinas", "bnnas", "fairnas", "spos"] = "dinas"
    space: SpaceConfig = SpaceConfig()
    data: DataConfig = DataConfig()
    supernet: SupernetConfig = SupernetConfig()
    train: TrainConfig = TrainConfig()
    recalibration_batches: int = 20
    search: SearchConfig = SearchConfig()
    retrain: RetrainConfig = RetrainConfig()

    def __post_init__(self) -> None:
        if self.threads < 0 or self.seed < 0:
            raise ValueError(f"threads and seed must not be negative, got {self.threads} and {self.seed}")
        if self.recalibration_batches < 1:
            raise ValueError(f"recalibration_batches must be at least 1, got {self.recalibration_batches}")
        check_device(self.device)

    def resolved(self) -> RunConfig:
        """Every setting that was left to the method's preset made explicit."""
        chosen = self.supernet.resolved(self.method)
        lr = default_lr(chosen.trainable) if self.train.lr is None else self.train.lr
        search_seed = self.seed if self.search.seed is None else self.search.seed
        return self.replace(
            supernet=chosen, train=self.train.replace(lr=lr), search=self.search.replace(seed=search_seed)
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.out)

    @property
    def torch_device(self) -> str:
        """The device to use.

        Raises:
            ConfigError: cuda was asked for and there is none.
        """
        return torch_device(self.device)


def _loaders(cfg: RunConfig, space: SearchSpace, *, hold_out: bool, world: World = SINGLE) -> tuple[Loader, Loader]:
    """Training and validation loader.

    Args:
        hold_out: validate on training images that are held out, so that the search never sees those of `data.val`.
        world: the ranks that share every batch.
    """
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    return make_loaders(
        cfg.data, resolution=space.resolution, in_channels=space.in_channels, seed=cfg.seed, hold_out=hold_out,
        rank=world.rank, world=world.size,
    )  # fmt: skip


def _scored_by_accuracy(cfg: RunConfig) -> bool:
    return METHODS[cfg.method].scoring == "accuracy"


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
    loader, _ = _loaders(cfg, space, hold_out=_scored_by_accuracy(cfg), world=world)
    space = space.replace(num_classes=len(loader.source.classes))
    net, sampler = make_supernet(space, cfg.method, cfg.supernet, seed=cfg.seed)
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
            "the supernet's training accuracy is at chance (%.1f %%, 1 of %d classes): its indicators may rank "
            "nothing. Compare with `nasfast rank` or the random baseline, or let more train (supernet.trainable)",
            100 * top1[-1], space.num_classes,
        )  # fmt: skip


def _check_search(cfg: RunConfig, space: SearchSpace) -> None:
    """Refuse what the search would refuse, before hours of training."""
    if _scored_by_accuracy(cfg) and cfg.search.method == "exact":
        raise ConfigError(
            f"search.method='exact' needs additive scores; {cfg.method} scores whole paths: use 'evolution'"
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


@_alone(create=False)
def score(cfg: RunConfig) -> IndicatorTable | None:
    """Write indicators.json; None for methods that score whole paths by accuracy, which the search stage does.

    Raises:
        FileNotFoundError, CheckpointError: see `load_supernet`.
    """
    _check_same_run(cfg)
    if _scored_by_accuracy(cfg):
        _LOG.info("%s scores paths by validation accuracy during the search: no indicator table", cfg.method)
        return None
    net, checkpoint = load_supernet(cfg)
    table = score_supernet(net, meta={"method": cfg.method, "seed": cfg.seed, "step": checkpoint.state["step"]})
    table.save(cfg.run_dir / TABLE_FILE)
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
    if _scored_by_accuracy(cfg):
        _check_search(cfg, space)
        train, val = _loaders(cfg, space, hold_out=True)
        net, checkpoint = load_supernet(cfg)
        # everything an accuracy depends on: a score of another supernet must not be taken for this one's
        scorer = f"accuracy of {checkpoint.digest}, recalibration {cfg.recalibration_batches}"
        history = History(run_dir / "history.jsonl", space, scorer=scorer)

        def accuracy(arch: tuple[int, ...]) -> float:
            return path_accuracy(
                net, arch, train_loader=train, val_loader=val,
                recalibration_batches=cfg.recalibration_batches, device=cfg.torch_device,
            )  # fmt: skip

        found = evolve(space, accuracy, settings, history=history)
    else:
        path = run_dir / TABLE_FILE
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: run `nasfast score --out {cfg.out}` first")
        try:
            table = IndicatorTable.load(path)
        except TableError as error:
            raise TableError(f"{error}: run `nasfast score --out {cfg.out}` again") from error
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
            space, chosen[name], train, val, cfg.retrain,
            run_dir=cfg.run_dir, name=name, supernet=net, activation=cfg.supernet.activation, seed=cfg.seed,
            resume=resume, device=cfg.torch_device, world=team,
        )
        for name in mine
    }  # fmt: skip
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
