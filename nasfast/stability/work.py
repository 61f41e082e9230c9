"""The tasks of `nasfast run --seeds`: a supernet with its score, and a retrained network."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nasfast import pipeline
from nasfast.config import portable
from nasfast.indicators.structure import structure_table
from nasfast.retrain import retrain
from nasfast.runtime.tracking import tracked
from nasfast.search import InfeasibleConstraintError, equal_cost_peers, top_k
from nasfast.search.limits import read_limits
from nasfast.search.sampling import EQUAL_COST_TOLERANCE
from nasfast.settings import RunConfig
from nasfast.spaces import Arch, LayerSpace, SearchSpace, arch_file_text
from nasfast.stages.checks import MACHINE_DATA
from nasfast.stages.inputs import retrain_loaders
from nasfast.tasks import Task, gpus_for, room

_LOG = logging.getLogger(__name__)

_HERE = __name__


def seed_task(cfg: RunConfig, number: int) -> Task:
    """Supernet, score and search of one seed, in `seed-NUMBER`, which is a run directory like any other."""
    return Task(
        f"seed-{number}",
        f"{_HERE}:score_seed",
        {"config": _settings(cfg, number)},
        threads=cfg.threads,
        cost=float(cfg.train.epochs),
        gpus=gpus_for(cfg.torch_device),
        machine=_machine(cfg),
    )


def seeds_at_a_time(cfg: RunConfig, seeds: int) -> int:
    """How many of the tasks of `seeds` seeds fit on this machine at a time."""
    # the tasks are alike, and no more run than there are cores
    return room.workers_for([seed_task(cfg, number) for number in range(min(seeds, room.cores()))])


def network_task(cfg: RunConfig, space: LayerSpace, arch: Arch, number: int) -> Task:
    """The retraining of one architecture with one seed, in `networks/ARCH/seed-NUMBER`."""
    return Task(
        f"networks/{arch_file_text(arch)}/seed-{number}",
        f"{_HERE}:retrain_network",
        {"config": _settings(cfg, number), "space": space.to_dict(), "arch": list(arch)},
        threads=cfg.threads,
        cost=float(cfg.retrain.train.epochs),
        gpus=gpus_for(cfg.torch_device),
        machine=_machine(cfg),
    )


def _settings(cfg: RunConfig, number: int) -> dict[str, Any]:
    """The settings of one seed that decide its results; all seeds have the same validation images."""
    data = cfg.data if cfg.data.split_seed is not None else cfg.data.replace(split_seed=cfg.seed)
    # a resumed run finds the seed of the search resolved in its config.yaml; each seed has its own
    search = cfg.search.replace(seed=None)
    form = cfg.replace(seed=cfg.seed + number, data=data, search=search).resolved().to_dict()
    for mapping, keys in ((form, ("out", "track")), (form["data"], MACHINE_DATA)):
        for key in keys:
            del mapping[key]
    return form


def _machine(cfg: RunConfig) -> dict[str, Any]:
    """The settings that `_settings` leaves out, without the place of the files."""
    return {"data": {key: getattr(cfg.data, key) for key in MACHINE_DATA}, "track": list(cfg.track)}


def _joined(config: Mapping[str, Any], folder: Path, *, data: Mapping[str, Any], track: Sequence[str]) -> RunConfig:
    """The settings of a task, from those that decide its results, its folder, and what `_machine` gave."""
    form = {**config, "data": {**config["data"], **data}, "track": list(track), "out": str(folder)}
    return RunConfig.from_dict(form)


def score_seed(folder: Path, *, config: Mapping[str, Any], **machine: Any) -> dict[str, Any]:
    """Train and score a supernet; the result names its best architectures."""
    cfg = _joined(config, folder, **machine)
    pipeline.supernet(cfg, resume=(folder / "checkpoints").exists())
    pipeline.score(cfg)
    return {"top": [list(candidate.arch) for candidate in pipeline.search(cfg)]}


def retrain_network(
    folder: Path, *, config: Mapping[str, Any], space: Mapping[str, Any], arch: Sequence[int], **machine: Any
) -> dict[str, Any]:
    """Retrain one architecture; the result is its `result.json` without the time."""
    cfg = _joined(config, folder, **machine)
    the_space = SearchSpace.from_dict(space)
    train, val = retrain_loaders(cfg, the_space)
    with tracked(cfg.track, folder, portable(cfg.to_dict())):
        result = retrain(
            the_space,
            tuple(arch),
            train,
            val,
            cfg.retrain,
            run_dir=folder,
            name="network",
            activation=cfg.supernet.activation,
            seed=cfg.seed,
            resume=True,
            device=cfg.torch_device,
        )
    form = result.to_dict()
    del form["seconds"]
    return form


def rivals(cfg: RunConfig, space: LayerSpace, answer: Arch) -> dict[str, Arch]:
    """The architectures that the answer is compared with, by name: `structure`, `random`, `random-2`, ...

    `structure` has the highest `sqrt_size` (`nasfast.indicators.structure`) within the limits and at most 1 % more MACs
    than the answer. It may be the answer itself. It skips no layer, so there is none if only skips are so cheap.
    """
    search = cfg.search
    macs = space.cost(answer).macs * (1 + EQUAL_COST_TOLERANCE)
    given = read_limits(search, space)
    limits = dataclasses.replace(given, max_macs=min(macs, given.max_macs or macs))
    table = structure_table(space, "sqrt_size")
    found = {}
    try:
        found["structure"] = top_k(table, space, limits, k=1)[0].arch
    except InfeasibleConstraintError as error:
        _LOG.warning("no structural baseline to compare with: %s", error)
    peers = equal_cost_peers(
        space,
        random.Random(cfg.seed),
        answer,
        cfg.retrain.random_architectures,
        limits=given,
        allow_identity=search.allow_identity,
    )
    return found | {"random" if i == 0 else f"random-{i + 1}": arch for i, arch in enumerate(peers)}
