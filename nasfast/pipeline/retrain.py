"""The retrain stage: archs.json -> retrain/NAME/; the networks one after another, by several ranks, or as tasks."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nasfast.config import portable
from nasfast.pipeline.check import check_one_process
from nasfast.pipeline.chosen import to_retrain, with_seeds
from nasfast.pipeline.inputs import load_supernet, retrain_loaders
from nasfast.pipeline.stage import save_config, say, stage
from nasfast.retrain import RetrainResult, retrain
from nasfast.retrain.retrain import RESULT_FILE, check_not_begun
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.progress import followed_by
from nasfast.runtime.tracking import tracked
from nasfast.settings import RunConfig, TaskSettings
from nasfast.spaces import Arch, ArchSpace, SearchSpace, space_kind
from nasfast.tasks import TASK_FILE, Task, TaskRunner, check_done, gpus_for
from nasfast.train.supernet import make_supernet

_LOG = logging.getLogger(__name__)


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
        TaskError: see `nasfast.pipeline.retrain.retrain_apart`. CheckpointError and others: see `nasfast.train.train`.
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
        shutil.rmtree(cfg.run_dir / FOLDER, ignore_errors=True)
        save_config(cfg)
        say("retrain", started, f"{len(results)} networks, {cfg.retrain.train.epochs} epochs each")
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


FOLDER = "retrain-tasks"
"""In the run directory until networks are retrained: what the executor keeps of its tasks, such as their logs."""


def retrain_apart(
    cfg: RunConfig, space: ArchSpace, trainings: Mapping[str, tuple[Arch, int]], settings: TaskSettings, *, resume: bool
) -> dict[str, RetrainResult]:
    """Retrain networks of a run, each in one task; they write the files that retraining in this process writes.

    The caller holds the lock of the run directory.

    Args:
        cfg: settings of the run.
        space: the run's space.
        trainings: architectures and seeds by the names of their networks.
        settings: where the tasks run.
        resume: whether each may continue from checkpoints that are there already.

    Returns:
        Results by name, as the tasks wrote them to their result.json.

    Raises:
        ConfigError, DataError: the images cannot be used; see `retrain_loaders`.
        FileExistsError: there are checkpoints, and `resume` is off; nothing was changed.
        TaskError: some networks are not retrained; the others are.
    """
    retrain_loaders(cfg, space)  # an error is said here, before workers start
    for name, (arch, seed) in trainings.items():
        if not resume:
            check_not_begun(cfg.run_dir, name, arch, cfg.retrain, seed=seed)
    with TaskRunner(cfg.run_dir / FOLDER, settings) as runner:
        # a call in which another network failed has left them, and what is in retrain/ may have changed since then:
        # checkpoints say what is finished
        for path in runner.folder.glob(f"*/{TASK_FILE}"):
            path.unlink()
        results = runner.run([training_task(cfg, space, name, *training) for name, training in trainings.items()])
    check_done(results, "networks are not retrained; the same command with --resume continues")
    return {name: RetrainResult.load(cfg.run_dir / "retrain" / name / RESULT_FILE) for name in trainings}


def training_task(cfg: RunConfig, space: ArchSpace, name: str, arch: Arch, seed: int) -> Task:
    """The task of one network, `retrain_one`."""
    # results depend on the number of threads, so a task has that of this process
    threads = torch.get_num_threads()
    arguments = {"config": cfg.to_dict(), "space": space.to_dict(), "network": name, "arch": list(arch), "seed": seed}
    # a run may continue with other settings, such as more epochs, which make another task
    digest = hashlib.blake2b(json.dumps([arguments, threads]).encode(), digest_size=4).hexdigest()
    return Task(
        f"{name}-{digest}",
        f"{__name__}:retrain_one",
        arguments,
        threads=threads,
        cost=float(space.cost(arch).macs),
        gpus=gpus_for(cfg.torch_device),
    )


def retrain_one(
    folder: Path, *, config: Mapping[str, Any], space: Mapping[str, Any], network: str, arch: list[int], seed: int
) -> None:
    """The function of a task: retrain one network, from its newest checkpoint where there is one."""
    cfg, the_space = RunConfig.from_dict(config), space_kind(space).from_dict(space)
    train, val = retrain_loaders(cfg, the_space, seed=seed)
    with tracked(cfg.track, cfg.run_dir, portable(cfg.to_dict())):
        retrain(
            the_space,
            tuple(arch),
            train,
            val,
            cfg.retrain,
            run_dir=cfg.run_dir,
            name=network,
            supernet=load_supernet(cfg)[0] if cfg.retrain.init == "inherit" else None,
            activation=cfg.supernet.activation,
            seed=seed,
            resume=True,
            device=cfg.torch_device,
            # the driver holds the lock of the run directory
            world=replace(SINGLE, leads=False),
        )
