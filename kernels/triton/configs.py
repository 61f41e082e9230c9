"""Tile sizes of the kernels: a fixed default for each, and the few others that tuning tries.

A program's shared memory must fit the 99 KB of an RTX 3080 (sm_86) in every configuration here, and no default may
spill registers; tests/benchmarks/test_aot.py checks both.
"""

from typing import NamedTuple


class Config(NamedTuple):
    """Constexpr tile sizes and launch options of one kernel.

    Attributes:
        registers: the most that a thread may take; None: the compiler decides.
    """

    tile: dict[str, int]
    num_warps: int
    num_stages: int
    registers: int | None = None


# Most registers of a thread, for a multiprocessor with its 65536 to hold three programs of 4 warps, or of 8. Without a
# limit the compiler may spill a register or two of a kernel that needs a few more than a number of programs leave it,
# to make room for one program more. Nothing spills within the limit, and in most launches shared memory or the number
# of programs allows no fourth one.
_THREE_OF_4, _THREE_OF_8 = 168, 80

# BM x BN results per tile, BK of the depth at a time, for 16-bit storage: the most, `product_tiles` makes them fit the
# matrices. The first of each family is the default.
POINTWISE = {
    "square": Config({"BM": 64, "BN": 64, "BK": 64}, 4, 3, _THREE_OF_4),
    "shallow": Config({"BM": 64, "BN": 64, "BK": 32}, 4, 3, _THREE_OF_4),
    "tall": Config({"BM": 128, "BN": 64, "BK": 32}, 8, 3),
    "wide": Config({"BM": 64, "BN": 128, "BK": 32}, 8, 2),
}
# the epilogue keeps coefficients and two sums of its columns in registers, so tiles are smaller
POINTWISE_BACKWARD = {
    "low": Config({"BM": 32, "BN": 64, "BK": 64}, 4, 3),
    "shallow": Config({"BM": 32, "BN": 64, "BK": 32}, 4, 3),
    "square": Config({"BM": 64, "BN": 64, "BK": 64}, 8, 2),
}
# float32 without tf32 has no tensor cores: its products live in registers, and its tiles are twice the bytes
POINTWISE_FP32 = {
    "square": Config({"BM": 64, "BN": 64, "BK": 16}, 8, 2),
    "narrow": Config({"BM": 64, "BN": 32, "BK": 16}, 4, 2),
}
# gathers an element of the image for each element of a patch, with an address of its own
DENSE = {
    "square": Config({"BM": 64, "BN": 64, "BK": 32}, 4, 2),
    "narrow": Config({"BM": 64, "BN": 32, "BK": 32}, 8, 2),
}
# ELEMENTS of a program's tensors, strips by channels: two for each thread by default. See stencil_tile.
DEPTHWISE = {
    "pairs": Config({"ELEMENTS": 256}, 4, 1),
    "single": Config({"ELEMENTS": 128}, 4, 1),
    "small": Config({"ELEMENTS": 128}, 2, 1),
}
# ROWS pixels by CHANNELS channels of a tile of passes over a tensor; `pass_tiles` makes them fit the channels
BATCH_NORM = {
    "short": Config({"ROWS": 32, "CHANNELS": 64}, 4, 1),
    "long": Config({"ROWS": 64, "CHANNELS": 64}, 4, 1),
}
# ROWS pixels by CHANNELS channels of passes over several tensors of few channels
MIXED = {
    "narrow": Config({"ROWS": 128, "CHANNELS": 16}, 8, 1),
    "wide": Config({"ROWS": 32, "CHANNELS": 64}, 8, 1),
}
# Most registers of a thread of mixed_bn_reduce_kernel; the other kernels of the family need more, and do not spill
REDUCE_REGISTERS = _THREE_OF_8
# Tensors that one such launch reads at most: each number of them is a kernel of its own, all unrolled
TOGETHER = 8
# CHANNELS whose coefficients a program makes of given statistics
FOLD = {"all": Config({"CHANNELS": 128}, 4, 1)}

FAMILIES = {
    "pointwise": POINTWISE,
    "pointwise_fp32": POINTWISE_FP32,
    "pointwise_backward": POINTWISE_BACKWARD,
    "pointwise_backward_fp32": POINTWISE_FP32,
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
# Most registers of a thread of a depthwise kernel for 16-bit storage, by the same key. Backward with stride 1 needs 128
# or fewer, and some kernels for float32 need more than 168.
STENCIL_REGISTERS = {0: _THREE_OF_4, 1: None, 2: _THREE_OF_4}
# Channels of a depthwise program, whose bytes are at least one sector of memory
CHANNEL_BLOCKS = (64, 32, 16)
# Programs from which a launch is as wide as the largest GPU, with its 132 multiprocessors
MIN_PROGRAMS = 128
# Programs of one launch above which each makes several tiles: several rounds on a GPU of 132 multiprocessors, and
# few enough that their sums are quickly added. Not the number of the GPU's own, so that no result depends on it.
PROGRAMS = 1024
# ... and below which smaller tiles make more of them: one for each of the multiprocessors
_FEW_PROGRAMS = 132
# Limits of registers of single products, by the BM of their configuration, K and N. With the masks of a depth that BK
# does not divide, the compiler spills one register at 96, and at 128; this limit makes it use 128 and spill none.
_REGISTERS = {(32, 432, 768): 136}
# Instructions for an element of a row that is only read, normalised, or gathered from a patch; for one of the result;
# and for a step of the depth, in elements of a row
READ, NORMALIZED, GATHERED = 2, 8, 30
_RESULT, _STEP = 12, 24


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def product_tiles(config: Config, m: int, k: int, n: int, element: int) -> Config:
    """The tiles of a product (m, k) (k, n), no larger than those of config.

    A block of columns makes its rows anew, and a block wider than the matrix computes what nobody wants; so with the
    depth of a step. BN and BK cost least by a count of instructions, `element` for each element of the rows.
    """
    most = config.tile
    columns = [b for b in (128, 64, 32) if b <= most["BN"] and n > 16] or [16]
    bn = min(columns, key=lambda b: _cdiv(n, b) * (element * k + _RESULT * b))
    depths = [b for b in (64, 32, 16) if b <= most["BK"]]
    bk = max(16, 1 << (k - 1).bit_length())
    if k > depths[0]:
        bk = min(depths, key=lambda b: _cdiv(k, b) * (b + _STEP))
    bm = most["BM"]
    while bm > 32 and _cdiv(m, bm) * _cdiv(n, bn) < _FEW_PROGRAMS:
        bm //= 2
    tiles = max(1, _cdiv(m, bm) * _cdiv(n, bn) // PROGRAMS)
    # a narrower tile needs fewer registers, and more programs of it fit
    registers = _REGISTERS.get((most["BM"], k, n), config.registers if bn == most["BN"] else None)
    return config._replace(tile={"BM": bm, "BN": bn, "BK": bk, "TILES": tiles}, registers=registers)


def pass_tiles(config: Config, rows: int, channels: int) -> Config:
    """The tiles of a pass over (rows, channels) with as many elements as those of config."""
    size = config.tile["ROWS"] * config.tile["CHANNELS"]
    width = min((128, 64, 32, 16), key=lambda b: (_cdiv(channels, b) * b, -b))
    tiles = max(1, _cdiv(rows, size // width) * _cdiv(channels, width) // PROGRAMS)
    return config._replace(tile={"ROWS": size // width, "CHANNELS": width, "TILES": tiles})


def stencil_tile(config: Config, width: int, channels: int, back: int) -> dict[str, int]:
    """Constants of a depthwise kernel on maps of this width: ROWS, COLUMNS, STRIPS and CB.

    Args:
        back: 0 forward, the stride backward.
    """
    # as little as possible beyond the edge and the last channel
    columns, rows = min(STRIPS[back], key=lambda tile: -(-width // tile[0]) * tile[0])
    block = min(CHANNEL_BLOCKS, key=lambda block: -(-channels // block) * block)
    return {"ROWS": rows, "COLUMNS": columns, "STRIPS": config.tile["ELEMENTS"] // block, "CB": block}
