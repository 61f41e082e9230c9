"""Executes the integer instructions of NVIDIA's machine code for one thread, as far as the operands are known."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from benchmarks.gpu_model import floats
from benchmarks.gpu_model.registers import (
    FROM_ATOMIC,
    MASK,
    Bits,
    Registers,
    Truth,
    Value,
    as_bits,
    as_value,
    both,
    either,
    following,
    is_predicate,
    negated,
    shared_address,
    signed,
    unknown,
)
from benchmarks.gpu_model.sass import Instruction

# ---- every function takes the registers, the instruction, and whether the guard is known to be true


def _split(ins: Instruction) -> tuple[str, list[str], list[str], list[str]]:
    """Split operands into destination, predicates that are written, sources, and predicates that are read."""
    rest = list(ins.operands[1:])
    written = []
    while rest and re.fullmatch(r"U?P[0-9T]", rest[0]):
        written.append(rest.pop(0))
    read = []
    while rest and is_predicate(rest[-1]):
        read.insert(0, rest.pop())
    return ins.operands[0], written, rest, read


def _arithmetic(function: Callable[..., int], *, sources: int) -> Callable:
    """An instruction whose 32-bit result and carry are a function of its sources."""

    def carry(regs: Registers, ins: Instruction, sure: bool) -> None:
        to, written, rest, read = _split(ins)
        values = [regs.get(text) for text in rest[:sources]]
        extra: list[Truth] = [regs.holds(p) for p in read] if "X" in ins.modifiers else []
        if all(isinstance(v, int) for v in values) and all(isinstance(e, bool) for e in extra):
            total = function(ins, *values) + sum(extra)
            regs.put(to, total, sure=sure)
            for i, predicate in enumerate(written):
                regs.put_truth(predicate, total >= (i + 1) << 32, sure=sure)
        else:
            missing = unknown((*values, *extra))
            regs.put(to, missing, sure=sure)
            for predicate in written:
                regs.put_truth(predicate, missing, sure=sure)

    return carry


def _imad(regs: Registers, ins: Instruction, sure: bool) -> None:
    to, written, rest, read = _split(ins)
    if "MOV" in ins.modifiers:
        regs.put(to, regs.get(rest[2]), sure=sure)
        return
    wide, high = "WIDE" in ins.modifiers, "HI" in ins.modifiers
    a, b = regs.get(rest[0]), regs.get(rest[1])
    c = regs.pair(rest[2]) if wide or high else regs.get(rest[2])
    extra = [regs.holds(p) for p in read] if "X" in ins.modifiers else []
    if a == 0 or b == 0:
        a = b = 0
    if not all(isinstance(v, int) for v in (a, b, c)) or not all(isinstance(e, bool) for e in extra):
        missing = unknown((a, b, c, *extra))
        regs.put_pair(to, missing, sure=sure) if wide else regs.put(to, missing, sure=sure)
        for predicate in written:
            regs.put_truth(predicate, missing, sure=sure)
        return
    if "U32" not in ins.modifiers and (wide or high):
        a, b = signed(a), signed(b)
    result = a * b + c + sum(extra)
    if wide:
        regs.put_pair(to, result, sure=sure)
    else:
        regs.put(to, result >> 32 if high else result, sure=sure)
    for predicate in written:
        regs.put_truth(predicate, (result & (1 << 65) - 1) >> (64 if wide or high else 32) != 0, sure=sure)


def _lea(regs: Registers, ins: Instruction, sure: bool) -> None:
    to, written, rest, read = _split(ins)
    mods = ins.modifiers
    extra = regs.holds(read[-1]) if "X" in mods and read else False
    shift = regs.get(rest[-1])
    if "HI" not in mods:
        a, b = regs.get(rest[0]), regs.get(rest[1])
        values = (a, b, shift, extra)
        known = all(isinstance(v, int) for v in values)
        result = ((a << shift) & MASK) + b + extra if known else unknown(values)
    else:
        a, b = regs.get(rest[0]), regs.get(rest[1])
        high = 0 if "SX32" in mods else regs.get(rest[2])
        values = (a, b, high, shift, extra)
        known = all(isinstance(v, int) for v in values)
        if known:
            whole = signed(a) if "SX32" in mods else high << 32 | a
            result = ((whole << shift) >> 32 & MASK) + b + extra
        else:
            result = unknown(values)
    regs.put(to, result, sure=sure)
    for predicate in written:
        regs.put_truth(predicate, result > MASK if known else result, sure=sure)


def _lop3(regs: Registers, ins: Instruction, sure: bool) -> None:
    operands = list(ins.operands)
    truth = operands.pop(0) if is_predicate(operands[0]) else None
    to, *sources = operands[:4]
    result = lookup(int(operands[4], 16), *(regs.get(source) for source in sources))
    regs.put(to, result, sure=sure)
    if truth:
        known = result != 0 if isinstance(result, int) else True if isinstance(result, Bits) and result.value else None
        regs.put_truth(truth, unknown((result,)) if known is None else known, sure=sure)


def lookup(table: int, a: Value, b: Value, c: Value) -> Value:
    """Apply the bitwise function with the truth table `table` to three words."""
    words = as_bits(a), as_bits(b), as_bits(c)
    # bits of each word that may be one, and bits that may be zero
    ones = [word.value | ~word.known for word in words]
    zeros = [~word.value | ~word.known for word in words]
    may = [0, 0]
    for i in range(8):
        reached = MASK
        for k, bit in enumerate((4, 2, 1)):
            reached &= ones[k] if i & bit else zeros[k]
        may[table >> i & 1] |= reached
    return as_value(may[1], ~(may[0] & may[1]) & MASK, atomic=any(word.atomic for word in words))


def _plop3(regs: Registers, ins: Instruction, sure: bool) -> None:
    truths = [regs.holds(p) for p in ins.operands[2:5]]
    for to, text in zip(ins.operands[:2], ins.operands[5:7], strict=True):
        table = int(text, 16)
        cases = {
            bool(table >> i & 1)
            for i in range(8)
            if all(t == bool(i & bit) for t, bit in zip(truths, (4, 2, 1), strict=True) if isinstance(t, bool))
        }
        regs.put_truth(to, cases.pop() if len(cases) == 1 else unknown(tuple(truths)), sure=sure)


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


def _isetp(regs: Registers, ins: Instruction, sure: bool) -> None:
    first, second, left, right, other, *low = ins.operands
    mods = ins.modifiers
    name = next(m for m in mods if m in _COMPARE)
    a, b = regs.get(left), regs.get(right)
    if isinstance(a, int) and isinstance(b, int):
        a, b = a & MASK, b & MASK
        if "EX" in mods and a == b:
            found: Truth = regs.holds(low[0])
        else:
            a, b = (a, b) if "U32" in mods else (signed(a), signed(b))
            found = _COMPARE[name](a, b)
    else:
        found = unknown((a, b))
    truth = regs.holds(other)
    for to, value in ((first, found), (second, negated(found))):
        if "OR" in mods:
            result = either(value, truth)
        elif "XOR" in mods:
            missing = unknown((value, truth))
            result = value is not truth if isinstance(value, bool) and isinstance(truth, bool) else missing
        else:
            result = both(value, truth)
        regs.put_truth(to, result, sure=sure)


def _shift(regs: Registers, ins: Instruction, sure: bool) -> None:
    to, low, by, high = ins.operands
    values = (regs.get(low), regs.get(by), regs.get(high))
    if not all(isinstance(v, int) for v in values):
        regs.put(to, unknown(values), sure=sure)
        return
    low, by, high = values
    mods = ins.modifiers
    if not mods & {"U64", "S64"} and "W" not in mods:
        by = min(by, 32)
    whole = high << 32 | low
    if "L" in mods:
        # HI takes the high word of the shifted pair, otherwise the low word alone is shifted
        result = whole << by >> 32 if "HI" in mods else low << by
    else:
        whole = signed(whole, 64) if mods & {"S32", "S64"} else whole
        result = whole >> by >> 32 if "HI" in mods else whole >> by
    regs.put(to, result, sure=sure)


def _select(regs: Registers, ins: Instruction, sure: bool) -> None:
    to, a, b, predicate = ins.operands
    holds = regs.holds(predicate)
    if isinstance(holds, bool):
        regs.put(to, regs.get(a if holds else b), sure=sure)
    else:
        a, b = regs.get(a), regs.get(b)
        regs.put(to, a if a == b else unknown((a, b, holds)), sure=sure)


def _extreme(regs: Registers, ins: Instruction, sure: bool) -> None:
    """IMNMX, VIMNMX and VIADDMNMX: the minimum if the predicate is true, else the maximum."""
    to, *sources, predicate = ins.operands
    values = [regs.get(s) for s in sources]
    holds = regs.holds(predicate)
    if all(isinstance(v, int) for v in values) and isinstance(holds, bool):
        values = [v & MASK if "U32" in ins.modifiers else signed(v) for v in values]
        if ins.name == "VIADDMNMX":
            values = [signed(values[0] + values[1]), values[2]]
        regs.put(to, min(values) if holds else max(values), sure=sure)
    else:
        regs.put(to, unknown((*values, holds)), sure=sure)


def _special(regs: Registers, ins: Instruction, sure: bool) -> None:
    to, name = ins.operands
    if name.startswith("SR_CTAID."):
        value = regs.index["XYZ".index(name[-1])]
    else:
        # the thread that is followed is the first of its program, in a cluster of one program
        value = 0 if name.startswith(("SR_TID", "SR_LANEID", "SR_CgaCtaId", "SR_WARPID", "SRZ")) else None
    regs.put_pair(to, value, sure=sure) if ins.name == "CS2R" and "32" not in ins.modifiers else regs.put(
        to, value, sure=sure
    )


def _load_constant(regs: Registers, ins: Instruction, sure: bool) -> None:
    to, source = ins.operands
    if "64" in ins.modifiers:
        regs.put_pair(to, regs.pair(source), sure=sure)
    else:
        narrow = ins.modifiers & {"U8", "U16", "S8", "S16"}
        regs.put(to, regs.constant(source, *narrow) if narrow else regs.get(source), sure=sure)


def _move(regs: Registers, ins: Instruction, sure: bool) -> None:
    sources = [o for o in ins.operands[1:] if not is_predicate(o)]
    to = ins.operands[0] if not is_predicate(ins.operands[0]) else sources.pop(0)
    if "64" in ins.modifiers:
        regs.put_pair(to, regs.pair(sources[0]), sure=sure)
    else:
        regs.put(to, regs.get(sources[0]), sure=sure)


def _half_constants(regs: Registers, ins: Instruction, sure: bool) -> None:
    """HFMA2 with a product of zeros writes a constant of two halves."""
    to, a, b, *halves = ins.operands
    value: Value = None
    if {a.lstrip("-"), b.lstrip("-")} == {"RZ"} and len(halves) == 2:
        try:
            high, low = (struct.unpack("<H", struct.pack("<e", float(h)))[0] for h in halves)
            value = high << 16 | low
        except (ValueError, OverflowError):
            value = None
    regs.put(to, value, sure=sure)


def _unary(function: Callable[[Instruction, int], int | None]) -> Callable:
    """An instruction with one source."""

    def carry(regs: Registers, ins: Instruction, sure: bool) -> None:
        value = regs.get(ins.operands[1])
        if not isinstance(value, int):
            result = unknown((value,))
        else:
            result = function(ins, value & MASK)
        # I2F.S64 has a result of 32 bits from a pair, F2I.S64 the other way round
        if ins.modifiers & ({"F64"} if ins.name == "I2F" else {"U64", "S64"}):
            regs.put_pair(ins.operands[0], None, sure=sure)
        else:
            regs.put(ins.operands[0], result, sure=sure)

    return carry


def _permute(regs: Registers, ins: Instruction, sure: bool) -> None:
    to, *sources = ins.operands
    values = [regs.get(s) for s in sources[:3]]
    if not all(isinstance(v, int) for v in values) or len(ins.modifiers) > 0:
        regs.put(to, unknown(tuple(values)), sure=sure)
        return
    a, selector, b = values
    whole = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = whole[nibble & 7]
        result |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * i
    regs.put(to, result, sure=sure)


def _sign_extend(ins: Instruction, value: int, bits: int) -> int:
    value &= (1 << bits) - 1 if bits < 32 else MASK
    return value if "U32" in ins.modifiers else signed(value, bits)


def _shuffle(regs: Registers, ins: Instruction, sure: bool) -> None:
    """If all threads read from the first one, the result is the first thread's own value."""
    truth, to, value, lane = ins.operands[:4]
    value = regs.get(value)
    same = "IDX" in ins.modifiers and regs.get(lane) == 0
    regs.put(to, value if same else unknown((value,)), sure=sure)
    regs.put_truth(truth, None, sure=sure)


def _vote(regs: Registers, ins: Instruction, sure: bool) -> None:
    """The result as if the warp had only the first thread."""
    for operand in ins.operands[:2]:
        if is_predicate(operand):
            regs.put_truth(operand, regs.holds(ins.operands[-1]), sure=sure)
        else:
            holds = regs.holds(ins.operands[-1])
            regs.put(operand, int(holds) if isinstance(holds, bool) else holds, sure=sure)


def _predicates_to_register(regs: Registers, ins: Instruction, sure: bool) -> None:
    to, _, base, mask = ins.operands
    chosen, rest = regs.get(mask), as_bits(regs.get(base))
    value, known, atomic = rest.value & ~chosen, rest.known & ~chosen, rest.atomic
    for i in range(7):
        if chosen >> i & 1:
            truth = regs.truths.get(f"P{i}")
            value |= (truth is True) << i
            known |= isinstance(truth, bool) << i
            atomic |= truth is FROM_ATOMIC
    regs.put(to, unknown((regs.get(base),)) if ins.modifiers else as_value(value, known, atomic=atomic), sure=sure)


def _register_to_predicates(regs: Registers, ins: Instruction, sure: bool) -> None:
    _, source, mask = ins.operands
    word, chosen = as_bits(None if ins.modifiers else regs.get(source)), regs.get(mask)
    for i in range(7):
        if chosen >> i & 1:
            known = word.known >> i & 1
            regs.put_truth(f"P{i}", bool(word.value >> i & 1) if known else unknown((word,)), sure=sure)


def _store_shared(regs: Registers, ins: Instruction, sure: bool) -> None:
    address, value = shared_address(regs, ins.operands[0]), regs.get(ins.operands[1])
    if address is not None:
        (regs.shared_from_atomic.add if value is FROM_ATOMIC else regs.shared_from_atomic.discard)(address)


def _load_shared(regs: Registers, ins: Instruction, sure: bool) -> None:
    address = shared_address(regs, ins.operands[1])
    _forget(regs, ins, sure)
    if address in regs.shared_from_atomic:
        regs.put(ins.operands[0], FROM_ATOMIC, sure=sure)


def _store_local(regs: Registers, ins: Instruction, sure: bool) -> None:
    address, register = shared_address(regs, ins.operands[0]), ins.operands[1]
    for i in range(_width(ins)):
        if address is not None:
            regs.local[address + 4 * i] = regs.get(register)
        register = following(register)


def _load_local(regs: Registers, ins: Instruction, sure: bool) -> None:
    """Load a spilled register."""
    register, address = ins.operands[0], shared_address(regs, ins.operands[1])
    for i in range(_width(ins)):
        regs.put(register, None if address is None else regs.local.get(address + 4 * i), sure=sure)
        register = following(register)


def _atomic(regs: Registers, ins: Instruction, sure: bool) -> None:
    to = next((o for o in ins.operands if not is_predicate(o)), None)
    if to and to.startswith("R"):
        regs.put(to, FROM_ATOMIC)
        if "64" in ins.modifiers:
            regs.put(following(to), FROM_ATOMIC)


def _width(ins: Instruction) -> int:
    """The number of registers that an instruction writes."""
    mods, name = ins.modifiers, ins.name
    if name == "HGMMA":
        rows, columns, _ = map(int, next(m for m in mods if m.count("x") == 2).split("x"))
        return rows * columns // 128
    if name == "F2F":  # the type of the result comes first
        return 2 if ins.opcode.split(".")[1] == "F64" else 1
    if name in ("HMMA", "IMMA") or "128" in mods or (name == "LDSM" and "4" in mods):
        return 4
    if name in ("DADD", "DMUL", "DFMA", "DMMA") or mods & {"64", "F64", "WIDE", "U64", "S64"}:
        return 2
    return 2 if name == "LDSM" and "2" in mods else 1


_WITHOUT_RESULT = (
    "ST", "RED", "BAR", "BSSY", "BSYNC", "NOP", "DEPBAR", "LDGDEPBAR", "LDGSTS", "MEMBAR", "WARPGROUP", "FENCE",
    "WARPSYNC", "ERRBAR", "CCTL", "YIELD", "NANOSLEEP", "SYNCS", "UBLKCP", "UTMA", "PREEXIT", "ACQBULK", "BMOV",
    "BREAK",
)  # fmt: skip


def _forget(regs: Registers, ins: Instruction, sure: bool) -> None:
    """Mark all results of an instruction as unknown; they depend on an atomic operation if a source does."""
    if ins.name.startswith(_WITHOUT_RESULT) or not ins.operands:
        return
    operands = list(ins.operands)
    written = []
    while operands and re.fullmatch(r"U?P[0-9T]", operands[0]):
        written.append(operands.pop(0))
    # a comparison writes only predicates
    register = operands.pop(0) if operands and not ins.name.endswith(("SETP", "SET2")) else None
    values = tuple(regs.holds(o) if is_predicate(o) else regs.get(o) for o in operands)
    missing = None if ins.name.startswith("LD") else unknown(values)
    for predicate in written:
        regs.put_truth(predicate, missing)
    for _ in range(_width(ins) if register else 0):
        regs.put(register, missing)
        register = following(register)


_TABLE: dict[str, Callable[[Registers, Instruction, bool], None]] = {
    "IADD3": _arithmetic(lambda ins, a, b, c: a + b + c, sources=3),
    "IADD": _arithmetic(lambda ins, a, b: a + b, sources=2),
    "VIADD": _arithmetic(lambda ins, a, b: a + b, sources=2),
    "IMAD": _imad, "LEA": _lea, "LOP3": _lop3, "PLOP3": _plop3, "ISETP": _isetp, "SHF": _shift, "SEL": _select,
    "IMNMX": _extreme, "VIMNMX": _extreme, "VIADDMNMX": _extreme, "S2R": _special, "S2UR": _special, "CS2R": _special,
    "LDC": _load_constant, "MOV": _move, "R2UR": _move, "HFMA2": _half_constants,
    "IABS": _unary(lambda ins, a: abs(signed(a))),
    "FADD": floats.arithmetic(lambda a, b: a + b), "FMUL": floats.arithmetic(lambda a, b: a * b),
    "FFMA": floats.arithmetic(lambda a, b, c: a * b + c), "I2F": _unary(floats.to_float),
    "I2FP": _unary(floats.to_float), "MUFU": _unary(floats.reciprocal), "F2I": _unary(floats.to_integer),
    "POPC": _unary(lambda ins, a: a.bit_count()),
    "FLO": _unary(lambda ins, a: a.bit_length() - 1 if "U32" in ins.modifiers else None),
    "BREV": _unary(lambda ins, a: int(f"{a:032b}"[::-1], 2)),
    "PRMT": _permute, "SGXT": _arithmetic(_sign_extend, sources=2), "SHFL": _shuffle, "VOTE": _vote, "VOTEU": _vote,
    "P2R": _predicates_to_register, "R2P": _register_to_predicates, "STS": _store_shared, "LDS": _load_shared,
    "ATOM": _atomic, "ATOMG": _atomic, "STL": _store_local, "LDL": _load_local,
}  # fmt: skip
# the same instructions on uniform registers, which a warp shares
_TABLE |= {f"U{name}": _TABLE[name] for name in (
    "IADD3", "IMAD", "LEA", "LOP3", "PLOP3", "ISETP", "SHF", "SEL", "LDC", "MOV", "PRMT", "SGXT", "FLO", "POPC", "BREV",
    "IMNMX", "VIMNMX", "VIADD",
)}  # fmt: skip


def carry_out(regs: Registers, ins: Instruction, *, sure: bool) -> None:
    """Execute an instruction; `sure` says whether its guard is known to be true."""
    _TABLE.get(ins.name, _forget)(regs, ins, sure)
