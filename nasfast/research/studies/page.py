"""NAME.html: the page of a study and its figures, from its NAME.json alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nasfast.report.page import cards_of, embedded, escape, folded, page_of, table_of
from nasfast.research.studies.draw import figure_of
from nasfast.research.studies.report import Form, marks_table
from nasfast.runtime.files import write_atomic

_FOLDED = 60
"""Tables of more rows are folded."""


def write_study_page(folder: str | Path, name: str) -> Path:
    """Write `NAME.html` and its figures under `NAME/` from the `NAME.json` of a directory; returns the page's path."""
    folder = Path(folder)
    form = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    sections = [("summary", "Summary", _summary(form))]
    if form["claims"]:
        rows = [[c["claim"], f"{c['measured']}.", c["verdict"]] for c in form["claims"]]
        claims = table_of(["claim", "measured", "verdict"], rows, text_columns=(0, 1, 2))
        sections.append(("claims", "What the paper says, and what was measured", claims))
    for i, figure in enumerate(form["figures"], 1):
        file = "".join(c if c.isalnum() else "_" for c in figure["title"])
        image = embedded(figure_of(figure), figure["caption"], folder / name / f"{i}_{file}.svg")
        sections.append((f"figure{i}", escape(figure["title"]), image))
    for i, table in enumerate(form["tables"], 1):
        sections.append((f"table{i}", escape(table["title"]), _table(table["header"], table["rows"])))
    if form["checks"]:
        marks = marks_table(form["checks"])
        sections.append(("marks", "Pass marks", _table(marks.header, marks.rows)))
    path = folder / f"{name}.html"
    write_atomic(path, page_of(f"nasfast {name}", "study", sections).encode())
    return path


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a long one is folded. A column without any number holds text."""
    digits = set("+-.0123456789")
    text = [0, *(j for j in range(1, len(header)) if not any(row[j][:1] in digits for row in rows))]
    table = table_of(header, rows, text_columns=text)
    return table if len(rows) <= _FOLDED else folded(f"All {len(rows)} rows", table)


def _summary(form: Form) -> str:
    cards = [(f"{form['seconds']:.0f} s", f"{form['machine']['threads']} CPU threads")]
    if form["checks"]:
        met = sum(check["passed"] for check in form["checks"])
        cards.insert(0, (f"{met} of {len(form['checks'])}", "pass marks met"))
    verdicts = [[name, ", ".join(verdict["names"])] for name, verdict in form["verdicts"].items()]
    return (
        f"{cards_of(cards)}<p>{escape(form['subject'])}.</p>"
        + (f"<p>{escape(form['explanation'])}</p>" if form["explanation"] else "")
        + (table_of(["", "verdict"], verdicts, text_columns=(0, 1)) if verdicts else "")
        + "".join(f'<p class="soft">{escape(note)}.</p>' for note in form["notes"])
    )
