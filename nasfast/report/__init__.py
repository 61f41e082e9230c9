"""Figures, the one-page HTML report of a run directory, and the page that compares runs."""

from functools import partial

from nasfast.report.comparison import write_comparison
from nasfast.report.html import at_chance, write_report
from nasfast.runtime import moved

__all__ = ["at_chance", "write_comparison", "write_report"]
__getattr__ = partial(moved.find, __name__)
