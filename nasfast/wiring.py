"""The wiring study: why topologies of differentiable search grow, prefer width, and collapse on two levels.

Experiments of arXiv 2009.01272 at the scale of a laptop, with the pass marks of a scaled-down task, or at the paper's
by configuration (docs/wiring.md).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy import stats

from nasfast.cells import CELLS, DARTS_OPS, Cell, CellSpace, CellSupernet
from nasfast.cells.derive import derivations
from nasfast.cells.montecarlo import monte_carlo
from nasfast.cells.probe import GROUPS, CostTable
from nasfast.cells.prototypes import CLASSES, SIZE, DrawnBatches, prototypes
from nasfast.cells.search import (
    SEARCH,
    TRAIN,
    CellSearchConfig,
    CellSearchResult,
    search_cells,
)
from nasfast.cells.theorems import check_theorems
from nasfast.config import ConfigBase
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.data.datasets import split_source
from nasfast.runtime.device import check_device, torch_device
from nasfast.runtime.files import write_atomic
from nasfast.spaces.cell_costs import NONE, SKIP_CONNECT
from nasfast.spaces.cells import Norm, Order
from nasfast.study import Check, StudyReport, Table, Task, check_common, plain, run_study
from nasfast.train import TrainConfig

_METHODS = {"darts": "DARTS", "snas": "SNAS", "dsnas": "DSNAS", "proxyless": "ProxylessNAS"}

_EXPLANATION = (
    "C is the local cost <dL/dX, X> of what an operation, edge or cell puts out; of the last cell it is L - H, "
    "loss minus entropy of the predictions. A positive cost pushes an edge towards None, whose cost is 0, a negative "
    "one away from it. q is the probability of None."
)


@dataclass(frozen=True)
class TheoremsConfig(ConfigBase):
    """The theorems on real networks, in float64.

    Attributes:
        channels: of the cells.
        batch: images.
        threads: CPU threads, 0 for torch's choice.
        seed: of weights, images and gates.
    """

    channels: int = 8
    batch: int = 32
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self.threads, self.seed, channels=self.channels, batch=self.batch)


@dataclass(frozen=True)
class ExperimentConfig(ConfigBase):
    """What the experiments have in common. The defaults are those of the pass marks, which hold for nothing else.

    Attributes:
        cell: `minimal`, `simplified`, `modified`, `darts` or `nas_bench_201`.
        cells: how many, one after another.
        channels: of every node of the first cell.
        reductions: reduction cells at a third and two thirds, of at least three.
        order, norm: of the operations.
        no_skip_on_intermediate: skip is no candidate of intermediate edges.
        images: folder with one sub-folder per class, such as CIFAR-10's training images; null takes synthetic ones.
        resolution: of images from a folder.
        samples: synthetic training images; as many again are held out where there are two levels.
        noise: of synthetic images, in standard deviations of their prototypes' pixels.
        batch_size: images per step.
        steps: of the search; above 100 rounded to hundreds, with a folder to whole epochs.
        lr, lr_end, weight_decay: of the weights' SGD.
        records: how often probabilities and costs are recorded.
        seeds: how many, from `seed` on.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        threads: CPU threads, 0 for torch's choice.
        seed: the first.
    """

    cell: Literal["minimal", "simplified", "modified", "darts", "nas_bench_201"] = "darts"
    cells: int = 1
    channels: int = 6
    reductions: bool = False
    order: Order = "relu_conv_norm"
    norm: Norm = "batch"
    no_skip_on_intermediate: bool = False
    images: str | None = None
    resolution: int = 32
    samples: int = 400
    noise: float = 4.0
    batch_size: int = 64
    steps: int = 1500
    lr: float = 0.4
    lr_end: float = 1e-3
    weight_decay: float = 3e-4
    records: int = 75
    seeds: int = 3
    device: str = "cpu"
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_device(self.device)
        check_common(
            self.threads, self.seed, cells=self.cells, channels=self.channels, samples=self.samples, steps=self.steps,
            records=self.records, seeds=self.seeds, resolution=self.resolution,
        )  # fmt: skip
        if self.batch_size < 2:
            raise ValueError(
                f"batch_size must be at least 2 (BatchNorm needs more than one image), got {self.batch_size}"
            )
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise must not be negative, got {self.noise}")
        if self.reductions and self.cells < 3:
            raise ValueError(f"reductions need at least 3 cells, of which one is normal, got cells={self.cells}")

    @property
    def published(self) -> bool:
        """Whether these are the settings that the pass marks are of."""
        free = ("seeds", "seed", "threads", "device")
        return self.to_dict() == type(self)(**{name: getattr(self, name) for name in free}).to_dict()

    def space(self, cell: Cell | None = None) -> CellSpace:
        """The network that is searched."""
        cell = cell or CELLS[self.cell]()
        if self.no_skip_on_intermediate:
            cell = cell.without_on_intermediate(SKIP_CONNECT)
        at = tuple(sorted({self.cells // 3, 2 * self.cells // 3})) if self.reductions else ()
        return CellSpace(
            name=self.cell, cell=cell, cells=self.cells, channels=self.channels, reductions=at, order=self.order,
            norm=self.norm, resolution=SIZE if self.images is None else self.resolution,
            num_classes=CLASSES if self.images is None else len(_folder(self.images).classes),
        )  # fmt: skip

    @property
    def weights(self) -> TrainConfig:
        """How the weights learn, but for the number of epochs."""
        return TrainConfig(
            lr=self.lr, lr_end=self.lr_end, weight_decay=self.weight_decay, label_smoothing=0.0, clip_norm=5.0
        )

    def search(self, **changes: Any) -> CellSearchConfig:
        """How operations are chosen: uniformly, and nothing is learnt of them."""
        return CellSearchConfig(method="uniform", records=self.records, seed=self.seed).replace(**changes)

    def of_seed(self, i: int, **changes: Any) -> ExperimentConfig:
        return self.replace(seed=self.seed + i, **changes)


_STEPS_PER_EPOCH = 100


@cache
def _folder(images: str) -> FolderSource:
    """Read once for all searches of a study."""
    return FolderSource(images)


@dataclass(frozen=True)
class LearntConfig(ExperimentConfig):
    """Experiments that learn an architecture.

    Attributes:
        method: estimator of the architecture's gradient.
        alpha_lr, alpha_mean, alpha_std: of the logits' Adam, and of what they start from.
    """

    method: Literal["darts", "snas", "dsnas", "proxyless"] = "dsnas"
    alpha_lr: float = 0.02
    alpha_mean: float = 0.0
    alpha_std: float = 1e-3

    def search(self, **changes: Any) -> CellSearchConfig:
        """How the architecture learns, by default on one level."""
        return CellSearchConfig(
            method=self.method, alpha_lr=self.alpha_lr, alpha_mean=self.alpha_mean, alpha_std=self.alpha_std,
            records=self.records, seed=self.seed,
        ).replace(**changes)  # fmt: skip


@dataclass(frozen=True)
class GrowthConfig(LearntConfig):
    """P1, growing: one DARTS cell, one level."""


@dataclass(frozen=True)
class WidthConfig(LearntConfig):
    """P2, width preference: the search of P1, and the control for its cause on cells with one input.

    Attributes:
        control_steps: of every control.
    """

    control_steps: int = 600

    def __post_init__(self) -> None:
        super().__post_init__()
        check_common(0, 0, control_steps=self.control_steps)


@dataclass(frozen=True)
class CollapseConfig(LearntConfig):
    """P3, collapse: the search of P1 on two levels, and costs of DARTS's gates on training and held-out images.

    Attributes:
        control_steps: of the second part.
        second_order: with method darts: weights one step ahead.
    """

    control_steps: int = 300
    second_order: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_common(0, 0, control_steps=self.control_steps)
        if self.second_order and self.method != "darts":
            raise ValueError(f"second_order belongs to method='darts', got {self.method!r}")


@dataclass(frozen=True)
class CostConfig(ExperimentConfig):
    """Local costs at initialisation and after training, operations sampled uniformly.

    Attributes:
        nets: at initialisation.
        batches: of each, and of the trained network.
    """

    cell: Literal["minimal", "simplified", "modified", "darts", "nas_bench_201"] = "minimal"
    channels: int = 8
    samples: int = 1000
    noise: float = 3.0
    steps: int = 600
    lr: float = 0.1
    nets: int = 10
    batches: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        check_common(0, 0, nets=self.nets, batches=self.batches)


class _Runner:
    """Carries out searches, each in a directory of its own, where one that was stopped goes on."""

    def __init__(self, out: Path, task: Task, device: str) -> None:
        self._out, self._task, self.device = out, task, device

    def search(
        self, name: str, cfg: ExperimentConfig, search: CellSearchConfig, *, cell: Cell | None = None
    ) -> CellSearchResult:
        """One search; the directory NAME-sSEED gets its files, and the measures of section 6."""
        space = cfg.space(cell)
        train_loader, held_out = loaders(cfg, bilevel=search.bilevel)
        epochs = max(1, round(cfg.steps / len(train_loader)))
        folder, steps = self._out / f"{name}-s{cfg.seed}", epochs * len(train_loader)
        done = self._task(f"{name}, seed {cfg.seed}", steps)
        found = search_cells(
            space, train_loader, search, cfg.weights.replace(epochs=epochs), held_out=held_out, run_dir=folder,
            name="cells", resume=True, device=self.device, settings={"data": _data_of(cfg)},
            progress=done,
        )  # fmt: skip
        done(steps)  # also of one that had ended before
        write_atomic(folder / "measures.json", (json.dumps(plain(measures(found)), indent=1) + "\n").encode())
        return found


def _data_of(cfg: ExperimentConfig) -> dict[str, Any]:
    """What of a config decides the batches."""
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
    source = _folder(cfg.images)
    parts = split_source(source, 0.5, cfg.seed) if bilevel else (source, None)
    return tuple(
        None if part is None else make_loader(data, part, train=True, resolution=cfg.resolution, seed=2 * cfg.seed + i)
        for i, part in enumerate(parts)
    )


def _study(kind: str, cfg: Any, out: str | Path | None, study: Callable[[Any, _Runner], dict[str, Any]]) -> StudyReport:
    device = torch_device(getattr(cfg, "device", "cpu"))

    def measured(task: Task) -> dict[str, Any]:
        with ExitStack() as stack:
            folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
            return {"explanation": _EXPLANATION, **study(cfg, _Runner(folder, task, device))}

    return run_study(f"wiring-{kind}", cfg, measured, device=device)


# --- measures -----------------------------------------------------------------------------------------------------


def _none_probability(found: CellSearchResult) -> np.ndarray:
    """(records + 1, edges), the mean over types of cells."""
    return found.probabilities[..., found.space.ops.index(NONE)].mean(1)


def _kept(found: CellSearchResult) -> np.ndarray:
    """(records + 1, edges): edges whose most probable operation is not None; the share of types of cells."""
    return (found.probabilities.argmax(-1) != found.space.ops.index(NONE)).mean(1)


def _intermediate(space: CellSpace) -> np.ndarray:
    return np.array(space.cell.intermediate)


def _mean_costs(found: CellSearchResult, which: int = TRAIN, records: slice = slice(None)) -> np.ndarray:
    """(cells, edges, ops) mean local costs over some records; nan where an operation did not run."""
    total, _, count = found.costs[records, which].sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count


def _live(space: CellSpace) -> list[int]:
    return [k for k, op in enumerate(space.ops) if op != NONE]


_WINDOWS = 15
"""Parts of a run over which costs are averaged; probabilities, which do not scatter, are shown at every record."""


def _windows(records: np.ndarray) -> np.ndarray:
    """Sums over equal parts of a run."""
    return np.stack([part.sum(0) for part in np.array_split(records, min(_WINDOWS, len(records)))])


def _window_steps(found: CellSearchResult) -> list[int]:
    return [int(part[-1]) for part in np.array_split(found.steps, min(_WINDOWS, len(found.steps)))]


def _output_costs(found: CellSearchResult, which: int = TRAIN) -> np.ndarray:
    """(windows,) mean C over all samples."""
    sums = _windows(found.outputs[:, which, GROUPS.index("all")])
    return sums[:, 0] / sums[:, -1]


def _positive(found: CellSearchResult) -> np.ndarray:
    """(windows,) share of (cell, edge, operation) mean costs above 0, without None."""
    total, count = (_windows(found.costs[:, TRAIN, i][..., _live(found.space)]) for i in (0, 2))
    with np.errstate(invalid="ignore"):
        return (np.where(count > 0, total, 0) > 0).sum((1, 2, 3)) / (count > 0).sum((1, 2, 3))


def _edge_means(found: CellSearchResult, records: slice = slice(None)) -> np.ndarray:
    """(edges,) mean cost over the batches in which an operation other than None ran, all cells together."""
    total, count = (found.costs[records, TRAIN, i][..., _live(found.space)].sum((0, 1, 3)) for i in (0, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count


def _same_node_difference(found: CellSearchResult) -> float:
    """Mean cost of intermediate edges minus that of input edges into the same node, averaged over such nodes."""
    cell, means, differences = found.space.cell, _edge_means(found), []
    for node in range(cell.inputs, cell.inputs + cell.nodes):
        edges = np.array(cell.into(node))
        inner = _intermediate(found.space)[edges]
        if inner.any() and not inner.all():
            differences.append(np.nanmean(means[edges[inner]]) - np.nanmean(means[edges[~inner]]))
    return float(np.mean(differences)) if differences else float("nan")


def measures(found: CellSearchResult) -> dict[str, float]:
    """The numbers of section 6 of one search: see `nasfast wiring`'s tables for what they mean."""
    inner, q, kept = _intermediate(found.space), _none_probability(found), _kept(found)
    cost, positive = _output_costs(found), _positive(found)
    of = {"in": ~inner, "int": inner}
    result = {
        "C_first": float(cost[0]), "C_last": float(cost[-1]),
        "positive_first": float(positive[0]), "positive_last": float(positive[-1]),
        "intermediate_minus_input_cost": _same_node_difference(found),
    }  # fmt: skip
    for name, edges in of.items():
        if edges.any():
            mean = q[:, edges].mean(1)
            result |= {
                f"q_{name}_start": float(mean[0]), f"q_{name}_peak": float(mean.max()),
                f"q_{name}_end": float(mean[-1]),
                f"kept_{name}": float(kept[-1, edges].sum()), f"n_{name}": float(edges.sum()),
            }  # fmt: skip
    if found.cfg.bilevel:
        search = _output_costs(found, SEARCH)
        result |= {
            "search_C_first": float(search[0]), "search_C_last": float(search[-1]),
            "search_C_smallest": float(search.min()),
            "search_minus_train_C": float((search - cost).min()),
        }  # fmt: skip
    return result


# --- figures ------------------------------------------------------------------------------------------------------


def _edges_of(space: CellSpace) -> dict[str, Any]:
    return {"edges": [e.name for e in space.cell.edges], "intermediate": list(space.cell.intermediate)}


def _steps(found: CellSearchResult) -> list[int]:
    return [0, *found.steps.tolist()]


def _candidate_probabilities(found: CellSearchResult, kind: int) -> np.ndarray:
    """(records + 1, edges, ops), nan where an edge has no such candidate."""
    return np.where(np.isfinite(found.logits[kind]), found.probabilities[:, kind], np.nan)


def _architecture_figures(title: str, found: CellSearchResult) -> list[dict[str, Any]]:
    """Probabilities per edge, and the graph at five steps, for every type of cell (figures 3 and 12 to 14)."""
    space, figures = found.space, []
    for t, kind in enumerate(space.types):
        name = title if len(space.types) == 1 else f"{title}, {kind} cell"
        p, steps = _candidate_probabilities(found, t), _steps(found)
        at = np.unique(np.linspace(0, len(steps) - 1, 5).round().astype(int))
        graph = {
            "inputs": space.cell.inputs, "nodes": space.cell.nodes, "outputs": list(space.cell.outputs),
            "edges": [[e.source, e.target] for e in space.cell.edges],
        }  # fmt: skip
        figures += [
            {"kind": "edge_prob", "title": f"{name}: probabilities", "steps": steps, "ops": list(space.ops), "p": p,
             **_edges_of(space)},
            {"kind": "wiring", "title": f"{name}: wiring", "steps": [steps[i] for i in at], "ops": list(space.ops),
             "p": p[at], **graph},
        ]  # fmt: skip
    return figures


def _cost_curves(title: str, found: CellSearchResult) -> dict[str, Any]:
    """Edge costs of the last cell and their sum, beside loss and accuracy (figures 7 and 10)."""
    edges = found.edge_costs[:, TRAIN, -1]
    right, everything = found.outputs[:, TRAIN, GROUPS.index("correct"), -1], found.outputs[:, TRAIN, 0, -1]
    return {
        "kind": "edge_cost", "title": title, "steps": found.steps, "cost": edges, "total": edges.sum(1),
        "loss": found.means(quantity="L"), "accuracy": right / everything, **_edges_of(found.space),
    }  # fmt: skip


def _clh_figure(title: str, found: CellSearchResult) -> dict[str, Any]:
    def curves(which: int) -> dict[str, Any]:
        return {group: {q: found.means(which, group, q) for q in "CLH"} for group in GROUPS}

    return {
        "kind": "clh", "title": title, "steps": found.steps, "train": curves(TRAIN),
        "search": curves(SEARCH) if found.cfg.bilevel else None,
    }  # fmt: skip


def _patterns_figure(title: str, runs: Mapping[int, CellSearchResult]) -> dict[str, Any]:
    inner = _intermediate(next(iter(runs.values())).space)
    rows = []
    for seed, found in runs.items():
        q, kept = _none_probability(found), _kept(found)
        rows.append({
            "name": f"seed {seed}", "steps": _window_steps(found), "C": _output_costs(found), "q_steps": _steps(found),
            "q_in": q[:, ~inner].mean(1), "q_int": q[:, inner].mean(1), "kept_in": kept[:, ~inner].sum(1),
            "kept_int": kept[:, inner].sum(1), "positive": _positive(found),
            "search_C": _output_costs(found, SEARCH) if found.cfg.bilevel else None,
        })  # fmt: skip
    return {
        "kind": "patterns", "title": title, "runs": rows, "n_in": int((~inner).sum()), "n_int": int(inner.sum()),
    }  # fmt: skip


def _heatmap(space: CellSpace, title: str, panels: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Figure 4: mean local costs of the last cell."""
    live = _live(space)
    rows = []
    for label, costs in panels.items():
        known = costs[:, live][np.isfinite(costs[:, live])]
        shown = costs.copy()
        shown[:, space.ops.index(NONE)] = np.nan
        rows.append({"label": label, "mean": shown, "positive": float((known > 0).mean())})
    return {"kind": "cost_heatmap", "title": title, "ops": list(space.ops), "panels": rows, **_edges_of(space)}


# --- tables -------------------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    return f"{value:.3f}" if np.isfinite(value) else "-"


def _interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of Student's t over the seeds."""
    values = np.asarray(values, dtype=float)
    if len(values) < 2 or not np.isfinite(values).all():
        return "-"
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.3f} ± {half:.3f}"


def _measures_table(title: str, runs: Mapping[int, CellSearchResult]) -> Table:
    of = {seed: measures(found) for seed, found in runs.items()}
    names = list(next(iter(of.values())))
    header = ("", *(f"seed {seed}" for seed in of), "mean, 95 %")
    rows = [
        (_MEASURES.get(name, name), *(_number(m[name]) for m in of.values()), _interval([m[name] for m in of.values()]))
        for name in names
    ]
    return Table(title, header, tuple(rows))


_MEASURES = {
    "C_first": "C, first part", "C_last": "C, last part",
    "positive_first": "costs > 0, first part", "positive_last": "costs > 0, last part",
    "intermediate_minus_input_cost": "cost of intermediate minus input edges of a node",
    "q_in_start": "q of input edges, start", "q_in_peak": "peak", "q_in_end": "end",
    "kept_in": "input edges kept", "n_in": "of",
    "q_int_start": "q of intermediate edges, start", "q_int_peak": "peak (intermediate)",
    "q_int_end": "end (intermediate)",
    "kept_int": "intermediate edges kept", "n_int": "of (intermediate)",
    "search_C_first": "held-out C, first part", "search_C_last": "held-out C, last part",
    "search_C_smallest": "held-out C, smallest part", "search_minus_train_C": "held-out minus training C, smallest",
}  # fmt: skip


def _derivation_table(runs: Mapping[int, CellSearchResult]) -> Table:
    """By argmax with None (the rule of SNAS, DSNAS and ProxylessNAS) and by DARTS's rule."""
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


# --- the studies --------------------------------------------------------------------------------------------------


def theorems_study(cfg: TheoremsConfig = TheoremsConfig()) -> StudyReport:
    """The theorems of the wiring paper as checks on real networks, in the form that holds."""
    return _study("theorems", cfg, None, _theorems)


def _theorems(cfg: TheoremsConfig, runner: _Runner) -> dict[str, Any]:
    rows = check_theorems(channels=cfg.channels, batch=cfg.batch, seed=cfg.seed)
    table = Table(
        "theorems", ("", "measured", "at most", "the numbers behind it"),
        tuple((row.name, f"{row.measured:.2g}", f"{row.bound:.0e}", row.note) for row in rows),
    )  # fmt: skip
    return {
        "subject": f"theorems on real networks, {cfg.channels} channels, {cfg.batch} images, float64",
        "tables": (table,),
        "checks": tuple(Check(row.name, -row.bound, row.bound, row.measured) for row in rows),
    }


def _searches(cfg: ExperimentConfig, runner: _Runner, name: str, **changes: Any) -> dict[int, CellSearchResult]:
    """The search of every seed."""
    found = {}
    for i in range(cfg.seeds):
        of_seed = cfg.of_seed(i)
        found[of_seed.seed] = runner.search(name, of_seed, of_seed.search(**changes))
    return found


def _subject(cfg: LearntConfig, found: CellSearchResult) -> str:
    data = "synthetic images" if cfg.images is None else f"images of {Path(cfg.images).name}"
    return (
        f"{_METHODS[cfg.method]} on {cfg.cells} {cfg.cell} cell(s), {cfg.channels} channels, {found.steps[-1]} steps, "
        f"{data}"
    )


def growth_study(cfg: GrowthConfig = GrowthConfig(), *, out: str | Path | None = None) -> StudyReport:
    """P1: None takes over first, then other operations do.

    Args:
        out: directory of the searches; finished ones are not repeated, interrupted ones go on.
    """
    return _study("p1", cfg, out, _growth)


def _growth(cfg: GrowthConfig, runner: _Runner) -> dict[str, Any]:
    runs = _searches(cfg, runner, cfg.method)
    checks = [check for seed, found in runs.items() for check in _growth_checks(seed, found)] if cfg.published else []
    first = next(iter(runs.values()))
    return {
        "subject": f"P1, growing: {_subject(cfg, first)}",
        "notes": _notes(cfg),
        "tables": (_measures_table("P1", runs), _derivation_table(runs)),
        "figures": (
            _patterns_figure("P1", runs), *_architecture_figures(f"seed {cfg.seed}", first),
            _cost_curves(f"seed {cfg.seed}: cost and loss", first), _clh_figure(f"seed {cfg.seed}: C = L - H", first),
        ),
        "verdicts": {f"P1, seed {seed}": _grown(found) for seed, found in runs.items()},
        "checks": tuple(checks),
    }  # fmt: skip


def _notes(cfg: ExperimentConfig) -> tuple[str, ...]:
    if cfg.published:
        return ()
    return ("settings are not those of the pass marks: signs are judged, thresholds are not",)


def _grown(found: CellSearchResult) -> dict[str, Any]:
    """P1 by its signs alone."""
    m = measures(found)
    seen = {
        "C turns from positive to negative": m["C_first"] > 0 > m["C_last"],
        "None gains at first": m["q_in_peak"] > 1.02 * m["q_in_start"],
        "and loses in the end": m["q_in_end"] < m["q_in_start"],
        "fewer costs are positive": m["positive_last"] < m["positive_first"],
    }
    return _verdict("growing", seen)


def _verdict(name: str, seen: Mapping[str, bool]) -> dict[str, Any]:
    missing = [what for what, is_so in seen.items() if not is_so]
    return {"names": [name if not missing else f"not seen: {', '.join(missing)}"], **seen}


def _growth_checks(seed: int, found: CellSearchResult) -> list[Check]:
    m, inf = measures(found), float("inf")
    return [
        Check(f"seed {seed}: C of the first part", 0, inf, m["C_first"]),
        Check(f"seed {seed}: C of the last part", -inf, 0, m["C_last"]),
        Check(f"seed {seed}: peak of q of input edges", 0.13, 1, m["q_in_peak"]),
        Check(f"seed {seed}: q of input edges at the end", 0, 0.06, m["q_in_end"]),
        Check(f"seed {seed}: input edges kept", m["n_in"], m["n_in"], m["kept_in"]),
    ]


def width_study(cfg: WidthConfig = WidthConfig(), *, out: str | Path | None = None) -> StudyReport:
    """P2: intermediate edges are dropped, input edges kept; and the control for its cause (figures 8 and 9).

    Args:
        out: directory of the searches, shared with P1; finished ones are not repeated, interrupted ones go on.
    """
    return _study("p2", cfg, out, _width)


_CONTROLS = {
    "simplified": CELLS["simplified"](DARTS_OPS),
    "modified, sampled": CELLS["modified"](DARTS_OPS),
    "modified, (0,1) fixed": CELLS["modified"](DARTS_OPS).restricted(0, 1, ("sep_conv_5x5",)),
}


def _width(cfg: WidthConfig, runner: _Runner) -> dict[str, Any]:
    runs = _searches(cfg, runner, cfg.method)
    inf, checks = float("inf"), []
    for seed, found in runs.items():
        m = measures(found)
        checks += [
            Check(f"seed {seed}: intermediate edges kept", 0, 2, m["kept_int"]),
            Check(f"seed {seed}: input edges kept", m["n_in"], m["n_in"], m["kept_in"]),
            Check(f"seed {seed}: cost of intermediate minus input edges of a node", 0, inf,
                  m["intermediate_minus_input_cost"]),
        ]  # fmt: skip
    control = CostConfig(
        cell="modified", steps=cfg.control_steps, seeds=cfg.seeds, seed=cfg.seed, device=cfg.device, records=12
    )
    panels, rows, controls = [], [], {}
    for label, cell in _CONTROLS.items():
        name = "control-" + "".join(c if c.isalnum() else "_" for c in label)
        controls[label] = {}
        for i in range(cfg.seeds):
            of_seed = control.of_seed(i)
            search = of_seed.search(method="uniform", redraw=label != "simplified")
            controls[label][of_seed.seed] = runner.search(name, of_seed, search, cell=cell)
        found = controls[label]
        edges = [e.name for e in cell.edges]
        panels.append({
            "label": label, "steps": next(iter(found.values())).steps, "edges": edges,
            "runs": [np.stack([_edge_means(f, slice(r, r + 1)) for r in range(len(f.steps))]) for f in found.values()],
        })  # fmt: skip
        for seed, f in found.items():
            early, late = (_edge_means(f, part) for part in _halves_and_quarter(f))
            rows.append((label, f"seed {seed}", *(f"{v:+.3f}" for v in (*early, *late))))
    checks = checks if cfg.published else []
    if cfg.control_steps == WidthConfig().control_steps:
        checks += _control_checks(controls)
    header = ("control", "", *(f"{e} first half" for e in edges), *(f"{e} last quarter" for e in edges))
    first = next(iter(runs.values()))
    return {
        "subject": f"P2, width preference: {_subject(cfg, first)}",
        "notes": _notes(cfg),
        "tables": (
            _measures_table("P2", runs), _derivation_table(runs),
            Table("mean cost of the edges, operations sampled uniformly", header, tuple(rows)),
        ),
        "figures": (
            _patterns_figure("P2", runs), *_architecture_figures(f"seed {cfg.seed}", first),
            {"kind": "control", "title": "control for the cause (figures 8 and 9)", "panels": panels},
        ),
        "verdicts": {f"P2, seed {seed}": _widened(found) for seed, found in runs.items()},
        "checks": tuple(checks),
    }  # fmt: skip


def _halves_and_quarter(found: CellSearchResult) -> tuple[slice, slice]:
    records = len(found.steps)
    return slice(0, records // 2), slice(records - max(1, records // 4), records)


def _control_checks(controls: Mapping[str, Mapping[int, CellSearchResult]]) -> list[Check]:
    checks, inf = [], float("inf")
    for label, runs in controls.items():
        fixed = label.endswith("fixed")
        for seed, found in runs.items():
            early, late = (_edge_means(found, part) for part in _halves_and_quarter(found))
            difference = float(late[2] - late[1])
            low, high = (-inf, 0.0) if fixed else (0.0, inf)
            checks.append(
                Check(f"{label}, seed {seed}: cost of (1,2) minus (0,2), last quarter", low, high, difference)
            )
            if label == "modified, sampled":
                checks.append(
                    Check(f"{label}, seed {seed}: cost of (1,2) minus (0,1), first half", 0.0, inf,
                          float(early[2] - early[0]))
                )  # fmt: skip
    return checks


def _widened(found: CellSearchResult) -> dict[str, Any]:
    m = measures(found)
    seen = {
        "intermediate edges are less probable": m["q_int_end"] > m["q_in_end"],
        "fewer of them are kept": m["kept_int"] / m["n_int"] < m["kept_in"] / m["n_in"],
        "they cost more than input edges of their nodes": m["intermediate_minus_input_cost"] > 0,
    }
    return _verdict("width preferred", seen)


def collapse_study(cfg: CollapseConfig = CollapseConfig(), *, out: str | Path | None = None) -> StudyReport:
    """P3: with an architecture that learns from held-out images, None takes all edges.

    Args:
        out: directory of the searches, shared with P1; finished ones are not repeated, interrupted ones go on.
    """
    return _study("p3", cfg, out, _collapse)


_SIGN_HEADER = ("", *(f"{q} {s}" for q in "CLH" for s in ("train", "search")))


def _collapse(cfg: CollapseConfig, runner: _Runner) -> dict[str, Any]:
    second = {"second_order": cfg.second_order} if cfg.method == "darts" else {}
    runs = _searches(cfg, runner, f"{cfg.method}-bilevel", bilevel=True, **second)
    single = _searches(cfg, runner, cfg.method)
    table_cfg = CostConfig(
        samples=300,
        steps=cfg.control_steps,
        seeds=cfg.seeds,
        seed=cfg.seed,
        device=cfg.device,
        records=12,
    )
    gates = _searches(table_cfg, runner, "table", method="darts", bilevel=True, alpha_lr=0.0)
    checks, inf = [], float("inf")
    for seed, found in runs.items():
        m = measures(found)
        total = m["n_in"] + m["n_int"]
        left = single[seed]
        checks += [
            Check(f"seed {seed}: edges that are None", total - 1, total, total - m["kept_in"] - m["kept_int"]),
            Check(f"seed {seed}: held-out C, smallest part", 0, inf, m["search_C_smallest"]),
            Check(f"seed {seed}: held-out minus training C, smallest part", 0, inf, m["search_minus_train_C"]),
            Check(f"seed {seed}: edges that are None on one level", 0, 6, float((_kept(left)[-1] == 0).sum())),
        ]
    checks = checks if cfg.published else []
    rows = []
    for seed, found in gates.items():
        window = _sign_window(found)
        for group in ("correct", "wrong"):
            values = [window[which][group][q] for q in "CLH" for which in (TRAIN, SEARCH)]
            rows.append((f"{group}, seed {seed}", *(f"{v:+.2f}" for v in values)))
        if cfg.control_steps == CollapseConfig().control_steps:
            checks += _sign_checks(seed, found, window)
    rows += [("correct, published", *"-0.11 -0.11 0.06 0.08 0.17 0.19".split()),
             ("wrong, published", *"0.80 2.18 1.70 2.92 0.90 0.74".split())]  # fmt: skip
    first, first_gates = next(iter(runs.values())), next(iter(gates.values()))
    return {
        "subject": f"P3, collapse on two levels: {_subject(cfg, first)}",
        "notes": _notes(cfg),
        "tables": (
            _measures_table("P3", runs), _measures_table("the same search on one level", single),
            _derivation_table(runs),
            Table("C, L, H with DARTS's gates, probabilities fixed, middle of the run", _SIGN_HEADER, tuple(rows)),
        ),
        "figures": (
            _patterns_figure("P3", runs), *_architecture_figures(f"seed {cfg.seed}", first),
            _clh_figure("DARTS's gates, probabilities fixed (figure 10)", first_gates),
            _cost_curves("DARTS's gates: costs of training batches", first_gates),
        ),
        "verdicts": {f"P3, seed {seed}": _collapsed(found) for seed, found in runs.items()},
        "checks": tuple(checks),
    }  # fmt: skip


def _collapsed(found: CellSearchResult) -> dict[str, Any]:
    m = measures(found)
    seen = {
        "all edges are None": m["kept_in"] + m["kept_int"] == 0,
        "held-out C stays positive": m["search_C_smallest"] > 0,
        "training C is below it": m["search_minus_train_C"] > 0,
    }
    return _verdict("collapsed", seen)


def _sign_window(found: CellSearchResult) -> dict[int, dict[str, dict[str, float]]]:
    """Means of C, L, H over the third quarter of the run: by set of images and group."""
    records = len(found.steps)
    part = found.outputs[records // 2 : max(records // 2 + 1, 3 * records // 4)].sum(0)
    with np.errstate(invalid="ignore"):
        means = part[..., :3] / part[..., 3:]
    return {
        which: {group: dict(zip("CLH", means[which, g].tolist(), strict=True)) for g, group in enumerate(GROUPS)}
        for which in (TRAIN, SEARCH)
    }


def _sign_checks(seed: int, found: CellSearchResult, window: Mapping[int, Any]) -> list[Check]:
    inf, name = float("inf"), f"table, seed {seed}:"
    train, search = window[TRAIN], window[SEARCH]
    curve = found.means(SEARCH)
    late = len(curve) // 2

    def apart(group: str, quantity: str) -> float:
        return search[group][quantity] - train[group][quantity]

    return [
        Check(f"{name} correct C, training", -inf, 0, train["correct"]["C"]),
        Check(f"{name} correct C, held out", -inf, 0, search["correct"]["C"]),
        Check(f"{name} wrong L, held out minus training", 0, inf, apart("wrong", "L")),
        Check(f"{name} wrong H, held out minus training", -inf, 0, apart("wrong", "H")),
        Check(f"{name} wrong C, held out minus training", 0.5, inf, apart("wrong", "C")),
        Check(f"{name} held-out C, second half minus first", 0, inf, float(curve[late:].mean() - curve[:late].mean())),
    ]


def cost_study(cfg: CostConfig = CostConfig(), *, out: str | Path | None = None) -> StudyReport:
    """Local costs at initialisation and after training (figures 4, 19, 30, 31).

    Args:
        out: directory of the searches; finished ones are not repeated, interrupted ones go on.
    """
    return _study("cost", cfg, out, _cost)


def _initial(cfg: CostConfig, runner: _Runner, space: CellSpace, nets: Iterable[int]) -> tuple[list[CostTable], float]:
    """Costs of fresh networks, and their mean output cost."""
    tables, cost, count = [], 0.0, 0.0
    for seed in nets:
        of_seed = cfg.replace(seed=seed)
        loader, _ = loaders(of_seed, bilevel=False)
        net = CellSupernet(space, seed=seed).to(device=runner.device, memory_format=torch.channels_last)
        table, outputs = monte_carlo(net, loader, batches=cfg.batches, seed=seed, device=runner.device)
        tables.append(table)
        cost, count = cost + float(outputs[0, 0]), count + float(outputs[0, 3])
    return tables, cost / count


def _last_cell(tables: Sequence[CostTable]) -> CostTable:
    """(1, edges, ops): costs of the last cell, of all networks together."""
    return CostTable(*(sum(getattr(t, name)[-1:] for t in tables) for name in ("total", "squares", "count")))


def _cost(cfg: CostConfig, runner: _Runner) -> dict[str, Any]:
    space = cfg.space()
    live = _live(space)
    seeds = range(cfg.seed, cfg.seed + cfg.nets)
    initial, mean_cost = _initial(cfg, runner, space, seeds)
    at_start = _last_cell(initial)
    trained = _searches(cfg, runner, "uniform")
    late = []
    for seed, found in trained.items():
        loader, _ = loaders(cfg.replace(seed=seed), bilevel=False)
        late.append(monte_carlo(found.net, loader, batches=cfg.batches, seed=seed + 1, device=runner.device)[0])
    at_end = _last_cell(late)
    rows = []
    for label, tables in (("initialisation", initial), ("trained", late)):
        joined = _last_cell(tables)
        shares = [_last_cell([t]).positive(live) for t in tables]
        mean, error = (v[0][:, live].numpy() for v in (joined.mean, joined.error))
        clear = np.abs(mean) > 2 * error
        rows.append((
            label, str(len(tables)), f"{joined.positive(live):.2f}", f"{np.mean(shares):.2f}",
            f"{np.nanmean(mean):+.4f}",
            f"{np.nanmean(error):.4f}", f"{(clear & (mean > 0)).sum()} / {(clear & (mean < 0)).sum()}",
        ))  # fmt: skip
    header = (
        "last cell", "networks", "costs > 0", "of single networks", "mean cost", "error over batches", "clearly + / -",
    )  # fmt: skip
    figures = [
        _heatmap(space, "local costs (figure 4)", {
            "initialisation": at_start.mean[0].numpy(), "trained": at_end.mean[0].numpy(),
        }),
    ]  # fmt: skip
    inf = float("inf")
    checks = []
    if cfg.published:
        checks = [
            Check("initialisation: mean C", 0, inf, mean_cost),
            Check("initialisation: share of costs > 0", 0.6, 1, at_start.positive(live)),
        ]
    first = next(iter(trained.values()))
    figures.append(_cost_curves(f"seed {cfg.seed}: operations sampled uniformly", first))
    return {
        "subject": f"local costs of {cfg.cells} {cfg.cell} cell(s), operations sampled uniformly",
        "notes": _notes(cfg),
        "tables": (
            Table("local costs", header, tuple(rows)), _sums_table(cfg, runner), _variants_table(cfg, runner),
        ),
        "figures": tuple(figures),
        "checks": tuple(checks),
    }  # fmt: skip


def _sums_table(cfg: CostConfig, runner: _Runner) -> Table:
    """Figure 19: costs of the cells before the last add up to next to nothing, the skip term aside."""
    two = cfg.replace(cells=2, reductions=False, no_skip_on_intermediate=True)
    tables, _ = _initial(two, runner, two.space(), [cfg.seed])
    sums = tables[0].total.sum((1, 2)) / cfg.batches
    rows = [
        (name, f"{value:+.2e}") for name, value in zip(("second last cell", "last cell"), sums.tolist(), strict=True)
    ]
    return Table("sum of the edges' costs, two cells without skip on intermediate edges", ("", "C"), tuple(rows))


def _variants_table(cfg: CostConfig, runner: _Runner) -> Table:
    """Figures 29 to 31: other orders of convolution, norm and ReLU, and other norms, at initialisation."""
    rows = []
    variants: list[dict[str, Any]] = [{"order": "conv_relu_norm"}, {"order": "conv_norm_relu"}, {"norm": "layer"}]
    for changes in [{}, *variants, {"norm": "instance"}]:
        other = cfg.replace(**changes)
        space = other.space()
        tables, mean = _initial(other, runner, space, range(cfg.seed, cfg.seed + max(1, cfg.nets // 3)))
        joined = _last_cell(tables)
        rows.append((
            ", ".join(f"{k} {v}" for k, v in changes.items()) or "as above", f"{mean:+.4f}",
            f"{joined.positive(_live(space)):.2f}", f"{float(np.nanmean(joined.mean[0][:, _live(space)])):+.5f}",
        ))  # fmt: skip
    return Table("at initialisation", ("", "C", "costs > 0", "mean cost"), tuple(rows))
