"""The CUDA kernels of conv_bn_act_chain without a GPU: which ones there are, what a call launches, machine code.

cuda_launches.cpp goes through csrc/gpu/chain.h with a machine that launches nothing. It writes down the grid of every
launch and the bytes of its arguments, from which the model follows a kernel's machine code as on a GPU. Building it
needs g++, and compiling kernels needs nvcc; both read csrc as it is in this checkout.
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

from benchmarks.gpu_model.gpus import LIMITS
from benchmarks.gpu_model.sass import TOOLS
from benchmarks.harness import ROOT
from nasfast.ops import _native
from nasfast.ops.cuda_times import Chain
from nasfast.ops.plan import ChainPlan, read_plan

OPERATORS = tuple(f"conv_bn_act_chain_gpu_{name}" for name in ("counters", "fwd", "make", "reduce", "bwd"))
CACHE = ROOT / "build" / "gpu_model"
_RECORDER = (
    "benchmarks/gpu_model/cuda_launches.cpp",
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


@dataclass(frozen=True)
class CudaLaunch:
    """One launch of a CUDA kernel.

    Attributes:
        kernel: the instantiation.
        stage: what it does, such as depthwise_forward.
        grid: number of blocks in each dimension.
        shared: bytes of shared memory of a block that the launch asks for.
        words: the argument of the kernel, in hexadecimal; pointers are numbered in the order in which they appear.
        bytes: size of the distinct tensors that it reads and writes.
        early: whether it may start before the launch in front of it has ended, from sm_90 on.
        chain: the chain of whose operator it is a part; None outside.
    """

    kernel: CudaKernel
    stage: str
    grid: tuple[int, int, int]
    shared: int
    words: str
    bytes: int
    early: bool
    chain: Chain | None


_GEOMETRY = ("images", "H", "W", "OH", "OW", "C", "N", "KERNEL", "STRIDE")


# ---- the recorder


def digest(sources: Sequence[str], *more: str) -> str:
    """A name for what is made from these files and folders of the checkout; comments of C++ do not matter."""
    found = hashlib.sha256(repr((torch.__version__, *more)).encode())
    for source in sources:
        path = ROOT / source
        for file in sorted(path.rglob("*.[hc]*")) if path.is_dir() else [path]:
            text = file.read_text()
            found.update((text if file.suffix == ".py" else re.sub(r"\s*//.*|\s+", " ", text)).encode())
    return found.hexdigest()[:24]


def _make(path: Path, command: Callable[[Path], list[str]]) -> str:
    """Run a compiler that writes `path`; returns what it prints.

    Raises:
        RuntimeError: it fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{os.getpid()}-{path.name}")
    result = subprocess.run(command(unfinished), capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command(path))}: {result.stderr[-3000:]}")
    unfinished.replace(path)
    return result.stdout + result.stderr


@functools.cache
def _recorder() -> Any:
    path = CACHE / f"launches-{digest((*_RECORDER, 'csrc/gpu', 'csrc/cpu'))}.so"
    if not path.exists():
        torch_at = Path(torch.__file__).parent
        options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
        # the version of torch's stable interface that CMakeLists.txt asks for
        options += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem", str(torch_at / "include")]
        _make(
            path,
            lambda to: [
                os.environ.get("CXX", "g++"),
                *options,
                *_RECORDER,
                str(torch_at / "lib/libtorch_cpu.so"),
                "-o",
                str(to),
            ],
        )
    library = ctypes.CDLL(str(path))
    library.known_kernels.restype = library.take_records.restype = ctypes.c_char_p
    return library


def _lines(text: bytes) -> Iterator[dict]:
    return (json.loads(line) for line in text.decode().splitlines())


def record_for(multiprocessors: int, shared_memory: int) -> None:
    """Record, from now on, what OPERATORS launch on a GPU of this size; shared_memory: bytes that a block can have."""
    _recorder().record_for(multiprocessors, shared_memory)


def take_records() -> list[dict]:
    """The launches since the last call: name, grid, shared (bytes), arguments (in hexadecimal), stage, geometry."""
    return list(_lines(_recorder().take_records()))


@functools.cache
def known_kernels() -> dict[str, CudaKernel]:
    """Every instantiation that some call could launch, by name."""
    return {line["name"]: CudaKernel(**line) for line in _lines(_recorder().known_kernels())}


def record_call(
    func: Any, arguments: dict[str, Any], arch: int, chain_of: Chain | None
) -> tuple[Any, list[CudaLaunch]]:
    """Call one of OPERATORS with its arguments by name, as a part of a chain.

    Returns:
        Its result, and what it launches on a GPU of `arch`.
    """
    limits = LIMITS[arch]
    record_for(limits.processors, limits.program_shared)
    result = func._op_dk(torch._C.DispatchKey.Meta, *arguments.values())
    chain = read_plan(arguments["plan"]) if arguments.get("plan") else None
    stages = len(chain.stages) if chain else 0
    before = arguments.get("before") or []
    begins = bool(before) and func._opname.endswith("bwd")
    dx = not func._opname.endswith("bwd") or arguments["dx"] is not None
    lines = take_records()
    launches, first = [], False
    for i, line in enumerate(lines):
        geometry = dict(zip(_GEOMETRY, line["geometry"], strict=True))
        stages -= line["stage"].endswith(("backward", "gradient"))
        # forward goes from the first stage to the last, and backward the other way
        first = stages == 0 or (not launches and line["stage"].endswith("forward"))
        makes = not launches and not begins
        added = arguments.get("added") is not None or (first and arguments.get("add_input"))
        launches.append(
            CudaLaunch(
                known_kernels()[line["name"]],
                line["stage"],
                (*line["grid"], 1),
                line["shared"],
                _without_addresses(line["arguments"]),
                _bytes(
                    line["stage"],
                    geometry,
                    chain,
                    len(before) * makes,
                    added=bool(added),
                    first=first,
                    begins=begins,
                    writes=dx or i + 1 < len(lines),
                ),
                early=bool(launches),
                chain=chain_of,
            )
        )
    return result, launches


def _bytes(
    stage: str,
    g: dict[str, int],
    chain: ChainPlan | None,
    before: int,
    *,
    added: bool,
    first: bool,
    begins: bool,
    writes: bool,
) -> int:
    """Bytes of the 16-bit tensors that one launch reads and writes.

    Args:
        chain: the chain of which it is a part; None if it only makes an input or begins a backward.
        before: 0, or, for a launch that makes the input of a chain, the tensors and folds from which it does.
        added: whether it adds a tensor to its result.
        first: whether it is of the first stage of a chain, which has no stage before.
        begins: whether the backward of this stage also begins that of the chain before, whose output it reads for this.
        writes: whether the backward of this stage writes a gradient, and not only sums of it.

    Raises:
        ValueError: a stage that this model does not know.
    """
    if before and stage == "apply":
        # of the two or three, one is a fold; and one is written
        return 2 * before * g["images"] * g["H"] * g["W"] * g["C"]
    if stage == "reduce":
        return 2 * 2 * g["images"] * g["OH"] * g["OW"] * g["N"]
    assert chain is not None
    source, result = (g["images"] * g[h] * g[w] * g[c] for h, w, c in (("H", "W", "C"), ("OH", "OW", "N")))
    narrow = (
        g["images"] * g["H"] * g["W"] * chain.stages[0].in_channels
    )  # the input of an expansion that is computed again
    if stage == "pointwise_forward" and first:
        return 2 * (source * max(before, 1) + result * (chain.schedule != "recomputed"))
    if stage in ("pointwise_forward", "depthwise_forward", "dense_forward"):
        return 2 * (source + result)
    if stage == "expand_depthwise_forward":
        return 2 * (narrow + result)
    if stage == "expand_depthwise_backward":
        return 2 * (2 * result + narrow + writes * source)
    if stage == "expansion_gradient":
        return 2 * (result + (2 + added + begins) * source)
    if stage == "apply":
        return 2 * (2 + added) * result
    if stage in ("pointwise_backward", "depthwise_backward"):
        # dz and y of this stage; dz of the stage before, its y and what is added
        return 2 * (2 * result + (writes + (added + begins if first else 1)) * source)
    raise ValueError(f"the model does not know what the stage {stage!r} reads and writes")


# where a process has its memory; the first of two 32-bit numbers that look like an address would be larger than _MOST
_ADDRESSES, _MOST = range(1 << 44, 1 << 48), 1 << 16


def _without_addresses(text: str) -> str:
    """Number the pointers in the bytes of an argument, 1 TiB apart, so that equal launches have equal arguments."""
    data, seen = bytes.fromhex(text), {}
    for at in range(0, len(data) - 7, 8):
        value = int.from_bytes(data[at : at + 8], "little")
        if value in _ADDRESSES and value & 0xFFFFFFFF > _MOST:
            number = seen.setdefault(value, len(seen) + 1) << 40
            data = data[:at] + number.to_bytes(8, "little") + data[at + 8 :]
    return data.hex()


# ---- machine code

# where the arguments are in the constant bank
_ARGUMENTS_AT = {86: 0x160, 90: 0x210}


@dataclass(frozen=True)
class CudaCode:
    """A kernel compiled for one architecture.

    Attributes:
        registers: per thread.
        shared_bytes: shared memory of a block besides that which a launch asks for.
    """

    cubin: bytes
    registers: int
    shared_bytes: int


_SOURCE = """
#include "{header}"
#include "{runner}"
template __global__ void nasfast::gpu::run_kernel<{name}>(const __grid_constant__ {name}::Args);
"""
_GPU = ROOT / "csrc" / "gpu"


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


def _compiled(names: Sequence[str], arch: int, options: Sequence[str], suffix: str) -> Path:
    """A file with the code of these kernels, and beside it a log of what nvcc said; read from build/gpu_model if there.

    Raises:
        RuntimeError: nvcc fails.
    """
    headers, runner = [_header_of(name) for name in names], ROOT / "kernels" / "cuda" / "run_kernel.h"
    needed = dict.fromkeys(path for header in headers for path in _with_included(header))
    sources = [str(path.relative_to(ROOT)) for path in (*needed, runner)]
    path = CACHE / f"{digest(sources, *names, str(arch))}{suffix}"
    log = path.with_suffix(f"{suffix}.log")
    if not log.exists():
        source = path.with_suffix(f".{os.getpid()}.cu")
        source.parent.mkdir(parents=True, exist_ok=True)
        each = zip(names, headers, strict=True)
        source.write_text("".join(_SOURCE.format(header=header, runner=runner, name=name) for name, header in each))
        said = _make(path, lambda to: ["nvcc", "-std=c++17", *options, str(source), "-o", str(to)])
        source.unlink()
        log.write_text(said)
    return path


def compile_ptx(names: Sequence[str], arch: int) -> str:
    """The PTX of these kernels in one module, or what build/gpu_model has of it.

    Raises:
        RuntimeError: nvcc fails.
    """
    return _compiled(names, arch, [f"-arch=compute_{arch}", "-ptx"], ".ptx").read_text()


def kernel_names(mangled: Sequence[str]) -> list[str]:
    """The names of kernels in C++, as known_kernels() has them, from those of their entries in machine code or PTX."""
    return [
        re.search(r"run_kernel<(.*)>\(", line)[1].strip() for line in _run(["c++filt"], "\n".join(mangled)).splitlines()
    ]


def compile_kernel(name: str, arch: int) -> CudaCode:
    """Compile a kernel for an architecture, or read it from build/gpu_model.

    Raises:
        RuntimeError: nvcc fails.
    """
    path = _compiled([name], arch, [f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v"], ".cubin")
    log = path.with_suffix(".cubin.log")
    said = log.read_text()
    registers, shared = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes smem", said)
    return CudaCode(path.read_bytes(), int(registers[1]), int(shared[1]) if shared else 0)


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


def _run(command: Sequence[str | Path], given: str | None = None) -> str:
    result = subprocess.run(command, input=given, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{command[0]}: {result.stdout[-500:]}{result.stderr[-500:]}")
    return result.stdout


def constants(words: str, arch: int) -> dict[int, int]:
    """The argument of a launch as 32-bit words of the constant bank, by byte offset."""
    data = bytes.fromhex(words)
    return {_ARGUMENTS_AT[arch] + at: int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)}
