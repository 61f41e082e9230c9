"""The plan of a chain: what each stage is, its geometry, where its numbers lie, and what backward computes again.

`plan_chain` decides all of this once for a chain and keeps the plan. Every backend gets the plan as
`ChainPlan.numbers`, because a `torch.library` schema has integers but no dataclasses. Python reads it with `read_plan`,
C++ with csrc/cpu/plan.h. A backend may check a plan against its tensors; it never decides anything again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nasfast.ops.reference import ACTIVATIONS, Stage
from nasfast.ops.tensors import storage_dtype

# the types in which each backend stores activations and weights
STORAGE_DTYPES = {
    "cpu": {torch.float32, torch.bfloat16},
    "cuda": {torch.bfloat16, torch.float16},
}
# The largest number of products per output of a dense convolution that is multiplied as gathered patches (3 x 3 x 3 in
# a stem). Gathering copies every input kernel^2 times, which is cheap only with few channels. PyTorch's convolution
# runs larger ones.
_MAX_PATCH = 64
# The largest number of input channels of an expansion that the CPU computes again wherever it is read, instead of
# writing, keeping and reading it. Each element then costs 2 * Cin operations, and saves 16 bytes of float32 traffic and
# 4 bytes of kept memory. Measured on two AVX-512 cores: 10 to 25 % faster up to 32 channels, equal at 56, and 15 %
# slower at 112. The CUDA kernels keep it: on an H200 nothing was gained (docs/method.md 7).
MAX_RECOMPUTED_CHANNELS = 64
# The least pixels of such an expansion: its statistics cost Cin^2 * Cout operations, however few pixels there are.
# With this limit, mobilenet_v2 with trained BatchNorms takes 0.72 to 0.95 of the time that it takes without one (one
# AVX-512 core, batch 1 and 8, 64 to 160 pixels, float32 and bfloat16); 1,000 and 3,000 are as good.
MIN_RECOMPUTED_ROWS = 2000
# The smallest expansion factor at which this saves memory, because the chain's input is kept in place of the expansion.
MIN_RECOMPUTED_EXPANSION = 2
# Outputs begin at multiples of this many elements of the saved tensor.
_ALIGNMENT = 64
_ACTS = tuple(ACTIVATIONS)
# plans that are kept: a supernet with 20 layers of 6 candidates needs about 300 for training and evaluation
KEPT_PLANS = 4096


class Kind(IntEnum):
    """What the convolution of a stage is; the numbers are those of `Kind` in csrc/cpu/plan.h."""

    POINTWISE = 0
    DEPTHWISE = 1
    DENSE = 2


@dataclass(frozen=True)
class StagePlan:
    """One stage of a chain. Its padding is kernel // 2.

    Attributes:
        kind: what the convolution is.
        act: a key of `reference.ACTIVATIONS`.
        batch: N of the input and of the output.
        in_channels, out_channels: channels of the input and of the output.
        kernel, stride: size and stride of the convolution, the same in both directions.
        size, out_size: (H, W) of the input and of the output.
        saved_at: element of the saved tensor at which the convolution's output begins; None if the output is not saved,
            because backward computes it again from the chain's input.
        statistics_at: element of the statistics at which mean and variance, (2, out_channels), begin.
    """

    kind: Kind
    act: str
    batch: int
    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    size: tuple[int, int]
    out_size: tuple[int, int]
    saved_at: int | None
    statistics_at: int

    @property
    def rows(self) -> int:
        """Pixels of the output."""
        return self.batch * self.out_size[0] * self.out_size[1]


@dataclass(frozen=True)
class ChainPlan:
    """The stages that one call of the operator runs, and the layout of what it saves.

    Attributes:
        stages: at least one.
        shuffle: the stages run on the odd channels of x only; see `conv_bn_act_chain`.
        saved_size: elements of the saved tensor.
        numbers: all of this as the operators get it: `_HEADER` numbers, then `_PER_STAGE` for each stage. The input of
            a stage is the output of the stage before, so the numbers have it once.
        subsample: the operator gets every subsample-th pixel of x, in both directions: a pointwise convolution with a
            stride reads no other pixels. `numbers` does not have it, because the caller takes these pixels.
    """

    stages: tuple[StagePlan, ...]
    shuffle: bool
    saved_size: int
    numbers: tuple[int, ...]
    subsample: int = 1

    @property
    def recompute(self) -> bool:
        """Whether backward computes the output of the first stage again, for which it needs x."""
        return self.stages[0].saved_at is None

    @property
    def statistics_size(self) -> int:
        """Elements of the statistics: mean and variance of every stage."""
        return 2 * sum(stage.out_channels for stage in self.stages)

    def statistics_elements(self, backend: str) -> int:
        """Elements of the statistics with the coefficients that a backend appends for its backward.

        They are float32 in the memory of float64 numbers. The CUDA kernels have a fold of 2 numbers for each channel,
        and an interval of 4.
        """
        appended = {"cpu": 0, "cuda": 6}[backend] * self.statistics_size // 2
        return self.statistics_size + (appended + 1) // 2

    @property
    def in_shape(self) -> tuple[int, int, int, int]:
        """Shape of x, as the operator gets it."""
        first = self.stages[0]
        return first.batch, first.in_channels * (2 if self.shuffle else 1), *first.size

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of the result."""
        last = self.stages[-1]
        return last.batch, last.out_channels * (2 if self.shuffle else 1), *last.out_size

    def empty_gradients(
        self, saved: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], wants: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Memory for dx, dweights and dbiases; empty where `wants` (csrc/library.cpp) is false.

        Args:
            saved: what forward saved, which has the type and device of dx.
            weights, biases: those of the BatchNorms.
        """
        dx = saved.new_empty(0)
        if wants[0]:
            dx = torch.empty(self.in_shape, dtype=saved.dtype, device=saved.device, memory_format=torch.channels_last)
        dweights = [w.new_empty(w.shape[0] if want else 0) for w, want in zip(weights, wants[1::2], strict=True)]
        dbiases = [b.new_empty(b.shape[0] if want else 0) for b, want in zip(biases, wants[2::2], strict=True)]
        return dx, dweights, dbiases


# lengths of the two parts of ChainPlan.numbers
_HEADER, _PER_STAGE = 6, 9
# the place of an output that is not saved
_NOWHERE = -1


class StageShape(NamedTuple):
    """What a plan depends on in one stage: shape and type of the weight, and the settings."""

    weight: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    stride: int
    padding: int
    groups: int
    act: str

    @property
    def channels(self) -> tuple[int, int]:
        """Channels of the input and of the output."""
        return self.weight[1] * self.groups, self.weight[0]

    @property
    def kind(self) -> Kind | None:
        return stage_kind(self.weight, self.stride, self.padding, self.groups)

    def fits(self, *, first: bool, input_grad: bool) -> bool:
        """Whether the operator of chains has the stage at this place of a chain."""
        if self.kind == Kind.DENSE:
            # the operator has no input gradient of a dense stage; the first one of a network, its stem, needs none
            return first and not input_grad
        if self.kind == Kind.POINTWISE:
            return first or self.stride == 1
        return self.kind == Kind.DEPTHWISE


def stage_kind(weight: tuple[int, ...], stride: int, padding: int, groups: int) -> Kind | None:
    """The kind of a convolution with a weight of this shape; None if the chain operator does not have it."""
    out_channels, per_group, kernel, kernel_width = weight
    if kernel != kernel_width or kernel % 2 == 0 or padding != kernel // 2:
        return None
    if groups == out_channels and per_group == 1 and (groups > 1 or kernel > 1):
        return Kind.DEPTHWISE if kernel in (3, 5, 7) and stride in (1, 2) else None
    if groups > 1:
        return None
    if kernel == 1:
        return Kind.POINTWISE
    return Kind.DENSE if per_group * kernel * kernel <= _MAX_PATCH else None


def plan_chain(backend: str, x: Tensor, fields: tuple[tuple, ...], *, shuffle: bool = False) -> ChainPlan | None:
    """The plan of the first of these stages, as many as the backend's operator can run on x in one call.

    Args:
        backend: name of a backend; cpu and cuda have operators of chains.
        x: (N, C, H, W), the input of the chain.
        fields: `stage_fields` of the stages, which `checks.check_chain` has checked.
        shuffle: see `ChainPlan`.

    Returns:
        The plan, or None if the operator cannot run the first stage. Also None if x has sizes that are no numbers, as
        in torch.jit.trace and for the dynamic dimensions of torch.export: a plan is for one size.
    """
    shape = tuple(x.shape)
    if backend not in STORAGE_DTYPES or any([type(length) is not int for length in shape]):
        return None
    # a compiler guards on what the decisions read, and cannot look into a cache
    decide = _decide if torch.compiler.is_compiling() else _decide_once
    input_grad = torch.is_grad_enabled() and x.requires_grad
    return decide(backend, storage_dtype(x), shape, input_grad, shuffle, fields)


def stage_fields(stages: Sequence[Stage]) -> tuple[tuple, ...]:
    """The fields of a StageShape for each stage, as plain tuples, because this runs at every call."""
    grads = torch.is_grad_enabled()
    return tuple(
        [
            (weight.shape, weight.dtype, grads and weight.requires_grad, s.stride, s.padding, s.groups, s.act)
            for s in stages
            for weight in (s.params.conv_weight,)
        ]
    )


def _decide(
    backend: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    input_grad: bool,
    shuffle: bool,
    shapes: tuple[tuple, ...],
) -> ChainPlan | None:
    """`plan_chain` from all that it depends on; shapes are the fields of a StageShape for each stage."""
    if 0 in shape or dtype not in STORAGE_DTYPES[backend]:
        return None
    batch, channels, *size = shape
    stages = tuple([StageShape(*fields) for fields in shapes])
    count = 0
    for stage in stages:
        # weights may also be kept in float32
        if stage.trains or stage.dtype not in {torch.float32, *STORAGE_DTYPES[backend]}:
            break
        if not stage.fits(first=count == 0, input_grad=input_grad):
            break
        count += 1
    if count == 0:
        return None
    stages = stages[:count]
    subsample = stages[0].stride if stages[0].kind == Kind.POINTWISE else 1
    if subsample > 1:
        stages = (stages[0]._replace(stride=1), *stages[1:])
        size = [_strided(length, subsample) for length in size]
    shape = batch, channels // 2 if shuffle else channels, *size
    plan = make_plan(shape, stages, shuffle=shuffle, subsample=subsample)
    if backend != "cpu" or shuffle or not _can_recompute(plan):
        return plan
    return make_plan(shape, stages, recompute=True, subsample=subsample)


_decide_once = lru_cache(KEPT_PLANS)(_decide)


def _can_recompute(plan: ChainPlan) -> bool:
    """Whether the CPU computes the output of an expansion again in backward, and keeps the chain's input instead."""
    if [stage.kind for stage in plan.stages[:2]] != [Kind.POINTWISE, Kind.DEPTHWISE]:
        return False
    first = plan.stages[0]
    if first.out_channels < MIN_RECOMPUTED_EXPANSION * first.in_channels:
        return False
    return first.in_channels <= MAX_RECOMPUTED_CHANNELS and first.rows >= MIN_RECOMPUTED_ROWS


def _strided(length: int, stride: int) -> int:
    """Pixels of an output from `length` pixels of an input with padding kernel // 2."""
    return (length - 1) // stride + 1


def make_plan(
    shape: tuple[int, ...],
    stages: Sequence[StageShape],
    *,
    recompute: bool = False,
    shuffle: bool = False,
    subsample: int = 1,
) -> ChainPlan:
    """Geometry and offsets of stages that the operator has.

    Args:
        shape: (N, C, H, W) of the input of the first stage, that is with half the channels of x where shuffle is set.
        stages: the stages of one chain.
        recompute: whether backward computes the output of the first stage again instead of reading it.
        shuffle, subsample: as in `ChainPlan`.
    """
    batch, channels, height, width = shape
    size = height, width
    plans: list[StagePlan] = []
    saved_size = statistics_at = 0
    for stage in stages:
        kind, out_channels, kernel = stage.kind, stage.weight[0], stage.weight[2]
        if kind is None:
            raise ValueError(f"make_plan: the operator does not have the stage {stage}; leave it out of the plan")
        out_size = _strided(size[0], stage.stride), _strided(size[1], stage.stride)
        plan = StagePlan(
            kind=kind,
            act=stage.act,
            batch=batch,
            in_channels=channels,
            out_channels=out_channels,
            kernel=kernel,
            stride=stage.stride,
            size=size,
            out_size=out_size,
            saved_at=None if recompute and not plans else saved_size,
            statistics_at=statistics_at,
        )
        plans.append(plan)
        if plan.saved_at is not None:
            elements = batch * out_size[0] * out_size[1] * out_channels
            saved_size += (elements + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        statistics_at += 2 * out_channels
        channels, size = out_channels, out_size
    return ChainPlan(tuple(plans), shuffle, saved_size, _numbers(plans, shuffle, saved_size), subsample)


def _numbers(stages: Sequence[StagePlan], shuffle: bool, saved_size: int) -> tuple[int, ...]:
    first = stages[0]
    numbers = [first.batch, first.in_channels, *first.size, int(shuffle), saved_size]
    for stage in stages:
        saved_at = _NOWHERE if stage.saved_at is None else stage.saved_at
        numbers += [int(stage.kind), _ACTS.index(stage.act), stage.out_channels, stage.kernel, stage.stride]
        numbers += [*stage.out_size, saved_at, stage.statistics_at]
    return tuple(numbers)


def read_plan(numbers: Sequence[int]) -> ChainPlan:
    """The plan whose `numbers` these are."""
    return _read_once(tuple(numbers))


@lru_cache(KEPT_PLANS)
def _read_once(numbers: tuple[int, ...]) -> ChainPlan:
    batch, channels, height, width, shuffle, saved_size = numbers[:_HEADER]
    size = height, width
    stages = []
    for begin in range(_HEADER, len(numbers), _PER_STAGE):
        kind, act, out, kernel, stride, out_height, out_width, saved_at, statistics_at = numbers[
            begin : begin + _PER_STAGE
        ]
        convolution = Kind(kind), _ACTS[act], batch, channels, out, kernel, stride, size, (out_height, out_width)
        place = None if saved_at < 0 else saved_at
        stages.append(StagePlan(*convolution, saved_at=place, statistics_at=statistics_at))
        channels, size = out, (out_height, out_width)
    return ChainPlan(tuple(stages), bool(shuffle), saved_size, numbers)
