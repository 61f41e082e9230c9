"""Every Triton kernel compiles without a GPU, for the H200."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")
from benchmarks.gpu_model.gpus import GPUS
from benchmarks.harness import ROOT

pytestmark = pytest.mark.aot


def test_every_kernel_compiles_without_spilling(program):
    """A program of its own, because kernels that the interpreter holds cannot be compiled in this process."""
    script = str(Path(__file__).with_name("compile_triton.py"))
    # the default cache folder, so that a second run compiles only what changed
    found = json.loads(program(script, TRITON_INTERPRET="0"))
    sources = [ROOT / "kernels" / "triton" / f"{name}.py" for name in ("bn", "depthwise", "mixed", "pointwise")]
    kernels = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert len(kernels) == 14 and kernels <= found.keys()
    for name, kernel in found.items():
        assert kernel["stack"] == 0, name
        assert GPUS[90].programs_per_processor(kernel["warps"], kernel["registers"], kernel["shared"]) >= 1, name
