"""Retrain: which architectures of a run are trained under which names, and their training."""

from __future__ import annotations

import functools
import json
import logging
import random
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nasfast.config import ConfigError, merge
from nasfast.data import Loader
from nasfast.pipeline.check import MACHINE_DATA, check_one_process, check_settings, nothing_is_trained, without_supernet
from nasfast.pipeline.inputs import load_supernet, retrain_loaders
from nasfast.pipeline.stage import result_of, save_config, saved_space, say, space_of_cells, stage
from nasfast.retrain import RetrainResult, retrain
from nasfast.retrain.retrain import RESULT_FILE, check_not_begun
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.progress import followed_by
from nasfast.runtime.tracking import tracked
from nasfast.search import SearchResult, equal_cost_peers, load_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.search.limits import read_limits
from nasfast.settings import RunConfig, TaskSettings
from nasfast.spaces import (
    Arch,
    ArchSpace,
    LayerSpace,
    SearchSpace,
    arch_file_text,
    load_arch,
    space_kind,
)
from nasfast.supernet import Supernet
from nasfast.tasks import TASK_FILE, Task, TaskRunner, check_done, gpus_for
from nasfast.train.supernet import make_supernet

_LOG = logging.getLogger(__name__)

SEED = "-seed-"
"""Stands between the name of a network and its seed, where that is not the run's."""

NETWORK = "network"
"""Name of the only network in the folder of a task."""

FOLDER = "retrain-tasks"
"""In the run directory until networks are retrained: what the executor keeps of its tasks, such as their logs."""


@stage(create=False)
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
        TaskError: some networks are not retrained; the others are. CheckpointError and others: see
            `nasfast.train.train`.
    """
    started = time.monotonic()
    check_one_process(tasks, world.size)
    form: Any = None
    # of a run without a supernet, the first training decides the images, also where it is stopped
    decides = world.is_main and without_supernet(cfg) and nothing_is_trained(cfg)  # before another rank begins
    if world.is_main:
        found, names = to_retrain(cfg, archs, pareto=pareto)
        form = {"space": found.to_dict(), "trainings": _with_seeds(names, cfg)}
    form = json.loads(world.broadcast_bytes(json.dumps(form).encode()))
    space = space_kind(form["space"]).from_dict(form["space"])
    trainings = {name: (tuple(arch), seed) for name, (arch, seed) in form["trainings"].items()}
    if tasks is None:
        results = _retrain_here(cfg, space, trainings, resume=resume, decides=decides, world=world)
    else:
        results = _retrain_apart(cfg, space, trainings, resume=resume, decides=decides, settings=tasks)
    if world.is_main:
        # the logs of tasks, these or those of an earlier call, were for networks that failed
        shutil.rmtree(cfg.run_dir / FOLDER, ignore_errors=True)
        save_config(cfg)
        say("retrain", started, f"{len(results)} networks, {cfg.retrain.train.epochs} epochs each")
    return results


def _retrain_here(
    cfg: RunConfig,
    space: ArchSpace,
    trainings: Mapping[str, tuple[Arch, int]],
    *,
    resume: bool,
    decides: bool,
    world: World,
) -> dict[str, RetrainResult]:
    """Retrain architectures with their seeds in the processes of this run; see `retrain_best`."""
    side_by_side = cfg.retrain.parallel == "networks"
    team = world.single() if side_by_side else world
    loaders = {s: retrain_loaders(cfg, space, seed=s, world=team) for s in sorted({s for _, s in trainings.values()})}
    if decides:
        save_config(cfg)
    net = None
    if cfg.retrain.init == "inherit" and isinstance(space, SearchSpace):
        net = load_supernet(cfg)[0] if world.is_main else make_supernet(space, cfg.method, cfg.supernet)[0]
        net.to(cfg.torch_device)
        world.broadcast(net.state_dict().values())
    mine = list(trainings)[world.rank :: world.size] if side_by_side else list(trainings)
    results = {}
    for number, name in enumerate(mine, 1):
        arch, seed = trainings[name]
        with followed_by(len(mine) - number):
            results[name] = _retrain_one(
                cfg, space, arch, seed, loaders[seed], name=name, net=net, resume=resume, world=team
            )
    forms = world.all_gather(json.dumps({name: result.to_dict() for name, result in results.items()}).encode())
    everyone = {name: result for form in forms for name, result in json.loads(form).items()}
    return {name: RetrainResult.from_dict(everyone[name]) for name in trainings}


def _retrain_one(
    cfg: RunConfig,
    space: ArchSpace,
    arch: Arch,
    seed: int,
    images: tuple[Loader, Loader],
    *,
    name: str,
    net: Supernet | None,
    resume: bool,
    world: World,
) -> RetrainResult:
    """Train the network of one architecture with the settings of a run, in this process."""
    return retrain(
        space,
        arch,
        *images,
        cfg.retrain,
        run_dir=cfg.run_dir,
        name=name,
        supernet=net,
        activation=cfg.supernet.activation,
        seed=seed,
        resume=resume,
        device=cfg.torch_device,
        world=world,
    )


def _retrain_apart(
    cfg: RunConfig,
    space: ArchSpace,
    trainings: Mapping[str, tuple[Arch, int]],
    *,
    resume: bool,
    decides: bool,
    settings: TaskSettings,
) -> dict[str, RetrainResult]:
    """As `_retrain_here`, each network in one task; they write the files that retraining in this process writes."""
    retrain_loaders(cfg, space)  # an error is said here, before workers start
    for name, (arch, seed) in trainings.items():
        if not resume:
            check_not_begun(cfg.run_dir, name, arch, cfg.retrain, seed=seed)
    if decides:
        save_config(cfg)
    with TaskRunner(cfg.run_dir / FOLDER, settings) as runner:
        # a call in which another network failed has left them, and what is in retrain/ may have changed since then:
        # checkpoints say what is finished
        for path in runner.folder.glob(f"*/{TASK_FILE}"):
            path.unlink()
        results = runner.run(network_task(cfg, space, *trainings[name], name=name, in_run=True) for name in trainings)
    check_done(results, "networks are not retrained; the same command with --resume continues")
    return {name: RetrainResult.load(cfg.run_dir / "retrain" / name / RESULT_FILE) for name in trainings}


# trainings as tasks, of a run, of its seeds, and of a sample of its space


def network_task(
    cfg: RunConfig,
    space: ArchSpace,
    arch: Arch,
    seed: int,
    *,
    name: str,
    in_run: bool = False,
    hold_out: bool = False,
) -> Task:
    """The training of one network of a space, as a task of this name.

    With `in_run` it is the network of the run that is called `name`, whose directory the caller has locked; otherwise
    its files are in the folder of the task. With `hold_out` its accuracy is that of held-out training images, and no
    checkpoint stays at the end.
    """
    config, machine = settings_of_seed(cfg, seed)
    return Task(
        name,
        f"{__name__}:train_network",
        {
            "config": config,
            "space": space.to_dict(),
            "arch": list(arch),
            "network": name if in_run else NETWORK,
            "hold_out": hold_out,
        },
        threads=cfg.threads or torch.get_num_threads(),  # results depend on it, so a task has that of this process
        gpus=gpus_for(cfg.torch_device),
        machine={**machine, "out": cfg.out if in_run else None},
    )


def train_network(
    folder: Path,
    *,
    config: Mapping[str, Any],
    space: Mapping[str, Any],
    arch: Sequence[int],
    network: str,
    hold_out: bool,
    out: str | None,
    **machine: Any,
) -> dict[str, Any]:
    """The function of `network_task`: train a network, from its newest checkpoint where there is one.

    It returns `result.json` without the time.
    """
    cfg = settings_of_task(config, folder if out is None else Path(out), machine)
    the_space, finished = space_kind(space).from_dict(space), cfg.run_dir / "retrain" / network / RESULT_FILE
    if hold_out and finished.exists():  # its checkpoints are gone
        result = RetrainResult.load(finished)
    else:
        images = retrain_loaders(cfg, the_space, hold_out=hold_out)
        with tracked(cfg.track, cfg.run_dir, cfg.to_dict()):
            net = load_supernet(cfg)[0] if cfg.retrain.init == "inherit" else None
            world = SINGLE if out is None else replace(SINGLE, leads=False)
            result = _retrain_one(
                cfg, the_space, tuple(arch), cfg.seed, images, name=network, net=net, resume=True, world=world
            )
    if hold_out:  # a large sample would fill the disk
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    form = result.to_dict()
    del form["seconds"]
    return form


def settings_of_seed(cfg: RunConfig, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that decide the results of one seed of a run, and those of the machine, without the run directory.

    All seeds have the same validation images.
    """
    data = cfg.data if cfg.data.split_seed is not None else cfg.data.replace(split_seed=cfg.seed)
    form = cfg.replace(seed=seed, data=data, search=cfg.search.replace(seed=seed)).to_dict()
    del form["out"]
    return form, {"data": {key: form["data"].pop(key) for key in MACHINE_DATA}, "track": form.pop("track")}


def settings_of_task(config: Mapping[str, Any], out: Path, machine: Mapping[str, Any]) -> RunConfig:
    """The settings of a task from the two parts that `settings_of_seed` gave, and its run directory."""
    return RunConfig.from_dict(merge({**config, "out": str(out)}, machine))


# which networks, and their names


def to_retrain(
    cfg: RunConfig, archs: Sequence[Arch | str] = (), *, pareto: bool = False
) -> tuple[ArchSpace, dict[str, Arch]]:
    """The space of a run, and the architectures to retrain by the names of their networks; see `retrain_best`."""
    check_settings(cfg, supernet=not without_supernet(cfg))
    cells = space_of_cells(cfg)
    space = saved_space(cfg) if cells is None else cells
    if archs:
        return space, _named(read_arch(arch, space) for arch in archs)
    if cells is not None:
        if pareto:
            raise ConfigError("a search of cells computes no Pareto front: leave --pareto out")
        return cells, cell_results(cfg.run_dir, cells)
    found = search_result(cfg.run_dir, saved_space(cfg))
    if pareto:
        return space, _named(required_front(found, cfg.run_dir))
    chosen = dict(list(named_candidates(found).items())[: cfg.retrain.top_k])
    if len(chosen) < cfg.retrain.top_k:
        path = cfg.run_dir / ARCHS_FILE
        _LOG.warning("retrain.top_k=%d, but %s has %d architectures", cfg.retrain.top_k, path, len(chosen))
    return space, chosen | random_peers(cfg, saved_space(cfg), found.candidates[0].arch)


def random_peers(cfg: RunConfig, space: LayerSpace, arch: Arch) -> dict[str, Arch]:
    """The random architectures of the cost of `arch` that the settings ask for: `random`, `random-2`, ..."""
    limits = read_limits(cfg.search, space)
    if cfg.retrain.random_architectures:
        limits.check(space)
    count, rng = cfg.retrain.random_architectures, random.Random(cfg.seed)
    peers = equal_cost_peers(space, rng, arch, count, limits=limits)
    return {"random" if i == 0 else f"random-{i + 1}": peer for i, peer in enumerate(peers)}


def _with_seeds(chosen: Mapping[str, Arch], cfg: RunConfig) -> dict[str, tuple[Arch, int]]:
    """Every training by the name of its network: an architecture and a seed.

    The first has the seed of the run and the name as given, the others have names such as `best-seed-1`. Random
    architectures are trained once each, because they stand for architectures and not for one of them.
    """
    trainings = {}
    for name, arch in chosen.items():
        trainings[name] = (arch, cfg.seed)
        if not name.startswith("random"):
            seeds = range(cfg.seed + 1, cfg.seed + cfg.retrain.seeds)
            trainings |= {f"{name}{SEED}{seed}": (arch, seed) for seed in seeds}
    return trainings


def read_arch(arch: Arch | str, space: ArchSpace) -> Arch:
    """An architecture of a space, given as a value or as text."""
    return space.parse(arch) if isinstance(arch, str) else space.check(arch)


def _named(archs: Iterable[Arch]) -> dict[str, Arch]:
    return {f"arch-{arch_file_text(arch)}": arch for arch in archs}


def cell_results(run_dir: Path, space: ArchSpace) -> dict[str, Arch]:
    """What a search of cells wrote, by its names."""
    paths = sorted(run_dir.glob("arch_*.json"))
    if not paths:
        raise FileNotFoundError(f"no arch_NAME.json in {run_dir}: a search of cells writes them at its end")
    return {path.stem.removeprefix("arch_"): load_arch(path, space) for path in paths}


def search_result(run_dir: Path, space: SearchSpace) -> SearchResult:
    """archs.json."""
    load = functools.partial(load_candidates, space=space)
    return result_of(run_dir / ARCHS_FILE, load, f"nasfast search --out {run_dir}")


def named_candidates(found: SearchResult) -> dict[str, Arch]:
    """The candidates of a search under the names of their networks."""
    return {"best" if i == 0 else f"best-{i + 1}": c.arch for i, c in enumerate(found.candidates)}


def front_points(found: SearchResult) -> list[Arch]:
    """Every architecture on the front against MACs or on that against a table, each once."""
    return list(dict.fromkeys(point.arch for point in found.points[len(found.candidates) :]))


def required_front(found: SearchResult, run_dir: Path) -> list[Arch]:
    """`front_points`, of which there must be some."""
    if not (points := front_points(found)):
        raise ConfigError(
            f"{run_dir / ARCHS_FILE} has no Pareto front, because the score scores whole paths: name architectures "
            "with --arch, or search with score.distill=true"
        )
    return points
