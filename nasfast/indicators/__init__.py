"""Scores of architectures, one small file each, and the comparison of their ranking with trained accuracies.

May import `train` and all before it; `table`, `structure`, `accuracies` and `rank` need no torch. Begin with
`registry` and `table`.
"""

from nasfast.indicators.table import IndicatorTable, TableError

__all__ = ["IndicatorTable", "TableError"]
