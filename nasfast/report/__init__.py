"""Figures, the one-page HTML report of a run directory, and the page of an isometry study."""

from nasfast.report.html import at_chance, write_report
from nasfast.report.isometry import write_isometry_page

__all__ = ["at_chance", "write_isometry_page", "write_report"]
