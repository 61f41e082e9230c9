"""What a study returns: tables, figures, pass marks, claims and verdicts; and its report as text and files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nasfast.config import ConfigBase
from nasfast.display import text_table
from nasfast.report.page import escape, html_cards, html_details, html_page, html_table, write_figure
from nasfast.research.analysis.moments.detect import Verdict
from nasfast.research.studies.draw import Figure
from nasfast.runtime.files import write_atomic

_FOLDED = 60
"""Tables of more rows are folded."""


@dataclass(frozen=True)
class Check:
    """A pass mark: the value `measured` must lie in the closed interval from `low` to `high`; nan fails."""

    name: str
    low: float
    high: float
    measured: float

    @classmethod
    def near(cls, name: str, expected: float, tolerance: float, measured: float) -> Check:
        """The mark of a value that is known up to a tolerance."""
        return cls(name, expected - tolerance, expected + tolerance, measured)

    @property
    def passed(self) -> bool:
        """Whether the mark is met."""
        # both comparisons are false for nan, which therefore fails
        return bool(self.low <= self.measured <= self.high)

    def to_dict(self) -> dict[str, Any]:
        """The mark as JSON."""
        return {**vars(self), "passed": self.passed}


def name_checks(name: str, marks: Mapping[str, tuple[float, float, float]]) -> list[Check]:
    """The pass marks of one thing: what is measured -> the ends of the interval, and the value."""
    return [Check(f"{name}: {what}", low, high, float(value)) for what, (low, high, value) in marks.items()]


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
    def of(cls, title: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> Table:
        """The table of values.

        Args:
            title: above the table.
            columns: heading of every column -> format of its numbers, such as `.3f`.
            rows: text is kept; None, and a number without a value, is a dash.
        """
        return cls(title, tuple(columns), tuple(tuple(map(number, row, columns.values())) for row in rows))

    def __str__(self) -> str:
        return "\n".join([self.title, *text_table([self.header, *self.rows], right=1)])

    def html(self) -> str:
        """The table for a page; a long one is folded. A column without any number holds text."""
        digits = set("+-.0123456789")
        text = [0, *(j for j in range(1, len(self.header)) if not any(row[j][:1] in digits for row in self.rows))]
        table = html_table(self.header, self.rows, text_columns=text)
        return table if len(self.rows) <= _FOLDED else html_details(f"All {len(self.rows)} rows", table)


def number(value: Any, digits: str = ".4g") -> str:
    """A cell of a table: text itself, a number with these digits, and a dash for None and nan."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return value if isinstance(value, str) else format(value, digits)


def marks_table(checks: Iterable[Check]) -> Table:
    """The pass marks; open ends are dashes."""
    columns = {"": "", "from": ".4g", "to": ".4g", "measured": ".4g", "met": ""}
    rows = [(c.name, *map(plain, (c.low, c.high, c.measured)), "ok" if c.passed else "MISSED") for c in checks]
    return Table.of("pass marks", columns, rows)


Record = Mapping[str, Any]
"""A report, or a part of it, as JSON."""


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


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """Everything that a study measured; `str` of it is tables.

    A study gives the fields from `subject` to `files`, and `run.run_study` fills in the rest.

    Attributes:
        subject: what was measured.
        explanation: what the words and symbols of the page mean.
        notes: one sentence each.
        verdicts: the verdicts, by the name of what was judged.
        claims: sentences of a paper beside what was measured.
        data: further numbers by name, which the JSON has too.
        files: paths that were written besides the report's own.
        name: stem of the report's files, such as `moments`.
        config: the settings that were asked for.
        seconds: that the study took.
        machine: the device, the threads and the processor.
        environment: versions, as `nasfast doctor` shows them.
    """

    subject: str
    explanation: str = ""
    notes: tuple[str, ...] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    checks: Sequence[Check] = ()
    claims: Sequence[Claim] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    name: str = ""
    config: ConfigBase = field(default_factory=ConfigBase)
    seconds: float = 0.0
    machine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def missed(self) -> list[Check]:
        """The pass marks that are not met."""
        return [check for check in self.checks if not check.passed]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON; what is not finite becomes null."""
        record = {key: value for key, value in vars(self).items() if key not in ("data", "figures", "files")}
        return plain({**record, **self.data, "config": self.config.to_dict()})

    def save(self, folder: str | Path) -> Path:
        """Write NAME.json, NAME.html and its figures into a directory; returns the page's path."""
        folder = Path(folder)
        write_atomic(folder / f"{self.name}.json", (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        path = folder / f"{self.name}.html"
        write_atomic(path, html_page(f"nasfast {self.name}", "study", self._sections(folder / self.name)).encode())
        return path

    def _sections(self, folder: Path) -> list[tuple[str, str, str]]:
        """Key, title and HTML of the parts of the page, whose figures go to the folder too."""
        sections = [("summary", "Summary", self._summary())]
        if self.claims:
            rows = [[c.claim, f"{c.measured}.", c.verdict] for c in self.claims]
            claims = html_table(["claim", "measured", "verdict"], rows, text_columns=(0, 1, 2))
            sections.append(("claims", "What the paper says, and what was measured", claims))
        for i, figure in enumerate(self.figures, 1):
            file = "".join(c if c.isalnum() else "_" for c in figure.title)
            image = write_figure(figure.drawing(), figure.caption, folder / f"{i}_{file}.svg")
            sections.append((f"figure{i}", escape(figure.title), image))
        tables = [*self.tables, marks_table(self.checks)] if self.checks else self.tables
        return [*sections, *((f"table{i}", escape(table.title), table.html()) for i, table in enumerate(tables, 1))]

    def _summary(self) -> str:
        cards = [(f"{self.seconds:.0f} s", f"{self.machine['threads']} CPU threads")]
        if self.checks:
            cards.insert(0, (f"{len(self.checks) - len(self.missed)} of {len(self.checks)}", "pass marks met"))
        verdicts = [[name, str(verdict)] for name, verdict in self.verdicts.items()]
        return (
            f"{html_cards(cards)}<p>{escape(self.subject)}.</p>"
            + (f"<p>{escape(self.explanation)}</p>" if self.explanation else "")
            + (html_table(["", "verdict"], verdicts, text_columns=(0, 1)) if verdicts else "")
            + "".join(f'<p class="soft">{escape(note)}.</p>' for note in self.notes)
        )

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.subject}", *self.notes, *(f"\n{table}" for table in self.tables), ""]
        if self.verdicts:
            parts += [*text_table([(name, str(verdict)) for name, verdict in self.verdicts.items()]), ""]
        if self.checks:
            parts.append(str(marks_table(self.checks)))
        for claim in self.claims:
            parts += ["", f"claim:    {claim.claim}", f"measured: {claim.measured}", f"verdict:  {claim.verdict}"]
        return "\n".join([*parts, "", f"{self.seconds:.0f} s"])
