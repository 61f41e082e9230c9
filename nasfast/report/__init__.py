"""Figures, the one-page HTML report of a run directory, and the page that compares runs.

May import `search` and all before it. Begin with `page`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nasfast import extensions

if TYPE_CHECKING:
    from nasfast.report.comparison import write_comparison
    from nasfast.report.html import write_report

__all__ = ["write_comparison", "write_report"]

# the terminal shows evidence without a page, for which it must not wait for matplotlib
__getattr__ = extensions.later(
    __name__,
    {"write_comparison": "nasfast.report.comparison", "write_report": "nasfast.report.html"},
)
