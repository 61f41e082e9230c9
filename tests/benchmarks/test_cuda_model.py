"""The resources of the compiled CUDA kernels, when they touch memory, and what a step launches."""

import json
import re
import shutil
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_cases.cuda import needs_emulation

from nasfast.ops import _native

pytest.importorskip("triton")
from benchmarks.gpu_model.cuda import kernel_names
from benchmarks.gpu_model.sass import Code

from .early_loads import UNKNOWN, before_the_wait, chain_kernels

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


# what reads no weights
WITHOUT_WEIGHTS = {"ApplyKernel", "ReduceKernel"}


@pytest.mark.skipif(90 not in built_for(), reason="the extension has no kernels for sm_90")
def test_kernels_wait_for_those_in_front_before_they_touch_memory_but_weights(recorded, tmp_path):
    """Launches of a call may start early on sm_90, see kernels/cuda/gpu.cpp; no kernel of a call writes a weight."""
    places: dict[tuple, list[set]] = defaultdict(lambda: [set(), set()])
    for name, found in recorded["places"].items():
        for known, more in zip(places[layout(name)], found, strict=True):
            known |= set(more)
    mangled, codes = zip(*chain_kernels(_native.extension.__file__, tmp_path), strict=True)
    assert len(codes) > 100
    for name, code in zip(kernel_names(mangled), codes, strict=True):
        pointers, weights = places[layout(name)]
        others = pointers - weights | {UNKNOWN}
        accesses = list(before_the_wait(code))
        assert bool(accesses) == (layout(name)[0] not in WITHOUT_WEIGHTS), name
        for opcode, words in accesses:
            assert opcode.startswith("LDG") and words & weights and not words & others, (name, opcode)
        # without the wait, the same kernel reads what others have written
        late = [replace(ins, opcode="NOP") if ins.name == "ACQBULK" else ins for ins in code.instructions]
        assert any(words & others for _, words in before_the_wait(Code(tuple(late), code.labels))), name


def layout(kernel):
    """Kernels with the same one have their arguments at the same places."""
    family, arguments = re.fullmatch(r"(?:\w+::)*(\w+)<(.*)>", kernel).groups()
    return family, "MakingSource" in arguments


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
