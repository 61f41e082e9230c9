"""Scores of a trained supernet and how well they rank.

`table` and `rank` need no torch; `bn_gamma` and `accuracy` read a supernet and are imported by name.
"""

from nasfast.indicators.table import IndicatorTable, TableError

__all__ = ["IndicatorTable", "TableError"]
