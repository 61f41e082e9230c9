"""What the benchmarks of operators share: a case, the call that a backend or a peer makes of it, and its checks.

Providers are the backends of nasfast and the peers: plain PyTorch on contiguous tensors, the same on channels_last, and
compiled. This module imports no pytest, because the plan for a GPU uses the table without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.floor import Machine
from nasfast import ops
from nasfast.ops.backends import explain

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONTIGUOUS, CHANNELS_LAST, COMPILED = "eager contiguous", "eager channels_last", "compile channels_last"
PEERS = (CONTIGUOUS, CHANNELS_LAST, COMPILED)
# forward is that of training: it keeps what backward needs
FORWARD, BOTH = "forward", "forward+backward"

# largest mean difference from the first peer, relative to the mean value; on a GPU PyTorch convolves fp32 in TF32
_TOLERANCES = {"fp32": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True)
class Size:
    """How large the cases are.

    Attributes:
        divisor: divides the batch sizes.
        side: largest height and width of an image.
        matrices: largest number of matrices in one call of orthogonalize.
        one_per_family: whether the table has only the first case of each family.
    """

    divisor: int = 1
    side: int = 224
    matrices: int | None = None
    one_per_family: bool = False


SIZES = {
    "full": Size(),
    "quick": Size(divisor=4),
    # for tests
    "tiny": Size(divisor=16, side=8, matrices=3, one_per_family=True),
}


@dataclass(frozen=True)
class Setting:
    """How a case is run.

    Attributes:
        provider: a backend of nasfast, or one of the case's peers.
        dtype: `fp32` or `bf16`.
        device: `cpu` or `cuda`.
    """

    provider: str
    dtype: str
    device: str

    @property
    def ours(self) -> bool:
        """Whether an operator of nasfast runs, and not a peer."""
        return self.provider in ops.BACKENDS

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.contiguous_format if self.provider == CONTIGUOUS else torch.channels_last

    def images(self, shape: Sequence[int], *, grad: bool = True) -> Tensor:
        """A normal tensor (N, C, H, W) of the dtype, in the memory format, on the device; `grad`: it has a gradient."""
        x = torch.randn(*shape).to(self.device, DTYPES[self.dtype])
        return x.contiguous(memory_format=self.memory_format).requires_grad_(grad)


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        function: takes the inputs; returns a tensor, or a list of tensors.
        inputs: its arguments.
        parameters: tensors that exist anyway, so that they are no memory saved for backward. They may be inputs.
    """

    function: Callable[..., Tensor | list[Tensor]]
    inputs: list[Tensor]
    parameters: Sequence[Tensor] = ()

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The inputs and parameters of which backward computes a gradient, each once."""
        distinct = {id(tensor): tensor for tensor in (*self.inputs, *self.parameters)}
        return [tensor for tensor in distinct.values() if tensor.requires_grad]

    def timed(self, passes: str) -> Callable[[], None]:
        """A function that does the passes once and returns when their work is done."""
        function, inputs, leaves = self.function, self.inputs, self.leaves
        # a kernel on a GPU is still running when its launch returns
        wait = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None

        def forward() -> None:
            function(*inputs)
            wait()

        if passes == FORWARD:
            return forward
        grad = torch.randn_like(function(*inputs))

        def both() -> None:
            torch.autograd.grad(function(*inputs), leaves, grad)
            wait()

        return both


@dataclass(frozen=True)
class Case:
    """A row of the table: an operator with inputs of one shape.

    Attributes:
        op: the operator.
        family: the arguments that decide which kernel runs. Cases of one family differ only in shape.
        shape: the shape, as text.
        make: makes the call of a provider; draws its tensors from PyTorch's generator.
        peers: what it is compared with. Every provider must compute what the first one computes.
        compared: takes a result and returns what the providers must agree on; None for the whole result.
        dtypes: keys of DTYPES.
        passes: FORWARD, BOTH or both of them.
        floor: takes a machine, a dtype and the passes; returns the least ms of the passes on this machine.
    """

    op: str
    family: str
    shape: str
    make: Callable[[Setting], Call]
    peers: tuple[str, ...] = PEERS
    compared: Callable[[Tensor], Tensor] | None = None
    dtypes: tuple[str, ...] = tuple(DTYPES)
    passes: tuple[str, ...] = (FORWARD, BOTH)
    floor: Callable[[Machine, str, str], float] | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.family} {self.shape}"

    def settings(self, device: str) -> list[Setting]:
        """Every dtype, with every backend that can serve it on this device and every peer."""
        settings = []
        for dtype in self.dtypes:
            # on the CPU, Triton's interpreter and the emulation of CUDA kernels serve too, but only for tests
            backends = [
                row.backend
                for row in explain(device, DTYPES[dtype])
                if row.op == self.op
                and row.available
                and row.backend in {"cpu": ["cpu"]}.get(device, ["triton", "cuda"])
            ]
            settings += [Setting(provider, dtype, device) for provider in (*backends, *self.peers)]
        return settings


def prepare(case: Case, setting: Setting) -> Call:
    """Make the call of a provider, with the same inputs for every provider, and check its results.

    Raises:
        RuntimeError: the results differ from those of the first peer; or the backend cannot serve these arguments.
    """
    call = _make(case, setting)
    if setting.ours:
        call = replace(call, function=_on_backend(call.function, setting.provider))
    elif setting.provider == COMPILED:
        # without a reset, compiled graphs of other cases would change this one
        torch.compiler.reset()
        call = replace(call, function=torch.compile(call.function, dynamic=False))
    if setting.provider != case.peers[0]:
        _check(case, setting, call, _make(case, replace(setting, provider=case.peers[0])))
    return call


def _make(case: Case, setting: Setting) -> Call:
    torch.manual_seed(0)
    return case.make(setting)


def _on_backend(function: Callable[..., Tensor | list[Tensor]], backend: str) -> Callable[..., Tensor | list[Tensor]]:
    def run(*inputs: Tensor) -> Tensor | list[Tensor]:
        with ops.use_backend(backend):
            return function(*inputs)

    return run


def _check(case: Case, setting: Setting, call: Call, oracle: Call) -> None:
    # not under no_grad, for which torch.compile would make another graph
    got, want = (c.function(*c.inputs) for c in (call, oracle))
    results = [[y] if isinstance(y, Tensor) else y for y in (got, want)]
    compared = case.compared or (lambda y: y)
    pairs = [[compared(y.detach().double()) for y in pair] for pair in zip(*results, strict=True)]
    # the mean, because the largest error of an ill-conditioned matrix among thousands says nothing
    error = float(sum((g - w).abs().sum() for g, w in pairs) / sum(w.abs().sum() for _, w in pairs))
    if not error < _TOLERANCES[setting.dtype]:
        raise RuntimeError(
            f"{case.name}, {setting.dtype}: {setting.provider} differs from {case.peers[0]} by {error:.3g} "
            "of the mean value: not the same work"
        )
