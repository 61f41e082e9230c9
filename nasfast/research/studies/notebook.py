"""What a study prints as it goes on, and writes at its end: sentences, tables, pass marks and figures."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nasfast.config import ConfigBase
from nasfast.display import text_table
from nasfast.measure.doctor import environment
from nasfast.measure.timing import machine
from nasfast.report.page import Section, escape, html_cards, html_details, html_table, write_figure, write_page
from nasfast.report.plots import literal
from nasfast.runtime.files import write_atomic

_FOLDED = 60
"""Tables of more rows are folded on the page."""
_MARK_COLUMNS = {"pass mark": "", "at least": ".4g", "at most": ".4g", "measured": ".4g", "": "", "note": ""}


class Notebook:
    """The report of a study, which grows while the study runs; everything is printed at once.

    Args:
        name: stem of the files NAME.json and NAME.html.
        settings: the flags of the study.
        out: directory of the files; None writes none.
    """

    def __init__(self, name: str, settings: ConfigBase, out: Path | None = None) -> None:
        self.name, self.settings, self.out = name, settings, out
        self.data: dict[str, Any] = {}
        """Further numbers, which the JSON has beside the tables and marks."""
        self.marks: list[dict[str, Any]] = []
        """The pass marks: name, at_least, at_most, measured, passed."""
        self.tables: dict[str, list[list[str]]] = {}
        """Title -> the header and the rows."""
        self._sentences: list[str] = []
        self._figures: list[tuple[str, str, Figure]] = []
        self._start = time.perf_counter()

    def say(self, text: str) -> None:
        """A sentence on the subject, the method or the setting."""
        print(text)
        self._sentences.append(text)

    def table(self, title: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> None:
        """A table; the first column is a name.

        Args:
            title: above the table.
            columns: heading of every column -> format of its numbers, such as `.3f`.
            rows: text is kept; None, and a number without a value, is a dash.
        """
        cells = [list(columns), *(list(map(_cell, row, columns.values())) for row in rows)]
        self.tables[title] = cells
        print("", title, *text_table(cells, right=1), "", sep="\n")

    def mark(
        self, name: str, value: float, *, at_least: float = -math.inf, at_most: float = math.inf, note: str = ""
    ) -> None:
        """A pass mark, which is met if `at_least` <= value <= `at_most`; nan is a miss. `note` is shown beside it."""
        passed = bool(at_least <= value <= at_most)
        self.marks.append(
            {"name": name, "at_least": at_least, "at_most": at_most, "measured": float(value), "passed": passed}
            | ({"note": note} if note else {})
        )
        bounds = [f"{sign} {bound:.4g}" for sign, bound in ((">=", at_least), ("<=", at_most)) if math.isfinite(bound)]
        print(f"{_verdict(passed):6}  {name}: {value:.4g} ({', '.join(bounds)})" + f"; {note}" * bool(note))

    def figure(self, title: str, caption: str, figure: Figure) -> None:
        """A figure of the page, with a legend for all axes, of every label once."""
        figure.suptitle(literal(title), fontsize=11)
        handles = {h.get_label(): h for ax in figure.axes for h in ax.get_legend_handles_labels()[0]}
        if handles:
            columns = math.ceil(len(handles) / math.ceil(len(handles) / 8))
            figure.legend(
                handles=handles.values(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
            )
        self._figures.append((title, caption, figure))

    @property
    def missed(self) -> list[str]:
        """The names of the pass marks that are missed."""
        return [mark["name"] for mark in self.marks if not mark["passed"]]

    def close(self) -> None:
        """Write the files.

        Raises:
            RuntimeError: pass marks are missed; the files are written.
        """
        seconds = time.perf_counter() - self._start
        print(f"{seconds:.0f} s")
        if self.out is not None:
            self._write(self.out, seconds)
        if self.missed:
            raise RuntimeError(f"{len(self.missed)} of {len(self.marks)} pass marks missed: {'; '.join(self.missed)}")

    def _write(self, out: Path, seconds: float) -> None:
        record = {
            "name": self.name,
            "settings": self.settings.to_dict(),
            "text": self._sentences,
            "marks": self.marks,
            "tables": self.tables,
            **self.data,
            "seconds": seconds,
            "machine": machine(),
            "environment": environment(),
        }
        write_atomic(out / f"{self.name}.json", (json.dumps(plain(record), indent=1) + "\n").encode())
        met = f"{len(self.marks) - len(self.missed)} of {len(self.marks)}"
        cards = [(met, "pass marks met")] * bool(self.marks) + [(f"{seconds:.0f} s", "time")]
        summary = html_cards(cards) + "".join(f"<p>{escape(text)}</p>" for text in self._sentences)
        bodies = [("Summary", summary)]
        for i, (title, caption, figure) in enumerate(self._figures, 1):
            bodies.append((title, write_figure(figure, caption, out / self.name / f"figure{i}.svg")))
        tables = dict(self.tables)
        if self.marks:
            keys = ("name", "at_least", "at_most", "measured")
            rows = [[*(mark[k] for k in keys), _verdict(mark["passed"]), mark.get("note", "")] for mark in self.marks]
            tables["pass marks"] = [list(_MARK_COLUMNS)] + [
                [_cell(plain(v), f) for v, f in zip(row, _MARK_COLUMNS.values(), strict=True)] for row in rows
            ]
        bodies += [(title, _html(*cells)) for title, cells in tables.items()]
        sections: list[Section] = [(f"part{i}", escape(t), partial(str, b)) for i, (t, b) in enumerate(bodies)]
        print("written:", write_page(out / f"{self.name}.html", f"nasfast {self.name}", "study", sections))


def _verdict(passed: bool) -> str:
    return "ok" if passed else "MISSED"


def _cell(value: Any, digits: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return value if isinstance(value, str) else format(value, digits)


def _html(header: list[str], *rows: list[str]) -> str:
    """A table for a page; a column without any number holds text, and a long table is folded."""
    digits = set("+-.0123456789")
    text = [0, *(j for j in range(1, len(header)) if not any(row[j][:1] in digits for row in rows))]
    table = html_table(header, rows, text_columns=text)
    return table if len(rows) <= _FOLDED else html_details(f"All {len(rows)} rows", table)


def plain(value: Any) -> Any:
    """Nested mappings, sequences, arrays and scalars as JSON, which has no nan and no infinity: they become None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
