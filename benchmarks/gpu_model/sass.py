"""Read the machine code of a compiled kernel: instructions, operands and scheduling bits.

The 128-bit encoding of Volta and later GPUs has scheduling bits: the number of cycles before the next instruction,
which of six scoreboards an instruction sets, and which ones it waits for.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_LABEL = re.compile(r"^\s*([.$\w]+):\s*$")
_FIRST = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
_SECOND = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_GUARD = re.compile(r"^@(!?)(U?P[0-9T])\s+")
_TARGET = re.compile(r"`\(([.$\w]+)\)")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        guard: predicate that must be true, or false if "!" precedes it; None without one.
        opcode: name and modifiers, such as LDG.E.128.
        operands: the operands as nvdisasm prints them, destinations first.
        target: label to which a branch goes.
        stall: cycles until the next instruction may issue.
        sets, frees: scoreboards that are released when the result is ready and when the operands are read; 7 for none.
        waits: mask of the scoreboards that must be released before the instruction issues.
    """

    guard: str | None
    opcode: str
    operands: tuple[str, ...]
    target: str | None
    stall: int
    sets: int
    frees: int
    waits: int

    @cached_property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @cached_property
    def modifiers(self) -> frozenset[str]:
        return frozenset(self.opcode.split(".")[1:])


@dataclass(frozen=True)
class Code:
    """Instructions in order, and for each label the index of the instruction after it."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @cached_property
    def loops(self) -> tuple[int, ...]:
        """Indices of the branches that go backwards."""
        found = enumerate(self.instructions)
        return tuple(i for i, ins in found if ins.name == "BRA" and self.labels.get(ins.target, i + 1) <= i)


def disassemble(cubin: bytes) -> Code:
    """Disassemble a cubin that has one kernel.

    Raises:
        RuntimeError: nvdisasm failed, or printed no instructions.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "nvdisasm", "-c", "-hex", file.name]
        result = subprocess.run(command, capture_output=True, text=True)
    code = parse(result.stdout)
    if result.returncode or not code.instructions:
        raise RuntimeError(f"nvdisasm: {result.stderr or 'no instructions in its output'}")
    return code


def parse(text: str) -> Code:
    """Parse the output of `nvdisasm -c -hex`."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    first = None
    for line in text.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _FIRST.match(line):
            first = found[1]
        elif first is not None and (found := _SECOND.match(line)):
            instructions.append(_instruction(first, int(found[1], 16)))
            first = None
    return Code(tuple(instructions), labels)


def _instruction(text: str, bits: int) -> Instruction:
    guard = None
    if found := _GUARD.match(text):
        guard, text = found[1] + found[2], text[found.end() :]
    opcode, _, rest = text.partition(" ")
    target = _TARGET.search(rest)
    operands = tuple(part.strip().replace(".reuse", "") for part in rest.split(",")) if rest.strip() else ()
    return Instruction(
        guard,
        opcode,
        operands,
        target[1] if target else None,
        stall=bits >> 41 & 15,
        sets=bits >> 46 & 7,
        frees=bits >> 49 & 7,
        waits=bits >> 52 & 63,
    )
