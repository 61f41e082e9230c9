"""The wiring study: its five kinds, each `run(config, out, task) -> StudyReport`, with all that they measure and show.

`theorems` checks the theorems on local costs, `p1` to `p3` show the three patterns, and `cost` measures local costs.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.data.datasets import split_source
from nasfast.research.analysis.moments.detect import Verdict
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.costs import NONE
from nasfast.research.cells.derive import derivations
from nasfast.research.cells.gates import draw_gates, uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.probe import GROUPS, QUANTITIES, LocalCosts, grouped_costs
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult, endless, search_cells
from nasfast.research.cells.space import CELLS, DARTS_OPS, Cell, CellSpace
from nasfast.research.studies.draw import INK, SERIES, Figure, heat, level
from nasfast.research.studies.report import Check, StudyReport, Table, checks_of, plain
from nasfast.research.studies.run import Task
from nasfast.research.studies.wiring.config import (
    CollapseConfig,
    CostConfig,
    ExperimentConfig,
    GrowthConfig,
    LearntConfig,
    TheoremsConfig,
    WidthConfig,
)
from nasfast.research.studies.wiring.theorems import check_theorems
from nasfast.runtime.device import torch_device
from nasfast.runtime.files import write_atomic
from nasfast.settings import TaskSettings
from nasfast.tasks import Task as WorkerTask
from nasfast.tasks import TaskRunner, check_done, gpus_for
from nasfast.train.batches import to_learn_from

Experiment = TypeVar("Experiment", bound=ExperimentConfig)
Runs = Mapping[int, CellSearchResult]
"""Seed -> its search."""
Measures = Mapping[str, float]

_STEPS_PER_EPOCH = 100
_WINDOWS = 15
"""Parts of a run over which costs are averaged. Probabilities do not scatter and are shown at every record."""


@cache
def folder_of(images: str) -> FolderSource:
    """The images of a folder, which is read once for all searches of a study."""
    return FolderSource(images)


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
        found = search_cells(
            self.space,
            train_loader,
            self.how,
            cfg.weights.replace(epochs=epochs),
            held_out=held_out,
            run_dir=folder,
            resume=True,
            device=device,
            settings={"data": _data_of(cfg)},
            progress=done,
        )
        if done is not None:
            done(steps)  # also where the search had ended before
        write_atomic(folder / "measures.json", (json.dumps(plain(measures(found)), indent=1) + "\n").encode())
        return found

    def apart(self, device: str) -> WorkerTask:
        """The search as a task for a process of its own."""
        # what the kinds of configs have in common decides a search; P1 and P2 share searches
        own = {field.name: getattr(self.cfg, field.name) for field in fields(ExperimentConfig)}
        config = ExperimentConfig(**{**own, "seeds": 1, "threads": 0})
        forms = {"config": config.to_dict(), "space": self.space.to_dict(), "how": self.how.to_dict(), "device": device}
        # results depend on the number of threads, so a task has that of this process
        threads = torch.get_num_threads()
        run = f"{__name__}:search_apart"
        return WorkerTask(self.folder, run, forms, threads=threads, gpus=gpus_for(device))


def search_apart(
    folder: Path, *, config: Mapping[str, Any], space: Mapping[str, Any], how: Mapping[str, Any], device: str
) -> None:
    """The function of a task: one search, in its folder."""
    cfg, cells = ExperimentConfig.from_dict(config), CellSpace.from_dict(space)
    Search("", cfg, CellSearchConfig.from_dict(how), cells).run(folder, device)


class Runner:
    """Carries out searches, each in a directory of its own below `out`, where a search that was stopped continues.

    With `tasks`, each search runs in a process of its own; else all run in this one.
    """

    def __init__(self, out: Path, task: Task, device: str, tasks: TaskSettings | None = None) -> None:
        self._out, self._task, self.device, self._tasks = out, task, device, tasks

    def all(self, *groups: Mapping[int, Search]) -> list[dict[int, CellSearchResult]]:
        """The results of every group of searches, by the keys of the group.

        Raises:
            TaskError: searches in processes of their own have failed or were stopped; the others are finished.
        """
        if self._tasks is not None:
            with TaskRunner(self._out, self._tasks) as runner:
                results = runner.run([search.apart(self.device) for group in groups for search in group.values()])
            check_done(results, "searches are not finished; the same command continues")
        # those that ran apart are found finished
        return [{k: s.run(self._out / s.folder, self.device, self._task) for k, s in group.items()} for group in groups]


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


def searches_of(cfg: ExperimentConfig, name: str, cell: Cell | None = None, **changes: Any) -> dict[int, Search]:
    """The search of every seed; `cell` and `changes` replace the cell and the settings of the config."""
    configs = [cfg.replace(seed=cfg.seed + i) for i in range(cfg.seeds)]
    return {of_seed.seed: Search(name, of_seed, of_seed.search(**changes), of_seed.space(cell)) for of_seed in configs}


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
    """The numbers of section 6 of one search; `MEASURES` has words for each."""
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
    of_type = torch.tensor([space.type_of(i) for i in range(space.cells)])
    logits = uniform_logits(space)
    for step, (x, y) in enumerate(islice(endless(to_learn_from(loader), device), batches)):
        draw = draw_gates(space, cfg, logits, step=step, progress=0.0)
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


_METHODS = {"darts": "DARTS", "snas": "SNAS", "dsnas": "DSNAS", "proxyless": "ProxylessNAS"}
_EXPLANATION = (
    "C is the local cost <dL/dX, X> of what an operation, edge or cell puts out; of the last cell it is L - H, "
    "loss minus entropy of the predictions. A positive cost pushes an edge towards None, whose cost is 0, a negative "
    "one away from it. q is the probability of None."
)
_CONTROLS = {
    "simplified": ("control-simplified", CELLS["simplified"](DARTS_OPS), False),
    "modified, sampled": ("control-modified__sampled", CELLS["modified"](DARTS_OPS), True),
    "modified, (0,1) fixed": (
        "control-modified___0_1__fixed",
        CELLS["modified"](DARTS_OPS).restricted(0, 1, ("sep_conv_5x5",)),
        True,
    ),
}
"""Control for the cause of P2 -> folder of its searches, its cell, and whether draws without a path are repeated."""


def theorems(cfg: TheoremsConfig, out: Path | None, task: Task) -> StudyReport:
    """The theorems."""
    found = check_theorems(channels=cfg.channels, batch=cfg.batch, seed=cfg.seed)
    columns = {"": "", "measured": ".2g", "at most": ".0e", "the numbers behind it": ""}
    return StudyReport(
        subject=f"theorems on real networks, {cfg.channels} channels, {cfg.batch} images, float64",
        explanation=_EXPLANATION,
        tables=(Table.of("theorems", columns, [(row.name, row.measured, row.bound, row.note) for row in found]),),
        checks=tuple(row.check for row in found),
    )


def _of_searches(study: Callable[[Experiment, Runner], StudyReport]) -> Callable[..., StudyReport]:
    """Make a study of searches a `run(config, out, task, tasks=None)`: in a directory, or in a temporary one."""

    def run(cfg: Experiment, out: Path | None, task: Task, tasks: TaskSettings | None = None) -> StudyReport:
        with nullcontext(str(out)) if out is not None else tempfile.TemporaryDirectory() as folder:
            return study(cfg, Runner(Path(folder), task, torch_device(cfg.device), tasks))

    return run


_OTHER_SETTINGS = "settings are not those of the pass marks: signs are judged, thresholds are not"
Mark = tuple[float, float, float]
"""The ends of a mark's interval, and the value."""


@dataclass(frozen=True)
class Pattern:
    """A pattern in the measures of a search.

    Attributes:
        title: name in the subject.
        name: verdict where all signs are seen.
        signs: what is seen -> whether it is.
        marks: pass marks of the default settings.
    """

    title: str
    name: str
    signs: Mapping[str, Callable[[Measures], bool]]
    marks: Callable[[Measures], Mapping[str, Mark]]


PATTERNS = {
    "P1": Pattern(
        "growing",
        "growing",
        {
            "C turns from positive to negative": lambda m: m["C_first"] > 0 > m["C_last"],
            "None gains at first": lambda m: m["q_in_peak"] > 1.02 * m["q_in_start"],
            "and loses in the end": lambda m: m["q_in_end"] < m["q_in_start"],
            "fewer costs are positive": lambda m: m["positive_last"] < m["positive_first"],
        },
        lambda m: {
            "C of the first part": (0, math.inf, m["C_first"]),
            "C of the last part": (-math.inf, 0, m["C_last"]),
            "peak of q of input edges": (0.13, 1, m["q_in_peak"]),
            "q of input edges at the end": (0, 0.06, m["q_in_end"]),
            "input edges kept": (m["n_in"], m["n_in"], m["kept_in"]),
        },
    ),
    "P2": Pattern(
        "width preference",
        "width preferred",
        {
            "intermediate edges are less probable": lambda m: m["q_int_end"] > m["q_in_end"],
            "fewer of them are kept": lambda m: m["kept_int"] / m["n_int"] < m["kept_in"] / m["n_in"],
            "they cost more than input edges of their nodes": lambda m: m["intermediate_minus_input_cost"] > 0,
        },
        lambda m: {
            "intermediate edges kept": (0, 2, m["kept_int"]),
            "input edges kept": (m["n_in"], m["n_in"], m["kept_in"]),
            "cost of intermediate minus input edges of a node": (0, math.inf, m["intermediate_minus_input_cost"]),
        },
    ),
    "P3": Pattern(
        "collapse on two levels",
        "collapsed",
        {
            "all edges are None": lambda m: m["kept_in"] + m["kept_int"] == 0,
            "held-out C stays positive": lambda m: m["search_C_smallest"] > 0,
            "training C is below it": lambda m: m["search_minus_train_C"] > 0,
        },
        lambda m: {
            "edges that are None": (
                m["n_in"] + m["n_int"] - 1,
                m["n_in"] + m["n_int"],
                m["n_in"] + m["n_int"] - m["kept_in"] - m["kept_int"],
            ),
            "held-out C, smallest part": (0, math.inf, m["search_C_smallest"]),
            "held-out minus training C, smallest part": (0, math.inf, m["search_minus_train_C"]),
        },
    ),
}


def _pattern_report(
    key: str,
    cfg: LearntConfig,
    runs: Runs,
    *,
    between: Sequence[Table] = (),
    tables: Sequence[Table] = (),
    figures: Sequence[Figure],
    marks: Callable[[int], Mapping[str, Mark]] = lambda seed: {},
    checks: Sequence[Check] = (),
) -> StudyReport:
    """The report of a pattern: what its searches measured, their signs and marks, and what the study adds.

    Args:
        key: key of PATTERNS.
        cfg, runs: its settings and searches.
        between, tables: tables that follow the measures, and those that follow the derived cells.
        figures: besides patterns and architecture.
        marks: further marks of a seed.
        checks: further marks, whatever the settings of the search.
    """
    pattern, first = PATTERNS[key], runs[cfg.seed]
    data = "synthetic images" if cfg.images is None else f"images of {Path(cfg.images).name}"
    subject = (
        f"{_METHODS[cfg.method]} on {cfg.cells} {cfg.cell} cell(s), {cfg.channels} channels, {first.steps[-1]} steps, "
        f"{data}"
    )
    verdicts, own = {}, []
    for seed, found in runs.items():
        m = measures(found)
        seen = {what: bool(is_so(m)) for what, is_so in pattern.signs.items()}
        missing = [what for what, is_so in seen.items() if not is_so]
        names = f"not seen: {', '.join(missing)}" if missing else pattern.name
        verdicts[f"{key}, seed {seed}"] = Verdict((names,), {**seen})
        own += checks_of(f"seed {seed}", {**pattern.marks(m), **marks(seed)}) if cfg.published else []
    return StudyReport(
        subject=f"{key}, {pattern.title}: {subject}",
        explanation=_EXPLANATION,
        notes=() if cfg.published else (_OTHER_SETTINGS,),
        tables=(measures_table(key, runs), *between, derivation_table(runs), *tables),
        figures=(
            patterns(key, runs),
            *(probabilities(f"seed {cfg.seed}, {name} cell", first, t) for t, name in enumerate(first.space.types)),
            *figures,
        ),
        verdicts=verdicts,
        checks=(*own, *checks),
    )


@_of_searches
def growth(cfg: GrowthConfig, runner: Runner) -> StudyReport:
    """P1."""
    name = f"seed {cfg.seed}"
    (runs,) = runner.all(searches_of(cfg, cfg.method))
    first = runs[cfg.seed]
    shown = edge_costs(f"{name}: cost and loss", first), output_cost_figure(f"{name}: C = L - H", first)
    return _pattern_report("P1", cfg, runs, figures=shown)


@_of_searches
def width(cfg: WidthConfig, runner: Runner) -> StudyReport:
    """P2; the controls have settings of their own."""
    own = CostConfig(
        cell="modified", steps=cfg.control_steps, seeds=cfg.seeds, seed=cfg.seed, device=cfg.device, records=12
    )
    controlled = [searches_of(own, name, cell, redraw=redraw) for name, cell, redraw in _CONTROLS.values()]
    runs, *found = runner.all(searches_of(cfg, cfg.method), *controlled)
    controls = dict(zip(_CONTROLS, found, strict=True))
    return _pattern_report(
        "P2",
        cfg,
        runs,
        tables=(control_table(controls),),
        figures=(control("control for the cause (figures 8 and 9)", controls),),
        checks=control_checks(controls) if cfg.control_steps == WidthConfig().control_steps else (),
    )


@_of_searches
def collapse(cfg: CollapseConfig, runner: Runner) -> StudyReport:
    """P3."""
    second: dict[str, Any] = {"second_order": cfg.second_order} if cfg.method == "darts" else {}
    two, one = searches_of(cfg, f"{cfg.method}-bilevel", bilevel=True, **second), searches_of(cfg, cfg.method)
    fixed = CostConfig(
        samples=300, steps=cfg.control_steps, seeds=cfg.seeds, seed=cfg.seed, device=cfg.device, records=12
    )
    tabled = searches_of(fixed, "table", method="darts", bilevel=True, alpha_lr=0.0)
    runs, single, gates = runner.all(two, one, tabled)
    windows = {seed: sign_window(found) for seed, found in gates.items()}
    checks: list[Check] = []
    if cfg.control_steps == CollapseConfig().control_steps:
        checks = [c for seed, found in gates.items() for c in sign_checks(seed, found, windows[seed])]
    return _pattern_report(
        "P3",
        cfg,
        runs,
        between=(measures_table("the same search on one level", single),),
        tables=(signs_table(windows),),
        figures=(
            output_cost_figure("DARTS's gates, probabilities fixed (figure 10)", gates[cfg.seed]),
            edge_costs("DARTS's gates: costs of training batches", gates[cfg.seed]),
        ),
        marks=lambda seed: {
            "edges that are None on one level": (0, 6, float((kept_edges(single[seed])[-1] == 0).sum()))
        },
        checks=checks,
    )


@_of_searches
def cost(cfg: CostConfig, runner: Runner) -> StudyReport:
    """Local costs."""
    space = cfg.space()
    initial, mean_cost = initial_costs(cfg, runner, space, range(cfg.seed, cfg.seed + cfg.nets))
    (trained,) = runner.all(searches_of(cfg, "uniform"))
    late = []
    for seed, found in trained.items():
        loader, _ = loaders(cfg.replace(seed=seed), bilevel=False)
        late.append(monte_carlo(found.net, loader, batches=cfg.batches, seed=seed + 1, device=runner.device)[0])
    costs = {"initialisation": initial, "trained": late}
    checks = []
    if cfg.published:
        share = last_cell(initial).positive(live_operations(space))
        checks = [
            Check("initialisation: mean C", 0, float("inf"), mean_cost),
            Check("initialisation: share of costs > 0", 0.6, 1, share),
        ]
    panels = {label: last_cell(tables_of).mean[0].numpy() for label, tables_of in costs.items()}
    return StudyReport(
        subject=f"local costs of {cfg.cells} {cfg.cell} cell(s), operations sampled uniformly",
        explanation=_EXPLANATION,
        notes=() if cfg.published else (_OTHER_SETTINGS,),
        tables=(
            local_costs_table(space, costs),
            sums_table(cfg, runner),
            variants_table(cfg, runner),
        ),
        figures=(
            cost_heatmap(space, "local costs (figure 4)", panels),
            edge_costs(f"seed {cfg.seed}: operations sampled uniformly", trained[cfg.seed]),
        ),
        checks=tuple(checks),
    )


MEASURES = {
    "C_first": "C, first part",
    "C_last": "C, last part",
    "positive_first": "costs > 0, first part",
    "positive_last": "costs > 0, last part",
    "intermediate_minus_input_cost": "cost of intermediate minus input edges of a node",
    "q_in_start": "q of input edges, start",
    "q_in_peak": "peak",
    "q_in_end": "end",
    "kept_in": "input edges kept",
    "n_in": "of",
    "q_int_start": "q of intermediate edges, start",
    "q_int_peak": "peak (intermediate)",
    "q_int_end": "end (intermediate)",
    "kept_int": "intermediate edges kept",
    "n_int": "of (intermediate)",
    "search_C_first": "held-out C, first part",
    "search_C_last": "held-out C, last part",
    "search_C_smallest": "held-out C, smallest part",
    "search_minus_train_C": "held-out minus training C, smallest",
}
"""Name of a measure -> its words in the tables."""


def _interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of Student's t over the seeds."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2 or not np.isfinite(sample).all():
        return "-"
    half = stats.t.ppf(0.975, len(sample) - 1) * sample.std(ddof=1) / np.sqrt(len(sample))
    return f"{sample.mean():.3f} ± {half:.3f}"


def measures_table(title: str, runs: Runs) -> Table:
    """The measures of every seed, and their mean with its interval."""
    of = [measures(found) for found in runs.values()]
    rows = []
    for name in of[0]:
        values = [m[name] for m in of]
        rows.append((MEASURES.get(name, name), *(v if np.isfinite(v) else None for v in values), _interval(values)))
    columns = {"": "", **{f"seed {seed}": ".3f" for seed in runs}, "mean, 95 %": ""}
    return Table.of(title, columns, rows)


def derivation_table(runs: Runs) -> Table:
    """The cells derived by argmax with None (the rule of SNAS, DSNAS and ProxylessNAS) and by DARTS's rule."""
    rows = []
    for seed, found in runs.items():
        own = "darts" if found.cfg.method == "darts" else "argmax"
        for rule, arch in derivations(found.space, found.logits).items():
            text = "; ".join(
                f"{kind}: "
                + " ".join(
                    f"{e.name}={found.space.ops[k]}"
                    for e, k in zip(found.space.cell.edges, part, strict=True)
                    if found.space.ops[k] != NONE
                )
                for kind, part in zip(found.space.types, found.space.parts(arch), strict=True)
            )
            rows.append((f"seed {seed}", rule + (" (its own)" if rule == own else ""), text))
    return Table("cells derived; edges that are None are left out", ("", "rule", "operations"), tuple(rows))


def control_table(controls: Mapping[str, Runs]) -> Table:
    """The costs of the edges early and late, for every control and seed."""
    rows = []
    for label, runs in controls.items():
        for seed, found in runs.items():
            early, late = (edge_means(found, part) for part in half_and_quarter(found))
            rows.append((label, f"seed {seed}", *(f"{v:+.3f}" for v in (*early, *late))))
    edges = [e.name for e in found.space.cell.edges]
    header = ("control", "", *(f"{e} {part}" for part in ("first half", "last quarter") for e in edges))
    return Table("mean cost of the edges, operations sampled uniformly", header, tuple(rows))


def signs_table(windows: Mapping[int, Mapping[int, Any]]) -> Table:
    """C, L and H of every seed by set of images, and below them the published ones."""
    rows = []
    for seed, window in windows.items():
        for group in ("correct", "wrong"):
            values = [window[which][group][q] for q in "CLH" for which in (TRAIN, SEARCH)]
            rows.append((f"{group}, seed {seed}", *(f"{v:+.2f}" for v in values)))
    rows.append(("correct, published", *"-0.11 -0.11 0.06 0.08 0.17 0.19".split()))
    rows.append(("wrong, published", *"0.80 2.18 1.70 2.92 0.90 0.74".split()))
    header = ("", *(f"{q} {s}" for q in "CLH" for s in ("train", "search")))
    return Table("C, L, H with DARTS's gates, probabilities fixed, middle of the run", header, tuple(rows))


def local_costs_table(space: CellSpace, costs: Mapping[str, Sequence[LocalCosts]]) -> Table:
    """The costs of the last cell, for every state of the networks."""
    columns = {"last cell": "", "networks": "", "costs > 0": ".2f", "of single networks": ".2f"}
    columns |= {"mean cost": "+.4f", "error over batches": ".4f", "clearly + / -": ""}
    live, rows = live_operations(space), []
    for label, tables in costs.items():
        joined = last_cell(tables)
        shares = [last_cell([t]).positive(live) for t in tables]
        mean, error = (v[0][:, live].numpy() for v in (joined.mean, joined.error))
        clear = np.abs(mean) > 2 * error
        signs = f"{(clear & (mean > 0)).sum()} / {(clear & (mean < 0)).sum()}"
        share = joined.positive(live)
        rows.append((label, len(tables), share, np.mean(shares), np.nanmean(mean), np.nanmean(error), signs))
    return Table.of("local costs", columns, rows)


def sums_table(cfg: CostConfig, runner: Runner) -> Table:
    """Figure 19: without the skip term, the costs of the cells before the last add up to next to nothing."""
    two = cfg.replace(cells=2, reductions=False, no_skip_on_intermediate=True)
    tables, _ = initial_costs(two, runner, two.space(), [cfg.seed])
    sums = tables[0].total.sum((1, 2)) / cfg.batches
    columns = {"": "", "C": "+.2e"}
    rows = zip(("second last cell", "last cell"), sums.tolist(), strict=True)
    return Table.of("sum of the edges' costs, two cells without skip on intermediate edges", columns, list(rows))


def variants_table(cfg: CostConfig, runner: Runner) -> Table:
    """Figures 29 to 31: other orders of convolution, norm and ReLU, and other norms, at initialisation."""
    rows = []
    variants: list[dict[str, Any]] = [{"order": "conv_relu_norm"}, {"order": "conv_norm_relu"}, {"norm": "layer"}]
    for changes in [{}, *variants, {"norm": "instance"}]:
        other = cfg.replace(**changes)
        space = other.space()
        tables, mean = initial_costs(other, runner, space, range(cfg.seed, cfg.seed + max(1, cfg.nets // 3)))
        joined, live = last_cell(tables), live_operations(space)
        name = ", ".join(f"{k} {v}" for k, v in changes.items()) or "as above"
        rows.append((name, mean, joined.positive(live), float(np.nanmean(joined.mean[0][:, live]))))
    return Table.of("at initialisation", {"": "", "C": "+.4f", "costs > 0": ".2f", "mean cost": "+.5f"}, rows)


_COLOURS = {
    NONE: INK,
    "skip_connect": "#CF6BA0",
    "max_pool_3x3": "#B3202A",
    "avg_pool_3x3": "#E08E00",
    "sep_conv_3x3": "#00558C",
    "dil_conv_3x3": "#00734F",
    "dil_conv_5x5": "#45B97C",
    "sep_conv_5x5": "#3DA5E0",
    "conv_1x1": "#7A3FA0",
    "conv_3x3": "#8C5A2B",
}
"""Operation -> colour, the same in every figure; the sizes of a kind share a hue."""

# Panels whose largest values differ by more would leave the smaller ones without a visible difference.
_SCALES_APART = 5


def probabilities(title: str, found: CellSearchResult, kind: int) -> Figure:
    """Probabilities of the candidates of every edge of a type of cell (figures 3 and 12 to 14)."""
    caption = (
        "Probability of every candidate of every edge. Bold black: None. Shaded: edges between intermediate nodes."
    )
    space, p = found.space, found.probabilities[:, kind]
    edges = space.cell.edges
    figure = Figure(title, caption, len(edges), columns=5 if len(edges) > 6 else 3, height=2.1)
    for e, (ax, edge) in enumerate(zip(figure.axes, edges, strict=True)):
        for k in space.candidates[e]:
            op, steps = space.ops[k], [0, *found.steps]
            ax.plot(steps, p[:, e, k], color=_COLOURS[op], label=op, lw=2.4 if op == NONE else 1.2)
        ax.set(title=edge.name, xlabel="step", ylim=(0, min(1.02, 1.05 * p.max())))
        if space.cell.is_intermediate(edge):
            ax.set_facecolor("#fdf0e6")
    return figure


def _edge_colours(space: CellSpace) -> list[str]:
    """Blues and greens for input edges, yellow to red for intermediate ones, each in order."""
    maps = {False: (colormaps["viridis"], 0.1, 0.72), True: (colormaps["YlOrRd"], 0.4, 0.95)}
    kinds, colours = space.cell.intermediate, []
    for e, kind in enumerate(kinds):
        colour_map, low, high = maps[kind]
        colours.append(to_hex(colour_map(low + (high - low) * kinds[:e].count(kind) / max(1, kinds.count(kind) - 1))))
    return colours


def edge_costs(title: str, found: CellSearchResult) -> Figure:
    """Edge costs of the last cell and their sum, beside loss and accuracy (figures 7 and 10)."""
    caption = (
        "Mean cost of every edge, bold the means over input and over intermediate edges; their sum; the training loss "
        "and accuracy of the same steps."
    )
    figure = Figure(title, caption, 3, columns=1, height=2.4)
    each, total, learning = figure.axes
    steps, cost, count = found.steps, found.edge_costs[:, TRAIN, -1], found.outputs[:, TRAIN, :, -1]
    space, inner = found.space, intermediate_edges(found.space)
    for edge, colour, values in zip(space.cell.edges, _edge_colours(space), cost.T, strict=True):
        each.plot(steps, values, color=colour, label=edge.name, lw=1.1)
    for colour, name, same in ((SERIES[0], "mean, input", ~inner), (SERIES[1], "mean, intermediate", inner)):
        # two lines need no mean
        if same.sum() > 2:
            each.plot(steps, _mean(cost[:, same].T), color=colour, label=name, lw=2.6)
    each.set(title="mean cost per edge", ylabel="cost")
    total.plot(steps, cost.sum(1), color=INK, lw=1.8)
    total.set(title="sum over the edges", ylabel="cost")
    for ax in (each, total):
        level(ax, 0)
    learning.plot(steps, found.means(quantity="L"), label="loss")
    learning.set(title="loss and accuracy", xlabel="step", ylabel="cross-entropy (nats)", ylim=(0, None))
    right = learning.twinx()
    right.plot(steps, 100 * count[:, GROUPS.index("correct")] / count[:, 0], color=SERIES[1], label="accuracy")
    right.set(ylabel="top-1 (%)", ylim=(0, 101))
    return figure


def output_cost_figure(title: str, found: CellSearchResult) -> Figure:
    """C, L and H of the output by group of samples."""
    caption = (
        "Cost, loss and entropy of the output, averaged over the samples of each kind. Solid: training batches; "
        "dashed: search batches."
    )
    names = {"C": "cost C = L - H", "L": "loss L", "H": "entropy H"}
    figure = Figure(title, caption, len(GROUPS), columns=3, height=3.5)
    for ax, group in zip(figure.axes, GROUPS, strict=True):
        for which, ls in ((TRAIN, "-"), (SEARCH, "--")) if found.cfg.bilevel else ((TRAIN, "-"),):
            for colour, (key, label) in zip(SERIES, names.items(), strict=False):
                values, lw = found.means(which, group, key), 2.2 if key == "C" else 1.3
                ax.plot(found.steps, values, color=colour, label=label if which == TRAIN else None, lw=lw, ls=ls)
        level(ax, 0)
        ax.set(title=f"{group} samples", xlabel="step", ylabel="nats")
    return figure


def _mean(curves: Any) -> np.ndarray:
    """Mean over the first axis of what is finite; nan where nothing is."""
    return np.ma.masked_invalid(curves).mean(axis=0).filled(np.nan)


def _runs(ax: Axes, steps: Any, curves: Sequence[np.ndarray], colour: str, label: str, ls: str = "-") -> None:
    """A thin line for each run and a bold one for their mean."""
    for values in curves:
        ax.plot(steps, values, color=colour, lw=0.8, ls=ls, alpha=0.45)
    if len(curves):
        ax.plot(steps, _mean(curves), color=colour, label=label, lw=2.3, ls=ls)


_THIN = "Thin: one run each; bold: their mean."


def patterns(title: str, runs: Runs) -> Figure:
    """Growth, width preference and collapse: costs by window, probabilities of None and edges kept by record."""
    found = list(runs.values())
    space, steps, records = found[0].space, window_steps(found[0]), [0, *found[0].steps.tolist()]
    inner = intermediate_edges(space)
    figure = Figure(title, f"Growth, width preference and collapse. {_THIN}", 4, legend=False)
    cost, none, kept, positive = figure.axes
    _runs(cost, steps, [output_costs(run) for run in found], SERIES[2], "training set")
    held = [output_costs(run, SEARCH) for run in found if run.cfg.bilevel]
    _runs(cost, steps, held, SERIES[3], "search set", "--")
    for name, colour, same in (("input edges", SERIES[0], ~inner), ("intermediate edges", SERIES[1], inner)):
        if same.any():
            _runs(none, records, [none_probability(run)[:, same].mean(1) for run in found], colour, name)
            share = [100 * kept_edges(run)[:, same].mean(1) for run in found]
            _runs(kept, records, share, colour, f"{name} ({same.sum()})")
    _runs(positive, steps, [100 * positive_share(run) for run in found], SERIES[2], "")
    level(cost, 0)
    level(positive, 50)
    cost.set(title="cost C of the last cell", ylabel="nats")
    none.set(title="mean probability of None", ylabel="q", ylim=(0, None))
    kept.set(title="edges kept: most probable is not None", xlabel="step", ylabel="% of the edges", ylim=(-4, 104))
    positive.set(title="costs above zero", xlabel="step", ylabel="% of edges and operations", ylim=(-4, 104))
    return figure


def _limits(groups: Sequence[np.ndarray]) -> list[float]:
    """Largest magnitude of each group; the largest of all where they are near enough to share a scale."""
    limits = [float(np.abs(group[np.isfinite(group)]).max(initial=0)) or 1.0 for group in groups]
    return [max(limits)] * len(limits) if max(limits) <= _SCALES_APART * min(limits) else limits


def cost_heatmap(space: CellSpace, title: str, costs: Mapping[str, np.ndarray]) -> Figure:
    """Figure 4: mean local costs (edges, ops) of the last cell by label, nan where they are not known."""
    caption = (
        "Mean cost of every operation on every edge: red above zero, blue below. Grey: None, which costs nothing, and "
        "what is no candidate or was not measured."
    )
    rows, columns = [edge.name for edge in space.cell.edges], space.ops
    # the costs of None are zero by definition
    shown = [np.where([op == NONE for op in space.ops], np.nan, values) for values in costs.values()]
    # this many panels side by side leave room for numbers of six characters in the cells of ten operations
    side = 2 if len(columns) > 5 else 3
    figure = Figure(title, caption, len(costs), columns=side, height=1.2 + 0.24 * len(rows))
    for ax, label, values, limit in zip(figure.axes, costs, shown, _limits(shown), strict=True):
        heat(ax, values, rows, columns, limit=limit, numbers=True)
        ax.set_title(f"{label}: {(values[np.isfinite(values)] > 0).mean():.0%} of the costs > 0")
    return figure


def control(title: str, controls: Mapping[str, Runs]) -> Figure:
    """Figures 8 and 9: the costs (records, edges) of every run of every control."""
    costs = {
        label: [np.stack([edge_means(run, slice(r, r + 1)) for r in range(len(run.steps))]) for run in runs.values()]
        for label, runs in controls.items()
    }
    figure = Figure(title, f"Mean cost of every edge in each setting. {_THIN}", len(costs), columns=3, height=2.9)
    limits = _limits([np.array(each) for each in costs.values()])
    for ax, (label, runs), limit in zip(figure.axes, controls.items(), limits, strict=True):
        first = next(iter(runs.values()))
        for e, (colour, edge) in enumerate(zip(SERIES, first.space.cell.edges, strict=False)):
            _runs(ax, first.steps, [run[:, e] for run in costs[label]], colour, edge.name)
        level(ax, 0)
        ax.set(title=label, xlabel="step", ylabel="mean cost")
        if len(set(limits)) == 1:
            ax.set_ylim(-1.1 * limit, 1.1 * limit)
    return figure


def control_checks(controls: Mapping[str, Runs]) -> list[Check]:
    """Marks of the control for the cause of P2, for every control and seed."""
    checks = []
    for label, runs in controls.items():
        for seed, found in runs.items():
            early, late = (edge_means(found, part) for part in half_and_quarter(found))
            sign = (-math.inf, 0.0) if label.endswith("fixed") else (0.0, math.inf)
            marks = {"cost of (1,2) minus (0,2), last quarter": (*sign, float(late[2] - late[1]))}
            if label == "modified, sampled":
                marks["cost of (1,2) minus (0,1), first half"] = (0.0, math.inf, float(early[2] - early[0]))
            checks += checks_of(f"{label}, seed {seed}", marks)
    return checks


def sign_checks(seed: int, found: CellSearchResult, window: Mapping[int, Any]) -> list[Check]:
    """Marks of the signs of C, L and H with DARTS's gates."""
    train, search = window[TRAIN], window[SEARCH]
    curve = found.means(SEARCH)
    late = len(curve) // 2

    def apart(group: str, quantity: str) -> float:
        return search[group][quantity] - train[group][quantity]

    marks = {
        "correct C, training": (-math.inf, 0, train["correct"]["C"]),
        "correct C, held out": (-math.inf, 0, search["correct"]["C"]),
        "wrong L, held out minus training": (0, math.inf, apart("wrong", "L")),
        "wrong H, held out minus training": (-math.inf, 0, apart("wrong", "H")),
        "wrong C, held out minus training": (0.5, math.inf, apart("wrong", "C")),
        "held-out C, second half minus first": (0, math.inf, float(curve[late:].mean() - curve[:late].mean())),
    }
    return checks_of(f"table, seed {seed}", marks)
