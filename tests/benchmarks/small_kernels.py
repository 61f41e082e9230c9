"""Small kernels whose instructions can be counted by hand, followed by the model; run as a program by its test.

Prints, as JSON by name: what the ordinary program and the last one to arrive load, store and issue. What a predicate
switches off for the first thread is issued, but does not count as a load, a store or a product.
"""

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import json
import sys

import torch
import triton
import triton.language as tl

from benchmarks.gpu_model.compiled import compile_for, parameters
from benchmarks.gpu_model.recorder import Step, recorded
from benchmarks.gpu_model.walk import Latencies, Program, UnknownLoop, walks

MEMORY = 600


@triton.jit
def nested_kernel(x, out, n, m, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(n):
        for j in range(m):
            total += tl.load(x + (i * m + j) * BLOCK + at)
        total *= 2.0
    tl.store(out + at, total)


@triton.jit
def persistent_kernel(x, out, tiles, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tl.store(out + tile * BLOCK + at, tl.load(x + tile * BLOCK + at) * 3.0)


@triton.jit
def last_kernel(x, partial, tickets, out, parts, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(partial + tl.program_id(0) * BLOCK + at, tl.load(x + tl.program_id(0) * BLOCK + at))
    arrived = tl.atomic_add(tickets, 1, sem="acq_rel")
    if arrived == parts - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(parts):
            total += tl.load(partial + i * BLOCK + at)
        tl.store(out + at, total)


@triton.jit
def chase_kernel(table, out, n):
    at = tl.program_id(0)
    for _ in range(n):
        at = tl.load(table + at)
    tl.store(out, at)


@triton.jit
def while_kernel(table, out):
    at = tl.load(table)
    while at > 0:
        at = tl.load(table + at)
    tl.store(out, at)


@triton.jit
def fma_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    for _ in range(n):
        v = v * v + 1.0
    tl.store(out + at, v)


@triton.jit(do_not_specialize=["shift"])
def copy_kernel(x, out, ld, shift, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0) * ld + shift * 0 + at, tl.load(x + tl.program_id(0) * ld + at))


def follow(launch, arch: int, index: int) -> dict:
    compiled = compile_for(launch.specialization, arch)
    words = parameters(launch.specialization, launch.arguments, arch)
    program = Program((index, 0, 0), launch.grid, 32 * compiled.warps, words)
    latencies = Latencies(memory=MEMORY, double=2, atomic=700)
    try:
        both = walks(compiled.code(), program, latencies)
    except UnknownLoop as error:
        return {"error": str(error)}
    return {
        who: {
            "loads": walk.opcodes["LDG"] - walk.idle["LDG"],
            "stores": walk.opcodes["STG"] - walk.idle["STG"],
            "fma": walk.opcodes["FFMA"] - walk.idle["FFMA"],
            "atomics": walk.opcodes["ATOMG"],
            "instructions": walk.instructions,
            "cycles": walk.cycles,
            "accesses": dict(walk.accesses),
        }
        for who, walk in zip(("ordinary", "last"), both, strict=True)
    }


def main() -> None:
    x, numbers, half = torch.empty(1 << 14), torch.empty(64, dtype=torch.int32), torch.empty(1 << 14).bfloat16()
    cases = {}
    for n, m in ((0, 3), (1, 1), (5, 1), (3, 7), (16, 9)):
        cases[f"nested {n} {m}"] = (nested_kernel, (1,), (x, x, n, m), 128, 0)
    for i in range(3):
        cases[f"persistent {i}"] = (persistent_kernel, (3,), (x, x, 11), 128, i)
    for parts in (5, 37):
        cases[f"last {parts}"] = (last_kernel, (parts,), (x, x, numbers, x, parts), 128, 2)
    for n in (10, 30):
        cases[f"chase {n}"] = (chase_kernel, (1,), (numbers, numbers, n), None, 0)
    for n in (0, 7, 250):
        cases[f"fma {n}"] = (fma_kernel, (1,), (x, x, n), 256, 0)
    cases["while"] = (while_kernel, (1,), (numbers, numbers), None, 0)
    for ld in (1024, 1040, 1048):
        cases[f"copy {ld}"] = (copy_kernel, (2,), (half, half, ld, 16), 1024, 1)
    found = {}
    for name, (kernel, grid, arguments, block, index) in cases.items():
        step = Step()
        with recorded(step):
            kernel[grid](*arguments, **({"BLOCK": block} if block else {}), num_stages=1)
        (launch,) = step.launches
        signature = {k: str(v) for k, v in launch.specialization.signature.items()}
        attributes = {list(signature)[i] for (i, *_), v in launch.specialization.attributes.items() if v}
        found[name] = {"signature": signature, "divisible": sorted(attributes)}
        for arch in (86, 90):
            found[name][str(arch)] = follow(launch, arch, index)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
