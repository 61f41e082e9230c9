"""The order of elimination and its weights, beside exhaustive search and least squares on the samples themselves."""

import pytest
import torch
from tolerances import assert_close

from nasfast.shrink.eliminate import eliminate, solve


def problem(columns, outputs, samples=200):
    g = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=g, dtype=torch.float64)
    inputs = torch.randn(samples, columns, generator=g, dtype=torch.float64) @ mixing
    return inputs - inputs.mean(0), torch.randn(outputs, columns, generator=g, dtype=torch.float64)


def columns_of(units, unit):
    return (units[:, None] * unit + torch.arange(unit)).reshape(-1)


@pytest.mark.parametrize("unit", [1, 3])
def test_weights_and_errors_are_those_of_least_squares(unit):
    inputs, weight = problem(24, 7)
    covariance = inputs.T @ inputs / len(inputs)
    widths = (2, 5, 24 // unit - 1)
    result = eliminate(covariance, weight, widths, unit=unit)
    for width in widths:
        columns = columns_of(result.kept[width], unit)
        want = torch.linalg.lstsq(inputs[:, columns], inputs @ weight.T)
        assert_close("weights", result.weights[width].float(), want.solution.T)
        error = (inputs @ weight.T - inputs[:, columns] @ want.solution).square().sum() / len(inputs)
        assert_close("error", result.errors[24 // unit - width - 1].float(), error)
        assert result.kept[width].tolist() == sorted(result.order[24 // unit - width :].tolist())


@pytest.mark.parametrize("unit", [1, 4])
def test_each_step_removes_what_costs_least(unit):
    inputs, weight = problem(16, 5)
    importance = torch.tensor([1.0, 0.1, 3.0, 2.0, 0.5], dtype=torch.float64)
    covariance = inputs.T @ inputs / len(inputs)
    result = eliminate(covariance, weight, [], unit=unit, importance=importance)
    alive = list(range(16 // unit))
    for removed in result.order[:-1].tolist():
        errors = {}
        for unit_index in alive:
            columns = columns_of(torch.tensor([u for u in alive if u != unit_index]), unit)
            best = torch.linalg.lstsq(inputs[:, columns], inputs @ weight.T).solution
            rest = inputs @ weight.T - inputs[:, columns] @ best
            errors[unit_index] = float((rest.square().sum(0) * importance).sum())
        assert removed == min(errors, key=errors.get)
        alive.remove(removed)


def test_many_columns_lose_several_units_at_once_and_keep_exact_weights():
    inputs, weight = problem(1030, 3, samples=1200)
    covariance = inputs.T @ inputs / len(inputs)
    result = eliminate(covariance, weight, [80], unit=10)
    columns = columns_of(result.kept[80], 10)
    assert_close("weights", result.weights[80].float(), solve(covariance, weight, columns))


def test_a_ridge_draws_to_the_first_weights():
    inputs, weight = problem(12, 4)
    covariance = inputs.T @ inputs / len(inputs)
    huge = covariance + torch.diag(covariance.diagonal() * 1e12)
    kept = torch.tensor([0, 3, 5])
    assert_close("weights", solve(huge, weight, kept).float(), weight[:, kept])
