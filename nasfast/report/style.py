"""The look of all pages: colours for light and dark, and the style sheet."""

from __future__ import annotations

INK, PAPER, EMPTY = "#000000", "#fefefe", "#e3e3e3"
"""Colours of figures: lines and text, their background, and cells that have no value."""

ON_LIGHT, ON_DARK = "#111111", "#ffffff"
"""Colours of text on a light and on a dark area."""

STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1c2024; --soft: #5b6470; --line: #d9dee4; --card: #f5f7f9;
  --accent: #0072b2; --mark: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --bg: #15181c; --fg: #e6e8ea; --soft: #9aa4b0; --line: #333a42;
  --card: #1e2329; --accent: #58b4e8; --mark: #ff8a3d; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 0 auto; padding: 1.5rem;
  max-width: 68rem; overflow-wrap: break-word; }
a { color: var(--accent); }
.note { border-left: 4px solid var(--mark); background: var(--card); padding: .5rem .9rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem;
  border-bottom: 1px solid var(--line); padding-bottom: .2rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .1rem .9rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem 1rem; }
.card b { display: block; font-size: 1.4rem; } .card span { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: baseline; }
.short { white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } .text { text-align: left; }
@media (max-width: 50rem) { body { padding: 1rem; } table { font-size: .75rem; }
  th, td { padding: .3rem .15rem; } }
figure { margin: .6rem 0; } figure svg { max-width: 100%; height: auto; border-radius: .5rem; }
figcaption { color: var(--soft); }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; overflow-x: auto;
  font-size: .85rem; margin: .6rem 0; } code { font-size: .92em; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--accent); }
"""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content-Security-Policy of a page: it loads nothing and runs no script."""
