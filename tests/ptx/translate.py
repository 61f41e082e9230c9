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
from .parse import TYPES, BasicBlock, Instruction, Kernel, PtxError

_SPECIAL = {"%tid.x": "thread", "%ctaid.x": "block_x", "%ctaid.y": "block_y"}
_SPECIAL |= {"%ntid.x": "threads", "%nctaid.x": "count_x", "%nctaid.y": "count_y"}
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
_COMPARE = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "ne": "!="}
# modifiers of loads and stores that choose a cache or a scope, or forbid the compiler to move them
_CACHES = {"cg", "ca", "nc", "volatile"}
_ROUNDED = {"rn", "f32", "f64"}
_NOTHING = {"griddepcontrol.launch_dependents", "griddepcontrol.wait", "bra", "bra.uni", "ret", "bar.sync", "trap"}


def local(register: str) -> str:
    return register[1:].replace(".", "_")


def _registers(operand: str) -> list[str]:
    return [name for name in re.findall(r"%\w+(?:\.x|\.y)?", operand) if name not in _SPECIAL]


def written(ins: Instruction) -> list[str]:
    """The registers that an instruction sets."""
    if ins.name in ("st", "bra", "ret", "bar", "cp", "griddepcontrol", "trap") or not ins.operands:
        return []
    return _registers(ins.operands[0])


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
        self._find_live()

    def _find_constants(self) -> None:
        """Registers with one number for the whole kernel, which need no place."""
        found: dict[str, list[Instruction]] = {}
        for block in self.kernel.blocks:
            for ins in block.instructions:
                for name in written(ins):
                    found.setdefault(name, []).append(ins)
        self.constants = {
            name: list_[0].operands[1]
            for name, list_ in found.items()
            if len(list_) == 1 and list_[0].name == "mov" and list_[0].operands[1][0] not in "%{"
        }
        self.index = {name: i for i, name in enumerate(n for n in found if n not in self.constants)}

    def _find_live(self) -> None:
        """For each block, the registers that it reads before it sets them, and those that are read behind it."""
        kernel, kept = self.kernel, self.constants.keys()
        self.needs: list[set[str]] = []
        sets = []
        for block in kernel.blocks:
            needs, defined = set(), set()
            for ins in block.instructions:
                needs |= set(read(ins)) - defined - kept
                defined |= set(written(ins)) - kept
            self.needs.append(needs)
            sets.append(defined)
        live, self.live = [set(needs) for needs in self.needs], [set() for _ in kernel.blocks]
        changed = True
        while changed:
            changed = False
            for at in reversed(range(len(live))):
                following = [to for to in kernel.blocks[at].successors(at, kernel.labels) if to < len(live)]
                out = set().union(*(live[to] for to in following))
                if len(out) > len(self.live[at]):
                    self.live[at], changed = out, True
                    live[at] |= out - sets[at]
        self.leaves = [self.live[at] & sets[at] for at in range(len(live))]

    def function(self, at: int) -> Callable[..., Any]:
        """The function of a block, made when it runs for the first time.

        Raises:
            PtxError: an instruction that the interpreter does not know.
        """
        if at in self.functions:
            return self.functions[at]
        block: BasicBlock = self.kernel.blocks[at]
        lines = [f"{local(name)} = L.get(R[{self.index[name]}])" for name in sorted(self.needs[at] & self.index.keys())]
        for ins in block.instructions:
            try:
                lines += self.statements(ins)
            except (KeyError, ValueError, IndexError, AttributeError) as error:
                text = self.kernel.lines[ins.line - 1].strip()
                raise PtxError(f"line {ins.line}: the interpreter does not know: {text} ({error!r})") from error
        lines += [f"L.put(R, {self.index[name]}, {local(name)})" for name in sorted(self.leaves[at])]
        last = block.instructions[-1]
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

    def list_of(self, operand: str, kind: str) -> str:
        return "[" + ", ".join(self.value(name.strip(), kind) for name in operand.strip("{}").split(",")) + "]"

    def set_all(self, operand: str, expression: str, type_: str) -> list[str]:
        names = [name.strip() for name in operand.strip("{}").split(",")]
        lines = [f"vector = {expression}"]
        return lines + [line for i, name in enumerate(names) for line in self.set(name, f"vector[{i}]", type_)]

    # ---- instructions

    def statements(self, ins: Instruction) -> list[str]:
        if ins.opcode in _NOTHING:
            return []
        if ins.guard:
            raise ValueError("a condition of something else than a branch")
        special = getattr(self, f"_{ins.name}", None)
        if special is not None:
            return special(ins)
        kind, modifiers = ins.modifiers[-1], set(ins.modifiers[:-1])
        a, *rest = (self.value(operand, kind) for operand in ins.operands[1:3])
        b = rest[0] if rest else None
        float_ = kind in ("f32", "f64")
        allowed = {"rn"} if float_ else {"lo"} if ins.name in ("mul", "mad") else set()
        if not modifiers <= allowed or (kind[0] == "f" and not float_):
            raise ValueError("modifiers")
        third = self.value(ins.operands[3], kind) if len(ins.operands) > 3 else None
        logic = f"{a} {_OPERATORS[ins.name]} {b}" if ins.name in _OPERATORS else None
        found = (
            logic
            or {
                "fma": f"fma({a}, {b}, {third})",
                "mad": f"{a} * {b} + {third}",
                "div": f"{a} / {b}" if float_ else f"quotient({a}, {b})",
                "rem": f"np.fmod({a}, {b})",
                "min": f"np.fmin({a}, {b})" if float_ else f"np.minimum({a}, {b})",
                "max": f"np.fmax({a}, {b})" if float_ else f"np.maximum({a}, {b})",
                "neg": f"-{a}",
                "abs": f"np.abs({a})",
                "not": f"~{a}",
                "sqrt": f"np.sqrt({a})",
                "rcp": f"{self.literal(1, kind)} / {a}",
            }[ins.name]
        )
        return self.set(ins.operands[0], found, TYPES[kind])

    def _mul(self, ins: Instruction) -> list[str]:
        kind = ins.modifiers[-1]
        a, b = (self.value(operand, kind) for operand in ins.operands[1:])
        mode = ins.modifiers[0]
        if mode == "wide":
            return self.set(ins.operands[0], f"wide_product({a}, {b})", TYPES[kind[0] + str(2 * int(kind[1:]))])
        if mode == "hi" and kind[1:] == "32":
            return self.set(ins.operands[0], f"high({a}, {b})", TYPES[kind])
        if mode not in ("lo", *_ROUNDED):
            raise ValueError(mode)
        return self.set(ins.operands[0], f"{a} * {b}", TYPES[kind])

    def _shl(self, ins: Instruction) -> list[str]:
        return self._shift(ins, "<<", "shift_left")

    def _shr(self, ins: Instruction) -> list[str]:
        return self._shift(ins, ">>", "shift_right")

    def _shift(self, ins: Instruction, operator: str, function: str) -> list[str]:
        (kind,), (to, a, count) = ins.modifiers, ins.operands
        count = self.constants.get(count, count)
        if count[0] != "%" and int(count, 0) < int(kind[1:]):
            return self.set(to, f"{self.value(a, kind)} {operator} {self.literal(int(count, 0), kind)}", TYPES[kind])
        return self.set(to, f"{function}({self.value(a, kind)}, {self.value(count, 'u32')})", TYPES[kind])

    def _mov(self, ins: Instruction) -> list[str]:
        (kind,), (to, a) = ins.modifiers, ins.operands
        if to[0] == "{":
            part = f"u{int(kind[1:]) // len(to.split(','))}"
            return self.set_all(to, f"parts({self.value(a, kind)}, {TYPES[part]})", TYPES[part])
        if a[0] == "{":
            part = f"u{int(kind[1:]) // len(a.split(','))}"
            return self.set(to, f"whole({self.list_of(a, part)}, {TYPES[kind]})", TYPES[kind])
        return self.set(to, self.value(a, kind), TYPES[kind])

    def _setp(self, ins: Instruction) -> list[str]:
        (compare, kind), (to, *operands) = ins.modifiers, ins.operands
        a, b = (self.value(operand, kind) for operand in operands)
        if kind[0] == "f" and compare == "ne":
            found = f"({a} < {b}) | ({a} > {b})"
        elif compare in _COMPARE:
            found = f"{a} {_COMPARE[compare]} {b}"
        else:  # unordered: also where one of them is not a number
            found = f"({a} {_COMPARE[compare.removesuffix('u')]} {b}) | np.isnan({a}) | np.isnan({b})"
        return self.set(to, found, "bool_")

    def _selp(self, ins: Instruction) -> list[str]:
        (kind,), (to, a, b, condition) = ins.modifiers, ins.operands
        a, b = self.value(a, kind), self.value(b, kind)
        return self.set(to, f"np.where({self.value(condition, 'pred')}, {a}, {b})", TYPES[kind])

    def _min(self, ins: Instruction) -> list[str]:
        if ins.modifiers[0] != "NaN":
            (kind,) = ins.modifiers
            function = "fmin" if kind[0] == "f" else "minimum"
            a, b = (self.value(operand, kind) for operand in ins.operands[1:])
            return self.set(ins.operands[0], f"np.{function}({a}, {b})", TYPES[kind])
        a, b = (self.value(operand, "b32") for operand in ins.operands[1:])
        return self.set(ins.operands[0], f"least({ins.modifiers[1].removesuffix('x2')!r}, {a}, {b})", "uint32")

    def _cvt(self, ins: Instruction) -> list[str]:
        *how, to, source = ins.modifiers
        if to in ("bf16x2", "f16x2") and source == "f32" and how[0] == "rn" and set(how) <= {"rn", "relu"}:
            upper, lower = (self.value(operand, "f32") for operand in ins.operands[1:])
            found = f"pack({to.removesuffix('x2')!r}, {upper}, {lower}, {'relu' in how})"
            return self.set(ins.operands[0], found, "uint32")
        if (how, to, source) == ([], "f32", "f16"):
            return self.set(ins.operands[0], f"from_float16({self.value(ins.operands[1], 'b16')})", "float32")
        a = self.value(ins.operands[1], source)
        if (how, to, source) == (["sat"], "f32", "f32"):
            return self.set(ins.operands[0], f"saturate({a})", "float32")
        if (how, to, source) == (["rzi"], "s32", "f32"):
            return self.set(ins.operands[0], f"truncate({a})", "int32")
        rounds = ["rn"] if to[0] == "f" and (to, source) != ("f64", "f32") else []
        if how != rounds or (source[0] == "f" and to[0] != "f"):
            raise ValueError("conversion")
        return self.set(ins.operands[0], f"{a}.astype({TYPES[to]})", TYPES[to])

    def _cvta(self, ins: Instruction) -> list[str]:
        if ins.opcode != "cvta.to.global.u64":
            raise ValueError("address space")
        return self.set(ins.operands[0], self.value(ins.operands[1], "u64"), "uint64")

    # ---- memory

    def _access(self, ins: Instruction) -> tuple[str, str, int]:
        """Space, type and number of elements of a load or store."""
        *how, kind = ins.modifiers
        count = next((int(word[1:]) for word in how if word in ("v2", "v4")), 1)
        (space,) = (word for word in how if word in ("global", "shared", "param"))
        if set(how) - _CACHES - {space, f"v{count}"}:
            raise ValueError("modifiers")
        return space, kind, count

    def _ld(self, ins: Instruction) -> list[str]:
        space, kind, count = self._access(ins)
        to, address = ins.operands[0], self.address(ins.operands[1], "u32" if space == "shared" else "u64")
        return self.set_all(to, f"M.load_{space}(L, {address}, {TYPES[kind]}, {count}, {ins.line})", TYPES[kind])

    def _st(self, ins: Instruction) -> list[str]:
        space, kind, _ = self._access(ins)
        address = self.address(ins.operands[0], "u32" if space == "shared" else "u64")
        return [f"M.store_{space}(L, {address}, {self.list_of(ins.operands[1], kind)}, {ins.line})"]

    def _cp(self, ins: Instruction) -> list[str]:
        if ins.opcode == "cp.async.commit_group":
            return ["M.commit(L)"]
        if ins.opcode == "cp.async.wait_group":
            return [f"M.wait(L, {int(ins.operands[0])})"]
        if ins.opcode != "cp.async.cg.shared.global" or ins.operands[2] != "16":
            raise ValueError("copy")
        to, source = self.address(ins.operands[0], "u32"), self.address(ins.operands[1], "u64")
        return [f"M.copy(L, {to}, {source}, {self.value(ins.operands[3], 'u32')}, {ins.line})"]

    def _atom(self, ins: Instruction) -> list[str]:
        if ins.opcode != "atom.acq_rel.gpu.global.add.s32":
            raise ValueError("atomic operation")
        address, number = self.address(ins.operands[1], "u64"), self.value(ins.operands[2], "s32")
        return self.set(ins.operands[0], f"M.atomic_add(L, {address}, {number}, {ins.line})", "int32")

    # ---- warps

    def _bar(self, ins: Instruction) -> list[str]:
        if ins.opcode != "bar.warp.sync" or ins.operands != ("-1",):
            raise ValueError("barrier")
        return [f"M.sync_warps(L, {ins.line})"]

    def _ldmatrix(self, ins: Instruction) -> list[str]:
        transpose = ins.modifiers[4:] == ["trans", "shared", "b16"]
        if ins.modifiers[:4] != ["sync", "aligned", "m8n8", "x4"] or not (transpose or ins.modifiers[4] == "shared"):
            raise ValueError("matrices")
        rows = f"M.load_rows(L, {self.address(ins.operands[1], 'u32')}, {ins.line})"
        return self.set_all(ins.operands[0], f"matrices({rows}, {transpose})", "uint32")

    def _movmatrix(self, ins: Instruction) -> list[str]:
        if ins.opcode != "movmatrix.sync.aligned.m8n8.trans.b16":
            raise ValueError("matrix")
        found = f"transposed(L.warps({self.value(ins.operands[1], 'b32')}, {ins.line}))"
        return self.set(ins.operands[0], found, "uint32")

    def _mma(self, ins: Instruction) -> list[str]:
        *how, storage, same, sums = ins.modifiers[2:]
        if how not in (["m16n8k16", "row", "col", "f32"], ["m16n8k8", "row", "col", "f32"]) or sums != "f32":
            raise ValueError("shape")
        arithmetic.STORAGE[storage], arithmetic.STORAGE[same]
        to, *operands = ins.operands
        a, b, c = (
            "["
            + ", ".join(f"L.warps({self.value(n.strip(), kind)}, {ins.line})" for n in o.strip("{}").split(","))
            + "]"
            for o, kind in zip(operands, ("b32", "b32", "f32"), strict=True)
        )
        if storage != same or how[0] != f"m16n8k{4 * (a.count('L.warps'))}":
            raise ValueError("shape")
        return self.set_all(to, f"product({storage!r}, {a}, {b}, {c})", "float32")

    def _shfl(self, ins: Instruction) -> list[str]:
        mode, kind = ins.modifiers[1:]
        to, a, source, clamp, mask = ins.operands
        clamp, mask = (int(self.constants.get(name, name), 0) for name in (clamp, mask))
        if mode not in ("bfly", "idx") or clamp != 31 or mask & 0xFFFFFFFF != 0xFFFFFFFF:
            raise ValueError("shuffle")
        value, valid = [*to.split("|"), None][:2]
        found = f"shuffled(L.warps({self.value(a, kind)}, {ins.line}), {self.value(source, 'u32')}, {mode!r})"
        return self.set(value, found, TYPES[kind]) + (self.set(valid, "np.True_", "bool_") if valid else [])


def _converted(expression: str, type_: str, wanted: str) -> str:
    """Bits of the same size are read as another type; numbers of another size are converted."""
    if type_ == wanted:
        return expression
    same = np.dtype(type_).itemsize == np.dtype(wanted).itemsize and "bool_" not in (type_, wanted)
    return f"{expression}.{'view' if same else 'astype'}({wanted})"
