"""Record every launch of one training step without running a kernel, and without a GPU.

Triton's own just-in-time path runs with a driver that launches nothing, and derives types, alignment and divisibility
of the arguments as it does on a GPU. The CUDA kernels of chains are recorded by cuda.py, if they are the backend.
PyTorch's operators run on the CPU; a dispatch mode counts them.
"""

from __future__ import annotations

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import nasfast
from benchmarks.captures import EagerCapture
from benchmarks.gpu_model import cuda
from nasfast.engine import EagerEngine
from nasfast.engine.capture import Capture
from nasfast.engine.graphs import GraphEngine
from nasfast.ops import backends, cuda_times, destinations, plan, use_backend
from nasfast.ops.cuda import conv as conv_cuda
from nasfast.ops.cuda_times import Chain
from nasfast.ops.plan import read_plan
from nasfast.ops.triton import bn as bn_triton
from nasfast.settings import TrainConfig
from nasfast.spaces import Arch, get_space, mean_path
from nasfast.supernet import Supernet
from nasfast.train.loop import make_optimizer

_PACKAGE = str(Path(nasfast.__file__).parent)
_ENGINE = str(Path(_PACKAGE, "engine"))
BACKENDS = ("triton", "cuda", "release", "recompute", "auto")
_SCHEDULES = {"cuda": "stored", "release": "released", "recompute": "recomputed"}
PHASES = ("forward", "backward", "engine", "optimizer")
# operators that neither read nor write elements
_NO_LAUNCH = ("empty", "new_empty", "resize_", "_reshape_alias", "_unsafe_view", "lift_fresh", "set_", "record_stream")
# tensors that one launch of a _foreach operator takes, by its number of lists of tensors
_FOREACH_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}


@dataclass(frozen=True)
class Specialization:
    """What the just-in-time path compiles for one set of argument types and constants.

    Attributes:
        module, kernel: the module that defines the kernel, and the kernel's name.
        signature: Triton's type of each argument; "constexpr" for constants.
        constants: value by path (index of the argument, then index in its tuple).
        attributes: known properties of arguments by path, such as divisibility by 16.
        options: compiler options that differ from the backend's defaults.
    """

    module: str
    kernel: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """A text that is equal for equal specialisations."""
        return repr((self.module, self.kernel, self.signature, self.constants, self.attributes, self.options))


@dataclass
class Launch:
    """One launch of a kernel.

    Attributes:
        grid: number of programs in each dimension.
        arguments: numbers and strings by name, the kernel's constants included; sums[2] is an element of a tuple. For a
            CUDA kernel: its geometry, its `shared` memory and the `words` of its argument, see `cuda.CudaLaunch`.
        bytes: size of the distinct tensors among the arguments.
        phase: one of PHASES.
        chain: the chain of whose operator it is a part; None outside.
        early: whether it may start before the launch in front of it has ended, from sm_90 on.
    """

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    specialization: Specialization | cuda.CudaKernel
    bytes: int
    phase: str
    chain: Chain | None = None
    early: bool = False

    @property
    def programs(self) -> int:
        return math.prod(self.grid)


@dataclass
class Step:
    """All launches of one step.

    Attributes:
        launches: launches of Triton and CUDA kernels, in order.
        aten: number of PyTorch's launches by (phase, operator).
        aten_bytes: size of the tensors that these read and write.
        chains: how often each chain ran.
        chain: that of the launch that is being recorded.
    """

    launches: list[Launch] = field(default_factory=list)
    aten: Counter[tuple[str, str]] = field(default_factory=Counter)
    aten_bytes: int = 0
    chains: Counter[Chain] = field(default_factory=Counter)
    chain: Chain | None = None

    @property
    def aten_launches(self) -> int:
        return sum(self.aten.values())


@dataclass(frozen=True)
class Workload:
    """The step to record.

    Attributes:
        path: the candidate of each layer; None means the mean path of the space.
        resolution: side of the images; None means that of the space.
        dtype: bf16 or fp32.
        trains: the parameters that train, as in `Supernet.freeze`.
        engine: graphs or eager.
        backend: triton; cuda, which is the CUDA kernels where they can serve and Triton elsewhere; recompute, the same
            with every expansion computed again that can be; release, with these computed again in backward only; or
            auto, what such a GPU runs.
    """

    space: str = "mobilenet_v2"
    path: Arch | None = None
    batch: int = 32
    resolution: int | None = None
    dtype: str = "bf16"
    trains: str = "bn"
    engine: str = "graphs"
    backend: str = "triton"


_devices = itertools.count()


class NoDriver:
    """A Triton driver without a GPU. Kernels compile for its architecture; their launches do nothing."""

    def __init__(self, arch: int) -> None:
        # Triton caches compiled kernels by device, so every driver has a device number of its own
        self.device = next(_devices)
        self.target = GPUTarget("cuda", arch, 32)
        self.utils = self
        self.launcher_cls = _no_launcher

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, limit of threads

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}


def _counters(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32)


def _no_launcher(source: Any, metadata: Any) -> Any:
    return lambda *arguments: None


@contextmanager
def _chosen(backend: str, arch: int) -> Iterator[None]:
    """Within this context, operators run on this backend of a Workload, whatever the device of their tensors."""
    if backend == "triton":
        with use_backend("triton"):
            yield
        return
    named, gpu = backends._named, cuda_times.similar_gpu(divmod(arch, 10))

    def choose(op: str, x: Tensor, name: str, source: str, refusal: Any, strict: bool) -> backends.Backend | None:
        refused = refusal("cuda")
        slower = backend == "auto" and refused is not None and refused.lacks == "speed"
        found = None if slower else named(op, x, "cuda", source, refusal, strict)
        return found or named(op, x, "triton", source, refusal, strict)

    changes = [
        use_backend("cuda"),
        patch.object(backends, "_named", choose),
        patch.dict(os.environ, NASFAST_EMULATE_CUDA="1"),
        patch.object(plan, "modelled_gpu", lambda x: gpu),
    ]
    if backend != "auto":
        changes.append(patch.object(cuda_times, "schedule", lambda gpu, chain: _SCHEDULES[backend]))
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        # plans and refusals are kept, and do not know of the last change
        for cache in (plan._decide_once, plan._refuse_once):
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        yield


@contextmanager
def no_gpu(arch: int, backend: str = "triton") -> Iterator[None]:
    """Within this context, Triton's just-in-time path ends at a driver that launches nothing."""
    driver.set_active(NoDriver(arch))
    # on a GPU these counters are zero already (nasfast/ops/arrivals.py), so filling them is no launch
    with ExitStack() as stack:
        for module in (bn_triton, conv_cuda, destinations):
            stack.enter_context(patch.object(module, "zeros", _counters))
        stack.enter_context(_chosen(backend, arch))
        yield


class _RecordedKernel:
    """Takes the place of a compiled kernel and records its launches."""

    function = packed_metadata = None

    def __init__(self, step: Step, kernel: JITFunction, specialization: Specialization) -> None:
        self.step, self.kernel, self.specialization = step, kernel, specialization

    def launch_metadata(self, grid: Any, stream: int, *values: Any) -> None:
        return None

    def run(self, *given: Any) -> None:
        names = self.kernel.arg_names
        grid, values = given[:3], given[len(given) - len(names) :]
        arguments = {}
        for name, value in zip(names, values, strict=True):
            parts = {f"{name}[{i}]": part for i, part in enumerate(value)} if isinstance(value, (tuple, list)) else {}
            arguments |= parts or {name: value}
        name = self.kernel.fn.__name__
        touched = {(t.data_ptr(), t.numel()): t for t in arguments.values() if isinstance(t, Tensor)}
        self.step.launches.append(
            Launch(
                name,
                grid,
                {k: v for k, v in arguments.items() if isinstance(v, (int, float, str))},
                self.specialization,
                sum(t.numel() * t.element_size() for t in touched.values()),
                _phase(sys._getframe(1)),
                self.step.chain,
            )
        )


@contextmanager
def recorded(step: Step, arch: int = 90, *, backend: str = "triton") -> Iterator[None]:
    """Within this context, record launches in `step` and compile nothing.

    Args:
        arch: compute capability, such as 90.
        backend: see Workload.
    """

    def note(
        kernel: JITFunction,
        key: Any,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attributes: Any,
        warmup: bool,
    ) -> _RecordedKernel:
        cache, _, _, backend, _ = kernel.device_caches[device]
        defaults = vars(backend.parse_options({}))
        specialization = Specialization(
            kernel.fn.__module__,
            kernel.fn.__name__,
            dict(signature),
            dict(constants),
            dict(attributes),
            {name: value for name, value in vars(options).items() if value != defaults[name]},
        )
        cache[key] = recording = _RecordedKernel(step, kernel, specialization)
        return recording

    with no_gpu(arch, backend), patch.object(JITFunction, "_do_compile", note), _CountLaunches(step, arch):
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
            return self._record_chain(func, given)
        if func.namespace.startswith("nasfast"):
            if "plan" in given:
                self.step.chain = read_plan(given["plan"]).modelled
                self.step.chains[self.step.chain] += func._opname.endswith("_fwd")
            with self:  # count the operators that the launcher calls, not the launcher itself
                out = func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
            self.step.chain = None
            return out
        out = func(*args, **kwargs)
        if not func.is_view and not func._opname.startswith(_NO_LAUNCH) and (count := _launches_of(func, args, out)):
            self.step.aten[_phase(sys._getframe(1)), func._opname] += count
            touched = {t.data_ptr(): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
            self.step.aten_bytes += sum(t.numel() * t.element_size() for t in touched.values())
        return out

    def _record_chain(self, func: Any, given: dict[str, Any]) -> Any:
        result, launches = cuda.record_call(func, given, self.arch)
        phase = _phase(sys._getframe(2))
        for launch in launches:
            arguments = launch.geometry | {"shared": launch.shared, "words": launch.words, "weights": launch.weights}
            chain, early = self.step.chain, launch.early
            self.step.launches.append(
                Launch(launch.stage, launch.grid, arguments, launch.kernel, launch.bytes, phase, chain, early)
            )
        return result


def _launches_of(func: Any, args: tuple, out: Any) -> int:
    """The number of launches of one call; 0 if all tensors are empty."""
    if func._opname.startswith("_foreach"):
        lists = [a for a in args if isinstance(a, (tuple, list)) and a and isinstance(a[0], Tensor)]
        depth = len(lists) + (not func._opname.endswith("_"))
        return math.ceil(len(lists[0]) / _FOREACH_TENSORS[min(depth, 4)])
    tensors = [t for t in (*args, *(out if isinstance(out, (tuple, list)) else (out,))) if isinstance(t, Tensor)]
    return int(any(t.numel() for t in tensors))


def _phase(frame: FrameType | None) -> str:
    """The part of the step that makes a call: backward within autograd's engine, else what the nearest frame says."""
    inside_model = False
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("_engine_run_backward", "begin_backward"):
            return "backward"
        if "/torch/optim/" in code.co_filename or code.co_name.startswith("clip_grad"):
            return "optimizer"
        if code.co_filename.startswith(_ENGINE):
            return "forward" if inside_model else "engine"
        inside_model |= code.co_filename.startswith(_PACKAGE) or "/torch/nn/" in code.co_filename
        frame = frame.f_back
    return "engine"


def make_step(workload: Workload, arch: int = 90, capture: Capture | None = None) -> tuple[Arch, Any, Any]:
    """Make a step on the CPU, as for a GPU of `arch`.

    Args:
        capture: of the graph engine; None runs its kernels again.

    Returns:
        Its path, a function for forward and backward, and one for the optimiser, for calls within `no_gpu`.
    """
    space = get_space(workload.space)
    resolution = workload.resolution or space.resolution
    path = workload.path or mean_path(space)
    net = Supernet(space, init="gaussian", layer_indicators=False)
    net.freeze(workload.trains)
    net.to(memory_format=torch.channels_last).train()
    shape = (workload.batch, space.in_channels, resolution, resolution)
    images = torch.zeros(shape).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(workload.batch, dtype=torch.long)
    bf16 = workload.dtype == "bf16"
    with _chosen(workload.backend, arch):
        engine = (
            EagerEngine(net, bf16=bf16)
            if workload.engine == "eager"
            else GraphEngine(net, shape, bf16=bf16, capture=capture or EagerCapture())
        )
    optimizer = make_optimizer(net, TrainConfig(lr=0.1))
    for group in optimizer.param_groups:
        group["foreach"] = True  # PyTorch chooses this on a GPU, for the norm too

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0, foreach=True)
        optimizer.step()

    return path, lambda: engine.forward_backward(images, labels, [path]), update


def record_step(workload: Workload, arch: int = 90) -> Step:
    """Record one whole step with the optimiser's update. It is the second step, so momentum buffers exist."""
    _, forward_backward, update = make_step(workload, arch)
    for _ in range(2):
        step = Step()
        with recorded(step, arch, backend=workload.backend):
            forward_backward()
            update()
    return step
