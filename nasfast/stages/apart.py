"""The retraining of several networks of a run as tasks, in processes of this machine or on a Ray cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nasfast.config import portable
from nasfast.retrain import RetrainResult, retrain
from nasfast.retrain.retrain import RESULT_FILE, check_not_begun
from nasfast.runtime.distributed import SINGLE
from nasfast.runtime.tracking import tracked
from nasfast.settings import RunConfig, TaskSettings
from nasfast.spaces import Arch, ArchSpace, space_kind
from nasfast.stages.inputs import load_supernet, retrain_loaders
from nasfast.tasks import Task, TaskRunner, check_done, gpus_for
from nasfast.tasks.task import TASK_FILE

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
