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
from nasfast.pipeline.agreement import Agreement, agreement
from nasfast.pipeline.check import already_begun, check_settings
from nasfast.pipeline.estimate import Plan, Trial, Work
from nasfast.pipeline.inputs import checked_space
from nasfast.pipeline.networks import network_task, random_peers, settings_of_seed, settings_of_task
from nasfast.pipeline.resolve import resolved
from nasfast.pipeline.searching import search
from nasfast.pipeline.seeds_page import STABILITY_FILE, write_stability_page
from nasfast.pipeline.stages import score, supernet
from nasfast.runtime.device import use_threads
from nasfast.runtime.files import seal, write_atomic
from nasfast.search import InfeasibleConstraintError, top_k
from nasfast.search.limits import read_limits
from nasfast.search.sampling import EQUAL_COST_TOLERANCE
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig, TaskSettings
from nasfast.spaces import Arch, LayerSpace, arch_file_text
from nasfast.tasks import Task, TaskError, TaskResult, TaskRunner, gpus_for, saved_result, threads_for, workers_for

_LOG = logging.getLogger(__name__)

LEAST_SEEDS = 2


@dataclass(frozen=True)
class Network:
    """A retraining: of which architecture, in which role, with which seed."""

    role: str
    arch: Arch
    seed: int


def check_seeds(cfg: RunConfig, seeds: int) -> None:
    """Refuse what cannot be repeated with several seeds, before anything is written."""
    if seeds < LEAST_SEEDS:
        raise ConfigError(f"--seeds must be at least {LEAST_SEEDS}, to compare them, got {seeds}")
    score = cfg.score
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


def networks(answer: Arch, others: Mapping[str, Arch], seeds: int) -> list[Network]:
    """What is retrained: the answer and the structural baseline with every seed, other rivals with one each."""
    found = [Network("answer", answer, seed) for seed in range(seeds)]
    if others.get("structure", answer) != answer:
        found += [Network("structure", others["structure"], seed) for seed in range(seeds)]
    peers = [role for role in others if role != "structure"]
    return found + [Network(role, others[role], number % seeds) for number, role in enumerate(peers)]


def run_seeds(cfg: RunConfig, seeds: int, settings: TaskSettings = TaskSettings(), *, resume: bool = False) -> Path:
    """Run everything for `seeds` seeds; writes `stability.json` and returns the path of the page `report.html`.

    The tasks are `seed-I` and `networks/ARCH/seed-I`, folders of the run directory; seed I is `cfg.seed + I`. There may
    be more seeds when a run resumes. What is there when the time limit comes, or when tasks fail in every attempt, is
    reported; the page names what is missing.
    """
    check_seeds(cfg, seeds)
    cfg = resolved(cfg)
    cfg = cfg.replace(threads=cfg.threads or threads_for(seeds))  # results depend on it, so it is kept
    # nothing is written before the executor is there
    with TaskRunner(cfg.run_dir, settings) as runner:
        if (cfg.run_dir / SPACE_FILE).exists():
            raise FileExistsError(
                f"{cfg.run_dir} has a run without --seeds, whose report.html would be replaced: leave --seeds away, or "
                "choose another --out"
            )
        if (cfg.run_dir / CONFIG_FILE).exists() and not resume:
            raise already_begun(cfg, "a run", check_settings)
        check_settings(cfg)
        try:
            checked_space(cfg)  # refuses limits that no architecture meets
        except DataError as error:
            if settings.executor != "ray":
                raise
            _LOG.warning("this machine does not see the images, so each task checks its limits itself: %s", error)
        for task in (seed_task(cfg, number) for number in range(seeds)):
            saved_result(cfg.run_dir / task.name, task)
        write_atomic(cfg.run_dir / CONFIG_FILE, cfg.to_yaml().encode())
        return _run(cfg, seeds, runner)


def _run(cfg: RunConfig, seeds: int, runner: TaskRunner) -> Path:
    found: Agreement | None = None
    trained: list[tuple[Network, TaskResult]] = []
    others: dict[str, Arch] | None = None
    scored = runner.run([seed_task(cfg, number) for number in range(seeds)])
    good = [result.name for result in scored if result.status == "done"]
    if len(good) >= LEAST_SEEDS:
        tables = [IndicatorTable.load(cfg.run_dir / name / TABLE_FILE) for name in good]
        found = agreement(tables, read_limits(cfg.search, tables[0].space), k=cfg.search.top_k)
        answer, space = found.top[0].arch, tables[0].space
        others = rivals(cfg, space, answer)
        trained = _retrain(cfg, runner, networks(answer, others, seeds), space)
    elif not runner.time_is_over:
        raise TaskError(
            f"{len(good)} of {seeds} seeds ended well, at least {LEAST_SEEDS} are needed: "
            + "; ".join(f"{r.name}: {r.error} (log: {r.log})" for r in scored if r.status == "failed")
        )
    ended = [*scored, *(result for _, result in trained)]
    form = {
        "seeds": seeds,
        "scored": good,
        "agreement": None if found is None else _plain(found),
        "networks": [
            {"role": network.role, "arch": list(network.arch), "seed": network.seed, "result": result.result}
            for network, result in trained
            if result.status == "done"
        ],
        "missing": {
            result.name: {"status": result.status, "error": result.error, "log": result.log.name}
            for result in ended
            if result.status != "done"
        },
        "no_structure": others is not None and "structure" not in others,
    }
    write_atomic(cfg.run_dir / STABILITY_FILE, seal(form).encode())
    return write_stability_page(cfg.run_dir)


def _retrain(
    cfg: RunConfig, runner: TaskRunner, chosen: Sequence[Network], space: LayerSpace
) -> list[tuple[Network, TaskResult]]:
    """Each network with its result; what has two roles is trained once."""
    tasks = [
        network_task(cfg, space, n.arch, cfg.seed + n.seed, name=f"networks/{arch_file_text(n.arch)}/seed-{n.seed}")
        for n in chosen
    ]
    ended = runner.run({task.name: task for task in tasks}.values())
    results = {result.name: result for result in ended}
    return [(network, results[task.name]) for network, task in zip(chosen, tasks, strict=True)]


def _plain(found: Agreement) -> dict[str, Any]:
    """The agreement as JSON, with what follows from it."""
    return {
        **dataclasses.asdict(found),
        "stable": found.stable,
        "of_mean": found.of_mean,
        "seeds_needed": found.seeds_needed,
    }


def plan_seeds(cfg: RunConfig, seeds: int, settings: TaskSettings = TaskSettings()) -> Plan:
    """Time a few steps of each kind of task in this process."""
    check_seeds(cfg, seeds)
    cfg = cfg.replace(threads=cfg.threads or threads_for(seeds))  # results depend on it, so it is kept
    at_a_time = settings.workers or workers_for(seeds, threads=cfg.threads, gpus=gpus_for(cfg.torch_device))
    use_threads(cfg.threads)
    trainings = 2 * seeds + cfg.retrain.random_architectures
    trial = Trial(cfg)
    scored = Work("seeds (supernet, score, search)", seeds, trial.supernet() + trial.score())
    trained = Work("networks (retraining)", trainings, trial.network())
    return Plan((scored, trained), cfg.threads, at_a_time, settings, trial.written, settings.max_hours)


def seed_task(cfg: RunConfig, number: int) -> Task:
    """Supernet, score and search of one seed, in `seed-NUMBER`, which is a run directory like any other."""
    config, machine = settings_of_seed(cfg, cfg.seed + number)
    return Task(
        f"seed-{number}",
        f"{__name__}:score_seed",
        {"config": config},
        threads=cfg.threads,
        gpus=gpus_for(cfg.torch_device),
        machine=machine,
    )


def score_seed(folder: Path, *, config: Mapping[str, Any], **machine: Any) -> dict[str, Any]:
    """The function of `seed_task`; the result names the best architectures."""
    cfg = settings_of_task(config, folder, machine)
    supernet(cfg, resume=(folder / "checkpoints").exists())
    score(cfg)
    return {"top": [list(candidate.arch) for candidate in search(cfg)]}


def rivals(cfg: RunConfig, space: LayerSpace, answer: Arch) -> dict[str, Arch]:
    """The architectures that the answer is compared with, by name: `structure`, `random`, `random-2`, ...

    `structure` has the highest `sqrt_size` (`nasfast.indicators.structure`) within the limits and at most 1 % more MACs
    than the answer. It may be the answer itself. It skips no layer, so there is none if only skips are so cheap.
    """
    macs = space.cost(answer).macs * (1 + EQUAL_COST_TOLERANCE)
    given = read_limits(cfg.search, space)
    limits = dataclasses.replace(given, max_macs=min(macs, given.max_macs or macs), allow_identity=False)
    table = structure_table(space, "sqrt_size")
    found = {}
    try:
        found["structure"] = top_k(table, space, limits, k=1)[0].arch
    except InfeasibleConstraintError as error:
        _LOG.warning("no structural baseline to compare with: %s", error)
    return found | random_peers(cfg, space, answer)
