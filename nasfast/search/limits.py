"""Cost limits of a search; limits that no architecture meets are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nasfast.search.milp import ChoiceProgram
from nasfast.spaces import SKIP, Arch, Cost, SearchSpace


class InfeasibleConstraintError(ValueError):
    """No architecture of the space meets the limits; the text gives the smallest attainable values."""


@dataclass(frozen=True)
class Limits:
    """Upper limits of the standalone network's cost.

    Attributes:
        max_macs: largest MACs per image; None for no limit.
        max_params: largest number of parameters; None for no limit.
    """

    max_macs: float | None = None
    max_params: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            if not (0 < value < math.inf):
                raise ValueError(f"{name} must be positive and finite (None for no limit), got {value!r}")

    @property
    def given(self) -> dict[str, float]:
        """The limits that are not None, by name."""
        both = {"max_macs": self.max_macs, "max_params": self.max_params}
        return {name: value for name, value in both.items() if value is not None}

    def admits(self, cost: Cost) -> bool:
        """Whether the cost of a whole network is within all limits."""
        return all(getattr(cost, name.removeprefix("max_")) <= value for name, value in self.given.items())

    def rows(self, space: SearchSpace, *, allow_identity: bool = False) -> list[tuple[list[dict[int, int]], int]]:
        """For each limit, the cost of every (layer, value), and the largest sum over the searchable layers."""
        costs, rows = option_costs(space, allow_identity=allow_identity), []
        for name, value in self.given.items():
            field = name.removeprefix("max_")
            table = [{choice: getattr(cost, field) for choice, cost in row.items()} for row in costs]
            rows.append((table, math.floor(value) - getattr(space.fixed_cost, field)))
        return rows

    def program(self, space: SearchSpace, *, allow_identity: bool = False) -> ChoiceProgram:
        """The integer program of the architectures within the limits."""
        program = ChoiceProgram([tuple(row) for row in option_costs(space, allow_identity=allow_identity)])
        for table, maximum in self.rows(space, allow_identity=allow_identity):
            program.limit(table, maximum)
        return program

    def check(self, space: SearchSpace, *, allow_identity: bool = False) -> None:
        """Refuse limits that no architecture meets.

        Raises:
            InfeasibleConstraintError: no architecture meets the limits; the text gives the smallest attainable values.
        """
        rows = dict(zip(self.given, self.rows(space, allow_identity=allow_identity), strict=True))
        for name, (table, maximum) in rows.items():
            least = sum(min(row.values()) for row in table)
            if least > maximum:
                smallest = least - maximum + math.floor(self.given[name])
                raise InfeasibleConstraintError(
                    f"{name}={self.given[name]:,.0f} cannot be met: the smallest architecture of space {space.name!r} "
                    f"has {smallest:,} {_unit(name)}; raise {name} to at least that"
                )
        if len(rows) < 2:
            return
        if self.program(space, allow_identity=allow_identity).minimise(rows["max_macs"][0]) is not None:
            return
        attainable = []
        for name, other in (("max_macs", "max_params"), ("max_params", "max_macs")):
            alone = Limits(**{other: self.given[other]}).program(space, allow_identity=allow_identity)
            arch = alone.minimiser(rows[name][0])
            smallest = getattr(space.cost(arch), name.removeprefix("max_"))
            attainable.append(f"under {other}={self.given[other]:,.0f} the smallest is {smallest:,} {_unit(name)}")
        raise InfeasibleConstraintError(
            f"max_macs={self.max_macs:,.0f} and max_params={self.max_params:,.0f} cannot both be met in space "
            f"{space.name!r}: {'; '.join(attainable)}; raise one of the two"
        )


def option_costs(space: SearchSpace, *, allow_identity: bool = False) -> tuple[dict[int, Cost], ...]:
    """For each layer a dict from value to cost, values ascending; `allow_identity` adds the skip, which is free."""
    return tuple(
        dict(sorted(({**row, SKIP: Cost()} if allow_identity and layer.indicator_choice == SKIP else row).items()))
        for row, layer in zip(space.cost_table, space.layers, strict=True)
    )


def arch_sum(table: Sequence[Mapping[int, float]], arch: Arch) -> float:
    """Sum over layers of the entries of `table` that `arch` chooses."""
    return sum(row[choice] for row, choice in zip(table, arch, strict=True))


def _unit(name: str) -> str:
    return {"max_macs": "MACs", "max_params": "parameters"}[name]
