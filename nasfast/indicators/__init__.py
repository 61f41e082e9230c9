"""Scores of architectures, one small file each, and the comparison of a score's ranking with trained accuracies.

`table`, `structure`, `accuracies` and `rank` need no torch; modules that read a supernet are imported by name.
"""

from nasfast.indicators.table import IndicatorTable, TableError

__all__ = ["IndicatorTable", "TableError"]
