"""NAME.html: the page of a study and its figures, from its NAME.json alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nasfast.report import moments, nasi, wiring
from nasfast.report.page import cards_of, embedded, escape, page_of, table_of
from nasfast.report.plots import literal
from nasfast.runtime.files import write_atomic

Draw = Callable[[Mapping[str, Any]], Figure]

_FIGURES: dict[str, tuple[Draw, str]] = {**moments.FIGURES, **nasi.FIGURES, **wiring.FIGURES}
"""Kind of figure -> what draws it from its data, and its caption."""


def write_study_page(folder: str | Path, name: str) -> Path:
    """Write `NAME.html` and its figures under `NAME/` from the `NAME.json` of a directory.

    Args:
        folder: of the files.
        name: of the study, such as `moments`.

    Returns:
        Path of the page.

    Raises:
        OSError: there is no NAME.json.
    """
    folder = Path(folder)
    form = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    sections = [("summary", "Summary", _summary(form))]
    for i, figure in enumerate(form["figures"], 1):
        file = "".join(c if c.isalnum() else "_" for c in figure["title"])
        image = embedded(study_figure(figure), _FIGURES[figure["kind"]][1], folder / name / f"{i}_{file}.png")
        sections.append((f"figure{i}", escape(figure["title"]), image))
    for i, table in enumerate(form["tables"], 1):
        header, rows = table["header"], table["rows"]
        text = [0, *(j for j in range(1, len(header)) if not any(_is_number(row[j]) for row in rows))]
        sections.append((f"table{i}", escape(table["title"]), table_of(header, rows, text_columns=text)))
    if form["checks"]:
        sections.append(("marks", "Pass marks", _marks(form["checks"])))
    path = folder / f"{name}.html"
    write_atomic(path, page_of(f"nasfast {name}", "study", sections).encode())
    return path


def study_figure(data: Mapping[str, Any]) -> Figure:
    """One figure of a study.

    Args:
        data: `kind`, `title` and the numbers, as in the `figures` of its JSON file.
    """
    draw, _ = _FIGURES[data["kind"]]
    figure = draw(data)
    figure.suptitle(literal(data["title"]), fontsize=11)
    return figure


def _is_number(cell: str) -> bool:
    """Whether a cell stands in a column of numbers; those without one hold text."""
    return cell[:1] in set("+-.0123456789")


def _marks(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [c["name"], *(_number(c[key]) for key in ("low", "high", "measured")), "ok" if c["passed"] else "MISSED"]
        for c in checks
    ]
    return table_of(["", "from", "to", "measured", ""], rows, text_columns=(0, 4))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _summary(form: Mapping[str, Any]) -> str:
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
