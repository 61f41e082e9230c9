"""The look of all pages: colours for light and dark, the style sheet, and the script that pages also work without."""

from __future__ import annotations

import base64
import hashlib

INK, PAPER, EMPTY = "#000000", "#fefefe", "#e3e3e3"
"""Colours of figures that follow the page: lines and text, their background, and cells that have no value."""

ON_LIGHT, ON_DARK = "#111111", "#ffffff"
"""Colours of text on a coloured area, which is the same in light and dark."""

DARK = {
    INK: "#e6e8ea",
    PAPER: "#15181c",
    EMPTY: "#2c323a",
    "#b0b0b0": "#6b7480",  # matplotlib's grid
    "#cccccc": "#6b7480",
    # Okabe and Ito's palette
    "#0072b2": "#58b4e8",
    "#d55e00": "#ff8a3d",
    "#009e73": "#2fd0a0",
    "#cc79a7": "#e3a0c6",
    "#e69f00": "#f2b632",
    # the operations of cells
    "#cf6ba0": "#e590bf",
    "#b3202a": "#f2686f",
    "#e08e00": "#f5b03c",
    "#00558c": "#5aa5dd",
    "#00734f": "#35b48a",
    "#45b97c": "#7fdca8",
    "#3da5e0": "#8fd0f5",
    "#7a3fa0": "#b98ae0",
    "#8c5a2b": "#c99a6b",
    # the nodes and the background of panels of cells
    "#cfe3f3": "#1f4058",
    "#fdf0e6": "#2e241c",
    "#c8c8c8": "#4a525c",
}
"""Colour of a figure in a light page -> the same in a dark one; any other colour is the same in both."""


def variable(colour: str) -> str:
    """The CSS value of a colour of `DARK`: its light value, unless the page defines another."""
    return f"var(--c{colour[1:]},{colour})"


_DARK_COLOURS = " ".join(f"--c{light[1:]}: {dark};" for light, dark in DARK.items())

STYLE = f"""
:root {{ color-scheme: light dark; --bg: #ffffff; --fg: #1c2024; --soft: #5b6470; --line: #d9dee4; --card: #f5f7f9;
  --accent: #0072b2; --mark: #d55e00; }}
@media (prefers-color-scheme: dark) {{ :root {{ --bg: #15181c; --fg: #e6e8ea; --soft: #9aa4b0; --line: #333a42;
  --card: #1e2329; --accent: #58b4e8; --mark: #ff8a3d; {_DARK_COLOURS} }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 0 auto; padding: 1.5rem;
  max-width: 68rem; overflow-wrap: break-word; }}
a {{ color: var(--accent); }}
.note {{ border-left: 4px solid var(--mark); background: var(--card); padding: .5rem .9rem; }}
h1 {{ font-size: 1.7rem; margin: 0 0 .2rem; }} h2 {{ font-size: 1.2rem; margin: 2.4rem 0 .6rem;
  border-bottom: 1px solid var(--line); padding-bottom: .2rem; }} h3 {{ font-size: 1rem; margin: 1.2rem 0 .3rem; }}
p {{ margin: .4rem 0; }} .soft {{ color: var(--soft); }}
nav {{ display: flex; flex-wrap: wrap; gap: .1rem .9rem; }}
.cards {{ display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }}
.card {{ background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem 1rem; }}
.card b {{ display: block; font-size: 1.4rem; }} .card span {{ color: var(--soft); font-size: .85rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: baseline; }}
.short {{ white-space: nowrap; }}
th {{ color: var(--soft); font-weight: 600; }} .text {{ text-align: left; }}
@media (max-width: 50rem) {{ body {{ padding: 1rem; }} table {{ font-size: .75rem; }}
  th, td {{ padding: .3rem .15rem; }} }}
figure {{ margin: .6rem 0; }} figure svg {{ max-width: 100%; height: auto; }}
figure svg text {{ pointer-events: none; }} figcaption {{ color: var(--soft); }}
pre {{ background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; overflow-x: auto;
  font-size: .85rem; margin: .6rem 0; }} code {{ font-size: .92em; }}
details {{ margin: .6rem 0; }} summary {{ cursor: pointer; color: var(--accent); }}
.command {{ position: relative; }} .command pre {{ padding-right: 4.5rem; white-space: pre-wrap; }}
.command button {{ position: absolute; top: .45rem; right: .45rem; font: inherit; font-size: .8rem; color: var(--soft);
  background: var(--bg); border: 1px solid var(--line); border-radius: .3rem; padding: .1rem .5rem; cursor: pointer; }}
.tip {{ position: fixed; z-index: 9; pointer-events: none; background: var(--fg); color: var(--bg); font-size: .8rem;
  line-height: 1.35; padding: .25rem .5rem; border-radius: .3rem; white-space: pre-line; max-width: 22rem; }}
"""

SCRIPT = """
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
// the values of figures: shown at once, where the browser alone would wait and show them on no touch screen
for (const title of document.querySelectorAll("figure svg title")) {
  title.parentNode.dataset.value = title.textContent;
  title.remove();
}
for (const kind of ["pointermove", "pointerdown"]) {
  addEventListener(kind, event => {
    const at = event.target.closest ? event.target.closest("[data-value]") : null;
    tip.hidden = !at;
    if (!at) return;
    tip.textContent = at.dataset.value;
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
  });
}
for (const box of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  button.textContent = "copy";
  button.onclick = async () => {
    const code = box.querySelector("pre");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  };
  box.append(button);
}
"""

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)
"""Content-Security-Policy of a page: it loads nothing and runs no script but this one."""
