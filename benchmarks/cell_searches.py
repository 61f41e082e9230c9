"""The searches of `bench_cell_search`: each returns the cell that it chooses and what a row says of the search."""

import argparse
import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.cells import CellSpace, CellSupernet, derive, nas_bench_201_space, search_cells
from nasfast.cells.gates import make_estimator, uniform_logits
from nasfast.cells.operations import Operation
from nasfast.cells.probe import GROUPS, QUANTITIES
from nasfast.cells.search import SEARCH, TRAIN, WEIGHTS, CellSearchResult
from nasfast.data import DataConfig, FolderSource, Loader, make_loader
from nasfast.data.datasets import split_source
from nasfast.indicators.evidence import NetworkEvidence
from nasfast.indicators.scores import parts_of, score_networks, summed
from nasfast.indicators.structure import BASELINES, structure_scores
from nasfast.nasi.cells import CellMixture
from nasfast.nasi.config import NasiConfig
from nasfast.nasi.score import untrained
from nasfast.nasi.search import NasiResult, Record, endless, random_images, random_labels, sample, solve
from nasfast.seeds import NASI_IMAGES, NASI_LABELS, derive_seed
from nasfast.settings.cells import CellSearchConfig
from nasfast.spaces import Arch
from nasfast.spaces.cell_costs import NONE, SKIP_CONNECT
from nasfast.studies.wiring.marks import collapsed, grown, widened
from nasfast.studies.wiring.measure import measures, none_probability
from nasfast.train.checkpoint import CheckpointFolder

Kind = Literal["nasi", "gradient", "norms", "score", "random"]
Found = tuple[Arch, dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One method of the queue.

    Attributes:
        name: name in the rows.
        kind: which search it is.
        cells, channels: size of the network that is searched; that of the table has 15 and 16.
        changes: settings of `NasiConfig` or `CellSearchConfig`; of a score `labels` and `images`, as in `NasiConfig`;
            of random search `steps` and `held_out`: batches that a cell learns from and is measured on.
        epochs: passes over half of the training images.
        batch: images per batch.
        score: the score or baseline of `nasfast rank` that chooses among random cells.
    """

    name: str
    kind: Kind
    cells: int = 5
    channels: int = 8
    changes: tuple[tuple[str, Any], ...] = ()
    epochs: int = 0
    batch: int = 64
    score: str = ""

    @property
    def space(self) -> CellSpace:
        return nas_bench_201_space(cells=self.cells, channels=self.channels)


def loaders(args: argparse.Namespace, entry: Entry, seed: int) -> tuple[Loader, Loader]:
    """Two halves of the images; both are shuffled and augmented as for training."""
    cache = str(args.work / "cache")
    cfg = DataConfig(train=args.images, batch_size=entry.batch, loader="cache", cache_dir=cache, workers=0)
    halves = split_source(FolderSource(args.images), 0.5, seed)
    first, second = (make_loader(cfg, half, resolution=entry.space.resolution, seed=seed) for half in halves)
    return first, second


def search_nasi(args: argparse.Namespace, entry: Entry, seed: int) -> Found:
    cfg = NasiConfig(**{"seed": seed, "mu": 1.0, **dict(entry.changes)})
    space, record = entry.space, _record(args, entry, cfg)

    def chosen(steps: int) -> tuple[Arch, NasiResult]:
        found = solve(record.first(steps), mu=cfg.mu, constraint=cfg.constraint, nu=cfg.nu).check()
        return derive(space, found.logits, "argmax"), found

    arch, found = chosen(cfg.steps)
    lengths = sorted({cfg.steps * part // 4 for part in (1, 2, 3)} - {0})
    return arch, {
        "logits": plain(found.logits[0]),
        "skipped": found.skipped,
        "above": round(found.above, 3),
        "q": plain(torch.quantile(found.q, torch.tensor([0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0], dtype=torch.float64))),
        "shorter": {str(steps): operations(space, chosen(steps)[0]) for steps in lengths},
        "cpu_s": round(record.cpu_seconds, 1),
        "wall_s": round(record.seconds, 1),
        "settings": cfg.to_dict(),
    }


def _record(args: argparse.Namespace, entry: Entry, cfg: NasiConfig) -> Record:
    """The sampled architectures, which do not depend on the penalty."""
    name = f"nasi-{entry.cells}x{entry.channels}-b{entry.batch}-{cfg.labels}-{cfg.images}-t{cfg.steps}-s{cfg.seed}.pt"
    path, space = args.work / name, entry.space
    if not path.exists():
        record = sample(CellMixture(space, seed=cfg.seed), loaders(args, entry, cfg.seed)[0], cfg)
        args.work.mkdir(parents=True, exist_ok=True)
        torch.save(asdict(record), path)
    return Record(**torch.load(path, weights_only=True))


def search_gradient(args: argparse.Namespace, entry: Entry, seed: int) -> Found:
    cfg = CellSearchConfig(**{"seed": seed, "records": 20, **dict(entry.changes)})
    train_cfg = WEIGHTS.replace(epochs=args.epochs or entry.epochs)
    folder, space = args.work / f"{entry.name.replace(', ', '-').replace(' ', '-')}-s{seed}", entry.space
    newest = CheckpointFolder(folder / "checkpoints", "cells").paths()[-1:]
    before = int(newest[0].stem.rpartition("-")[2]) if newest else 0
    first, second = loaders(args, entry, seed)
    torch.manual_seed(seed)
    result = search_cells(
        space, first, cfg, train_cfg, held_out=second if cfg.bilevel else None, run_dir=folder, resume=True
    )
    total = train_cfg.epochs * len(first)
    more = {
        "steps": total,
        "steps_here": total - before,
        "logits": plain(torch.as_tensor(result.logits[0])),
        **wiring(result),
        "settings": {**cfg.to_dict(), "epochs": train_cfg.epochs},
    }
    return derive(space, result.logits, "argmax"), more


def wiring(found: CellSearchResult) -> dict[str, Any]:
    """What a row says of the local costs of a search and of the patterns that they predict.

    Lists by record have a value of `TRAIN` and one of `SEARCH`, which is 0 on one level. `output_cost` is the cost of
    the last cell's output node: the sum over the edges into it. `tables` are scores of candidates, minus their costs on
    the images that the logits learn from.
    """
    space, which = found.space, SEARCH if found.cfg.bilevel else TRAIN
    into_output = list(space.cell.into(space.cell.outputs[0]))
    patterns = {"growing": grown, "width": widened, "collapse": collapsed}
    if not found.cfg.bilevel:
        del patterns["collapse"]
    whole, half = (_operation_costs(found, slice(n)) for n in (len(found.steps), len(found.steps) // 2))
    samples = np.maximum(found.outputs[:, :, GROUPS.index("all"), -1], 1)
    right = found.outputs[:, :, GROUPS.index("correct"), -1] / samples
    return {
        # by record, of the training images and the held-out ones, by edge: the mean over the cells
        "edge_costs": np.round(found.edge_costs.mean(2), 5).tolist(),
        "op_costs": np.round(whole, 6).tolist(),
        "op_costs_first_half": np.round(half, 6).tolist(),
        "output_cost": np.round(found.edge_costs[:, :, -1, into_output].sum(-1), 7).tolist(),
        "none": np.round(none_probability(found), 4).tolist(),
        "C": np.round(found.outputs[:, :, GROUPS.index("all"), QUANTITIES.index("C")] / samples, 4).tolist(),
        "top1": np.round(right, 4).tolist(),
        "measures": {name: float(f"{value:.4g}") for name, value in measures(found).items() if np.isfinite(value)},
        "patterns": {name: function(found).seen for name, function in patterns.items()},
        "tables": {
            "cost": (-whole[which]).tolist(),
            "cost, first half": (-half[which]).tolist(),
        },
        "probabilities": found.probabilities[:, 0].tolist(),
    }


def _operation_costs(found: CellSearchResult, records: slice) -> np.ndarray:
    """(2, edges, ops) mean costs of batches in which an operation was measured, over the cells; `none` has 0."""
    total, _, count = np.moveaxis(found.costs[records].sum(0), 1, 0)
    return (total / np.maximum(count, 1)).mean(1)


def search_norms(args: argparse.Namespace, entry: Entry, seed: int) -> Found:
    """Every operation has a BatchNorm of its own, a skip too; BatchNorms and classifier train on uniform random cells.

    The convolutions keep their random weights. A candidate's indicators are the mean |gamma| of its BatchNorms over the
    cells after training, the mean of (gamma dL/dgamma)^2 through training (`fisher`), and the mean norm of dL/dbeta
    before training (`beta`). `none` has 0. The largest |gamma| of every edge is chosen.
    """
    space, epochs = entry.space, args.epochs or entry.epochs
    first, _ = loaders(args, entry, seed)
    net = norm_supernet(space, seed=seed)
    parameters = [p for p in net.parameters() if p.requires_grad]
    batches, generator = endless(first), torch.Generator().manual_seed(seed)
    draw = make_estimator("uniform")
    sums = {name: torch.zeros(2, *net.gate_shape[1:], dtype=torch.float64) for name in ("fisher", "beta")}
    steps, before = epochs * len(first), min(50, epochs * len(first))

    def backward(name: str) -> None:
        drawn = draw.draw(uniform_logits(space), generator, 0.0)
        x, y = next(batches)
        gates = drawn.gates.to(x).repeat(space.cells, 1, 1)
        for parameter in parameters:
            parameter.grad = None
        F.cross_entropy(net(x, gates, drawn.runs), y).backward()
        for e, (k,) in enumerate(drawn.runs[0]):
            sums[name][:, e, k] += torch.tensor([_moment(name, net, e, k), 1.0])

    for _ in range(before):
        backward("beta")
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, steps)
    for _ in range(steps):
        backward("fisher")
        sgd.step()
        cosine.step()
    gamma = torch.zeros(net.gate_shape[1:], dtype=torch.float64)
    for e, k in np.ndindex(tuple(gamma.shape)):
        gamma[e, k] = _moment("gamma", net, e, k)
    tables = {name: plain(total / count.clamp(min=1)) for name, (total, count) in sums.items()}
    more = {"logits": plain(gamma), "tables": tables, "steps": steps, "steps_before": before}
    return derive(space, gamma[None], "argmax"), {**more, "settings": {"epochs": epochs}}


def norm_supernet(space: CellSpace, *, seed: int) -> CellSupernet:
    """A supernet whose operations all end in a BatchNorm with scale and shift; only these and the classifier train."""
    net = CellSupernet(space.replace(pool_norm=True), fused=False, seed=seed)
    for i, cell in enumerate(net.cells):
        for edge in cell.edges:
            if isinstance(edge, nn.ModuleDict):
                edge[SKIP_CONNECT] = Operation(
                    nn.Identity(), nn.BatchNorm2d(space.channels_of(i), track_running_stats=False)
                )
    norms = {p for module in net.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()}
    for parameter in net.parameters():
        parameter.requires_grad_(parameter in norms)
    net.classifier.requires_grad_(True)
    return net


def _moment(name: str, net: CellSupernet, edge: int, column: int) -> float:
    """Mean over the cells of a statistic of the BatchNorms behind one candidate; 0 for `none`."""
    found = []
    for cell in net.cells:
        operation = cell.operation(edge, column)
        norm = None if operation is None else operation.norm
        if norm is None:
            return 0.0
        scale, shift = norm.weight, norm.bias
        if name == "gamma":
            found.append(scale.detach().abs().mean())
        elif shift.grad is None or scale.grad is None:  # nothing that leaves the candidate reaches the output
            found.append(torch.zeros(()))
        elif name == "beta":
            found.append(shift.grad.norm())
        else:
            found.append((scale.detach() * scale.grad).square().sum())
    return float(torch.stack(found).mean())


def search_score(args: argparse.Namespace, entry: Entry, seed: int) -> Found:
    """The cell with the highest score among random cells, each as an untrained network on the same batch.

    A baseline of `nasfast rank` needs neither networks nor images.
    """
    space, rng, changes = entry.space, np.random.default_rng(seed), dict(entry.changes)
    archs: dict[Arch, None] = {}
    while len(archs) < args.candidates:
        archs[space.random(rng)] = None
    settings = {"score": entry.score, **changes}
    if entry.score in BASELINES:
        scores = dict(zip(archs, structure_scores(space, entry.score, archs), strict=True))
        return max(archs, key=scores.__getitem__), {"scored": scores, "settings": settings}
    x, y = next(iter(loaders(args, entry, seed)[0].epoch(0)))
    if changes.get("labels") == "random":
        y = random_labels(len(y), space.num_classes, seed=derive_seed(seed, NASI_LABELS))
    if changes.get("images") == "random":
        x = random_images(x.shape, seed=derive_seed(seed, NASI_IMAGES))
    evidence = NetworkEvidence(space, [(x, y)], seed=seed)
    parts, failed = zip(*(score_networks(name, evidence, archs) for _, name in parts_of(entry.score)), strict=True)
    scores = summed(entry.score, parts, set().union(*failed))
    return max(archs, key=scores.__getitem__), {"scored": scores, "settings": settings}


def search_random(args: argparse.Namespace, entry: Entry, seed: int) -> Found:
    """Train random cells for a short time until the CPU seconds are spent; the best on the other half is chosen.

    All cells learn from the same images, a few, because so more cells can be tried.
    """
    space, rng, start = entry.space, np.random.default_rng(seed), time.process_time()
    first, second = loaders(args, entry, seed)
    tried: dict[Arch, float] = {}
    while not tried or time.process_time() - start < args.seconds:
        arch = space.random(rng)
        if arch not in tried:
            network = untrained(space, arch, seed=derive_seed(seed, len(tried)))
            tried[arch] = short_accuracy(network, first, second, **dict(entry.changes))
    best = max(tried, key=tried.__getitem__)
    settings = {**dict(entry.changes), "batch": entry.batch, "seconds": args.seconds}
    return best, {"best": tried[best], "scored": tried, "settings": settings}


def short_accuracy(network: nn.Module, train: Loader, held: Loader, *, steps: int, held_out: int) -> float:
    """Top-1 in [0, 1] on `held_out` batches after at most `steps` steps of SGD with a cosine to 0, within one epoch."""
    sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, min(steps, len(train)))
    for x, y in islice(train.epoch(0), steps):
        sgd.zero_grad()
        F.cross_entropy(network(x), y).backward()
        sgd.step()
        cosine.step()
    network.eval()
    right = count = 0
    with torch.no_grad():
        for x, y in islice(held.epoch(0), held_out):
            right += int((network(x).argmax(1) == y).sum())
            count += len(y)
    return right / count


SEARCHES = {
    "nasi": search_nasi,
    "gradient": search_gradient,
    "norms": search_norms,
    "score": search_score,
    "random": search_random,
}


def operations(space: CellSpace, arch: Arch) -> list[int]:
    """How many skip connections and removed edges a cell has."""
    ops = [space.ops[k] for k in arch]
    return [ops.count(SKIP_CONNECT), ops.count(NONE)]


def plain(values: Tensor) -> Any:
    """Numbers of six digits for a row."""
    return [float(f"{v:.6g}") for v in values.tolist()] if values.ndim == 1 else [plain(row) for row in values]
