"""Local costs: what is recorded about a step, and means by cell, edge and operation with their standard errors.

C = L - H of the last cell's output is theorem 2 of arXiv 2009.01272; `studies.theorems` checks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUPS = ("all", "correct", "wrong")
"""Groups of samples with means of their own, by whether the network classifies them correctly."""

QUANTITIES = ("C", "L", "H", "count")


def sample_costs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output cost, loss and entropy of every sample (section 4.2).

    c_b = -Y[b, n_b] + sum_k pi[b, k] Y[b, k] = l_b - h_b with pi = softmax(Y).

    Args:
        logits: (N, classes) Y.
        labels: (N,).

    Returns:
        c, l and h, (N,) in nats, in the type of the logits.
    """
    log_pi = torch.log_softmax(logits, 1)
    loss = -log_pi.gather(1, labels[:, None])[:, 0]
    entropy = -(log_pi.exp() * log_pi).sum(1)
    cost = (log_pi.exp() * logits).sum(1) - logits.gather(1, labels[:, None])[:, 0]
    return cost, loss, entropy


def grouped_costs(logits: Tensor, labels: Tensor) -> Tensor:
    """(groups, quantities) sums of C, L and H over samples, and numbers of samples; see GROUPS and QUANTITIES."""
    logits = logits.detach().double()
    values = torch.stack([*sample_costs(logits, labels), torch.ones_like(logits[:, 0])], 1)
    right = logits.argmax(1) == labels
    return torch.stack([values.sum(0), values[right].sum(0), values[~right].sum(0)]).cpu()


@dataclass
class LocalCosts:
    """Sums of local costs, (cells, edges, ops) each, over the batches in which an operation was measured.

    Attributes:
        total, squares, count: sum of C, sum of C^2, and number of batches.
    """

    total: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def empty(cls, shape: Iterable[int]) -> LocalCosts:
        """A table without any batch, float64."""
        return cls(*torch.zeros(3, *shape, dtype=torch.float64).unbind())

    def add(self, cost: Tensor, measured: Tensor) -> None:
        """Add one batch.

        Args:
            cost: (cells, edges, ops).
            measured: (cells, edges, ops) bool: which of the costs were measured.
        """
        cost, measured = cost.detach().double().to(self.total.device), measured.to(self.total.device)
        values = torch.where(measured, cost, 0.0)
        self.total += values
        self.squares += values**2
        self.count += measured

    @property
    def mean(self) -> Tensor:
        """Mean cost; nan where nothing was measured."""
        return self.total / self.count

    @property
    def error(self) -> Tensor:
        """Standard error of the mean; nan where fewer than two batches were measured."""
        variance = (self.squares - self.total**2 / self.count) / (self.count - 1)
        return torch.where(self.count > 1, (variance.clamp(min=0) / self.count).sqrt(), torch.nan)

    def positive(self, columns: Iterable[int]) -> float:
        """Share of the measured means above 0 in the given columns of operations; nan if nothing was measured."""
        mean = self.mean[..., list(columns)]
        mean = mean[torch.isfinite(mean)]
        return float((mean > 0).double().mean()) if len(mean) else float("nan")
