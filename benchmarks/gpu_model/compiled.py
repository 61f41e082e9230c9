"""Compile recorded specialisations without a GPU, and read the resources that each one needs."""

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
from unittest.mock import patch

from triton import compile as triton_compile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu_model.cuda import CudaKernel, compile_kernel, constants
from benchmarks.gpu_model.recorder import Specialization
from benchmarks.gpu_model.sass import TOOLS, Code, disassemble

# byte offset of the parameters in the constant bank
_PARAMETERS_AT = {86: 0x160, 90: 0x210}
_INTEGERS = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
_FLOATS = {"fp16": 2, "bf16": 2, "fp32": 4, "f32": 4, "fp64": 8}

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Compiled:
    """A specialisation compiled for one architecture.

    Attributes:
        registers, spilled_bytes: registers and bytes of spilled registers per thread.
        shared_bytes: shared memory per program, without what the launch of a CUDA kernel asks for.
    """

    cubin: bytes
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    def code(self) -> Code:
        return disassemble(self.cubin)


def compile_for(specialization: Specialization | CudaKernel, arch: int) -> Compiled:
    """Compile a specialisation, or read it from Triton's cache or that of the CUDA kernels if it is there."""
    if isinstance(specialization, CudaKernel):
        code = compile_kernel(specialization.name, arch)
        warps = specialization.threads // 32
        return Compiled(code.cubin, warps, code.registers, code.spilled_bytes, code.shared_bytes)
    kernel = getattr(importlib.import_module(specialization.module), specialization.kernel)
    source = ASTSource(kernel, specialization.signature, specialization.constants, specialization.attributes)
    found = triton_compile(source, target=GPUTarget("cuda", arch, 32), options=specialization.options)
    registers, spilled = resources(found.asm["cubin"])
    return Compiled(found.asm["cubin"], found.metadata.num_warps, registers, spilled, found.metadata.shared)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack per thread; the stack holds spilled registers only.

    Raises:
        RuntimeError: cuobjdump does not report them.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    said = re.search(r"REG:(\d+) STACK:(\d+)", result.stdout + result.stderr)
    if not said:
        raise RuntimeError(f"cuobjdump: {result.stdout}{result.stderr}")
    return int(said[1]), int(said[2])


def parameters(specialization: Specialization | CudaKernel, arguments: dict[str, Any], arch: int) -> dict[int, int]:
    """The arguments of a launch as 32-bit words of the constant bank, by byte offset.

    Every pointer gets an address of its own, 1 TiB from the next. Floating-point numbers of Triton kernels are missing.
    """
    if isinstance(specialization, CudaKernel):
        return constants(arguments["words"], arch)
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
    """Name and type of every argument; the elements of a tuple are separate arguments."""
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            yield from _flat({f"{name}[{i}]": part for i, part in enumerate(kind)})
        else:
            yield name, kind


def in_processes(function: Callable[[Job], Result], jobs: Sequence[Job], processes: int, cache: str) -> list[Result]:
    """Apply a function to every job, in processes whose Triton cache is the folder `cache`; one process is this one."""
    if processes == 1:
        with patch.object(knobs.cache, "dir", cache):
            return [function(job) for job in jobs]
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(cache,)) as pool:
        return list(pool.map(function, jobs))


def _start(cache: str) -> None:
    knobs.cache.dir = cache
