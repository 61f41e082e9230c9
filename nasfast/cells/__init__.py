"""Networks of cells, the gates that mix their operations, and a differentiable search on them.

The spaces of cells themselves are in `nasfast.spaces.cells`.
"""

from nasfast.cells.derive import derivations, derive
from nasfast.cells.network import CellStandalone, CellSupernet
from nasfast.cells.search import CellSearchResult, search_cells
from nasfast.settings.cells import CellSearchConfig
from nasfast.spaces import read_space, space_kind
from nasfast.spaces.cells import (
    CELLS,
    DARTS_OPS,
    NAS_BENCH_201_OPS,
    Cell,
    CellSpace,
    Edge,
    choice_blocks_space,
    darts_cell,
    darts_space,
    minimal_cell,
    modified_cell,
    nas_bench_201_cell,
    nas_bench_201_space,
    simplified_cell,
)

__all__ = [
    "CELLS",
    "DARTS_OPS",
    "NAS_BENCH_201_OPS",
    "Cell",
    "CellSearchConfig",
    "CellSearchResult",
    "CellSpace",
    "CellStandalone",
    "CellSupernet",
    "Edge",
    "choice_blocks_space",
    "darts_cell",
    "darts_space",
    "derivations",
    "derive",
    "minimal_cell",
    "modified_cell",
    "nas_bench_201_cell",
    "nas_bench_201_space",
    "read_space",
    "search_cells",
    "simplified_cell",
    "space_kind",
]
