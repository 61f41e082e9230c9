"""One choice per layer as an integer program, solved by HiGHS through `scipy.optimize.milp`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nasfast.spaces import Arch

# HiGHS stops at an absolute gap of 1e-6 and accepts rows violated by 1e-6. Objectives and score rows are scaled to this
# span, so that both tolerances are 1e-10 of the span of the sum.
_SPAN = 1e4
_OPTIMAL, _INFEASIBLE = 0, 2


@dataclass(frozen=True)
class Solution:
    """A minimiser, and what the solver proved about it.

    Attributes:
        arch: the chosen value of every layer.
        bound: lower bound of the weight sum of any feasible architecture (HiGHS's dual bound, in units of the weights).
        status: the solver's message.
    """

    arch: Arch
    bound: float
    status: str


class ChoiceProgram:
    """Linear program with one binary variable per (layer, value); exactly one of each layer is 1.

    Args:
        options: allowed values of every layer, in ascending order.
    """

    def __init__(self, options: Sequence[Sequence[int]]) -> None:
        self.options = tuple(tuple(values) for values in options)
        ends = np.cumsum([len(values) for values in self.options])
        self._starts = [0, *map(int, ends[:-1])]
        self._size = int(ends[-1])
        one_hot = np.zeros((len(self.options), self._size))
        for row, start, values in zip(one_hot, self._starts, self.options, strict=True):
            row[start : start + len(values)] = 1
        self._rows = list(one_hot)
        self._lower = [1.0] * len(self.options)
        self._upper = [1.0] * len(self.options)
        self._limits: list[tuple[Sequence[Mapping[int, int]], int]] = []

    def copy(self) -> ChoiceProgram:
        """A program to which rows can be added without changing this one."""
        other = ChoiceProgram(self.options)
        other._rows, other._lower, other._upper = list(self._rows), list(self._lower), list(self._upper)
        other._limits = list(self._limits)
        return other

    def limit(self, costs: Sequence[Mapping[int, int]], maximum: int) -> None:
        """Require the integer costs to sum to at most `maximum`.

        The row has each cost's excess over its layer's minimum, in units of their greatest common divisor. Half a unit
        is added to the right side, so that rounding inside the solver cannot exclude a sum that equals the limit.
        """
        floors = [min(row.values()) for row in costs]
        excess = [[row[v] - low for v in values] for row, low, values in zip(costs, floors, self.options, strict=True)]
        unit = math.gcd(*(e for row in excess for e in row)) or 1
        self._add(np.concatenate(excess) / unit, upper=(maximum - sum(floors)) // unit + 0.5)
        self._limits.append((costs, maximum))

    def at_most(self, weights: Sequence[Mapping[int, float]], maximum: float) -> None:
        """Require real-valued weights to sum to at most `maximum`, up to 1e-10 of the span of their sum."""
        flat, offset, scale = self._flatten(weights)
        self._add(flat, upper=(maximum - offset) / scale)

    def fix(self, layer: int, value: int) -> None:
        """Require a value of a layer."""
        self._add(self._indicator({layer: value}), lower=1)

    def exclude(self, arch: Arch) -> None:
        """Forbid one architecture (a no-good cut); one that the options do not have changes nothing."""
        if len(arch) != len(self.options) or any(v not in o for v, o in zip(arch, self.options, strict=True)):
            return
        self._add(self._indicator(dict(enumerate(arch))), upper=len(arch) - 1)

    def minimise(self, weights: Sequence[Mapping[int, float]]) -> Solution | None:
        """The feasible architecture with the smallest weight sum; None if there is none."""
        # imported here, because it takes most of the time that the import of nasfast.search would take
        from scipy.optimize import Bounds, LinearConstraint, milp

        flat, offset, scale = self._flatten(weights)
        while True:
            constraint = LinearConstraint(np.array(self._rows), self._lower, self._upper)
            result = milp(
                flat,
                integrality=np.ones(self._size),
                bounds=Bounds(0, 1),
                constraints=constraint,
                options={"mip_rel_gap": 0.0},
            )
            if result.status == _INFEASIBLE:
                return None
            if result.status != _OPTIMAL:
                raise RuntimeError(f"the integer program was not solved: {result.message}")
            arch = tuple(
                values[int(np.argmax(result.x[start : start + len(values)]))]
                for start, values in zip(self._starts, self.options, strict=True)
            )
            if all(sum(row[v] for row, v in zip(costs, arch, strict=True)) <= top for costs, top in self._limits):
                return Solution(arch, offset + scale * float(result.mip_dual_bound), result.message)
            # the solution meets the limits within the solver's tolerance, but not in exact arithmetic
            self.exclude(arch)

    def minimiser(self, weights: Sequence[Mapping[int, float]]) -> Arch:
        """The architecture of `minimise`, of a program that is known to have one."""
        solution = self.minimise(weights)
        if solution is None:
            raise RuntimeError("the integer program should have a solution, but the solver found it infeasible")
        return solution.arch

    def _flatten(self, weights: Sequence[Mapping[int, float]]) -> tuple[np.ndarray, float, float]:
        """Weights as one shifted and scaled vector, the offset and the scale: sum = offset + scale * (vector . x)."""
        floors = [min(row.values()) for row in weights]
        span = sum(max(row.values()) - low for row, low in zip(weights, floors, strict=True))
        scale = span / _SPAN or 1.0
        shifted = [
            [(row[v] - low) / scale for v in values]
            for row, low, values in zip(weights, floors, self.options, strict=True)
        ]
        return np.concatenate(shifted), float(sum(floors)), scale

    def _indicator(self, values: Mapping[int, int]) -> np.ndarray:
        """A row with 1 at the variables of these values by layer."""
        row = np.zeros(self._size)
        row[[self._starts[i] + self.options[i].index(v) for i, v in values.items()]] = 1
        return row

    def _add(self, row: np.ndarray, *, lower: float = -np.inf, upper: float = np.inf) -> None:
        self._rows.append(row)
        self._lower.append(lower)
        self._upper.append(upper)
