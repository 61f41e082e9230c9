"""Global memory of the process, and shared memory with a shadow that knows who touched each of its bytes.

An access to shared memory happens before another one if a barrier of the block lies between them, a bar.warp.sync for
two lanes of a warp, or if one thread makes both. Nothing else orders them: shuffles and matrix instructions do not, by
the memory model of PTX. Two accesses that are not ordered are a race if one of them writes, whatever this run computes;
but two writes of equal numbers are none, as for compute-sanitizer.

The shadow keeps of the last write and of the last reads one number: the count of the block's barriers at that time,
from bit 40 on; that of the warp's, from bit 20 on; and who it was, plus 1. Lanes of one warp that read together are
_LANES + their warp; several warps are _ALL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .parse import PtxError

Array = NDArray

_LANES, _ALL = 2048, 4095
_WHO = 0xFFFFF
_BARRIERS = ~((1 << 40) - 1)
# a copy that has not arrived, whose place nobody may touch
_IN_FLIGHT = 1 << 62
# what several threads have written at the same time, which nobody may read
_SEVERAL = 1 << 61


class Global:
    """Memory of the process, of which only what is in `spans` (first byte, end) may be touched."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        spans = sorted({span for span in spans if span[1] > span[0]})
        self.starts = np.array([start for start, _ in spans], np.uint64)
        self.ends = np.array([end for _, end in spans], np.uint64)
        self.base = spans[0][0] & ~15
        size = (int(self.ends.max()) - self.base + 15) & ~15
        memory = np.frombuffer((ctypes.c_uint8 * size).from_address(self.base), np.uint8)
        self.views = {width: memory.view(f"u{width}") for width in (1, 2, 4, 8)}

    def places(self, address: Array, width: int, count: int) -> Array:
        """Indices of the first elements into the view of this width.

        Raises:
            PtxError: an address outside of every tensor, or not a multiple of the bytes accessed.
        """
        bytes_ = np.uint64(width * count)
        if (address % bytes_).any():
            raise PtxError(f"a global address is no multiple of {bytes_} bytes")
        at = np.searchsorted(self.starts, address, "right") - 1
        outside = (at < 0) | (address + bytes_ > self.ends[at])
        if outside.any():
            wrong = int(np.atleast_1d(address)[np.atleast_1d(outside)][0])
            raise PtxError(f"the global address {wrong:#x} is outside of every tensor, {int(bytes_)} bytes")
        return ((address - np.uint64(self.base)) // np.uint64(width)).astype(np.int64)


class Shared:
    """The shared memory of all blocks, one after the other.

    Args:
        size: bytes of a block.
        granule: bytes of the smallest access, which is the unit of the shadow.
        may_be_new: whether what nothing has written may be read. It is NaN.
    """

    def __init__(self, blocks: int, size: int, granule: int, may_be_new: bool) -> None:
        self.size = max(16, -(-size // 16) * 16)
        self.limit, self.granule, self.may_be_new = size, granule, may_be_new
        memory = np.full(blocks * self.size, 0xFF, np.uint8)
        self.views = {width: memory.view(f"u{width}") for width in (1, 2, 4, 8)}
        self.written = np.zeros(len(memory) // granule, np.int64)
        self.read = np.zeros_like(self.written)

    def places(self, base: Array, address: Array, bytes_: int) -> tuple[Array, Array]:
        """Places in the memory of all blocks, and for each the units of the shadow, [thread, unit].

        Raises:
            PtxError: an address outside of the block's memory, or not a multiple of the bytes accessed.
        """
        address = address.astype(np.int64)
        if (address % bytes_).any():
            raise PtxError(f"a shared address is no multiple of {bytes_} bytes")
        if (address + bytes_ > self.limit).any():
            raise PtxError(f"the shared address {int(np.max(address))} is behind the {self.limit} bytes of the block")
        at = base + address
        units = max(1, bytes_ // self.granule)
        return at, (at // self.granule)[:, None] + np.arange(units)

    def note_read(self, units: Array, now: Array) -> None:
        """Check a read and note it; now: the time and thread of each access, [thread, 1].

        Raises:
            PtxError: of what was never written, or of what another thread writes at the same time.
        """
        before, floor = self.written[units], now & _BARRIERS
        if not (self.may_be_new or before.all()):
            raise PtxError("shared memory is read that nothing has written")
        if (before & _SEVERAL).any():
            raise PtxError("a race: shared memory is read that several threads have written at the same time")
        _refuse(*_unordered(before, now, floor), "reads what {} has written")
        readers = self.read[units]
        now = np.where(readers >= floor, _together(readers, now), now)
        self.read[units] = now
        # several threads may read one unit
        while (wrong := self.read[units] != now).any():
            now = np.where(wrong, _together(self.read[units], now), now)
            self.read[units[wrong]] = now[wrong]

    def begin_write(self, units: Array, now: Array) -> Array:
        """Check a write; returns where another thread has written at the same time.

        Raises:
            PtxError: to what another thread reads at the same time, or where a copy has not arrived.
        """
        _refuse(*_unordered(self.read[units], now, now & _BARRIERS), "writes what {} reads")
        was, _, wrong = _unordered(self.written[units] & ~_SEVERAL, now, now & _BARRIERS)
        if (was >= _IN_FLIGHT).any():
            raise PtxError("a race: shared memory is written to which a copy has not arrived")
        return wrong

    def write(self, at: Array, units: Array, now: Array, values: Sequence[Array]) -> None:
        """Write numbers to neighbouring places. What several threads write at the same time, nobody may read."""
        wrong = self.begin_write(units, now)
        width = values[0].dtype.itemsize
        view, places = self.views[width], [at // width + i for i in range(len(values))]
        before = self.views[self.granule][units]
        for place, value in zip(places, values, strict=True):
            view[place] = value.view(view.dtype)
        wrong &= self.views[self.granule][units] != before
        for place, value in zip(places, values, strict=True):
            wrong |= (view[place] != value.view(view.dtype))[:, None]
        self.written[units] = now
        self.written[units[wrong]] |= _SEVERAL

    def begin_copy(self, units: Array, now: Array) -> None:
        if self.begin_write(units, now).any():
            raise PtxError("a race: a copy goes to where another thread has written")
        self.written[units] = now | _IN_FLIGHT

    def end_copy(self, at: Array, data: Array, now: Array) -> None:
        """Let copies arrive, of 16 bytes each as four numbers."""
        self.views[4][(at // 4)[:, None] + np.arange(4)] = data
        self.written[(at // self.granule)[:, None] + np.arange(16 // self.granule)] = now


def _warp(who: Array) -> Array:
    return np.where(who >= _LANES, who - _LANES, (who - 1) >> 5)


def _unordered(before: Array, now: Array, floor: Array) -> tuple[Array, Array, Array]:
    """Earlier accesses that no barrier orders before these ones, these ones, and where they are."""
    wrong = before >= floor
    if wrong.any():
        was, is_ = before & _WHO, now & _WHO
        same_warp = (_warp(was) == _warp(is_)) & (was != _ALL)
        ordered = ((was == is_) | (same_warp & (before < now & ~_WHO))) & (before < _IN_FLIGHT)
        wrong &= ~ordered
    return before[wrong], np.broadcast_to(now, wrong.shape)[wrong], wrong


def _refuse(before: Array, now: Array, wrong: Array, what: str) -> None:
    if not wrong.any():
        return
    copied = ", by a copy that has not arrived" if before[0] >= _IN_FLIGHT else ""
    was, is_ = _who(before[0] & _WHO), _who(now[0] & _WHO)
    raise PtxError(f"a race: {is_} {what.format(was)}{copied}, and no barrier lies between")


def _who(number: int) -> str:
    if number == _ALL:
        return "(several warps)"
    return f"(lanes of warp {number - _LANES})" if number >= _LANES else f"thread {number - 1}"


def _together(a: Array, b: Array) -> Array:
    """Two reads in one number, at which a write that is ordered behind both is ordered behind the number."""
    one, other = a & _WHO, b & _WHO
    same_warp = (_warp(one) == _warp(other)) & (one != _ALL) & (other != _ALL)
    earlier = (a & ~_WHO) < (b & ~_WHO)
    later = (a & ~_WHO) > (b & ~_WHO)
    lanes = np.where(one == other, b, (b & ~_WHO) | (_LANES + _warp(one)))
    in_warp = np.where(earlier, b, np.where(later, a, lanes))
    return np.where(same_warp, in_warp, (b & _BARRIERS) | _ALL)
