"""`nasfast run --seeds N`: N seeds of supernet, score and search; their agreement; the answer beside its rivals."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nasfast.config import ConfigError
from nasfast.data import DataError
from nasfast.indicators.scores import gives_table
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline import TABLE_FILE
from nasfast.runtime.files import seal, write_atomic
from nasfast.search.limits import read_limits
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig, TaskSettings
from nasfast.spaces import Arch, LayerSpace
from nasfast.stability.agreement import Agreement, agreement
from nasfast.stability.page import STABILITY_FILE, write_stability_page
from nasfast.stability.room import check_room
from nasfast.stability.work import network_task, rivals, seed_task, seeds_at_a_time
from nasfast.stages.checks import already_begun, check_same_run
from nasfast.stages.inputs import checked_space
from nasfast.tasks import TaskError, TaskResult, TaskRunner, threads_for
from nasfast.tasks.task import saved_result

_LOG = logging.getLogger(__name__)

LEAST_SEEDS = 2


@dataclass(frozen=True)
class Network:
    """A retraining: of which architecture, in which role, with which seed."""

    role: str
    arch: Arch
    seed: int


def check_seeds(cfg: RunConfig, seeds: int) -> None:
    """Refuse what cannot be repeated with several seeds, before anything is written.

    Raises:
        ConfigError: there are too few seeds, or the settings have no table, refine it, or need a supernet for
            retraining.
    """
    if seeds < LEAST_SEEDS:
        raise ConfigError(f"--seeds must be at least {LEAST_SEEDS}, to compare them, got {seeds}")
    score = cfg.score.resolved(cfg.method)
    if not gives_table(score):
        raise ConfigError(
            f"--seeds compares tables of scores, and {score.name!r} scores whole paths: set score.distill=true"
        )
    if cfg.search.refine is not None:
        raise ConfigError(
            "--seeds compares what each seed has learned, and search.refine adds the same accuracies to each: set "
            f"search.refine=null, and then refine one of them: nasfast search --out {cfg.run_dir / 'seed-0'} "
            f"--search.refine {cfg.search.refine}"
        )
    if cfg.retrain.seeds != 1:
        raise ConfigError(
            f"--seeds retrains the answer with each of its seeds, got retrain.seeds={cfg.retrain.seeds}: set it to 1"
        )
    if cfg.retrain.init == "inherit":
        raise ConfigError(
            "--seeds retrains from fresh weights, because the supernets of the seeds differ: set "
            "retrain.init=orthogonal, or another of its values"
        )


def with_threads(cfg: RunConfig, seeds: int) -> RunConfig:
    """The settings with a number of threads, which results depend on."""
    return cfg.replace(threads=cfg.threads or threads_for(seeds))


def networks(answer: Arch, others: Mapping[str, Arch], seeds: int) -> list[Network]:
    """What is retrained: the answer and the structural baseline with every seed, random architectures with one each.

    Args:
        answer: the answer.
        others: its `rivals`.
        seeds: number of seeds.
    """
    found = [Network("answer", answer, seed) for seed in range(seeds)]
    if others.get("structure", answer) != answer:
        found += [Network("structure", others["structure"], seed) for seed in range(seeds)]
    peers = [role for role in others if role != "structure"]
    return found + [Network(role, others[role], number % seeds) for number, role in enumerate(peers)]


def run_seeds(cfg: RunConfig, seeds: int, settings: TaskSettings = TaskSettings(), *, resume: bool = False) -> Path:
    """Run everything for `seeds` seeds, and write `stability.json` and the page `report.html`.

    The tasks are `seed-I` and `networks/ARCH/seed-I`, folders of the run directory. What is there when the time limit
    comes, or when tasks fail in every attempt, is reported; the page names what is missing.

    Args:
        cfg: settings of the run; seed I of the seeds is `cfg.seed + I`.
        seeds: number of seeds, at least 2. It may grow when a run resumes.
        settings: where the tasks run, and for how long.
        resume: whether the run directory may have such a run already, which then continues.

    Returns:
        Path of the page.

    Raises:
        ConfigError: see `check_seeds`.
        FileExistsError: the run directory has a run, and `resume` is false; or a run of a single seed.
        CheckpointError: that run has other settings, or the disk has no room for so many seeds.
        DataError: the images cannot be used.
        TaskError: finished seeds had other settings; nothing was changed. Or fewer than two seeds ended well, so there
            is nothing to compare.
        RunDirectoryError: another process writes to the run directory.
    """
    check_seeds(cfg, seeds)
    cfg = with_threads(cfg, seeds)
    # nothing is written before the executor is there
    with TaskRunner(cfg.run_dir, settings) as runner:
        if (cfg.run_dir / SPACE_FILE).exists():
            raise FileExistsError(
                f"{cfg.run_dir} has a run without --seeds, whose report.html would be replaced: leave --seeds away, or "
                "choose another --out"
            )
        same = partial(check_same_run, cfg.run_dir / CONFIG_FILE, cfg)
        if (cfg.run_dir / CONFIG_FILE).exists() and not resume:
            raise already_begun(cfg.run_dir, "a run", same)
        same()
        if settings.executor == "processes":
            check_room(cfg, seeds, settings.workers or seeds_at_a_time(cfg, seeds))
        else:
            _check_limits(cfg)
        for task in (seed_task(cfg, number) for number in range(seeds)):
            saved_result(cfg.run_dir / task.name, task)
        write_atomic(cfg.run_dir / CONFIG_FILE, cfg.resolved().to_yaml().encode())
        return _run(cfg, seeds, runner)


def _check_limits(cfg: RunConfig) -> None:
    """Refuse limits that no architecture meets, and tables that cannot be used, before a cluster gets any task."""
    try:
        checked_space(cfg)
    except DataError as error:
        _LOG.warning("this machine does not see the images, so each task checks its limits itself: %s", error)


def _run(cfg: RunConfig, seeds: int, runner: TaskRunner) -> Path:
    found: Agreement | None = None
    trained: list[tuple[Network, TaskResult]] = []
    others: dict[str, Arch] | None = None
    # which networks come later is not known yet, but about how many
    later = [float(cfg.retrain.train.epochs)] * (2 * seeds + cfg.retrain.random_architectures)
    scored = runner.run([seed_task(cfg, number) for number in range(seeds)], later=later, phase="1/2 supernets")
    good = [result.name for result in scored if result.status == "done"]
    if len(good) >= LEAST_SEEDS:
        tables = [IndicatorTable.load(cfg.run_dir / name / TABLE_FILE) for name in good]
        search = cfg.search
        limits = read_limits(search, tables[0].space)
        found = agreement(tables, limits, k=search.top_k, allow_identity=search.allow_identity)
        answer, space = found.top[0].arch, tables[0].space
        others = rivals(cfg, space, answer)
        trained = _retrain(cfg, runner, networks(answer, others, seeds), space)
    elif not runner.time_is_over:
        raise TaskError(
            f"{len(good)} of {seeds} seeds ended well, at least {LEAST_SEEDS} are needed: "
            + "; ".join(f"{r.name}: {r.error} (log: {r.log})" for r in scored if r.status == "failed")
        )
    form = _form(seeds, good, found, trained, [*scored, *(result for _, result in trained)])
    form["no_structure"] = others is not None and "structure" not in others
    write_atomic(cfg.run_dir / STABILITY_FILE, seal(form).encode())
    return write_stability_page(cfg.run_dir)


def _retrain(
    cfg: RunConfig, runner: TaskRunner, chosen: Sequence[Network], space: LayerSpace
) -> list[tuple[Network, TaskResult]]:
    """Each network with its result; what has two roles is trained once."""
    tasks = [network_task(cfg, space, network.arch, network.seed) for network in chosen]
    ended = runner.run({task.name: task for task in tasks}.values(), phase="2/2 retraining")
    results = {result.name: result for result in ended}
    return [(network, results[task.name]) for network, task in zip(chosen, tasks, strict=True)]


def _form(
    seeds: int,
    good: Sequence[str],
    found: Agreement | None,
    trained: Sequence[tuple[Network, TaskResult]],
    results: Sequence[TaskResult],
) -> dict[str, Any]:
    """`stability.json`: what was asked for, what was found, and what is missing."""
    networks = [
        {"role": network.role, "arch": list(network.arch), "seed": network.seed, "result": result.result}
        for network, result in trained
        if result.status == "done"
    ]
    missing = {
        result.name: {"status": result.status, "error": result.error, "log": result.log.name}
        for result in results
        if result.status != "done"
    }
    return {
        "seeds": seeds,
        "scored": list(good),
        "agreement": None if found is None else _plain(found),
        "networks": networks,
        "missing": missing,
    }


def _plain(found: Agreement) -> dict[str, Any]:
    """The agreement as JSON, with what follows from it."""
    form = json.loads(json.dumps(found, default=lambda part: vars(part)))
    return {**form, "stable": found.stable, "of_mean": found.of_mean, "seeds_needed": found.seeds_needed}
