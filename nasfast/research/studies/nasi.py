"""NASI: how well its score predicts accuracy, and what its searches choose (Y. Shu et al., arXiv 2109.00817).

Q is the squared length of one batch's gradient of the loss over all weights of an untrained network; NASI takes it for
the trace norm of the neural tangent kernel (section 2.4). Claimed, and shown on small NAS-Bench-201 cells and synthetic
images:

    Q ranks architectures by trained accuracy, with true labels, random labels and random images alike (section 2.7)
    a search of T = 100 sampled architectures, which trains nothing, finds good cells, with any data
    Q follows the exact trace, sum_x ||J_x||^2 >= |g_x|^2 / 2 >= ...
    the closed-form step is the best first-order step (`nasi_closed_form`)

docs/nasi.md says what holds on real images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from nasfast.report.plots import new_figure
from nasfast.research.cells.derive import derive
from nasfast.research.cells.prototypes import DrawnBatches, prototypes
from nasfast.research.cells.space import CellSpace, nas_bench_201_space
from nasfast.research.nasi.score import score, score_architecture, untrained
from nasfast.research.nasi.search import NasiConfig, Record, random_images, random_labels, sample, solve
from nasfast.research.nasi.spaces import CellMixture
from nasfast.research.studies.commands import StudyConfig
from nasfast.research.studies.nasi_closed_form import closed_form_table
from nasfast.research.studies.nasi_search import logits_figure, steps_figure
from nasfast.research.studies.notebook import Notebook
from nasfast.runtime.progress import Progress
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch, ArchSpace

CELLS, EXACT_CELLS = 40, 50
"""Random cells that are scored and trained, and cells whose exact trace is computed; all different."""
IMAGES, REPEATS = 256, 3
"""Images of a batch that scores an architecture, and initialisations of a score, each with a batch of its own."""
TRAIN_STEPS, STEPS, SEEDS = 200, 100, 3
"""SGD steps of every trained cell, sampled architectures of a search, and searches of every kind."""
NOISE, TRAIN_IMAGES, TEST_IMAGES, BATCH, EXACT_IMAGES = 3.0, 2000, 1000, 64, 16
NU = 0.6
"""The fixed limit of the penalised searches; the adaptive limit starts from it."""
MODES: dict[str, dict[str, Any]] = {
    "standard": {},
    "random labels": {"labels": "random"},
    "random images": {"images": "random"},
}
"""What a score or search sees of the data -> settings of `NasiConfig`."""
FIXED: dict[str, Any] = {"constraint": "fixed", "nu": NU}
KINDS: tuple[tuple[str, dict[str, Any], tuple[str, ...], bool], ...] = (
    ("no penalty", {"mu": 0.0}, ("standard",), True),
    (f"mu 1, nu {NU:g}", {"mu": 1.0, **FIXED}, ("standard",), True),
    (f"mu 2, nu {NU:g}", {"mu": 2.0, **FIXED}, ("standard",), True),
    ("no penalty", {"mu": 0.0}, ("random labels", "random images"), True),
    ("mu 1, nu 0.9 quantile", {"mu": 1.0}, ("standard",), True),
    ("mu 2, nu 0.9 quantile", {"mu": 2.0}, ("standard",), True),
    ("mu 2, adaptive nu", {"mu": 2.0, "constraint": "adaptive", "nu": NU}, tuple(MODES), False),
)
"""Penalty and limit, their settings, the modes that they are solved in, and whether there are pass marks."""
TRACES = ("trace_full", "trace_label", "q_sum", "q_batch")
"""The exact trace of the neural tangent kernel, and its estimates from the same weights and images."""
# random streams, see `nasfast.seeds`: published figures depend on these numbers
WEIGHTS_STREAM, CELLS_STREAM, BATCHES_STREAM, LABELS_STREAM, IMAGES_STREAM = 7, 8, 9, 10, 11
SEARCH_STREAM, EXACT_STREAM = 12, 13
Images = tuple[Tensor, Tensor]
"""Images (N, C, H, W) and labels (N,)."""


def quick(cfg: StudyConfig, notes: Notebook) -> None:
    """Random cells, searches, exact traces, and the closed form."""
    space = nas_bench_201_space(cells=2, channels=8, resolution=12, reduce_by="conv")
    train, test = prototypes(NOISE, TRAIN_IMAGES, TEST_IMAGES, seed=cfg.seed)
    notes.say(f"NASI on {CELLS} NAS-Bench-201 cells, networks of two cells, 8 channels, synthetic 12 x 12 images.")
    notes.say(
        "Q is the squared length of one batch's gradient over all weights of an untrained network; R is Q with the "
        f"penalty mu on what exceeds nu. An accuracy is that of {TRAIN_STEPS} steps of SGD; a score is the mean of "
        f"{REPEATS} batches of {IMAGES}, each with an initialisation of its own."
    )
    accuracy_of = cell_trainer(space, train, test, cfg.seed)
    archs = distinct_archs(space, CELLS, cfg.seed)
    scores: dict[str, list[float]] = {}
    for mode in MODES:
        batches = score_batches(train, mode, space.num_classes, cfg.seed)
        with Progress(f"Q, {mode}", len(archs)) as progress:
            scores[mode] = []
            for i, arch in enumerate(archs, 1):
                scores[mode].append(score_architecture(space, arch, batches, seed=cfg.seed))
                progress.update(i)
    with Progress("training random cells", len(archs)) as progress:
        accuracies = []
        for i, arch in enumerate(archs, 1):
            accuracies.append(accuracy_of(arch))
            progress.update(i)
    accuracy = np.array(accuracies)
    q = scores["standard"]
    notes.mark("Q over random cells: largest over smallest", max(q) / min(q), at_least=4)
    for mode, values in scores.items():
        notes.mark(f"Spearman of Q and accuracy, {mode}", spearman(values, accuracy), at_least=0.4, at_most=1)
        if mode != "standard":
            notes.mark(f"Pearson of Q, standard and {mode}", pearson(q, values), at_least=0.5, at_most=1)
            notes.mark(f"Spearman of Q, standard and {mode}", spearman(q, values), at_least=0.6, at_most=1)
    _correlation_table(scores, accuracy, [float(space.cost(arch).params) for arch in archs], notes)
    records = search_records(space, train, cfg.seed)
    _searches(space, records, accuracy_of, accuracy, notes)
    traces = exact_traces(space, train, cfg.seed)
    _exact_table(traces, notes)
    closed_form_table(train[0][:BATCH], train[1][:BATCH], STEPS, cfg.seed, notes)
    notes.data |= {"accuracy": accuracy, "scores": scores, "traces": traces}

    panels = [(f"Q, {mode}", "accuracy", values, accuracy) for mode, values in scores.items()]
    _dots("Q and accuracy of random cells", panels, "linear", notes)
    panels = [("exact trace", kind, traces["trace_full"], np.array(traces[kind])) for kind in TRACES[1:]]
    _dots("estimates beside the exact trace", panels, "log", notes)
    first = records["standard", 0]
    steps_figure(f"search with mu 2, nu {NU:g}, seed 0", solve(first, NasiConfig(mu=2.0, **FIXED)), notes)
    logits_figure("alpha* without a penalty, seed 0", space, solve(first, NasiConfig(mu=0.0)), notes)


# --- what is measured ---------------------------------------------------------------------------------------------


def cell_trainer(space: CellSpace, train: Images, test: Images, seed: int) -> Callable[[Arch], float]:
    """A function that trains a cell and gives its accuracy; each once, from the same weights and the same batches."""
    loader = DrawnBatches(*train, steps=TRAIN_STEPS, batch=BATCH, seed=seed)

    @cache
    def accuracy_of(arch: Arch) -> float:
        net = untrained(space, arch, seed=derive_seed(seed, WEIGHTS_STREAM))
        parameters = [p for p in net.parameters() if p.requires_grad]
        # This is not `nasfast.train`: its optimiser spares norms and biases the weight decay, and its cosine differs in
        # the last bit at a quarter of the steps. Either would change the published accuracies of these cells.
        sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        for step, (x, y) in enumerate(loader.epoch(0)):
            sgd.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / TRAIN_STEPS))
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 5.0)
            sgd.step()
        net.eval()
        with torch.no_grad():
            return float((net(test[0]).argmax(1) == test[1]).double().mean())

    return accuracy_of


def distinct_archs(space: CellSpace, count: int, seed: int) -> list[Arch]:
    """Random architectures, all different."""
    rng = np.random.default_rng(derive_seed(seed, CELLS_STREAM))
    archs: dict[Arch, None] = {}
    while len(archs) < count:
        archs[space.random(rng)] = None
    return list(archs)


def score_batches(train: Images, mode: str, classes: int, seed: int) -> list[Images]:
    """Batches that are the same in every mode, except for what the mode makes random."""
    batches = []
    draws = DrawnBatches(*train, steps=REPEATS, batch=IMAGES, seed=derive_seed(seed, BATCHES_STREAM))
    for i, (x, y) in enumerate(draws.epoch(0)):
        if mode == "random labels":
            y = random_labels(len(y), classes, seed=derive_seed(seed, LABELS_STREAM, i))
        elif mode == "random images":
            x = random_images(x.shape, seed=derive_seed(seed, IMAGES_STREAM, i))
        batches.append((x, y))
    return batches


def search_records(space: CellSpace, train: Images, first_seed: int) -> dict[tuple[str, int], Record]:
    """Sample architectures in every mode, from every seed: mode and number of the seed -> what was sampled."""
    records = {}
    for mode, changes in MODES.items():
        for i in range(SEEDS):
            seed = first_seed + i
            loader = DrawnBatches(*train, steps=STEPS, batch=BATCH, seed=derive_seed(seed, SEARCH_STREAM))
            with Progress(f"search, {mode}, seed {seed}", STEPS) as progress:
                search = NasiConfig(steps=STEPS, seed=seed, **changes)
                records[mode, i] = sample(CellMixture(space, seed=seed), loader, search, progress=progress.update)
    return records


def exact_traces(space: CellSpace, train: Images, seed: int) -> dict[str, list[float]]:
    """TRACES of random cells, and beside them `averaged`, the score of the study, and `params`."""
    x, y = train[0][:EXACT_IMAGES], train[1][:EXACT_IMAGES]
    batches = score_batches(train, "standard", space.num_classes, seed)
    traces: dict[str, list[float]] = {kind: [] for kind in (*TRACES, "averaged", "params")}
    with Progress("exact traces", EXACT_CELLS) as progress:
        for i, arch in enumerate(distinct_archs(space, EXACT_CELLS, seed + 1), 1):
            net = untrained(space, arch, seed=derive_seed(seed, EXACT_STREAM))
            for kind in TRACES:
                traces[kind].append(score(net, x, y, kind=kind, chunk=EXACT_IMAGES * space.num_classes))
            traces["averaged"].append(score_architecture(space, arch, batches, seed=seed))
            traces["params"].append(float(space.cost(arch).params))
            progress.update(i)
    return traces


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation coefficient."""
    return float(stats.pearsonr(x, y).statistic)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's rank correlation coefficient."""
    return float(stats.spearmanr(x, y).statistic)


# --- tables, marks of the searches, figures -----------------------------------------------------------------------


def _correlation_table(
    scores: Mapping[str, Sequence[float]], accuracy: np.ndarray, params: Sequence[float], notes: Notebook
) -> None:
    """How well Q, in every mode, and the number of parameters predict the accuracy of random cells."""
    q = scores["standard"]
    rows: list[tuple[Any, ...]] = []
    for name, values in {**{f"Q, {mode}": values for mode, values in scores.items()}, "parameters": params}.items():
        sizes = (np.min(values), np.median(values), np.max(values))
        correlations = (spearman(values, accuracy), pearson(q, values), spearman(q, values), spearman(values, params))
        rows.append((name, *sizes, *correlations))
    columns = {"score": "", **dict.fromkeys(("smallest", "median", "largest"), ".3f"), "Spearman with accuracy": ".2f"}
    columns |= dict.fromkeys(("Pearson with standard", "Spearman with standard", "Spearman with parameters"), ".2f")
    accuracies = f"mean {accuracy.mean():.3f}, median {np.median(accuracy):.3f}, best {accuracy.max():.3f}"
    notes.table(f"random cells: how well Q predicts accuracy ({accuracies})", columns, rows)


def _searches(
    space: CellSpace,
    records: Mapping[tuple[str, int], Record],
    accuracy_of: Callable[[Arch], float],
    accuracy: np.ndarray,
    notes: Notebook,
) -> None:
    """Solve the records with several penalties and limits, which only weight them, and train what they select."""
    rows, unpenalised = [], {}
    for name, settings, modes, marked in KINDS:
        for mode in modes:
            results = [solve(records[mode, i], NasiConfig(**settings)) for i in range(SEEDS)]
            archs = [derive(space, r.logits, "argmax") for r in results]
            if name == "no penalty":
                unpenalised[mode] = archs
            found = np.array([accuracy_of(arch) for arch in archs])
            percentile = np.array([(accuracy <= a).mean() for a in found])
            kind = name if mode == "standard" else f"{name}, {mode}"
            if marked:
                notes.mark(f"{kind}: mean percentile", percentile.mean(), at_least=0.8, at_most=1)
                above = found.min() - accuracy.mean()
                notes.mark(f"{kind}: worst accuracy minus random mean", above, at_least=0, at_most=1)
            texts = (" ".join(f"{v:.3f}" for v in found), " ".join(f"{v:.2f}" for v in percentile))
            rows.append((kind, *texts, percentile.mean(), space.format(archs[0])))
    # the processor's time, which other programs do not lengthen, or the clock's where that is less
    seconds = max(min(record.seconds, record.cpu_seconds) for record in records.values())
    notes.mark("seconds of a search, longest", seconds, at_least=0, at_most=60)
    columns = {"search": "", "accuracy by seed": "", "percentile by seed": "", "mean": ".2f"}
    edges = " ".join(edge.name for edge in space.cell.edges)
    notes.table("searches", {**columns, f"first cell, edges {edges}": ""}, rows)
    _difference_table(space, unpenalised, notes)


def _difference_table(space: ArchSpace, by_mode: Mapping[str, Sequence[Arch]], notes: Notebook) -> None:
    """How many values of the selected architectures differ between seeds, and between modes at one seed."""

    def differences(some: Sequence[Arch], others: Sequence[Arch]) -> list[int]:
        return [sum(x != y for x, y in zip(a, b, strict=True)) for a, b in zip(some, others, strict=True)]

    rows: list[tuple[str, float]] = []
    for mode, archs in by_mode.items():
        pairs = [(a, b) for i, a in enumerate(archs) for b in archs[i + 1 :]]
        between = differences([a for a, _ in pairs], [b for _, b in pairs])
        rows.append((f"between seeds, {mode}", float(np.mean(between)) if between else math.nan))
    for mode in list(by_mode)[1:]:
        difference = float(np.mean(differences(by_mode["standard"], by_mode[mode])))
        rows.append((f"standard and {mode}, same seed", difference))
    rows.append(("two random architectures", sum(1 - 1 / len(values) for values in space.options)))
    notes.table(f"of {len(space)} choices, how many differ", {"": "", "mean": ".2f"}, rows)


def _exact_table(traces: Mapping[str, Sequence[float]], notes: Notebook) -> None:
    """The rank correlations of the estimates with the exact trace, and how loose its lower bounds are."""
    full, q_sum, q_batch = (np.array(traces[kind]) for kind in ("trace_full", "q_sum", "q_batch"))
    rows = []
    for kind in ("trace_label", "q_sum", "q_batch", "averaged", "params"):
        tau = float(stats.kendalltau(traces[kind], full).statistic)
        rows.append((kind, spearman(traces[kind], full), tau, pearson(np.log(traces[kind]), np.log(full))))
    # the chain of the lower bound: sum_x |g_x|^2 <= 2 trace, and b |mean g|^2 <= sum_x |g_x|^2
    loose = np.median(q_sum / (2 * full)), np.median(EXACT_IMAGES * q_batch / q_sum)
    title = (
        f"{len(full)} cells: rank correlation with the exact trace of the kernel on {EXACT_IMAGES} images; medians of "
        f"sum |g_x|^2 over its bound 2 trace {loose[0]:.3f}, of b |mean g|^2 over its bound sum |g_x|^2 {loose[1]:.3f}"
    )
    notes.table(title, {"estimate": "", "Spearman": ".2f", "Kendall": ".2f", "Pearson of logs": ".2f"}, rows)


def _dots(
    title: str, panels: Sequence[tuple[str, str, Sequence[float], np.ndarray]], scale: str, notes: Notebook
) -> None:
    figure, axes = new_figure(11, 3.6, columns=len(panels))
    for ax, (x_name, y_name, x, y) in zip(axes, panels, strict=True):
        ax.plot(x, y, "o", ms=3.5, alpha=0.7)
        ax.set(xlabel=x_name, ylabel=y_name, xscale=scale, yscale=scale)
    notes.figure(title, "A dot is an architecture.", figure)
