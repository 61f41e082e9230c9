"""Which chains run faster fused: by a rule, and measured for an example and where the rule knows nothing.

The rule is for chains that need gradients or batch statistics, which run on the operator.

The numbers were measured on one core of a processor with AVX-512 and AMX, for the chains of six networks of torchvision
and timm at batch 8 and 160 pixels, forward and backward; those of the operator's own convolutions where none trains, on
whole steps of eleven networks. A chain gains by the memory traffic that it saves, so it pays from a number of results
on: elements of the outputs of its convolutions, over all stages. Smaller chains pay less than a call of the operator
costs. Where the operator runs on kernels for other instructions, every chain is measured instead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from nasfast.fusion.stages import Folded, Way, plain_stages, result_dtype, run_stages, sources_of
from nasfast.ops import _native
from nasfast.ops.autograd import has_saved_tensors_hooks
from nasfast.ops.backends import resolve_backend
from nasfast.ops.plan import Kind, stage_kind, storage_dtype
from nasfast.ops.reference import ConvBNParams, Stage

# The instruction sets of the operator's kernels for which the rule holds; it was measured with each but avx512.
_KNOWN = {"amx", "avx512bf16", "avx512"}


class _Least(NamedTuple):
    """The least results per thread from which a chain pays.

    Attributes:
        own: of pointwise convolutions without stride and depthwise ones.
        other: of chains with another convolution: the operator gathers patches or pixels for it, or PyTorch runs it.
    """

    own: int
    other: int


# by type and whether a convolution trains
_LEAST = {
    (torch.float32, False): _Least(100_000, 2_000_000),
    (torch.float32, True): _Least(1_200_000, 1_200_000),
    (torch.bfloat16, False): _Least(100_000, 2_000_000),
    (torch.bfloat16, True): _Least(1_000_000, 1_500_000),
}
# Input channels from which PyTorch's pointwise convolution in bfloat16 is as fast as the operator's. A chain of such
# convolutions counts as one of other convolutions, unless a depthwise one, where PyTorch is slow, is in it.
_DEEP = 192

# The same, for each stage, for chains that are recorded in placeholders because their module's own code runs. Recording
# takes 45 us for one stage and 105 us for three; a folded chain saves only the passes of BatchNorm and activation. On
# chains of one and of three stages the two were equal at 70,000 to 140,000 results per stage.
LEAST_RECORDED = 120_000

# of a measurement, and the largest ratio of times at which a chain runs fused: noise must not make a model slower
_ROUNDS = 5
_GAIN = 0.97

# whether `fuse` runs an example, on which every chain is measured
measures: ContextVar[bool] = ContextVar("measures", default=False)


def knows(x: Tensor) -> bool:
    """Whether the rule holds for the processor that runs the operator on x; True on other devices."""
    if resolve_backend("conv_bn_act_chain", x).name != "cpu" or _native.extension is None:
        return True
    return _native.extension.isa() in _KNOWN


def pays(x: Tensor, stages: Sequence[Stage], *, trains: bool, recorded: bool) -> bool:
    """Whether the operator is expected to run these stages on x faster than PyTorch.

    Args:
        x: (N, C, H, W).
        stages: stages that the operator can run on x.
        trains: whether a convolution trains.
        recorded: whether the chain is recorded in placeholders.
    """
    least = least_results(x, stages, trains=trains, recorded=recorded)
    return least is not None and _results(x, stages) >= _threads() * least


def folding_pays(x: Tensor, stages: Sequence[Stage], *, recorded: bool) -> bool:
    """Whether these stages are expected to run faster with folded BatchNorms; arguments as in `pays`."""
    return not recorded or _results(x, stages) >= _threads() * LEAST_RECORDED * len(stages)


def least_results(x: Tensor, stages: Sequence[Stage], *, trains: bool, recorded: bool) -> int | None:
    """The results per thread from which these stages pay; None if they never do.

    Args:
        x: a tensor of the type and device of the input; its shape does not count.
        stages, trains, recorded: as in `pays`.
    """
    backend = resolve_backend("conv_bn_act_chain", x).name
    if backend != "cpu":
        # the reference is PyTorch itself; nothing was measured on GPUs, where the operator runs as asked for
        return None if backend == "reference" else 0
    kinds = [stage_kind(s.params.conv_weight.shape, s.stride, s.padding, s.groups) for s in stages]
    dtype = storage_dtype(x)
    # PyTorch's gradient of these takes up to ten times as long as its forward
    strided = any(kind == Kind.DEPTHWISE and s.stride > 1 for kind, s in zip(kinds, stages, strict=True))
    if dtype == torch.bfloat16 and not trains and strided:
        return 0
    least = _LEAST.get((dtype, trains))
    if least is None:
        return None
    own = all(
        kind == Kind.DEPTHWISE or (kind == Kind.POINTWISE and s.stride == 1)
        for kind, s in zip(kinds, stages, strict=True)
    )
    if dtype == torch.bfloat16 and Kind.DEPTHWISE not in kinds:
        own &= all(s.params.conv_weight.shape[1] < _DEEP for s in stages)
    results = least.own if own else least.other
    return max(results, LEAST_RECORDED * len(stages)) if recorded else results


def _threads() -> int:
    return torch.get_num_threads()


# what torch.compiler.assume_constant_result does, which imports TorchDynamo and Triton: that takes seconds
_threads._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _results(x: Tensor, stages: Sequence[Stage]) -> int:
    batch, _, height, width = x.shape
    total = 0
    for stage in stages:
        out, _, *kernel = stage.params.conv_weight.shape
        height = (height + 2 * stage.padding - kernel[0]) // stage.stride + 1
        width = (width + 2 * stage.padding - kernel[1]) // stage.stride + 1
        total += batch * out * height * width
    return total


def measure(model: nn.Module, arguments: Sequence[Any]) -> None:
    """Run the model once, and every chain that it reaches several times, fused and on PyTorch.

    Buffers are restored. The chains keep what was measured.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    token = measures.set(True)
    try:
        with torch.random.fork_rng():
            model(*arguments)
    finally:
        measures.reset(token)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def faster(stages: Sequence[Stage], x: Tensor, way: Way) -> Way:
    """This way of running the stages on x, or PyTorch where that takes less time; nothing is changed."""
    # activation checkpointing counts and keeps what operators save, and must not see these runs; where hooks are
    # disabled nobody sees them
    hidden = saved_tensors_hooks(_as_it_is, _as_it_is) if has_saved_tensors_hooks() else nullcontext()
    with hidden, _disable_current_modes():
        x = x.detach().requires_grad_(x.requires_grad)
        stages = [_own(stage) for stage in stages]
        fused: Callable[[], Tensor] = partial(run_stages, x, stages, None)
        if way is Way.FOLDED:
            fused = partial(Folded(stages, result_dtype(x), x.shape, []).run, x, None)
        runs: list[Callable[[], Tensor]] = [fused, partial(plain_stages, x, stages)]
        leaves = [t for t in (x, *sources_of(stages)) if t.requires_grad]
        times: list[list[float]] = [[], []]
        for i_round in range(_ROUNDS + 1):
            for run, its_times in zip(runs, times, strict=True):
                seconds = _seconds(run, leaves, x.device)
                # the first round makes plans and primitives
                its_times += [seconds] if i_round else []
    ours, theirs = map(statistics.median, times)
    return way if ours < _GAIN * theirs else Way.PLAIN


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _seconds(run: Callable[[], Tensor], leaves: list[Tensor], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    y = run()
    if torch.is_grad_enabled() and leaves:
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    wait()
    return time.perf_counter() - start


def _own(stage: Stage) -> Stage:
    """The stage with tensors of its own, so that nothing of the model changes."""
    own = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in stage.params]
    return stage._replace(params=ConvBNParams(*own))  # type: ignore[arg-type]
