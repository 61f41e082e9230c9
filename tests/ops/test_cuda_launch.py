"""How kernels/cuda/gpu.cpp launches kernels and reports errors, on a CUDA runtime that fails where a test wants it to."""

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
def launches(tmp_path_factory):
    """Runs launches.cpp with these failures; returns (launches, error) of its calls."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path_factory.mktemp("launches") / "launches"
    command = [compiler, "-std=c++17", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command += ["-isystem", str(STUB), "-isystem", str(Path(torch.__file__).parent / "include")]
    sources = [str(STUB / "launches.cpp"), str(ROOT / "kernels" / "cuda" / "gpu.cpp")]
    subprocess.run([*command, *sources, "-o", str(program)], check=True)

    def run(*failing: str, **env: str) -> list[tuple[str, str]]:
        result = subprocess.run([program, *failing], env={**os.environ, **env}, capture_output=True, text=True, check=True)
        return [tuple(line.split("|")) for line in result.stdout.splitlines()]

    return run


def test_the_second_kernel_of_a_call_starts_early(launches):
    assert launches() == [("PE", "")] * 3
    assert launches(NASFAST_CUDA_EARLY="0") == [("PP", "")] * 3
    assert launches(NASFAST_CUDA_DEBUG="1") == [("PP", "")] * 3


def test_early_launches_that_the_driver_refuses_are_plain_from_then_on(launches):
    assert launches("early") == [("P-P", ""), ("PP", ""), ("PP", "")]


@pytest.mark.parametrize("call", ["cudaFuncSetAttribute", "cudaDeviceGetAttribute", "cudaGetDevice"])
def test_an_error_is_raised_once_and_not_by_the_next_launch(launches, call):
    first, *others = launches(call)
    assert first[0] == "" and f"{call} failed: invalid argument" in first[1]
    assert others == [("PE", "")] * 2


def test_the_error_of_a_launch_names_its_kernel(launches):
    first, *others = launches("cudaLaunchKernelExC")
    assert first[0] == "-" and "the CUDA kernel first (1 images, 8 x 8 -> 8 x 8 pixels, 16 -> 16 channels" in first[1]
    assert "invalid argument" in first[1] and others == [("PE", "")] * 2
