"""Follow one warp of a program through a kernel's machine code: how many instructions it issues, and how long it waits.

Integer instructions are carried out for the first thread of the program, from the launch's own arguments and the
program's index; what comes from memory or from floating-point numbers is unknown. Loops of our kernels count integers
that do not come from memory, so every branch of a loop is known, whatever the compilers have unrolled or pipelined.
A branch on an unknown value skips forward, as over the rare path of a division. A branch on the result of an atomic
operation tells the last program to arrive from the others: both ways are followed.

Time is that of a warp alone: fixed stalls, and waits for scoreboards that are released after assumed latencies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from benchmarks.gpu_model.integers import carry_out
from benchmarks.gpu_model.registers import FROM_ATOMIC, Registers, both, global_address, is_predicate
from benchmarks.gpu_model.sass import Code, Instruction

# nobody may wait for a program that goes on for so long
_MOST_STEPS = 20_000_000
# where the constant bank holds the end of the stack
_STACK = 0x28
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


class UnknownLoop(RuntimeError):
    """Whether a loop goes on depends on a value that only a GPU knows."""


@dataclass(frozen=True)
class Latencies:
    """Cycles until a result is there, by kind of instruction; all assumed, from published microbenchmarks.

    Attributes:
        memory: of the first load from a line of 128 bytes; what was loaded before comes from the L1 cache.
        double: cycles that one instruction of double precision keeps its unit busy, for one warp.
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
    """What one warp did.

    Attributes:
        instructions: issued.
        cycles: from the first to the last, alone.
        opcodes: how often each was issued.
        idle: how often each was issued with a predicate that is false for the first thread.
        accesses: instructions by bytes per thread that they read or write in global memory.
        forks: indices of branches that depend on atomics, in order of appearance.
    """

    instructions: int = 0
    cycles: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)
    idle: Counter[str] = field(default_factory=Counter)
    accesses: Counter[int] = field(default_factory=Counter)
    forks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """Which program of a launch, and what it is given.

    Attributes:
        index, grid: of the program, by dimension.
        threads: of a program.
        parameters: value by byte offset in the constant bank, words of 32 bits; those that are not there are unknown.
    """

    index: tuple[int, int, int]
    grid: tuple[int, int, int]
    threads: int
    parameters: dict[int, int]

    def constants(self) -> dict[int, int]:
        """The constant bank: the launch's shape, then the parameters."""
        shape = (self.threads, 1, 1, *self.grid)
        return {**{4 * i: value for i, value in enumerate(shape)}, _STACK: 1 << 24, **self.parameters}


def walks(code: Code, program: Program, latencies: Latencies) -> tuple[Walk, Walk]:
    """What a program does that is not the last to arrive, and what the last one does; often the same.

    Raises:
        UnknownLoop: a loop's end depends on memory or on floating-point numbers.
    """
    first = _follow(code, program, latencies, {})
    forks = first.forks
    if not forks:
        return first, first
    found = [first]
    for ways in product((False, True), repeat=min(len(forks), 3)):
        walk = _follow(code, program, latencies, dict(zip(forks, ways, strict=False)))
        # what follows a branch may fork again
        forks += [fork for fork in walk.forks if fork not in forks and len(forks) < 3]
        found.append(walk)
    if len(forks) > len(first.forks):
        found += [
            _follow(code, program, latencies, dict(zip(forks, ways, strict=True)))
            for ways in product((False, True), repeat=len(forks))
        ]
    return min(found, key=lambda w: w.instructions), max(found, key=lambda w: w.instructions)


def _follow(code: Code, program: Program, latencies: Latencies, ways: dict[int, bool]) -> Walk:
    """One walk; ways: whether a branch on an atomic's result is taken, by its index (otherwise it is)."""
    walk, clock = Walk(), _Clock(latencies, program.threads // 32)
    registers, lines = Registers(program.constants(), program.index), _Lines()
    instructions = code.instructions
    calls: list[int] = []
    at = 0
    counts = [0] * len(instructions)
    for _ in range(_MOST_STEPS):
        ins = instructions[at]
        counts[at] += 1
        holds = registers.holds(ins.guard)
        name = ins.name
        clock.issue(ins, cached=name in _LOADS and lines.has(registers, ins, holds))
        if name in _CONTROL:
            if name == "EXIT":
                if holds is True:
                    break
                if holds is FROM_ATOMIC:
                    walk.forks += [at] if at not in walk.forks else []
                    if ways.get(at, True):
                        break
            elif name == "RET":
                at = calls.pop()
                continue
            elif name == "CALL":
                if holds is True:
                    calls.append(at + 1)
                    at = _target(code, ins)
                    continue
            elif name == "BRA" and "DIV" not in ins.modifiers:
                if _taken(registers, ins, holds, at, code, walk, ways):
                    at = _target(code, ins)
                    continue
        elif holds is False:
            walk.idle[name] += 1
        else:
            carry_out(registers, ins, sure=holds is True)
        at += 1
    else:
        raise UnknownLoop(f"a program did not end within {_MOST_STEPS} instructions")
    _summarize(walk, instructions, counts)
    walk.cycles = clock.now
    return walk


_LOADS = {"LDG", "LDGSTS"}
_CONTROL = {"EXIT", "RET", "CALL", "BRA"}


def _target(code: Code, ins: Instruction) -> int:
    return code.labels[ins.target]


def _taken(
    registers: Registers, ins: Instruction, holds: Any, at: int, code: Code, walk: Walk, ways: dict[int, bool]
) -> bool:
    """Whether a branch is taken."""
    # a branch may have a second predicate as its first operand
    second = ins.operands[0] if len(ins.operands) > 1 else None
    goes = both(holds, registers.holds(second))
    if goes is True or goes is False:
        return goes
    to = _target(code, ins)
    # a loop is skipped only on purpose
    skipped = goes is None and any(at < back < to for back in code.loops)
    if to <= at or skipped:
        said = "an atomic operation" if goes is FROM_ATOMIC else "memory or floating-point numbers"
        raise UnknownLoop(
            f"whether the loop near instruction {min(at, to)} goes on depends on {said}: the model "
            "follows loops over integers that come from arguments, constants and the program's index only"
        )
    if goes is FROM_ATOMIC:
        if at not in walk.forks:
            walk.forks.append(at)
        return ways.get(at, True)
    return True


def _summarize(walk: Walk, instructions: tuple[Instruction, ...], counts: list[int]) -> None:
    for ins, count in zip(instructions, counts, strict=True):
        if not count:
            continue
        walk.instructions += count
        walk.opcodes[ins.name] += count
        if ins.name in ("LDG", "STG", "LDGSTS", "ATOMG", "RED"):
            width = next((size for name, size in _BYTES.items() if name in ins.modifiers), 4)
            walk.accesses[width] += count


class _Lines:
    """Lines of 128 bytes that the first thread has loaded, as if the L1 cache kept them all."""

    def __init__(self) -> None:
        self._loaded: set[int] = set()

    def has(self, registers: Registers, ins: Instruction, holds: Any) -> bool:
        """Whether a load finds its line, or loads nothing; remembers the line."""
        if holds is False or (ins.name == "LDGSTS" and registers.holds(_last_predicate(ins)) is False):
            return True
        # coherent loads, and copies that bypass it, go to L2
        address = global_address(registers, ins)
        if address is None or ins.modifiers & {"STRONG", "BYPASS"}:
            return False
        found = address >> 7 in self._loaded
        self._loaded.add(address >> 7)
        return found


def _last_predicate(ins: Instruction) -> str | None:
    last = ins.operands[-1]
    return last if is_predicate(last) else None


class _Clock:
    """Time of one warp."""

    def __init__(self, latencies: Latencies, warps: int) -> None:
        self.latencies, self.warps = latencies, warps
        self.now = 0
        self._ready = [0] * 6
        self._double_free = 0
        self._copies: list[int] = []  # ends of the groups of asynchronous copies
        self._copy_end = 0

    def issue(self, ins: Instruction, *, cached: bool) -> None:
        """Wait for what the instruction waits for, issue it, and stall; cached: whether a load finds its line in L1."""
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
            # the warps of a program share the unit
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
