"""Settings of the search stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nasfast.config import ConfigBase, ConfigError, expand_suffix
from nasfast.search.limits import Limits
from nasfast.spaces import CostTable, LayerSpace, read_cost_table


@dataclass(frozen=True)
class SearchConfig(ConfigBase):
    """How architectures are searched.

    Attributes:
        method: `exact` (integer program over an indicator table), `evolution` (any score), or `auto`: exact where
            scores add up over layers.
        top_k: number of architectures in the result.
        max_macs: largest MACs per image of the standalone network; null is no limit.
        max_params: largest number of parameters of the standalone network; null is no limit.
        max_latency_ms: largest latency of the standalone network in ms, by `latency_table`; null is no limit.
        latency_table: file of latencies that `nasfast latency` wrote; null is none.
        latency_device: the device that the table must be of; null takes any.
        latency_batch: the batch that the table must be of; null takes any.
        tables: files of tables of other costs, each with its limit, as in "energy.json <= 40". Without a limit the cost
            is only reported. docs/latency.md has the format.
        population: number of architectures evaluated per generation.
        generations: number of generations; 20 x 50 = 1000 evaluations, as in Single Path One-Shot and BN-NAS.
        parents: number of best architectures so far from which children are made.
        crossovers: children per generation that mix two parents; random architectures complete the population.
        mutations: children per generation that change one parent.
        mutation_prob: probability that a mutation redraws a layer.
        seed: seed of the evolution; null takes the run's, or 0.
        allow_identity: whether the result may skip normal layers; a skipped layer scores its layer indicator.
        refine: file of trained accuracies (JSON or CSV) that refine the table before the search, where cross-validation
            says that this gains; null searches the table as it is.
    """

    method: Literal["auto", "exact", "evolution"] = "auto"
    top_k: int = 5
    max_macs: float | None = None
    max_params: float | None = None
    max_latency_ms: float | None = None
    latency_table: str | None = None
    latency_device: str | None = None
    latency_batch: int | None = None
    tables: tuple[str, ...] = ()
    population: int = 50
    generations: int = 20
    parents: int = 10
    crossovers: int = 25
    mutations: int = 25
    mutation_prob: float = 0.1
    seed: int | None = None
    allow_identity: bool = False
    refine: str | None = None

    def _check_values(self) -> None:
        for name in ("top_k", "population", "generations", "parents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.crossovers, self.mutations) < 0 or self.crossovers + self.mutations > self.population:
            raise ValueError(
                "crossovers and mutations must not be negative, and their sum must be at most "
                f"population={self.population}, got {self.crossovers} and {self.mutations}"
            )
        if not 0 <= self.mutation_prob <= 1:
            raise ValueError(f"mutation_prob must be in [0, 1], got {self.mutation_prob}")
        Limits(self.max_macs, self.max_params)  # refuses impossible limits now instead of when the search starts
        of_tables = {"max_latency_ms": self.max_latency_ms}
        of_tables |= {f"the limit of {file}": maximum for file, maximum in self.table_limits}
        for name, value in of_tables.items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite (null for no limit), got {value!r}")
        if self.latency_table is None and self.max_latency_ms is not None:
            raise ValueError(
                f"max_latency_ms={self.max_latency_ms:g} needs latency_table, a file that `nasfast latency` writes"
            )

    def limits_in(self, space: LayerSpace) -> Limits:
        """The limits of a search in a space, with the tables read.

        Raises:
            ConfigError: a table cannot be read or does not fit the space; or that of latencies has another unit, device
                or batch.
        """
        tables: list[tuple[CostTable, float | None]] = []
        if self.latency_table is not None:
            tables.append((self._latencies(self.latency_table, space), self.max_latency_ms))
        tables += [(read_cost_table(file, space), maximum) for file, maximum in self.table_limits]
        return Limits(self.max_macs, self.max_params, tuple(tables))

    @property
    def table_limits(self) -> list[tuple[str, float | None]]:
        """Files of `tables` and their limits.

        Raises:
            ValueError: a limit is no number.
        """
        found: list[tuple[str, float | None]] = []
        for text in self.tables:
            file, limited, maximum = text.rpartition("<=")
            if not limited:
                found.append((text, None))
                continue
            try:
                found.append((file.strip(), float(expand_suffix(maximum.strip()))))
            except ValueError:
                raise ValueError(f"tables: expected 'FILE <= NUMBER' or 'FILE', got {text!r}") from None
        return found

    def _latencies(self, path: str, space: LayerSpace) -> CostTable:
        table = read_cost_table(path, space)
        if (table.quantity, table.unit) != ("latency", "ms"):
            raise ConfigError(
                f"{path}: latency_table must have the quantity 'latency' in 'ms', and this has {table.quantity!r} in "
                f"{table.unit!r}: convert its values to ms, or give it in search.tables"
            )
        wanted = {"device": self.latency_device, "batch": self.latency_batch}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        others = {name: given for name in wanted if (given := getattr(table, name)) != wanted[name]}
        if others:
            given = " and ".join(
                f"no {name} is given" if value is None else f"its {name} is {value!r}" for name, value in others.items()
            )
            asked = " and ".join(f"search.latency_{name} is {wanted[name]!r}" for name in others)
            flags = " ".join(f"--{name} {value}" for name, value in wanted.items())
            raise ConfigError(f"{path}: {given}, and {asked}: measure a table with `nasfast latency {flags}`")
        return table
