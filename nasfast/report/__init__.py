"""Figures, the one-page HTML report of a run directory, and the pages of the studies."""

from nasfast.report.html import at_chance, write_report
from nasfast.report.isometry import write_isometry_page
from nasfast.report.study import study_figure, write_study_page

__all__ = ["at_chance", "study_figure", "write_isometry_page", "write_report", "write_study_page"]
