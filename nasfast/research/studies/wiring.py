"""Wiring: which edges differentiable search keeps, and why (Xie et al., arXiv 2009.01272).

One number is behind DARTS, SNAS, DSNAS and ProxylessNAS, the local cost of an edge C = <dL/dX, X>, the gradient of its
gate; None costs 0. Claimed (sections 5 and 6), and what shows it here on noisy crops of ten prototypes:

    P1 growing      None leads first; when the cost of the last cell turns negative, operations come back
    P2 width        intermediate edges, which are trained less, cost more and are dropped. Control for this cause
                    (figures 8 and 9): if the input edge in front of it is fixed, an intermediate edge costs least
    P3 collapse     where the architecture learns from held-out images, whose loss grows with wrong answers while
                    their entropy does not (C = L - H), the cost stays positive and every edge becomes None

P2 and P3 are in `wiring_width` and `wiring_collapse`. Pass marks belong to DSNAS; of other methods the signs are
judged. docs/wiring.md says what holds.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from scipy import stats

from nasfast.report.plots import GREY, SERIES, new_figure
from nasfast.report.style import INK
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.costs import NONE
from nasfast.research.cells.derive import derivations
from nasfast.research.cells.probe import GROUPS
from nasfast.research.cells.prototypes import CLASSES, SIZE, DrawnBatches, prototypes
from nasfast.research.cells.search import SEARCH, TRAIN, CellSearchResult, search_cells
from nasfast.research.cells.space import Cell, CellSpace, darts_cell
from nasfast.research.studies.commands import PatternConfig, WiringConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.runtime.device import torch_device
from nasfast.runtime.progress import Progress
from nasfast.settings import TrainConfig


@dataclass(frozen=True)
class Setup:
    """Sizes of one cell, its synthetic images (as many are held out), and the steps and records of its search."""

    channels: int
    samples: int
    noise: float
    lr: float
    steps: int
    records: int
    batch: int = 64


PATTERN = Setup(channels=6, samples=400, noise=4.0, lr=0.4, steps=1500, records=75)
STEPS_PER_EPOCH = 100
ALPHA_LR = 0.02
WINDOWS = 15
"""Parts of a run over which costs are averaged. Probabilities do not scatter and are shown at every record."""
METHODS = {"darts": "DARTS", "snas": "SNAS", "dsnas": "DSNAS", "proxyless": "ProxylessNAS"}
Runs = dict[int, CellSearchResult]
"""Seed -> its search."""


def growing(cfg: PatternConfig, notes: Notebook) -> None:
    """P1: one DARTS cell, one level."""
    runs = searched("growing", cfg, notes)
    for seed, m in judged("growing", cfg, notes, runs, _growing_signs):
        notes.mark(f"seed {seed}: C of the first part", m["C_first"], at_least=0)
        notes.mark(f"seed {seed}: C of the last part", m["C_last"], at_most=0)
        notes.mark(f"seed {seed}: peak of q of input edges", m["q_in_peak"], at_least=0.13, at_most=1)
        notes.mark(f"seed {seed}: q of input edges at the end", m["q_in_end"], at_least=0, at_most=0.06)
        notes.mark(f"seed {seed}: input edges kept", m["kept_in"], at_least=m["n_in"])
    edge_figure(f"seed {cfg.seed}: costs of the edges (figure 7)", runs[cfg.seed], notes)
    output_figure(f"seed {cfg.seed}: C = L - H", runs[cfg.seed], notes)


def _growing_signs(m: Mapping[str, float]) -> dict[str, bool]:
    return {
        "C turns from positive to negative": m["C_first"] > 0 > m["C_last"],
        "None gains at first": m["q_in_peak"] > 1.02 * m["q_in_start"],
        "and loses in the end": m["q_in_end"] < m["q_in_start"],
        "fewer costs are positive": m["positive_last"] < m["positive_first"],
    }


# --- searches -----------------------------------------------------------------------------------------------------


def how(cfg: PatternConfig, *, bilevel: bool = False) -> CellSearchConfig:
    return CellSearchConfig(method=cfg.method, bilevel=bilevel, alpha_lr=ALPHA_LR, records=PATTERN.records)


def searches(
    name: str, cfg: WiringConfig, setup: Setup, space: CellSpace, how: CellSearchConfig, out: Path | None
) -> Runs:
    """A search of every seed, each in a folder `NAME-sSEED` of `out`, where it continues if it was stopped."""
    runs = {}
    for seed in range(cfg.seed, cfg.seed + cfg.seeds):
        train, held_out = batches(setup, seed)
        epochs = max(1, round(setup.steps / len(train)))
        weights = TrainConfig(
            epochs=epochs, lr=setup.lr, lr_end=1e-3, weight_decay=3e-4, label_smoothing=0.0, clip_norm=5.0
        )
        folder = tempfile.TemporaryDirectory() if out is None else nullcontext(out / f"{name}-s{seed}")
        with folder as run_dir, Progress(f"{name}, seed {seed}", epochs * len(train)) as progress:
            runs[seed] = search_cells(
                space,
                train,
                how.replace(seed=seed),
                weights,
                held_out=held_out if how.bilevel else None,
                run_dir=run_dir,
                resume=True,
                device=str(torch_device(cfg.device)),
                settings={"data": {"samples": setup.samples, "noise": setup.noise, "batch": setup.batch}},
                progress=progress.update,
            )
    return runs


def batches(setup: Setup, seed: int) -> Iterator[DrawnBatches]:
    """Batches for the weights, and held-out ones for the architecture."""
    steps, parts = min(STEPS_PER_EPOCH, setup.steps), prototypes(setup.noise, setup.samples, setup.samples, seed=seed)
    return (DrawnBatches(*part, steps=steps, batch=setup.batch, seed=2 * seed + i) for i, part in enumerate(parts))


def one_cell(cell: Cell, setup: Setup) -> CellSpace:
    """The network of one cell for the prototypes."""
    return CellSpace("one cell", cell, cells=1, channels=setup.channels, resolution=SIZE, num_classes=CLASSES)


SPACE = one_cell(darts_cell(), PATTERN)


def searched(pattern: str, cfg: PatternConfig, notes: Notebook, *, bilevel: bool = False) -> Runs:
    """The searches of a pattern, with their tables and figures."""
    notes.say(f"Wiring, {pattern}: {METHODS[cfg.method]} on one DARTS cell, {PATTERN.channels} channels.")
    notes.say(
        "C = L - H is the cost of the last cell (loss minus entropy of the predictions), q the probability of None."
    )
    name = f"{cfg.method}-bilevel" if bilevel else cfg.method
    runs = searches(name, cfg, PATTERN, SPACE, how(cfg, bilevel=bilevel), notes.out)
    measures_table(f"{pattern}, by seed", runs, notes)
    _cells_table(runs, notes)
    _pattern_figure(pattern, runs, notes)
    _probability_figure(f"seed {cfg.seed}: probabilities of the candidates", runs[cfg.seed], notes)
    return runs


def judged(
    pattern: str,
    cfg: PatternConfig,
    notes: Notebook,
    runs: Runs,
    signs: Callable[[Mapping[str, float]], dict[str, bool]],
) -> list[tuple[int, dict[str, float]]]:
    """Say of every seed whether the pattern is seen; seeds and measures for the pass marks, where these apply."""
    measured = {seed: measures(run) for seed, run in runs.items()}
    for seed, m in measured.items():
        missing = [sign for sign, seen in signs(m).items() if not seen]
        notes.say(f"Seed {seed}: " + (f"not seen: {', '.join(missing)}." if missing else f"{pattern}."))
    if cfg.method != "dsnas":
        notes.say("Pass marks belong to DSNAS: here signs are judged, thresholds are not.")
        return []
    return list(measured.items())


# --- what is read from the records of a search (section 6) --------------------------------------------------------


def live_operations(space: CellSpace) -> list[int]:
    """The indices of the operations other than None."""
    return [k for k, op in enumerate(space.ops) if op != NONE]


def none_probability(run: CellSearchResult) -> np.ndarray:
    """(records + 1, edges) probability of None."""
    return run.probabilities[..., run.space.ops.index(NONE)].mean(1)


def kept_edges(run: CellSearchResult) -> np.ndarray:
    """(records + 1, edges): whether the most probable operation is not None."""
    return (run.probabilities.argmax(-1) != run.space.ops.index(NONE)).mean(1)


def windows(records: np.ndarray) -> list[np.ndarray]:
    """Equal parts of the records of a run."""
    return np.array_split(records, min(WINDOWS, len(records)))


def _sums(records: np.ndarray) -> np.ndarray:
    return np.stack([part.sum(0) for part in windows(records)])


def output_costs(run: CellSearchResult, which: int = TRAIN) -> np.ndarray:
    """(windows,) mean C over all samples."""
    sums = _sums(run.outputs[:, which, GROUPS.index("all")])
    return sums[:, 0] / sums[:, -1]


def positive_share(run: CellSearchResult) -> np.ndarray:
    """(windows,) share of (cell, edge, operation) mean costs above 0, without None."""
    total, count = (_sums(run.costs[:, TRAIN, i][..., live_operations(run.space)]) for i in (0, 2))
    return (np.where(count > 0, total, 0) > 0).sum((1, 2, 3)) / (count > 0).sum((1, 2, 3))


def edge_means(run: CellSearchResult, records: slice = slice(None)) -> np.ndarray:
    """(edges,) mean cost over the batches in which an operation other than None ran, all cells together."""
    total, count = (run.costs[records, TRAIN, i][..., live_operations(run.space)].sum((0, 1, 3)) for i in (0, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count


def measures(run: CellSearchResult) -> dict[str, float]:
    """The numbers of one search: costs by part, and by kind of edges q of None and how many edges are kept."""
    cell, means, differences = run.space.cell, edge_means(run), []
    inner, q, kept = np.array(cell.intermediate), none_probability(run), kept_edges(run)
    for node in cell.inner:
        edges = np.array(cell.into(node))
        if inner[edges].any() and not inner[edges].all():
            differences.append(np.nanmean(means[edges[inner[edges]]]) - np.nanmean(means[edges[~inner[edges]]]))
    cost, positive = output_costs(run), positive_share(run)
    result = {"C_first": cost[0], "C_last": cost[-1], "positive_first": positive[0], "positive_last": positive[-1]}
    result["intermediate_minus_input_cost"] = np.mean(differences) if differences else math.nan
    for name, same in (("in", ~inner), ("int", inner)):
        mean = q[:, same].mean(1)
        result |= {f"q_{name}_start": mean[0], f"q_{name}_peak": mean.max(), f"q_{name}_end": mean[-1]}
        result |= {f"kept_{name}": kept[-1, same].sum(), f"n_{name}": same.sum()}
    if run.cfg.bilevel:
        held_out = output_costs(run, SEARCH)
        result |= {"search_C_first": held_out[0], "search_C_last": held_out[-1], "search_C_smallest": held_out.min()}
        result["search_minus_train_C"] = (held_out - cost).min()
    return {name: float(value) for name, value in result.items()}


# --- tables and figures -------------------------------------------------------------------------------------------


def measures_table(title: str, runs: Runs, notes: Notebook) -> None:
    """The measures of every seed, and their mean with its 95 % interval of Student's t."""
    by_seed, rows = [measures(run) for run in runs.values()], []
    for name in by_seed[0]:
        values = np.array([seed[name] for seed in by_seed])
        interval = "-"
        if len(values) > 1 and np.isfinite(values).all():
            half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
            interval = f"{values.mean():.3f} ± {half:.3f}"
        rows.append((name, *values, interval))
    notes.table(title, {"": "", **{f"seed {seed}": ".3f" for seed in runs}, "mean, 95 %": ""}, rows)


def _cells_table(runs: Runs, notes: Notebook) -> None:
    """The cells derived by argmax with None (the rule of SNAS, DSNAS and ProxylessNAS) and by DARTS's rule."""
    rows = []
    for seed, run in runs.items():
        for rule, arch in derivations(run.space, run.logits).items():
            ops = zip(run.space.cell.edges, (run.space.ops[k] for k in arch), strict=False)
            rows.append((f"seed {seed}", rule, " ".join(f"{edge.name}={op}" for edge, op in ops if op != NONE)))
    notes.table("cells derived; edges that are None are left out", {"": "", "rule": "", "operations": ""}, rows)


def lines(ax: Axes, steps: Any, curves: Sequence[np.ndarray], colour: str, label: str, ls: str = "-") -> None:
    """A thin line for each run and a bold one for their mean."""
    for values in curves:
        ax.plot(steps, values, color=colour, lw=0.8, ls=ls, alpha=0.45)
    if len(curves):
        mean = np.ma.masked_invalid(np.stack(curves)).mean(0).filled(np.nan)
        ax.plot(steps, mean, color=colour, label=label, lw=2.3, ls=ls)


def _pattern_figure(title: str, runs: Runs, notes: Notebook) -> None:
    """Costs by window, probabilities of None and edges kept by record."""
    results = list(runs.values())
    steps, records = [int(part[-1]) for part in windows(results[0].steps)], [0, *results[0].steps]
    inner = np.array(results[0].space.cell.intermediate)
    figure, (cost, none, kept, positive) = new_figure(11, 6.7, rows=2, columns=2)
    lines(cost, steps, [output_costs(run) for run in results], SERIES[2], "training images")
    held_out = [output_costs(run, SEARCH) for run in results if run.cfg.bilevel]
    lines(cost, steps, held_out, SERIES[3], "held-out images", "--")
    for name, colour, same in (("input edges", SERIES[0], ~inner), ("intermediate edges", SERIES[1], inner)):
        lines(none, records, [none_probability(run)[:, same].mean(1) for run in results], colour, name)
        lines(kept, records, [100 * kept_edges(run)[:, same].mean(1) for run in results], colour, name)
    lines(positive, steps, [100 * positive_share(run) for run in results], SERIES[2], "training images")
    cost.axhline(0, color=GREY, ls=":")
    cost.set(title="cost C of the last cell", ylabel="nats")
    none.set(title="mean probability of None", ylabel="q", ylim=(0, None))
    kept.set(title="edges kept: most probable is not None", xlabel="step", ylabel="%", ylim=(-4, 104))
    positive.set(title="costs above zero", xlabel="step", ylabel="% of edges and operations", ylim=(-4, 104))
    notes.figure(title, "Thin: one run each; bold: their mean.", figure)


def _probability_figure(title: str, run: CellSearchResult, notes: Notebook) -> None:
    """Figures 3 and 12 to 14."""
    space, p = run.space, run.probabilities[:, 0]
    columns = 5 if len(space.cell.edges) > 6 else 3
    rows = -(-len(space.cell.edges) // columns)
    figure, axes = new_figure(11, 0.5 + 2.1 * rows, rows=rows, columns=columns)
    for e, (ax, edge) in enumerate(zip(axes, space.cell.edges, strict=False)):
        for k in space.candidates[e]:
            none = space.ops[k] == NONE
            colour = INK if none else f"C{k}"
            ax.plot([0, *run.steps], p[:, e, k], color=colour, label=space.ops[k], lw=2.4 if none else 1.2)
        ax.set(title=edge.name, ylim=(0, min(1.02, 1.05 * p.max())))
        if space.cell.is_intermediate(edge):
            ax.set_facecolor("#fdf0e6")
    for ax in axes[len(space.cell.edges) :]:
        ax.remove()
    notes.figure(title, "By step and edge. Bold black: None. Shaded: edges between intermediate nodes.", figure)


def edge_figure(title: str, run: CellSearchResult, notes: Notebook) -> None:
    """Edge costs of the last cell and their sum, beside loss and accuracy (figures 7 and 10)."""
    figure, (each, total, learning) = new_figure(11, 7.7, rows=3)
    cost, count, inner = run.edge_costs[:, TRAIN, -1], run.outputs[:, TRAIN, :, -1], run.space.cell.intermediate
    for edge, intermediate, values in zip(run.space.cell.edges, inner, cost.T, strict=True):
        each.plot(run.steps, values, "--" if intermediate else "-", lw=1.2, label=edge.name)
    total.plot(run.steps, cost.sum(1), color=INK)
    learning.plot(run.steps, run.means(quantity="L"), label="loss (nats)")
    learning.plot(run.steps, count[:, GROUPS.index("correct")] / count[:, 0], color=SERIES[1], label="accuracy")
    for ax, name in ((each, "mean cost per edge"), (total, "sum over the edges"), (learning, "loss and accuracy")):
        ax.axhline(0, color=GREY, ls=":")
        ax.set(title=name)
    notes.figure(title, "By step. Dashed: intermediate edges.", figure)


def output_figure(title: str, run: CellSearchResult, notes: Notebook) -> None:
    """C, L and H of the output by group of samples (figure 10)."""
    figure, axes = new_figure(11, 4, columns=len(GROUPS))
    for ax, group in zip(axes, GROUPS, strict=True):
        for which, ls in ((TRAIN, "-"), (SEARCH, "--")) if run.cfg.bilevel else ((TRAIN, "-"),):
            for colour, quantity in zip(SERIES, "CLH", strict=False):
                label = quantity if which == TRAIN else None
                ax.plot(run.steps, run.means(which, group, quantity), ls, color=colour, label=label)
        ax.axhline(0, color=GREY, ls=":")
        ax.set(title=f"{group} samples", xlabel="step", ylabel="nats")
    notes.figure(title, "Cost, loss and entropy. Solid: training batches; dashed: held-out batches.", figure)
