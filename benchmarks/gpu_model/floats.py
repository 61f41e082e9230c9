"""Floating-point instructions whose operands are known: a kernel may divide integers with their help."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable

from benchmarks.gpu_model.registers import MASK, Registers, Value, signed, unknown
from benchmarks.gpu_model.sass import Instruction


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & MASK))[0]


def _bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def to_float(ins: Instruction, value: int) -> int | None:
    if ins.modifiers & {"F64", "U64", "S64", "F16", "BF16", "U16", "S16", "U8", "S8"}:
        return None
    exact = value if "U32" in ins.modifiers else signed(value)
    bits = _bits(float(exact))
    # _bits rounds to nearest, but RP rounds up; the algorithm for quotients depends on that
    return bits + 1 if "RP" in ins.modifiers and _float(bits) < exact else bits


def reciprocal(ins: Instruction, value: int) -> int | None:
    if "RCP" not in ins.modifiers or _float(value) == 0 or not math.isfinite(_float(value)):
        return None
    return _bits(1 / _float(value))


def to_integer(ins: Instruction, value: int) -> int | None:
    number = _float(value)
    if not math.isfinite(number) or "TRUNC" not in ins.modifiers:
        return None
    return max(0, min(MASK, int(number))) if "U32" in ins.modifiers else int(number) & MASK


def arithmetic(function: Callable[..., float]) -> Callable:
    """An instruction on floats. A kernel may divide integers by multiplying with a reciprocal from its arguments."""

    def carry(regs: Registers, ins: Instruction, sure: bool) -> None:
        to, *sources = ins.operands
        values = [_operand(regs, source) for source in sources]
        if all(isinstance(v, float) for v in values) and not ins.modifiers & _OTHER_ROUNDING:
            regs.put(to, _bits(function(*values)), sure=sure)
        else:
            regs.put(to, unknown(tuple(values)), sure=sure)

    return carry


_OTHER_ROUNDING = {"SAT", "RM", "RP", "RZ"}


def _operand(regs: Registers, text: str) -> Value | float:
    """The float in an operand: a register or constant, perhaps negated, or a number."""
    if text not in _numbers:
        _numbers[text] = float(text) if _NUMBER.fullmatch(text) else None
    number = _numbers[text]
    if number is not None:
        return number
    value = regs.get(text.lstrip("-"))
    if not isinstance(value, int):
        return value
    return -_float(value) if text[0] == "-" else _float(value)


_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?")
# the numbers among the operands so far; None for other operands
_numbers: dict[str, float | None] = {}
