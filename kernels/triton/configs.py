"""Tile sizes of the kernels: a fixed default for each, and the few others that tuning tries.

A program's shared memory must fit the 99 KB of an RTX 3080 (sm_86) in every configuration here, and no default may
spill registers; tests/benchmarks/test_aot.py checks both.
"""

from typing import NamedTuple


class Config(NamedTuple):
    """Constexpr tile sizes and launch options of one kernel."""

    tile: dict[str, int]
    num_warps: int
    num_stages: int


# BM x BN results per program, BK of the depth at a time, for 16-bit storage. The first of each family is the default.
POINTWISE = {
    "square": Config({"BM": 64, "BN": 64, "BK": 32}, 4, 3),
    "wide": Config({"BM": 128, "BN": 64, "BK": 32}, 8, 3),
    "narrow": Config({"BM": 128, "BN": 32, "BK": 32}, 4, 3),
    "large": Config({"BM": 128, "BN": 128, "BK": 32}, 8, 2),
}
# float32 without tf32 has no tensor cores: its products live in registers, and its tiles are twice the bytes
POINTWISE_FP32 = {
    "square": Config({"BM": 64, "BN": 64, "BK": 16}, 8, 2),
    "wide": Config({"BM": 128, "BN": 32, "BK": 16}, 8, 2),
}
# gathers an element of the image for each element of a patch, with an address of its own
DENSE = {
    "small": Config({"BM": 32, "BN": 32, "BK": 32}, 4, 2),
    "tall": Config({"BM": 64, "BN": 32, "BK": 32}, 8, 2),
}
# TH rows of pixels (even, for stride 2) by CB channels; TW follows from the width of the map, see tile_width.
DEPTHWISE = {
    "rows4": Config({"TH": 4, "CB": 32}, 4, 2),
    "rows2": Config({"TH": 2, "CB": 64}, 4, 2),
    "rows8": Config({"TH": 8, "CB": 16}, 4, 2),
}
# A tile as of DEPTHWISE, of all channels in turn: its rows of the narrow gradient are summed in registers
EXPANSION = {
    "rows4": Config({"TH": 4, "CB": 16}, 4, 2),
    "warps8": Config({"TH": 4, "CB": 16}, 8, 2),
    "rows8": Config({"TH": 8, "CB": 16}, 8, 2),
}
EXPANSION_FP32 = {
    "rows2": Config({"TH": 2, "CB": 16}, 4, 2),
    "rows4": Config({"TH": 4, "CB": 16}, 8, 2),
}
# COLUMNS of the matrix of terms, from CB channels at a time; SAMPLES rows for a pivot near the mean
EXPANSION_TERMS = {"columns16": Config({"COLUMNS": 16, "CB": 32, "SAMPLES": 64}, 4, 2)}
EXPANSION_FINISH = {
    "rows64": Config({"BM": 64, "BK": 16}, 4, 2),
    "rows128": Config({"BM": 128, "BK": 16}, 8, 2),
}
# ROWS pixels by CHANNELS channels of passes over a tensor
BATCH_NORM = {
    "long": Config({"ROWS": 64, "CHANNELS": 64}, 8, 2),
    "short": Config({"ROWS": 32, "CHANNELS": 64}, 8, 2),
}
# ROWS pixels by CHANNELS channels of passes over several tensors of few channels
MIXED = {
    "narrow": Config({"ROWS": 128, "CHANNELS": 16}, 8, 1),
    "wide": Config({"ROWS": 32, "CHANNELS": 64}, 8, 1),
}
# Tensors that one such launch reads at most: each number of them is a kernel of its own, all unrolled
TOGETHER = 8
# CHANNELS whose coefficients a program makes of given statistics
FOLD = {"all": Config({"CHANNELS": 128}, 4, 1)}

FAMILIES = {
    "pointwise": POINTWISE,
    "pointwise_fp32": POINTWISE_FP32,
    "dense": DENSE,
    "depthwise": DEPTHWISE,
    "expansion": EXPANSION,
    "expansion_fp32": EXPANSION_FP32,
    "expansion_terms": EXPANSION_TERMS,
    "expansion_finish": EXPANSION_FINISH,
    "batch_norm": BATCH_NORM,
    "mixed": MIXED,
    "fold": FOLD,
}

TILE_WIDTHS = (16, 8)


def tile_width(width: int) -> int:
    """TW of a map of this width: the fewest columns beyond its edge, and then the fewest tiles."""
    return min(TILE_WIDTHS, key=lambda tile: -(-width // tile) * tile)
