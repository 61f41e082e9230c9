"""Record every launch of one training step without running a kernel, and without a GPU.

cuda.py records the CUDA kernels of chains. PyTorch's operators run on the CPU, and a dispatch mode counts them; those
of Triton are counted and not run. Needs TRITON_INTERPRET=1, with which nasfast passes CPU tensors to them.
"""

from __future__ import annotations

import math
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

from benchmarks.captures import EagerCapture
from benchmarks.gpu.launches import noted_launches
from benchmarks.gpu_model import cuda
from benchmarks.steps import train_batch_norms
from nasfast.engine.graphs import GraphEngine, count_saved
from nasfast.ops import backends, cuda_times, destinations, plan, use_backend
from nasfast.ops.cuda import conv as conv_cuda
from nasfast.ops.cuda_times import Chain, Schedule
from nasfast.ops.plan import read_plan
from nasfast.ops.triton import training as training_triton
from nasfast.settings import TrainConfig
from nasfast.spaces import get_space, mean_path
from nasfast.supernet import StandaloneNetwork, Supernet
from nasfast.train.loop import make_optimizer

SPACE, BATCH = "mobilenet_v2", 32
# operators that neither read nor write elements
_NO_LAUNCH = ("empty", "new_empty", "resize_", "_reshape_alias", "_unsafe_view", "lift_fresh", "set_", "record_stream")
# tensors that one launch of a _foreach operator takes, by its number of lists of tensors
_FOREACH_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}


@dataclass
class Step:
    """All launches of one step.

    Attributes:
        launches: of CUDA kernels, in order.
        triton: number of launches of Triton kernels.
        aten: number of PyTorch's launches.
        aten_bytes: size of the tensors that these read and write.
        chains: how often each chain ran.
    """

    launches: list[cuda.CudaLaunch] = field(default_factory=list)
    triton: int = 0
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
    named, gpu = backends._named, cuda_times.similar_gpu(divmod(arch, 10))

    def choose(op: str, x: Tensor, name: str, source: str, refusal: Any, strict: bool) -> backends.Backend | None:
        return named(op, x, "cuda", source, refusal, strict) or named(op, x, "triton", source, refusal, strict)

    changes = [
        use_backend("cuda"),
        patch.object(backends, "_named", choose),
        patch.dict(os.environ, NASFAST_EMULATE_CUDA="1"),
        patch.object(plan, "modelled_gpu", lambda x: gpu),
        *(patch.object(module, "zeros", _counters) for module in (conv_cuda, destinations, training_triton)),
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
        self.chain: Chain | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if func._opname in cuda.OPERATORS:
            result, launches = cuda.record_call(func, given, self.arch, self.chain)
            self.step.launches += launches
            return result
        if func.namespace.startswith("nasfast"):
            if "plan" in given:
                self.chain = read_plan(given["plan"]).modelled
                self.step.chains[self.chain] += func._opname.endswith("_fwd")
            with self:  # count the operators that the launcher calls, not the launcher itself
                out = func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
            self.chain = None
            return out
        out = func(*args, **kwargs)
        if not func.is_view and not func._opname.startswith(_NO_LAUNCH) and (count := _launches_of(func, args, out)):
            self.step.aten += count
            touched = {t.data_ptr(): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
            self.step.aten_bytes += sum(t.numel() * t.element_size() for t in touched.values())
        return out


def _launches_of(func: Any, args: tuple, out: Any) -> int:
    """The number of launches of one call; 0 if all tensors are empty."""
    if func._opname.startswith("_foreach"):
        lists = [a for a in args if isinstance(a, (tuple, list)) and a and isinstance(a[0], Tensor)]
        depth = len(lists) + (not func._opname.endswith("_"))
        return math.ceil(len(lists[0]) / _FOREACH_TENSORS[min(depth, 4)])
    tensors = [t for t in (*args, *(out if isinstance(out, (tuple, list)) else (out,))) if isinstance(t, Tensor)]
    return int(any(t.numel() for t in tensors))


def _network() -> Supernet:
    net = Supernet(get_space(SPACE), init="gaussian", layer_indicators=False)
    net.freeze("bn")
    return net.to(memory_format=torch.channels_last).train()


def _shape() -> tuple[int, int, int, int]:
    space = get_space(SPACE)
    return BATCH, space.in_channels, space.resolution, space.resolution


def record_step(arch: int, schedule: Schedule | None = None) -> Step:
    """Record a step with the optimiser's update: the graph engine, the mean path of SPACE, bf16, BatchNorms train.

    It is the second step, so momentum buffers exist.

    Args:
        schedule: as in `as_on`.
    """
    net, path = _network(), mean_path(get_space(SPACE))
    images = torch.zeros(_shape()).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(BATCH, dtype=torch.long)
    optimizer = make_optimizer(net, TrainConfig(lr=0.1))
    for group in optimizer.param_groups:
        group["foreach"] = True  # PyTorch chooses this on a GPU
    with as_on(arch, schedule):
        engine = GraphEngine(net, _shape(), bf16=True, capture=EagerCapture())
        for _ in range(2):
            step = Step()
            with noted_launches(run=False) as of_triton, _CountLaunches(step, arch):
                engine.forward_backward(images, labels, [path])
                optimizer.clipped_step(5.0)
            step.triton = len(of_triton)
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
    with FakeTensorMode(allow_non_fake_inputs=True), count_saved() as counted:
        images = torch.empty(_shape(), memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            forward(images)
        return counted()
