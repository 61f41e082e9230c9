"""What the NASI study measures: scores and accuracies of cells, searches, and the step beside its exact gradient."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from nasfast import seeds
from nasfast.config import ConfigError
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.table import IndicatorTable
from nasfast.research.cells.derive import derive
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.cells.space import Cell, CellSpace, Edge, nas_bench_201_space
from nasfast.research.nasi.score import score, score_architecture, untrained
from nasfast.research.nasi.search import (
    Gates,
    Mixture,
    NasiConfig,
    NasiResult,
    Record,
    random_images,
    random_labels,
    sample,
    solve,
)
from nasfast.research.nasi.spaces import METHOD, TABLE_FILE, CellMixture, chosen_arch, mixture_of
from nasfast.research.studies.nasi.config import MODES, NasiQuickConfig, NasiSearchConfig
from nasfast.research.studies.run import Done, Task, no_task
from nasfast.runtime.device import torch_device
from nasfast.runtime.files import write_atomic
from nasfast.seeds import derive_seed
from nasfast.spaces import BUILDERS, Arch, ArchSpace, named_space, read_space

NOISE = 3.0
SYNTHETIC = 2000
"""Number of synthetic images."""
BATCH = 64
"""Images of a training step and of a search step, in the quick experiment."""
NU = 0.6
"""The fixed limit of the penalised searches; the adaptive limit starts from it."""
EXACT_IMAGES = 16
"""Images on which the exact trace is computed."""
Images = tuple[Tensor, Tensor]
"""Images (N, C, H, W) and labels (N,)."""


class Trainer:
    """Trains cells, each once, and gives their accuracies."""

    def __init__(self, space: CellSpace, train: Images, test: Images, cfg: NasiQuickConfig) -> None:
        self._space, self._test, self._cfg = space, test, cfg
        self._loader = DrawnBatches(*train, steps=cfg.train_steps, batch=BATCH, seed=cfg.seed)
        self._known: dict[Arch, float] = {}

    def __call__(self, arch: Arch) -> float:
        if arch not in self._known:
            self._known[arch] = self._train(arch)
        return self._known[arch]

    def _train(self, arch: Arch) -> float:
        seed, steps = derive_seed(self._cfg.seed, seeds.STUDY_TRAINED_WEIGHTS), self._cfg.train_steps
        net = untrained(self._space, arch, seed=seed)
        parameters = [p for p in net.parameters() if p.requires_grad]
        # This is not `nasfast.train`: its optimiser spares norms and biases the weight decay, and its cosine differs in
        # the last bit at a quarter of the steps. Either would change the published accuracies of these cells.
        sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        for step, (x, y) in enumerate(self._loader.epoch(0)):
            sgd.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / steps))
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 5.0)
            sgd.step()
        net.eval()
        with torch.no_grad():
            return float((net(self._test[0]).argmax(1) == self._test[1]).double().mean())


def tenths(done: Done, total: int) -> Done:
    """Report the progress only ten times."""
    every = max(1, total // 10)
    return lambda count: done(count) if count % every == 0 or count == total else None


def distinct_archs(space: CellSpace, count: int, seed: int) -> list[Arch]:
    """Random architectures, all different."""
    rng = np.random.default_rng(derive_seed(seed, seeds.STUDY_CELLS))
    found: dict[Arch, None] = {}
    while len(found) < count:
        found[space.random(rng)] = None
    return list(found)


def batches_of(
    train: tuple[Tensor, Tensor], images: int, repeats: int, mode: str, classes: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Batches that are the same in every mode, except for what the mode makes random."""
    batches = list(
        DrawnBatches(*train, steps=repeats, batch=images, seed=derive_seed(seed, seeds.STUDY_BATCHES)).epoch(0)
    )
    if mode == "random labels":
        return [
            (x, random_labels(len(y), classes, seed=derive_seed(seed, seeds.STUDY_LABELS, i)))
            for i, (x, y) in enumerate(batches)
        ]
    if mode == "random images":
        return [
            (random_images(x.shape, seed=derive_seed(seed, seeds.STUDY_IMAGES, i)), y)
            for i, (x, y) in enumerate(batches)
        ]
    return batches


def _scores(
    space: CellSpace, archs: Sequence[Arch], train: Images, cfg: NasiQuickConfig, done: Done
) -> dict[str, list[float]]:
    batches = {mode: batches_of(train, cfg.images, cfg.repeats, mode, space.num_classes, cfg.seed) for mode in MODES}
    scores: dict[str, list[float]] = {mode: [] for mode in MODES}
    for i, arch in enumerate(archs, 1):
        for mode in MODES:
            scores[mode].append(score_architecture(space, arch, batches[mode], seed=cfg.seed))
        done(i)
    return scores


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation coefficient."""
    return float(stats.pearsonr(x, y).statistic)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's rank correlation coefficient."""
    return float(stats.spearmanr(x, y).statistic)


@dataclass(frozen=True)
class RandomCells:
    """Random cells of the quick experiment.

    Attributes:
        archs: all different.
        scores: Q of each, by mode.
        accuracy: accuracy of each after its training.
        params: number of parameters of each.
    """

    archs: list[Arch]
    scores: dict[str, list[float]]
    accuracy: np.ndarray
    params: np.ndarray


def random_cells(space: CellSpace, train: Images, trainer: Trainer, cfg: NasiQuickConfig, task: Task) -> RandomCells:
    """Score and train random cells."""
    archs = distinct_archs(space, cfg.cells, cfg.seed)
    scores = _scores(space, archs, train, cfg, tenths(task("scores", len(archs)), len(archs)))
    done, accuracy = tenths(task("training random cells", len(archs)), len(archs)), []
    for i, arch in enumerate(archs, 1):
        accuracy.append(trainer(arch))
        done(i)
    params = np.array([float(space.cost(arch).params) for arch in archs])
    return RandomCells(archs, scores, np.array(accuracy), params)


@dataclass(frozen=True)
class SearchKind:
    """The searches of one kind in the quick experiment, one for each seed.

    Attributes:
        name: mode, penalty and limit.
        marked: whether the kind has pass marks.
        archs: what was selected.
        accuracy: accuracy of each after its training.
        percentile: percentile of each accuracy among those of the random cells.
    """

    name: str
    marked: bool
    archs: list[Arch]
    accuracy: np.ndarray
    percentile: np.ndarray


Records = dict[tuple[str, int], Record]
"""Mode and number of the seed -> the architectures that a search sampled."""


def search_records(space: CellSpace, train: Images, cfg: NasiQuickConfig, task: Task) -> Records:
    """Sample architectures in every mode, from every seed."""
    records = {}
    for mode, changes in MODES.items():
        for i in range(cfg.seeds):
            search = NasiConfig(steps=cfg.steps, seed=cfg.seed + i, **changes)
            seed = derive_seed(cfg.seed + i, seeds.STUDY_SEARCH_BATCHES)
            loader = DrawnBatches(*train, steps=cfg.steps, batch=BATCH, seed=seed)
            mixture = CellMixture(space, seed=cfg.seed + i)
            done = tenths(task(f"search, {mode}, seed {cfg.seed + i}", cfg.steps), cfg.steps)
            records[mode, i] = sample(mixture, loader, search, progress=done)
    return records


def search_kinds(
    space: CellSpace, records: Records, trainer: Trainer, cells: RandomCells, cfg: NasiQuickConfig
) -> list[SearchKind]:
    """Solve the records with several penalties and limits, and train what they select."""
    of_mode = {mode: [records[mode, i] for i in range(cfg.seeds)] for mode in MODES}
    standard = of_mode["standard"]
    solved: dict[str, list[NasiResult]] = {"no penalty": [solve(r, mu=0.0) for r in standard]}
    for mu in (1.0, 2.0):
        solved[f"mu {mu:g}, nu {NU:g}"] = [solve(r, mu=mu, constraint="fixed", nu=NU) for r in standard]
    for mode in list(MODES)[1:]:
        solved[f"no penalty, {mode}"] = [solve(r, mu=0.0) for r in of_mode[mode]]
    for mu in (1.0, 2.0):
        solved[f"mu {mu:g}, nu 0.9 quantile"] = [solve(r, mu=mu) for r in standard]
    marked = set(solved)
    for mode in MODES:
        name = "mu 2, adaptive nu" + ("" if mode == "standard" else f", {mode}")
        solved[name] = [solve(r, mu=2.0, constraint="adaptive", nu=NU) for r in of_mode[mode]]
    kinds = []
    for name, results in solved.items():
        archs = [derive(space, r.logits, "argmax") for r in results]
        reached = np.array([trainer(arch) for arch in archs])
        percentile = np.array([(cells.accuracy <= a).mean() for a in reached])
        kinds.append(SearchKind(name, name in marked, archs, reached, percentile))
    return kinds


@dataclass(frozen=True)
class ExactTraces:
    """Estimates of the trace of the neural tangent kernel for random cells, on the same weights and images.

    Attributes:
        found: kind of score -> its values; `trace_full` is the exact trace.
        averaged: the score of the study, over several batches.
        params: number of parameters.
    """

    found: dict[str, list[float]]
    averaged: list[float]
    params: list[float]


def exact_traces(space: CellSpace, train: Images, cfg: NasiQuickConfig, done: Done) -> ExactTraces:
    """Compute the exact trace and its estimates for random cells."""
    archs = distinct_archs(space, cfg.exact, cfg.seed + 1)
    x, y = train[0][:EXACT_IMAGES], train[1][:EXACT_IMAGES]
    found: dict[str, list[float]] = {kind: [] for kind in ("trace_full", "trace_label", "q_sum", "q_batch")}
    averaged, batches = [], batches_of(train, cfg.images, cfg.repeats, "standard", space.num_classes, cfg.seed)
    for i, arch in enumerate(archs, 1):
        net = untrained(space, arch, seed=derive_seed(cfg.seed, seeds.STUDY_EXACT_WEIGHTS))
        for kind, values in found.items():
            values.append(score(net, x, y, kind=kind, chunk=EXACT_IMAGES * space.num_classes))
        averaged.append(score_architecture(space, arch, batches, seed=cfg.seed))
        done(i)
    return ExactTraces(found, averaged, [float(space.cost(arch).params) for arch in archs])


class Searches:
    """Searches of the space that a config names.

    Args:
        cfg: what to search, and how.
        task: tells the progress.

    Raises:
        ConfigError: unknown space, or fewer images than a batch.
        DataError: the folder of images cannot be used.
    """

    def __init__(self, cfg: NasiSearchConfig, task: Task = no_task) -> None:
        self.cfg, self.device = cfg, torch_device(cfg.device)
        self._task = task
        self._source = None if cfg.images is None else FolderSource(cfg.images)
        self._loaders: dict[tuple[int, int], Any] = {}
        self.images = SYNTHETIC if self._source is None else len(self._source)
        if self.images < cfg.batch_size:
            raise ConfigError(f"batch must be at most {self.images}, the number of images, got {cfg.batch_size}")
        classes = len(self._source.classes) if self._source is not None else 10 if cfg.space in BUILDERS else None
        sizes = {
            "resolution": cfg.resolution or self.cfg.preset.resolution,
            "num_classes": classes,
            "cells": cfg.cells or cfg.preset.cells,
            "channels": cfg.channels,
        }
        self.space = named_space(cfg.space, **{name: value for name, value in sizes.items() if value is not None})

    def loader(self, i: int, batch: int) -> Any:
        """Batches of the i-th seed, the same for every search."""
        if (i, batch) not in self._loaders:
            self._loaders[i, batch] = self._loader(self.cfg.seed + i, batch)
        return self._loaders[i, batch]

    def _loader(self, seed: int, batch: int) -> Any:
        if self._source is None:
            return synthetic(self.space, steps=100, batch=batch, seed=seed)
        data = DataConfig(train=self.cfg.images, batch_size=batch)
        return make_loader(
            data, self._source, resolution=self.space.resolution, in_channels=self.space.in_channels, seed=seed
        )

    def mixture(self, search: NasiConfig) -> Mixture:
        """The untrained supernet of a search."""
        return mixture_of(self.space, seed=search.seed).to(self.device)

    def record(self, search: NasiConfig, i: int, name: str, *, batch: int | None = None) -> Record:
        """Sample the architectures of one search."""
        mixture = self.mixture(search)
        loader = self.loader(i, batch or self.cfg.batch_size)
        done = tenths(self._task(name, search.steps), search.steps)
        return sample(mixture, loader, search, device=self.device, progress=done)

    def all(self) -> dict[tuple[str, int], NasiResult]:
        """Every mode with every seed."""
        results = {}
        for mode, i in product(self.cfg.mode_list, range(self.cfg.seeds)):
            search = self.cfg.search(i, **MODES[mode])
            results[mode, i] = self.solve(self.record(search, i, f"{mode}, seed {search.seed}"), search).check()
        return results

    def solve(self, record: Record, search: NasiConfig) -> NasiResult:
        """The best logits for a record, with the penalty of a search."""
        return solve(record, mu=search.mu, constraint=search.constraint, nu=search.nu, xi=search.xi)

    def arch(self, result: NasiResult) -> Arch:
        """The architecture that a result selects."""
        return chosen_arch(self.space, result, rule=self.cfg.preset.rule)


def synthetic(space: ArchSpace, *, steps: int, batch: int, seed: int) -> DrawnBatches:
    """Batches of noisy prototypes, resized to a space's resolution.

    Raises:
        ConfigError: a space of more than three channels.
    """
    if space.in_channels > 3:
        raise ConfigError(f"synthetic images have up to 3 channels, {space.name} takes {space.in_channels}")
    (x, y), _ = prototypes(NOISE, SYNTHETIC, 1, seed=seed)
    x = x[:, : space.in_channels]
    if space.resolution != x.shape[-1]:
        size = (space.resolution, space.resolution)
        # a batch at a time would save memory, but 2000 images of 64 x 64 are 100 MB
        x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    return DrawnBatches(x, y % space.num_classes, steps=steps, batch=batch, seed=seed)


def claim_folder(out: Path | None, space: ArchSpace) -> Path | None:
    """The folder that gets the files. It is checked before anything is computed.

    Raises:
        FileExistsError: it holds another space or the scores of a trained supernet.
    """
    if out is None:
        return None
    folder = out
    path, table = folder / "space.yaml", folder / TABLE_FILE
    if path.exists() and read_space(path) != space:
        raise FileExistsError(f"{path} is of another space: choose another --out")
    if table.exists() and IndicatorTable.load(table).meta.get("method") != METHOD:
        raise FileExistsError(f"{table} has the scores of a trained supernet: choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, space.to_yaml().encode())
    return folder


def own_scores(
    searches: Searches, archs: Sequence[Arch], batches: Sequence[tuple[Tensor, Tensor]], done: Done
) -> tuple[dict[Arch, float], str]:
    """Q of every architecture, and the seconds of the clock and of the processor."""
    start, cpu = time.perf_counter(), time.process_time()
    q = {}
    for i, arch in enumerate(archs, 1):
        q[arch] = score_architecture(searches.space, arch, batches, seed=searches.cfg.seed)
        done(i)
    return q, f"{time.perf_counter() - start:.1f} ({time.process_time() - cpu:.1f})"


DIRECTIONS = 20000
"""Random directions that the closed form is compared with."""


def small_space() -> CellSpace:
    """Three edges with three operations each: few enough architectures to enumerate."""
    ops = ("skip_connect", "avg_pool_3x3", "conv_3x3")
    edges = tuple(Edge(i, j, ops) for i, j in ((0, 1), (0, 2), (1, 2)))
    return nas_bench_201_space(cells=1, channels=8, resolution=12).replace(
        name="three_edges", cell=Cell(1, 2, edges, (2,)), reductions=()
    )


def enumerated(mixture: Mixture, space: CellSpace, x: Tensor, y: Tensor) -> tuple[list[Arch], Tensor]:
    """All architectures of a space of one type of cell, and the Q of each on a batch, with the supernet's weights."""
    archs = list(product(*space.candidates))
    parameters = [p for p in mixture.parameters() if p.requires_grad]
    values = []
    for arch in archs:
        gates = F.one_hot(torch.tensor([arch]), len(space.ops)).to(x)
        grads = torch.autograd.grad(F.cross_entropy(mixture(x, gates), y), parameters, allow_unused=True)
        values.append(sum(float(g.square().sum()) for g in grads if g is not None))
    return archs, torch.tensor(values, dtype=torch.float64)


def enumerated_gradient(archs: Sequence[Arch], q: Tensor, shape: Sequence[int]) -> Tensor:
    """(kinds, edges, ops) gradient of E[Q] at alpha = 0: sum_A p(A) Q(A) (1[A_e = k] - 1 / K), candidates alike."""
    hard = F.one_hot(torch.tensor(archs), shape[-1]).double()
    return ((hard - 1 / shape[-1]) * q[:, None, None]).mean(0)[None]


def expectation(archs: Sequence[Arch], q: Tensor, alpha: Tensor) -> Tensor:
    """E[Q] of an architecture that is drawn with the logits alpha."""
    log_p = torch.log_softmax(alpha[0], -1)
    rows = torch.arange(log_p.shape[0])
    return (log_p[rows, torch.tensor(archs)].sum(1).exp() * q).sum()


def ascend(archs: Sequence[Arch], q: Tensor, shape: Sequence[int]) -> Tensor:
    """The alpha of norm 1 at which E[Q] is largest, by projected gradient ascent."""
    alpha = torch.zeros(tuple(shape), dtype=torch.float64)
    for _ in range(500):
        alpha.requires_grad_()
        (gradient,) = torch.autograd.grad(expectation(archs, q, alpha), alpha)
        alpha = alpha.detach() + 0.1 * gradient / gradient.norm()
        alpha = alpha / alpha.norm().clamp(min=1)
    return alpha


@dataclass(frozen=True)
class StepRow:
    """A direction from alpha_0 = 0: its cosine with the closed form, E[Q] there, the place of its argmax by Q."""

    name: str
    cosine: float
    expected_q: float
    place: int


@dataclass(frozen=True)
class ClosedForm:
    """The closed form beside other directions.

    Attributes:
        q: Q of all architectures.
        best_gain: gain of the best of `DIRECTIONS` random directions, over the first-order gain of the closed form.
        rows: the directions.
    """

    q: Tensor
    best_gain: float
    rows: list[StepRow]


def closed_form(cfg: NasiQuickConfig, train: Images) -> ClosedForm:
    """Compare the step of the method with what the enumeration of 27 architectures gives."""
    space = small_space()
    mixture = CellMixture(space, seed=cfg.seed).double()
    x, y = train[0][:BATCH].double(), train[1][:BATCH]
    archs, q = enumerated(mixture, space, x, y)
    exact = enumerated_gradient(archs, q, mixture.allowed.shape)
    step = exact / exact.norm()
    rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_DIRECTIONS))
    directions = torch.from_numpy(rng.standard_normal((DIRECTIONS, exact.numel())))
    best = float((directions @ exact.flatten() / directions.norm(dim=1)).max())
    place = {arch: int((q > q[i]).sum()) + 1 for i, arch in enumerate(archs)}

    def row(name: str, direction: Tensor) -> StepRow:
        chosen = tuple(direction[0].argmax(-1).tolist())
        cosine = float((direction * step).sum())
        return StepRow(name, cosine, float(expectation(archs, q, direction)), place[chosen])

    rows = [replace(row("closed form, exact gradient", step), cosine=1.0)]
    for gates in get_args(Gates):
        search = NasiConfig(steps=cfg.steps, mu=0.0, seed=cfg.seed, gates=gates)
        found = solve(sample(mixture, [(x, y)], search), mu=0.0).delta
        rows.append(row(f"{gates.replace('_', '-')}, T = {cfg.steps}", found / found.norm()))
    rows.append(row("largest E[Q] of norm 1, ascent", ascend(archs, q, exact.shape)))
    return ClosedForm(q, best / float(exact.norm()), rows)
