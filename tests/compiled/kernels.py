"""The CUDA kernels of chains without a GPU: which there are, what a call launches, and the compiled ones.

launches.cpp goes through csrc/gpu/chain.h with a machine that launches nothing, and writes down every launch. Building
it needs g++, which reads csrc as it is in this checkout.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from nasfast.ops import _native

ROOT = Path(__file__).parents[2]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPERATORS = tuple(f"conv_bn_act_chain_gpu_{name}" for name in ("counters", "fwd", "make", "reduce", "bwd"))
CACHE = ROOT / "build" / "launches"
_RECORDER = (
    "tests/compiled/launches.cpp",
    *(f"csrc/{s}.cpp" for s in ("gpu/call", "cpu/plan", "cpu/launch", "cpu/pool")),
)


@dataclass(frozen=True)
class CudaKernel:
    """One instantiation of a kernel.

    Attributes:
        name: its type in C++, such as nasfast::gpu::ApplyKernel<nasfast::gpu::Bf16>.
        threads: of a block.
        blocks: that a multiprocessor must be able to hold, by registers.
    """

    name: str
    threads: int
    blocks: int


# ---- the recorder


def _digest(sources: Sequence[str]) -> str:
    """A name for what is made from these files and folders of the checkout; comments of C++ do not matter."""
    found = hashlib.sha256(torch.__version__.encode())
    for source in sources:
        path = ROOT / source
        for file in sorted(path.rglob("*.[hc]*")) if path.is_dir() else [path]:
            found.update(re.sub(r"\s*//.*|\s+", " ", file.read_text()).encode())
    return found.hexdigest()[:24]


def _run(command: Sequence[str | Path], given: str | None = None) -> str:
    result = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {result.stdout[-500:]}{result.stderr[-3000:]}")
    return result.stdout


@functools.cache
def _recorder() -> Any:
    path = CACHE / f"launches-{_digest((*_RECORDER, 'csrc/gpu', 'csrc/cpu'))}.so"
    if not path.exists():
        torch_at = Path(torch.__file__).parent
        options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
        # the version of torch's stable interface that CMakeLists.txt asks for
        options += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem", str(torch_at / "include")]
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        sources = [*_RECORDER, str(torch_at / "lib/libtorch_cpu.so")]
        _run([os.environ.get("CXX", "g++"), *options, *sources, "-o", str(unfinished)])
        unfinished.replace(path)
    library = ctypes.CDLL(str(path))
    library.known_kernels.restype = library.take_records.restype = ctypes.c_char_p
    return library


def _lines(text: bytes) -> Iterator[dict]:
    return (json.loads(line) for line in text.decode().splitlines())


def record_for(multiprocessors: int, shared_memory: int) -> None:
    """Record, from now on, what OPERATORS launch on a GPU of this size; shared_memory: bytes that a block can have."""
    _recorder().record_for(multiprocessors, shared_memory)


def take_records() -> list[dict]:
    """The launches since the last call: name, grid, shared (bytes), stage."""
    return list(_lines(_recorder().take_records()))


@functools.cache
def known_kernels() -> dict[str, CudaKernel]:
    """Every instantiation that some call could launch, by name."""
    return {line["name"]: CudaKernel(**line) for line in _lines(_recorder().known_kernels())}


# ---- compiled kernels


def kernel_names(mangled: Sequence[str]) -> list[str]:
    """The names of kernels in C++, as known_kernels() has them, from those of their entries in machine code."""
    return [
        re.search(r"run_kernel<(.*)>\(", line)[1].strip() for line in _run(["c++filt"], "\n".join(mangled)).splitlines()
    ]


@dataclass(frozen=True)
class Resources:
    """What a kernel of the installed extension needs.

    Attributes:
        registers, stack_bytes: registers and bytes of stack per thread; the stack holds spilled registers only.
        shared_bytes: shared memory of a block besides that which a launch asks for.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int


def installed_kernels() -> dict[tuple[str, int], Resources]:
    """The CUDA kernels of chains in the installed extension, by name and architecture.

    Raises:
        RuntimeError: cuobjdump or c++filt fails.
    """
    found: dict[tuple[str, int], Resources] = {}
    said = _run([TOOLS / "cuobjdump", "-res-usage", _native.extension.path])
    arch, name = 0, None
    for line in _run(["c++filt"], said).splitlines():
        if match := re.match(r"arch = sm_(\d+)", line):
            arch = int(match[1])
        elif match := re.match(r" *Function (.*):$", line):
            name = re.search(r"run_kernel<(.*?)>\(", match[1])
        elif name and (match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", line)):
            found[name[1].strip(), arch] = Resources(*map(int, match.groups()))
    return found
