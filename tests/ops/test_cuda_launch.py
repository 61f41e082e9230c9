"""How kernels/cuda/gpu.cpp launches kernels and reports errors, on a CUDA runtime that fails where a test says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).with_name("cuda_stub")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles a program of cuda_stub with other sources; returns its path."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("launches")

    def compile_program(name: str, *sources: Path) -> Path:
        command = [compiler, "-std=c++17", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
        command += ["-isystem", str(STUB), "-isystem", str(Path(torch.__file__).parent / "include")]
        subprocess.run([*command, str(STUB / f"{name}.cpp"), *map(str, sources), "-o", str(folder / name)], check=True)
        return folder / name

    return compile_program


@pytest.fixture(scope="module")
def launches(compiled):
    """Runs launches.cpp with these failures; returns (launches, error) of its calls."""
    program = compiled("launches", ROOT / "kernels" / "cuda" / "gpu.cpp")

    def run(*failing: str, **env: str) -> list[tuple[str, str]]:
        result = subprocess.run(
            [program, *failing], env={**os.environ, **env}, capture_output=True, text=True, check=True
        )
        return [tuple(line.split("|")) for line in result.stdout.splitlines()]

    return run


def test_every_call_launches_its_kernels(launches):
    assert launches() == launches(NASFAST_CUDA_DEBUG="1") == [("2", "")] * 3


@pytest.mark.parametrize("call", ["cudaFuncSetAttribute", "cudaDeviceGetAttribute", "cudaGetDevice"])
def test_an_error_is_raised_once_and_not_by_the_next_launch(launches, call):
    first, *rest = launches(call)
    assert first[0] == "0" and f"{call} failed: invalid argument" in first[1]
    assert rest == [("2", "")] * 2


def test_the_error_of_a_launch_names_its_kernel(launches):
    first, *rest = launches("cudaLaunchKernel")
    assert first[0] == "0" and "the CUDA kernel first (1 images, 8 x 8 -> 8 x 8 pixels, 16 -> 16 channels" in first[1]
    assert "invalid argument" in first[1] and rest == [("2", "")] * 2


def test_more_than_16_million_numbers_of_a_channel_are_counted_exactly(compiled):
    """A float has no odd numbers above 2^24."""
    mean, m2 = subprocess.run([compiled("many_numbers")], capture_output=True, text=True, check=True).stdout.split()
    assert (float(mean), float(m2)) == (1, 2 * (2**24 - 1))
