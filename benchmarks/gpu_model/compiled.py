"""Compile recorded specialisations for a GPU that is not there, and read what each asks of one."""

from __future__ import annotations

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

from triton import compile as triton_compile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu_model.recorder import Specialization
from benchmarks.gpu_model.sass import TOOLS, Code, disassemble

# byte offset of the parameters in the constant bank
_PARAMETERS_AT = {86: 0x160, 90: 0x210}
_INTEGERS = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
_FLOATS = {"fp16": 2, "bf16": 2, "fp32": 4, "f32": 4, "fp64": 8}

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        processors: multiprocessors; each issues 4 warp instructions per cycle.
        clock: Hz.
        bandwidth: bytes per second of memory, as measured by others for copies.
        program_shared, shared: bytes of shared memory that one program may use, and that a multiprocessor has.
        registers, threads, programs: most of a multiprocessor.
    """

    name: str
    processors: int
    clock: float
    bandwidth: float
    program_shared: int
    shared: int
    registers: int
    threads: int
    programs: int

    def programs_per_processor(self, warps: int, registers: int, shared: int) -> int:
        """Programs that a multiprocessor holds at once."""
        # registers are given out in units of 256 per warp; every program takes 1 KiB of shared memory for the system
        by_registers = self.registers // (-(-registers * 32 // 256) * 256 * warps)
        return min(by_registers, self.threads // (32 * warps), self.shared // (shared + 1024), self.programs)


GPUS = {
    90: Gpu("H200", 132, 1.755e9, 4.3e12, 227 * 1024, 228 * 1024, 65536, 2048, 32),
    86: Gpu("RTX 3080", 68, 1.71e9, 0.76e12, 99 * 1024, 100 * 1024, 65536, 1536, 16),
}


@dataclass(frozen=True)
class Compiled:
    """A specialisation compiled for one architecture.

    Attributes:
        registers, spilled_bytes: per thread.
        shared_bytes: per program.
    """

    cubin: bytes
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    def code(self) -> Code:
        return disassemble(self.cubin)


def compile_for(specialization: Specialization, arch: int) -> Compiled:
    """Compile, or read from Triton's cache folder what was compiled before."""
    kernel = getattr(importlib.import_module(specialization.module), specialization.kernel)
    source = ASTSource(kernel, specialization.signature, specialization.constants, specialization.attributes)
    found = triton_compile(source, target=GPUTarget("cuda", arch, 32), options=specialization.options)
    registers, spilled = resources(found.asm["cubin"])
    return Compiled(found.asm["cubin"], found.metadata.num_warps, registers, spilled, found.metadata.shared)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack, which only spilled registers take, per thread.

    Raises:
        RuntimeError: cuobjdump does not say.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    said = re.search(r"REG:(\d+) STACK:(\d+)", result.stdout + result.stderr)
    if not said:
        raise RuntimeError(f"cuobjdump: {result.stdout}{result.stderr}")
    return int(said[1]), int(said[2])


def parameters(specialization: Specialization, arguments: dict[str, Any], arch: int) -> dict[int, int]:
    """The arguments of a launch as 32-bit words of the constant bank, by byte offset; no floating-point numbers.

    Pointers get addresses far from each other.
    """
    words, offset = {}, _PARAMETERS_AT[arch]
    for i, (name, kind) in enumerate(_flat(specialization.signature)):
        if kind == "constexpr":
            continue
        size = 8 if kind.startswith("*") else _INTEGERS.get(kind) or _FLOATS[kind]
        offset = -(-offset // size) * size
        if kind.startswith("*"):
            words |= {offset: 0, offset + 4: (i + 1) << 8}
        elif kind in _INTEGERS and name in arguments:
            value = int(arguments[name]) & (1 << 8 * size) - 1
            words[offset // 4 * 4] = value & 0xFFFFFFFF
            if size == 8:
                words[offset + 4] = value >> 32
        offset += size
    return words


def _flat(signature: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and type of every argument, those of a tuple one by one."""
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            yield from _flat({f"{name}[{i}]": part for i, part in enumerate(kind)})
        else:
            yield name, kind


def in_processes(function: Callable[[Job], Result], jobs: Sequence[Job], processes: int, cache: str) -> list[Result]:
    """function of every job, in processes whose Triton cache is the folder `cache`."""
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(cache,)) as pool:
        return list(pool.map(function, jobs))


def _start(cache: str) -> None:
    knobs.cache.dir = cache
