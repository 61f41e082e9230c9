"""Parts that all pages share: style, tables, embedded figures and the frame."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nasfast.runtime.files import write_atomic

_STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1c2024; --soft: #5b6470; --line: #d9dee4; --card: #f5f7f9;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --bg: #15181c; --fg: #e6e8ea; --soft: #9aa4b0; --line: #333a42;
  --card: #1e2329; --accent: #58b4e8; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 0 auto; padding: 1.5rem;
  max-width: 68rem; }
.note { border-left: 4px solid #d55e00; background: var(--card); padding: .5rem .9rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem;
  border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); } nav a { margin-right: .9rem; color: var(--accent); }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem 1rem; }
.card b { display: block; font-size: 1.4rem; } .card span { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } .text { text-align: left; }
img { max-width: 100%; background: #ffffff; border-radius: .5rem; border: 1px solid var(--line); padding: .4rem;
  box-sizing: border-box; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; overflow-x: auto;
  font-size: .85rem; } code { font-size: .92em; }
"""


def page_of(name: str, kind: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """A self-contained page.

    Args:
        name: the heading.
        kind: kind of the page, for the title.
        sections: (key, title, body) of each section; title and body are HTML.
    """
    body = "\n".join(f'<section id="{key}"><h2>{title}</h2>\n{text}\n</section>' for key, title, text in sections)
    links = " ".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    name = escape(name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{name}: {kind}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{name}</h1><nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def embedded(figure: Figure, caption: str, path: Path) -> str:
    """Write a figure to `path` as PNG, and return the HTML that embeds it in a page."""
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomic(path, image.getvalue())
    data = base64.b64encode(image.getvalue()).decode()
    return f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}"><p class="soft">{escape(caption)}</p>'


def cards_of(cards: Sequence[tuple[str, str]]) -> str:
    """HTML of the key figures at the top of a page: (value, what it is) of each."""
    text = "".join(f'<div class="card"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for v, k in cards)
    return f'<div class="cards">{text}</div>'


def table_of(header: Sequence[str], rows: Sequence[Sequence[Any]], *, text_columns: Sequence[int]) -> str:
    """HTML of a table; every cell is escaped. `text_columns` are aligned left, the others right."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        return "".join(
            f"<{tag}{' class=text' if i in text_columns else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    head = f"<tr>{line('th', header)}</tr>" if any(header) else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}{body}</table></div>'


def escape(value: Any) -> str:
    """Text of a user's file, escaped so that it is not read as HTML."""
    return html.escape(str(value))
