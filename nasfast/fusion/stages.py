"""Runs the stages of a chain: on the operator, with BatchNorms folded into convolutions, or on PyTorch.

Folding is for chains without gradients, once for many forwards. On a CPU large folded convolutions run on oneDNN's
convolution with activation, with weights in its own layout. The others are PyTorch's convolutions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nasfast.ops.autograd import let_recomputation_reach, transformed
from nasfast.ops.conv import conv_bn_act_chain
from nasfast.ops.reference import Stage

# The fewest products of a float32 convolution, depthwise ones aside, that runs on oneDNN's convolution with activation.
# A call of it costs 30 us, and a small convolution of PyTorch 5 us, because it multiplies matrices without oneDNN. In
# 16 bits PyTorch's runs on oneDNN too, and changes the layout of its weights at every call. Measured on two AVX-512
# cores.
_MIN_PRODUCTS = 8_000_000

# the activations of stages, changing their input, and oneDNN's names and numbers of them behind a convolution
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str, list[float]]] = {
    "identity": (lambda z: z, "none", []),
    "relu": (torch.relu_, "relu", []),
    "relu6": (partial(F.hardtanh, min_val=0.0, max_val=6.0, inplace=True), "hardtanh", [0.0, 6.0]),
    "tanh": (torch.tanh_, "tanh", []),
    "hswish": (partial(F.hardswish, inplace=True), "hardswish", []),
    "silu": (partial(F.silu, inplace=True), "swish", []),
}


class Way(Enum):
    """How a chain runs."""

    OPERATOR = "operator"
    FOLDED = "folded"
    PLAIN = "PyTorch"


def run_stages(x: Tensor, stages: Sequence[Stage], residual: Tensor | None) -> Tensor:
    """The stages on the operator, or on PyTorch where the operator refuses them."""
    exact = in_float32(stages)
    try:
        # checks its arguments before it computes or changes anything
        y = conv_bn_act_chain(x, exact, residual=residual)
    except (TypeError, ValueError):
        # PyTorch may accept what the operator refuses, such as a residual that is broadcast. If PyTorch refuses it too,
        # its error is the one that users of the model know.
        if residual is not None:
            return run_stages(x, stages, None) + residual
        return plain_stages(x, stages)
    for given, used in zip(stages, exact, strict=True):
        if given is not used and given.training:
            for running, moved in zip(given.params[3:5], used.params[3:5], strict=True):
                if running is not None and moved is not None:
                    running.copy_(moved)
    let_recomputation_reach(y)
    return y


def sources_of(stages: Sequence[Stage]) -> list[Tensor]:
    """Every tensor that the stages read."""
    return [tensor for stage in stages for tensor in stage.params if tensor is not None]


def plain_stages(x: Tensor, stages: Sequence[Stage]) -> Tensor:
    """The stages as PyTorch's functions."""
    for params, stride, padding, groups, act, training, momentum, eps in stages:
        x = F.conv2d(x, params.conv_weight, params.conv_bias, stride, padding, 1, groups)
        x = F.batch_norm(
            x, params.running_mean, params.running_var, params.bn_weight, params.bn_bias, training, momentum, eps
        )
        activate, *_ = _ACTIVATIONS[act]
        x = activate(x)
    return x


def result_dtype(x: Tensor) -> torch.dtype:
    """Type of the result of convolution and BatchNorm on x."""
    device = "cpu" if x.is_cpu else x.device.type
    # autocast does not convert float64
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def plain(*tensors: Tensor) -> bool:
    """Whether these are ordinary tensors and not subclasses, which follow other rules, and nothing is transformed."""
    return set(map(type, tensors)) <= ORDINARY and not transformed()


ORDINARY = {Tensor, nn.Parameter}
_HALF = (torch.bfloat16, torch.float16)


def in_float32(stages: Sequence[Stage]) -> list[Stage]:
    """The stages with BatchNorms in float32, which the operator needs; a stage that has them is the same object."""
    return [_norm_in_float32(stage) if stage.params.bn_weight.dtype in _HALF else stage for stage in stages]


def _norm_in_float32(stage: Stage) -> Stage:
    params = stage.params
    mean, var = (None if tensor is None else tensor.float() for tensor in (params.running_mean, params.running_var))
    affine = {"bn_weight": params.bn_weight.float(), "bn_bias": params.bn_bias.float()}
    return stage._replace(params=params._replace(**affine, running_mean=mean, running_var=var))


class Folded:
    """A chain with its BatchNorms folded into its convolutions, for one type of computation.

    It is valid while its sources are the same tensors in the same memory with the same version counters. PyTorch counts
    every change in place but those through `Tensor.data` and through NumPy arrays that share the memory. It does not
    count the changes of running statistics by a BatchNorm, which counts its batches.

    Args:
        stages: stages that all normalise with running statistics. Their tensors are in the memory of the CPU, and none
            is an inference tensor, which has no version counter.
        dtype: the type in which the convolutions compute.
        shape: (N, C, H, W) of an input; oneDNN chooses the layout of the weights for it.
        counters: the numbers of batches of the BatchNorms.
    """

    def __init__(
        self, stages: Sequence[Stage], dtype: torch.dtype, shape: torch.Size, counters: Sequence[Tensor]
    ) -> None:
        self._dtype, self.stages = dtype, stages
        self._sources = sources_of(stages)
        self._counted = [*self._sources, *counters]
        self._states = self._states_now()
        # another tensor cannot get the same memory while it is held here
        self._memory = [tensor.untyped_storage() for tensor in self._sources]
        self._convolutions: list[Callable[[Tensor], Tensor]] = []
        size: tuple[int, ...] = shape[2:]
        for stage in stages:
            convolution, size = _fold(stage, dtype, (shape[0], *size))
            self._convolutions.append(convolution)

    def serves(self, stages: Sequence[Stage], dtype: torch.dtype) -> bool:
        """Whether this still is what these stages compute."""
        if dtype != self._dtype or (stages is not self.stages and not self._has(stages)):
            return False
        return self._states_now() == self._states

    def _has(self, stages: Sequence[Stage]) -> bool:
        sources = sources_of(stages)
        same = len(sources) == len(self._sources) and all(map(operator.is_, sources, self._sources))
        return same and _settings(stages) == _settings(self.stages)

    def _states_now(self) -> list[int]:
        return [*map(_VERSION, self._counted), *map(Tensor.data_ptr, self._sources)]

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The result of the chain for (N, C, H, W), and the residual added."""
        x = x.to(self._dtype)
        for convolution in self._convolutions:
            x = convolution(x)
        if residual is None:
            return x
        # the result of a convolution is nobody else's
        return x.add_(residual) if (residual.shape, residual.dtype) == (x.shape, x.dtype) else x + residual


def _settings(stages: Sequence[Stage]) -> list[tuple]:
    """All else that a folded chain depends on."""
    return [(s.stride, s.padding, s.groups, s.act, s.eps) for s in stages]


_VERSION = operator.attrgetter("_version")


@torch.no_grad()
def _fold(
    stage: Stage, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[Callable[[Tensor], Tensor], tuple[int, ...]]:
    """The folded stage, and the (H, W) of its result; shape is (N, H, W) of its input."""
    weight, bn_weight, bn_bias, mean, var, conv_bias = stage.params
    assert mean is not None and var is not None  # a stage with running statistics
    exact = torch.promote_types(weight.dtype, torch.float32)
    scale = bn_weight.to(exact) * torch.rsqrt(var.to(exact) + stage.eps)
    center = mean.to(exact) if conv_bias is None else mean.to(exact) - conv_bias.to(exact)
    bias = (bn_bias.to(exact) - center * scale).to(dtype)
    folded = (weight.to(exact) * scale[:, None, None, None]).to(dtype)
    folded = folded.contiguous(memory_format=torch.channels_last)
    channels, per_group, *kernel = folded.shape
    batch, *size = shape
    out = tuple((n + 2 * stage.padding - k) // stage.stride + 1 for n, k in zip(size, kernel, strict=True))
    products = batch * math.prod(out) * folded.numel()
    faster = products >= _MIN_PRODUCTS or per_group == 1 < channels or dtype != torch.float32
    activate, name, numbers = _ACTIVATIONS[stage.act]
    if not faster or not _onednn_computes(dtype, weight.device):
        conv = folded, bias, stage.stride, stage.padding, 1, stage.groups
        return (lambda x: activate(torch.conv2d(x, *conv))), out
    padding, stride, dilation, groups = [stage.padding] * 2, [stage.stride] * 2, [1, 1], stage.groups
    shape = batch, per_group * groups, *size
    packed = torch.ops.mkldnn._reorder_convolution_weight(folded, padding, stride, dilation, groups, shape)
    run = torch.ops.mkldnn._convolution_pointwise.default

    def convolve_packed(x: Tensor) -> Tensor:
        return run(x, packed, bias, padding, stride, dilation, groups, name, numbers, "")

    return convolve_packed, out


def _onednn_computes(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32
