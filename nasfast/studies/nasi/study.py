"""The NASI study: architectures chosen at initialisation, on small cells with pass marks, in any space, and compared.

`nasi_quick_study` measures what Q knows about accuracy in a scaled-down task; `nasi_search_study` searches a space and
writes what it found; `nasi_compare_study` ranks nas_bench_macro beside trivial predictors (docs/nasi.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from nasfast import seeds
from nasfast.cells import Cell, CellSpace, Edge, darts_space, nas_bench_201_space
from nasfast.cells.derive import derive
from nasfast.cells.prototypes import DrawnBatches, prototypes
from nasfast.config import ConfigBase, ConfigError, nearest
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.accuracies import MIN_ARCHITECTURES, read_accuracies
from nasfast.indicators.rank import PredictorReport, RankReport, rank
from nasfast.indicators.table import IndicatorTable
from nasfast.nasi.cells import CellMixture
from nasfast.nasi.layers import LayerMixture
from nasfast.nasi.score import score, score_architecture, untrained
from nasfast.nasi.search import (
    Constraint,
    Gates,
    Mixture,
    NasiConfig,
    NasiResult,
    Record,
    check_penalty,
    endless,
    random_images,
    random_labels,
    sample,
    solve,
)
from nasfast.nasi.table import METHOD, layer_arch, nasi_table
from nasfast.runtime.device import check_device, torch_device
from nasfast.runtime.files import write_atomic
from nasfast.seeds import derive_seed
from nasfast.spaces import Arch, SearchSpace, arch_to_json, format_arch, get_space
from nasfast.spaces.builders import names_file
from nasfast.spaces.cells import read_space
from nasfast.studies.inputs import check_common
from nasfast.studies.parts import Check, Table
from nasfast.studies.report import StudyReport
from nasfast.studies.run import Task, run_study

_EXPLANATION = (
    "Q is the squared length of one batch's gradient of the loss over all weights of an untrained network; NASI takes "
    "it for the trace norm of the neural tangent kernel. R is Q with the penalty mu on what exceeds nu. Nothing is "
    "trained in a search."
)
Modes = Literal["standard", "random labels", "random images"]
MODES: dict[str, dict[str, str]] = {
    "standard": {}, "random labels": {"labels": "random"}, "random images": {"images": "random"},
}  # fmt: skip
"""What a search sees of the data -> settings of `NasiConfig`."""

_NOISE = 3.0
_SYNTHETIC = 2000
"""Images, where there is no folder."""
AnySpace = CellSpace | SearchSpace


def choice_blocks_space(
    *, cells: int = 9, channels: int = 16, num_classes: int = 10, resolution: int = 32
) -> CellSpace:
    """A space like the first of NAS-Bench-1Shot1: every node sums two operations on earlier nodes, of one input.

    There an operation belongs to a node and works on the sum of its parents, the output joins parents without an
    operation, and stages are separated by pooling. Here an operation belongs to the edge from each parent, the last
    node is the output, and a strided convolution separates stages.
    """
    ops = ("none", "max_pool_3x3", "conv_1x1", "conv_3x3")
    edges = tuple(Edge(i, j, ops) for j in range(1, 5) for i in range(j))
    at = tuple(sorted({cells // 3, 2 * cells // 3} - {0}))
    return CellSpace(
        name="choice_blocks", cell=Cell(1, 4, edges, (4,)), cells=cells, channels=channels, reductions=at,
        reduce_by="conv", stem_multiplier=1, preprocess=False, head=True, affine=True, pool_norm=False,
        order="conv_norm_relu", classifier_bias=True, num_classes=num_classes, resolution=resolution,
    )  # fmt: skip


# --- quick --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NasiQuickConfig(ConfigBase):
    """The quick experiment; its pass marks are of the defaults.

    Attributes:
        cells: random NAS-Bench-201 cells that are scored and trained.
        images: of a batch that scores an architecture.
        repeats: initialisations and batches of a score.
        train_steps: of SGD for every trained cell.
        steps: architectures that a search samples.
        seeds: searches of every kind, from `seed` on.
        exact: small architectures whose exact NTK trace is computed.
        threads: CPU threads, 0 for torch's choice. Small maps gain little from more than one, and the accuracies of
            short trainings depend on it, by rounding.
        seed: the first; of images, cells and weights too.
    """

    cells: int = 40
    images: int = 256
    repeats: int = 3
    train_steps: int = 200
    steps: int = 100
    seeds: int = 3
    exact: int = 50
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(
            self.threads, self.seed, images=self.images, repeats=self.repeats, train_steps=self.train_steps,
            steps=self.steps, seeds=self.seeds,
        )  # fmt: skip
        for name in ("cells", "exact"):
            if getattr(self, name) < 3:
                raise ValueError(f"{name} must be at least 3, as a correlation needs, got {getattr(self, name)}")


_BATCH = 64
_NU = 0.6
"""The fixed limit of the penalised searches, beside the quantile; where the adaptive one starts."""
_EXACT_IMAGES = 16
_DIRECTIONS = 20000


def nasi_quick_study(cfg: NasiQuickConfig = NasiQuickConfig()) -> StudyReport:
    """Correlation of Q with accuracy, and searches, on small cells and synthetic images, with pass marks."""
    return run_study("nasi quick", cfg)


def quick(cfg: NasiQuickConfig, out: Path | None, task: Task) -> StudyReport:
    """The quick experiment; see `nasi_quick_study`."""
    return StudyReport(explanation=_EXPLANATION, **_quick(cfg, task))


def _quick(cfg: NasiQuickConfig, task: Task) -> dict[str, Any]:
    space = nas_bench_201_space(cells=2, channels=8, resolution=12)
    train, test = prototypes(_NOISE, _SYNTHETIC, 1000, seed=cfg.seed)
    trainer = _Trainer(space, train, test, cfg)
    archs = _distinct(space, cfg.cells, cfg.seed)
    scores = _scores(space, archs, train, cfg, _tenths(task("scores", len(archs)), len(archs)))
    done, accuracy = _tenths(task("training random cells", len(archs)), len(archs)), []
    for i, arch in enumerate(archs, 1):
        accuracy.append(trainer(arch))
        done(i)
    params = np.array([float(space.cost(arch).params) for arch in archs])
    first, correlation = _correlations(scores, np.array(accuracy), params)
    found, searches, moved, marks, records = _searches(space, train, trainer, np.array(accuracy), cfg, task)
    exact, exact_figure = _exact(space, train, cfg, _tenths(task("exact traces", cfg.exact), cfg.exact))
    solved = _closed_form(cfg, train)
    penalised = solve(records["standard", 0], mu=2.0, constraint="fixed", nu=_NU)
    steps = _steps_figure(f"search with mu 2, nu {_NU:g}, seed 0", penalised)
    scatter = {
        "kind": "nasi_scatter", "title": "Q and accuracy of random cells",
        "panels": {
            f"Q, {mode}": {"x": x, "y": accuracy, "labels": ["Q", "accuracy"]} for mode, x in scores.items()
        },
    }  # fmt: skip
    return {
        "subject": f"{cfg.cells} NAS-Bench-201 cells of two cells, 8 channels, on synthetic 12 x 12 images",
        "notes": (
            f"an accuracy is that of {cfg.train_steps} steps of SGD; a score is the mean of {cfg.repeats} batches of "
            f"{cfg.images}, each with an initialisation of its own",
            f"random cells: accuracy mean {np.mean(accuracy):.3f}, median {np.median(accuracy):.3f}, best "
            f"{np.max(accuracy):.3f}",
            "several mu and nu are solved from one set of sampled architectures, because mu and nu only weight them",
        ),
        "tables": (correlation, found, moved, exact, solved),
        "figures": (scatter, exact_figure, steps, _logits_figure("alpha* without a penalty, seed 0", space,
                                                                  solve(records["standard", 0], mu=0.0))),
        "checks": (*first, *searches, *marks),
    }  # fmt: skip


class _Trainer:
    """Accuracies of trained cells, each trained once."""

    def __init__(self, space: CellSpace, train: Any, test: Any, cfg: NasiQuickConfig) -> None:
        self._space, self._test, self._cfg = space, test, cfg
        self._loader = DrawnBatches(*train, steps=cfg.train_steps, batch=_BATCH, seed=cfg.seed)
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


def _tenths(done: Callable[[int], None], total: int) -> Callable[[int], None]:
    """Tells the progress ten times."""
    every = max(1, total // 10)
    return lambda count: done(count) if count % every == 0 or count == total else None


def _distinct(space: CellSpace, count: int, seed: int) -> list[Arch]:
    rng, found = np.random.default_rng(derive_seed(seed, seeds.STUDY_CELLS)), {}
    while len(found) < count:
        found[space.random(rng)] = None
    return list(found)


def _batches(
    train: tuple[Tensor, Tensor], images: int, repeats: int, mode: str, classes: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """The same images and labels in every mode, but for what the mode makes random."""
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
    space: CellSpace, archs: Sequence[Arch], train: Any, cfg: NasiQuickConfig, done: Callable[[int], None]
) -> dict[str, list[float]]:
    batches = {mode: _batches(train, cfg.images, cfg.repeats, mode, space.num_classes, cfg.seed) for mode in MODES}
    scores: dict[str, list[float]] = {mode: [] for mode in MODES}
    for i, arch in enumerate(archs, 1):
        for mode in MODES:
            scores[mode].append(score_architecture(space, arch, batches[mode], seed=cfg.seed))
        done(i)
    return scores


def _pearson(x: Sequence[float], y: Sequence[float]) -> float:
    return float(stats.pearsonr(x, y).statistic)


def _spearman(x: Sequence[float], y: Sequence[float]) -> float:
    return float(stats.spearmanr(x, y).statistic)


def _correlations(
    scores: Mapping[str, Sequence[float]], accuracy: np.ndarray, params: np.ndarray
) -> tuple[list[Check], Table]:
    q = np.array(scores["standard"])
    checks = [Check("Q over random cells: largest over smallest", 4, math.inf, float(q.max() / q.min()))]
    rows = []
    for mode, values in scores.items():
        of_accuracy = _spearman(values, accuracy)
        checks.append(Check(f"Spearman of Q and accuracy, {mode}", 0.4, 1, of_accuracy))
        pearson, spearman = _pearson(q, values), _spearman(q, values)
        if mode != "standard":
            checks += [
                Check(f"Pearson of Q, standard and {mode}", 0.5, 1, pearson),
                Check(f"Spearman of Q, standard and {mode}", 0.6, 1, spearman),
            ]
        rows.append((
            f"Q, {mode}", f"{np.min(values):.3f}", f"{np.median(values):.3f}", f"{np.max(values):.3f}",
            f"{of_accuracy:.2f}", f"{pearson:.2f}", f"{spearman:.2f}", f"{_spearman(values, params):.2f}",
        ))  # fmt: skip
    rows.append((
        "parameters", f"{params.min():.0f}", f"{np.median(params):.0f}", f"{params.max():.0f}",
        f"{_spearman(params, accuracy):.2f}", "-", f"{_spearman(params, q):.2f}", "-",
    ))  # fmt: skip
    header = ("score", "smallest", "median", "largest", "Spearman with accuracy", "Pearson with standard",
              "Spearman with standard", "Spearman with parameters")  # fmt: skip
    return checks, Table("random cells: what Q knows", header, tuple(rows))


def _searches(
    space: CellSpace, train: Any, trainer: _Trainer, accuracy: np.ndarray, cfg: NasiQuickConfig, task: Task
) -> tuple[Table, list[Check], Table, list[Check], dict[tuple[str, int], Record]]:
    records = {}
    for mode, changes in MODES.items():
        for i in range(cfg.seeds):
            search = NasiConfig(steps=cfg.steps, seed=cfg.seed + i, **changes)
            loader = DrawnBatches(
                *train, steps=cfg.steps, batch=_BATCH, seed=derive_seed(cfg.seed + i, seeds.STUDY_SEARCH_BATCHES)
            )
            mixture = CellMixture(space, seed=cfg.seed + i)
            done = _tenths(task(f"search, {mode}, seed {cfg.seed + i}", cfg.steps), cfg.steps)
            records[mode, i] = sample(mixture, loader, search, progress=done)
    kinds: dict[str, list[NasiResult]] = {}
    standard = [records["standard", i] for i in range(cfg.seeds)]
    kinds["no penalty"] = [solve(r, mu=0.0) for r in standard]
    for mu in (1.0, 2.0):
        kinds[f"mu {mu:g}, nu {_NU:g}"] = [solve(r, mu=mu, constraint="fixed", nu=_NU) for r in standard]
    for mode in list(MODES)[1:]:
        kinds[f"no penalty, {mode}"] = [solve(records[mode, i], mu=0.0) for i in range(cfg.seeds)]
    for mu in (1.0, 2.0):
        kinds[f"mu {mu:g}, nu 0.9 quantile"] = [solve(r, mu=mu) for r in standard]
    marked = list(kinds)
    for mode in MODES:
        kinds["mu 2, adaptive nu" + ("" if mode == "standard" else f", {mode}")] = [
            solve(records[mode, i], mu=2.0, constraint="adaptive", nu=_NU) for i in range(cfg.seeds)
        ]
    rows, checks, chosen = [], [], {}
    for name, results in kinds.items():
        chosen[name] = [derive(space, r.logits, "argmax") for r in results]
        reached = np.array([trainer(arch) for arch in chosen[name]])
        percentile = np.array([(accuracy <= a).mean() for a in reached])
        rows.append((
            name, " ".join(f"{a:.3f}" for a in reached), " ".join(f"{p:.2f}" for p in percentile),
            f"{percentile.mean():.2f}", _short(space, chosen[name][0]),
        ))  # fmt: skip
        if name in marked:
            checks += [
                Check(f"{name}: mean percentile", 0.8, 1, float(percentile.mean())),
                Check(f"{name}: worst accuracy minus random mean", 0, 1, float(reached.min() - accuracy.mean())),
            ]
    # time of the processor, which other programs do not lengthen, or by the clock if that is less
    seconds = [min(r.seconds, r.cpu_seconds) for r in records.values()]
    marks = [Check("seconds of a search, longest", 0, 60, max(seconds))]
    names = tuple(f"{e.name}" for e in space.cell.edges)
    header = ("search", "accuracy by seed", "percentile by seed", "mean", f"first cell, edges {' '.join(names)}")
    compared = {mode: chosen["no penalty" + ("" if mode == "standard" else f", {mode}")] for mode in MODES}
    return Table("searches", header, tuple(rows)), checks, _moved_table(space, compared), marks, records


def _short(space: CellSpace, arch: Arch) -> str:
    """Operations in the order of the values."""
    return " ".join(space.ops[k] for k in arch)


def _differ(a: Arch, b: Arch) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def _options(space: AnySpace) -> list[int]:
    """How many candidates every value of an architecture has."""
    if isinstance(space, CellSpace):
        return [len(columns) for columns in space.candidates] * len(space.types)
    return [len(layer.options) for layer in space.layers]


def _moved_table(space: AnySpace, chosen: Mapping[str, Sequence[Arch]]) -> Table:
    """How many values of the selected architecture differ between modes at one seed, beside between seeds."""
    rows = []
    for mode, archs in chosen.items():
        pairs = [_differ(a, b) for a, b in combinations(archs, 2)]
        rows.append((f"between seeds, {mode}", f"{np.mean(pairs):.2f}" if pairs else "-", str(len(pairs))))
    for a, b in combinations(chosen, 2):
        pairs = [_differ(x, y) for x, y in zip(chosen[a], chosen[b], strict=True)]
        rows.append((f"{a} and {b}, same seed", f"{np.mean(pairs):.2f}", str(len(pairs))))
    chance = sum(1 - 1 / k for k in _options(space))
    rows.append(("two random architectures", f"{chance:.2f}", "-"))
    return Table(f"of {len(_options(space))} choices, how many differ", ("", "mean", "pairs"), tuple(rows))


def _exact(space: CellSpace, train: Any, cfg: NasiQuickConfig, done: Callable[[int], None]) -> tuple[Table, dict]:
    """Estimates beside the exact trace of the neural tangent kernel, on the same weights and images."""
    archs = _distinct(space, cfg.exact, cfg.seed + 1)
    x, y = train[0][:_EXACT_IMAGES], train[1][:_EXACT_IMAGES]
    kinds = ("trace_full", "trace_label", "q_sum", "q_batch")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    averaged, batches = [], _batches(train, cfg.images, cfg.repeats, "standard", space.num_classes, cfg.seed)
    for i, arch in enumerate(archs, 1):
        net = untrained(space, arch, seed=derive_seed(cfg.seed, seeds.STUDY_EXACT_WEIGHTS))
        for kind in kinds:
            found[kind].append(score(net, x, y, kind=kind, chunk=_EXACT_IMAGES * space.num_classes))
        averaged.append(score_architecture(space, arch, batches, seed=cfg.seed))
        done(i)
    params = [float(space.cost(arch).params) for arch in archs]
    full = found["trace_full"]
    rows = [
        (name, f"{_spearman(values, full):.2f}", f"{stats.kendalltau(values, full).statistic:.2f}",
         f"{_pearson(np.log(values), np.log(full)):.2f}")
        for name, values in (
            ("trace_label", found["trace_label"]), ("q_sum", found["q_sum"]),
            (f"q_batch: the same {_EXACT_IMAGES} images", found["q_batch"]),
            (f"q_batch: {cfg.repeats} x {cfg.images} images", averaged), ("parameters", params),
        )
    ]  # fmt: skip
    # the chain of the lower bound, sum_x |g_x|^2 <= 2 trace and b |mean g|^2 <= sum_x |g_x|^2
    loose = [np.median(np.array(found["q_sum"]) / (2 * np.array(full))),
             np.median(_EXACT_IMAGES * np.array(found["q_batch"]) / np.array(found["q_sum"]))]  # fmt: skip
    title = (
        f"{cfg.exact} cells: rank correlation with the exact trace of the kernel on {_EXACT_IMAGES} images; medians of "
        f"sum |g_x|^2 over its bound 2 trace {loose[0]:.3f}, of b |mean g|^2 over its bound sum |g_x|^2 {loose[1]:.3f}"
    )
    figure = {
        "kind": "nasi_scatter", "title": "estimates beside the exact trace",
        "panels": {
            kind: {"x": full, "y": found[kind], "labels": ["exact trace", kind], "log": True} for kind in kinds[1:]
        },
    }  # fmt: skip
    return Table(title, ("estimate", "Spearman", "Kendall", "Pearson of logs"), tuple(rows)), figure


def _closed_form(cfg: NasiQuickConfig, train: Any) -> Table:
    """The step of the method beside what enumeration of a space of 27 architectures gives."""
    space = small_space()
    mixture = CellMixture(space, seed=cfg.seed).double()
    x, y = train[0][:_BATCH].double(), train[1][:_BATCH]
    archs, q = enumerated(mixture, space, x, y)
    exact = enumerated_gradient(archs, q, mixture.allowed.shape)
    step = exact / exact.norm()
    rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_DIRECTIONS))
    directions = torch.from_numpy(rng.standard_normal((_DIRECTIONS, exact.numel())))
    best = float((directions @ exact.flatten() / directions.norm(dim=1)).max())
    place = {arch: int((q > q[i]).sum()) + 1 for i, arch in enumerate(archs)}
    rows = [(
        "closed form, exact gradient", "1.000", f"{_expected(archs, q, step):.4g}", str(place[_argmax(step)]),
    )]  # fmt: skip
    for gates in get_args(Gates):
        search = NasiConfig(steps=cfg.steps, mu=0.0, seed=cfg.seed, gates=gates)
        found = solve(sample(mixture, [(x, y)], search), mu=0.0).delta
        unit = found / found.norm()
        rows.append((
            f"{gates.replace('_', '-')}, T = {cfg.steps}", f"{float((unit * step).sum()):.3f}",
            f"{_expected(archs, q, unit):.4g}", str(place[_argmax(unit)]),
        ))  # fmt: skip
    ascended = _ascend(archs, q, exact.shape)
    rows.append((
        "largest E[Q] of norm 1, ascent", f"{float((ascended * step).sum()):.3f}",
        f"{_expected(archs, q, ascended):.4g}", str(place[_argmax(ascended)]),
    ))  # fmt: skip
    title = (
        f"one step from alpha_0 = 0, {len(archs)} architectures: mean Q {float(q.mean()):.4g}, largest "
        f"{float(q.max()):.4g}; of {_DIRECTIONS} random directions the best reaches {best / float(exact.norm()):.3f} "
        "of the closed form's first-order gain"
    )
    return Table(title, ("Delta", "cosine", "E[Q] at Delta of norm 1", "place of its argmax by Q"), tuple(rows))


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


def _expected(archs: Sequence[Arch], q: Tensor, alpha: Tensor) -> float:
    return float(_expectation(archs, q, alpha))


def _expectation(archs: Sequence[Arch], q: Tensor, alpha: Tensor) -> Tensor:
    log_p = torch.log_softmax(alpha[0], -1)
    rows = torch.arange(log_p.shape[0])
    return (log_p[rows, torch.tensor(archs)].sum(1).exp() * q).sum()


def _argmax(alpha: Tensor) -> Arch:
    return tuple(alpha[0].argmax(-1).tolist())


def _ascend(archs: Sequence[Arch], q: Tensor, shape: Sequence[int]) -> Tensor:
    """The alpha of norm 1 at which E[Q] is largest, by projected gradient ascent."""
    alpha = torch.zeros(tuple(shape), dtype=torch.float64)
    for _ in range(500):
        alpha.requires_grad_()
        (gradient,) = torch.autograd.grad(_expectation(archs, q, alpha), alpha)
        alpha = alpha.detach() + 0.1 * gradient / gradient.norm()
        alpha = alpha / alpha.norm().clamp(min=1)
    return alpha


# --- search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Preset:
    """How a space is searched, with the settings of section 4 of the method's description."""

    make: Callable[..., AnySpace]
    mu: float = 1.0
    resolution: int | None = None
    batch: int = 16
    rule: Literal["argmax", "darts"] = "argmax"


_PRESETS = {
    "darts": _Preset(lambda **kw: darts_space(**{"cells": 5, **kw}), 2.0, 32, 64, "darts"),
    "nas_bench_201": _Preset(nas_bench_201_space, 1.0, 32, 64),
    "choice_blocks": _Preset(choice_blocks_space, 1.0, 32, 64, "darts"),
    "nas_bench_macro": _Preset(partial(get_space, "nas_bench_macro")),
    "mobilenet_v2": _Preset(partial(get_space, "mobilenet_v2"), 2.0, 64),
    "shufflenet_v2": _Preset(partial(get_space, "shufflenet_v2"), 2.0, 64),
    "digits_mini": _Preset(partial(get_space, "digits_mini")),
}
_CELLS = ("darts", "nas_bench_201", "choice_blocks")


def _preset(name: str) -> _Preset:
    """What `--space` names.

    Raises:
        ConfigError: neither built in nor a readable file.
    """
    if name in _PRESETS:
        return _PRESETS[name]
    if not names_file(name):
        raise ConfigError(f"unknown space {name!r}: neither a YAML file nor built in; {nearest(name, _PRESETS)}")
    space = read_space(name)
    # cells with two inputs are DARTS's, whose nodes keep two edges
    two = isinstance(space, CellSpace) and space.cell.inputs == 2
    return _Preset(space.replace, rule="darts" if two else "argmax")


@dataclass(frozen=True)
class NasiSearchConfig(ConfigBase):
    """Searches of one space.

    Attributes:
        space: `darts`, `nas_bench_201`, `choice_blocks` (as NAS-Bench-1Shot1's first), `nas_bench_macro`,
            `mobilenet_v2`, `shufflenet_v2`, `digits_mini`, or the path of a YAML file.
        images: folder with one sub-folder per class, augmented as for training; null takes synthetic images.
        resolution: of the images; null takes the space's, and 64 for mobilenet_v2 and shufflenet_v2.
        cells: how many, of darts, nas_bench_201 and choice_blocks; null takes the space's.
        channels: of their first cell; null takes the space's.
        steps: T, sampled architectures.
        batch: images for each; null takes 64 for built-in cells, else 16.
        mu: weight of the penalty on what exceeds nu; null takes 2 for darts, mobilenet_v2 and shufflenet_v2, else 1.
        constraint: `quantile`: nu is the quantile of Q that is the limit; `fixed`: nu is the limit itself;
            `adaptive`: nu is where it begins, and it goes on as the mean of it and of the Q so far.
        nu: see `constraint`; null is the 0.9 quantile, and the others need one.
        gates: `straight_through`, or `soft`, which computes and keeps all candidates.
        temperature: of the gates' softmax.
        modes: what a search sees of the data, comma-separated: `standard`, `random labels`, `random images`.
        seeds: searches in every mode, from `seed` on.
        sensitivity: also measure what mu, nu, T, batch and gates change.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        threads: CPU threads, 0 for torch's choice.
        seed: the first.
    """

    space: str = "nas_bench_201"
    images: str | None = None
    resolution: int | None = None
    cells: int | None = None
    channels: int | None = None
    steps: int = 100
    batch: int | None = None
    mu: float | None = None
    constraint: Constraint = "quantile"
    nu: float | None = None
    gates: Gates = "straight_through"
    temperature: float = 1.0
    modes: str = "standard"
    seeds: int = 1
    sensitivity: bool = False
    device: str = "cpu"
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_device(self.device)
        sizes = {name: getattr(self, name) for name in ("resolution", "cells", "channels", "batch")}
        given = {name: value for name, value in sizes.items() if value is not None}
        check_common(self.threads, self.seed, seeds=self.seeds, steps=self.steps, **given)
        for mode in self.mode_list:
            if mode not in MODES:
                raise ValueError(f"modes: unknown {mode!r}; {nearest(mode, MODES)}")
        if "standard" not in self.mode_list or len(set(self.mode_list)) < len(self.mode_list):
            raise ValueError(f"modes must contain 'standard', and each only once, got {self.modes!r}")
        if self.batch == 1:
            raise ValueError("batch must be at least 2 (BatchNorm needs more than one image), got 1")
        if self.space not in _CELLS:
            for name in ("cells", "channels"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to {', '.join(_CELLS)}, not to {self.space}")
        self.search(0)

    @property
    def mode_list(self) -> tuple[str, ...]:
        return tuple(mode.strip() for mode in self.modes.split(","))

    def search(self, i: int, **changes: Any) -> NasiConfig:
        """The settings of the i-th search of a mode."""
        return NasiConfig(
            steps=self.steps, mu=self.preset.mu if self.mu is None else self.mu, constraint=self.constraint,
            nu=self.nu, gates=self.gates, temperature=self.temperature, seed=self.seed + i,
        ).replace(**changes)  # fmt: skip

    @cached_property
    def preset(self) -> _Preset:
        return _preset(self.space)

    @property
    def batch_size(self) -> int:
        return self.batch or self.preset.batch


class Searches:
    """Searches of the space that a config names.

    Args:
        cfg: what to search, and how.
        task: tells the progress; None tells nothing.

    Raises:
        ConfigError: unknown space, or fewer images than a batch.
        DataError: the folder of images cannot be used.
    """

    def __init__(self, cfg: NasiSearchConfig, task: Task | None = None) -> None:
        self.cfg, self.device = cfg, torch_device(cfg.device)
        self._task = task or (lambda name, total: lambda done: None)
        self._source = None if cfg.images is None else FolderSource(cfg.images)
        self._loaders: dict[tuple[int, int], Any] = {}
        self.images = _SYNTHETIC if self._source is None else len(self._source)
        if self.images < cfg.batch_size:
            raise ConfigError(f"batch must be at most {self.images}, the number of images, got {cfg.batch_size}")
        classes = len(self._source.classes) if self._source is not None else 10 if cfg.space in _PRESETS else None
        sizes = {
            "resolution": cfg.resolution or self.cfg.preset.resolution, "num_classes": classes, "cells": cfg.cells,
            "channels": cfg.channels,
        }  # fmt: skip
        self.space = self.cfg.preset.make(**{name: value for name, value in sizes.items() if value is not None})

    def loader(self, i: int, batch: int) -> Any:
        """The same batches whatever a search makes of them."""
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
        make = CellMixture if isinstance(self.space, CellSpace) else LayerMixture
        return make(self.space, seed=search.seed).to(self.device)

    def record(self, search: NasiConfig, i: int, name: str, *, batch: int | None = None) -> Record:
        """What the architectures of one search gave."""
        mixture = self.mixture(search)
        loader = self.loader(i, batch or self.cfg.batch_size)
        done = _tenths(self._task(name, search.steps), search.steps)
        return sample(mixture, loader, search, device=self.device, progress=done)

    def all(self) -> dict[tuple[str, int], NasiResult]:
        """Every mode with every seed."""
        results = {}
        for mode, i in product(self.cfg.mode_list, range(self.cfg.seeds)):
            search = self.cfg.search(i, **MODES[mode])
            results[mode, i] = self.solve(self.record(search, i, f"{mode}, seed {search.seed}"), search).check()
        return results

    def solve(self, record: Record, search: NasiConfig) -> NasiResult:
        return solve(record, mu=search.mu, constraint=search.constraint, nu=search.nu, xi=search.xi)

    def arch(self, result: NasiResult) -> Arch:
        if isinstance(self.space, CellSpace):
            return derive(self.space, result.logits, self.cfg.preset.rule)
        return layer_arch(self.space, result)

    def describe(self, arch: Arch) -> str:
        return _short(self.space, arch) if isinstance(self.space, CellSpace) else format_arch(arch)


def synthetic(space: AnySpace, *, steps: int, batch: int, seed: int) -> DrawnBatches:
    """Batches of noisy prototypes, resized to a space's resolution.

    Raises:
        ConfigError: a space of more than three channels.
    """
    if space.in_channels > 3:
        raise ConfigError(f"synthetic images have up to 3 channels, {space.name} takes {space.in_channels}")
    (x, y), _ = prototypes(_NOISE, _SYNTHETIC, 1, seed=seed)
    x = x[:, : space.in_channels]
    if space.resolution != x.shape[-1]:
        size = (space.resolution, space.resolution)
        # a batch at a time would save memory, but 2000 images of 64 x 64 are 100 MB
        x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    return DrawnBatches(x, y % space.num_classes, steps=steps, batch=batch, seed=seed)


def nasi_search_study(cfg: NasiSearchConfig = NasiSearchConfig(), *, out: str | Path | None = None) -> StudyReport:
    """Search a space; how far selections move between seeds and modes; what the settings change, if asked for.

    Args:
        cfg: what to search, and how.
        out: gets `space.yaml`, and what the first search in standard mode found: `indicators.json` of a layer-wise
            space, `arch_nasi.json` of a space of cells.

    Raises:
        ConfigError: unknown space, or fewer images than a batch.
        DataError: the folder of images cannot be used.
        FileExistsError: `out` holds another space or the scores of a trained supernet.
        ValueError: a search that prefers nothing, because no sampled architecture has a slope.
    """
    return run_study("nasi search", cfg, out=out)


def search(cfg: NasiSearchConfig, out: Path | None, task: Task) -> StudyReport:
    """Searches of one space; see `nasi_search_study`."""
    searches = Searches(cfg, task)
    folder = _claimed(out, searches.space)
    return StudyReport(explanation=_EXPLANATION, **_found(searches, searches.all(), folder))


def _claimed(out: str | Path | None, space: AnySpace) -> Path | None:
    """The folder that gets the files, before anything is computed: one that cannot be used is noticed now."""
    if out is None:
        return None
    folder = Path(out)
    path, table = folder / "space.yaml", folder / "indicators.json"
    if path.exists() and read_space(path) != space:
        raise FileExistsError(f"{path} is of another space: choose another --out")
    if table.exists() and IndicatorTable.load(table).meta.get("method") != METHOD:
        raise FileExistsError(f"{table} has the scores of a trained supernet: choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, space.to_yaml().encode())
    return folder


def _found(searches: Searches, results: Mapping[tuple[str, int], NasiResult], folder: Path | None) -> dict[str, Any]:
    """Report of searches, and the files of the first."""
    cfg, space, rows = searches.cfg, searches.space, []
    chosen: dict[str, list[Arch]] = {mode: [] for mode in cfg.mode_list}
    for (mode, i), result in results.items():
        arch = searches.arch(result)
        chosen[mode].append(arch)
        cost = space.cost(arch)
        rows.append((
            f"{mode}, seed {cfg.seed + i}", searches.describe(arch), f"{cost.macs:,}", f"{cost.params:,}",
            f"{float(result.q.median()):.3g}", f"{float(result.nu[-1]):.3g}", f"{100 * result.above:.0f} %",
            str(result.skipped),
            f"{result.record.seconds:.1f} ({result.record.cpu_seconds:.1f})",
        ))  # fmt: skip
    first, arch = results["standard", 0], chosen["standard"][0]
    header = ("search", "architecture", "MACs", "parameters", "median Q", "last nu", "above nu", "skipped",
              "seconds (CPU)")  # fmt: skip
    tables = [Table("what was found", header, tuple(rows))]
    if len(results) > 1:
        tables.append(_moved_table(space, chosen))
    if cfg.sensitivity:
        tables.append(_sensitivity(searches, first, arch))
    files = () if folder is None else (_write(folder, space, first, arch, cfg),)
    source = "synthetic images" if cfg.images is None else "images of a folder"
    search = cfg.search(0)
    return {
        "subject": f"space {space.name}, {space.resolution} x {space.resolution} {source}",
        "notes": (
            f"T = {search.steps}, batch {cfg.batch_size}, mu {search.mu:g}, {_limit(search)}, gates {search.gates}",
        ),
        "files": files,
        "tables": tuple(tables),
        "figures": (
            _steps_figure("the first search, step by step", first), _logits_figure("alpha* - alpha_0", space, first),
        ),
    }  # fmt: skip


def _sensitivity(searches: Searches, reference: NasiResult, arch: Arch) -> Table:
    """What other settings change; mu, nu and T need no new samples."""
    cfg, record, rows = searches.cfg, reference.record, []
    base = cfg.search(0)
    level = float(torch.quantile(record.q[record.finite], 0.9))

    def row(name: str, result: NasiResult, seconds: str = "-") -> None:
        found = searches.arch(result)
        length = float(result.delta.norm() * reference.delta.norm())
        cosine = float((result.delta * reference.delta).sum()) / length if length else math.nan
        rows.append((name, str(_differ(found, arch)), f"{cosine:.3f}", searches.describe(found), seconds))

    for mu in (0.0, 0.5, 1.0, 2.0):
        row(f"mu {mu:g}", searches.solve(record, base.replace(mu=mu)))
    # a limit says nothing where there is no penalty, which may be the search's own setting
    for mu, quantile in product((1.0, 2.0), (0.5, 0.75, 0.9)):
        changes = {"mu": mu, "constraint": "quantile", "nu": quantile}
        row(f"mu {mu:g}, nu {quantile:g} quantile", searches.solve(record, base.replace(**changes)))
    for factor in (0.5, 1.0, 2.0):
        changes = {"mu": 2.0, "constraint": "adaptive", "nu": factor * level}
        row(f"mu 2, nu adaptive from {factor:g} x 0.9 quantile", searches.solve(record, base.replace(**changes)))
    for steps in sorted({max(1, base.steps // share) for share in (10, 4, 2)}):
        row(f"T {steps}", searches.solve(record.first(steps), base))
    for batch in sorted({max(2, cfg.batch_size // 4), max(2, cfg.batch_size // 2), 2 * cfg.batch_size}):
        if batch > searches.images:
            continue
        other = searches.record(base, 0, f"batch {batch}", batch=batch)
        row(f"batch {batch}", searches.solve(other, base), f"{other.cpu_seconds:.1f}")
    (gates,) = set(get_args(Gates)) - {base.gates}
    other = searches.record(base.replace(gates=gates), 0, f"{gates} gates")
    row(f"{gates.replace('_', '-')} gates", searches.solve(other, base), f"{other.cpu_seconds:.1f}")
    title = f"sensitivity: changes to T {base.steps}, batch {cfg.batch_size}, mu {base.mu:g}, {_limit(base)}"
    header = ("setting", f"choices of {len(arch)} that differ", "cosine of Delta", "architecture", "CPU seconds")
    return Table(title, header, tuple(rows))


def _limit(search: NasiConfig) -> str:
    return f"nu {search.constraint} {check_penalty(search.mu, search.constraint, search.nu):g}"


def _write(folder: Path, space: AnySpace, result: NasiResult, arch: Arch, cfg: NasiSearchConfig) -> Path:
    """What the search found, where `nasfast retrain` and `nasfast search` look for it."""
    if isinstance(space, CellSpace):
        path = folder / f"arch_{METHOD}.json"
        write_atomic(path, (arch_to_json(arch, space) + "\n").encode())
    else:
        path = folder / "indicators.json"
        meta = {"steps": len(result.record.q), "seed": cfg.seed, "images": cfg.images is not None}
        nasi_table(space, result, meta=meta).save(path)
    return path


def _steps_figure(title: str, result: NasiResult) -> dict[str, Any]:
    data = {"q": result.q, "r": result.r, "nu": result.nu, "norm": result.norms}
    return {"kind": "nasi_steps", "title": title, **{name: values.tolist() for name, values in data.items()}}


def _logits_figure(title: str, space: AnySpace, result: NasiResult) -> dict[str, Any]:
    if isinstance(space, CellSpace):
        rows = [f"{kind} {edge.name}" for kind in space.types for edge in space.cell.edges]
        columns = list(space.ops)
    else:
        rows = [str(i) for i in range(len(space))]
        columns = [str(k) for k in range(result.delta.shape[-1])]
    values = result.delta.masked_fill(~result.logits.isfinite(), math.nan).flatten(0, 1).tolist()
    return {"kind": "nasi_logits", "title": title, "rows": rows, "columns": columns, "values": values}


# --- compare ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NasiCompareConfig(NasiSearchConfig):
    """NASI beside other predictors of trained accuracy on nas_bench_macro, with the attributes of a search.

    Attributes:
        accuracies: JSON of trained accuracies, nas-bench-macro_cifar10.json of NAS-Bench-Macro.
        indicators: an indicators.json of the same space to compare with, such as a trained supernet's.
        architectures: random ones whose own Q is computed, each as a network of its own; 0 for none, else at least 10.
        repeats: initialisations and batches of each.
        score_batch: images of each.
        resamples: of the bootstrap.
    """

    space: Literal["nas_bench_macro"] = "nas_bench_macro"
    accuracies: str = "nas-bench-macro_cifar10.json"
    indicators: str | None = None
    architectures: int = 150
    repeats: int = 3
    score_batch: int = 32
    resamples: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_common(0, 0, repeats=self.repeats, score_batch=self.score_batch)
        if self.architectures != 0 and self.architectures < MIN_ARCHITECTURES:
            raise ValueError(f"architectures must be 0 or at least {MIN_ARCHITECTURES}, got {self.architectures}")


def nasi_compare_study(cfg: NasiCompareConfig, *, out: str | Path | None = None) -> StudyReport:
    """Rank correlations with trained accuracy, with intervals and seconds; files and errors as `nasi_search_study`.

    Raises:
        AccuracyError: `cfg.accuracies` cannot be used.
        TableError: `cfg.indicators` cannot be used, or belongs to another space.
    """
    return run_study("nasi compare", cfg, out=out)


def compare(cfg: NasiCompareConfig, out: Path | None, task: Task) -> StudyReport:
    """Predictors of accuracy beside each other; see `nasi_compare_study`."""
    return StudyReport(explanation=_EXPLANATION, **_compare(cfg, task, out))


def _compare(cfg: NasiCompareConfig, task: Task, out: str | Path | None) -> dict[str, Any]:
    # images of another size or number of classes leave the architectures those of the published accuracies
    published = get_space(cfg.space)
    truth = read_accuracies(cfg.accuracies, published)
    searches = Searches(cfg, task)
    folder = _claimed(out, searches.space)
    stream = endless(searches.loader(0, cfg.score_batch), searches.device)
    batches = [next(stream) for _ in range(cfg.repeats)]
    results = searches.all()
    found = _found(searches, results, folder)
    predictors: dict[str, Any] = {}
    seconds: dict[str, str] = {}
    for (mode, i), result in results.items():
        table, name = nasi_table(searches.space, result), f"NASI, {mode}, seed {cfg.seed + i}"
        predictors[name] = {arch: table.score(arch) for arch in truth}
        seconds[name] = f"{result.record.seconds:.1f} ({result.record.cpu_seconds:.1f})"
    if cfg.indicators is not None:
        predictors["given indicators"] = IndicatorTable.load(cfg.indicators)
    of_all = _rankings(truth, predictors, published, cfg)
    tables = [_ranking_table(f"all {len(truth)} architectures", of_all, seconds)]
    if cfg.architectures:
        rng = np.random.default_rng(derive_seed(cfg.seed, seeds.STUDY_PICKS))
        picks = rng.choice(len(truth), min(cfg.architectures, len(truth)), replace=False)
        some = [sorted(truth)[i] for i in sorted(picks)]
        q, seconds["Q"] = _own_scores(
            searches, some, batches, _tenths(task("Q of architectures", len(some)), len(some))
        )
        of_some = _rankings({arch: truth[arch] for arch in some}, {"Q": q, **predictors}, published, cfg)
        tables.insert(0, _ranking_table(f"{len(some)} random architectures, each scored by itself", of_some, seconds))
        scatter = {
            "kind": "nasi_scatter", "title": f"{len(some)} random architectures",
            "panels": {
                "Q": {"x": [q[a] for a in some], "y": [truth[a] for a in some], "labels": ["Q", "accuracy"]},
                "MACs": {"x": [published.cost(a).macs for a in some], "y": [truth[a] for a in some],
                         "labels": ["MACs", "accuracy"]},
            },
        }  # fmt: skip
        found["figures"] = (scatter, *found["figures"])
    return {**found, "tables": (*tables, *found["tables"])}


def _own_scores(
    searches: Searches, archs: Sequence[Arch], batches: Sequence[tuple[Tensor, Tensor]], done: Callable[[int], None]
) -> tuple[dict[Arch, float], str]:
    """Q of every architecture, and the seconds of the clock and of the processor."""
    start, cpu = time.perf_counter(), time.process_time()
    q = {}
    for i, arch in enumerate(archs, 1):
        q[arch] = score_architecture(searches.space, arch, batches, seed=searches.cfg.seed)
        done(i)
    return q, f"{time.perf_counter() - start:.1f} ({time.process_time() - cpu:.1f})"


def _rankings(
    truth: Mapping[Arch, float], predictors: Mapping[str, Any], space: SearchSpace, cfg: NasiCompareConfig
) -> dict[str, RankReport]:
    return {
        name: rank(truth, predictor, space, resamples=cfg.resamples, seed=cfg.seed)
        for name, predictor in predictors.items()
    }


def _ranking_table(title: str, reports: Mapping[str, RankReport], seconds: Mapping[str, str]) -> Table:
    """Every predictor beside the trivial ones, whose reports are in each."""
    first = next(iter(reports.values()))
    best = first.best_baseline.name if first.best_baseline else "depth"
    rows = [_ranking_row(name, r.predictor, str(r.above[best]), seconds.get(name, "-")) for name, r in reports.items()]
    rows += [_ranking_row(b.name, b, "-", "0") for b in first.baselines]
    header = ("predictor", "Kendall's tau", "Spearman's rho", "tau within equal depth", f"tau minus that of {best}",
              "points lost by its favourite", "seconds (CPU)")  # fmt: skip
    return Table(title, header, tuple(rows))


def _ranking_row(name: str, report: PredictorReport, above: str, seconds: str) -> tuple[str, ...]:
    return (
        name, str(report.kendall), str(report.spearman), str(report.kendall_within_depth), above,
        f"{report.regret[-1]:.2f}", seconds,
    )  # fmt: skip
