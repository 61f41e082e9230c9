"""Which chains the CUDA kernels run, and for people why not another one.

csrc/gpu/call.cpp refuses what is refused here, too; tests/ops/test_cuda_choice.py compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nasfast.ops.chain.plan import KEPT_PLANS, Kind, StageShape
from nasfast.ops.reference import Stage
from nasfast.ops.refusal import Refusal
from nasfast.ops.tensors import storage_dtype

# what the kernels have of `reference.ACTIVATIONS`, and of what their channels are multiples: a lane reads 16 bytes
_ACTS = ("identity", "relu", "relu6")
_CHANNEL_MULTIPLE = 8
# The most input channels of a dense 3 x 3 stage, kDenseInput in csrc/gpu/dense_forward.h: a patch is one product deep.
_MAX_DENSE_CHANNELS = 3
# The most channels of a stage. Backward of a pointwise stage keeps 20 bytes for each output channel in the 98 KB of
# shared memory that a block has on sm_86, beside the 36.75 KB of its smallest tile (Memory in csrc/gpu/product.h).
_MAX_CHANNELS = 3136
# The most channels of pointwise stages alone that run on the CUDA kernels in front of others: with more, a product is
# bound by arithmetic, in which PyTorch's is as fast.
_MAX_PART_CHANNELS = 256
SERVES = (
    "chains of frozen pointwise and depthwise convolutions with batch statistics, in bfloat16 or float16, with "
    f"{', '.join(_ACTS[:-1])} or {_ACTS[-1]}, channels in multiples of {_CHANNEL_MULTIPLE} up to {_MAX_CHANNELS}, "
    f"no shuffle, and in front a dense 3 x 3 stem of at most {_MAX_DENSE_CHANNELS} channels"
)
"""What these limits let pass, for people."""


def served_stages(
    x: Tensor, stages: Sequence[Stage], fields: tuple[tuple, ...], *, shuffle: bool = False
) -> tuple[int, Refusal | None]:
    """How many of these stages, from the first on, the CUDA kernels run as one chain on x; if none, why.

    Args:
        x, fields, shuffle: as in `plan.plan_chain`.
        stages: the stages themselves.
    """
    if shuffle:
        return 0, Refusal("the channels are shuffled", has_operator=False)
    shape = tuple(x.shape)
    if any([type(length) is not int for length in shape]):
        return 0, Refusal("the sizes of x are not known")
    # a compiler guards on what the decisions read, and cannot look into a cache
    serve = _serve if torch.compiler.is_compiling() else _serve_once
    training = tuple([stage.training for stage in stages])
    return serve(storage_dtype(x), shape, torch.is_grad_enabled() and x.requires_grad, fields, training)


def _serve(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    input_grad: bool,
    shapes: tuple[tuple, ...],
    training: tuple[bool, ...],
) -> tuple[int, Refusal | None]:
    """`served_stages` from all that it depends on; shapes are the fields of a StageShape for each stage.

    Where others follow, the stages must be some in which PyTorch is slow: a depthwise one, or few channels.
    """
    if 0 in shape:
        return 0, Refusal("x is empty")
    stages = [StageShape(*fields) for fields in shapes]
    refusal = None
    for i, stage in enumerate(stages):
        refusal = _refuse(i, stage, dtype, shape[3], input_grad, training[i])
        if refusal is not None:
            stages = stages[:i]
            break
    if refusal is None or not stages:
        return len(stages), refusal
    widest = max([channels for stage in stages for channels in stage.channels])
    if widest > _MAX_PART_CHANNELS and not any([stage.kind == Kind.DEPTHWISE for stage in stages]):
        reason = f"of the stages in front, none is depthwise, and one has more than {_MAX_PART_CHANNELS} channels"
        return 0, Refusal(f"{refusal.reason}; {reason}", has_operator=False)
    return len(stages), None


_serve_once = lru_cache(KEPT_PLANS)(_serve)


def _refuse(
    i: int, stage: StageShape, dtype: torch.dtype, width: int, input_grad: bool, training: bool
) -> Refusal | None:
    """Why the CUDA kernels do not run stage i of a chain; None if they do. width: that of x."""
    if not training:
        return Refusal(f"stage {i} uses running statistics", has_operator=False)
    if stage.trains:
        return Refusal(f"the weight of stage {i} trains", has_operator=False)
    if not stage.fits(first=i == 0, input_grad=input_grad):
        reason = "neither pointwise nor depthwise with kernel 3, 5 or 7, nor of a stem, whose x has no gradient"
        return Refusal(f"the convolution of stage {i} is {reason}", has_operator=False)
    reason = _unsupported_input(i, stage, dtype, width)
    return Refusal(reason) if reason else None


def _unsupported_input(i: int, stage: StageShape, dtype: torch.dtype, width: int) -> str:
    """What the CUDA kernels lack for stage i, which the operator has; empty if nothing. width: that of x."""
    _, per_group, kernel, _ = stage.weight
    channels: tuple[int, ...] = stage.channels
    if stage.kind == Kind.DENSE:
        channels = channels[-1:]
        if kernel > 3 or stage.stride > 2 or per_group > _MAX_DENSE_CHANNELS:
            dense = f"stage {i} is dense, {kernel} x {kernel}, of {per_group} channels, with stride {stage.stride}"
            return f"{dense}; the kernels have 3 x 3, at most {_MAX_DENSE_CHANNELS} channels and stride 1 or 2"
        if width * per_group % _CHANNEL_MULTIPLE:
            numbers = f"a row of x has {width * per_group} numbers"
            return f"{numbers}; dense stage {i} needs a multiple of {_CHANNEL_MULTIPLE}"
    if stage.dtype not in (torch.float32, dtype):
        return f"the weight of stage {i} is {stage.dtype}, and the kernels multiply float32 or {dtype} here"
    if stage.act not in _ACTS:
        return f"stage {i} has the activation {stage.act}; the kernels have {', '.join(_ACTS)}"
    odd = [count for count in channels if count % _CHANNEL_MULTIPLE]
    if odd:
        return f"stage {i} has {odd[0]} channels, not a multiple of {_CHANNEL_MULTIPLE}"
    if max(channels) > _MAX_CHANNELS:
        return f"stage {i} has {max(channels)} channels; the kernels have at most {_MAX_CHANNELS}"
    return ""
