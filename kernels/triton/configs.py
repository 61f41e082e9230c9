"""Tile sizes of the kernels, by family.

A program's shared memory must fit the 99 KB of an RTX 3080 (sm_86). They may not spill registers, except two kernels
for float32, which spill 8 bytes. tests/benchmarks/test_aot.py checks both.
"""

from typing import NamedTuple


class Config(NamedTuple):
    """Constexpr tile sizes and launch options of one kernel.

    Attributes:
        registers: the most registers that a thread may use; None lets the compiler decide.
    """

    tile: dict[str, int]
    num_warps: int
    num_stages: int
    registers: int | None = None


# The most registers per thread with which the 65536 of a multiprocessor hold three programs, of 4 and of 8 warps.
# Without a limit the compiler may spill one or two registers so that one program more fits. With this limit nothing
# spills, and in most launches a fourth program would not fit anyway, because of shared memory or because there are too
# few programs.
_THREE_OF_4, _THREE_OF_8 = 168, 80

# A tile has BM x BN results and reads BK of the depth at a time. These are the largest sizes for 16-bit storage;
# `product_tiles` makes them fit the matrices.
POINTWISE = Config({"BM": 64, "BN": 64, "BK": 64}, 4, 3, _THREE_OF_4)
# The epilogue keeps the coefficients and two sums of its columns in registers, so tiles are smaller.
POINTWISE_BACKWARD = Config({"BM": 32, "BN": 64, "BK": 64}, 4, 3)
# Tensor cores have no float32 without tf32. The products are then kept in registers, and a tile has twice the bytes.
POINTWISE_FP32 = Config({"BM": 64, "BN": 64, "BK": 16}, 8, 2)
# A dense convolution gathers each element of a patch from the image, with an address of its own.
DENSE = Config({"BM": 64, "BN": 64, "BK": 32}, 4, 2)
# A depthwise program's tensors have ELEMENTS = strips x channels elements, by default two per thread; see stencil_tile.
DEPTHWISE = Config({"ELEMENTS": 256}, 4, 1)
# A pass over a tensor reads tiles of ROWS pixels and CHANNELS channels; `pass_tiles` makes them fit the channels.
BATCH_NORM = Config({"ROWS": 32, "CHANNELS": 64}, 4, 1)
# The same for passes over several tensors with few channels
MIXED = Config({"ROWS": 128, "CHANNELS": 16}, 8, 1)
# The most registers per thread of mixed_bn_reduce_kernel. The other kernels of the family need more, and do not spill.
REDUCE_REGISTERS = _THREE_OF_8
# The most tensors that one such launch reads. Each number of tensors is another kernel, because loops over them are
# unrolled.
TOGETHER = 8
# A program computes the coefficients of CHANNELS channels from given statistics.
FOLD = Config({"CHANNELS": 128}, 4, 1)

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

# Columns and rows of a depthwise strip: as many results as fit into a thread's registers. Widths are multiples of 7,
# because the sizes of all maps of 224 x 224 images are. The key is 0 for forward and the stride for backward, where
# columns and rows are multiples of the stride.
STRIPS = {0: ((7, 7), (8, 4)), 1: ((7, 4), (8, 4)), 2: ((14, 4), (8, 4))}
# The most registers per thread of a depthwise kernel for 16-bit storage, by the same key. Backward with stride 1 needs
# at most 128. Kernels for float32 have no limit, because some need more than 168.
STENCIL_REGISTERS = {0: _THREE_OF_4, 1: None, 2: _THREE_OF_4}
# Channels of a depthwise program; their bytes are at least one sector of memory.
CHANNEL_BLOCKS = (64, 32, 16)
# With this many programs a launch fills the largest GPU, which has 132 multiprocessors.
MIN_PROGRAMS = 128
# In a launch with more tiles than this, each program makes several tiles. These programs run in several rounds on 132
# multiprocessors, and their sums are few enough to be added quickly. The number is fixed, so that results do not depend
# on the GPU.
PROGRAMS = 1024
# In a launch with fewer programs than this, tiles become smaller, so that every multiprocessor has a program.
_FEW_PROGRAMS = 132
# Limits of registers for single products, by the BM of their configuration, K and N. BK does not divide this K, and
# with the masks that are then needed the compiler spills one register. With this limit it uses 128 and spills none.
_REGISTERS = {(32, 432, 768): 136}
# Instructions per element of a row that is only read, normalised, or gathered from a patch; per element of the result;
# and per step of the depth, in elements of a row.
READ, NORMALIZED, GATHERED = 2, 8, 30
_RESULT, _STEP = 12, 24


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def product_tiles(config: Config, m: int, k: int, n: int, element: int) -> Config:
    """The tiles of a product (m, k) (k, n), no larger than those of config.

    Every block of columns reads its rows again, and a block that is wider than the matrix computes columns that do not
    exist; the same holds for the depth of a step. BN and BK are those with the fewest instructions, where `element` is
    the number of instructions per element of the rows.
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
    # a narrower tile needs fewer registers, so more of its programs fit, and it has no limit
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
    # strips and blocks that reach least beyond the edge and the last channel
    columns, rows = min(STRIPS[back], key=lambda tile: _cdiv(width, tile[0]) * tile[0])
    block = min(CHANNEL_BLOCKS, key=lambda block: _cdiv(channels, block) * block)
    return {"ROWS": rows, "COLUMNS": columns, "STRIPS": config.tile["ELEMENTS"] // block, "CB": block}
