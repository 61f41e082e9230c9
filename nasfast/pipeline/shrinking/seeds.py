"""`nasfast shrink --seeds N`: a whole run with each seed, each a task, and one page with means and spread."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nasfast.config import ConfigError, merge
from nasfast.data import DataError
from nasfast.pipeline.children import TASK_FILE, Task, TaskError, TaskRunner, gpus_for
from nasfast.pipeline.run import same_images
from nasfast.pipeline.shrinking.material import TEACHER_FILE, Material
from nasfast.pipeline.shrinking.plan import planned_sizes
from nasfast.pipeline.shrinking.run import ShrinkConfig, ShrinkRun
from nasfast.pipeline.shrinking.stages import shrink_network
from nasfast.report.shrinking_seeds import write_shrink_seeds_page
from nasfast.runtime.files import seal, write_atomic
from nasfast.settings import CONFIG_FILE, MACHINE, STABILITY_FILE, TaskSettings

_LOG = logging.getLogger(__name__)

LEAST_SEEDS = 2


def shared_settings(cfg: ShrinkConfig, seeds: int, settings: TaskSettings) -> tuple[ShrinkConfig, TaskSettings]:
    """The settings of all seeds, and those of their tasks: one at a time unless they say more, because they are timed.

    Raises:
        ConfigError: there is one seed.
    """
    if seeds < LEAST_SEEDS:
        raise ConfigError(f"--seeds must be at least {LEAST_SEEDS}, to compare them, got {seeds}")
    workers = 1 if settings.workers is None else settings.workers
    # results depend on the number of threads, so it is kept
    return cfg.replace(threads=cfg.threads or torch.get_num_threads()), settings.replace(workers=workers)


def shrink_seeds(
    cfg: ShrinkConfig, seeds: int, settings: TaskSettings = TaskSettings(), *, resume: bool = False
) -> Path:
    """Shrink a network with `seeds` seeds; writes `stability.json` and returns the path of the page `report.html`.

    The tasks are `seed-I`, folders of the run directory; seed I is `cfg.seed + I`. All have the same validation images.
    There may be more seeds when a run resumes. What is there when the time limit comes, or when tasks fail in every
    attempt, is reported; the page names what is missing.

    Raises:
        ConfigError, DataError, ShrinkError, InfeasibleConstraintError: see `shrink_network`.
        FileExistsError, CheckpointError, RunDirectoryError: see `ShrinkRun.open`.
        TaskError: no seed ended well.
    """
    cfg, settings = shared_settings(cfg, seeds, settings)
    # nothing is written before the executor is there
    with ShrinkRun.open(cfg, resume=resume) as run, TaskRunner(run.dir, settings) as runner:
        if (run.dir / TEACHER_FILE).exists():
            raise FileExistsError(
                f"{run.dir} has a run without --seeds, whose report.html would be replaced: leave --seeds away, or "
                "choose another --out"
            )
        try:
            planned_sizes(Material(run))  # refuses what a task would
        except DataError as error:
            if settings.executor != "ray":
                raise
            _LOG.warning("this machine does not see the images, so each task checks its limits itself: %s", error)
        run.begin_writing()
        for path in run.dir.glob(f"seed-*/{TASK_FILE}"):  # the files of the stages say what is finished
            path.unlink()
        results = runner.run([seed_task(cfg, number) for number in range(seeds)])
        done = [result.name for result in results if result.status == "done"]
        if not done and not runner.time_is_over:
            raise TaskError(
                f"none of {seeds} seeds ended well: "
                + "; ".join(f"{r.name}: {r.error} (log: {r.log})" for r in results)
            )
        missing = {r.name: {"status": r.status, "error": r.error, "log": r.log.name} for r in results}
        for name in done:
            del missing[name]
        write_atomic(run.dir / STABILITY_FILE, seal({"seeds": seeds, "done": done, "missing": missing}).encode())
        return write_shrink_seeds_page(run.dir)


def seed_task(cfg: ShrinkConfig, number: int) -> Task:
    """The run of one seed, in `seed-NUMBER`, which is a run directory like any other."""
    child = cfg.replace(seed=cfg.seed + number, data=same_images(cfg.data, cfg.seed))
    config, machine = child.parted(MACHINE)
    del config["out"]
    function, gpus = f"{__name__}:shrink_seed", gpus_for(cfg.latency_device)
    return Task(f"seed-{number}", function, {"config": config}, threads=cfg.threads, gpus=gpus, machine=machine)


def shrink_seed(folder: Path, *, config: Mapping[str, Any], **machine: Any) -> dict[str, Any]:
    """The function of `seed_task`; its result names the networks."""
    cfg = ShrinkConfig.from_dict(merge({**config, "out": str(folder)}, machine))
    return {"networks": list(shrink_network(cfg, resume=(folder / CONFIG_FILE).exists()).networks)}
