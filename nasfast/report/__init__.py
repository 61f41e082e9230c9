"""Figures, the one-page HTML report of a run directory, and the page that compares runs."""

from nasfast.report.comparison import write_comparison
from nasfast.report.html import at_chance, training_top1, write_report

__all__ = ["at_chance", "training_top1", "write_comparison", "write_report"]
