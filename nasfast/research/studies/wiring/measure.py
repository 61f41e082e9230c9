"""What the wiring study measures: its searches, and the numbers of section 6 of the paper that follow from them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.data.datasets import split_source
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.costs import NONE
from nasfast.research.cells.gates import uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.probe import GROUPS, QUANTITIES, LocalCosts, grouped_costs
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult, draw_gates, search_cells
from nasfast.research.cells.space import Cell, CellSpace
from nasfast.research.studies.report import plain
from nasfast.research.studies.run import Done, Task
from nasfast.research.studies.wiring.config import CostConfig, ExperimentConfig
from nasfast.runtime.device import torch_device
from nasfast.runtime.files import write_atomic
from nasfast.settings import TaskSettings
from nasfast.tasks import Task as WorkerTask
from nasfast.tasks import TaskRunner, check_done, gpus_for
from nasfast.train.batches import to_learn_from

_STEPS_PER_EPOCH = 100
_WINDOWS = 15
"""Parts of a run over which costs are averaged. Probabilities do not scatter and are shown at every record."""


@cache
def folder_of(images: str) -> FolderSource:
    """The images of a folder, which is read once for all searches of a study."""
    return FolderSource(images)


@dataclass(frozen=True)
class Search:
    """A search of a study.

    Attributes:
        name: name of the search; its files go to the directory NAME-sSEED.
        cfg: data, space and training.
        how: how operations are chosen.
        cell: instead of the config's.
    """

    name: str
    cfg: ExperimentConfig
    how: CellSearchConfig
    cell: Cell | None = None

    @property
    def folder(self) -> str:
        return f"{self.name}-s{self.cfg.seed}"


class Runner:
    """Carries out searches, each in a directory of its own, where a search that was stopped continues.

    Args:
        out: directory of the searches' directories.
        task: tells the progress.
        device: device of the networks.
        tasks: where each search runs in a process of its own; None runs them in this one.
    """

    def __init__(self, out: Path, task: Task, device: str, tasks: TaskSettings | None = None) -> None:
        self._out, self._task, self.device, self._tasks = out, task, device, tasks

    def prepare(self, searches: Iterable[Search]) -> None:
        """Carry out searches in processes of their own if the study was asked to; `all` then finds them finished.

        Raises:
            TaskError: some have failed or were stopped; the others are finished.
        """
        if self._tasks is None:
            return
        with TaskRunner(self._out, self._tasks) as runner:
            results = runner.run([_task_of(search, self.device) for search in searches])
        check_done(results, "searches are not finished; the same command continues")

    def all(self, searches: Mapping[int, Search]) -> dict[int, CellSearchResult]:
        """The results of searches, by the same keys."""
        self.prepare(searches.values())
        return {key: self._search(search) for key, search in searches.items()}

    def _search(self, search: Search) -> CellSearchResult:
        cfg, space = search.cfg, search.cfg.space(search.cell)

        def progress(steps: int) -> Done:
            return self._task(f"{search.name}, seed {cfg.seed}", steps)

        return _carry_out(space, cfg, search.how, self._out / search.folder, self.device, progress)


def _task_of(search: Search, device: str) -> WorkerTask:
    # what the kinds of configs have in common decides a search; P1 and P2 share searches
    own = {field.name: getattr(search.cfg, field.name) for field in fields(ExperimentConfig)}
    return WorkerTask(
        search.folder,
        f"{__name__}:search_apart",
        {
            "config": ExperimentConfig(**{**own, "seeds": 1, "threads": 0}).to_dict(),
            "space": search.cfg.space(search.cell).to_dict(),
            "how": search.how.to_dict(),
            "device": device,
        },
        # results depend on the number of threads, so a task has that of this process
        threads=torch.get_num_threads(),
        cost=float(search.cfg.steps),
        gpus=gpus_for(device),
    )


def search_apart(
    folder: Path, *, config: Mapping[str, Any], space: Mapping[str, Any], how: Mapping[str, Any], device: str
) -> None:
    """The function of a task: one search, in its folder."""
    cfg, cells = ExperimentConfig.from_dict(config), CellSpace.from_dict(space)
    _carry_out(cells, cfg, CellSearchConfig.from_dict(how), folder, device)


def _carry_out(
    space: CellSpace,
    cfg: ExperimentConfig,
    how: CellSearchConfig,
    folder: Path,
    device: str,
    progress: Callable[[int], Done] | None = None,
) -> CellSearchResult:
    """One search. Its files and the measures of section 6 go to `folder`.

    Args:
        space: the space of cells.
        cfg: data and training.
        how: how operations are chosen.
        folder: where an earlier attempt is continued.
        device: device of the network.
        progress: given the number of steps, returns what is told how many are done; None shows the lines of a training.
    """
    train_loader, held_out = loaders(cfg, bilevel=how.bilevel)
    epochs = max(1, round(cfg.steps / len(train_loader)))
    steps = epochs * len(train_loader)
    done = None if progress is None else progress(steps)
    found = search_cells(
        space,
        train_loader,
        how,
        cfg.weights.replace(epochs=epochs),
        held_out=held_out,
        run_dir=folder,
        name="cells",
        resume=True,
        device=device,
        settings={"data": _data_of(cfg)},
        progress=done,
    )
    if done is not None:
        done(steps)  # also where the search had ended before
    write_atomic(folder / "measures.json", (json.dumps(plain(measures(found)), indent=1) + "\n").encode())
    return found


@contextmanager
def runner_of(
    cfg: ExperimentConfig, out: Path | None, task: Task, tasks: TaskSettings | None = None
) -> Iterator[Runner]:
    """A runner in a directory; without one, in a temporary directory that is removed at the end."""
    if out is not None:
        yield Runner(out, task, torch_device(cfg.device), tasks)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Runner(Path(folder), task, torch_device(cfg.device), tasks)


def _data_of(cfg: ExperimentConfig) -> dict[str, Any]:
    """The fields of a config that decide the batches."""
    names = ("samples", "noise") if cfg.images is None else ("images", "resolution")
    return {name: getattr(cfg, name) for name in (*names, "batch_size", "seed")}


def loaders(cfg: ExperimentConfig, *, bilevel: bool) -> tuple[Any, Any]:
    """Batches for the weights, and held-out ones for the architecture (None on one level).

    From a folder, half of the images are held out.
    """
    if cfg.images is None:
        parts = prototypes(cfg.noise, cfg.samples, cfg.samples, seed=cfg.seed)
        steps = min(_STEPS_PER_EPOCH, cfg.steps)
        train, held = (
            DrawnBatches(*part, steps=steps, batch=cfg.batch_size, seed=2 * cfg.seed + i)
            for i, part in enumerate(parts)
        )
        return train, held if bilevel else None
    data = DataConfig(train=cfg.images, batch_size=cfg.batch_size, augment="cifar")
    source = folder_of(cfg.images)
    halves = split_source(source, 0.5, cfg.seed) if bilevel else (source, None)
    of_weights, of_logits = (
        None if half is None else make_loader(data, half, train=True, resolution=cfg.resolution, seed=2 * cfg.seed + i)
        for i, half in enumerate(halves)
    )
    return of_weights, of_logits


def searches_of(cfg: ExperimentConfig, name: str, **changes: Any) -> dict[int, Search]:
    """The search of every seed."""
    configs = [cfg.of_seed(i) for i in range(cfg.seeds)]
    return {of_seed.seed: Search(name, of_seed, of_seed.search(**changes)) for of_seed in configs}


def none_probability(found: CellSearchResult) -> np.ndarray:
    """(records + 1, edges) probability of None, averaged over types of cells."""
    return found.probabilities[..., found.space.ops.index(NONE)].mean(1)


def kept_edges(found: CellSearchResult) -> np.ndarray:
    """(records + 1, edges): the share of types of cells in which the most probable operation is not None."""
    return (found.probabilities.argmax(-1) != found.space.ops.index(NONE)).mean(1)


def intermediate_edges(space: CellSpace) -> np.ndarray:
    """(edges,) whether an edge starts at an intermediate node."""
    return np.array(space.cell.intermediate)


def live_operations(space: CellSpace) -> list[int]:
    """The indices of the operations other than None."""
    return [k for k, op in enumerate(space.ops) if op != NONE]


def _windows(records: np.ndarray) -> np.ndarray:
    """Sums over equal parts of a run."""
    return np.stack([part.sum(0) for part in np.array_split(records, min(_WINDOWS, len(records)))])


def window_steps(found: CellSearchResult) -> list[int]:
    """The last step of every window."""
    return [int(part[-1]) for part in np.array_split(found.steps, min(_WINDOWS, len(found.steps)))]


def output_costs(found: CellSearchResult, which: int = TRAIN) -> np.ndarray:
    """(windows,) mean C over all samples."""
    sums = _windows(found.outputs[:, which, GROUPS.index("all")])
    return sums[:, 0] / sums[:, -1]


def positive_share(found: CellSearchResult) -> np.ndarray:
    """(windows,) share of (cell, edge, operation) mean costs above 0, without None."""
    total, count = (_windows(found.costs[:, TRAIN, i][..., live_operations(found.space)]) for i in (0, 2))
    with np.errstate(invalid="ignore"):
        return (np.where(count > 0, total, 0) > 0).sum((1, 2, 3)) / (count > 0).sum((1, 2, 3))


def edge_means(found: CellSearchResult, records: slice = slice(None)) -> np.ndarray:
    """(edges,) mean cost over the batches in which an operation other than None ran, all cells together."""
    total, count = (found.costs[records, TRAIN, i][..., live_operations(found.space)].sum((0, 1, 3)) for i in (0, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count


def _same_node_difference(found: CellSearchResult) -> float:
    """Mean cost of intermediate edges minus that of input edges into the same node, averaged over such nodes."""
    cell, means, differences = found.space.cell, edge_means(found), []
    for node in range(cell.inputs, cell.inputs + cell.nodes):
        edges = np.array(cell.into(node))
        inner = intermediate_edges(found.space)[edges]
        if inner.any() and not inner.all():
            differences.append(np.nanmean(means[edges[inner]]) - np.nanmean(means[edges[~inner]]))
    return float(np.mean(differences)) if differences else float("nan")


def measures(found: CellSearchResult) -> dict[str, float]:
    """The numbers of section 6 of one search; `tables.MEASURES` has words for each."""
    inner, q, kept = intermediate_edges(found.space), none_probability(found), kept_edges(found)
    cost, positive = output_costs(found), positive_share(found)
    of = {"in": ~inner, "int": inner}
    result = {
        "C_first": float(cost[0]),
        "C_last": float(cost[-1]),
        "positive_first": float(positive[0]),
        "positive_last": float(positive[-1]),
        "intermediate_minus_input_cost": _same_node_difference(found),
    }
    for name, edges in of.items():
        if edges.any():
            mean = q[:, edges].mean(1)
            result |= {
                f"q_{name}_start": float(mean[0]),
                f"q_{name}_peak": float(mean.max()),
                f"q_{name}_end": float(mean[-1]),
                f"kept_{name}": float(kept[-1, edges].sum()),
                f"n_{name}": float(edges.sum()),
            }
    if found.cfg.bilevel:
        search = output_costs(found, SEARCH)
        result |= {
            "search_C_first": float(search[0]),
            "search_C_last": float(search[-1]),
            "search_C_smallest": float(search.min()),
            "search_minus_train_C": float((search - cost).min()),
        }
    return result


def half_and_quarter(found: CellSearchResult) -> tuple[slice, slice]:
    """The records of the first half of a run, and those of its last quarter."""
    records = len(found.steps)
    return slice(0, records // 2), slice(records - max(1, records // 4), records)


def sign_window(found: CellSearchResult) -> dict[int, dict[str, dict[str, float]]]:
    """Means of C, L, H over the third quarter of the run: by set of images and group."""
    records = len(found.steps)
    part = found.outputs[records // 2 : max(records // 2 + 1, 3 * records // 4)].sum(0)
    with np.errstate(invalid="ignore"):
        means = part[..., :3] / part[..., 3:]
    return {
        which: {group: dict(zip("CLH", means[which, g].tolist(), strict=True)) for g, group in enumerate(GROUPS)}
        for which in (TRAIN, SEARCH)
    }


def monte_carlo(
    net: CellSupernet,
    loader: object,
    *,
    batches: int,
    seed: int = 0,
    redraw: bool = False,
    device: str = "cpu",
) -> tuple[LocalCosts, Tensor]:
    """Local costs of a network that does not learn; every batch draws its operations uniformly (section 4.3).

    Args:
        net: a network on `device`.
        loader: gives (images, labels), and is started again as often as needed.
        batches: how many batches are measured.
        seed: seed of the draws.
        redraw: see `CellSearchConfig`.
        device: where to compute.

    Returns:
        The costs, (cells, edges, ops), and (groups, quantities) sums over samples, see `nasfast.research.cells.probe`.

    Raises:
        ValueError: the loader has no batch.
    """
    cfg = CellSearchConfig(method="uniform", redraw=redraw, seed=seed)
    loader, space = to_learn_from(loader), net.space
    table, outputs = LocalCosts.empty(net.gate_shape), torch.zeros(len(GROUPS), len(QUANTITIES), dtype=torch.float64)
    of_type = torch.tensor([space.type_of(i) for i in range(space.cells)])
    logits = uniform_logits(space)
    for i in range(batches):
        epoch, at = divmod(i, len(loader))
        if at == 0:
            stream = loader.epoch(epoch, device=device)
        x, y = next(stream)
        draw = draw_gates(space, cfg, logits, step=i, progress=0.0)
        gates = draw.gates[of_type].to(device, next(net.parameters()).dtype).requires_grad_()
        predicted = net(x, gates, draw.runs)
        # the gradient is zeros if every edge has drawn the operation none
        (cost,) = torch.autograd.grad(F.cross_entropy(predicted, y), gates, materialize_grads=True)
        table.add(cost, draw.gates[of_type] > 0)
        outputs += grouped_costs(predicted, y)
    return table, outputs


def initial_costs(
    cfg: CostConfig, runner: Runner, space: CellSpace, nets: Iterable[int]
) -> tuple[list[LocalCosts], float]:
    """Costs of fresh networks, one for each seed in `nets`, and their mean output cost."""
    tables, cost, count = [], 0.0, 0.0
    for seed in nets:
        of_seed = cfg.replace(seed=seed)
        loader, _ = loaders(of_seed, bilevel=False)
        net = CellSupernet(space, seed=seed).to(runner.device).to(memory_format=torch.channels_last)
        table, outputs = monte_carlo(net, loader, batches=cfg.batches, seed=seed, device=runner.device)
        tables.append(table)
        cost, count = cost + float(outputs[0, 0]), count + float(outputs[0, 3])
    return tables, cost / count


def last_cell(tables: Sequence[LocalCosts]) -> LocalCosts:
    """(1, edges, ops): costs of the last cell, all networks together."""
    return LocalCosts(*(sum(getattr(t, name)[-1:] for t in tables) for name in ("total", "squares", "count")))
