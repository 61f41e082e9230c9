"""Which chains run faster on the operator than on PyTorch, by a rule; nothing is timed while a model runs.

A chain gains by the memory traffic that it saves, so it pays from a number of results on: elements of the outputs of
its convolutions, over all stages. Smaller chains pay less than a call of the operator costs, and a module in which few
chains pay is left to PyTorch.

The numbers were measured on one core of an AMD EPYC (Zen 5). With AVX-512: whole steps of torchvision's mobilenet_v2,
mobilenet_v3_large and efficientnet_b0 at batch 1 to 8 and 64 to 224 pixels, chains of six networks at batch 8 and 160
pixels, and whole steps of eleven networks. With AVX2, to which PyTorch, oneDNN and the operators were limited on the
same processor: the chains of torchvision's mobilenet_v2 in float32 at batch 8 and 32. There, PyTorch's products are
faster, so a chain pays only with gradients, where it saves more memory traffic, and with few products. A narrower
instruction set takes the numbers of AVX2. What guards cost was measured on an Intel Xeon with AMX: whole steps of
torchvision's mobilenet_v2 and mobilenet_v3_large at batch 1 to 8 and 64 to 160 pixels; and there, in float32, the
chains of six networks of which no convolution is depthwise (0.9 to 1.9 of PyTorch's time), or which have SiLU and no
gradient (1.0 to 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nasfast.ops import _native
from nasfast.ops.backends import resolve_backend
from nasfast.ops.plan import Kind, stage_kind, storage_dtype
from nasfast.ops.reference import Stage

# Frozen convolutions with AVX-512, by type and whether anything has a gradient: the least results per thread of chains
# of pointwise convolutions without stride and depthwise ones, where products (multiplications and additions) take no
# time. So many products gain as much as one result: deep layers have few pixels, and PyTorch is slower there.
_LEAST = {
    (torch.float32, True): 100_000,
    (torch.float32, False): 250_000,
    (torch.bfloat16, True): 100_000,
    (torch.bfloat16, False): 400_000,
}
_PRODUCTS_LIKE_A_RESULT = 40
# chains with another convolution: the operator gathers patches or pixels for it, or PyTorch runs it
_LEAST_OTHER = 2_000_000
# where a convolution trains, of the first and of the other chains
_LEAST_TRAINED = {torch.float32: (1_200_000, 1_200_000), torch.bfloat16: (1_000_000, 1_500_000)}
# What guards cost per BatchNorm of the module that was captured, in units of what a call of the operator costs: its
# forward is left to PyTorch where its chains gain less.
GAIN_PER_NORM = 0.7
# What a result gains in bfloat16 with AMX, where PyTorch takes its time between the products.
_GAIN_WITH_AMX = 6.0
ALWAYS = 1e6
_WITH_AVX512 = ("avx512", "avx512bf16", "amx")
# Without AVX-512 in float32, with gradients: products (multiplications and additions) per result up to which a chain
# pays, by whether a convolution trains. From this number of results on, chains of 17 to 38 take 0.5 to 0.96 of
# PyTorch's time, those of 63 take 1.1 to 1.5; where convolutions train, those up to 19 take 0.8, those from 26 on 1.0
# to 1.2.
_MOST_PRODUCTS = {False: 40, True: 20}
_LEAST_NARROW = 1_600_000
# Input channels from which PyTorch's pointwise convolution in bfloat16 is as fast as the operator's. In float32 it
# always is. A chain of such convolutions counts as one of others, unless a depthwise one, where PyTorch is slow, is in
# it.
_DEEP = 192
# shapes of which a chain keeps what was decided
KEPT_SHAPES = 256


def least_results(x: Tensor, stages: Sequence[Stage], *, trains: bool, gradients: bool) -> int | None:
    """The results per thread from which the operator is expected to run these stages faster; None if it never is.

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
    kinds = [stage_kind(s.params.conv_weight.shape, s.stride, s.padding, s.groups) for s in stages]
    if dtype == torch.float32 and _isa() not in _WITH_AVX512:
        pays = gradients and _products_per_result(stages) <= _MOST_PRODUCTS[trains]
        return _LEAST_NARROW if pays else None
    if (dtype, gradients) not in _LEAST:
        return None
    if not gradients and any(s.act == "silu" for s in stages):
        return None  # no faster than PyTorch at any size
    # PyTorch's gradient of these takes up to ten times as long as its forward
    strided = any(kind == Kind.DEPTHWISE and s.stride > 1 for kind, s in zip(kinds, stages, strict=True))
    if dtype == torch.bfloat16 and gradients and not trains and strided:
        return 0
    own = all(
        kind == Kind.DEPTHWISE or (kind == Kind.POINTWISE and s.stride == 1)
        for kind, s in zip(kinds, stages, strict=True)
    )
    if Kind.DEPTHWISE not in kinds:
        own &= dtype == torch.bfloat16 and all(s.params.conv_weight.shape[1] < _DEEP for s in stages)
    if trains:
        return _LEAST_TRAINED[dtype][not own]
    if not own:
        return _LEAST_OTHER
    return round(_LEAST[dtype, gradients] / (1 + _products_per_result(stages) / _PRODUCTS_LIKE_A_RESULT))


def _isa() -> str:
    return "" if _native.extension is None else _native.extension.isa()


def _products_per_result(stages: Sequence[Stage]) -> float:
    """Products of all convolutions per element of their outputs, where images are much larger than kernels."""
    products, results, pixels = 0.0, 0.0, 1.0
    for stage in stages:
        pixels /= stage.stride**2
        weight = stage.params.conv_weight
        products += pixels * weight.numel()
        results += pixels * weight.shape[0]
    return products / results


def gain_function(stages: Sequence[Stage], least: int, dtype: torch.dtype) -> Callable[[torch.Size], float]:
    """A function of the shape of an input that says what the operator gains, in units of what a call of it costs.

    Below 0 it does not pay; `ALWAYS` if it always does.
    """
    unit = _GAIN_WITH_AMX if dtype == torch.bfloat16 and _isa() == "amx" else 1.0
    sizes = [(s.params.conv_weight.shape[0], *s.params.conv_weight.shape[2:], s.stride, s.padding) for s in stages]
    gains: dict[tuple[torch.Size, int], float] = {}

    def gain(shape: torch.Size) -> float:
        if not least:
            return ALWAYS
        threads = torch.get_num_threads()
        value = gains.get((shape, threads))
        if value is None:
            if len(gains) >= KEPT_SHAPES:
                gains.clear()
            value = gains[shape, threads] = unit * (_results(shape, sizes) / (threads * least) - 1)
        return value

    return gain


def _results(shape: Sequence[int], sizes: Sequence[tuple[int, ...]]) -> int:
    batch, _, height, width = shape
    total = 0
    for out, *kernel, stride, padding in sizes:
        height = (height + 2 * padding - kernel[0]) // stride + 1
        width = (width + 2 * padding - kernel[1]) // stride + 1
        total += batch * out * height * width
    return total
