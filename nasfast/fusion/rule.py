"""Which chains run faster on the operator than on PyTorch, by what each of them costs; nothing is timed while a model
runs.

PyTorch passes over the result of a convolution several times, for BatchNorm and for the activation, forward and
backward. The operator saves most of these passes, and its call has a price. What is saved is linear in what a chain
computes, with six constants for each instruction set and type. Only its sign decides, so another processor of the same
instruction set needs the same ratios of the constants, and not the same constants.

`python -m benchmarks.fit_rule` measures chains of networks and fits the constants. Those of float32 on AVX2 are such a
fit, rounded: chains of mobilenet_v2, efficientnet_b0 and resnet18 on one core of a busy AMD EPYC (Zen 3), where a
product of the operator took as long as one of PyTorch; a narrower instruction set takes them, too. The others give the
sizes from which chains paid on an AMD EPYC (Zen 5) with AVX-512 and on an Intel Xeon with AMX, where the price of
guards was measured, too. Fits to 712 chains of five networks on a busy EPYC (Zen 4) chose no better: in the half of
them that they had not seen, 0.944 of PyTorch's time in float32, 0.722 in bfloat16 and, with AVX2 forced, 0.935 in
float32, where these constants give 0.940, 0.719 and 0.934, and the better of both in each chain 0.919, 0.705 and 0.912.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nasfast.ops import _native
from nasfast.ops.backends import resolve_backend
from nasfast.ops.chain.plan import Kind, stage_kind
from nasfast.ops.reference import Stage
from nasfast.ops.tensors import storage_dtype


class Costs(NamedTuple):
    """What the operator saves of each kind of work, in ns on one thread; negative where it takes longer.

    Attributes:
        passes: of one pass over one result of a convolution.
        products: of one product (multiplication and addition), forward or backward.
        strided: of one product of a depthwise convolution with a stride, backward, in addition.
        smooth: of one SiLU or Tanh, forward.
        other: of one result of another convolution: the operator gathers patches for it, or PyTorch runs it.
        call: of one call of the operator.
    """

    passes: float
    products: float
    strided: float
    smooth: float
    other: float
    call: float


_FLOAT = Costs(0.039, 0.005, 0.0, -0.31, -0.25, -40_000)
_BFLOAT16 = Costs(0.05, 0.0, 1.7, -0.21, -0.33, -40_000)
_AVX2 = {torch.float32: Costs(0.103, 0.0, 0.0, -0.26, -0.34, -130_000), torch.bfloat16: _BFLOAT16}
_AVX512 = {torch.float32: _FLOAT, torch.bfloat16: _BFLOAT16}
# with AMX, both PyTorch and a call of the operator take their time in bfloat16 between the products
_AMX = {torch.float32: _FLOAT, torch.bfloat16: Costs(*(6 * cost for cost in _BFLOAT16))}
_COSTS = {"avx512": _AVX512, "avx512bf16": _AVX512, "amx": _AMX}

# ns of a gain of 1, and what guards cost per BatchNorm of the module that was captured, as such a gain: its forward is
# left to PyTorch where its chains gain less
_CALL, GAIN_PER_NORM = 40_000, 0.7
ALWAYS = 1e6
# shapes of which a chain keeps what was checked
KEPT_SHAPES = 256


def least_results(x: Tensor, stages: Sequence[Stage], *, trains: bool, gradients: bool) -> int | None:
    """The results per thread from which the operator is expected to run these stages faster; None if it never is.

    Results are elements of the outputs of the convolutions, over all stages.

    Args:
        x: a tensor of the type and device of the input; its shape does not count.
        stages: stages that the operator can run on x.
        trains: whether a convolution trains.
        gradients: whether anything has a gradient.
    """
    backend, dtype = resolve_backend("conv_bn_act_chain", x).name, storage_dtype(x)
    if backend != "cpu":
        # the reference is PyTorch itself, and on a GPU float32 is left to PyTorch
        return None if backend == "reference" or dtype == torch.float32 else 0
    if dtype not in _AVX2:
        return None
    *work, calls = chain_work(stages, trains=trains, gradients=gradients)
    *saved, call = _costs(dtype)
    gain = sum(amount * cost for amount, cost in zip(work, saved, strict=True)) / _results_per_pixel(stages)
    return max(1, round(-calls * call / gain)) if gain > 0 else None


def chain_work(stages: Sequence[Stage], *, trains: bool, gradients: bool) -> tuple[float, ...]:
    """How much of each kind of work in `Costs` a chain has per pixel of its input, and its calls.

    Images count as much larger than kernels.
    """
    kinds = [stage_kind(s.params.conv_weight.shape, s.stride, s.padding, s.groups) for s in stages]
    passes = products = strided = smooth = other = 0.0
    pixels, ways = 1.0, 1 + gradients
    for i, (stage, kind) in enumerate(zip(stages, kinds, strict=True)):
        pixels /= stage.stride**2
        weight = stage.params.conv_weight
        results, multiplied = pixels * weight.shape[0], pixels * weight.numel()
        # PyTorch: two passes of an activation forward and three backward, two of BatchNorm, and one more for statistics
        act = (2 + 3 * gradients) * (stage.act != "identity")
        smooth += results * (stage.act in ("silu", "tanh"))
        if trains:  # PyTorch convolves, and what is behind each convolution is one call
            passes += results * act
            continue
        # the operator has two passes of its own over the last result, if it needs statistics or keeps something
        own = 2 * (i + 1 == len(stages)) * (ways if gradients or stage.training else 0)
        passes += results * (ways * (2 + stage.training) + act - own)
        # PyTorch's pointwise convolutions alone are as fast
        if Kind.DEPTHWISE in kinds and (kind == Kind.DEPTHWISE or (kind == Kind.POINTWISE and stage.stride == 1)):
            products += ways * multiplied
            strided += multiplied * (gradients and kind == Kind.DEPTHWISE and stage.stride > 1)
        else:
            other += results
    return passes, products, strided, smooth, other, 6 if trains else 1


def gain_function(stages: Sequence[Stage], least: int, dtype: torch.dtype) -> Callable[[torch.Size], float]:
    """A function of the shape of an input that says what the operator gains, in units of `_CALL`.

    Below 0 it does not pay; `ALWAYS` if it always does.
    """
    unit, per_pixel = -_costs(dtype).call / _CALL, _results_per_pixel(stages)

    def gain(shape: torch.Size) -> float:
        if not least:
            return ALWAYS
        batch, _, height, width = shape
        return unit * (batch * height * width * per_pixel / (torch.get_num_threads() * least) - 1)

    return gain


def _costs(dtype: torch.dtype) -> Costs:
    isa = "" if _native.extension is None else _native.extension.isa()
    return _COSTS.get(isa, _AVX2).get(dtype, _FLOAT)


def _results_per_pixel(stages: Sequence[Stage]) -> float:
    pixels, results = 1.0, 0.0
    for stage in stages:
        pixels /= stage.stride**2
        results += pixels * stage.params.conv_weight.shape[0]
    return results
