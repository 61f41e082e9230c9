"""Which architectures of a space a search may give; limits that no architecture meets are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigError
from nasfast.search.milp import ChoiceProgram
from nasfast.settings import LIMITS, SearchConfig
from nasfast.spaces import Arch, Cost, CostTable, LayerSpace, read_cost_table

CostName = Literal["macs", "params"]


class InfeasibleConstraintError(ValueError):
    """No architecture of the space meets the limits; the text gives the smallest attainable values."""


@dataclass(frozen=True)
class LayerCosts:
    """One cost of the architectures of a space: integers that add up over the layers.

    Attributes:
        unit: for texts.
        rows: for each layer, option -> integer; options ascending.
        fixed: integer of stem, head and classifier together.
        decimals: the cost in its unit is the integer / 10^decimals.
    """

    unit: str
    rows: tuple[dict[int, int], ...]
    fixed: int
    decimals: int = 0

    def text(self, total: int) -> str:
        """The cost of a network whose layers and fixed parts have this sum, with its unit."""
        if self.decimals <= 0:
            return f"{total * 10**-self.decimals:,} {self.unit}"
        whole, rest = divmod(total, 10**self.decimals)
        return f"{whole:,}.{rest:0{self.decimals}d}".rstrip("0").rstrip(".") + f" {self.unit}"

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest integer of a whole network."""
        least, most = (self.fixed + sum(extreme(row.values()) for row in self.rows) for extreme in (min, max))
        return least, most

    @property
    def range_text(self) -> str:
        """The range of MACs or parameters in millions."""
        least, most = (f"{value / 1e6:.3g}" for value in self.range)
        return f"{least} M to {most} M"

    def total(self, arch: Arch) -> int:
        """The integer of a whole network."""
        return self.fixed + sum(row[choice] for row, choice in zip(self.rows, arch, strict=True))


def layer_costs(space: LayerSpace, cost: CostName | CostTable, *, allow_identity: bool = False) -> LayerCosts:
    """MACs, parameters or a table of the user's, for every option of every layer."""
    options = space.option_costs(allow_identity=allow_identity)
    if isinstance(cost, CostTable):
        rows = tuple({v: row[v] for v in values} for row, values in zip(cost.integers, options, strict=True))
        return LayerCosts(cost.unit, rows, cost.fixed_steps, cost.decimals)
    rows = tuple({choice: getattr(value, cost) for choice, value in row.items()} for row in options)
    return LayerCosts({"macs": "MACs", "params": "parameters"}[cost], rows, getattr(space.fixed_cost, cost))


@dataclass(frozen=True)
class Limits:
    """Upper limits of the standalone network's cost, and whether it may skip layers.

    Attributes:
        max_macs: largest MACs per image; None for no limit.
        max_params: largest number of parameters; None for no limit.
        tables: tables of the user's with the largest cost of each; None for a cost that is only reported.
        allow_identity: whether normal layers may be skipped.
    """

    max_macs: float | None = None
    max_params: float | None = None
    tables: tuple[tuple[CostTable, float | None], ...] = ()
    allow_identity: bool = False

    def __post_init__(self) -> None:
        for name, value in self.maxima.items():
            if not (0 < value < math.inf):
                raise ValueError(f"{name} must be positive and finite (None for no limit), got {value!r}")

    @property
    def maxima(self) -> dict[str, float]:
        """The limits that are not None, by name."""
        return {name: value for name, _, value in self._costs}

    @property
    def _costs(self) -> list[tuple[str, CostName | CostTable, float]]:
        """Name, cost and largest value of each limit that is not None."""
        plain: list[tuple[CostName, float | None]] = [("macs", self.max_macs), ("params", self.max_params)]
        costs: list[tuple[str, CostName | CostTable, float]] = []
        costs += [(f"max_{name}", name, value) for name, value in plain if value is not None]
        for number, (table, value) in enumerate(self.tables):
            if value is not None:
                name = f"max_{table.quantity}_{table.unit}"
                # two tables may have the same quantity
                costs.append((name if name not in {n for n, _, _ in costs} else f"{name}_{number}", table, value))
        return costs

    def admits(self, cost: Cost, arch: Arch) -> bool:
        """Whether an architecture, whose network has this cost, is within all limits."""
        return all(
            kind.admits(arch, maximum) if isinstance(kind, CostTable) else getattr(cost, kind) <= maximum
            for _, kind, maximum in self._costs
        )

    def values(self, arch: Arch) -> tuple[float, ...]:
        """The cost of an architecture by each table."""
        return tuple(table.cost(arch) for table, _ in self.tables)

    def costs(self, space: LayerSpace) -> list[tuple[str, LayerCosts, int]]:
        """For each limit its name, the costs, and the largest sum over the searchable layers."""
        limits = []
        for name, kind, value in self._costs:
            costs = layer_costs(space, kind, allow_identity=self.allow_identity)
            top = kind.largest_sum(value) if isinstance(kind, CostTable) else math.floor(value) - costs.fixed
            limits.append((name, costs, top))
        return limits

    def program(self, space: LayerSpace, *, without: str | None = None) -> ChoiceProgram:
        """The integer program of the architectures within the limits, or within all but one, by its name."""
        program = ChoiceProgram([tuple(row) for row in space.option_costs(allow_identity=self.allow_identity)])
        for name, costs, maximum in self.costs(space):
            if name != without:
                program.limit(costs.rows, maximum)
        return program

    def met_by_all(self, space: LayerSpace) -> list[str]:
        """A sentence for each limit that every architecture of the space meets, with the range of its cost."""
        sentences = []
        for name, costs, maximum in self.costs(space):
            least, most = costs.range
            if most <= maximum + costs.fixed:
                ends = " to ".join(map(costs.text, sorted({least, most})))
                lower = "a lower limit would choose among them" if least < most else "no limit chooses among them"
                sentences.append(
                    f"Every architecture meets {name}={self.maxima[name]:,.10g}: they have {ends}, and {lower}."
                )
        return sentences

    def check(self, space: LayerSpace) -> None:
        """Refuse limits that no architecture meets.

        Raises:
            InfeasibleConstraintError: no architecture meets the limits; the text gives the smallest attainable values.
        """
        limits, maxima = self.costs(space), self.maxima
        for name, costs, maximum in limits:
            least, _ = costs.range
            if least > maximum + costs.fixed:
                ends = " to ".join(map(costs.text, sorted(set(costs.range))))
                which = name if name in LIMITS else "its limit in search.tables"
                raise InfeasibleConstraintError(
                    f"{name}={maxima[name]:,.10g} cannot be met: the architectures of space {space.name!r} at "
                    f"{space.resolution} x {space.resolution} pixels have {ends}; raise {which} to at least "
                    f"{costs.text(least)}, or {space.OTHERS}"
                )
        if len(limits) < 2 or self.program(space).minimise(limits[0][1].rows) is not None:
            return
        attainable = []
        for name, costs, _ in limits:
            solution = self.program(space, without=name).minimise(costs.rows)
            if solution is not None:
                under = " and ".join(f"{other}={value:,.10g}" for other, value in maxima.items() if other != name)
                attainable.append(f"under {under} the smallest is {costs.text(costs.total(solution.arch))}")
        together = " and ".join(f"{name}={value:,.10g}" for name, value in maxima.items())
        raise InfeasibleConstraintError(
            f"{together} cannot {'both' if len(limits) == 2 else 'all'} be met in space {space.name!r}: "
            f"{'; '.join(attainable) or 'nor without any one of them'}; raise one of them"
        )


def arch_sum(table: Sequence[Mapping[int, float]], arch: Arch) -> float:
    """Sum over layers of the entries of `table` that `arch` chooses."""
    return sum(row[choice] for row, choice in zip(table, arch, strict=True))


def read_limits(config: SearchConfig, space: LayerSpace) -> Limits:
    """The limits of a search in a space, with its tables read."""
    tables: list[tuple[CostTable, float | None]] = []
    if config.latency_table is not None:
        tables.append((_read_latencies(config, config.latency_table, space), config.max_latency_ms))
    tables += [(read_cost_table(file, space), maximum) for file, maximum in config.table_limits]
    return Limits(config.max_macs, config.max_params, tuple(tables), config.allow_identity)


def _read_latencies(config: SearchConfig, path: str, space: LayerSpace) -> CostTable:
    table = read_cost_table(path, space)
    if (table.quantity, table.unit) != ("latency", "ms"):
        raise ConfigError(
            f"{path}: latency_table must have the quantity 'latency' in 'ms', and this has {table.quantity!r} in "
            f"{table.unit!r}: convert its values to ms, or give it in search.tables"
        )
    settings = {"device": config.latency_device, "batch": config.latency_batch}
    settings = {name: value for name, value in settings.items() if value is not None}
    if different := [name for name, value in settings.items() if getattr(table, name) != value]:
        values = {name: getattr(table, name) for name in different}
        origin = " and ".join(
            f"no {name} is given" if value is None else f"its {name} is {value!r}" for name, value in values.items()
        )
        demand = " and ".join(f"search.latency_{name} is {settings[name]!r}" for name in different)
        flags = " ".join(f"--{name} {value}" for name, value in settings.items())
        raise ConfigError(f"{path}: {origin}, and {demand}: measure a table with `nasfast latency {flags}`")
    return table
