"""What the probe computes of samples and records of batches, against loops and NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from nasfast.research.cells.probe import GROUPS, QUANTITIES, LocalCosts, grouped_costs, sample_costs


def logits_and_labels(count: int = 50, classes: int = 7, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    logits = scale * torch.randn(count, classes)
    # half of them right
    labels = torch.where(torch.arange(count) % 2 == 0, logits.argmax(1), torch.randint(classes, (count,)))
    return logits, labels


def by_hand(row: list[float], label: int) -> tuple[float, float, float]:
    """c, l and h of one sample."""
    total = sum(math.exp(y) for y in row)
    pi = [math.exp(y) / total for y in row]
    cost = -row[label] + sum(p * y for p, y in zip(pi, row, strict=True))
    return cost, -math.log(pi[label]), -sum(p * math.log(p) for p in pi)


def test_costs_of_large_logits():
    """Logits at which exp would overflow; a class of probability 0 adds nothing to the entropy."""
    cost, loss, entropy = sample_costs(torch.tensor([[1000.0, 0.0, -1000.0]]), torch.tensor([1]))
    assert (cost.item(), loss.item(), entropy.item()) == (1000.0, 1000.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_costs_are_a_loop(dtype):
    logits, labels = logits_and_labels()
    logits = logits.to(dtype).requires_grad_()
    want = np.zeros((3, 4))
    for row, label in zip(logits.double().tolist(), labels.tolist(), strict=True):
        values = [*by_hand(row, label), 1.0]
        want[GROUPS.index("all")] += values
        want[GROUPS.index("correct" if max(row) == row[label] else "wrong")] += values
    got = grouped_costs(logits, labels)
    assert got.dtype == torch.float64
    assert not got.requires_grad
    np.testing.assert_allclose(got.numpy(), want, atol=1e-10)
    assert 10 < want[1, QUANTITIES.index("count")] < 40


def test_tables_are_those_of_numpy():
    rng = np.random.default_rng(0)
    values = rng.normal(-0.2, 1.0, (30, 2, 3, 4))
    values[rng.random(values.shape) < 0.4] = np.nan
    values[:, 0, 0, 1] = np.nan  # never measured
    values[1:, 0, 0, 2] = np.nan  # measured once
    values[:2, 0, 0, 2] = -1.5, np.nan
    values[:, 1, 2, 3] = 0.7  # the error of equal costs is not the root of a negative rounding error
    table = LocalCosts.empty((2, 3, 4))
    for batch in values:
        # costs that were not measured are ignored
        table.add(torch.tensor(batch), torch.tensor(~np.isnan(batch)))
    count = (~np.isnan(values)).sum(0)
    with np.errstate(invalid="ignore"):
        mean = np.nansum(values, 0) / count
        error = np.where(count > 1, np.sqrt(np.nansum((values - mean) ** 2, 0) / (count - 1) / count), np.nan)
    np.testing.assert_array_equal(table.count.numpy(), count)
    np.testing.assert_allclose(table.mean.numpy(), mean)
    np.testing.assert_allclose(table.error.numpy(), error, atol=1e-8)
    known = mean[..., 1:3][count[..., 1:3] > 0]
    assert table.positive((1, 2)) == pytest.approx((known > 0).mean())
    assert 0 < (known > 0).mean() < 1
