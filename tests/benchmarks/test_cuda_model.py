"""The resources of the compiled CUDA kernels, when they touch memory, and what a step launches."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from kernel_cases.cuda import needs_emulation

from nasfast.ops import _native

pytest.importorskip("triton")
from benchmarks.gpu_model.sass import TOOLS

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    needs_emulation,
]
SHARED_OF_A_BLOCK = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
# Bytes per thread that these kernels spill: those that fuse an expansion with a depthwise convolution, the depthwise
# kernels on tensor cores, and the gradient of an expansion of at most 32 channels. The others spill none.
SPILLED = {
    ("ExpandForwardKernel", 7, 1): 48,
    ("ExpandBackwardKernel", 5, 1): 32,
    ("ExpandBackwardKernel", 5, 2): 8,
    ("ExpandBackwardKernel", 7, 2): 104,
    **{("DepthwiseBackwardMatrices", kernel, tiles): 16 for kernel in (5, 7) for tiles in (1, 2, 4, 7)},
    ("ExpansionGradientKernel", 1): 8,
}


def built_for() -> list[int]:
    """The architectures for which the extension has CUDA kernels."""
    said = _native.extension.build_info()["cuda_archs"] if _native.extension else None
    return sorted({int(arch) for arch, virtual in re.findall(r"(\d+)(-virtual)?", said or "") if not virtual})


@pytest.fixture(scope="module")
def recorded(program):
    script = str(Path(__file__).parent / "cuda_step.py")
    return json.loads(program(script, *map(str, built_for()), TRITON_INTERPRET="0"))


@pytest.fixture(scope="module")
def table(recorded):
    return recorded["rows"]


def test_every_kernel_is_in_the_extension(table):
    assert {row["arch"] for row in table} == set(built_for())
    counts = Counter((row["kernel"].partition("<")[0], row["arch"]) for row in table)
    # two types; of stencils three kernels with two strides
    for family, count in {"ApplyKernel": 2, "DepthwiseBackward": 12, "ExpandForwardKernel": 12}.items():
        assert {counts[family, arch] for arch in built_for()} == {count}


def test_no_kernel_exceeds_its_registers_and_few_spill(table):
    assert [row for row in table if row["registers"] > row["most_registers"]] == []
    for row in table:
        family, arguments = re.fullmatch(r"(\w+)<(.*)>", row["kernel"]).groups()
        sizes = [int(part) for part in arguments.split(", ")[1:3] if part.isdigit()]
        assert row["spilled_bytes"] <= SPILLED.get((family, *sizes), 0), row


def test_every_launch_of_a_step_fits_the_shared_memory_of_a_block(table):
    launched = {row["kernel"].partition("<")[0] for row in table if row["launches"]}
    assert launched == {row["kernel"].partition("<")[0] for row in table}
    for row in table:
        assert row["shared_bytes"] + (row["most_asked"] or 0) <= SHARED_OF_A_BLOCK[row["arch"]], row
    assert all(row["blocks_per_sm"] >= 1 for row in table)


# instructions that read or write memory of the GPU
MEMORY = re.compile(r"(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG)")


@pytest.mark.skipif(90 not in built_for(), reason="the extension has no kernels for sm_90")
def test_kernels_wait_for_those_in_front_before_they_touch_memory():
    """The launches of a call may start early on sm_90, see kernels/cuda/gpu.cpp."""
    command = [TOOLS / "cuobjdump", "-sass", "-arch", "sm_90", _native.extension.__file__]
    before, waited = {}, {}
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if match := re.search(r"Function : (\S+)", line):
            kernel = match[1]
            before[kernel], waited[kernel] = [], False
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", line):
            waited[kernel] |= match[1] == "ACQBULK"
            if not waited[kernel] and MEMORY.fullmatch(match[1]):
                before[kernel].append(match[1])
    chains = [kernel for kernel in waited if "run_kernel" in kernel]
    assert len(chains) > 100
    for kernel in chains:
        assert waited[kernel] and not before[kernel], kernel
    # the others are launched behind all that is in front of them
    assert not any(waited[kernel] for kernel in set(waited) - set(chains))


def test_a_step_of_the_graph_engine_has_at_most_150_launches(recorded):
    for step in recorded["steps"]:
        found = step["kernels"]
        assert sum(found.values()) + step["pytorch"] <= 150
        # of 22 chains, all but that of the head leave their results to the next one, which begins their backward
        assert found["reduce"] == found["apply"] == found["dense_forward"] == 1
        # the first launch of each chain and direction waits for all that is in front of it
        chains = sum(count for name, count in found.items() if not name.endswith("_kernel"))
        assert step["early"] == chains - 2 * 22
        assert "bn_act_kernel" not in found and "bn_act_reduce_kernel" not in found
