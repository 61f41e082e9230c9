"""What PTX instructions compute, on arrays with one element for each thread; the translated code calls these.

An element may also be a scalar, which all threads share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .parse import PtxError

Array = NDArray

_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
_COMPARE["ge"] = np.greater_equal
_INVERSE = {"eq": "ne", "ne": "eq", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def fma(a: Array, b: Array, c: Array) -> Array:
    """a b + c, rounded once except where the sum of two float64 lies halfway between two float32."""
    wide = np.float64 if a.dtype == np.float32 else np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


def quotient(a: Array, b: Array) -> Array:
    """Of integers, rounded towards zero."""
    return (a - np.fmod(a, b)) // b


def high(a: Array, b: Array) -> Array:
    """The upper half of a product of 32-bit integers."""
    wide = np.dtype(f"{a.dtype.kind}8")
    return ((a.astype(wide) * b.astype(wide)) >> wide.type(32)).astype(a.dtype)


def wide_product(a: Array, b: Array) -> Array:
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(wide) * b.astype(wide)


def shift_left(a: Array, count: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a << np.minimum(count, bits - 1).astype(a.dtype)
    return np.where(count < bits, shifted, a.dtype.type(0)) if np.any(count >= bits) else shifted


def shift_right(a: Array, count: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(count, bits - 1).astype(a.dtype)
    return (
        np.where(count < bits, shifted, a.dtype.type(0)) if a.dtype.kind == "u" and np.any(count >= bits) else shifted
    )


def compared(how: str, a: Array, b: Array) -> Array:
    """setp; what ends in u also holds where one of both is not a number, and ne only where both are."""
    if how == "ne" and a.dtype.kind == "f":
        return (a < b) | (a > b)
    if how[2:] == "u":
        return ~compared(_INVERSE[how[:2]], a, b)
    return _COMPARE[how](a, b)


def saturate(a: Array) -> Array:
    """Within [0, 1]; NaN becomes 0."""
    return np.where(np.isnan(a), np.float32(0), np.clip(a, np.float32(0), np.float32(1))).astype(np.float32)


def truncate(a: Array) -> Array:
    """float32 towards zero to int32, within its range; NaN becomes 0."""
    wide = np.clip(np.nan_to_num(np.trunc(a).astype(np.float64)), -(2.0**31), 2.0**31 - 1)
    return wide.astype(np.int32)


# ---- 16-bit floating point


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(a: Array) -> Array:
    """Bits of the nearest bfloat16, of two equally near ones the even one."""
    bits = a.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_float16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def to_float16(a: Array) -> Array:
    return np.where(np.isnan(a), np.float16("nan"), a.astype(np.float16)).view(np.uint16)


STORAGE = {"bf16": (from_bfloat16, to_bfloat16), "f16": (from_float16, to_float16)}


def halves(pair: Array) -> tuple[Array, Array]:
    """The lower and the upper 16 bits."""
    return (pair & np.uint32(0xFFFF)).astype(np.uint16), (pair >> np.uint32(16)).astype(np.uint16)


def joined(parts: Sequence[Array]) -> Array:
    """A pair of 16 bits each, the lower half first."""
    lower, upper = parts
    return lower.astype(np.uint32) | upper.astype(np.uint32) << np.uint32(16)


def pack(storage: str, upper: Array, lower: Array, relu: str) -> Array:
    """cvt.rn(.relu) of two float32 to a pair; the first operand becomes the upper half."""
    _, to = STORAGE[storage]
    if relu:
        # np.where instead of maximum, so that -0 becomes 0 and NaN stays
        upper, lower = (np.where(a <= 0, np.float32(0), a).astype(np.float32) for a in (upper, lower))
    return joined((to(lower), to(upper)))


def least(storage: str, a: Array, b: Array) -> Array:
    """min.NaN of pairs."""
    get, to = STORAGE[storage]
    parts = zip(halves(a), halves(b), strict=True)
    return joined([to(np.minimum(get(x), get(y))) for x, y in parts])


# ---- instructions of whole warps: arrays hold warps one after the other


def _tiles(pairs: Array, storage: str) -> Array:
    """One register of each lane as 8 x 8 matrices: lane l has the elements 2 (l % 4) and + 1 of row l / 4."""
    return STORAGE[storage][0](np.ascontiguousarray(pairs).view(np.uint16)).reshape(-1, 8, 8)


def product(storage: str, a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """mma.sync m16n8k16 and m16n8k8 with float32 sums: c + a b, as the PTX ISA lays out the fragments.

    a: row l / 4 (+ 8 in every second register), columns 2 (l % 4) and + 1 (+ 8 from the third register on).
    b: rows 2 (l % 4) and + 1 (+ 8 in the second register), column l / 4.
    c: rows l / 4 and + 8, columns like those of a.
    """
    tiles = [_tiles(part, storage) for part in a]
    left = np.concatenate([np.concatenate(tiles[i : i + 2], 1) for i in range(0, len(a), 2)], 2)
    right = np.concatenate([_tiles(part, storage) for part in b], 2)
    total = np.matmul(left.astype(np.float64), right.swapaxes(1, 2).astype(np.float64))
    start = np.stack(np.broadcast_arrays(*c, np.empty(len(left) * 32))[:4], -1).reshape(-1, 8, 4, 2, 2)
    # [warp, half, row, column pair, which of the pair]
    sums = (total.reshape(-1, 2, 8, 4, 2) + start.transpose(0, 3, 1, 2, 4)).astype(np.float32)
    return [sums[:, i // 2, :, :, i % 2].reshape(-1) for i in range(4)]


def transposed(pairs: Array) -> Array:
    """movmatrix.trans: the 8 x 8 matrix of each warp, transposed."""
    tiles = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(tiles.swapaxes(1, 2)).reshape(-1).view(np.uint32)


def matrices(rows: Array, transpose: str) -> list[Array]:
    """ldmatrix.x4: rows [lane, 8] of 16 bits, as read at the address of each lane; four registers.

    Lane 8 j + i gives the address of row i of matrix j, which goes to register j.
    """
    tiles = rows.reshape(-1, 4, 8, 8)
    if transpose:
        tiles = tiles.swapaxes(2, 3)
    return [np.ascontiguousarray(tiles[:, j]).reshape(-1).view(np.uint32) for j in range(4)]


def shuffled(mode: str, value: Array, source: Array, clamp: Array, mask: Array) -> Array:
    """shfl.sync over all 32 lanes; clamp and mask are those of all lanes."""
    if np.any(clamp != 31) or np.any(mask != 0xFFFFFFFF):
        raise PtxError("the interpreter knows shuffles of whole warps")
    lane, source = np.arange(len(value)), np.broadcast_to(source, value.shape).astype(np.int64)
    return value[lane ^ source if mode == "bfly" else lane // 32 * 32 + (source & 31)]
