"""The floor: the least time of one training step on this machine, from the bytes and MACs of its convolutions.

It assumes this schedule. Only BatchNorms train. Forward writes each convolution's output once and reads it once, and
applies BatchNorm and activation while reading. Backward writes each gradient once and makes three reads per
convolution: the gradient, the output it belongs to, and the input, whose activation decides what passes. A convolution
takes the time of its bytes or of its arithmetic, whichever is longer. No cache saves any read; launches, loss and
statistics cost nothing.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_ITEM_BYTES = {torch.float32: 4, torch.bfloat16: 2}


class Machine(NamedTuple):
    """The most that a device can do per second.

    Attributes:
        bytes: bytes copied, reads plus writes.
        matmul: FLOP of matrix products.
        vector: FLOP of plain vector arithmetic.
    """

    bytes: float
    matmul: float
    vector: float


@dataclass
class Conv:
    """One convolution; counts are for the whole batch.

    Attributes:
        macs: multiply-accumulates of one direction.
        x, y, weight: elements of the input, the output and the weight.
        depthwise: whether it is depthwise, which is vector arithmetic and no matrix product.
        skip_read, skip_write: elements of residual sums that are read, and written, together with its input.
        skip_grad: elements of the residual gradient of the block that begins with this convolution.
    """

    macs: int
    x: int
    y: int
    weight: int
    depthwise: bool
    skip_read: int = 0
    skip_write: int = 0
    skip_grad: int = 0


@dataclass
class Trace:
    """What one forward runs.

    Attributes:
        convs: the convolutions in order.
        linear_macs: multiply-accumulates of the matrix products.
        linear_weights: elements of their weights.
    """

    convs: list[Conv]
    linear_macs: int = 0
    linear_weights: int = 0

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward."""
        return sum(conv.macs for conv in self.convs) + self.linear_macs


class Floor(NamedTuple):
    """Least seconds of the forward and of the backward."""

    forward: float
    backward: float

    @property
    def step(self) -> float:
        """Least seconds of both together."""
        return self.forward + self.backward


class _Recorder(TorchDispatchMode):
    """Records convolutions, matrix products and residual sums as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace([])
        self._reader: dict[int, Conv] = {}
        self._sums: set[int] = set()
        # tensors are identified by id, so they must stay alive
        self._seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket
        self._seen.append((args, result))
        if name is torch.ops.aten.convolution:
            self._record_conv(args[0], args[1], result)
        elif name in (torch.ops.aten.addmm, torch.ops.aten.mm):
            weight = args[-1]
            self.trace.linear_macs += result.shape[0] * weight.numel()
            self.trace.linear_weights += weight.numel()
        elif name is torch.ops.aten.add and result.ndim == 4:
            self._record_sum(args[:2], result)
        return result

    def _record_conv(self, x: Tensor, weight: Tensor, y: Tensor) -> None:
        depthwise = weight.shape[1] == 1 and x.shape[1] > 1
        conv = Conv(y.numel() * weight[0].numel(), x.numel(), y.numel(), weight.numel(), depthwise)
        if id(x) in self._sums:
            conv.skip_read = x.numel()
        self._reader.setdefault(id(x), conv)
        self.trace.convs.append(conv)

    def _record_sum(self, terms: Iterable[Any], result: Tensor) -> None:
        self._sums.add(id(result))
        for term in terms:
            if id(term) in self._reader:
                begin = self._reader[id(term)]
                begin.skip_grad = result.numel()
                # a sum that is also the residual of the next block is read twice, so the schedule writes it
                begin.skip_write = result.numel() if id(term) in self._sums else 0


def trace(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Trace:
    """Trace the module that `make` builds, in training mode on an input of this shape; allocates no memory for data."""
    with torch.device("meta"), torch.no_grad():
        module, x = make(), torch.empty(shape)
        module.train()
        with _Recorder() as recorder:
            module(x)
    return recorder.trace


def step_floor(traced: Trace, machine: Machine, dtype: torch.dtype) -> Floor:
    """The floor of the training step of a whole network, from images to loss."""
    cost = _Cost(machine, _ITEM_BYTES[dtype])
    convs, last = traced.convs, traced.convs[-1].y
    linear = 2 * traced.linear_macs
    forward = sum(map(cost.conv_forward, convs)) + cost(last) + cost(0, traced.linear_weights, matmul=linear)
    backward = cost(0, traced.linear_weights, matmul=linear) + cost(last)
    # the images need no gradient, so the first convolution has no backward and the second only sums that of its input
    backward += sum(
        cost.conv_backward(conv, write=i > 1, outer=i == len(convs) - 1) for i, conv in enumerate(convs) if i > 0
    )
    return Floor(forward, backward)


def alone_floor(traced: Trace, machine: Machine, dtype: torch.dtype, *, input_grad: bool = True) -> Floor:
    """The floor of a few layers without the rest of the network.

    Their input is a finished tensor, and their result is normalised and written. `input_grad` says whether the gradient
    of the input is computed.
    """
    cost = _Cost(machine, _ITEM_BYTES[dtype])
    convs, last = traced.convs, traced.convs[-1].y
    forward = sum(map(cost.conv_forward, convs)) + cost(2 * last)
    # the reductions read the gradient and the output it belongs to
    backward = cost(2 * last)
    for i, conv in enumerate(convs):
        if i > 0 or input_grad:
            backward += cost.conv_backward(conv, write=True, mask=i > 0)
    return Floor(forward, backward)


@dataclass(frozen=True)
class _Cost:
    """Computes the least seconds of passes over memory."""

    machine: Machine
    item_bytes: int

    def __call__(self, elements: int, weight: int = 0, *, matmul: float = 0.0, vector: float = 0.0) -> float:
        memory = (elements + weight) * self.item_bytes / self.machine.bytes
        return max(memory, matmul / self.machine.matmul + vector / self.machine.vector)

    def conv_forward(self, conv: Conv) -> float:
        """Seconds of a convolution's forward."""
        return self(conv.x + conv.y + conv.skip_read + conv.skip_write, conv.weight, **_flops(conv))

    def conv_backward(self, conv: Conv, *, write: bool, mask: bool = True, outer: bool = False) -> float:
        """Seconds of a convolution's backward, from the gradient of y to that of x.

        Args:
            conv: the convolution.
            write: whether the gradient of x is written.
            mask: whether x is read, because its activation decides what passes.
            outer: whether the gradient of y comes from a pool and is tiny.
        """
        elements = conv.y * (1 if outer else 2) + conv.x * (mask + write) + conv.skip_grad
        return self(elements, conv.weight, **_flops(conv))


def _flops(conv: Conv) -> dict[str, float]:
    return {"vector" if conv.depthwise else "matmul": 2.0 * conv.macs}


def measure_machine(dtype: torch.dtype, *, quick: bool = False, device: str | torch.device = "cpu") -> Machine:
    """Measure the ceilings of a device by the best of some copies and matrix products; a CPU uses its current threads.

    Depthwise convolutions are no matrix products, so `vector` is measured in fp32 for either type.
    """
    device = torch.device(device)
    n, copies, repeats = (512, 1 << 22, 3) if quick else (2048, 1 << 26, 10)
    if device.type == "cuda":
        n, copies = 4 * n, 4 * copies  # small work does not fill a GPU
    source, target = torch.ones(copies, device=device), torch.empty(copies, device=device)
    rates = {}
    for kind in {torch.float32, dtype}:
        a, b = torch.randn(n, n, device=device).to(kind), torch.randn(n, n, device=device).to(kind)
        rates[kind] = 2 * n**3 / _best(partial(torch.matmul, a, b), repeats, device)
    return Machine(
        bytes=2 * source.nbytes / _best(lambda: target.copy_(source), repeats, device),
        matmul=rates[dtype],
        vector=rates[torch.float32],
    )


def _best(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """The shortest seconds of some calls; the first call is not timed."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])
