"""What the quick experiment of the NASI study measures: random cells, searches, exact traces, and an enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from nasfast import seeds
from nasfast.research.cells.derive import derive
from nasfast.research.cells.prototypes import DrawnBatches
from nasfast.research.cells.space import Cell, CellSpace, Edge, nas_bench_201_space
from nasfast.research.nasi.config import Gates
from nasfast.research.nasi.score import score, score_architecture, untrained
from nasfast.research.nasi.search import Mixture, NasiConfig, Record, random_images, random_labels, sample, solve
from nasfast.research.nasi.spaces import CellMixture
from nasfast.research.studies.nasi.config import MODES, NasiQuickConfig
from nasfast.research.studies.run import Done, Task
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch

NOISE = 3.0
SYNTHETIC = 2000
"""Number of synthetic images."""
BATCH = 64
"""Images of a training step and of a search step, in the quick experiment."""
NU = 0.6
"""The fixed limit of the penalised searches; the adaptive limit starts from it."""
EXACT_IMAGES = 16
"""Images on which the exact trace is computed."""
DIRECTIONS = 20000
"""Random directions that the closed form is compared with."""
Images = tuple[Tensor, Tensor]
"""Images (N, C, H, W) and labels (N,)."""
Trainer = Callable[[Arch], float]
"""Trains a cell and gives its accuracy."""


def cell_trainer(space: CellSpace, train: Images, test: Images, cfg: NasiQuickConfig) -> Trainer:
    """Trains every cell once, from the same weights and with the same batches."""
    seed, steps = derive_seed(cfg.seed, seeds.STUDY_TRAINED_WEIGHTS), cfg.train_steps
    loader = DrawnBatches(*train, steps=steps, batch=BATCH, seed=cfg.seed)

    @cache
    def trainer(arch: Arch) -> float:
        net = untrained(space, arch, seed=seed)
        parameters = [p for p in net.parameters() if p.requires_grad]
        # This is not `nasfast.train`: its optimiser spares norms and biases the weight decay, and its cosine differs in
        # the last bit at a quarter of the steps. Either would change the published accuracies of these cells.
        sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        for step, (x, y) in enumerate(loader.epoch(0)):
            sgd.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / steps))
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 5.0)
            sgd.step()
        net.eval()
        with torch.no_grad():
            return float((net(test[0]).argmax(1) == test[1]).double().mean())

    return trainer


def distinct_archs(space: CellSpace, count: int, seed: int) -> list[Arch]:
    """Random architectures, all different."""
    rng = np.random.default_rng(derive_seed(seed, seeds.STUDY_CELLS))
    archs: dict[Arch, None] = {}
    while len(archs) < count:
        archs[space.random(rng)] = None
    return list(archs)


def score_batches(train: Images, images: int, repeats: int, mode: str, classes: int, seed: int) -> list[Images]:
    """Batches that are the same in every mode, except for what the mode makes random."""
    draws = DrawnBatches(*train, steps=repeats, batch=images, seed=derive_seed(seed, seeds.STUDY_BATCHES)).epoch(0)
    batches = []
    for i, (x, y) in enumerate(draws):
        if mode == "random labels":
            y = random_labels(len(y), classes, seed=derive_seed(seed, seeds.STUDY_LABELS, i))
        elif mode == "random images":
            x = random_images(x.shape, seed=derive_seed(seed, seeds.STUDY_IMAGES, i))
        batches.append((x, y))
    return batches


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation coefficient."""
    return float(stats.pearsonr(x, y).statistic)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's rank correlation coefficient."""
    return float(stats.spearmanr(x, y).statistic)


@dataclass(frozen=True)
class RandomCells:
    """Random cells of the quick experiment, all different: Q by mode, accuracy after training, and parameters."""

    archs: list[Arch]
    scores: dict[str, list[float]]
    accuracy: np.ndarray
    params: np.ndarray


def random_cells(space: CellSpace, train: Images, trainer: Trainer, cfg: NasiQuickConfig, task: Task) -> RandomCells:
    """Score and train random cells."""
    archs = distinct_archs(space, cfg.cells, cfg.seed)
    batches = {mode: score_batches(train, cfg.images, cfg.repeats, mode, space.num_classes, cfg.seed) for mode in MODES}
    scores: dict[str, list[float]] = {mode: [] for mode in MODES}
    scores_done = task("scores", len(archs))
    for i, arch in enumerate(archs, 1):
        for mode in MODES:
            scores[mode].append(score_architecture(space, arch, batches[mode], seed=cfg.seed))
        scores_done(i)
    accuracy, trainings_done = [], task("training random cells", len(archs))
    for i, arch in enumerate(archs, 1):
        accuracy.append(trainer(arch))
        trainings_done(i)
    params = np.array([float(space.cost(arch).params) for arch in archs])
    return RandomCells(archs, scores, np.array(accuracy), params)


@dataclass(frozen=True)
class SearchKind:
    """What the searches of one kind select in the quick experiment, one for each seed.

    `percentile` is the place of an accuracy among those of the random cells.
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
            done = task(f"search, {mode}, seed {cfg.seed + i}", cfg.steps)
            records[mode, i] = sample(mixture, loader, search, progress=done)
    return records


def suffix(mode: str) -> str:
    return "" if mode == "standard" else f", {mode}"


_FIXED: dict[str, Any] = {"constraint": "fixed", "nu": NU}
_KINDS: tuple[tuple[str, dict[str, Any], tuple[str, ...], bool], ...] = (
    ("no penalty", {"mu": 0.0}, ("standard",), True),
    (f"mu 1, nu {NU:g}", {"mu": 1.0, **_FIXED}, ("standard",), True),
    (f"mu 2, nu {NU:g}", {"mu": 2.0, **_FIXED}, ("standard",), True),
    ("no penalty", {"mu": 0.0}, ("random labels", "random images"), True),
    ("mu 1, nu 0.9 quantile", {"mu": 1.0}, ("standard",), True),
    ("mu 2, nu 0.9 quantile", {"mu": 2.0}, ("standard",), True),
    ("mu 2, adaptive nu", {"mu": 2.0, "constraint": "adaptive", "nu": NU}, tuple(MODES), False),
)
"""Penalty and limit, their settings, the modes that they are solved in, and whether there are pass marks."""


def search_kinds(
    space: CellSpace, records: Records, trainer: Trainer, cells: RandomCells, cfg: NasiQuickConfig
) -> list[SearchKind]:
    """Solve the records with several penalties and limits, and train what they select."""
    kinds = []
    for name, settings, modes, marked in _KINDS:
        for mode in modes:
            results = [solve(records[mode, i], NasiConfig(**settings)) for i in range(cfg.seeds)]
            archs = [derive(space, r.logits, "argmax") for r in results]
            accuracies = np.array([trainer(arch) for arch in archs])
            percentile = np.array([(cells.accuracy <= a).mean() for a in accuracies])
            kinds.append(SearchKind(name + suffix(mode), marked, archs, accuracies, percentile))
    return kinds


TRACES = ("trace_full", "trace_label", "q_sum", "q_batch")
"""The exact trace of the neural tangent kernel, and its estimates from the same weights and images."""


def exact_traces(space: CellSpace, train: Images, cfg: NasiQuickConfig, done: Done) -> dict[str, list[float]]:
    """TRACES of random cells, and beside them `averaged`, the score of the study, and `params`."""
    x, y = train[0][:EXACT_IMAGES], train[1][:EXACT_IMAGES]
    batches = score_batches(train, cfg.images, cfg.repeats, "standard", space.num_classes, cfg.seed)
    traces: dict[str, list[float]] = {kind: [] for kind in (*TRACES, "averaged", "params")}
    for i, arch in enumerate(distinct_archs(space, cfg.exact, cfg.seed + 1), 1):
        net = untrained(space, arch, seed=derive_seed(cfg.seed, seeds.STUDY_EXACT_WEIGHTS))
        for kind in TRACES:
            traces[kind].append(score(net, x, y, kind=kind, chunk=EXACT_IMAGES * space.num_classes))
        traces["averaged"].append(score_architecture(space, arch, batches, seed=cfg.seed))
        traces["params"].append(float(space.cost(arch).params))
        done(i)
    return traces


def small_space() -> CellSpace:
    """Three edges with three operations each: few enough architectures to enumerate."""
    ops = ("skip_connect", "avg_pool_3x3", "conv_3x3")
    edges = tuple(Edge(i, j, ops) for i, j in ((0, 1), (0, 2), (1, 2)))
    return nas_bench_201_space(cells=1, channels=8, resolution=12).replace(
        name="three_edges", cell=Cell(1, 2, edges, (2,)), reductions=()
    )


def enumerate_space(mixture: Mixture, space: CellSpace, x: Tensor, y: Tensor) -> tuple[list[Arch], Tensor]:
    """All architectures of a space of one type of cell, and the Q of each on a batch, with the supernet's weights."""
    archs = list(product(*space.candidates))
    parameters = [p for p in mixture.parameters() if p.requires_grad]
    values = []
    for arch in archs:
        gates = F.one_hot(torch.tensor([arch]), len(space.ops)).to(x)
        grads = torch.autograd.grad(F.cross_entropy(mixture(x, gates), y), parameters, allow_unused=True)
        values.append(sum(float(g.square().sum()) for g in grads if g is not None))
    return archs, torch.tensor(values, dtype=torch.float64)


def expectation(archs: Sequence[Arch], q: Tensor, alpha: Tensor) -> Tensor:
    """E[Q] of an architecture that is drawn with the logits alpha."""
    log_p = torch.log_softmax(alpha[0], -1)
    rows = torch.arange(log_p.shape[0])
    return (log_p[rows, torch.tensor(archs)].sum(1).exp() * q).sum()


def slope(archs: Sequence[Arch], q: Tensor, alpha: Tensor) -> Tensor:
    """(kinds, edges, ops) gradient of E[Q] at alpha."""
    alpha = alpha.clone().requires_grad_()
    return torch.autograd.grad(expectation(archs, q, alpha), alpha)[0]


def ascend(archs: Sequence[Arch], q: Tensor, start: Tensor) -> Tensor:
    """The alpha of norm 1 at which E[Q] is largest, by projected gradient ascent."""
    alpha = start
    for _ in range(500):
        gradient = slope(archs, q, alpha)
        alpha = alpha + 0.1 * gradient / gradient.norm()
        alpha = alpha / alpha.norm().clamp(min=1)
    return alpha


@dataclass(frozen=True)
class ClosedForm:
    """The step of the method beside other directions from alpha_0 = 0.

    Attributes:
        q: Q of all architectures.
        best_random: the gain of the best of DIRECTIONS random directions, divided by the closed form's, to first order.
        directions: name -> cosine with the closed form, E[Q] there, and the place of its argmax by Q.
    """

    q: Tensor
    best_random: float
    directions: dict[str, tuple[float, float, int]]


def closed_form(cfg: NasiQuickConfig, train: Images) -> ClosedForm:
    """Enumerate the small space."""
    space = small_space()
    mixture = CellMixture(space, seed=cfg.seed).double()
    x, y = train[0][:BATCH].double(), train[1][:BATCH]
    archs, q = enumerate_space(mixture, space, x, y)
    start = torch.zeros(mixture.allowed.shape, dtype=torch.float64)
    exact = slope(archs, q, start)
    step = exact / exact.norm()
    rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_DIRECTIONS))
    random = torch.from_numpy(rng.standard_normal((DIRECTIONS, exact.numel())))
    best = float((random @ exact.flatten() / random.norm(dim=1)).max()) / float(exact.norm())
    directions = {"closed form, exact gradient": step}
    for gates in get_args(Gates):
        search = NasiConfig(steps=cfg.steps, mu=0.0, seed=cfg.seed, gates=gates)
        delta = solve(sample(mixture, [(x, y)], search), search).delta
        directions[f"{gates.replace('_', '-')}, T = {cfg.steps}"] = delta / delta.norm()
    directions["largest E[Q] of norm 1, ascent"] = ascend(archs, q, start)
    values = {}
    for name, direction in directions.items():
        place = archs.index(tuple(direction[0].argmax(-1).tolist()))
        cosine, expected = float((direction * step).sum()), float(expectation(archs, q, direction))
        values[name] = cosine, expected, int((q > q[place]).sum()) + 1
    return ClosedForm(q, best, values)
