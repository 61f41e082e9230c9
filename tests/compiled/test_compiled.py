"""What the compiled CUDA kernels need, when they touch memory, and what a step launches."""

import os
import re
import shutil
from collections import Counter
from contextlib import ExitStack
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kernel_cases.cuda import needs_emulation
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.captures import EagerCapture
from benchmarks.gpu_step import ROWS, read
from nasfast.engine import GraphEngine
from nasfast.ops import _native, use_backend
from nasfast.ops.chain import cuda as conv_cuda
from nasfast.ops.chain import deferred
from nasfast.spaces import get_space, mean_path
from nasfast.supernet import Supernet

pytest.importorskip("triton")
from compiled.kernels import (
    OPERATORS,
    installed_kernels,
    known_kernels,
    record_for,
    take_records,
)

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    needs_emulation,
]
# multiprocessors, and KiB of shared memory that a block can have, by architecture; each multiprocessor has as many
# registers, and 1 KiB of shared memory more than a block
GPUS = {80: (108, 163), 86: (68, 99), 89: (128, 99), 90: (132, 227)}
REGISTERS = 65536
# Bytes per thread that these kernels spill. The others spill none.
SPILLED = {("DepthwiseBackwardMatrices", kernel, tiles): 16 for kernel in (5, 7) for tiles in (1, 2, 4, 7)}


def built_for() -> list[int]:
    """The architectures for which the extension has CUDA kernels."""
    said = _native.extension.build_info().cuda_archs if _native.extension else ""
    return sorted({int(arch) for arch, virtual in re.findall(r"(\d+)(-virtual)?", said) if not virtual})


@pytest.fixture(scope="module")
def installed():
    if not built_for():
        pytest.skip("the extension has no CUDA kernels")
    return installed_kernels()


def short(name: str) -> tuple[str, tuple[int, ...]]:
    """The family of a kernel and the numbers that it is instantiated with."""
    family, arguments = re.fullmatch(r"(?:\w+::)*(\w+)<(.*)>", name).groups()
    return family, tuple(int(part) for part in arguments.split(", ")[1:3] if part.isdigit())


def test_every_kernel_is_in_the_extension_within_its_registers_and_few_spill(installed):
    for kernel, arch in product(known_kernels().values(), built_for()):
        found = installed[kernel.name, arch]
        # with as many a multiprocessor holds as many blocks as the kernel was written for
        assert found.registers <= REGISTERS // (kernel.blocks * kernel.threads) // 8 * 8, kernel
        family, sizes = short(kernel.name)
        assert found.stack_bytes <= SPILLED.get((family, *sizes), 0), (kernel, found)
    counts = Counter(short(name)[0] for name in known_kernels())
    # two types; of stencils three kernels with two strides
    assert [counts[family] for family in ("ApplyKernel", "DepthwiseBackward")] == [2, 12]


# ---- the launches of a step

SPACE, BATCH = "mobilenet_v2", 32
# operators that neither read nor write elements
NO_LAUNCH = ("empty", "new_empty", "resize_", "_reshape_alias", "_unsafe_view", "lift_fresh", "set_", "record_stream")


class Launches(TorchDispatchMode):
    """Counts the operators of PyTorch that would launch a kernel on a GPU, and records the launches of our kernels."""

    def __init__(self):
        super().__init__()
        self.ours, self.pytorch = [], Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._opname in OPERATORS:
            result = func._op_dk(torch._C.DispatchKey.Meta, *args, *kwargs.values())
            self.ours += take_records()
            return result
        if func.namespace.startswith("nasfast"):
            with self:  # count the operators that the launcher calls, not the launcher itself
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        result = func(*args, **kwargs)
        touched = any(isinstance(t, Tensor) and t.numel() for t in tree_leaves((args, kwargs, result)))
        if touched and not func.is_view and not func._opname.startswith(NO_LAUNCH):
            self.pytorch[func._opname] += 1
        return result


def counters(count, device):
    # on a GPU these counters are zero already (nasfast/ops/arrivals.py), so filling them is no launch
    return torch.from_numpy(np.zeros(count, np.int32))


def launches_of_step(arch: int) -> Launches:
    """A second step of the graph engine, without the update: the mean path, bf16, BatchNorms train."""
    space = get_space(SPACE)
    shape = BATCH, space.in_channels, space.resolution, space.resolution
    net = Supernet(space, init="gaussian", layer_indicators=False)
    net.freeze("bn")
    net.to(memory_format=torch.channels_last).train()
    images = torch.zeros(shape).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(BATCH, dtype=torch.long)
    multiprocessors, shared = GPUS[arch]
    record_for(multiprocessors, shared * 1024)
    with ExitStack() as stack:
        stack.enter_context(use_backend("cuda"))
        stack.enter_context(patch.dict(os.environ, NASFAST_EMULATE_CUDA="1"))
        for module in (conv_cuda, deferred):
            stack.enter_context(patch.object(module, "zeros", counters))
        engine = GraphEngine(net, shape, bf16=True, capture=EagerCapture())
        for _ in range(2):
            with Launches() as step:
                engine.forward_backward(images, labels, [mean_path(space)])
    return step


@pytest.fixture(scope="module", params=[86, 90])
def step(request):
    return request.param, launches_of_step(request.param)


def test_a_step_of_the_graph_engine_has_at_most_140_launches_of_ours(step):
    _, step = step
    assert len(step.ours) <= 140
    # copies of images and labels (2); pool and classifier (2); cross entropy, its gradient and casts (7); hits and
    # what is returned (4); backward of classifier and pool (2)
    assert step.pytorch.total() == 17, step.pytorch
    # of 22 chains, all but that of the head leave their results to the next one, which begins their backward
    found = Counter(launch["stage"] for launch in step.ours)
    assert found["reduce"] == found["apply"] == found["dense_forward"] == 1


def test_a_step_has_the_launches_whose_sizes_are_known(step):
    """benchmarks/gpu_step.py says what they take."""
    arch, step = step
    if arch == 90:
        assert [short(launch["name"])[0] for launch in step.ours] == [each.family for each in read(ROWS).now]


def test_every_launch_of_a_step_fits_the_shared_memory_of_a_block(installed, step):
    arch, step = step
    if arch not in built_for():
        pytest.skip(f"the extension has no kernels for sm_{arch}")
    for launch in step.ours:
        found, kernel = installed[launch["name"], arch], known_kernels()[launch["name"]]
        shared = found.shared_bytes + launch["shared"]
        assert shared <= 1024 * GPUS[arch][1], launch
        # a warp gets registers in units of 256
        assert -(-found.registers * 32 // 256) * 256 * kernel.threads // 32 <= REGISTERS, launch
