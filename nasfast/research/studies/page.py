"""NAME.html: the page of a study and its figures, from its NAME.json alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nasfast.report.page import cards_of, embedded, escape, folded, page_of, table_of
from nasfast.report.plots import literal, new_figure
from nasfast.research.studies import registry
from nasfast.research.studies.parts import number
from nasfast.runtime.files import write_atomic

Form = Mapping[str, Any]
"""A report, or a part of it, as read from its JSON file."""
_FOLDED = 60
"""Tables of more rows are folded."""


Draw = Callable[[Form], Figure]


class Drawing(NamedTuple):
    """How a kind of figure is drawn from its form, and the caption below it."""

    draw: Draw
    caption: str


_DRAWINGS: dict[str, Drawing] = {}


def drawing(kind: str, caption: str) -> Callable[[Draw], Draw]:
    """Decorator of the function that draws a kind of figure from its form: `kind`, `title` and the numbers."""

    def register(draw: Draw) -> Draw:
        assert kind not in _DRAWINGS, kind
        _DRAWINGS[kind] = Drawing(draw, caption)
        return draw

    return register


def write_study_page(folder: str | Path, name: str) -> Path:
    """Write `NAME.html` and its figures under `NAME/` from the `NAME.json` of a directory.

    Args:
        folder: folder of the files.
        name: stem of the files, such as `moments`.

    Returns:
        Path of the page.

    Raises:
        OSError: there is no NAME.json.
    """
    folder = Path(folder)
    form = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    sections = [("summary", "Summary", _summary(form))]
    if form.get("claims"):
        sections.append(("claims", "What the paper says, and what was measured", _claims(form["claims"])))
    for i, figure in enumerate(form["figures"], 1):
        file = "".join(c if c.isalnum() else "_" for c in figure["title"])
        drawn, caption = study_figure({**form, **figure}), drawings()[figure["kind"]].caption
        image = embedded(drawn, caption, folder / name / f"{i}_{file}.svg")
        sections.append((f"figure{i}", escape(figure["title"]), image))
    for i, table in enumerate(form["tables"], 1):
        sections.append((f"table{i}", escape(table["title"]), _table(table["header"], table["rows"])))
    if form["checks"]:
        sections.append(("marks", "Pass marks", _marks(form["checks"])))
    path = folder / f"{name}.html"
    write_atomic(path, page_of(f"nasfast {name}", "study", sections).encode())
    return path


def study_figure(form: Form) -> Figure:
    """One figure of a study.

    Args:
        form: `kind`, `title` and the numbers, as in the `figures` of its JSON file; or with those of the whole file.
    """
    figure = drawings()[form["kind"]].draw(form)
    figure.suptitle(literal(form["title"]), fontsize=11)
    return figure


def drawings() -> Mapping[str, Drawing]:
    """Every kind of figure of every study."""
    registry.modules("figures")  # each registers its own
    return _DRAWINGS


def numbers(values: Any) -> np.ndarray:
    """Nested lists of a form as float64; None becomes nan."""
    return np.array(values, dtype=float)


def legend(figure: Figure, handles: Sequence[Any], *, columns: int = 8) -> None:
    """One legend for all panels, below them, in rows of about equal length."""
    rows = math.ceil(len(handles) / columns)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=math.ceil(len(handles) / rows), fontsize=8, frameon=False
    )


def panels(count: int, columns: int, width: float, height: float, *, top: float = 0.5) -> tuple[Figure, Sequence[Axes]]:
    """A figure of `count` panels in rows of at most `columns`.

    Args:
        count, columns: how many panels, and how many side by side.
        width: inches of the figure.
        height: inches of a row.
        top: inches above the rows.
    """
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    figure, axes = new_figure(width, top + height * rows, rows=rows, columns=columns)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def _claims(claims: Sequence[Form]) -> str:
    """The claims of a paper beside what was measured."""
    return "".join(
        f'<div class="note"><p><b>{escape(c["claim"])}</b></p><p class="soft">Measured: {escape(c["measured"])}.</p>'
        f"<p>Verdict: {escape(c['verdict'])}</p></div><br>"
        for c in claims
    )


def _marks(checks: Sequence[Form]) -> str:
    """The pass marks, given as intervals or by expected values and tolerances."""
    around = "expected" in checks[0]
    keys = ("expected", "tolerance") if around else ("low", "high")
    digits = ".4f" if around else ".4g"
    rows = [
        [c["name"], *(number(c[key], digits) for key in (*keys, "measured")), "ok" if c["passed"] else "MISSED"]
        for c in checks
    ]
    header = ["", *(("expected", "within") if around else ("from", "to")), "measured", ""]
    return table_of(header, rows, text_columns=(0, 4))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a long one is folded."""
    text = [0, *(j for j in range(1, len(header)) if not any(_is_number(row[j]) for row in rows))]
    table = table_of(header, rows, text_columns=text)
    return table if len(rows) <= _FOLDED else folded(f"All {len(rows)} rows", table)


def _cards(form: Form, checks: Sequence[Form]) -> list[tuple[str, str]]:
    """What a page shows in large print: the pass marks met, and the time."""
    found = [(f"{form['seconds']:.0f} s", f"{form['machine']['threads']} CPU threads")]
    if checks:
        met = sum(check["passed"] for check in checks)
        found.insert(0, (f"{met} of {len(checks)}", "pass marks met"))
    return found


def _is_number(cell: str) -> bool:
    """Whether a cell is a number. A column without any holds text."""
    return cell[:1] in set("+-.0123456789")


def _summary(form: Form) -> str:
    verdicts = [[name, ", ".join(verdict["names"])] for name, verdict in form["verdicts"].items()]
    return (
        f"{cards_of(_cards(form, form['checks']))}<p>{escape(form['subject'])}.</p>"
        + (f"<p>{escape(form['explanation'])}</p>" if form["explanation"] else "")
        + (table_of(["", "verdict"], verdicts, text_columns=(0, 1)) if verdicts else "")
        + "".join(f'<p class="soft">{escape(note)}.</p>' for note in form["notes"])
    )
