"""What machine code does to memory before it waits for the kernels in front, traced back to the kernel's argument."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_model.sass import TOOLS, Code, Instruction, parse

# where the argument of a kernel begins in the constant bank of sm_90
_ARGUMENT = 0x210
_REGISTER = re.compile(r"(?<![\w.])(U?R)(\d+)(?!\w)")
_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_MEMORY = re.compile(r"(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG)")
_PAIR = {"64", "WIDE"}
# in the place of a word: a register says which one it is
UNKNOWN = -1

# words of the argument from which each register was computed
_Origins = dict[str, frozenset[int]]


class Access(NamedTuple):
    """An access to global memory: its instruction, and the words of the argument from which its address comes."""

    opcode: str
    words: frozenset[int]


def chain_kernels(library: str, folder: Path) -> Iterator[tuple[str, Code]]:
    """The kernels of chains of an extension for sm_90: mangled name, and machine code from its first instruction on."""
    subprocess.run([TOOLS / "cuobjdump", "-xelf", "sm_90", library], cwd=folder, capture_output=True, check=True)
    for cubin in sorted(folder.glob("*.cubin")):
        command = [TOOLS / "nvdisasm", "-c", "-hex", cubin]
        code = parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for label, first in code.labels.items():
            if label.startswith(".text.") and "run_kernel" in label:
                labels = {name: at - first for name, at in code.labels.items()}
                yield label.removeprefix(".text."), Code(code.instructions[first:], labels)


def before_the_wait(code: Code) -> Iterator[Access]:
    """The accesses on all ways from the first instruction to the wait; an EXIT in front of it is one, without words.

    Raises:
        RuntimeError: a way that this does not follow.
    """
    known: dict[int, _Origins] = {0: {}}
    open_ = [0]
    while open_:
        at = open_.pop()
        ins, origins = code.instructions[at], dict(known[at])
        if ins.name == "ACQBULK":
            continue
        if _MEMORY.fullmatch(ins.name):
            yield Access(ins.opcode, _words(origins, next(part for part in ins.operands if "[" in part)))
        elif ins.name == "EXIT":
            yield Access(ins.opcode, frozenset())
        _carry_out(origins, ins)
        for to in _next(code, ins, at):
            before = known.get(to)
            merged = {r: words | (before or {}).get(r, frozenset()) for r, words in origins.items()}
            merged = {**(before or {}), **merged}
            if merged != before:
                known[to] = merged
                open_.append(to)


def _next(code: Code, ins: Instruction, at: int) -> list[int]:
    # what is called of mathematics touches no memory
    mathematics = ins.name == "CALL" and "__internal" in ins.operands[0]
    if ins.name in ("BRX", "BRXU", "JMX", "JMP", "CALL", "RET") and not mathematics:
        raise RuntimeError(f"{ins.opcode} before the wait: this does not follow it")
    on = [] if ins.name == "EXIT" and ins.guard is None else [at + 1]
    if ins.name == "BRA":
        # a branch may have a second predicate as its first operand
        always = ins.guard is None and len(ins.operands) == 1
        return [code.labels[ins.target]] + ([] if always else on)
    if ins.name == "BSSY" and code.instructions[code.labels[ins.target] - 1].name != "BSYNC":
        raise RuntimeError(f"{ins.opcode} {ins.target}: threads that have met go on elsewhere than behind their BSYNC")
    return on


def _words(origins: _Origins, text: str) -> frozenset[int]:
    """The words of the argument on which an operand depends."""
    if re.search(r"c\[0x0\]\[U?R", text):
        return frozenset({UNKNOWN})
    found = {(int(at, 16) - _ARGUMENT) // 8 * 8 for at in _CONSTANT.findall(text) if int(at, 16) >= _ARGUMENT}
    for kind, number in _REGISTER.findall(text):
        found |= origins.get(kind + number, frozenset())
    return frozenset(found)


def _carry_out(origins: _Origins, ins: Instruction) -> None:
    if not ins.operands:
        return
    written = _REGISTER.fullmatch(ins.operands[0])
    sources = frozenset().union(*(_words(origins, part) for part in ins.operands[1 if written else 0 :]))
    if ins.name == "STL":
        origins["stack"] = origins.get("stack", frozenset()) | sources
    if written is None:
        return
    if ins.name == "LDL":
        sources = origins.get("stack", frozenset())
    elif _MEMORY.fullmatch(ins.name) or ins.name in ("LDS", "LDSM"):
        sources = frozenset()  # no kernel has a pointer in memory
    count = 4 if "128" in ins.modifiers else 2 if ins.modifiers & _PAIR else 1
    for i in range(count):
        register = f"{written[1]}{int(written[2]) + i}"
        # a guard may leave what was there
        origins[register] = sources | (origins.get(register, frozenset()) if ins.guard else frozenset())
