"""The CUDA kernels of chains without a GPU: which there are, what a call launches, their PTX, and the compiled ones.

launches.cpp goes through csrc/gpu/chain.h with a machine that launches nothing, and writes down every launch with the
bytes of its arguments. Building it needs g++, and compiling kernels nvcc; both read csrc as it is in this checkout.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from nasfast.ops import _native

ROOT = Path(__file__).parents[2]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPERATORS = tuple(f"conv_bn_act_chain_gpu_{name}" for name in ("counters", "fwd", "make", "reduce", "bwd"))
CACHE = ROOT / "build" / "ptx"
_GPU = ROOT / "csrc" / "gpu"
_RECORDER = ("tests/ptx/launches.cpp", *(f"csrc/{s}.cpp" for s in ("gpu/call", "cpu/plan", "cpu/launch", "cpu/pool")))


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


def digest(sources: Sequence[str], *more: str) -> str:
    """A name for what is made from these files and folders of the checkout; comments of C++ do not matter."""
    found = hashlib.sha256(repr((torch.__version__, *more)).encode())
    for source in sources:
        path = ROOT / source
        for file in sorted(path.rglob("*.[hc]*")) if path.is_dir() else [path]:
            found.update(re.sub(r"\s*//.*|\s+", " ", file.read_text()).encode())
    return found.hexdigest()[:24]


def _make(path: Path, command: Callable[[Path], list[str]]) -> None:
    """Run a compiler that writes `path`.

    Raises:
        RuntimeError: it fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{os.getpid()}-{path.name}")
    _run(command(unfinished))
    unfinished.replace(path)


def _run(command: Sequence[str | Path], given: str | None = None) -> str:
    result = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {result.stdout[-500:]}{result.stderr[-3000:]}")
    return result.stdout


@functools.cache
def _recorder() -> Any:
    path = CACHE / f"launches-{digest((*_RECORDER, 'csrc/gpu', 'csrc/cpu'))}.so"
    if not path.exists():
        torch_at = Path(torch.__file__).parent
        options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
        # the version of torch's stable interface that CMakeLists.txt asks for
        options += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem", str(torch_at / "include")]
        sources = [*_RECORDER, str(torch_at / "lib/libtorch_cpu.so")]
        _make(path, lambda to: [os.environ.get("CXX", "g++"), *options, *sources, "-o", str(to)])
    library = ctypes.CDLL(str(path))
    library.known_kernels.restype = library.take_records.restype = ctypes.c_char_p
    return library


def _lines(text: bytes) -> Iterator[dict]:
    return (json.loads(line) for line in text.decode().splitlines())


def record_for(multiprocessors: int, shared_memory: int) -> None:
    """Record, from now on, what OPERATORS launch on a GPU of this size; shared_memory: bytes that a block can have."""
    _recorder().record_for(multiprocessors, shared_memory)


def take_records() -> list[dict]:
    """The launches since the last call: name, grid, shared (bytes), arguments (in hexadecimal), stage."""
    return list(_lines(_recorder().take_records()))


@functools.cache
def known_kernels() -> dict[str, CudaKernel]:
    """Every instantiation that some call could launch, by name."""
    return {line["name"]: CudaKernel(**line) for line in _lines(_recorder().known_kernels())}


# ---- compiled kernels

_SOURCE = """
#include "{header}"
#include "{runner}"
template __global__ void nasfast::gpu::run_kernel<{name}>(const __grid_constant__ {name}::Args);
"""


def _header_of(name: str) -> Path:
    """The header that defines a kernel.

    Raises:
        RuntimeError: there is none.
    """
    kernel = re.match(r"[\w:]*?(\w+)(<|$)", name)[1]
    for header in sorted(_GPU.glob("*.h")):
        if re.search(rf"^struct {kernel} \{{", header.read_text(), re.MULTILINE):
            return header
    raise RuntimeError(f"no header of {_GPU} defines the kernel {name}")


def _with_included(header: Path, found: dict[Path, None] | None = None) -> tuple[Path, ...]:
    """A header and all that it includes, so that a change of another one compiles its kernels no second time."""
    found = {} if found is None else found
    if header not in found:
        found[header] = None
        for name in re.findall(r'^#include "([^"]+)"', header.read_text(), re.MULTILINE):
            _with_included((header.parent / name).resolve(), found)
    return tuple(found)


def compile_ptx(names: Sequence[str], arch: int) -> str:
    """The PTX of these kernels in one module, or what build/ptx has of it.

    Raises:
        RuntimeError: nvcc fails.
    """
    headers, runner = [_header_of(name) for name in names], ROOT / "kernels" / "cuda" / "run_kernel.h"
    needed = dict.fromkeys(path for header in headers for path in _with_included(header))
    path = CACHE / f"{digest([str(path.relative_to(ROOT)) for path in (*needed, runner)], *names, str(arch))}.ptx"
    if not path.exists():
        source = path.with_suffix(f".{os.getpid()}.cu")
        source.parent.mkdir(parents=True, exist_ok=True)
        each = zip(names, headers, strict=True)
        source.write_text("".join(_SOURCE.format(header=header, runner=runner, name=name) for name, header in each))
        options = ["-std=c++17", f"-arch=compute_{arch}", "-ptx"]
        _make(path, lambda to: ["nvcc", *options, str(source), "-o", str(to)])
        source.unlink()
    return path.read_text()


def kernel_names(mangled: Sequence[str]) -> list[str]:
    """The names of kernels in C++, as known_kernels() has them, from those of their entries in machine code or PTX."""
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
