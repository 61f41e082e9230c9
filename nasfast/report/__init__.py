"""Figures and the one-page HTML report of a run directory."""

from nasfast.report.html import write_report

__all__ = ["write_report"]
