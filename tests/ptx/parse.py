"""PTX text as kernels of basic blocks. Only what nvcc makes of this package's kernels is known; the rest raises."""

from __future__ import annotations

import re
from dataclasses import dataclass

# NumPy's type of each PTX type; registers of bits hold unsigned integers
TYPES = {"pred": "bool_", "f16": "float16", "f32": "float32", "f64": "float64"}
TYPES |= {f"{kind}{bits}": f"uint{bits}" for kind in "bu" for bits in (8, 16, 32, 64)}
TYPES |= {f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(.*?^\}$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"^\s*(?:\.extern )?\.(shared|local|const|global) \.align (\d+) \.\w+ \s*(\w+)(\[(\d*)\])?(.*)$")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([\w.]+)\s*(.*)")


class PtxError(Exception):
    """A fault of a kernel, or an instruction that the interpreter does not know; says the line of the PTX text."""


@dataclass(frozen=True)
class Instruction:
    """One instruction; `line` counts from 1 in the text of the module."""

    line: int
    guard: str | None
    negated: bool
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


@dataclass
class Kernel:
    """One entry of a module.

    Attributes:
        lines: the text of the module.
        registers: NumPy's type by prefix, such as %rd.
        symbols: values of names: offsets in shared memory, and 0 for the parameter.
        shared_bytes: of shared memory in front of what the launch asks for.
        granule: bytes of shared memory that are written together at least.
        blocks: instructions that run one after the other; only the last is a branch, a return or a barrier.
        labels: the blocks where they stand.
    """

    name: str
    lines: list[str]
    registers: dict[str, str]
    symbols: dict[str, int]
    shared_bytes: int
    granule: int
    blocks: list[list[Instruction]]
    labels: dict[str, int]

    def type_of(self, register: str) -> str:
        return self.registers[re.match(r"%[a-zA-Z_]+", register)[0]]


def _split(text: str) -> tuple[str, ...]:
    """Operands, with {...} and [...] as one."""
    return tuple(part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text.strip().rstrip(";")))


def _blocks(lines: list[str], first: int) -> tuple[list[list[Instruction]], dict[str, int], dict[str, str]]:
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    for number, raw in enumerate(lines, first):
        text = raw.split("//")[0].strip()
        if not text or text in "{}" or text.startswith((".pragma", ".shared")):
            continue
        if declared := re.match(r"\.reg \.(\w+)\s+(%\w+)<\d+>;", text):
            registers[declared[2]] = TYPES[declared[1]]
        elif text.endswith(":"):
            if blocks[-1]:
                blocks.append([])
            labels[text[:-1]] = len(blocks) - 1
        elif text.startswith("."):
            raise PtxError(f"line {number}: the interpreter does not know {text}")
        else:
            negated, guard, opcode, rest = _INSTRUCTION.match(text).groups()
            blocks[-1].append(Instruction(number, guard, negated == "!", opcode, _split(rest)))
            if opcode.split(".")[0] in ("bra", "ret", "bar", "trap") and opcode != "bar.warp.sync":
                blocks.append([])
    if not blocks[-1]:
        blocks.pop()
    return blocks, labels, registers


def parse(text: str) -> dict[str, Kernel]:
    """Every kernel of a module, by its mangled name.

    Raises:
        PtxError: a directive that the interpreter does not know.
    """
    shared, dynamic, at = {}, [], 0
    for line in text.splitlines():
        if not (found := _VARIABLE.match(line)):
            continue
        space, _, name, array, size, rest = found.groups()
        if space != "shared" or rest.strip(" ;"):
            raise PtxError(f"the interpreter does not know the variable {line.strip()}")
        if array and not size:
            dynamic.append(name)
        else:
            # each variable is aligned to 16 bytes, which is as good as anywhere
            shared[name], at = at, at + -(-int(size or 1) // 16) * 16
    lines, kernels = text.splitlines(), {}
    for entry in _ENTRY.finditer(text):
        first, last = (text.count("\n", 0, place) for place in entry.span())
        body = next(i for i in range(first, last) if lines[i].strip() == "{")
        blocks, labels, registers = _blocks(lines[body : last + 1], body + 1)
        symbols = shared | dict.fromkeys(dynamic, at) | {f"{entry[1]}_param_0": 0}
        half = any(re.match(r"st\.(volatile\.)?shared\.\w16", i.opcode) for b in blocks for i in b)
        kernels[entry[1]] = Kernel(entry[1], lines, registers, symbols, at, 2 if half else 4, blocks, labels)
    return kernels
