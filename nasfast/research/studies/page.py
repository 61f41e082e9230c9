"""NAME.html: the page of a study and its figures, from its NAME.json alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from nasfast.report.page import cards_of, embedded, escape, page_of, table_of
from nasfast.report.plots import literal
from nasfast.research.studies import registry
from nasfast.runtime.files import write_atomic

Form = Mapping[str, Any]
"""A report, or a part of it, as read from its JSON file."""
Section = tuple[str, str, str]
"""Key, title and HTML of a part of a page."""


class Drawing(NamedTuple):
    """How a kind of figure is drawn from its form, and the caption below it."""

    draw: Callable[[Form], Figure]
    caption: str


class Page(NamedTuple):
    """What a page consists of: its heading, what follows it in the browser's title, and its sections."""

    heading: str
    kind: str
    sections: Sequence[Section]


def write_study_page(folder: str | Path, name: str) -> Path:
    """Write `NAME.html` and its figures under `NAME/` from the `NAME.json` of a directory.

    A study may have a page of its own: its `figures` module then has `PAGES`, which maps the stem of the files to a
    function of the form and the folder of the images that returns a `Page`.

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
    page = _own_pages().get(name, _page)(form, folder / name)
    path = folder / f"{name}.html"
    write_atomic(path, page_of(*page).encode())
    return path


def study_figure(form: Form) -> Figure:
    """One figure of a study.

    Args:
        form: `kind`, `title` and the numbers, as in the `figures` of its JSON file.
    """
    figure = drawings()[form["kind"]].draw(form)
    figure.suptitle(literal(form["title"]), fontsize=11)
    return figure


@cache
def drawings() -> Mapping[str, Drawing]:
    """Every kind of figure of every study."""
    return {kind: drawing for module in registry.modules("figures") for kind, drawing in module.FIGURES.items()}


def claims_section(form: Form) -> Section:
    """The claims of a paper beside what was measured."""
    text = "".join(
        f'<div class="note"><p><b>{escape(c["claim"])}</b></p><p class="soft">Measured: {escape(c["measured"])}.</p>'
        f"<p>Verdict: {escape(c['verdict'])}</p></div><br>"
        for c in form["claims"]
    )
    return "claims", "What the paper says, and what was measured", text


def marks_section(checks: Sequence[Form]) -> Section:
    """The pass marks, given as intervals or by expected values and tolerances."""
    around = "expected" in checks[0]
    keys = ("expected", "tolerance") if around else ("low", "high")
    digits = ".4f" if around else ".4g"
    rows = [
        [c["name"], *(number(c[key], digits) for key in (*keys, "measured")), "ok" if c["passed"] else "MISSED"]
        for c in checks
    ]
    header = ["", *(("expected", "within") if around else ("from", "to")), "measured", ""]
    return "marks", "Pass marks", table_of(header, rows, text_columns=(0, 4))


def cards(form: Form, checks: Sequence[Form]) -> list[tuple[str, str]]:
    """What a page shows in large print: the pass marks met, and the time."""
    found = [(f"{form['seconds']:.0f} s", f"{form['machine']['threads']} CPU threads")]
    if checks:
        met = sum(check["passed"] for check in checks)
        found.insert(0, (f"{met} of {len(checks)}", "pass marks met"))
    return found


def number(value: float | None, digits: str = ".4g") -> str:
    """A number of a table; a dash where there is none."""
    return "-" if value is None else f"{value:{digits}}"


def _own_pages() -> dict[str, Callable[[Form, Path], Page]]:
    """Stem of the files -> what makes their page, where it is not the common one."""
    own = (getattr(module, "PAGES", {}) for module in registry.modules("figures"))
    return {stem: page for pages in own for stem, page in pages.items()}


def _page(form: Form, images: Path) -> Page:
    """The common page: a summary, the figures, the tables and the pass marks."""
    sections = [("summary", "Summary", _summary(form))]
    if form.get("claims"):
        sections.append(claims_section(form))
    for i, figure in enumerate(form["figures"], 1):
        file = "".join(c if c.isalnum() else "_" for c in figure["title"])
        image = embedded(study_figure(figure), drawings()[figure["kind"]].caption, images / f"{i}_{file}.svg")
        sections.append((f"figure{i}", escape(figure["title"]), image))
    for i, table in enumerate(form["tables"], 1):
        header, rows = table["header"], table["rows"]
        text = [0, *(j for j in range(1, len(header)) if not any(_is_number(row[j]) for row in rows))]
        sections.append((f"table{i}", escape(table["title"]), table_of(header, rows, text_columns=text)))
    if form["checks"]:
        sections.append(marks_section(form["checks"]))
    return Page(f"nasfast {images.name}", "study", sections)


def _is_number(cell: str) -> bool:
    """Whether a cell is a number. A column without any holds text."""
    return cell[:1] in set("+-.0123456789")


def _summary(form: Form) -> str:
    verdicts = [[name, ", ".join(verdict["names"])] for name, verdict in form["verdicts"].items()]
    return (
        f"{cards_of(cards(form, form['checks']))}<p>{escape(form['subject'])}.</p>"
        + (f"<p>{escape(form['explanation'])}</p>" if form["explanation"] else "")
        + (table_of(["", "verdict"], verdicts, text_columns=(0, 1)) if verdicts else "")
        + "".join(f'<p class="soft">{escape(note)}.</p>' for note in form["notes"])
    )
