"""Registers and predicates of one thread, some of them with known values, and the operands of instructions.

A value is an int of 32 bits if it is known, Bits if only some bits are known (compilers store predicates in the bits
of registers), FROM_ATOMIC if it is unknown and depends on an atomic operation, and None if it is otherwise unknown.
A predicate is True, False, None or FROM_ATOMIC.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.gpu_model.sass import Instruction

MASK = 0xFFFFFFFF
FROM_ATOMIC = "depends on an atomic operation"


class Bits(NamedTuple):
    """A word: its bits in the mask `known` are those of `value`; `atomic` says whether another depends on an atomic."""

    value: int
    known: int
    atomic: bool


Value = int | Bits | None | str
Truth = bool | None | str

_REGISTER = re.compile(r"^(-|~|!)?(\|)?(U?[RP])(\d+|Z|T)\|?$")
_CONSTANT = re.compile(r"^(-|~)?c\[0x0\]\[(0x[0-9a-f]+)\]$")
_ADDRESS = re.compile(r"\[(?:(U?R\w+)(?:\.\w+)?)?\+?(?:(UR\w+))?\+?(-?0x[0-9a-f]+)?\]")

_GLOBAL = re.compile(r"\[(U?R\w+)(?:\.U32)?\.64\+?(UR\w+)?\+?(-?0x[0-9a-f]+)?\]")


class Registers:
    """Registers and predicates of one thread.

    Args:
        constants: words of the constant bank by byte offset.
        index: index of the program in each dimension.
    """

    def __init__(self, constants: dict[int, int], index: tuple[int, int, int]) -> None:
        self.constants, self.index = constants, index
        self.values: dict[str, Value] = {"RZ": 0, "URZ": 0}
        self.truths: dict[str, Truth] = {"PT": True, "UPT": True}
        self.shared_from_atomic: set[int] = set()
        self.local: dict[int, Value] = {}

    def holds(self, predicate: str | None) -> Truth:
        """The value of a predicate, which "!" negates; True for None."""
        if predicate is None:
            return True
        if predicate[0] == "!":
            found = self.truths.get(predicate[1:])
            return not found if found is True or found is False else found
        return self.truths.get(predicate)

    def constant(self, operand: str, kind: str) -> Value:
        """The value of a constant of 8 or 16 bits, whose `kind` is such as U8."""
        found = _CONSTANT.match(operand)
        if not found or found[1]:
            return None
        at, bits = int(found[2], 16), int(kind[1:])
        word = self.constants.get(at - at % 4)
        if word is None:
            return None
        value = word >> 8 * (at % 4) & (1 << bits) - 1
        return (value - (1 << bits)) & MASK if kind[0] == "S" and value >> bits - 1 else value

    def get(self, operand: str) -> Value:
        """The value of an operand: a register, constant or number, perhaps negated or inverted."""
        found = self.values.get(operand, self)
        if found is not self:
            return found
        kind, name, sign = _operand(operand)
        if kind == "number":
            return name
        value = self.constants.get(name) if kind == "constant" else self.values.get(name)
        if sign and isinstance(value, Bits):
            return unknown((value,))
        if sign and isinstance(value, int):
            # not reduced to 32 bits, so that a subtraction can see its carry
            return (~value & MASK) + 1 if sign == "-" else ~value & MASK
        return value

    def pair(self, operand: str) -> Value:
        """The 64-bit value of an operand: a register and the next one, two words of the constant bank, or a number."""
        kind, name, sign = _operand(operand)
        if kind == "number":
            return name if name < 1 << 31 else name | MASK << 32
        if kind == "constant":
            low, high = self.constants.get(name), self.constants.get(name + 4)
        else:
            low, high = self.values.get(name), self.values.get(following(name))
        if not isinstance(low, int) or not isinstance(high, int):
            return unknown((low, high))
        value = high << 32 | low
        return -value & MASK << 32 | MASK if sign == "-" else value

    def put(self, register: str, value: Value, *, sure: bool = True) -> None:
        """Write a register. If the write is not `sure`, only bits that are equal before and after stay known."""
        if register in ("RZ", "URZ"):
            return
        if not sure:
            value = merged(value, self.values.get(register))
        self.values[register] = value & MASK if isinstance(value, int) else value

    def put_pair(self, register: str, value: Value, *, sure: bool = True) -> None:
        known = isinstance(value, int)
        self.put(register, value & MASK if known else value, sure=sure)
        self.put(following(register), value >> 32 & MASK if known else value, sure=sure)

    def put_truth(self, predicate: str, value: Truth, *, sure: bool = True) -> None:
        if predicate in ("PT", "UPT"):
            return
        if not sure and self.truths.get(predicate) is not value:
            value = FROM_ATOMIC if FROM_ATOMIC in (value, self.truths.get(predicate)) else None
        self.truths[predicate] = value


_operands: dict[str, tuple[str, Any, str | None]] = {}


def _operand(text: str) -> tuple[str, Any, str | None]:
    """Parse an operand into its kind, its register, offset or number, and its sign; others are unknown registers."""
    if text not in _operands:
        if found := _REGISTER.match(text):
            parsed = ("register", found[3] + found[4], found[1]) if not found[2] else ("register", "?", None)
        elif found := _CONSTANT.match(text):
            parsed = ("constant", int(found[2], 16), found[1])
        elif re.fullmatch(r"-?0x[0-9a-f]+", text):
            parsed = ("number", int(text, 16) & MASK if text[0] != "-" else (int(text, 16) & MASK), None)
        elif re.fullmatch(r"-?\d+", text):
            parsed = ("number", int(text) & MASK, None)
        else:
            parsed = ("register", "?", None)
        _operands[text] = parsed
    return _operands[text]


def as_bits(value: Value) -> Bits:
    """A value as Bits."""
    if isinstance(value, Bits):
        return value
    return Bits(value & MASK, MASK, False) if isinstance(value, int) else Bits(0, 0, value is FROM_ATOMIC)


def as_value(value: int, known: int, *, atomic: bool) -> Value:
    """The simplest form of a word with these known bits."""
    if known & MASK == MASK:
        return value & MASK
    return Bits(value & known, known, atomic) if known else FROM_ATOMIC if atomic else None


def merged(a: Value, b: Value) -> Value:
    """What is known about a word that is one of two words."""
    a, b = as_bits(a), as_bits(b)
    return as_value(a.value, a.known & b.known & ~(a.value ^ b.value), atomic=a.atomic or b.atomic)


def following(register: str) -> str:
    """The next register."""
    prefix = "UR" if register.startswith("UR") else "R"
    number = register[len(prefix) :]
    return register if not number.isdigit() else f"{prefix}{int(number) + 1}"


def both(a: Truth, b: Truth) -> Truth:
    """The conjunction of two truths."""
    if a is False or b is False:
        return False
    if a is True and b is True:
        return True
    return FROM_ATOMIC if FROM_ATOMIC in (a, b) else None


def either(a: Truth, b: Truth) -> Truth:
    """The disjunction of two truths."""
    return negated(both(negated(a), negated(b)))


def negated(a: Truth) -> Truth:
    return not a if a is True or a is False else a


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def is_predicate(text: str) -> bool:
    """Whether an operand is a predicate or a negated predicate."""
    return bool(re.fullmatch(r"!?U?P[0-9T]", text))


def unknown(values: tuple[Any, ...]) -> Value:
    """The value of a result that depends on these values, if one of them is unknown."""
    return FROM_ATOMIC if any(v is FROM_ATOMIC or (isinstance(v, Bits) and v.atomic) for v in values) else None


def shared_address(regs: Registers, text: str) -> int | None:
    """The address in an operand of shared or local memory; None if it is unknown."""
    found = _ADDRESS.search(text)
    if not found:
        return None
    parts = [regs.get(name) if name else 0 for name in found.groups()[:2]]
    offset = int(found[3], 16) if found[3] else 0
    return sum(parts) + offset if all(isinstance(p, int) for p in parts) else None


def global_address(regs: Registers, ins: Instruction) -> int | None:
    """The address of a load from global memory; None if it is unknown."""
    text = next((o for o in ins.operands if ".64" in o), None)
    found = _GLOBAL.search(text) if text else None
    base = regs.pair(found[1]) if found else None
    extra = regs.pair(found[2]) if found and found[2] else 0
    if not isinstance(base, int) or not isinstance(extra, int):
        return None
    return base + extra + (int(found[3], 16) if found[3] else 0)
