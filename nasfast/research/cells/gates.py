"""The four differentiable estimators: how each draws the gates of a step, and its gradient from the local costs.

All four update the logits a of an edge from the local costs c_k = dL/dZ_k = <dL/dX_target, O_k(X_source)> alone (arXiv
2009.01272, section 4). They differ only in the gates Z. With p = softmax(a):

    DARTS, SNAS     Z = softmax(a / t), softmax((a + G) / t)    dL/da_m = Z_m (c_m - sum_k Z_k c_k) / t
    DSNAS           Z one-hot, s ~ p; C = c_s                   dL/da_m = (1[m = s] - p_m) C
    ProxylessNAS    Z one-hot, s ~ p                            dL/da_m = p_m (c_m - sum_k p_k c_k)

Where cells share an architecture, c is the sum over these cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.space import CellSpace

Columns = list[list[tuple[int, ...]]]
"""Columns of operations, by type of cell and then by edge."""


@dataclass(frozen=True)
class Draw:
    """The gates of one step.

    Attributes:
        gates: (types, edges, ops) factors of the operations' outputs.
        runs: the columns that are computed.
        measures: the columns whose cost is needed although they do not run.
        weights: (types, edges, ops) the relaxed gates or the probabilities, which the gradient needs.
        temperature: temperature of the relaxation.
    """

    gates: Tensor
    runs: Columns
    measures: Columns
    weights: Tensor
    temperature: float = 1.0


def softmax_gradient(weights: Tensor, cost: Tensor, temperature: float = 1.0) -> Tensor:
    """Jacobian of `weights = softmax(a / temperature)` applied to `cost`, over the last dimension."""
    return weights * (cost - (weights * cost).sum(-1, keepdim=True)) / temperature


def gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard Gumbel numbers, float64."""
    # an exponential number is -log U, and never 0
    return -torch.empty(tuple(shape), dtype=torch.float64).exponential_(generator=generator).log()


def candidates_of(logits: Tensor) -> Columns:
    """The columns of the candidates of every edge."""
    return [[tuple(torch.nonzero(row > -torch.inf).flatten().tolist()) for row in kind] for kind in logits.cpu()]


def uniform_logits(space: CellSpace) -> Tensor:
    """(types, edges, ops) 0 for every candidate, -inf elsewhere."""
    logits = torch.full((len(space.types), len(space.cell.edges), len(space.ops)), -torch.inf, dtype=torch.float64)
    for e, columns in enumerate(space.candidates):
        logits[:, e, list(columns)] = 0
    return logits


def one_hot(index: Tensor, columns: int) -> tuple[Tensor, Columns]:
    """Gates that choose one operation per edge, and the columns that run."""
    gates = torch.nn.functional.one_hot(index, columns).double()
    return gates, [[(k,) for k in row] for row in index.tolist()]


# Largest magnitude of an edge's cost, and largest norm of the gradient of all logits, in DSNAS.
_CLAMP, _CLIP = 5.0, 10.0


def draw_once(cfg: CellSearchConfig, logits: Tensor, generator: torch.Generator, progress: float) -> Draw:
    """The gates of a step.

    `darts` (arXiv 1806.09055) and `snas` (1812.09926) run and mix every operation; the temperature of SNAS falls
    linearly. `dsnas` (2002.09128) and `proxyless` (1812.00332) run one operation per edge, and proxyless measures the
    others too, or with `two_path` one other. `uniform` draws like dsnas, from logits that stay 0, and learns nothing.

    Args:
        cfg: the settings of the search.
        logits: (types, edges, ops), -inf where an edge has no such candidate.
        generator: draws noise and operations.
        progress: share of the search that is done, in [0, 1].
    """
    nothing: Columns = [[()] * logits.shape[1] for _ in range(len(logits))]
    if cfg.method in ("darts", "snas"):
        t, noisy = cfg.temperature, logits.double()
        if cfg.method == "snas":
            t += (cfg.final_temperature - cfg.temperature) * progress
            noisy = noisy + gumbel(logits.shape, generator).to(logits.device)
        gates = torch.softmax(noisy / t, -1)
        return Draw(gates, candidates_of(logits), nothing, gates, t)
    p = torch.softmax(logits.double(), -1)
    if cfg.two_path:
        return _pair(logits, p, generator)
    # on the CPU, so that every device draws the same
    rows = torch.softmax(logits.cpu().double(), -1).flatten(0, 1)
    gates, runs = one_hot(torch.multinomial(rows, 1, generator=generator).view(p.shape[:2]), logits.shape[-1])
    others = [
        [tuple(k for k in columns if k not in run) for columns, run in zip(*pair, strict=True)]
        for pair in zip(candidates_of(logits), runs, strict=True)
    ]
    return Draw(gates.to(logits.device), runs, others if cfg.method == "proxyless" else nothing, p)


def logits_gradient(cfg: CellSearchConfig, draw: Draw, cost: Tensor) -> Tensor:
    """Gradient by the logits from local costs (types, edges, ops), which are 0 where nothing was measured."""
    if cfg.method in ("dsnas", "uniform"):
        of_edge = (draw.gates * cost).sum(-1, keepdim=True).clamp(-_CLAMP, _CLAMP)
        gradient = (draw.gates - draw.weights) * of_edge
        return gradient * (_CLIP / gradient.norm()).clamp(max=1)
    return softmax_gradient(draw.weights, cost, draw.temperature)


def keep_pair_share(before: Tensor, after: Tensor, draw: Draw) -> Tensor:
    """The logits after a step of two paths, which moves probability between the drawn pair alone.

    Args:
        before, after: (types, edges, ops) logits before and after the optimiser's step.
        draw: the gates of the step.
    """
    pair = draw.weights > 0
    # the pair keeps its share of the probability, and momentum must not move what was not drawn
    mass = [torch.logsumexp(a.masked_fill(~pair, -torch.inf), -1, keepdim=True) for a in (before, after)]
    return torch.where(pair, after + (mass[0] - mass[1]), before)


def _pair(logits: Tensor, p: Tensor, generator: torch.Generator) -> Draw:
    """Two operations per edge drawn by p, one of which runs; the weights are their share of the probability."""
    weights, others = torch.zeros_like(p), list[list[tuple[int, ...]]]()
    index: list[list[int]] = []
    for t, kind in enumerate(candidates_of(logits)):
        index.append([])
        others.append([])
        for e, columns in enumerate(kind):
            row = p[t, e].cpu()
            # an edge with all its probability on one operation has no second one to draw
            count = min(2, len(columns), int((row > 0).sum()))
            pair = torch.multinomial(row, count, generator=generator).tolist()
            of_pair = row[pair] / row[pair].sum()
            weights[t, e, pair] = of_pair.to(weights.device)
            chosen = pair[int(torch.multinomial(of_pair, 1, generator=generator))]
            index[t].append(chosen)
            others[t].append(tuple(k for k in pair if k != chosen))
    gates, runs = one_hot(torch.tensor(index), logits.shape[-1])
    return Draw(gates.to(logits.device), runs, others, weights)
