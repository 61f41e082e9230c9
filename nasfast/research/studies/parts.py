"""What a report of a study is made of, as data: pass marks, claims, tables, figures and verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Check:
    """A pass mark: what was measured, and the interval in which it must lie.

    Attributes:
        name: what was measured, in words.
        low, high: ends of the interval, which belong to it.
        measured: value; nan fails.
        around: the expected value and the tolerance, where the interval was given by these; see `near`.
    """

    name: str
    low: float
    high: float
    measured: float
    around: tuple[float, float] | None = None

    @classmethod
    def near(cls, name: str, expected: float, tolerance: float, measured: float) -> Check:
        """The mark of a value that is known up to a tolerance."""
        return cls(name, expected - tolerance, expected + tolerance, measured, (expected, tolerance))

    @property
    def passed(self) -> bool:
        """Whether the mark is met."""
        # both comparisons are false for nan, which therefore fails
        return self.low <= self.measured <= self.high

    def to_dict(self) -> dict[str, Any]:
        """The mark as JSON: with the ends of the interval, or with its middle and tolerance."""
        ends = {"low": self.low, "high": self.high}
        if self.around is not None:
            ends = dict(zip(("expected", "tolerance"), self.around, strict=True))
        return {"name": self.name, **ends, "measured": self.measured, "passed": self.passed}


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, what was measured, and in a few words whether the sentence holds."""

    claim: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Table:
    """A table of text cells; the first column is a name."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, title: str, columns: Mapping[str, str] | Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
        """The table of values.

        Args:
            title: above the table.
            columns: heading of every column -> format of its numbers, such as `.3f`; or only the headings.
            rows: text is kept; None, and a number without a value, is a dash.
        """
        formats = list(columns.values()) if isinstance(columns, Mapping) else [""] * len(columns)
        return cls(title, tuple(columns), tuple(tuple(map(number, row, formats)) for row in rows))

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        text = [
            line[0].ljust(widths[0]) + "".join(f"  {c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))
            for line in lines
        ]
        return "\n".join([self.title, *text])


def number(value: Any, digits: str = ".4g") -> str:
    """A cell of a table: text itself, a number with these digits, and a dash for None and nan."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return value if isinstance(value, str) else format(value, digits)


@dataclass(frozen=True)
class Figure:
    """What a figure shows, as data.

    Attributes:
        kind: name of the function that draws it (`page.drawing`).
        title: above the figure.
        data: the numbers, as mappings, sequences and arrays.
    """

    kind: str
    title: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Kind, title and numbers."""
        return {"kind": self.kind, "title": self.title, **self.data}


class Verdict(Protocol):
    """What was judged of one thing: names of what was seen, and evidence."""

    @property
    def names(self) -> Sequence[str]:
        """What the thing is, such as `well behaved`."""

    def to_dict(self) -> dict[str, Any]:
        """`names` and the evidence as JSON."""


def plain(value: Any) -> Any:
    """Nested mappings, sequences, arrays, dataclasses and scalars as JSON.

    JSON has no nan and no infinity: they become None.
    """
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if is_dataclass(value):
        return plain({field.name: getattr(value, field.name) for field in fields(value)})
    return None if isinstance(value, float) and not math.isfinite(value) else value
