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
_NOBODY, _BLOCKS = -1, -2
# a copy that has not arrived, whose place nobody may touch
_IN_FLIGHT = 1 << 62
# what several threads have written at the same time, which nobody may read
_SEVERAL = 1 << 61


class Global:
    """Memory of the process, of which only what is in `spans` (first byte, end) may be touched.

    Within a launch, what one block writes another may read if both have added to a counter since: the writer behind a
    barrier, and the reader later, with a barrier behind. Blocks write to different places, and not to what others read.
    The unit of the shadow is 4 bytes.

    Args:
        early: spans that a kernel may read before it waits for the kernels in front; None for all memory.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], early: Sequence[tuple[int, int]] | None = None) -> None:
        self.early = early
        # views of one tensor overlap
        joined: list[tuple[int, int]] = []
        for start, end in sorted((start & ~3, end) for start, end in spans if end > start):
            if joined and start < joined[-1][1]:
                start, end = joined[-1][0], max(end, joined.pop()[1])
            joined.append((start, end))
        self.starts, self.ends = np.array(joined, np.uint64).T
        self.base = joined[0][0] & ~15
        memory = np.frombuffer(
            (ctypes.c_uint8 * (-(-(joined[-1][1] - self.base) // 16) * 16)).from_address(self.base), "u1"
        )
        self.views = {width: memory.view(f"u{width}") for width in (1, 2, 4, 8)}
        units = (self.ends - self.starts + np.uint64(3)) // np.uint64(4)
        self.first_unit = np.cumsum(units) - units
        self.units = int(units.sum())

    def begin(self, blocks: int) -> None:
        """Begin a launch."""
        # of each unit: which block has written it, which thread and when, and which block has read it
        self.writer, self.reader = np.full((2, self.units), _NOBODY)
        self.written = np.zeros(self.units, np.int64)
        # of each block: the number of its last addition to a counter, and of the barriers in front of it
        self.turn, self.released = np.zeros((2, blocks), np.int64)

    def places(self, address: Array, width: int, count: int) -> tuple[Array, Array]:
        """Indices of the first elements into the view of this width, and the units of the shadow, [thread, unit].

        Raises:
            PtxError: an address outside of every tensor, or not a multiple of the bytes accessed.
        """
        bytes_ = np.uint64(width * count)
        if (address % bytes_).any():
            raise PtxError(f"a global address is no multiple of {bytes_} bytes")
        at = np.searchsorted(self.starts, address, "right") - 1
        outside = (at < 0) | (address + bytes_ > self.ends[at])
        if outside.any():
            raise PtxError(
                f"the global address {int(address[outside][0]):#x} is outside of every tensor, {bytes_} bytes"
            )
        first = self.first_unit[at] + (address - self.starts[at]) // np.uint64(4)
        units = first.astype(np.int64)[:, None] + np.arange(max(1, width * count // 4))
        return ((address - np.uint64(self.base)) // np.uint64(width)).astype(np.int64), units

    def check_early(self, address: Array) -> None:
        """Check reads before the wait for the kernels in front.

        Raises:
            PtxError: of what one of them may write.
        """
        if self.early is not None:
            places = address.astype(np.int64)
            allowed = np.any([(start <= places) & (places < end) for start, end in self.early], axis=0)
            if not np.all(allowed):
                raise PtxError("the kernel has not waited for those in front, and reads what one of them may write")

    def note_read(self, units: Array, block: Array, now: Array) -> None:
        """Check a read and note it; block: of each thread, [thread, 1]; now: as for shared memory.

        Raises:
            PtxError: of what another thread or block writes at the same time.
        """
        self._check_written(units, block, now, reads=True)
        known = self.reader[units]
        self.reader[units] = np.where((known == _NOBODY) | (known == block), block, _BLOCKS)
        several = self.reader[units] != block
        self.reader[units[several]] = _BLOCKS

    def note_write(self, units: Array, block: Array, now: Array) -> None:
        """Check a write and note it.

        Raises:
            PtxError: to what another thread has written, or another block uses, at the same time.
        """
        self._check_written(units, block, now, reads=False)
        readers = self.reader[units]
        if ((readers != _NOBODY) & (readers != block)).any():
            raise PtxError("a race: a block writes to global memory that another reads in this launch")
        self.writer[units], self.written[units] = block, now
        if (self.written[units] != now).any() or (self.writer[units] != block).any():
            raise PtxError("a race: two threads write the same global memory in one instruction")

    def _check_written(self, units: Array, block: Array, now: Array, *, reads: bool) -> None:
        writer, written = self.writer[units], self.written[units]
        mine = writer == block
        what = "reads" if reads else "writes"
        _refuse(
            *_unordered(np.where(mine, written, 0), now, now & _BARRIERS), f"{what} global memory that {{}} has written"
        )
        other = (writer != _NOBODY) & ~mine
        if other.any():
            wrote, uses = writer[other], np.broadcast_to(block, other.shape)[other]
            barriers = np.broadcast_to(now >> 40, other.shape)[other]
            ordered = (written[other] >> 40 < self.released[wrote]) & (self.turn[wrote] < self.turn[uses])
            if not (ordered & (barriers > self.released[uses])).all():
                raise PtxError(f"a race: a block {what} global memory that another has written in this launch")


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
