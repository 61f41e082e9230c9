"""Which chains the operator is expected to run faster than PyTorch, when gradients or batch statistics are needed.

The numbers were measured on one core of a processor with AVX-512 and AMX, for the chains of six networks of torchvision
and timm at batch 8 and 160 pixels, forward and backward; those of the operator's own convolutions where none trains, on
whole steps of eleven networks. A chain gains by the memory traffic that it saves, so it pays from a number of results
on: elements of the outputs of its convolutions, over all stages. Smaller chains pay less than a call of the operator
costs. Where the operator runs on kernels for other instructions, `execute` measures every chain instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nasfast.ops import _native
from nasfast.ops.backends import resolve_backend
from nasfast.ops.plan import Kind, stage_kind, storage_dtype
from nasfast.ops.reference import Stage

# The instruction sets of the operator's kernels for which the rule holds; it was measured with each but avx512.
_KNOWN = {"amx", "avx512bf16", "avx512"}

# The least results per thread from which a chain pays, by type and whether a convolution trains: of pointwise
# convolutions without stride and depthwise ones, and of chains with another convolution, for which the operator gathers
# patches or pixels, or which PyTorch runs.
_LEAST = {
    (torch.float32, False): (100_000, 2_000_000),
    (torch.float32, True): (1_200_000, 1_200_000),
    (torch.bfloat16, False): (100_000, 2_000_000),
    (torch.bfloat16, True): (1_000_000, 1_500_000),
}
# Input channels from which PyTorch's pointwise convolution in bfloat16 is as fast as the operator's. A chain of such
# convolutions counts as one of other convolutions, unless a depthwise one, where PyTorch is slow, is in it.
_DEEP = 192

# The same, for each stage, for chains that are recorded in placeholders because their module's own code runs. Recording
# takes 45 us for one stage and 105 us for three; a folded chain saves only the passes of BatchNorm and activation. On
# chains of one and of three stages the two were equal at 70,000 to 140,000 results per stage.
LEAST_RECORDED = 120_000


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
    results = least[0] if own else least[1]
    return max(results, LEAST_RECORDED * len(stages)) if recorded else results


@torch.compiler.assume_constant_result
def _threads() -> int:
    return torch.get_num_threads()


def _results(x: Tensor, stages: Sequence[Stage]) -> int:
    batch, _, height, width = x.shape
    total = 0
    for stage in stages:
        out, _, *kernel = stage.params.conv_weight.shape
        height = (height + 2 * stage.padding - kernel[0]) // stage.stride + 1
        width = (width + 2 * stage.padding - kernel[1]) // stage.stride + 1
        total += batch * out * height * width
    return total
