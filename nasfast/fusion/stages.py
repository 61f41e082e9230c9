"""Runs the stages of a chain: on the operator, or on PyTorch's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.fusion.match import Widths
from nasfast.ops.autograd import save_checkpoint_sentinel
from nasfast.ops.chain.call import check_chain, run_checked_chain
from nasfast.ops.reference import ACTIVATIONS, Stage

# shapes of which a chain keeps what was checked
_KEPT_SHAPES = 256
_HALF = (torch.bfloat16, torch.float16)
# those that change their input, whose gradients need only the result
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "relu6": partial(F.hardtanh, min_val=0.0, max_val=6.0, inplace=True),
    "tanh": torch.tanh_,
}


def run_stages(
    x: Tensor,
    stages: Sequence[Stage],
    widths: Sequence[Widths | None],
    residual: Tensor | None,
    checked: set[tuple],
) -> Tensor:
    """The stages on the operator, or on PyTorch where the operator refuses them.

    Args:
        x, stages, residual: as in `conv_bn_act_chain`.
        widths: of each stage, as in `TracedStage`.
        checked: shapes of x for which these stages have been checked; guards see to types, devices and other shapes.
    """
    if not any(widths):
        return _run_part(x, stages, residual, checked, 0)
    parts = _parts(tuple(x.shape[2:]), stages, widths)
    for i, (padded, part) in enumerate(parts):
        x = x if padded is None else F.pad(x, padded)
        x = _run_part(x, part, residual if i == len(parts) - 1 else None, checked, i)
    return x


def _run_part(x: Tensor, stages: Sequence[Stage], residual: Tensor | None, checked: set[tuple], number: int) -> Tensor:
    exact = [_norm_in_float32(stage) if stage.params.bn_weight.dtype in _HALF else stage for stage in stages]
    if (number, x.shape) not in checked:
        try:
            check_chain("fuse", x, exact, residual)
        except (TypeError, ValueError):
            # PyTorch may accept what the operator refuses, such as a residual that is broadcast. If PyTorch refuses it
            # too, its error is the one that users of the model know.
            if residual is not None:
                return _run_part(x, stages, None, checked, number) + residual
            return plain_stages(x, stages, [None] * len(stages))
        if not torch.compiler.is_compiling() and len(checked) < _KEPT_SHAPES:
            checked.add((number, x.shape))
    y = run_checked_chain(x, exact, residual)
    for stage, wide in zip(stages, exact, strict=True):
        if stage is not wide and stage.training:
            for running, moved in zip(stage.params[3:5], wide.params[3:5], strict=True):
                if running is not None and moved is not None:
                    running.data.copy_(moved)
    save_checkpoint_sentinel(y)
    return y


def plain_stages(x: Tensor, stages: Sequence[Stage], widths: Sequence[Widths | None]) -> Tensor:
    """The stages as PyTorch's functions; `widths` as in `run_stages`."""
    for (params, stride, padding, groups, act, training, momentum, eps), its in zip(stages, widths, strict=True):
        x = x if its is None else F.pad(x, its)
        padding = padding if its is None else 0
        x = F.conv2d(x, params.conv_weight, params.conv_bias, stride, padding, 1, groups)
        x = F.batch_norm(
            x, params.running_mean, params.running_var, params.bn_weight, params.bn_bias, training, momentum, eps
        )
        x = _IN_PLACE.get(act, ACTIVATIONS[act])(x)
    return x


def _parts(
    size: tuple[int, ...], stages: Sequence[Stage], widths: Sequence[Widths | None]
) -> list[tuple[Widths | None, list[Stage]]]:
    """The stages on images of this size in parts, and what the input of each part is padded with before.

    The operator has symmetric paddings. What TensorFlow does is one if the size is odd; otherwise, a depthwise kernel
    with zeros at its edge does the same. Other stages begin a part.
    """
    parts: list[tuple[Widths | None, list[Stage]]] = [(None, [])]
    for stage, its in zip(stages, widths, strict=True):
        left, right, top, bottom = its or (stage.padding,) * 4
        height, width = size
        kernel = stage.params.conv_weight.shape[2:]
        size = (
            (height + top + bottom - kernel[0]) // stage.stride + 1,
            (width + left + right - kernel[1]) // stage.stride + 1,
        )
        if its is not None and left == right == top == bottom >= 0:
            stage = stage._replace(padding=left)
        elif its is not None:
            same_size = size == ((height - 1) // stage.stride + 1, (width - 1) // stage.stride + 1)
            enlarged = _with_enlarged_kernel(stage, left, top) if same_size else None
            if enlarged is None:
                parts.append((its, []))
                stage = stage._replace(padding=0)
            else:
                stage = enlarged
        parts[-1][1].append(stage)
    return [part for part in parts if part[1]]


def _with_enlarged_kernel(stage: Stage, left: int, top: int) -> Stage | None:
    """The stage with a depthwise kernel that has two rows and columns of zeros more, and half of its size as padding;
    None if the operator has no such kernel. It gives a result of the same size.
    """
    weight = stage.params.conv_weight
    channels, per_group, kernel, kernel_width = weight.shape
    before = [kernel // 2 - left, kernel // 2 - top]
    depthwise = per_group == 1 and stage.groups == channels > 1 and kernel == kernel_width
    trains = torch.is_grad_enabled() and weight.requires_grad
    if not depthwise or kernel not in (3, 5) or trains or not {*before} <= {0, 1}:
        return None
    columns, rows = ((1 + first, 1 - first) for first in before)
    params = stage.params._replace(conv_weight=F.pad(weight, (*columns, *rows)))
    return stage._replace(params=params, padding=kernel // 2 + 1)


def _norm_in_float32(stage: Stage) -> Stage:
    """The stage with its BatchNorm in float32, which the operator needs."""
    params = stage.params
    mean, var = (None if tensor is None else tensor.float() for tensor in (params.running_mean, params.running_var))
    affine = {"bn_weight": params.bn_weight.float(), "bn_bias": params.bn_bias.float()}
    return stage._replace(params=params._replace(**affine, running_mean=mean, running_var=var))
