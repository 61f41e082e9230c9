"""Runs one launch: all threads of all blocks together, each instruction once for those that are at it.

The block of instructions that stands first in the text runs first, so that threads meet again where their ways join.
At a barrier the threads of a block wait for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .memory import Global, Shared
from .parse import PtxError
from .translate import Translator

Array = NDArray


class Lanes:
    """The threads that run an instruction, in the order of blocks and threads."""

    def __init__(self, machine: Machine, index: Array) -> None:
        self.machine, self.index, self.count = machine, index, len(index)
        self.full = len(index) == machine.total
        self.threads, self.count_x, self.count_y = (np.uint32(n) for n in (machine.threads, *machine.grid))
        self.block = index // machine.threads
        self.thread = (index % machine.threads).astype(np.uint32)
        self.block_x = (self.block % machine.grid[0]).astype(np.uint32)
        self.block_y = (self.block // machine.grid[0]).astype(np.uint32)
        self.base = self.block * machine.shared.size

    def get(self, value: Any) -> Any:
        return value if self.full or not np.ndim(value) else value[self.index]

    def put(self, registers: list, at: int, value: Any) -> None:
        if not self.full:
            new = np.full(self.machine.total, registers[at], value.dtype)
            new[self.index] = value
            value = new
        registers[at] = value

    def all(self, value: Any) -> Array:
        """An array with one element for each thread."""
        return np.broadcast_to(value, self.count)

    @functools.cached_property
    def whole_warps(self) -> bool:
        warps = self.index[: self.count // 32 * 32].reshape(-1, 32)
        return self.count % 32 == 0 and bool(((warps[:, 0] % 32 == 0) & (warps[:, 31] == warps[:, 0] + 31)).all())

    def warps(self, value: Any) -> Array:
        """The same as `all`, for an instruction of whole warps."""
        if not self.whole_warps:
            raise PtxError("not all lanes of a warp are at this instruction")
        return self.all(value)


def _unset(type_: str) -> Any:
    """What a register holds that nothing has set: NaN, or the like."""
    return np.frombuffer(b"\xff" * 8, type_)[0]


class Machine:
    """One launch of a kernel.

    Args:
        translator: of the kernel.
        grid: blocks in x and y.
        threads: of a block.
        shared_bytes: that the launch asks for.
        parameter: the bytes of the kernel's argument.
        may_be_new: whether shared memory may be read that nothing has written.
    """

    def __init__(
        self,
        translator: Translator,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        parameter: bytes,
        memory: Global,
        *,
        may_be_new: bool = False,
    ) -> None:
        self.translator, self.kernel = translator, (kernel := translator.kernel)
        self.grid, self.threads = grid, threads
        self.blocks = grid[0] * grid[1]
        self.total = self.blocks * threads
        self.parameter, self.memory = parameter, memory
        self.shared = Shared(self.blocks, kernel.shared_bytes + shared_bytes, kernel.granule, may_be_new)
        # the first barrier is 1, so that what nothing has touched is older than any access
        self.barriers = np.ones(self.blocks, np.int64)
        self.warp_barriers = np.zeros(self.total // 32, np.int64)
        # copies that have not arrived: for each thread that began one, its group, where to, and 16 bytes
        self.copies: list[tuple[Array, Array, Array, Array]] = []
        self.groups = np.zeros(self.total, np.int64)
        # of each thread, whether it has waited for the kernels in front
        self.waited = np.zeros(self.total, np.bool_)
        self.registers: list[Any] = [_unset(kernel.type_of(name)) for name in translator.index]
        self._now: Array | None = None
        self.everyone = Lanes(self, np.arange(self.total))

    # ---- threads

    def run(self) -> None:
        """Run the launch to its end.

        Raises:
            PtxError: a fault of the kernel, with the line of its text.
        """
        end = len(self.kernel.blocks)
        self.memory.begin(self.blocks)
        at, waits = np.zeros(self.total, np.int64), np.zeros(self.total, np.bool_)
        with np.errstate(all="ignore"):
            while True:
                going = np.where(waits, end, at)
                first = int(going.min())
                if first == end:
                    if not waits.any():
                        return
                    self._release(at, waits)
                    continue
                here = going == first
                lanes = self.everyone if here.all() else Lanes(self, np.flatnonzero(here))
                self._step(first, lanes, at, waits)

    def _step(self, block: int, lanes: Lanes, at: Array, waits: Array) -> None:
        function, last = self.translator.function(block), self.kernel.blocks[block][-1]
        self.line = last.line
        try:
            condition = function(self, lanes, self.registers)
            if last.name == "trap":
                raise PtxError("the kernel ends with an error")
        except PtxError as error:
            text = self.kernel.lines[self.line - 1].strip()
            raise PtxError(f"{self.kernel.name}, line {self.line}: {text}: {error}") from None
        to = block + 1
        if last.name in ("bra", "ret"):
            to = self.kernel.labels[last.operands[0]] if last.name == "bra" else len(self.kernel.blocks)
        at[lanes.index] = np.where(condition, to, block + 1) if last.guard else to
        if last.opcode == "bar.sync":
            waits[lanes.index] = True

    def _release(self, at: Array, waits: Array) -> None:
        """End the wait of every block at its barrier."""
        places, waiting = at.reshape(self.blocks, -1), waits.reshape(self.blocks, -1)
        ready = waiting.any(1)
        if not (waiting[ready].all() and (places[ready] == places[ready, :1]).all()):
            line = self.kernel.blocks[int(at[waits][0]) - 1][-1].line
            raise PtxError(f"{self.kernel.name}, line {line}: not all threads of a block come to this barrier")
        self.barriers[ready] += 1
        self._now = None
        waiting[ready] = False

    def sync_warps(self, lanes: Lanes, mask: Any) -> None:
        if np.any(mask != 0xFFFFFFFF):
            raise PtxError("the interpreter knows barriers of whole warps")
        warps = lanes.warps(lanes.index)[::32] // 32
        self.warp_barriers[warps] += 1
        self._now = None

    def now(self, lanes: Lanes) -> Array:
        """What the shadow of shared memory notes, [thread, 1]."""
        if self._now is None:
            barriers = np.repeat(self.barriers << 40, self.threads)
            threads = np.tile(np.arange(1, self.threads + 1), self.blocks)
            self._now = barriers | np.repeat(self.warp_barriers << 20, 32) | threads
        return lanes.get(self._now)[:, None]

    # ---- the kernels in front

    def wait_for_kernels(self, lanes: Lanes) -> None:
        self.waited[lanes.index] = True

    def check_waited(self, lanes: Lanes) -> None:
        if self.memory.early is not None and not self.waited[lanes.index].all():
            raise PtxError("the kernel has not waited for those in front, and writes")

    # ---- memory

    def load_param(self, lanes: Lanes, address: Any, type_: type, vector: str) -> list[Any]:
        width, count = np.dtype(type_).itemsize, int(vector[1:] or 1)
        address = np.asarray(address).astype(np.int64)
        if (address < 0).any() or (address + width * count > len(self.parameter)).any():
            raise PtxError("outside of the parameter")
        all_ = np.frombuffer(self.parameter, np.uint8)
        return [all_[(address + width * i)[..., None] + np.arange(width)].view(type_)[..., 0] for i in range(count)]

    def load_global(self, lanes: Lanes, address: Any, type_: type, vector: str) -> list[Array]:
        width, count = np.dtype(type_).itemsize, int(vector[1:] or 1)
        early = ~self.waited[lanes.index]
        if early.any():
            self.memory.check_early(lanes.all(address)[early])
        at, units = self.memory.places(lanes.all(address), width, count)
        self.memory.note_read(units, lanes.block[:, None], self.now(lanes))
        view = self.memory.views[width]
        return [view[at + i].view(type_) for i in range(count)]

    def store_global(self, lanes: Lanes, address: Any, values: Sequence[Array]) -> None:
        self.check_waited(lanes)
        width = values[0].dtype.itemsize
        at, units = self.memory.places(lanes.all(address), width, len(values))
        self.memory.note_write(units, lanes.block[:, None], self.now(lanes))
        for i, value in enumerate(values):
            self.memory.views[width][at + i] = value.view(f"u{width}")

    def atomic_add(self, lanes: Lanes, address: Any, number: Any) -> Array:
        self.check_waited(lanes)
        at, _ = self.memory.places(lanes.all(address), 4, 1)
        view, before = self.memory.views[4].view(np.int32), np.empty(lanes.count, np.int32)
        for i, (place, more, block) in enumerate(zip(at, lanes.all(number), lanes.block, strict=True)):
            before[i] = view[place]
            view[place] += more
            self.memory.turn[block] = self.memory.turn.max() + 1
            self.memory.released[block] = self.barriers[block]
        return before

    def load_shared(self, lanes: Lanes, address: Any, type_: type, vector: str) -> list[Array]:
        width, count = np.dtype(type_).itemsize, int(vector[1:] or 1)
        at, units = self.shared.places(lanes.base, lanes.all(address), width * count)
        self.shared.note_read(units, self.now(lanes))
        return [self.shared.views[width][at // width + i].view(type_) for i in range(count)]

    def store_shared(self, lanes: Lanes, address: Any, values: Sequence[Array]) -> None:
        width = values[0].dtype.itemsize
        at, units = self.shared.places(lanes.base, lanes.all(address), width * len(values))
        self.shared.write(at, units, self.now(lanes), values)

    def load_rows(self, lanes: Lanes, address: Any) -> Array:
        """The rows of ldmatrix, [thread, 8] of 16 bits, which all lanes of a warp read."""
        at, units = self.shared.places(lanes.base, lanes.warps(address), 16)
        now = self.now(lanes)
        warp = (now & 0xFFFFF) - 1 >> 5
        self.shared.note_read(units, now & ~0xFFFFF | 2048 + warp)
        return self.shared.views[2][(at // 2)[:, None] + np.arange(8)]

    def copy(self, lanes: Lanes, to: Any, source: Any, most: Any, size: Any) -> None:
        """Begin a copy of 16 bytes, which arrives as late as it may; zeros behind `size` bytes."""
        self.check_waited(lanes)
        at, units = self.shared.places(lanes.base, lanes.all(to), 16)
        self.shared.begin_copy(units, self.now(lanes))
        size, source = lanes.all(size), lanes.all(source)
        reads = size > 0
        if most != 16 or not np.isin(size, (0, 16)).all():
            raise PtxError("the interpreter knows copies of 0 and 16 bytes")
        data = np.zeros((lanes.count, 4), np.uint32)
        places, units = self.memory.places(source[reads], 4, 4)
        self.memory.note_read(units, lanes.block[reads, None], self.now(lanes)[reads])
        data[reads] = self.memory.views[4][places[:, None] + np.arange(4)]
        self.copies.append((lanes.index, self.groups[lanes.index], at, data))

    def commit(self, lanes: Lanes) -> None:
        self.groups[lanes.index] += 1

    def wait(self, lanes: Lanes, allowed: Any) -> None:
        """Let the copies of these threads arrive, except those of their last groups."""
        newest = np.full(self.total, -1)
        newest[lanes.index] = self.groups[lanes.index] - int(allowed)
        now, kept = self.now(self.everyone), []
        for index, group, at, data in self.copies:
            done = group < newest[index]
            self.shared.end_copy(at[done], data[done], now[index[done]])
            if not done.all():
                kept.append((index[~done], group[~done], at[~done], data[~done]))
        self.copies = kept
