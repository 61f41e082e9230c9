"""Record every launch of one training step without running a kernel, and without a GPU.

cuda.py records the CUDA kernels of chains. PyTorch's operators run on the CPU, and a dispatch mode counts them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import harness
from benchmarks.captures import EagerCapture
from benchmarks.gpu_model import cuda
from benchmarks.steps import train_batch_norms
from nasfast.engine import GraphEngine
from nasfast.ops import cuda_times, plan, use_backend
from nasfast.ops.cuda import conv as conv_cuda
from nasfast.ops.cuda import deferred
from nasfast.ops.cuda_times import Chain, Schedule
from nasfast.ops.plan import read_plan
from nasfast.spaces import get_space, mean_path
from nasfast.supernet import StandaloneNetwork, Supernet

SPACE, BATCH = "mobilenet_v2", 32
# operators that neither read nor write elements
_NO_LAUNCH = ("empty", "new_empty", "resize_", "_reshape_alias", "_unsafe_view", "lift_fresh", "set_", "record_stream")


@dataclass
class Step:
    """All launches of one step.

    Attributes:
        launches: of CUDA kernels, in order.
        aten: number of PyTorch's launches.
        aten_bytes: size of the tensors that these read and write.
        chains: how often each chain ran.
    """

    launches: list[cuda.CudaLaunch] = field(default_factory=list)
    aten: int = 0
    aten_bytes: int = 0
    chains: Counter[Chain] = field(default_factory=Counter)


def _counters(count: int, device: torch.device) -> Tensor:
    # on a GPU these counters are zero already (nasfast/ops/arrivals.py), so filling them is no launch
    return torch.from_numpy(np.zeros(count, np.int32))


@contextmanager
def as_on(arch: int, schedule: Schedule | None = None) -> Iterator[None]:
    """Within this context, chains run on the CUDA kernels, planned as for a GPU of `arch`.

    Args:
        schedule: of every expansion that can be computed again; None for what the package chooses there.
    """
    gpu = cuda_times.similar_gpu(divmod(arch, 10))
    changes = [
        use_backend("cuda"),
        patch.dict(os.environ, NASFAST_EMULATE_CUDA="1"),
        patch.object(plan, "modelled_gpu", lambda x: gpu),
        *(patch.object(module, "zeros", _counters) for module in (conv_cuda, deferred)),
    ]
    if schedule is not None:
        changes.append(patch.object(cuda_times, "schedule", lambda gpu, chain: schedule))
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        # plans are kept, and do not know of the last change
        plan._decide_once.cache_clear()
        stack.callback(plan._decide_once.cache_clear)
        yield


class _CountLaunches(TorchDispatchMode):
    """Counts the calls of PyTorch operators that would launch kernels on a GPU; records those of CUDA kernels."""

    def __init__(self, step: Step, arch: int) -> None:
        super().__init__()
        self.step, self.arch = step, arch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if func._opname in cuda.OPERATORS:
            chain = read_plan(given["plan"]).modelled if given.get("plan") else None
            if chain is not None:
                self.step.chains[chain] += func._opname.endswith("_fwd")
            result, launches = cuda.record_call(func, given, self.arch, chain)
            self.step.launches += launches
            return result
        if func.namespace.startswith("nasfast"):
            with self:  # count the operators that the launcher calls, not the launcher itself
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        out = func(*args, **kwargs)
        touched = {t.data_ptr(): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor) and t.numel()}
        if touched and not func.is_view and not func._opname.startswith(_NO_LAUNCH):
            self.step.aten += 1
            self.step.aten_bytes += sum(t.numel() * t.element_size() for t in touched.values())
        return out


def _network() -> Supernet:
    net = Supernet(get_space(SPACE), init="gaussian", layer_indicators=False)
    net.freeze("bn")
    return net.to(memory_format=torch.channels_last).train()


def _shape() -> tuple[int, int, int, int]:
    space = get_space(SPACE)
    return BATCH, space.in_channels, space.resolution, space.resolution


def record_step(arch: int, schedule: Schedule | None = None) -> Step:
    """Record forward, loss and backward: the graph engine, the mean path of SPACE, bf16, BatchNorms train.

    It is the second step, which captures nothing.

    Args:
        schedule: as in `as_on`.
    """
    net, path = _network(), mean_path(get_space(SPACE))
    images = torch.zeros(_shape()).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(BATCH, dtype=torch.long)
    with as_on(arch, schedule):
        engine = GraphEngine(net, _shape(), bf16=True, capture=EagerCapture())
        for _ in range(2):
            step = Step()
            with _CountLaunches(step, arch):
                engine.forward_backward(images, labels, [path])
    return step


def saved_bytes(arch: int) -> dict[str, int]:
    """Bytes that autograd keeps from forward to backward of the step, and those of plain modules in eager PyTorch.

    Both run under autocast to bf16 on fake tensors, which have sizes and no memory. Parameters do not count.
    """
    space, net = get_space(SPACE), _network()
    path, plain = mean_path(space), train_batch_norms(StandaloneNetwork(space, mean_path(space)))
    with as_on(arch):
        ours = _count(net, lambda images: net(images, path))
    return {"saved_bytes": ours, "saved_bytes_of_eager": _count(plain, plain)}


def _count(net: nn.Module, forward: Callable[[Tensor], Tensor]) -> int:
    net.to(memory_format=torch.channels_last).train()
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.to(torch.bfloat16)  # otherwise the casts of autocast would be saved and count
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16):
        return harness.saved_bytes(forward, [torch.empty(_shape(), memory_format=torch.channels_last)])
