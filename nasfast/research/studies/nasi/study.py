"""The NASI study: its three kinds, each `run(cfg, out, task) -> StudyReport`: numbers, tables, figures and marks.

`quick` measures how well Q predicts accuracy in a small task; `search` searches a space and writes what it found;
`compare` ranks nas_bench_macro beside trivial predictors (docs/nasi.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from nasfast import seeds
from nasfast.config import ConfigError
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.accuracies import read_accuracies
from nasfast.indicators.rank import PredictorReport, RankReport, rank
from nasfast.indicators.table import IndicatorTable
from nasfast.research.cells.derive import derive
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.cells.space import Cell, CellSpace, Edge, nas_bench_201_space
from nasfast.research.nasi.config import Gates
from nasfast.research.nasi.score import score, score_architecture, untrained
from nasfast.research.nasi.search import (
    Mixture,
    NasiConfig,
    NasiResult,
    Record,
    endless,
    random_images,
    random_labels,
    sample,
    solve,
)
from nasfast.research.nasi.search import search as nasi_search
from nasfast.research.nasi.spaces import (
    METHOD,
    TABLE_FILE,
    CellMixture,
    chosen_arch,
    mixture_of,
    nasi_table,
    write_answer,
)
from nasfast.research.studies.draw import GREY, SERIES, Figure, heat
from nasfast.research.studies.nasi.config import MODES, NasiCompareConfig, NasiQuickConfig, NasiSearchConfig
from nasfast.research.studies.report import Check, StudyReport, Table
from nasfast.research.studies.run import Done, Task, no_task
from nasfast.runtime.device import torch_device
from nasfast.runtime.files import write_atomic
from nasfast.seeds import derive_seed
from nasfast.spaces import BUILDERS, Arch, ArchSpace, SearchSpace, get_space, named_space, read_space

_EXPLANATION = (
    "Q is the squared length of one batch's gradient of the loss over all weights of an untrained network; NASI takes "
    "it for the trace norm of the neural tangent kernel. R is Q with the penalty mu on what exceeds nu. Nothing is "
    "trained in a search."
)
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


def trainer_of(space: CellSpace, train: Images, test: Images, cfg: NasiQuickConfig) -> Trainer:
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
    found: dict[Arch, None] = {}
    while len(found) < count:
        found[space.random(rng)] = None
    return list(found)


def batches_of(train: Images, images: int, repeats: int, mode: str, classes: int, seed: int) -> list[Images]:
    """Batches that are the same in every mode, except for what the mode makes random."""
    drawn = DrawnBatches(*train, steps=repeats, batch=images, seed=derive_seed(seed, seeds.STUDY_BATCHES)).epoch(0)
    batches = []
    for i, (x, y) in enumerate(drawn):
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
    batches = {mode: batches_of(train, cfg.images, cfg.repeats, mode, space.num_classes, cfg.seed) for mode in MODES}
    scores: dict[str, list[float]] = {mode: [] for mode in MODES}
    scored = task("scores", len(archs))
    for i, arch in enumerate(archs, 1):
        for mode in MODES:
            scores[mode].append(score_architecture(space, arch, batches[mode], seed=cfg.seed))
        scored(i)
    accuracy, trained = [], task("training random cells", len(archs))
    for i, arch in enumerate(archs, 1):
        accuracy.append(trainer(arch))
        trained(i)
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


def _suffix(mode: str) -> str:
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
            reached = np.array([trainer(arch) for arch in archs])
            percentile = np.array([(cells.accuracy <= a).mean() for a in reached])
            kinds.append(SearchKind(name + _suffix(mode), marked, archs, reached, percentile))
    return kinds


TRACES = ("trace_full", "trace_label", "q_sum", "q_batch")
"""The exact trace of the neural tangent kernel, and its estimates from the same weights and images."""


def exact_traces(space: CellSpace, train: Images, cfg: NasiQuickConfig, done: Done) -> dict[str, list[float]]:
    """TRACES of random cells, and beside them `averaged`, the score of the study, and `params`."""
    x, y = train[0][:EXACT_IMAGES], train[1][:EXACT_IMAGES]
    batches = batches_of(train, cfg.images, cfg.repeats, "standard", space.num_classes, cfg.seed)
    found: dict[str, list[float]] = {kind: [] for kind in (*TRACES, "averaged", "params")}
    for i, arch in enumerate(distinct_archs(space, cfg.exact, cfg.seed + 1), 1):
        net = untrained(space, arch, seed=derive_seed(cfg.seed, seeds.STUDY_EXACT_WEIGHTS))
        for kind in TRACES:
            found[kind].append(score(net, x, y, kind=kind, chunk=EXACT_IMAGES * space.num_classes))
        found["averaged"].append(score_architecture(space, arch, batches, seed=cfg.seed))
        found["params"].append(float(space.cost(arch).params))
        done(i)
    return found


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


class Searches:
    """Searches of the space that a config names; `task` tells the progress."""

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
            "resolution": cfg.resolution or cfg.preset.resolution,
            "num_classes": classes,
            "cells": cfg.cells or cfg.preset.cells,
            "channels": cfg.channels,
        }
        self.space = named_space(cfg.space, **{name: value for name, value in sizes.items() if value is not None})

    def loader(self, i: int, batch: int) -> Any:
        """Batches of the i-th seed, the same for every search."""
        if (i, batch) not in self._loaders:
            space, seed = self.space, self.cfg.seed + i
            if self._source is None:
                self._loaders[i, batch] = synthetic(space, batch=batch, seed=seed)
            else:
                data, channels = DataConfig(train=self.cfg.images, batch_size=batch), space.in_channels
                loader = make_loader(data, self._source, resolution=space.resolution, in_channels=channels, seed=seed)
                self._loaders[i, batch] = loader
        return self._loaders[i, batch]

    def all(self) -> dict[tuple[str, int], NasiResult]:
        """Every mode with every seed."""
        results = {}
        for mode, i in product(self.cfg.mode_list, range(self.cfg.seeds)):
            search = self.cfg.search(i, **MODES[mode])
            mixture = mixture_of(self.space, seed=search.seed).to(self.device)
            loader, done = self.loader(i, self.cfg.batch_size), self._task(f"{mode}, seed {search.seed}", search.steps)
            results[mode, i] = nasi_search(mixture, loader, search, device=self.device, progress=done)
        return results

    def arch(self, result: NasiResult) -> Arch:
        """The architecture that a result selects."""
        return chosen_arch(self.space, result, rule=self.cfg.preset.rule)


def synthetic(space: ArchSpace, *, batch: int, seed: int) -> DrawnBatches:
    """Batches of noisy prototypes, resized to a space's resolution."""
    if space.in_channels > 3:
        raise ConfigError(f"synthetic images have up to 3 channels, {space.name} takes {space.in_channels}")
    (x, y), _ = prototypes(NOISE, SYNTHETIC, 1, seed=seed)
    x = x[:, : space.in_channels]
    if space.resolution != x.shape[-1]:
        # a batch at a time would save memory, but 2000 images of 64 x 64 are 100 MB
        x = F.interpolate(x, size=(space.resolution,) * 2, mode="bilinear", align_corners=False)
    return DrawnBatches(x, y % space.num_classes, steps=100, batch=batch, seed=seed)


def claim_folder(out: Path | None, space: ArchSpace) -> Path | None:
    """The folder that gets the files. It is checked before anything is computed."""
    if out is None:
        return None
    path, table = out / "space.yaml", out / TABLE_FILE
    if path.exists() and read_space(path) != space:
        raise FileExistsError(f"{path} is of another space: choose another --out")
    if table.exists() and IndicatorTable.load(table).meta.get("method") != METHOD:
        raise FileExistsError(f"{table} has the scores of a trained supernet: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, space.to_yaml().encode())
    return out


def quick(cfg: NasiQuickConfig, out: Path | None, task: Task) -> StudyReport:
    """The quick experiment."""
    space = nas_bench_201_space(cells=2, channels=8, resolution=12, reduce_by="conv")
    train, test = prototypes(NOISE, SYNTHETIC, 1000, seed=cfg.seed)
    trainer = trainer_of(space, train, test, cfg)
    cells = random_cells(space, train, trainer, cfg, task)
    records = search_records(space, train, cfg, task)
    kinds = search_kinds(space, records, trainer, cells, cfg)
    traces = exact_traces(space, train, cfg, task("exact traces", cfg.exact))
    first = records["standard", 0]
    penalised = solve(first, NasiConfig(mu=2.0, constraint="fixed", nu=NU))
    archs = {kind.name: kind.archs for kind in kinds}
    unpenalised = {mode: archs["no penalty" + _suffix(mode)] for mode in MODES}
    of_modes = [(f"Q, {mode}", "accuracy", q, cells.accuracy) for mode, q in cells.scores.items()]
    of_traces = [("exact trace", kind, traces["trace_full"], traces[kind]) for kind in TRACES[1:]]
    return StudyReport(
        subject=f"{cfg.cells} NAS-Bench-201 cells of two cells, 8 channels, on synthetic 12 x 12 images",
        explanation=_EXPLANATION,
        notes=(
            f"an accuracy is that of {cfg.train_steps} steps of SGD; a score is the mean of {cfg.repeats} batches of "
            f"{cfg.images}, each with an initialisation of its own",
            f"random cells: accuracy mean {np.mean(cells.accuracy):.3f}, median {np.median(cells.accuracy):.3f}, best "
            f"{np.max(cells.accuracy):.3f}",
            "several mu and nu are solved from one set of sampled architectures, because mu and nu only weight them",
        ),
        tables=(
            correlation_table(cells),
            searches_table(space, kinds),
            moved_table(space, unpenalised),
            exact_table(traces, cfg),
            closed_form_table(cfg, train),
        ),
        figures=(
            dots("Q and accuracy of random cells", of_modes),
            dots("estimates beside the exact trace", of_traces, scale="log"),
            search_steps(f"search with mu 2, nu {NU:g}, seed 0", penalised),
            logits("alpha* without a penalty, seed 0", space, solve(first, NasiConfig(mu=0.0))),
        ),
        checks=(
            *correlation_checks(cells),
            *search_checks(kinds, cells),
            time_check(records),
        ),
        data={"accuracy": cells.accuracy, "scores": cells.scores, "traces": traces},
    )


def search(cfg: NasiSearchConfig, out: Path | None, task: Task) -> StudyReport:
    """Searches of one space."""
    searches = Searches(cfg, task)
    folder = claim_folder(out, searches.space)
    return _found(searches, searches.all(), folder)


def _found(searches: Searches, results: Mapping[tuple[str, int], NasiResult], folder: Path | None) -> StudyReport:
    """The report of searches; writes the files of the first."""
    cfg, space, first = searches.cfg, searches.space, results["standard", 0]
    arch = searches.arch(first)
    shown = [found_table(searches, results)]
    if len(results) > 1:
        chosen: dict[str, list[Arch]] = {mode: [] for mode in cfg.mode_list}
        for (mode, _), result in results.items():
            chosen[mode].append(searches.arch(result))
        shown.append(moved_table(space, chosen))
    meta = {"steps": len(first.record.q), "seed": cfg.seed, "images": cfg.images is not None}
    files = () if folder is None else (write_answer(space, first, arch, folder, meta=meta),)
    source = "synthetic images" if cfg.images is None else "images of a folder"
    own = cfg.search(0)
    settings = f"batch {cfg.batch_size}, mu {own.mu:g}, nu {own.constraint} {own.limit:g}, gates {own.gates}"
    return StudyReport(
        subject=f"space {space.name}, {space.resolution} x {space.resolution} {source}",
        explanation=_EXPLANATION,
        notes=(f"T = {own.steps}, {settings}",),
        files=files,
        tables=tuple(shown),
        figures=(
            search_steps("the first search, step by step", first),
            logits("alpha* - alpha_0", space, first),
        ),
    )


Predictor = Mapping[Arch, float] | IndicatorTable


def compare(cfg: NasiCompareConfig, out: Path | None, task: Task) -> StudyReport:
    """Predictors of accuracy beside each other."""
    # images of another size or number of classes leave the architectures those of the published accuracies
    published = get_space(cfg.space)
    truth = read_accuracies(cfg.accuracies, published)
    searches = Searches(cfg, task)
    folder = claim_folder(out, searches.space)
    stream = endless(searches.loader(0, cfg.score_batch), searches.device)
    batches = [next(stream) for _ in range(cfg.repeats)]
    results = searches.all()
    found = _found(searches, results, folder)
    # get_space has refused a space of cells
    space = cast("SearchSpace", searches.space)
    predictors: dict[str, Predictor] = {}
    seconds: dict[str, str] = {}
    for (mode, i), result in results.items():
        table, name = nasi_table(space, result), f"NASI, {mode}, seed {cfg.seed + i}"
        predictors[name] = {arch: table.score(arch) for arch in truth}
        seconds[name] = seconds_text(result)
    if cfg.indicators is not None:
        predictors["given indicators"] = IndicatorTable.load(cfg.indicators)
    of_all = _rankings(truth, predictors, published, cfg)
    shown, drawn = [ranking_table(f"all {len(truth)} architectures", of_all, seconds)], []
    if cfg.architectures:
        rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_PICKS))
        picks = rng.choice(len(truth), min(cfg.architectures, len(truth)), replace=False)
        some = [sorted(truth)[i] for i in sorted(picks)]
        done = task("Q of architectures", len(some))
        start, cpu = time.perf_counter(), time.process_time()
        q: dict[Arch, float] = {}
        for i, arch in enumerate(some, 1):
            q[arch] = score_architecture(searches.space, arch, batches, seed=cfg.seed)
            done(i)
        seconds["Q"] = f"{time.perf_counter() - start:.1f} ({time.process_time() - cpu:.1f})"
        of_some = _rankings({arch: truth[arch] for arch in some}, {"Q": q, **predictors}, published, cfg)
        title = f"{len(some)} random architectures"
        shown.insert(0, ranking_table(f"{title}, each scored by itself", of_some, seconds))
        accuracy, macs = [truth[a] for a in some], [published.cost(a).macs for a in some]
        of_q = ("Q", "accuracy", [q[a] for a in some], accuracy)
        drawn.append(dots(title, [of_q, ("MACs", "accuracy", macs, accuracy)]))
    return replace(found, tables=(*shown, *found.tables), figures=(*drawn, *found.figures))


def _rankings(
    truth: Mapping[Arch, float], predictors: Mapping[str, Predictor], space: SearchSpace, cfg: NasiCompareConfig
) -> dict[str, RankReport]:
    return {
        name: rank(truth, predictor, space, resamples=cfg.resamples, seed=cfg.seed)
        for name, predictor in predictors.items()
    }


def correlation_table(cells: RandomCells) -> Table:
    """How well Q, in every mode, and the number of parameters predict the accuracy of random cells."""
    q, params = np.array(cells.scores["standard"]), cells.params
    sizes = ("smallest", "median", "largest")
    columns = {"score": "", **dict.fromkeys(sizes, ".3f"), "Spearman with accuracy": ".2f"}
    columns |= dict.fromkeys(("Pearson with standard", "Spearman with standard", "Spearman with parameters"), ".2f")
    rows: list[tuple[str | float | None, ...]] = []
    for mode, values in cells.scores.items():
        known = (spearman(values, cells.accuracy), pearson(q, values), spearman(q, values), spearman(values, params))
        rows.append((f"Q, {mode}", np.min(values), np.median(values), np.max(values), *known))
    extremes = (f"{params.min():.0f}", f"{np.median(params):.0f}", f"{params.max():.0f}")
    rows.append(("parameters", *extremes, spearman(params, cells.accuracy), None, spearman(params, q), None))
    return Table.of("random cells: how well Q predicts accuracy", columns, rows)


def searches_table(space: CellSpace, kinds: Sequence[SearchKind]) -> Table:
    """What the searches of every kind select."""
    rows = tuple(
        (
            kind.name,
            " ".join(f"{a:.3f}" for a in kind.accuracy),
            " ".join(f"{p:.2f}" for p in kind.percentile),
            f"{kind.percentile.mean():.2f}",
            space.format(kind.archs[0]),
        )
        for kind in kinds
    )
    edges = " ".join(e.name for e in space.cell.edges)
    header = ("search", "accuracy by seed", "percentile by seed", "mean", f"first cell, edges {edges}")
    return Table("searches", header, rows)


def exact_table(found: Mapping[str, Sequence[float]], cfg: NasiQuickConfig) -> Table:
    """The rank correlations of the estimates with the exact trace."""
    full = found["trace_full"]
    names = {kind: kind for kind in ("trace_label", "q_sum")}
    names |= {"q_batch": f"q_batch: the same {EXACT_IMAGES} images", "params": "parameters"}
    names["averaged"] = f"q_batch: {cfg.repeats} x {cfg.images} images"
    rows = []
    for kind in ("trace_label", "q_sum", "q_batch", "averaged", "params"):
        tau = float(stats.kendalltau(found[kind], full).statistic)
        of_logs = pearson(np.log(found[kind]), np.log(full))
        rows.append((names[kind], spearman(found[kind], full), tau, of_logs))
    # the chain of the lower bound: sum_x |g_x|^2 <= 2 trace, and b |mean g|^2 <= sum_x |g_x|^2
    q_sum = np.array(found["q_sum"])
    loose = [np.median(q_sum / (2 * np.array(full))), np.median(EXACT_IMAGES * np.array(found["q_batch"]) / q_sum)]
    title = (
        f"{cfg.exact} cells: rank correlation with the exact trace of the kernel on {EXACT_IMAGES} images; medians of "
        f"sum |g_x|^2 over its bound 2 trace {loose[0]:.3f}, of b |mean g|^2 over its bound sum |g_x|^2 {loose[1]:.3f}"
    )
    return Table.of(title, {"estimate": "", "Spearman": ".2f", "Kendall": ".2f", "Pearson of logs": ".2f"}, rows)


def closed_form_table(cfg: NasiQuickConfig, train: Images) -> Table:
    """The step of the method beside other directions, by what the enumeration of 27 architectures gives for each.

    Of a direction from alpha_0 = 0: its cosine with the closed form, E[Q] there, and the place of its argmax by Q.
    """
    space = small_space()
    mixture = CellMixture(space, seed=cfg.seed).double()
    x, y = train[0][:BATCH].double(), train[1][:BATCH]
    archs, q = enumerated(mixture, space, x, y)
    start = torch.zeros(mixture.allowed.shape, dtype=torch.float64)
    exact = slope(archs, q, start)
    step = exact / exact.norm()
    rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_DIRECTIONS))
    random = torch.from_numpy(rng.standard_normal((DIRECTIONS, exact.numel())))
    best = float((random @ exact.flatten() / random.norm(dim=1)).max()) / float(exact.norm())
    directions = {"closed form, exact gradient": step}
    for gates in get_args(Gates):
        search = NasiConfig(steps=cfg.steps, mu=0.0, seed=cfg.seed, gates=gates)
        found = solve(sample(mixture, [(x, y)], search), search).delta
        directions[f"{gates.replace('_', '-')}, T = {cfg.steps}"] = found / found.norm()
    directions["largest E[Q] of norm 1, ascent"] = ascend(archs, q, start)
    rows = []
    for name, direction in directions.items():
        chosen = archs.index(tuple(direction[0].argmax(-1).tolist()))
        cosine, expected = float((direction * step).sum()), float(expectation(archs, q, direction))
        rows.append((name, f"{cosine:.3f}", f"{expected:.4g}", str(int((q > q[chosen]).sum()) + 1)))
    title = (
        f"one step from alpha_0 = 0, {len(q)} architectures: mean Q {float(q.mean()):.4g}, largest "
        f"{float(q.max()):.4g}; of {DIRECTIONS} random directions the best reaches {best:.3f} "
        "of the closed form's first-order gain"
    )
    return Table(title, ("Delta", "cosine", "E[Q] at Delta of norm 1", "place of its argmax by Q"), tuple(rows))


def differing(a: Arch, b: Arch) -> int:
    """The number of values in which two architectures differ."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def moved_table(space: ArchSpace, chosen: Mapping[str, Sequence[Arch]]) -> Table:
    """How many values of the selected architectures differ between modes at one seed, and between seeds."""
    rows: list[tuple[str, float | None, int | None]] = []
    for mode, archs in chosen.items():
        pairs = [differing(a, b) for a, b in combinations(archs, 2)]
        rows.append((f"between seeds, {mode}", float(np.mean(pairs)) if pairs else None, len(pairs)))
    for a, b in combinations(chosen, 2):
        pairs = [differing(x, y) for x, y in zip(chosen[a], chosen[b], strict=True)]
        rows.append((f"{a} and {b}, same seed", float(np.mean(pairs)), len(pairs)))
    rows.append(("two random architectures", sum(1 - 1 / len(values) for values in space.options), None))
    return Table.of(f"of {len(space)} choices, how many differ", {"": "", "mean": ".2f", "pairs": ""}, rows)


def found_table(searches: Searches, results: Mapping[tuple[str, int], NasiResult]) -> Table:
    """What every search found, with its costs."""
    columns = {"search": "", "architecture": "", "MACs": ",", "parameters": ",", "median Q": ".3g", "last nu": ".3g"}
    rows = []
    for (mode, i), result in results.items():
        arch = searches.arch(result)
        cost, name = searches.space.cost(arch), f"{mode}, seed {searches.cfg.seed + i}"
        limit = (float(result.q.median()), float(result.nu[-1]), f"{100 * result.above:.0f} %", result.skipped)
        rows.append((name, searches.space.format(arch), cost.macs, cost.params, *limit, seconds_text(result)))
    columns |= {"above nu": "", "skipped": "", "seconds (CPU)": ""}
    return Table.of("what was found", columns, rows)


def seconds_text(result: NasiResult) -> str:
    """The seconds of a search by the clock, and those of the processor."""
    return f"{result.record.seconds:.1f} ({result.record.cpu_seconds:.1f})"


def ranking_table(title: str, reports: Mapping[str, RankReport], seconds: Mapping[str, str]) -> Table:
    """Every predictor beside the trivial ones, whose reports are in each."""
    first = next(iter(reports.values()))
    best = first.best_baseline.name if first.best_baseline else "depth"
    header = ("predictor", "Kendall's tau", "Spearman's rho", "tau within equal depth", f"tau minus that of {best}")

    def row(report: PredictorReport) -> tuple[str, str, str]:
        return str(report.kendall), str(report.spearman), str(report.kendall_within_depth)

    rows = [
        (name, *row(r.predictor), str(r.above[best]), f"{r.predictor.regret[-1]:.2f}", seconds.get(name, "-"))
        for name, r in reports.items()
    ]
    rows += [(b.name, *row(b), "-", f"{b.regret[-1]:.2f}", "0") for b in first.baselines]
    return Table(title, (*header, "points lost by its favourite", "seconds (CPU)"), tuple(rows))


def dots(title: str, panels: Sequence[tuple[str, str, ArrayLike, ArrayLike]], scale: str = "linear") -> Figure:
    """A dot for every architecture; a panel has the names of both axes, and the places on them."""
    figure = Figure(title, "A dot is an architecture.", len(panels), columns=3)
    for ax, (x_name, y_name, x, y) in zip(figure.axes, panels, strict=True):
        ax.plot(x, y, "o", ms=3.5, alpha=0.7)
        ax.set(xlabel=x_name, ylabel=y_name, xscale=scale, yscale=scale)
    return figure


def search_steps(title: str, result: NasiResult) -> Figure:
    """A search step by step: Q, R, the limit nu, and the norm of the gradient."""
    caption = (
        "Q of the architecture sampled at every step, R with the penalty on what exceeds nu, and the norms by which "
        "gradients are divided: every one by the largest so far."
    )
    figure, steps = Figure(title, caption, 2, legend=False), range(1, len(result.q) + 1)
    values, norms = figure.axes
    values.plot(steps, result.q, "o", ms=3, label="Q")
    values.plot(steps, result.r, "x", ms=3, color=SERIES[1], label="R")
    values.plot(steps, result.nu, color=GREY, label="nu")
    values.set(title="sampled architectures", xlabel="step")
    norms.plot(steps, result.norms, "o", ms=3, label="norm of the gradient")
    norms.plot(steps, result.norms.cummax(0).values, color=GREY, label="largest so far")
    norms.set(title="gradient of R", xlabel="step")
    return figure


def logits(title: str, space: ArchSpace, result: NasiResult) -> Figure:
    """The logits of a result, (rows, columns) of the space; nan where a row has no such candidate."""
    values = result.delta.masked_fill(~result.logits.isfinite(), math.nan).flatten(0, 1).numpy()
    caption = "Rows: edges or layers; columns: candidates. Rings: the largest of every row."
    width, height = 2.5 + 0.75 * len(space.columns), 1.0 + 0.26 * len(values)
    figure = Figure(title, caption, 1, width=width, height=height)
    heat(figure.axes[0], values, space.rows, space.columns, limit=float(np.nanmax(np.abs(values))) or 1.0)
    return figure


def correlation_checks(cells: RandomCells) -> list[Check]:
    """Marks of how well Q predicts the accuracy of random cells."""
    q = np.array(cells.scores["standard"])
    checks = [Check("Q over random cells: largest over smallest", 4, math.inf, float(q.max() / q.min()))]
    for mode, values in cells.scores.items():
        checks.append(Check(f"Spearman of Q and accuracy, {mode}", 0.4, 1, spearman(values, cells.accuracy)))
        if mode != "standard":
            checks += [
                Check(f"Pearson of Q, standard and {mode}", 0.5, 1, pearson(q, values)),
                Check(f"Spearman of Q, standard and {mode}", 0.6, 1, spearman(q, values)),
            ]
    return checks


def search_checks(kinds: Sequence[SearchKind], cells: RandomCells) -> list[Check]:
    """Marks of what the searches select."""
    checks = []
    for kind in kinds:
        if kind.marked:
            above = float(kind.accuracy.min() - cells.accuracy.mean())
            checks += [
                Check(f"{kind.name}: mean percentile", 0.8, 1, float(kind.percentile.mean())),
                Check(f"{kind.name}: worst accuracy minus random mean", 0, 1, above),
            ]
    return checks


def time_check(records: Records) -> Check:
    """Mark of the longest search."""
    # the processor's time, which other programs do not lengthen, or the clock's where that is less
    seconds = [min(record.seconds, record.cpu_seconds) for record in records.values()]
    return Check("seconds of a search, longest", 0, 60, max(seconds))
