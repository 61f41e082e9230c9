"""The four differentiable estimators: how each draws the gates of a step, and its gradient from the local costs.

All four update the logits a of an edge from the local costs c_k = dL/dZ_k = <dL/dX_target, O_k(X_source)> alone (arXiv
2009.01272, section 4). They differ only in the gates Z. With p = softmax(a):

    DARTS, SNAS     Z = softmax(a / t), softmax((a + G) / t)    dL/da_m = Z_m (c_m - sum_k Z_k c_k) / t
    DSNAS           Z one-hot, s ~ p; C = c_s                   dL/da_m = (1[m = s] - p_m) C
    ProxylessNAS    Z one-hot, s ~ p                            dL/da_m = p_m (c_m - sum_k p_k c_k)

Where cells share an architecture, c is the sum over these cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nasfast.config import nearest
from nasfast.research.cells.config import CellSearchConfig, Method
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


class Estimator(Protocol):
    """One method. Its `logits` are (types, edges, ops), -inf where an edge has no such candidate."""

    def draw(self, logits: Tensor, generator: torch.Generator, progress: float) -> Draw:
        """The gates of a step; `progress` in [0, 1) is the share of the search that is done."""
        ...

    def gradient(self, draw: Draw, cost: Tensor) -> Tensor:
        """Gradient by the logits from local costs (types, edges, ops), which are 0 where nothing was measured."""
        ...

    def updated(self, before: Tensor, after: Tensor, draw: Draw) -> Tensor:
        """The logits of the next step, after the optimiser has turned `before` into `after`."""
        ...


def softmax_gradient(weights: Tensor, cost: Tensor, temperature: float = 1.0) -> Tensor:
    """Jacobian of `weights = softmax(a / temperature)` applied to `cost`, over the last dimension."""
    return weights * (cost - (weights * cost).sum(-1, keepdim=True)) / temperature


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """(types, edges) columns, each drawn by the softmax of its row."""
    p = torch.softmax(logits.double(), -1)
    return torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(p.shape[:2])


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


def nothing(logits: Tensor) -> Columns:
    """No column on any edge."""
    return [[()] * logits.shape[1] for _ in range(len(logits))]


@dataclass(frozen=True)
class Darts:
    """Every operation runs, mixed by softmax(a / temperature) (arXiv 1806.09055)."""

    temperature: float = 1.0

    def draw(self, logits: Tensor, generator: torch.Generator, progress: float) -> Draw:
        gates = torch.softmax(logits.double() / self.temperature, -1)
        return Draw(gates, candidates_of(logits), nothing(logits), gates, self.temperature)

    def gradient(self, draw: Draw, cost: Tensor) -> Tensor:
        return softmax_gradient(draw.weights, cost, draw.temperature)

    def updated(self, before: Tensor, after: Tensor, draw: Draw) -> Tensor:
        return after


@dataclass(frozen=True)
class Snas(Darts):
    """Every operation runs, mixed by Gumbel-softmax; the temperature falls linearly to `final` (arXiv 1812.09926)."""

    final: float = 0.03

    def draw(self, logits: Tensor, generator: torch.Generator, progress: float) -> Draw:
        temperature = self.temperature + (self.final - self.temperature) * progress
        noisy = logits.double() + gumbel(logits.shape, generator).to(logits.device)
        gates = torch.softmax(noisy / temperature, -1)
        return Draw(gates, candidates_of(logits), nothing(logits), gates, temperature)


@dataclass(frozen=True)
class Dsnas:
    """One operation per edge runs; the gradient is the score function times its cost (arXiv 2002.09128).

    Attributes:
        clamp: largest magnitude of an edge's cost.
        clip: largest norm of the gradient of all logits.
    """

    clamp: float = 5.0
    clip: float = 10.0

    def draw(self, logits: Tensor, generator: torch.Generator, progress: float) -> Draw:
        gates, runs = one_hot(sample(logits.cpu(), generator), logits.shape[-1])
        return Draw(gates.to(logits.device), runs, nothing(logits), torch.softmax(logits.double(), -1))

    def gradient(self, draw: Draw, cost: Tensor) -> Tensor:
        of_edge = (draw.gates * cost).sum(-1, keepdim=True).clamp(-self.clamp, self.clamp)
        gradient = (draw.gates - draw.weights) * of_edge
        return gradient * (self.clip / gradient.norm()).clamp(max=1)

    def updated(self, before: Tensor, after: Tensor, draw: Draw) -> Tensor:
        return after


@dataclass(frozen=True)
class Proxyless:
    """One operation per edge runs, and the costs of the others are measured too (arXiv 1812.00332).

    Attributes:
        two_path: draw and measure only one other operation; the update moves probability between these two alone.
    """

    two_path: bool = False

    def draw(self, logits: Tensor, generator: torch.Generator, progress: float) -> Draw:
        p = torch.softmax(logits.double(), -1)
        if not self.two_path:
            gates, runs = one_hot(sample(logits.cpu(), generator), logits.shape[-1])
            others = [
                [tuple(k for k in columns if k not in run) for columns, run in zip(*pair, strict=True)]
                for pair in zip(candidates_of(logits), runs, strict=True)
            ]
            return Draw(gates.to(logits.device), runs, others, p)
        weights, others = torch.zeros_like(p), []
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

    def gradient(self, draw: Draw, cost: Tensor) -> Tensor:
        return softmax_gradient(draw.weights, cost)

    def updated(self, before: Tensor, after: Tensor, draw: Draw) -> Tensor:
        if not self.two_path:
            return after
        pair = draw.weights > 0
        # the pair keeps its share of the probability, and momentum must not move what was not drawn
        mass = [torch.logsumexp(a.masked_fill(~pair, -torch.inf), -1, keepdim=True) for a in (before, after)]
        return torch.where(pair, after + (mass[0] - mass[1]), before)


_ESTIMATORS: dict[Method, Callable[[float, float, bool], Estimator]] = {
    "darts": lambda temperature, final, two_path: Darts(temperature),
    "snas": lambda temperature, final, two_path: Snas(temperature, final),
    "dsnas": lambda temperature, final, two_path: Dsnas(),
    "proxyless": lambda temperature, final, two_path: Proxyless(two_path),
    # it draws like DSNAS, from logits that stay 0, and learns nothing
    "uniform": lambda temperature, final, two_path: Dsnas(),
}


def make_estimator(
    method: Method, *, temperature: float = 1.0, final_temperature: float = 0.03, two_path: bool = False
) -> Estimator:
    """The estimator of a method.

    Args:
        method: its name.
        temperature: temperature of DARTS's softmax; where SNAS's begins.
        final_temperature: where SNAS's ends.
        two_path: whether ProxylessNAS measures one other operation instead of all.

    Raises:
        ValueError: unknown method.
    """
    if method not in _ESTIMATORS:
        raise ValueError(f"unknown method {method!r}; {nearest(method, _ESTIMATORS)}")
    return _ESTIMATORS[method](temperature, final_temperature, two_path)


def estimator_of(cfg: CellSearchConfig) -> Estimator:
    """How the gates of a search are drawn, and what becomes of the local costs."""
    return make_estimator(
        cfg.method, temperature=cfg.temperature, final_temperature=cfg.final_temperature, two_path=cfg.two_path
    )
