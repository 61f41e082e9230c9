"""The stage retrain: networks are trained in the processes of a run, or each as a task in one of its own.

archs.json -> retrain/
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nasfast.data import Loader
from nasfast.display import counted
from nasfast.pipeline.architectures import choose_architectures, list_trainings
from nasfast.pipeline.children import TASK_FILE, Task, TaskRunner, check_done, child_settings, child_task
from nasfast.pipeline.evidence import load_supernet, retrain_loaders
from nasfast.pipeline.run import Run, log_stage
from nasfast.retrain import RetrainResult, retrain
from nasfast.retrain.retrain import RESULT_FILE, check_not_begun
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.progress import followed_by
from nasfast.settings import RunConfig
from nasfast.spaces import Arch, ArchSpace, SearchSpace, space_kind
from nasfast.supernet import Supernet
from nasfast.train.supernet import make_supernet

_LOG = logging.getLogger(__name__)

NETWORK = "network"
"""Name of the only network in the folder of a task."""

FOLDER = "retrain-tasks"
"""In the run directory until networks are retrained: what the executor keeps of its tasks, such as their logs."""


def retrain_best(
    run: Run, *, archs: Sequence[Arch | str] = (), pareto: bool = False, resume: bool = False
) -> dict[str, RetrainResult]:
    """Retrain the best architectures, and random ones of equal cost if asked; writes retrain/NAME/.

    Where a search of cells wrote space.yaml and arch_NAME.json, each of these architectures is retrained under its name
    (`argmax`, `darts`); `retrain.top_k` and `retrain.random_architectures` have no effect there.

    The ranks of the run retrain together, or each its own networks (`retrain.parallel`). Only rank 0 reads the run
    directory; a rank that trains a network by itself writes the files of that network.

    Args:
        run: the run.
        archs: retrain these architectures of the run's space instead, as values or text, named like `arch-1_0_2_1`.
        pareto: retrain every point of the Pareto fronts in archs.json instead, named in the same way.
        resume: whether to continue each from its newest good checkpoint. A run that torchrun starts again continues in
            any case.

    Returns:
        Results by name: `best`, `best-2`, ..., `random`, ..., and with `retrain.seeds` also `best-seed-1` and the like.

    Raises:
        FileNotFoundError: the search has not run.
        ArchError, ConfigError: one of `archs` is not in the space.
        TaskError: some networks are not retrained; the others are. CheckpointError and others: see
            `nasfast.train.train`.
    """
    run.check_open()
    started, cfg, world = time.monotonic(), run.cfg, run.world
    plan: Any = None
    # of a run without a supernet, the first training decides the images, also where it is stopped
    decides = world.is_main and run.needs_no_supernet and run.nothing_is_trained  # before another rank begins
    if world.is_main:
        chosen_space, chosen = choose_architectures(cfg, archs, pareto=pareto)
        plan = {"space": chosen_space.to_dict(), "trainings": list_trainings(cfg, chosen)}
    plan = json.loads(world.broadcast_bytes(json.dumps(plan).encode()))
    space = space_kind(plan["space"]).from_dict(plan["space"])
    trainings = {name: (tuple(arch), seed) for name, (arch, seed) in plan["trainings"].items()}
    train_all = _retrain_in_ranks if run.tasks is None else _retrain_as_tasks
    results = train_all(run, space, trainings, resume=resume, decides=decides)
    if world.is_main:
        # the logs of tasks, these or those of an earlier call, were for networks that failed
        shutil.rmtree(run.dir / FOLDER, ignore_errors=True)
        run.save_config()
        epochs = counted(cfg.retrain.train.epochs, "epoch")
        log_stage("retrain", started, f"{counted(len(results), 'network')}, {epochs} each")
    return results


def _retrain_in_ranks(
    run: Run, space: ArchSpace, trainings: Mapping[str, tuple[Arch, int]], *, resume: bool, decides: bool
) -> dict[str, RetrainResult]:
    """Retrain architectures with their seeds in the processes of this run; see `retrain_best`."""
    cfg, world = run.cfg, run.world
    side_by_side = cfg.retrain.parallel == "networks"
    team = world.single() if side_by_side else world
    loaders = {s: retrain_loaders(cfg, space, seed=s, world=team) for s in sorted({s for _, s in trainings.values()})}
    if decides:
        run.save_config()
    net = None
    if cfg.retrain.init == "inherit" and isinstance(space, SearchSpace):
        net = load_supernet(cfg, space)[0] if world.is_main else make_supernet(space, cfg.method, cfg.supernet)[0]
        net.to(cfg.torch_device)
        world.broadcast(net.state_dict().values())
    names = list(trainings)[world.rank :: world.size] if side_by_side else list(trainings)
    results = {}
    for number, name in enumerate(names, 1):
        arch, seed = trainings[name]
        with followed_by(len(names) - number):
            results[name] = _train(cfg, space, arch, seed, loaders[seed], name=name, net=net, resume=resume, world=team)
    texts = world.all_gather(json.dumps({name: result.to_dict() for name, result in results.items()}).encode())
    records = {name: record for text in texts for name, record in json.loads(text).items()}
    return {name: RetrainResult.from_dict(records[name]) for name in trainings}


def _retrain_as_tasks(
    run: Run, space: ArchSpace, trainings: Mapping[str, tuple[Arch, int]], *, resume: bool, decides: bool
) -> dict[str, RetrainResult]:
    """As `_retrain_in_ranks`, each network in one task; they write the files that retraining in this process writes."""
    retrain_loaders(run.cfg, space)  # an error is said here, before workers start
    for name, (arch, seed) in trainings.items():
        if not resume:
            check_not_begun(run.dir, name, arch, run.cfg.retrain, seed=seed)
    if decides:
        run.save_config()
    assert run.tasks is not None
    with TaskRunner(run.dir / FOLDER, run.tasks) as runner:
        # a call in which another network failed has left them, and what is in retrain/ may have changed since then:
        # checkpoints say what is finished
        for path in runner.folder.glob(f"*/{TASK_FILE}"):
            path.unlink()
        tasks = [
            network_task(run.cfg, name, space, arch, seed=seed, in_run=True) for name, (arch, seed) in trainings.items()
        ]
        results = runner.run(tasks)
    check_done(results, "networks are not retrained; the same command with --resume continues")
    return {name: RetrainResult.load(run.dir / "retrain" / name / RESULT_FILE) for name in trainings}


def _train(
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
    """Train the network of one architecture in this process, with the settings of a run."""
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


def network_task(
    cfg: RunConfig,
    name: str,
    space: ArchSpace,
    arch: Arch,
    *,
    seed: int,
    in_run: bool = False,
    hold_out: bool = False,
) -> Task:
    """The training of one network of a space with a seed, as a task of this name.

    With `in_run` it is the network of the run that is called `name`, whose directory the caller has locked; otherwise
    its files are in the folder of the task. With `hold_out` its accuracy is that of held-out training images, and no
    checkpoint stays at the end.
    """
    return child_task(
        cfg,
        name,
        f"{__name__}:train_network",
        seed=seed,
        in_run=in_run,
        space=space.to_dict(),
        arch=list(arch),
        network=name if in_run else NETWORK,
        hold_out=hold_out,
    )


def train_network(
    folder: Path,
    *,
    config: Mapping[str, Any],
    space: Mapping[str, Any],
    arch: Sequence[int],
    network: str,
    hold_out: bool,
    **machine: Any,
) -> dict[str, Any]:
    """The function of `network_task`: train a network, from its newest checkpoint where there is one.

    It returns `result.json` without the time.
    """
    cfg, the_space = child_settings(folder, config, machine), space_kind(space).from_dict(space)
    finished = cfg.run_dir / "retrain" / network / RESULT_FILE
    if hold_out and finished.exists():  # its checkpoints are gone
        result = RetrainResult.load(finished)
    else:
        world = replace(SINGLE, leads="out" not in machine)
        with Run.open(cfg, begins=True, world=world) as run:
            images = retrain_loaders(run.cfg, the_space, hold_out=hold_out)
            net = None
            if cfg.retrain.init == "inherit" and isinstance(the_space, SearchSpace):
                net = load_supernet(run.cfg, the_space)[0]
            # not those that are resolved here: `precision: auto` is what the checkpoint has, on any machine
            as_given = run.cfg.replace(retrain=cfg.retrain)
            result = _train(
                as_given, the_space, tuple(arch), cfg.seed, images, name=network, net=net, resume=True, world=world
            )
    if hold_out:  # a large sample would fill the disk
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    record = result.to_dict()
    del record["seconds"]
    return record
