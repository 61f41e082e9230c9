"""A basic block of PTX as a Python function of NumPy calls, one statement for each instruction.

The function gets the machine M, the threads L that run it and their registers R, and returns the condition of the
branch at its end, if there is one. A register is an array of one element for each thread, or a scalar.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from . import arithmetic
from .parse import TYPES, Instruction, Kernel, PtxError

_SPECIAL = {"%tid.x": "thread", "%ctaid.x": "block_x", "%ctaid.y": "block_y"}
_SPECIAL |= {"%ntid.x": "threads", "%nctaid.x": "count_x", "%nctaid.y": "count_y"}

# What each instruction computes: its opcode, the type of its result, and an expression of its operands. In an opcode,
# INT, FLOAT and ANY stand for a type, which is T in the rest. {1} is the first operand behind the result as a number of
# type T, {1:u32} of another type, {1*} all numbers of a list, {1@} an address, and {1w} has a number for each lane of
# whole warps. A result with * has several numbers.
_CACHES = r"(.volatile)?.(?P<space>global|shared|param)(.cg|.ca|.nc)?(?P<count>.v2|.v4)?"
_TABLE = [
    ("mov.ANY", "T", "{1}"),
    ("mov.b32.pack", "b32", "joined({1*:b16})"),
    ("add(.rn)?.ANY", "T", "{1} + {2}"),
    ("sub(.rn)?.ANY", "T", "{1} - {2}"),
    ("mul.lo.INT", "T", "{1} * {2}"),
    ("mul(.rn)?.FLOAT", "T", "{1} * {2}"),
    (r"mul.hi.(?P<T>[us]32)", "T", "high({1}, {2})"),
    (r"mul.wide.(?P<T>[us]32)", "WIDE", "wide_product({1}, {2})"),
    ("mad.lo.INT", "T", "{1} * {2} + {3}"),
    ("fma.rn.FLOAT", "T", "fma({1}, {2}, {3})"),
    ("div.rn.FLOAT", "T", "{1} / {2}"),
    ("div.INT", "T", "quotient({1}, {2})"),
    ("rem.INT", "T", "np.fmod({1}, {2})"),
    ("min.FLOAT", "T", "np.fmin({1}, {2})"),
    ("max.FLOAT", "T", "np.fmax({1}, {2})"),
    ("min.INT", "T", "np.minimum({1}, {2})"),
    ("max.INT", "T", "np.maximum({1}, {2})"),
    ("min.NaN.(?P<half>bf16|f16)x2", "b32", "least('{half}', {1:b32}, {2:b32})"),
    ("and.ANY", "T", "{1} & {2}"),
    ("or.ANY", "T", "{1} | {2}"),
    ("xor.ANY", "T", "{1} ^ {2}"),
    ("not.ANY", "T", "~{1}"),
    ("neg.ANY", "T", "-{1}"),
    ("abs.ANY", "T", "np.abs({1})"),
    ("sqrt.rn.FLOAT", "T", "np.sqrt({1})"),
    ("rcp.rn.FLOAT", "T", "np.reciprocal({1})"),
    ("shl.INT", "T", "shift_left({1}, {2:u32})"),
    ("shr.INT", "T", "shift_right({1}, {2:u32})"),
    ("selp.ANY", "T", "np.where({3:pred}, {1}, {2})"),
    ("setp.(?P<how>eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu).ANY", "pred", "compared('{how}', {1}, {2})"),
    ("cvt.rn(?P<relu>.relu)?.(?P<half>bf16|f16)x2.f32", "b32", "pack('{half}', {1:f32}, {2:f32}, '{relu}')"),
    ("cvt.f32.f16", "f32", "from_float16({1:b16})"),
    ("cvt.sat.f32.f32", "f32", "saturate({1:f32})"),
    ("cvt.rzi.s32.f32", "s32", "truncate({1:f32})"),
    (r"cvt.(?P<to>[us]\d+).(?P<T>[us]\d+)", "TO", "{1}.astype({to})"),
    (r"cvt.rn.(?P<to>f\d+).(?P<T>[us]\d+)", "TO", "{1}.astype({to})"),
    ("cvt.rn.(?P<to>f32).(?P<T>f64)", "TO", "{1}.astype({to})"),
    ("cvt.(?P<to>f64).(?P<T>f32)", "TO", "{1}.astype({to})"),
    ("cvta.to.global.(?P<T>u64)", "T", "{1}"),
    (rf"ld{_CACHES}.(?P<T>[busf]\d+)", "T*", "M.load_{space}(L, {1@}, {T}, '{count}')"),
    (rf"st{_CACHES}.(?P<T>[busf]\d+)", "", "M.store_{space}(L, {0@}, {1*})"),
    ("cp.async.commit_group", "", "M.commit(L)"),
    ("cp.async.wait_group", "", "M.wait(L, {0:u32})"),
    ("cp.async.cg.shared.global", "", "M.copy(L, {0@:u32}, {1@:u64}, {2:u32}, {3:u32})"),
    ("atom.acq_rel.gpu.global.add.(?P<T>s32)", "T", "M.atomic_add(L, {1@:u64}, {2})"),
    ("bar.warp.sync", "", "M.sync_warps(L, {0:u32})"),
    (
        "ldmatrix.sync.aligned.m8n8.x4(?P<trans>.trans)?.shared.b16",
        "b32*",
        "matrices(M.load_rows(L, {1@:u32}), '{trans}')",
    ),
    ("movmatrix.sync.aligned.m8n8.trans.b16", "b32", "transposed({1w:b32})"),
    (
        "mma.sync.aligned.m16n8k(16|8).row.col.f32.(?P<half>bf16|f16).(?P=half).f32",
        "f32*",
        "product('{half}', {1*w:b32}, {2*w:b32}, {3*w:f32})",
    ),
    ("shfl.sync.(?P<mode>bfly|idx).b32", "b32", "shuffled('{mode}', {1w:b32}, {2:u32}, {3:u32}, {4:u32})"),
    ("griddepcontrol.wait", "", "M.wait_for_kernels(L)"),
    ("griddepcontrol.launch_dependents|bra(.uni)?|ret|bar.sync|trap", "", ""),
]


def _pattern(opcode: str) -> re.Pattern[str]:
    text = opcode.replace(".", r"\.")
    for word, kind in {"INT": r"(?P<T>[bus]\d+)", "FLOAT": "(?P<T>f32|f64)", "ANY": r"(?P<T>[busf]\d+|pred)"}.items():
        text = text.replace(word, kind)
    return re.compile(text)


_RULES = [(_pattern(opcode), result, expression) for opcode, result, expression in _TABLE]
_PLACE = re.compile(r"\{(\d)([*@w]*)(?::(\w+))?\}")


def local(register: str) -> str:
    return register[1:].replace(".", "_")


def _registers(operand: str) -> list[str]:
    return [name for name in re.findall(r"%\w+(?:\.x|\.y)?", operand) if name not in _SPECIAL]


def written(ins: Instruction) -> list[str]:
    """The registers that an instruction sets."""
    if ins.name in ("st", "bra", "ret", "bar", "cp", "griddepcontrol", "trap") or not ins.operands:
        return []
    found = _registers(ins.operands[0])
    return found[:1] if ins.name == "shfl" else found  # nothing uses whether a lane was in range


def read(ins: Instruction) -> list[str]:
    """The registers that an instruction uses."""
    operands = ins.operands[1:] if written(ins) else ins.operands
    return [name for operand in operands for name in _registers(operand)] + ([ins.guard] if ins.guard else [])


class Translator:
    """Translates the blocks of one kernel when they run for the first time."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.namespace: dict[str, Any] = {"np": np, **vars(arithmetic)}
        self.namespace |= {name: getattr(np, name) for name in set(TYPES.values())}
        self.index: dict[str, int] = {}
        self.functions: dict[int, Callable[..., Any]] = {}
        self._find_constants()
        self._find_passed()

    def _find_constants(self) -> None:
        """Registers with one number for the whole kernel, which need no place."""
        found: dict[str, list[Instruction]] = {}
        for block in self.kernel.blocks:
            for ins in block:
                for name in written(ins):
                    found.setdefault(name, []).append(ins)
        self.constants = {
            name: list_[0].operands[1]
            for name, list_ in found.items()
            if len(list_) == 1 and list_[0].name == "mov" and list_[0].operands[1][0] not in "%{"
        }
        self.index = {name: i for i, name in enumerate(n for n in found if n not in self.constants)}

    def _find_passed(self) -> None:
        """For each block, the registers that it reads before it sets them, and those that it sets for others."""
        self.needs, self.leaves = [], []
        for block in self.kernel.blocks:
            needs, sets = set(), set()
            for ins in block:
                needs |= set(read(ins)) - sets
                sets |= set(written(ins))
            self.needs.append(needs & self.index.keys())
            self.leaves.append(sets)
        passed = set().union(*self.needs)
        self.leaves = [sets & passed for sets in self.leaves]

    def function(self, at: int) -> Callable[..., Any]:
        """The function of a block, made when it runs for the first time.

        Raises:
            PtxError: an instruction that the interpreter does not know.
        """
        if at in self.functions:
            return self.functions[at]
        block = self.kernel.blocks[at]
        lines = [f"{local(name)} = L.get(R[{self.index[name]}])" for name in sorted(self.needs[at])]
        for ins in block:
            try:
                lines += self.statements(ins)
            except (KeyError, ValueError, IndexError, AttributeError, StopIteration) as error:
                text = self.kernel.lines[ins.line - 1].strip()
                raise PtxError(f"line {ins.line}: the interpreter does not know: {text} ({error!r})") from error
        lines += [f"L.put(R, {self.index[name]}, {local(name)})" for name in sorted(self.leaves[at])]
        last = block[-1]
        if last.guard:
            lines.append(f"return {'~' * last.negated}{self.value(last.guard, 'pred')}")
        source = "def block(M, L, R):\n" + "".join(f"    {line}\n" for line in lines or ["pass"])
        exec(compile(source, f"{self.kernel.name}[{at}]", "exec"), self.namespace)
        self.functions[at] = self.namespace.pop("block")
        return self.functions[at]

    # ---- operands

    def literal(self, number: Any, kind: str) -> str:
        type_ = np.dtype(TYPES[kind])
        if type_.kind in "iu":
            number = np.array(int(number) & (1 << 8 * type_.itemsize) - 1, f"u{type_.itemsize}").view(type_)
        value = type_.type(number)
        name = f"k_{type_.name}_{value.tobytes().hex()}"
        self.namespace[name] = value
        return name

    def value(self, operand: str, kind: str) -> str:
        """An expression for an operand in a PTX type."""
        operand = self.constants.get(operand, operand)
        if operand in _SPECIAL:
            return _converted(f"L.{_SPECIAL[operand]}", "uint32", TYPES[kind])
        if operand[0] == "%":
            if operand not in self.index:
                raise ValueError(f"{operand} is never set")
            return _converted(local(operand), self.kernel.type_of(operand), TYPES[kind])
        if operand[:2] in ("0f", "0F", "0d", "0D"):
            bits = bytes.fromhex(operand[2:])
            number = struct.unpack(">f" if len(bits) == 4 else ">d", bits)[0]
            if TYPES[kind].startswith("float"):
                return self.literal(number, kind)
            return self.literal(int.from_bytes(bits, "big"), kind)
        number = self.kernel.symbols[operand] if operand in self.kernel.symbols else int(operand, 0)
        return self.literal(number, kind)

    def address(self, operand: str, kind: str) -> str:
        """An expression for [register + number], or the like."""
        base, offset = re.fullmatch(r"\[([%\w.$]+)(?:\s*\+\s*(-?\w+))?\]", operand).groups()
        found = self.value(base, kind)
        return f"({found} + {self.literal(int(offset, 0), kind)})" if offset and int(offset, 0) else found

    def set(self, register: str, expression: str, type_: str) -> list[str]:
        if register in self.constants:
            return []
        return [f"{local(register)} = {_converted(f'({expression})', type_, self.kernel.type_of(register))}"]

    # ---- instructions

    def statements(self, ins: Instruction) -> list[str]:
        """The Python statements of an instruction."""
        opcode = ins.opcode + (".pack" if ins.name == "mov" and ins.operands[1][0] == "{" else "")
        rules = ((pattern.fullmatch(opcode), result, expression) for pattern, result, expression in _RULES)
        found, result, expression = next(rule for rule in rules if rule[0])
        words = {name: (text or "").strip(".") for name, text in found.groupdict().items()}
        if not expression:
            return []
        if ins.guard:
            raise ValueError("a condition of something else than a branch")
        kind = words.get("T", "")
        result = result.replace("TO", words.get("to", "")).replace("WIDE", kind.replace("32", "64")).replace("T", kind)
        call = _PLACE.sub(lambda place: self.operand(ins, place, kind), expression)
        for name, text in words.items():
            call = call.replace(f"{{{name}}}", TYPES.get(text, text) if name in ("T", "to") else text)
        at = [f"M.line = {ins.line}"] if "M." in call or "w:" in expression else []
        if not result:
            return [*at, call]
        names = [name.strip() for name in re.split("[,|]", ins.operands[0].strip("{}"))]
        if not result.endswith("*"):
            return at + self.set(names[0], call, TYPES[result])
        each = (self.set(name, f"vector[{i}]", TYPES[result[:-1]]) for i, name in enumerate(names))
        return [*at, f"vector = {call}", *(line for lines in each for line in lines)]

    def operand(self, ins: Instruction, place: re.Match[str], kind: str) -> str:
        """What stands in an expression for a place such as {1*w:b32}."""
        text, how = ins.operands[int(place[1])], place[2]
        kind = place[3] or kind
        if "@" in how:
            return self.address(text, place[3] or ("u32" if ".shared" in ins.opcode else "u64"))
        found = [self.value(name.strip(), kind) for name in text.strip("{}").split(",")]
        if "w" in how:
            found = [f"L.warps({one})" for one in found]
        return f"[{', '.join(found)}]" if "*" in how else found[0]


def _converted(expression: str, type_: str, wanted: str) -> str:
    """Bits of the same size are read as another type; numbers of another size are converted."""
    if type_ == wanted:
        return expression
    same = np.dtype(type_).itemsize == np.dtype(wanted).itemsize and "bool_" not in (type_, wanted)
    return f"{expression}.{'view' if same else 'astype'}({wanted})"
