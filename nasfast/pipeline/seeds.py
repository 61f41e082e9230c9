"""`nasfast run --seeds N`: N seeds of supernet, score and search; their agreement; the answer beside its rivals."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nasfast.config import ConfigError
from nasfast.data import DataError
from nasfast.indicators.registry import gives_table
from nasfast.indicators.structure import structure_table
from nasfast.indicators.table import TABLE_FILE, IndicatorTable
from nasfast.pipeline.architectures import random_peers
from nasfast.pipeline.children import (
    Task,
    TaskError,
    TaskResult,
    TaskRunner,
    child_settings,
    child_task,
    gpus_for,
    load_result,
    threads_for,
    workers_for,
)
from nasfast.pipeline.estimate import Plan, Trial, Work, start_of_task
from nasfast.pipeline.evidence import open_inputs
from nasfast.pipeline.inputs import Inputs
from nasfast.pipeline.networks import network_task
from nasfast.pipeline.run import Run, resolved
from nasfast.pipeline.searching import search
from nasfast.pipeline.stages import score, supernet
from nasfast.report.agreement import Agreement, agreement
from nasfast.report.seeds import write_stability_page
from nasfast.runtime.device import use_threads
from nasfast.runtime.files import seal, write_atomic
from nasfast.search import InfeasibleConstraintError, top_k
from nasfast.search.sampling import EQUAL_COST_TOLERANCE
from nasfast.settings import CONFIG_FILE, SPACE_FILE, STABILITY_FILE, RunConfig, TaskSettings
from nasfast.spaces import Arch, SearchSpace, arch_file_text

_LOG = logging.getLogger(__name__)

LEAST_SEEDS = 2


@dataclass(frozen=True)
class Network:
    """A retraining: of which architecture, in which role, with which seed."""

    role: str
    arch: Arch
    seed: int


def shared_settings(cfg: RunConfig, seeds: int) -> RunConfig:
    """The settings that seeds share, with threads for each; refuses what cannot be repeated with several seeds."""
    if seeds < LEAST_SEEDS:
        raise ConfigError(f"--seeds must be at least {LEAST_SEEDS}, to compare them, got {seeds}")
    cfg = cfg.resolved()
    if not gives_table(cfg.score):
        raise ConfigError(
            f"--seeds compares tables of scores, and {cfg.score.name!r} scores whole paths: set score.distill=true"
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
    return cfg.replace(threads=cfg.threads or threads_for(seeds))  # results depend on it, so it is kept


def list_networks(answer: Arch, rivals: Mapping[str, Arch], seeds: int) -> list[Network]:
    """What is retrained: the answer and the structural baseline with every seed, other rivals with one each."""
    networks = [Network("answer", answer, seed) for seed in range(seeds)]
    if rivals.get("structure", answer) != answer:
        networks += [Network("structure", rivals["structure"], seed) for seed in range(seeds)]
    peers = [role for role in rivals if role != "structure"]
    return networks + [Network(role, rivals[role], number % seeds) for number, role in enumerate(peers)]


def run_seeds(cfg: RunConfig, seeds: int, settings: TaskSettings = TaskSettings(), *, resume: bool = False) -> Path:
    """Run everything for `seeds` seeds; writes `stability.json` and returns the path of the page `report.html`.

    The tasks are `seed-I` and `networks/ARCH/seed-I`, folders of the run directory; seed I is `cfg.seed + I`. There may
    be more seeds when a run resumes. What is there when the time limit comes, or when tasks fail in every attempt, is
    reported; the page names what is missing.
    """
    cfg = shared_settings(cfg, seeds)
    # nothing is written before the executor is there
    with Run.open(cfg, begins=True, threads=False) as run, TaskRunner(run.dir, settings) as runner:
        if (run.dir / SPACE_FILE).exists():
            raise FileExistsError(
                f"{run.dir} has a run without --seeds, whose report.html would be replaced: leave --seeds away, or "
                "choose another --out"
            )
        if (run.dir / CONFIG_FILE).exists() and not resume:
            raise run.already_begun("a run", run.check_settings)
        run.check_settings()
        try:
            open_inputs(run.cfg)  # refuses limits that no architecture meets
        except DataError as error:
            if settings.executor != "ray":
                raise
            _LOG.warning("this machine does not see the images, so each task checks its limits itself: %s", error)
        tasks = [seed_task(run.cfg, number) for number in range(seeds)]
        for task in tasks:
            load_result(run.dir / task.name, task)  # refuses that of another task
        run.save_config()
        return _run(run, tasks, runner)


def _run(run: Run, tasks: Sequence[Task], runner: TaskRunner) -> Path:
    result: Agreement | None = None
    trainings: list[tuple[Network, TaskResult]] = []
    rivals: dict[str, Arch] | None = None
    seeds, scored = len(tasks), runner.run(tasks)
    good = [result.name for result in scored if result.status == "done"]
    if len(good) >= LEAST_SEEDS:
        tables = [IndicatorTable.load(run.dir / name / TABLE_FILE) for name in good]
        space = tables[0].space
        assert isinstance(space, SearchSpace)
        inputs = Inputs.of(run.cfg, space)
        result = agreement(tables, inputs.limits, k=run.cfg.search.top_k)
        answer = result.top[0].arch
        rivals = find_rivals(run.cfg, inputs, answer)
        trainings = _retrain(run.cfg, space, runner, list_networks(answer, rivals, seeds))
    elif not runner.time_is_over:
        raise TaskError(
            f"{len(good)} of {seeds} seeds ended well, at least {LEAST_SEEDS} are needed: "
            + "; ".join(f"{r.name}: {r.error} (log: {r.log})" for r in scored if r.status == "failed")
        )
    stability = {
        "seeds": seeds,
        "scored": good,
        "agreement": None if result is None else agreement_record(result),
        "networks": [
            {"role": network.role, "arch": list(network.arch), "seed": network.seed, "result": ending.result}
            for network, ending in trainings
            if ending.status == "done"
        ],
        "missing": {
            ending.name: {"status": ending.status, "error": ending.error, "log": ending.log.name}
            for ending in [*scored, *(ending for _, ending in trainings)]
            if ending.status != "done"
        },
        "no_structure": rivals is not None and "structure" not in rivals,
    }
    write_atomic(run.dir / STABILITY_FILE, seal(stability).encode())
    return write_stability_page(run.dir)


def _retrain(
    cfg: RunConfig, space: SearchSpace, runner: TaskRunner, networks: Sequence[Network]
) -> list[tuple[Network, TaskResult]]:
    """Each network with its result; what has two roles is trained once."""
    names = [f"networks/{arch_file_text(n.arch)}/seed-{n.seed}" for n in networks]
    tasks = [
        network_task(cfg, name, space, n.arch, seed=cfg.seed + n.seed) for name, n in zip(names, networks, strict=True)
    ]
    results = {result.name: result for result in runner.run({task.name: task for task in tasks}.values())}
    return [(network, results[task.name]) for network, task in zip(networks, tasks, strict=True)]


def agreement_record(result: Agreement) -> dict[str, Any]:
    """The agreement as JSON, with what follows from it."""
    return {
        **dataclasses.asdict(result),
        "stable": result.stable,
        "of_mean": result.reliability,
        "seeds_needed": result.seeds_needed,
    }


def plan_seeds(cfg: RunConfig, seeds: int, settings: TaskSettings = TaskSettings()) -> Plan:
    """Time a few steps of each kind of task in this process."""
    cfg, start = resolved(shared_settings(cfg, seeds)), start_of_task()
    trainings = 2 * seeds + cfg.retrain.random_architectures
    at_a_time = [
        settings.workers or workers_for(number, threads=cfg.threads, gpus=gpus_for(cfg.torch_device))
        for number in (seeds, trainings)
    ]
    use_threads(cfg.threads)
    trial = Trial(cfg)
    scoring = trial.supernet() + trial.score() + start
    kinds = (
        Work("seeds (supernet, score, search)", seeds, scoring, at_a_time[0]),
        Work("networks (retraining)", trainings, trial.network() + start, at_a_time[1]),
    )
    return Plan(kinds, cfg.threads, settings, trial.written, settings.max_hours)


def seed_task(cfg: RunConfig, number: int) -> Task:
    """Supernet, score and search of one seed, in `seed-NUMBER`, which is a run directory like any other."""
    return child_task(cfg, f"seed-{number}", f"{__name__}:score_seed", seed=cfg.seed + number)


def score_seed(folder: Path, *, config: Mapping[str, Any], **machine: Any) -> dict[str, Any]:
    """The function of `seed_task`; the result names the best architectures."""
    with Run.open(child_settings(folder, config, machine), begins=True) as run:
        resume = (folder / "checkpoints").exists()
        supernet(run, resume=resume)
        score(run, resume=resume)
        return {"top": [list(candidate.arch) for candidate in search(run)]}


def find_rivals(cfg: RunConfig, inputs: Inputs, answer: Arch) -> dict[str, Arch]:
    """The architectures that the answer is compared with, by name: `structure`, `random`, `random-2`, ...

    `structure` has the highest `sqrt_size` (`nasfast.indicators.structure`) within the limits and at most 1 % more MACs
    than the answer. It may be the answer itself. It skips no layer, so there is none if only skips are so cheap.
    """
    space, max_macs = inputs.space, inputs.space.cost(answer).macs * (1 + EQUAL_COST_TOLERANCE)
    if inputs.limits.max_macs is not None:
        max_macs = min(max_macs, inputs.limits.max_macs)
    limits = dataclasses.replace(inputs.limits, max_macs=max_macs, allow_identity=False)
    rivals = {}
    try:
        rivals["structure"] = top_k(structure_table(space, "sqrt_size"), space, limits, k=1)[0].arch
    except InfeasibleConstraintError as error:
        _LOG.warning("no structural baseline to compare with: %s", error)
    return rivals | random_peers(cfg, inputs, answer)
