"""Search spaces of cells, their networks, and differentiable architecture search on one local cost."""

from nasfast.cells.derive import derivations, derive
from nasfast.cells.network import CellStandalone, CellSupernet
from nasfast.cells.search import CellSearchConfig, CellSearchResult, search_cells
from nasfast.spaces.cells import (
    CELL_SPACES,
    CELLS,
    DARTS_OPS,
    NAS_BENCH_201_OPS,
    Cell,
    CellSpace,
    Edge,
    darts_cell,
    darts_space,
    minimal_cell,
    modified_cell,
    nas_bench_201_cell,
    nas_bench_201_space,
    read_space,
    simplified_cell,
    space_kind,
)

__all__ = [
    "CELLS",
    "CELL_SPACES",
    "DARTS_OPS",
    "NAS_BENCH_201_OPS",
    "Cell",
    "CellSearchConfig",
    "CellSearchResult",
    "CellSpace",
    "CellStandalone",
    "CellSupernet",
    "Edge",
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
