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
from torch.nn import functional as F

from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.costs import NONE
from nasfast.research.cells.space import CellSpace
from nasfast.seeds import derive_seed

# random stream (`nasfast.seeds`), followed by the step and by what the gates are drawn for
_GATES = 2
FOR_LOGITS, FOR_WEIGHTS = 0, 1
"""What the gates of a step are drawn for: the held-out batch that logits learn from, or the training batch."""


@dataclass(frozen=True)
class Draw:
    """The gates of one step.

    Attributes:
        gates: (types, edges, ops) factors of the operations' outputs.
        runs: (types, edges, ops) bool: the operations that are computed.
        measures: (types, edges, ops) bool: those whose cost is needed although they do not run.
        weights: (types, edges, ops) the relaxed gates or the probabilities, which the gradient needs.
        temperature: temperature of the relaxation.
    """

    gates: Tensor
    runs: Tensor
    measures: Tensor
    weights: Tensor
    temperature: float = 1.0


def softmax_gradient(weights: Tensor, cost: Tensor, temperature: float = 1.0) -> Tensor:
    """Jacobian of `weights = softmax(a / temperature)` applied to `cost`, over the last dimension."""
    return weights * (cost - (weights * cost).sum(-1, keepdim=True)) / temperature


def gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard Gumbel numbers, float64."""
    # an exponential number is -log U, and never 0
    return -torch.empty(tuple(shape), dtype=torch.float64).exponential_(generator=generator).log()


def uniform_logits(space: CellSpace) -> Tensor:
    """(types, edges, ops) 0 for every candidate, -inf elsewhere."""
    logits = torch.full((len(space.types), len(space.cell.edges), len(space.ops)), -torch.inf, dtype=torch.float64)
    for e, columns in enumerate(space.candidates):
        logits[:, e, list(columns)] = 0
    return logits


# Largest magnitude of an edge's cost, and largest norm of the gradient of all logits, in DSNAS.
_CLAMP, _CLIP = 5.0, 10.0
_MAX_DRAWS = 1000


def draw_once(cfg: CellSearchConfig, logits: Tensor, generator: torch.Generator, progress: float) -> Draw:
    """The gates of a step.

    `darts` (arXiv 1806.09055) and `snas` (1812.09926) run and mix every operation; the temperature of SNAS falls
    linearly. `dsnas` (2002.09128) and `proxyless` (1812.00332) run one operation per edge, and proxyless measures the
    others too, or with `two_path` one other. `uniform` draws like dsnas, from logits that stay 0, and learns nothing.

    Args:
        logits: (types, edges, ops), -inf where an edge has no such candidate.
        generator: draws noise and operations.
        progress: share of the search that is done, in [0, 1].
    """
    allowed = logits > -torch.inf
    nothing = torch.zeros_like(allowed)
    if cfg.method in ("darts", "snas"):
        t, noisy = cfg.temperature, logits.double()
        if cfg.method == "snas":
            t += (cfg.final_temperature - cfg.temperature) * progress
            noisy = noisy + gumbel(logits.shape, generator).to(logits.device)
        gates = torch.softmax(noisy / t, -1)
        return Draw(gates, allowed, nothing, gates, t)
    p = torch.softmax(logits.double(), -1)
    if cfg.two_path:
        return _draw_pair(p, generator)
    # on the CPU, so that every device draws the same
    rows = torch.softmax(logits.cpu().double(), -1).flatten(0, 1)
    index = torch.multinomial(rows, 1, generator=generator).view(p.shape[:2]).to(logits.device)
    gates = F.one_hot(index, logits.shape[-1]).double()
    return Draw(gates, gates > 0, allowed & (gates == 0) if cfg.method == "proxyless" else nothing, p)


def draw_gates(
    space: CellSpace, cfg: CellSearchConfig, logits: Tensor, *, step: int, progress: float, purpose: int = FOR_LOGITS
) -> Draw:
    """The gates of a step, see `draw_once`; they depend on the seed, the step and the purpose alone.

    `purpose` is `FOR_LOGITS` or `FOR_WEIGHTS`.
    """
    generator = torch.Generator().manual_seed(derive_seed(cfg.seed, _GATES, step, purpose))
    for _ in range(_MAX_DRAWS):
        draw = draw_once(cfg, logits, generator, progress)
        live = draw.runs[..., [op != NONE for op in space.ops]].any(-1)
        if not cfg.redraw or all(live[:, list(space.cell.into(node))].any(1).all() for node in space.cell.outputs):
            return draw
    raise RuntimeError(
        f"redraw: in each of {_MAX_DRAWS} draws some output node had no operation but None; the architecture has "
        "collapsed, or the cell has no such operation: search without redraw"
    )


def logits_gradient(cfg: CellSearchConfig, draw: Draw, cost: Tensor) -> Tensor:
    """Gradient by the logits from local costs (types, edges, ops), which are 0 where nothing was measured."""
    if cfg.method in ("dsnas", "uniform"):
        edge_cost = (draw.gates * cost).sum(-1, keepdim=True).clamp(-_CLAMP, _CLAMP)
        gradient = (draw.gates - draw.weights) * edge_cost
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


def _draw_pair(p: Tensor, generator: torch.Generator) -> Draw:
    """Two operations per edge drawn by p, one of which runs; the weights are their share of the probability."""
    rows = p.flatten(0, 1).cpu()
    weights, gates = torch.zeros_like(rows), torch.zeros_like(rows)
    for row, shares, gate in zip(rows, weights, gates, strict=True):
        # an edge with all its probability on one operation has no second one to draw
        pair = torch.multinomial(row, min(2, int((row > 0).sum())), generator=generator)
        shares[pair] = row[pair] / row[pair].sum()
        gate[pair[torch.multinomial(shares[pair], 1, generator=generator)]] = 1
    weights, gates = (rows.view(p.shape).to(p.device) for rows in (weights, gates))
    return Draw(gates, gates > 0, (weights > 0) & (gates == 0), weights)
