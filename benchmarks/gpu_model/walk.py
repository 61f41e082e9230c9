"""Follow one warp of a program through a kernel's machine code; count its instructions and its waiting time.

The walk executes integer instructions for the first thread of the program, from the launch's arguments and the
program's index. Values from memory and floating-point values are unknown. The loops of our kernels count integers that
do not come from memory, so every branch of a loop is known, even after unrolling and pipelining. A branch on an unknown
value is taken if it goes forward; these branches skip rare paths, such as that of a division. The result of an atomic
operation separates the last program to arrive from the others, so each program is followed as both.

Time is that of one warp alone: fixed stalls, and waits for scoreboards, which are released after assumed latencies.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_model.sass import Code, Instruction
from benchmarks.gpu_model.thread import Registers, both, carry_out, global_address, is_predicate

# a program with more instructions is taken for an endless loop
_MOST_STEPS = 20_000_000
# byte offset of the stack pointer in the constant bank
_STACK = 0x28


class UnknownLoop(RuntimeError):
    """The end of a loop depends on a value that is known only on a GPU."""


@dataclass(frozen=True)
class Latencies:
    """Cycles until a result is ready, by kind of instruction; assumptions, from published microbenchmarks.

    Attributes:
        memory: the first load from a line of 128 bytes; later loads from this line are hits in the L1 cache.
        double: cycles for which an instruction in double precision occupies its unit, per warp.
        atomic: an atomic operation.
        cached: a load that hits the L1 cache.
        shared: access to shared memory.
        other: any other instruction that sets a scoreboard.
        barrier: a barrier of the program's warps.
    """

    memory: int
    double: float
    atomic: int
    cached: int = 33
    shared: int = 30
    other: int = 24
    barrier: int = 30

    def of(self, instruction: Instruction) -> int:
        name = instruction.name
        if name in ("LDG", "LDGSTS"):
            return self.memory
        if name == "LDL":
            return self.cached
        if name in ("ATOM", "ATOMG", "RED"):
            return self.atomic
        if name in ("LDS", "LDSM", "SHFL", "STS", "STSM"):
            return self.shared
        return self.other


@dataclass
class Walk:
    """The counts and the time of one warp.

    Attributes:
        instructions: number of instructions issued.
        cycles: time from the first instruction to the last.
        early_instructions, early_cycles: of these, before it waits for the kernels in front; 0 if it never does.
        products: multiplications on tensor cores.
    """

    instructions: int = 0
    cycles: int = 0
    early_instructions: int = 0
    early_cycles: int = 0
    products: int = 0


@dataclass(frozen=True)
class Program:
    """One program of a launch.

    Attributes:
        index, grid: index of the program and number of programs, in each dimension.
        threads: number of threads.
        parameters: known 32-bit words of the arguments, by byte offset in the constant bank.
    """

    index: tuple[int, int, int]
    grid: tuple[int, int, int]
    threads: int
    parameters: dict[int, int]

    def constants(self) -> dict[int, int]:
        """The known words of the constant bank: the shape of the launch, the stack pointer and the parameters."""
        shape = (self.threads, 1, 1, *self.grid)
        return {**{4 * i: value for i, value in enumerate(shape)}, _STACK: 1 << 24, **self.parameters}


def follow(code: Code, program: Program, latencies: Latencies, *, last: bool) -> Walk:
    """Follow a program, as one of many or as the last to arrive.

    Raises:
        UnknownLoop: a loop's end depends on memory or on floating-point numbers.
    """
    walk, clock = Walk(), _Clock(latencies, program.threads // 32)
    registers, lines = Registers(program.constants(), program.index, last=last), _Lines()
    instructions = code.instructions
    calls: list[int] = []
    at = 0
    counts = [0] * len(instructions)
    for _ in range(_MOST_STEPS):
        ins = instructions[at]
        counts[at] += 1
        holds = ins.guard is None or registers.get(ins.guard)
        name = ins.name
        clock.issue(ins, cached=name in _LOADS and lines.has(registers, ins, holds))
        if name == "ACQBULK":
            walk.early_instructions, walk.early_cycles = sum(counts), clock.now
        if name == "EXIT" and holds is True:
            break
        elif name == "RET":
            at = calls.pop()
            continue
        elif name == "CALL" and holds is True:
            calls.append(at + 1)
            at = code.labels[ins.target]
            continue
        elif name == "BRA" and "DIV" not in ins.modifiers and _taken(registers, ins, holds, at, code):
            at = code.labels[ins.target]
            continue
        elif name not in _CONTROL and holds is not False:
            carry_out(registers, ins, sure=holds is True)
        at += 1
    else:
        raise UnknownLoop(f"a program did not end within {_MOST_STEPS} instructions")
    walk.instructions, walk.cycles = sum(counts), clock.now
    walk.products = sum(n * _products(ins) for ins, n in zip(instructions, counts, strict=True) if n)
    return walk


_LOADS = {"LDG", "LDGSTS"}
_CONTROL = {"EXIT", "RET", "CALL", "BRA"}


def _taken(registers: Registers, ins: Instruction, holds: bool | None, at: int, code: Code) -> bool:
    """Decide whether a branch is taken.

    Raises:
        UnknownLoop: the branch belongs to a loop and its condition is unknown.
    """
    # a branch may have a second predicate as its first operand
    goes = both(holds, registers.get(ins.operands[0])) if len(ins.operands) > 1 else holds
    if goes is not None:
        return goes
    to = code.labels[ins.target]
    # an unknown condition must not skip a loop
    if to <= at or any(at < back < to for back in code.loops):
        raise UnknownLoop(
            f"the end of the loop near instruction {min(at, to)} depends on memory or floating-point numbers: the "
            "model follows only loops over integers that come from arguments, constants and the program's index"
        )
    return True


# rows, columns and depth of the product of one warp, as HMMA has them
_SIZES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}


def _products(ins: Instruction) -> int:
    """Multiplications of one warp in an instruction."""
    if ins.name != "HMMA":
        return 0
    for modifier in ins.modifiers:
        if modifier in _SIZES:
            return _SIZES[modifier]
    raise RuntimeError(f"the size of {ins.opcode} is unknown to the model")


class _Lines:
    """The lines of 128 bytes that the first thread has loaded; the L1 cache is assumed to keep all of them."""

    def __init__(self) -> None:
        self._loaded: set[int] = set()

    def has(self, registers: Registers, ins: Instruction, holds: bool | None) -> bool:
        """Whether a load hits the L1 cache or loads nothing; the line is in the cache afterwards."""
        condition = ins.operands[-1]
        if holds is False or (ins.name == "LDGSTS" and is_predicate(condition) and registers.get(condition) is False):
            return True
        # coherent loads and copies with BYPASS go to the L2 cache
        address = global_address(registers, ins)
        if address is None or ins.modifiers & {"STRONG", "BYPASS"}:
            return False
        found = address >> 7 in self._loaded
        self._loaded.add(address >> 7)
        return found


class _Clock:
    """The time of one warp."""

    def __init__(self, latencies: Latencies, warps: int) -> None:
        self.latencies, self.warps = latencies, warps
        self.now = 0
        self._ready = [0] * 6
        self._double_free = 0
        self._copies: list[int] = []  # when each group of asynchronous copies ends
        self._copy_end = 0

    def issue(self, ins: Instruction, *, cached: bool) -> None:
        """Wait for the instruction's scoreboards, issue it, and stall; `cached`: whether a load hits the L1 cache."""
        ready = self._ready
        waits, now = ins.waits, self.now
        i = 0
        while waits:
            if waits & 1 and ready[i] > now:
                now = ready[i]
            waits >>= 1
            i += 1
        name = ins.name
        if ins.sets < 6 or name in _TIMED:
            now = self._timed(ins, name, now, self.latencies.cached if cached else self.latencies.of(ins))
        if ins.frees < 6:
            ready[ins.frees] = max(ready[ins.frees], now + 20)
        self.now = now + (ins.stall or 1)

    def _timed(self, ins: Instruction, name: str, now: int, latency: float) -> float:
        if name in ("DADD", "DMUL", "DFMA", "DSETP"):
            # the warps of a program share this unit
            now = max(now, self._double_free)
            self._double_free = now + self.latencies.double * self.warps
            latency = max(latency, self.latencies.double * self.warps)
        elif name == "LDGSTS":
            self._copy_end = max(self._copy_end, now + latency)
        elif name == "LDGDEPBAR":
            self._copies.append(max(self._copy_end, now))
        elif name == "DEPBAR":
            allowed = int(ins.operands[1], 16) if len(ins.operands) > 1 else 0
            if len(self._copies) > allowed:
                now = max(now, self._copies[len(self._copies) - 1 - allowed])
        elif name == "BAR":
            now += self.latencies.barrier
        elif name == "MEMBAR" and not ins.modifiers & {"CTA"}:
            now += self.latencies.atomic
        if ins.sets < 6:
            self._ready[ins.sets] = max(self._ready[ins.sets], now + latency)
        return now


_TIMED = {"DADD", "DMUL", "DFMA", "DSETP", "LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR", "MEMBAR"}
