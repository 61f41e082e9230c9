"""Every Triton kernel compiles without a GPU, for the H200."""

import json

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.aot


def test_every_kernel_compiles_without_spilling(program, tmp_path):
    """A program of its own, because kernels that the interpreter holds cannot be compiled in this process."""
    out = tmp_path / "aot.json"
    # the default cache folder, so that a second run compiles only what changed
    program(
        "-m",
        "benchmarks.gpu_model.aot",
        "--arch",
        "90",
        "--sample",
        "--jobs",
        "1",
        "--out",
        str(out),
        TRITON_INTERPRET="0",
    )
    rows = json.loads(out.read_text())["rows"]
    assert len({row["kernel"] for row in rows}) == len(rows) == 17
    assert all(row["spilled_bytes"] == 0 and row["programs_per_sm"] >= 1 for row in rows)
