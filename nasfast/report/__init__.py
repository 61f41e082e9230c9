"""Figures, the one-page HTML report of a run directory, and the page that compares runs.

May import `search` and all before it. Begin with `page`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nasfast import extensions

if TYPE_CHECKING:
    from nasfast.report.comparison import write_comparison
    from nasfast.report.html import write_report

__all__ = ["write_comparison", "write_report"]

_HOMES = {"write_comparison": "nasfast.report.comparison", "write_report": "nasfast.report.html"}


def __getattr__(name: str) -> Any:
    # the terminal shows findings without a page, for which it must not wait for matplotlib
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return extensions.load(f"{_HOMES[name]}:{name}")
