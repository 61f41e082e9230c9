"""Figures, the one-page HTML report of a run directory, and the pages of the isometry and moments studies."""

from nasfast.report.html import at_chance, write_report
from nasfast.report.isometry import write_isometry_page
from nasfast.report.moments import moments_figure, write_moments_page

__all__ = ["at_chance", "moments_figure", "write_isometry_page", "write_moments_page", "write_report"]
