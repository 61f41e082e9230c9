"""Tile sizes of the kernels: a fixed default for each, and the few others that tuning tries.

A program's shared memory must fit the 99 KB of an RTX 3080 (sm_86) in every configuration here, and no default may spill
registers; tests/kernels checks both ahead of time.
"""

from typing import NamedTuple


class Config(NamedTuple):
    """Constexpr tile sizes and launch options of one kernel."""

    tile: dict[str, int]
    num_warps: int
    num_stages: int


# BM x BN results per program, BK of the depth at a time. The first is the default.
POINTWISE = {
    "wide": Config({"BM": 128, "BN": 64, "BK": 32}, 4, 3),
    "narrow": Config({"BM": 128, "BN": 32, "BK": 32}, 4, 3),
    "square": Config({"BM": 64, "BN": 64, "BK": 64}, 4, 3),
    "large": Config({"BM": 128, "BN": 128, "BK": 32}, 8, 3),
}
# TH rows of pixels (even, for stride 2) by CB channels; TW follows from the width of the map, see tile_width.
DEPTHWISE = {
    "rows4": Config({"TH": 4, "CB": 32}, 4, 2),
    "rows2": Config({"TH": 2, "CB": 64}, 4, 2),
    "rows8": Config({"TH": 8, "CB": 16}, 4, 2),
}
# ROWS pixels by CHANNELS channels of passes over a tensor
BATCH_NORM = {
    "long": Config({"ROWS": 128, "CHANNELS": 64}, 8, 2),
    "short": Config({"ROWS": 64, "CHANNELS": 64}, 4, 2),
}
# PROGRAMS partial sums by CHANNELS channels at a time
FINALIZE = {"all": Config({"PROGRAMS": 128, "CHANNELS": 16}, 4, 1)}

FAMILIES = {"pointwise": POINTWISE, "depthwise": DEPTHWISE, "batch_norm": BATCH_NORM, "finalize": FINALIZE}

TILE_WIDTHS = (16, 8)


def tile_width(width: int) -> int:
    """TW of a map of this width: the fewest columns beyond its edge, and then the fewest tiles."""
    return min(TILE_WIDTHS, key=lambda tile: -(-width // tile) * tile)
