"""Objects that are tables: as HTML in a notebook, as text, and as a pandas DataFrame. No torch."""

from __future__ import annotations

import html
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


class Tabular:
    """Base of objects that a notebook and `print` show as a table; `repr` is its caption."""

    @property
    @abstractmethod
    def caption(self) -> str:
        """What the table is, in one line."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """The rows, each from column names to values; all have the same columns."""

    def to_dataframe(self) -> pandas.DataFrame:
        """The rows as a pandas DataFrame; RuntimeError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise RuntimeError("a DataFrame needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.records())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.caption}>"

    def __str__(self) -> str:
        header, rows = self._cells()
        return "\n".join([self.caption, *text_table([header, *rows])])

    def _repr_html_(self) -> str:
        header, rows = self._cells()
        body = "".join(_row(row, "td") for row in rows)
        return f"<table><caption>{html.escape(self.caption)}</caption>{_row(header, 'th')}{body}</table>"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        records = self.records()
        header = list(records[0]) if records else []
        return header, [[_text(value) for value in record.values()] for record in records]


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 image`, `1,801 images`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def text_table(rows: Sequence[Sequence[str]], *, right: int | None = None) -> list[str]:
    """Lines of a table whose first row is its header; columns from number `right` on are aligned right, others left."""
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        pad = str.ljust if right is None or i < right else str.rjust
        columns.append([pad(cell, max(map(len, column))) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _row(cells: Iterable[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
