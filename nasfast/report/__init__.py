"""Figures and the one-page HTML report of a run directory."""

from nasfast.report.html import at_chance, write_report

__all__ = ["at_chance", "write_report"]
