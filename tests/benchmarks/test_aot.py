"""Every Triton kernel compiles without a GPU: for sm_86 in every configuration, for sm_90 in the defaults of bf16."""

import json

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.aot
# bytes per thread that the binaries of some kernels spill by (kernel, storage type): one or two registers
SPILLED = {("pointwise_forward_kernel", "fp32"): 8, ("depthwise_forward_kernel", "fp32"): 8}


@pytest.fixture(scope="module")
def table(program, tmp_path_factory):
    """The program's own table: kernels that the interpreter holds cannot be compiled in this process."""
    out = tmp_path_factory.mktemp("aot") / "aot.json"
    # the default cache folder, so that a second run compiles only what changed; the model of a step uses it too
    command = ["--sample", "--jobs", "1", "--out", str(out)]
    program("-m", "benchmarks.gpu_model.aot", *command, TRITON_INTERPRET="0")
    return json.loads(out.read_text())["rows"]


def test_all_kernels_and_configurations_are_there(table):
    from nasfast._triton.configs import FAMILIES

    for arch in (86, 90):
        assert len({row["kernel"] for row in table if row["arch"] == arch}) == 17
    assert {row["config"] for row in table} == {name for family in FAMILIES.values() for name in family} | {"only"}
    stencils = {
        (row["kernel"], row["constants"], row["arch"], row["dtype"])
        for row in table
        if row["default"] and row["kernel"].startswith("depthwise")
    }
    # forward and backward of three kernels with two strides; float32 only for sm_86
    assert len(stencils) == 2 * 6 * 3


def test_no_default_configuration_spills(table):
    spilling = [row for row in table if row["default"] and row["spilled_bytes"]]
    assert [row for row in spilling if row["spilled_bytes"] > SPILLED.get((row["kernel"], row["dtype"]), 0)] == []


def test_every_configuration_fits_the_shared_memory_of_an_rtx_3080(table):
    assert [row for row in table if row["arch"] == 86 and row["shared_bytes"] > 99 * 1024] == []


def test_a_multiprocessor_holds_at_least_one_program(table):
    assert all(row["programs_per_sm"] >= 1 for row in table)
