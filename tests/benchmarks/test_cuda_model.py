"""The resources of the compiled CUDA kernels, when they touch memory, and what a step launches."""

import re
import shutil
import subprocess
from collections import Counter
from itertools import product

import pytest
from kernel_cases.cuda import needs_emulation

from nasfast.ops import _native

pytest.importorskip("triton")
from benchmarks.gpu_model import cuda
from benchmarks.gpu_model.gpus import LIMITS
from benchmarks.gpu_model.recorder import record_step
from benchmarks.gpu_model.sass import TOOLS, parse

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    needs_emulation,
]
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
    said = _native.extension.build_info().cuda_archs if _native.extension else ""
    return sorted({int(arch) for arch, virtual in re.findall(r"(\d+)(-virtual)?", said) if not virtual})


@pytest.fixture(scope="module")
def steps():
    """Recorded steps, by architecture and schedule of expansions: each has kernels that the other does not need."""
    return {(arch, how): record_step(arch, how) for arch in built_for() for how in ("stored", "recomputed")}


@pytest.fixture(scope="module")
def installed():
    return cuda.installed_kernels()


def short(name: str) -> tuple[str, tuple[int, ...]]:
    """The family of a kernel and the numbers that it is instantiated with."""
    family, arguments = re.fullmatch(r"(?:\w+::)*(\w+)<(.*)>", name).groups()
    return family, tuple(int(part) for part in arguments.split(", ")[1:3] if part.isdigit())


def test_every_kernel_is_in_the_extension_within_its_registers_and_few_spill(installed):
    for kernel, arch in product(cuda.known_kernels().values(), built_for()):
        found, limits = installed[kernel.name, arch], LIMITS[arch]
        # with as many a multiprocessor holds as many blocks as the kernel was written for
        assert found.registers <= limits.registers // (kernel.blocks * kernel.threads) // 8 * 8, kernel
        family, sizes = short(kernel.name)
        assert found.stack_bytes <= SPILLED.get((family, *sizes), 0), (kernel, found)
    counts = Counter(short(name)[0] for name in cuda.known_kernels())
    # two types; of stencils three kernels with two strides
    assert [counts[family] for family in ("ApplyKernel", "DepthwiseBackward", "ExpandForwardKernel")] == [2, 12, 12]


def test_every_launch_of_a_step_fits_the_shared_memory_of_a_block(installed, steps):
    launched = set()
    for (arch, _), step in steps.items():
        limits = LIMITS[arch]
        for launch in step.launches:
            found = installed[launch.kernel.name, arch]
            shared = found.shared_bytes + launch.shared
            assert shared <= limits.program_shared, launch
            assert limits.programs_per_processor(launch.kernel.threads // 32, found.registers, shared) >= 1, launch
            launched.add(short(launch.kernel.name)[0])
    assert launched == {short(name)[0] for name in cuda.known_kernels()}


# what reads no weights
WITHOUT_WEIGHTS = {"ApplyKernel", "ReduceKernel"}
# instructions that touch global memory
MEMORY = re.compile(r"LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG")


@pytest.mark.skipif(90 not in built_for(), reason="the extension has no kernels for sm_90")
def test_kernels_wait_for_those_in_front_before_they_touch_memory_but_weights(tmp_path):
    """Launches of a call may start early on sm_90, see kernels/cuda/gpu.cpp; no kernel of a call writes a weight.

    That what is loaded before are weights, the interpreter of tests/ptx checks for each family of kernels.
    """
    library = _native.extension.path
    subprocess.run([TOOLS / "cuobjdump", "-xelf", "sm_90", library], cwd=tmp_path, capture_output=True, check=True)
    seen = {}
    for cubin in tmp_path.glob("*.cubin"):
        command = [TOOLS / "nvdisasm", "-c", "-hex", cubin]
        code = parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        names = [ins.name for ins in code.instructions]
        for label, first in code.labels.items():
            if label.startswith(".text.") and "run_kernel" in label:
                before = names[first : names.index("ACQBULK", first)]
                seen[label.removeprefix(".text.")] = set(filter(MEMORY.fullmatch, before))
    assert len(seen) > 100
    for name, accesses in zip(cuda.kernel_names(list(seen)), seen.values(), strict=True):
        assert accesses == (set() if short(name)[0] in WITHOUT_WEIGHTS else {"LDG"}), name


def test_a_step_of_the_graph_engine_has_at_most_140_launches_of_ours(steps):
    for arch in built_for():
        step = steps[arch, "stored"]
        assert len(step.launches) <= 140
        # copies of images and labels (2); pool and classifier (2); cross entropy, its gradient and casts (7); hits and
        # what is returned (5); backward of classifier and pool, and its copy to the head (4)
        assert step.aten == 20
        found = Counter(launch.stage for launch in step.launches)
        # of 22 chains, all but that of the head leave their results to the next one, which begins their backward
        assert found["reduce"] == found["apply"] == found["dense_forward"] == 1
        # the first launch of each chain and direction waits for all that is in front of it
        assert sum(launch.early for launch in step.launches) == len(step.launches) - 2 * 22
