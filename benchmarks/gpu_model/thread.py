"""Executes NVIDIA's machine code for one thread, as far as operands are known: integers, and floats that divide them.

A register is an int of 32 bits, Bits, or None if it is unknown; a predicate is True, False or None. What an atomic
operation returns is ARRIVAL: our kernels only ask whether it is that of the last program, which is given in advance.
"""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, NamedTuple

from benchmarks.gpu_model.sass import Instruction

MASK = 0xFFFFFFFF
# stands for the number of programs that came before; a warp adds 0 to it for its first thread
ARRIVAL = 0x5A5A5A5A


class Bits(NamedTuple):
    """A register in whose bits a kernel keeps predicates, of which those in the mask `known` are known."""

    value: int
    known: int


Value = Any  # int, bool, Bits or None
# what an instruction writes; None if nothing of it is known
Results = Iterable[tuple[str, Value]] | None

_REGISTER = re.compile(r"^(-|~|!)?(U?[RP](?:\d+|Z|T))$")
_CONSTANT = re.compile(r"^(-|~)?c\[0x0\]\[(0x[0-9a-f]+)\]$")
_NUMBER = re.compile(r"^-?(0x[0-9a-f]+|\d+)$")
_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?")
_ADDRESS = re.compile(r"\[(?:(U?R\w+)(?:\.\w+)?)?\+?(?:(UR\w+))?\+?(-?0x[0-9a-f]+)?\]")
_GLOBAL = re.compile(r"\[(U?R\w+)(?:\.U32)?\.64\+?(UR\w+)?\+?(-?0x[0-9a-f]+)?\]")


class Registers:
    """Registers and predicates of one thread.

    Args:
        constants: words of the constant bank by byte offset.
        index: index of the program in each dimension.
        last: whether the program is the last to arrive at each counter.
    """

    def __init__(self, constants: dict[int, int], index: tuple[int, int, int], *, last: bool) -> None:
        self.constants, self.index, self.last = constants, index, last
        self.values: dict[str, Value] = {"RZ": 0, "URZ": 0, "PT": True, "UPT": True}
        self.flags: dict[int, Value] = {}  # bytes of shared memory
        self.local: dict[int, Value] = {}

    def get(self, operand: str) -> Value:
        """The value of an operand: a register, predicate, constant or number, perhaps negated or inverted."""
        found = self.values.get(operand, self)
        if found is not self:
            return found
        kind, name, sign = _operand(operand)
        if kind == "number":
            return name
        value = self.constants.get(name) if kind == "constant" else self.values.get(name)
        if sign is None:
            return value
        if not isinstance(value, int):
            return None
        if sign == "!":
            return not value
        # not reduced to 32 bits, so that a subtraction can see its carry
        return (~value & MASK) + 1 if sign == "-" else ~value & MASK

    def pair(self, operand: str) -> Value:
        """The 64-bit value of an operand: a register and the next one, two words of the constant bank, or a number."""
        kind, name, sign = _operand(operand)
        if kind == "number":
            return name if name < 1 << 31 else name | MASK << 32
        bank, after = (self.constants, name + 4) if kind == "constant" else (self.values, following(name))
        low, high = bank.get(name), bank.get(after)
        if not known(low, high):
            return None
        value = high << 32 | low
        return -value & MASK << 32 | MASK if sign == "-" else value

    def put(self, register: str, value: Value, *, sure: bool = True) -> None:
        """Write a register or predicate. If the write is not `sure`, it stays known only if it does not change."""
        if register in ("RZ", "URZ", "PT", "UPT"):
            return
        value = value & MASK if type(value) is int else value
        self.values[register] = value if sure or self.values.get(register) == value else None


_operands: dict[str, tuple[str, Any, str | None]] = {}


def _operand(text: str) -> tuple[str, Any, str | None]:
    """Parse an operand into its kind, its register, offset or number, and its sign; others are unknown registers."""
    if text not in _operands:
        if found := _REGISTER.match(text):
            parsed = ("register", found[2], found[1])
        elif found := _CONSTANT.match(text):
            parsed = ("constant", int(found[2], 16), found[1])
        elif _NUMBER.match(text):
            parsed = ("number", int(text, 0) & MASK, None)
        else:
            parsed = ("register", "?", None)
        _operands[text] = parsed
    return _operands[text]


def following(register: str) -> str:
    """The next register."""
    prefix = "UR" if register.startswith("UR") else "R"
    number = register[len(prefix) :]
    return f"{prefix}{int(number) + 1}" if number.isdigit() else register


def known(*values: Value) -> bool:
    return all(isinstance(value, int) for value in values)


def bits_of(value: Value) -> Bits:
    if isinstance(value, Bits):
        return value
    return Bits(value & MASK, MASK) if isinstance(value, int) else Bits(0, 0)


def value_of(value: int, mask: int) -> Value:
    """The simplest form of a word of which the bits in the mask are known."""
    return value if mask == MASK else Bits(value, mask) if mask else None


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def both(a: bool | None, b: bool | None) -> bool | None:
    """The conjunction of two predicates."""
    if a is False or b is False:
        return False
    return True if a is True and b is True else None


def negated(a: bool | None) -> bool | None:
    return None if a is None else not a


def is_predicate(text: str) -> bool:
    """Whether an operand is a predicate or a negated predicate."""
    return bool(re.fullmatch(r"!?U?P[0-9T]", text))


def shared_address(regs: Registers, text: str) -> int | None:
    """The address in an operand of shared or local memory; None if it is unknown."""
    found = _ADDRESS.search(text)
    if not found:
        return None
    parts = [regs.get(name) if name else 0 for name in found.groups()[:2]]
    return sum(parts) + int(found[3] or "0", 16) if known(*parts) else None


def global_address(regs: Registers, ins: Instruction) -> int | None:
    """The address of a load from global memory; None if it is unknown."""
    found = next(filter(None, map(_GLOBAL.search, ins.operands)), None)
    if not found:
        return None
    parts = [regs.pair(name) if name else 0 for name in found.groups()[:2]]
    return sum(parts) + int(found[3] or "0", 16) if known(*parts) else None


# ---- instructions: each function takes registers and an instruction, and returns what this writes


def _split(ins: Instruction) -> tuple[str, list[str], list[str], list[str]]:
    """Split operands into destination, predicates that are written, sources, and predicates that are read."""
    rest = list(ins.operands[1:])
    written, read = [], []
    while rest and re.fullmatch(r"U?P[0-9T]", rest[0]):
        written.append(rest.pop(0))
    while rest and is_predicate(rest[-1]):
        read.insert(0, rest.pop())
    return ins.operands[0], written, rest, read


def _pair(register: str, value: int) -> list[tuple[str, Value]]:
    return [(register, value & MASK), (following(register), value >> 32 & MASK)]


def _sum(sources: int) -> Callable[[Registers, Instruction], Results]:
    """An instruction whose 32-bit result and carries are those of a sum."""

    def results(regs: Registers, ins: Instruction) -> Results:
        to, written, rest, read = _split(ins)
        values = [regs.get(text) for text in rest[:sources]]
        carries = [regs.get(text) for text in read] if "X" in ins.modifiers else []
        if not known(*values, *carries):
            return None
        total = sum(values) + sum(carries)
        return [(to, total), *((predicate, total >= (i + 1) << 32) for i, predicate in enumerate(written))]

    return results


def _imad(regs: Registers, ins: Instruction) -> Results:
    to, written, rest, read = _split(ins)
    if "MOV" in ins.modifiers:
        return [(to, regs.get(rest[2]))]
    long = bool(ins.modifiers & {"WIDE", "HI"})
    a, b, c = regs.get(rest[0]), regs.get(rest[1]), regs.pair(rest[2]) if long else regs.get(rest[2])
    carries = [regs.get(text) for text in read] if "X" in ins.modifiers else []
    if a == 0 or b == 0:
        a = b = 0
    if not known(a, b, c, *carries):
        return None
    if long and "U32" not in ins.modifiers:
        a, b = signed(a), signed(b)
    result = a * b + c + sum(carries)
    carried = [(predicate, (result & (1 << 65) - 1) >> (64 if long else 32) != 0) for predicate in written]
    if "WIDE" in ins.modifiers:
        return _pair(to, result) + carried
    return [(to, result >> 32 if long else result), *carried]


def _lea(regs: Registers, ins: Instruction) -> Results:
    to, written, rest, read = _split(ins)
    mods = ins.modifiers
    a, b, shift = regs.get(rest[0]), regs.get(rest[1]), regs.get(rest[-1])
    high = regs.get(rest[2]) if "HI" in mods and "SX32" not in mods else 0
    carry = regs.get(read[-1]) if "X" in mods and read else False
    if not known(a, b, shift, high, carry):
        return None
    if "HI" in mods:
        a = (signed(a) if "SX32" in mods else high << 32 | a) << shift >> 32
    else:
        a <<= shift
    result = (a & MASK) + b + carry
    return [(to, result), *((predicate, result > MASK) for predicate in written)]


def _lop3(regs: Registers, ins: Instruction) -> Results:
    """The bitwise function of three words whose truth table is the fifth operand."""
    operands = list(ins.operands)
    truth = [operands.pop(0)] if is_predicate(operands[0]) else []
    to, *sources, table = operands[:5]
    words = [bits_of(regs.get(source)) for source in sources]
    may = [0, 0]  # bits that may be zero, and bits that may be one
    for i in range(8):
        reached = MASK
        for word, bit in zip(words, (4, 2, 1), strict=True):
            reached &= word.value | ~word.known if i & bit else ~word.value
        may[int(table, 16) >> i & 1] |= reached
    found = may[1] & ~may[0], ~(may[0] & may[1]) & MASK
    truths = [(predicate, True if found[0] else False if found[1] == MASK else None) for predicate in truth]
    return [(to, value_of(*found)), *truths]


def _plop3(regs: Registers, ins: Instruction) -> Results:
    truths, results = [regs.get(text) for text in ins.operands[2:5]], []
    for to, table in zip(ins.operands[:2], ins.operands[5:7], strict=True):
        cases = {
            bool(int(table, 16) >> i & 1)
            for i in range(8)
            if all(t is None or t == bool(i & bit) for t, bit in zip(truths, (4, 2, 1), strict=True))
        }
        results.append((to, cases.pop() if len(cases) == 1 else None))
    return results


_COMPARE = {name: getattr(operator, name.lower()) for name in ("LT", "LE", "GT", "GE", "EQ", "NE")}


def _isetp(regs: Registers, ins: Instruction) -> Results:
    first, second, left, right, other, *low = ins.operands
    mods, a, b, truth = ins.modifiers, regs.get(left), regs.get(right), regs.get(other)
    name = next(m for m in mods if m in _COMPARE)
    if ARRIVAL in (a, b):
        found = {"EQ": regs.last, "NE": not regs.last}.get(name)
    elif not known(a, b):
        found = None
    elif "EX" in mods and a & MASK == b & MASK:
        found = regs.get(low[0])
    else:
        found = _COMPARE[name](*((v & MASK if "U32" in mods else signed(v)) for v in (a, b)))
    if "OR" in mods:
        negative = negated(truth)
        return [(first, negated(both(negated(found), negative))), (second, negated(both(found, negative)))]
    return [(first, both(found, truth)), (second, both(negated(found), truth))] if "AND" in mods else None


def _shift(regs: Registers, ins: Instruction) -> Results:
    to, *sources = ins.operands
    low, by, high = (regs.get(source) for source in sources)
    if not known(low, by, high):
        return None
    mods = ins.modifiers
    if not mods & {"U64", "S64", "W"}:
        by = min(by, 32)
    whole = high << 32 | low
    if "L" in mods:
        # HI takes the high word of the shifted pair, otherwise the low word alone is shifted
        result = whole << by >> 32 if "HI" in mods else low << by
    else:
        whole = signed(whole, 64) if mods & {"S32", "S64"} else whole
        result = whole >> by >> 32 if "HI" in mods else whole >> by
    return [(to, result)]


def _select(regs: Registers, ins: Instruction) -> Results:
    to, a, b, predicate = ins.operands
    holds = regs.get(predicate)
    if holds is None:
        return [(to, regs.get(a))] if regs.get(a) == regs.get(b) else None
    return [(to, regs.get(a if holds else b))]


def _extreme(regs: Registers, ins: Instruction) -> Results:
    """IMNMX, VIMNMX and VIADDMNMX: the minimum if the predicate is true, else the maximum."""
    to, *sources, predicate = ins.operands
    values, holds = [regs.get(source) for source in sources], regs.get(predicate)
    if not known(*values, holds):
        return None
    values = [v & MASK if "U32" in ins.modifiers else signed(v) for v in values]
    if ins.name == "VIADDMNMX":
        values = [signed(values[0] + values[1]), values[2]]
    return [(to, min(values) if holds else max(values))]


def _special(regs: Registers, ins: Instruction) -> Results:
    to, name = ins.operands
    if name.startswith("SR_CTAID."):
        return [(to, regs.index["XYZ".index(name[-1])])]
    # the thread that is followed is the first of its program, in a cluster of one program
    if not name.startswith(("SR_TID", "SR_LANEID", "SR_LTMASK", "SR_CgaCtaId", "SR_WARPID", "SRZ")):
        return None
    return _pair(to, 0) if ins.name == "CS2R" and "32" not in ins.modifiers else [(to, 0)]


def _load_constant(regs: Registers, ins: Instruction) -> Results:
    to, source = ins.operands
    if narrow := ins.modifiers & {"U8", "U16", "S8", "S16"}:
        (kind,), (_, at, _) = narrow, _operand(source)
        word, bits = regs.constants.get(at - at % 4), int(kind[1:])
        if word is None:
            return None
        value = word >> 8 * (at % 4) & (1 << bits) - 1
        return [(to, signed(value, bits) if kind[0] == "S" else value)]
    return _move(regs, ins)


def _move(regs: Registers, ins: Instruction) -> Results:
    to, source = [text for text in ins.operands if not is_predicate(text)][:2]
    if "64" in ins.modifiers:
        whole = regs.pair(source)
        return None if whole is None else _pair(to, whole)
    return [(to, regs.get(source))]


def _half_constants(regs: Registers, ins: Instruction) -> Results:
    """HFMA2 with a product of zeros writes a constant of two halves."""
    to, a, b, *halves = ins.operands
    if {a.lstrip("-"), b.lstrip("-")} != {"RZ"} or len(halves) != 2 or not all(map(_FLOAT.fullmatch, halves)):
        return None
    high, low = (struct.unpack("<H", struct.pack("<e", float(half)))[0] for half in halves)
    return [(to, high << 16 | low)]


def _unary(function: Callable[[Instruction, int], int | None]) -> Callable[[Registers, Instruction], Results]:
    """An instruction with one source."""

    def results(regs: Registers, ins: Instruction) -> Results:
        value = regs.get(ins.operands[1])
        if not known(value) or ins.modifiers & _OTHER_TYPES:
            return None
        return [(ins.operands[0], function(ins, value & MASK))]

    return results


_OTHER_TYPES = {"F64", "U64", "S64", "F16", "BF16", "U16", "S16", "U8", "S8"}


def _shuffle(regs: Registers, ins: Instruction) -> Results:
    """If all threads read from the first one, the result is the first thread's own value."""
    truth, to, value, lane = ins.operands[:4]
    return [(to, regs.get(value)), (truth, None)] if "IDX" in ins.modifiers and regs.get(lane) == 0 else None


def _vote(regs: Registers, ins: Instruction) -> Results:
    """The result as if the warp had only the first thread."""
    holds = regs.get(ins.operands[-1])
    return [(to, holds if is_predicate(to) or holds is None else int(holds)) for to in ins.operands[:2]]


def _predicates_to_register(regs: Registers, ins: Instruction) -> Results:
    to, _, base, mask = ins.operands
    chosen, rest = regs.get(mask), bits_of(regs.get(base))
    if ins.modifiers:
        return None
    value, sure = rest.value & ~chosen, rest.known & ~chosen
    for i in range(7):
        if chosen >> i & 1 and (truth := regs.get(f"P{i}")) is not None:
            value, sure = value | truth << i, sure | 1 << i
    return [(to, value_of(value, sure))]


def _register_to_predicates(regs: Registers, ins: Instruction) -> Results:
    _, source, mask = ins.operands
    word, chosen = bits_of(None if ins.modifiers else regs.get(source)), regs.get(mask)
    truths = {i: bool(word.value >> i & 1) if word.known >> i & 1 else None for i in range(7) if chosen >> i & 1}
    return [(f"P{i}", truth) for i, truth in truths.items()]


# ---- memory: bytes in shared memory, which say whether a program is the last, and spilled registers


def _store_shared(regs: Registers, ins: Instruction) -> Results:
    address = shared_address(regs, ins.operands[0])
    if "U8" in ins.modifiers and address is not None:
        regs.flags[address] = regs.get(ins.operands[1])
    return []


def _load_shared(regs: Registers, ins: Instruction) -> Results:
    return [(ins.operands[0], regs.flags.get(shared_address(regs, ins.operands[1])))] if "U8" in ins.modifiers else None


def _store_local(regs: Registers, ins: Instruction) -> Results:
    address, register = shared_address(regs, ins.operands[0]), ins.operands[1]
    for i in range(_width(ins)):
        if address is not None:
            regs.local[address + 4 * i] = regs.get(register)
        register = following(register)
    return []


def _load_local(regs: Registers, ins: Instruction) -> Results:
    address = shared_address(regs, ins.operands[1])
    return [
        (register, None if address is None else regs.local.get(address + 4 * i))
        for i, register in enumerate(_written(ins))
    ]


def _atomic(regs: Registers, ins: Instruction) -> Results:
    to = next((text for text in ins.operands if not is_predicate(text)), "")
    return [(to, ARRIVAL)] if to.startswith("R") else []


# ---- floats


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & MASK))[0]


def _bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _to_float(ins: Instruction, value: int) -> int | None:
    exact = value if "U32" in ins.modifiers else signed(value)
    bits = _bits(float(exact))
    # _bits rounds to nearest, but RP rounds up; the algorithm for quotients depends on that
    return bits + 1 if "RP" in ins.modifiers and _float(bits) < exact else bits


def _reciprocal(ins: Instruction, value: int) -> int | None:
    number = _float(value)
    return _bits(1 / number) if "RCP" in ins.modifiers and number and math.isfinite(number) else None


def _to_integer(ins: Instruction, value: int) -> int | None:
    number = _float(value)
    if not math.isfinite(number) or "TRUNC" not in ins.modifiers:
        return None
    return max(0, min(MASK, int(number))) if "U32" in ins.modifiers else int(number)


def _float_arithmetic(function: Callable[..., float]) -> Callable[[Registers, Instruction], Results]:
    """An instruction on floats. A kernel may divide integers by multiplying with a reciprocal from its arguments."""

    def results(regs: Registers, ins: Instruction) -> Results:
        to, *sources = ins.operands
        values = [_float_operand(regs, source) for source in sources]
        if None in values or ins.modifiers & {"SAT", "RM", "RP", "RZ"}:
            return None
        return [(to, _bits(function(*values)))]

    return results


def _float_operand(regs: Registers, text: str) -> float | None:
    """The float in an operand: a register or constant, perhaps negated, or a number."""
    if _FLOAT.fullmatch(text):
        return float(text)
    value = regs.get(text.lstrip("-"))
    if not known(value):
        return None
    return -_float(value) if text[0] == "-" else _float(value)


# ---- all instructions


def _width(ins: Instruction) -> int:
    """The number of registers that an instruction writes."""
    mods, name = ins.modifiers, ins.name
    if name == "F2F":  # the type of the result comes first
        return 2 if ins.opcode.split(".")[1] == "F64" else 1
    if name == "HMMA" or "128" in mods or (name == "LDSM" and "4" in mods):
        return 4
    if name == "F2I":
        return 2 if mods & {"U64", "S64"} else 1
    return 2 if name in ("DADD", "DMUL", "DFMA") or mods & {"64", "F64", "WIDE"} else 1


_WITHOUT_RESULT = (
    "ST", "RED", "BAR", "BSSY", "BSYNC", "NOP", "DEPBAR", "LDGDEPBAR", "LDGSTS", "MEMBAR", "WARPGROUP", "FENCE",
    "WARPSYNC", "ERRBAR", "CCTL", "YIELD", "NANOSLEEP", "SYNCS", "UBLKCP", "UTMA", "PREEXIT", "ACQBULK", "BMOV",
    "BREAK",
)  # fmt: skip


def _written(ins: Instruction) -> list[str]:
    """The registers and predicates that an instruction writes."""
    if ins.name.startswith(_WITHOUT_RESULT):
        return []
    flags = list(takewhile(re.compile(r"U?P[0-9T]").fullmatch, ins.operands))
    if "SETP" in ins.name or len(flags) == len(ins.operands):  # a comparison writes only predicates
        return flags
    registers = [ins.operands[len(flags)]]
    while len(registers) < _width(ins):
        registers.append(following(registers[-1]))
    return flags + registers + ([] if flags else _split(ins)[1])


_TABLE: dict[str, Callable[[Registers, Instruction], Results]] = {
    "IADD3": _sum(3), "VIADD": _sum(2),
    "IMAD": _imad, "LEA": _lea, "LOP3": _lop3, "PLOP3": _plop3, "ISETP": _isetp, "SHF": _shift, "SEL": _select,
    "IMNMX": _extreme, "VIMNMX": _extreme, "VIADDMNMX": _extreme, "S2R": _special, "S2UR": _special, "CS2R": _special,
    "LDC": _load_constant, "MOV": _move, "R2UR": _move, "HFMA2": _half_constants,
    "IABS": _unary(lambda ins, a: abs(signed(a))),
    "FADD": _float_arithmetic(lambda a, b: a + b), "FMUL": _float_arithmetic(lambda a, b: a * b),
    "FFMA": _float_arithmetic(lambda a, b, c: a * b + c), "I2F": _unary(_to_float),
    "I2FP": _unary(_to_float), "MUFU": _unary(_reciprocal), "F2I": _unary(_to_integer),
    "POPC": _unary(lambda ins, a: a.bit_count()),
    "FLO": _unary(lambda ins, a: a.bit_length() - 1 if "U32" in ins.modifiers else None),
    "SHFL": _shuffle, "VOTE": _vote, "VOTEU": _vote,
    "P2R": _predicates_to_register, "R2P": _register_to_predicates, "STS": _store_shared, "LDS": _load_shared,
    "ATOM": _atomic, "ATOMG": _atomic, "STL": _store_local, "LDL": _load_local,
}  # fmt: skip
# the same instructions on uniform registers, which a warp shares
_TABLE |= {f"U{name}": _TABLE[name] for name in (
    "IADD3", "IMAD", "LEA", "LOP3", "PLOP3", "ISETP", "SHF", "SEL", "LDC", "MOV", "FLO", "POPC", "IMNMX",
    "VIMNMX", "VIADD",
)}  # fmt: skip


def carry_out(regs: Registers, ins: Instruction, *, sure: bool) -> None:
    """Execute an instruction; `sure` says whether its guard is known to be true."""
    results = _TABLE[ins.name](regs, ins) if ins.name in _TABLE else None
    if results is None:
        results = [(register, None) for register in _written(ins)]
    for register, value in results:
        regs.put(register, value, sure=sure)
