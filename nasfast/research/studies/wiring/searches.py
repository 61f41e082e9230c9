"""What the wiring study runs: searches, each in a folder of its own, and networks that do not learn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.data.datasets import split_source
from nasfast.pipeline.children import Task as WorkerTask
from nasfast.pipeline.children import TaskRunner, check_done, gpus_for
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.gates import draw_gates, uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.probe import GROUPS, QUANTITIES, LocalCosts, grouped_costs
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.cells.search import CellSearchResult, endless, search_cells
from nasfast.research.cells.space import Cell, CellSpace
from nasfast.research.studies.report import plain
from nasfast.research.studies.run import Task
from nasfast.research.studies.wiring.config import CostConfig, ExperimentConfig
from nasfast.research.studies.wiring.measure import measures
from nasfast.runtime.files import write_atomic
from nasfast.settings import TaskSettings
from nasfast.train.batches import to_learn_from

_STEPS_PER_EPOCH = 100
Runs = Mapping[int, CellSearchResult]
"""Seed -> its search."""


@cache
def image_folder(images: str) -> FolderSource:
    """The images of a folder, which is read once for all searches of a study."""
    return FolderSource(images)


def loaders(cfg: ExperimentConfig, *, bilevel: bool) -> tuple[Any, Any]:
    """Batches for the weights, and held-out ones for the architecture (None on one level).

    From a folder, half of the images are held out.
    """
    if cfg.images is None:
        parts = prototypes(cfg.noise, cfg.samples, cfg.samples, seed=cfg.seed)
        steps = min(_STEPS_PER_EPOCH, cfg.steps)
        train, held_out = (
            DrawnBatches(*part, steps=steps, batch=cfg.batch_size, seed=2 * cfg.seed + i)
            for i, part in enumerate(parts)
        )
        return train, held_out if bilevel else None
    data = DataConfig(train=cfg.images, batch_size=cfg.batch_size, augment="cifar")
    source = image_folder(cfg.images)
    halves = split_source(source, 0.5, cfg.seed) if bilevel else (source, None)
    first, second = (
        None if half is None else make_loader(data, half, train=True, resolution=cfg.resolution, seed=2 * cfg.seed + i)
        for i, half in enumerate(halves)
    )
    return first, second


@dataclass(frozen=True)
class Search:
    """A search of a study: data and training (`cfg`), how operations are chosen (`how`), and what is searched."""

    name: str
    cfg: ExperimentConfig
    how: CellSearchConfig
    space: CellSpace

    @property
    def folder(self) -> str:
        """Name of the directory of its files."""
        return f"{self.name}-s{self.cfg.seed}"

    def run(self, folder: Path, device: str, task: Task | None = None) -> CellSearchResult:
        """Search, or continue what is in `folder`, which gets the files and the measures of section 6.

        `task` tells the progress; None shows the lines of a training.
        """
        cfg = self.cfg
        train_loader, held_out = loaders(cfg, bilevel=self.how.bilevel)
        epochs = max(1, round(cfg.steps / len(train_loader)))
        steps = epochs * len(train_loader)
        done = None if task is None else task(f"{self.name}, seed {cfg.seed}", steps)
        data_settings = ("samples", "noise") if cfg.images is None else ("images", "resolution")
        result = search_cells(
            self.space,
            train_loader,
            self.how,
            cfg.weights.replace(epochs=epochs),
            held_out=held_out,
            run_dir=folder,
            resume=True,
            device=device,
            settings={"data": {name: getattr(cfg, name) for name in (*data_settings, "batch_size", "seed")}},
            progress=done,
        )
        if done is not None:
            done(steps)  # also where the search had ended before
        write_atomic(folder / "measures.json", (json.dumps(plain(measures(result)), indent=1) + "\n").encode())
        return result

    def apart(self, device: str) -> WorkerTask:
        """The search as a task for a process of its own."""
        # what the kinds of configs have in common decides a search; P1 and P2 share searches
        settings = {field.name: getattr(self.cfg, field.name) for field in fields(ExperimentConfig)}
        config = ExperimentConfig(**{**settings, "seeds": 1, "threads": 0})
        arguments = {
            "config": config.to_dict(),
            "space": self.space.to_dict(),
            "how": self.how.to_dict(),
            "device": device,
        }
        # results depend on the number of threads, so a task has that of this process
        threads, run = torch.get_num_threads(), f"{__name__}:search_apart"
        return WorkerTask(self.folder, run, arguments, threads=threads, gpus=gpus_for(device))


def search_apart(
    folder: Path, *, config: Mapping[str, Any], space: Mapping[str, Any], how: Mapping[str, Any], device: str
) -> None:
    """The function of a task: one search, in its folder."""
    cfg, cells = ExperimentConfig.from_dict(config), CellSpace.from_dict(space)
    Search("", cfg, CellSearchConfig.from_dict(how), cells).run(folder, device)


def seed_searches(cfg: ExperimentConfig, name: str, cell: Cell | None = None, **changes: Any) -> dict[int, Search]:
    """The search of every seed; `cell` and `changes` replace the cell and the settings of the config."""
    configs = {seed: cfg.replace(seed=seed) for seed in range(cfg.seed, cfg.seed + cfg.seeds)}
    return {seed: Search(name, own, own.search(**changes), own.space(cell)) for seed, own in configs.items()}


@dataclass(frozen=True)
class Runner:
    """Carries out searches, each in a directory of its own below `out`, where a search that was stopped continues.

    With `tasks`, each search runs in a process of its own; else all run in this one.
    """

    out: Path
    task: Task
    device: str
    tasks: TaskSettings | None = None

    def all(self, *groups: Mapping[int, Search]) -> list[dict[int, CellSearchResult]]:
        """The results of every group of searches, by the keys of the group.

        Raises:
            TaskError: searches in processes of their own have failed or were stopped; the others are finished.
        """
        if self.tasks is not None:
            with TaskRunner(self.out, self.tasks) as runner:
                results = runner.run([search.apart(self.device) for group in groups for search in group.values()])
            check_done(results, "searches are not finished; the same command continues")
        # those that ran apart are found finished
        return [{k: s.run(self.out / s.folder, self.device, self.task) for k, s in group.items()} for group in groups]


def monte_carlo_costs(
    net: CellSupernet, loader: object, *, batches: int, seed: int = 0, device: str = "cpu"
) -> tuple[LocalCosts, Tensor]:
    """Local costs of a network that does not learn; every batch draws its operations uniformly (section 4.3).

    Args:
        net: a network on `device`.
        loader: gives (images, labels), and is started again as often as needed.
        batches: how many batches are measured.
        seed: seed of the draws.
        device: where to compute.

    Returns:
        The costs, (cells, edges, ops), and (groups, quantities) sums over samples, see `nasfast.research.cells.probe`.
    """
    cfg, space = CellSearchConfig(method="uniform", seed=seed), net.space
    table, outputs = LocalCosts.empty(net.gate_shape), torch.zeros(len(GROUPS), len(QUANTITIES), dtype=torch.float64)
    cell_types = torch.tensor(space.cell_types)
    logits = uniform_logits(space)
    for step, (x, y) in enumerate(islice(endless(to_learn_from(loader), device), batches)):
        draw = draw_gates(space, cfg, logits, step=step, progress=0.0)
        gates = draw.gates[cell_types].to(device, next(net.parameters()).dtype).requires_grad_()
        predicted = net(x, gates, draw.runs)
        # the gradient is zeros if every edge has drawn the operation none
        (cost,) = torch.autograd.grad(F.cross_entropy(predicted, y), gates, materialize_grads=True)
        table.add(cost, draw.gates[cell_types] > 0)
        outputs += grouped_costs(predicted, y)
    return table, outputs


def initial_costs(cfg: CostConfig, device: str, nets: Iterable[int]) -> tuple[list[LocalCosts], float]:
    """Costs of fresh networks, one for each seed in `nets`, and their mean output cost."""
    tables, cost, count = [], 0.0, 0.0
    for seed in nets:
        net = CellSupernet(cfg.space(), seed=seed).to(device).to(memory_format=torch.channels_last)
        loader, _ = loaders(cfg.replace(seed=seed), bilevel=False)
        table, outputs = monte_carlo_costs(net, loader, batches=cfg.batches, seed=seed, device=device)
        tables.append(table)
        cost, count = cost + float(outputs[0, 0]), count + float(outputs[0, 3])
    return tables, cost / count


def last_cell(tables: Sequence[LocalCosts]) -> LocalCosts:
    """(1, edges, ops): costs of the last cell, all networks together."""
    return LocalCosts(*(sum(getattr(t, name)[-1:] for t in tables) for name in ("total", "squares", "count")))
