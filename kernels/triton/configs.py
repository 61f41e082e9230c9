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
# ELEMENTS of a program's tensors, strips by channels: two for each thread by default. See stencil_tile.
DEPTHWISE = {
    "pairs": Config({"ELEMENTS": 256}, 4, 1),
    "single": Config({"ELEMENTS": 128}, 4, 1),
    "small": Config({"ELEMENTS": 128}, 2, 1),
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
    "batch_norm": BATCH_NORM,
    "mixed": MIXED,
    "fold": FOLD,
}

# Columns and rows of a depthwise strip: as many results as fit a thread's registers, beside what backward needs more.
# Every size of a map of 224 x 224 images is a multiple of 7. The key is 0 forward, and backward the stride, of which
# columns and rows are multiples.
STRIPS = {0: ((7, 7), (8, 4)), 1: ((7, 4), (8, 4)), 2: ((14, 4), (8, 4))}
# Channels of a depthwise program, whose bytes are at least one sector of memory
CHANNEL_BLOCKS = (64, 32, 16)
# Programs from which a launch is as wide as the largest GPU, with its 132 multiprocessors
MIN_PROGRAMS = 128


def stencil_tile(config: Config, width: int, channels: int, back: int) -> dict[str, int]:
    """Constants of a depthwise kernel on maps of this width: ROWS, COLUMNS, STRIPS and CB.

    Args:
        back: 0 forward, the stride backward.
    """
    # as little as possible beyond the edge and the last channel
    columns, rows = min(STRIPS[back], key=lambda tile: -(-width // tile[0]) * tile[0])
    block = min(CHANNEL_BLOCKS, key=lambda block: -(-channels // block) * block)
    return {"ROWS": rows, "COLUMNS": columns, "STRIPS": config.tile["ELEMENTS"] // block, "CB": block}
