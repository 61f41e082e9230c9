"""Every Triton kernel compiles without a GPU, for the H200."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
from benchmarks.gpu_model.gpus import GPUS

pytestmark = pytest.mark.aot


def test_every_kernel_compiles_without_spilling(program):
    """A program of its own, because kernels that the interpreter holds cannot be compiled in this process."""
    script = str(Path(__file__).with_name("compile_triton.py"))
    # the default cache folder, so that a second run compiles only what changed
    found = json.loads(program(script, TRITON_INTERPRET="0"))
    assert len(found) == 17
    for name, kernel in found.items():
        assert kernel["stack"] == 0, name
        assert GPUS[90].programs_per_processor(kernel["warps"], kernel["registers"], kernel["shared"]) >= 1, name
