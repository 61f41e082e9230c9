"""Signal and noise through any module: forward mode against exact Jacobians, BatchNorms held, and errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from nasfast.research.analysis.jacobian import frozen_copy, jacobian
from nasfast.research.analysis.moments.module import hold_statistics, push, sensitivity


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Sequential(nn.Conv2d(8, 4, 3), nn.Tanh())
    )


X = torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def module_chi(module: nn.Module, x: torch.Tensor, dx: torch.Tensor | None = None, draws: int = 4) -> float:
    """chi of a whole module, for one noise or averaged over draws of white noise."""
    noises = [torch.randn(x.shape) for _ in range(draws)] if dx is None else [dx]
    logs = [sensitivity(*push(hold_statistics(module), (x, noise))) - sensitivity(x, noise) for noise in noises]
    return math.sqrt(np.mean(np.exp(2 * np.array(logs))))


def test_push_is_the_jacobian_with_constant_statistics():
    module, dx = net(), torch.randn(X.shape)
    # as a network is at initialisation, in training mode: its running statistics are not used
    y, dy = push(hold_statistics(module), (X, dx))
    frozen = frozen_copy(module, X)
    torch.testing.assert_close(y, frozen(X).detach(), rtol=1e-4, atol=1e-5)
    wanted = jacobian(frozen, X[:1], y[0].numel()) @ dx[0].flatten()
    torch.testing.assert_close(dy[0].flatten(), wanted, rtol=1e-4, atol=1e-5)
    assert module.training and module[1].num_batches_tracked == 0


def test_statistics_are_those_of_each_batch():
    copy = hold_statistics(net())
    for scale in (1.0, 5.0):
        y, _ = push(copy[1], (scale * torch.randn(64, 8, 5, 5), torch.zeros(64, 8, 5, 5)))
        assert float(y.var()) == pytest.approx(1, abs=0.05)


def test_chi_squared_is_the_frobenius_norm():
    module = net()
    y = frozen_copy(module, X)(X).detach()
    jacobians = [jacobian(frozen_copy(module, X), X[i : i + 1], y[0].numel()) for i in range(len(X))]
    frobenius = float(torch.stack(jacobians).square().sum((1, 2)).mean() / y[0].numel())

    def variance(t):
        return float(t.var((0, 2, 3), correction=0).mean())

    expected = math.sqrt(frobenius / (variance(y) / variance(X)))
    assert module_chi(module, X, draws=64) == pytest.approx(expected, rel=0.05)


def test_errors_say_what_was_given():
    with pytest.raises(ValueError, match="cannot take x of shape"):
        module_chi(net(), X[:, :2])
    with pytest.raises(ValueError, match="needs two values per channel"):
        module_chi(nn.BatchNorm1d(3), torch.randn(1, 3))
