"""A page is a list of sections; this has what all pages share: the frame, tables and figures."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from matplotlib import rc_context
from matplotlib.figure import Figure

from nasfast.report.style import POLICY, STYLE
from nasfast.runtime.files import write_atomic

# Cells of at most this many characters are not broken into lines.
_SHORT = 10
# characters that XML does not allow, from the text of a user's file
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


Run = TypeVar("Run")

Section = tuple[str, str, Callable[[], str]]
"""Key and title of a section, and what gives its body; title and body are HTML."""


class NotRun(Exception):
    """The file that a section needs does not exist; the argument says which command writes it."""


def write_page(path: Path, name: str, kind: str, sections: Sequence[Section]) -> Path:
    """Write a page, and return its path; a section whose file is absent or damaged says so in its place."""
    bodies = [(key, title, section_body(body)) for key, title, body in sections]
    write_atomic(path, html_page(name, kind, bodies).encode(errors="replace"))
    return path


def write_run_page(
    run_dir: str | Path,
    kind: str,
    open_run: Callable[[Path], Run],
    sections: Sequence[tuple[str, str, Callable[[Run], str]]],
) -> Path:
    """Write report.html of a run directory, whose sections read the files that `open_run` gives.

    Raises:
        FileNotFoundError: `run_dir` is not a directory.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no directory: give the directory of a run")
    run = open_run(folder)
    parts: list[Section] = [(key, title, partial(section, run)) for key, title, section in sections]
    return write_page(folder / "report.html", folder.resolve().name, kind, parts)


def section_body(write: Callable[[], str]) -> str:
    """The HTML of a section of a page, or a sentence that says why there is none."""
    try:
        return write()
    except NotRun as missing:
        return f'<p class="soft">Not run yet: {escape(missing)}.</p>'
    # damaged JSON may raise any of these but the first
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        return f'<p class="soft">Its file cannot be read ({type(error).__name__}): {escape(error)}</p>'


def html_page(name: str, kind: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """A self-contained page, which loads nothing and has no script.

    `kind` is that of the page, for the title; `sections` are (key, title, body), where title and body are HTML.
    """
    body = "\n".join(f'<section id="{key}"><h2>{title}</h2>\n{text}\n</section>' for key, title, text in sections)
    links = " ".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    name = escape(name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{name}: {kind}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{name}</h1><nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def write_figure(figure: Figure, caption: str, path: Path) -> str:
    """Write a figure to `path` as SVG, and return the HTML that shows it in a page."""
    svg = svg_text(figure, path.stem, caption)
    write_atomic(path, svg.encode())
    return html_figure(svg, caption)


def svg_text(figure: Figure, name: str, caption: str) -> str:
    """The figure as an SVG element for a page, which is a file of its own too; equal figures give equal text.

    Args:
        figure: the figure.
        name: part of the identifiers in the SVG, so that two figures of a page have different ones.
        caption: what readers hear who cannot see the figure.
    """
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r'<g id="[^"]*">', "<g>", _NOT_XML.sub("\ufffd", file.getvalue()))
    label = escape(_NOT_XML.sub("\ufffd", caption))
    return text[text.index("<svg ") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def html_figure(svg: str, caption: str) -> str:
    """HTML that shows a figure, given as SVG, in a page."""
    # only a file needs the names of its namespaces
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg, count=2)
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def html_details(summary: str, body: str) -> str:
    """HTML of a part that is shown when the reader opens it; `body` is HTML."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def html_cards(cards: Sequence[tuple[str, str]]) -> str:
    """HTML of the key figures at the top of a page: (value, what it is) of each."""
    text = "".join(f'<div class="card"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for v, k in cards)
    return f'<div class="cards">{text}</div>'


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], *, text_columns: Sequence[int], note: str = ""
) -> str:
    """HTML of a table with a note below; all of it is escaped. `text_columns` are aligned left, the others right."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        text = ""
        for i, cell in enumerate(cells):
            # a number stays in one line with its unit
            kinds = ["text"] * (i in text_columns) + ["short"] * (tag == "td" and len(str(cell)) <= _SHORT)
            attribute = f' class="{" ".join(kinds)}"' if kinds else ""
            text += f"<{tag}{attribute}>{escape(cell)}</{tag}>"
        return text

    head = f"<tr>{line('th', header)}</tr>" if any(header) else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    below = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f'<div class="wide"><table>{head}{body}</table></div>{below}'


def escape(value: Any) -> str:
    """Text of a user's file, escaped so that it is not read as HTML."""
    return html.escape(str(value))


def millions(value: float) -> str:
    """A number of MACs or parameters."""
    return f"{value / 1e6:,.2f} M"


def percent(fraction: float) -> str:
    """An accuracy from 0 to 1."""
    return f"{100 * fraction:.2f} %"


def format_interval(estimate: Mapping[str, float | None]) -> str:
    """An estimate with its interval, as `rank.json` has it."""
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    if value is None:
        return "undefined"
    if low == high:  # one observation, such as the only pair of two seeds, has no interval
        return f"{value:+.3f}"
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
