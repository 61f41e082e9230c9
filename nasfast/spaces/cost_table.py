"""A table of the user's own costs, such as milliseconds or millijoules, by layer and choice. No torch.

A search takes such a table as a limit, as the axis of a Pareto front, or as the score. `nasfast latency` writes one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from nasfast.config import ConfigError, check_keys, unique_keys
from nasfast.spaces.arch import SKIP, Arch
from nasfast.spaces.arch_space import LayerSpace

FORMAT = "nasfast.cost_table/1"

Better = Literal["lower", "higher"]

_OF_USERS = ("quantity", "unit", "entries", "fixed", "better", "about", "device", "batch")
_OF_SPACES = ("format", "space", "fingerprint", "resolution", "num_classes")
_OF_MEASUREMENTS = ("runtime", "dtype", "threads", "clock", "onnx", "parts", "fit", "rounds", "config", "machine")
_KEYS = (*_OF_USERS, *_OF_SPACES, *_OF_MEASUREMENTS, "environment", "validation", "margin", "held_out")
"""Keys of a table; what `nasfast latency` measured is kept in the file, but not read here."""

# Digits of the largest sum that count. The integer program needs integers, and these are as large as counts of MACs.
_DIGITS = 8
# entries that an error names, of those that are missing or that no layer has
_NAMED = 4

LARGE_ERROR = 0.07
"""Relative error of four of five networks of a table's validation above which each use of the table says so."""


@dataclass(frozen=True)
class CostTable:
    """A cost that adds up over layers: what every candidate of every layer adds to it.

    Sums are exact: values are read as decimal numbers and rounded to a grid on which the largest sum has eight digits
    (a nanosecond for a network of 99 ms).

    Attributes:
        quantity: what it measures, such as `latency`.
        unit: unit of the values, such as `ms`.
        rows: for each layer, pairs of a value of an Arch and its cost, in ascending order of the former. The identity
            of a layer that may be skipped is among them.
        fixed: cost of stem, head and classifier together.
        better: whether lower or higher sums are better, where the table is the score of a search.
        about: where the numbers are from, and whether their validation found a large error; it is shown beside
            results.
        device, batch: what a table of latencies was measured on, and images per run; None if the file does not say.
    """

    quantity: str
    unit: str
    rows: tuple[tuple[tuple[int, float], ...], ...]
    fixed: float = 0.0
    better: Better = "lower"
    about: str = ""
    device: str | None = None
    batch: int | None = None

    @cached_property
    def decimals(self) -> int:
        """Digits behind the point of the grid to which values are rounded; below 0 for very large values."""
        largest = self.fixed + sum(max(value for _, value in row) for row in self.rows)
        return _DIGITS - math.ceil(math.log10(largest)) if largest > 0 else 0

    @cached_property
    def integers(self) -> tuple[dict[int, int], ...]:
        """For each layer, value of an Arch -> cost in steps of the grid."""
        return tuple({choice: self._steps(value, ROUND_HALF_EVEN) for choice, value in row} for row in self.rows)

    @cached_property
    def fixed_steps(self) -> int:
        """`fixed` in steps of the grid."""
        return self._steps(self.fixed, ROUND_HALF_EVEN)

    def largest_sum(self, maximum: float) -> int:
        """A limit on the cost of a network as a limit on the sum over its layers, in steps of the grid."""
        return self._steps(maximum, ROUND_FLOOR) - self.fixed_steps

    def count_steps(self, arch: Arch) -> int:
        """Sum over the layers of an architecture, in steps of the grid."""
        return sum(row[choice] for row, choice in zip(self.integers, arch, strict=True))

    def value(self, steps: int) -> float:
        """The cost of a network whose layers cost this many steps of the grid."""
        return float(Decimal(steps + self.fixed_steps).scaleb(-self.decimals))

    def cost(self, arch: Arch) -> float:
        """The cost of the network of an architecture, in the table's unit."""
        return self.value(self.count_steps(arch))

    def admits(self, arch: Arch, maximum: float) -> bool:
        """Whether an architecture costs at most this, exactly."""
        return self.count_steps(arch) <= self.largest_sum(maximum)

    def _steps(self, value: float, rounding: str) -> int:
        return int(Decimal(repr(float(value))).scaleb(self.decimals).to_integral_value(rounding))


def read_cost_table(path: str | Path, space: LayerSpace) -> CostTable:
    """Read the JSON file of a table, and check it against a space; docs/latency.md has the format.

    Raises:
        ConfigError: the file cannot be read or has another form, belongs to another space, lacks an entry, or has a
            value that is negative or not finite; the text names the file and the entry.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise ConfigError(
            f"cannot read the table {path}: {error.strerror}; `nasfast latency --out FILE` writes one of latencies"
        ) from error
    except ValueError as error:  # bytes that are not text raise one too
        raise ConfigError(f"{path} is not JSON: {error}") from error
    try:
        return parse_cost_table(data, space)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_cost_table(data: Any, space: LayerSpace) -> CostTable:
    """The table of a file's content."""
    if not isinstance(data, Mapping) or not isinstance(data.get("entries"), list):
        raise ConfigError('expected {"quantity", "unit", "entries": [{"layer", "choice", "value"}, ...]}')
    check_keys(data, _KEYS)
    if data.get("format", FORMAT) != FORMAT:
        raise ConfigError(f"its format is {data['format']!r}, this version reads {FORMAT!r}")
    for key in ("quantity", "unit"):
        if not isinstance(data.get(key), str) or not data[key]:
            raise ConfigError(f"{key!r} must be a text such as {'latency' if key == 'quantity' else 'ms'!r}")
    if data.get("better", "lower") not in get_args(Better):
        raise ConfigError(f"'better' must be 'lower' or 'higher', got {data['better']!r}")
    if data.get("fingerprint", space.fingerprint) != space.fingerprint:
        raise ConfigError(_compare_spaces(data, space))
    rows = _read_rows(data["entries"], space)
    if data["quantity"] == "latency":
        _check_times(rows, space)
    return CostTable(
        data["quantity"],
        data["unit"],
        rows,
        _number(data.get("fixed", 0.0), "'fixed'"),
        data.get("better", "lower"),
        _describe(data),
        data.get("device"),
        data.get("batch"),
    )


def _describe(data: Mapping[str, Any]) -> str:
    """What the table says of itself, and a warning if its validation found an error above `LARGE_ERROR`."""
    about = str(data.get("about", ""))
    validation = data.get("validation")
    error = validation.get("error") if isinstance(validation, Mapping) else None
    q80 = error.get("q80") if isinstance(error, Mapping) else None
    if not isinstance(q80, (int, float)) or not q80 > LARGE_ERROR:
        return about
    subject = f"{about}; this error" if about else "the error of its validation"
    return f"{subject} is above {LARGE_ERROR:.0%}: smaller differences say nothing, and a limit needs such a margin"


def _read_rows(entries: list[Any], space: LayerSpace) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The values by layer; those of skipped layers are 0 where the file has none."""
    rows: list[dict[int, float]] = [{} for _ in space.layers]
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not {"layer", "choice", "value"} <= entry.keys():
            raise ConfigError(f'entry {number} must be {{"layer", "choice", "value"}}, got {entry!r}')
        check_keys(entry, ("layer", "choice", "value", "label", "part"), what=f"key of entry {number}")
        i, choice = entry["layer"], entry["choice"]
        if type(i) is not int or not 0 <= i < len(space):
            raise ConfigError(f"entry {number}: layer must be from 0 to {len(space) - 1}, got {i!r}")
        legal = space.layers[i].legal
        if type(choice) is not int or choice not in legal:
            raise ConfigError(f"entry {number}: layer {i} has the choices {', '.join(map(str, legal))}, got {choice!r}")
        if choice in rows[i]:
            raise ConfigError(f"entry {number}: layer {i}, choice {choice} is there twice")
        rows[i][choice] = _number(entry["value"], f"layer {i}, choice {choice} ({space.label(i, choice)})")
    for row, layer in zip(rows, space.layers, strict=True):
        if SKIP in layer.legal:
            row.setdefault(SKIP, 0.0)
    missing = [(i, v) for i, layer in enumerate(space.layers) for v in layer.legal if v not in rows[i]]
    if missing:
        names = ", ".join(f"layer {i} choice {v} ({space.label(i, v)})" for i, v in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ConfigError(f"it has no value for {names}{more}: add what is missing, or measure the space again")
    return tuple(tuple(sorted(row.items())) for row in rows)


def _check_times(rows: tuple[tuple[tuple[int, float], ...], ...], space: LayerSpace) -> None:
    """Refuse a block that takes no time: a limit would be met by taking it everywhere."""
    for i, (row, values) in enumerate(zip(rows, space.operators, strict=True)):
        for choice, value in row:
            if value == 0 and values[choice].works:
                raise ConfigError(
                    f"layer {i}, choice {choice} ({space.label(i, choice)}) computes, and takes 0: measure again with "
                    "more rounds"
                )


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{what}: the value must be a finite number of at least 0, got {value!r}")
    return float(value)


def _compare_spaces(data: Mapping[str, Any], space: LayerSpace) -> str:
    """Says how a table's space differs from the one that is searched."""
    differences = [
        f"{key} {data[key]}, not {getattr(space, key)}"
        for key in ("resolution", "num_classes")
        if data.get(key) not in (None, getattr(space, key))
    ]
    brackets = f" ({', '.join(differences)})" if differences else ""
    return (
        f"it is of space {data.get('space')!r} ({data['fingerprint']}){brackets}, and the search is in {space.name!r} "
        f"({space.fingerprint}): measure this space, with its resolution and num_classes"
    )
