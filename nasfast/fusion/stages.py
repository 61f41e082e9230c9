"""Runs the stages of a chain: on the operator, or on PyTorch's functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.fusion.rule import KEPT_SHAPES
from nasfast.ops.autograd import save_checkpoint_sentinel
from nasfast.ops.checks import check_chain
from nasfast.ops.conv import run_checked_chain
from nasfast.ops.reference import ACTIVATIONS, Stage

_HALF = (torch.bfloat16, torch.float16)
# those that change their input, whose gradients need only the result
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "relu6": partial(F.hardtanh, min_val=0.0, max_val=6.0, inplace=True),
    "tanh": torch.tanh_,
}


class Served(threading.local):
    """What operators of ours ran in this thread.

    gain: what they gained in all, in units of what the least chain that pays gains before its call is paid.
    """

    gain = 0.0


SERVED = Served()


def run_stages(x: Tensor, stages: Sequence[Stage], residual: Tensor | None, checked: set[torch.Size]) -> Tensor:
    """The stages on the operator, or on PyTorch where the operator refuses them.

    Args:
        x, stages, residual: as in `conv_bn_act_chain`.
        checked: shapes of x for which these stages have been checked; guards see to types, devices and other shapes.
    """
    exact = [_norm_in_float32(stage) if stage.params.bn_weight.dtype in _HALF else stage for stage in stages]
    if x.shape not in checked:
        try:
            check_chain("fuse", x, exact, residual)
        except (TypeError, ValueError):
            # PyTorch may accept what the operator refuses, such as a residual that is broadcast. If PyTorch refuses it
            # too, its error is the one that users of the model know.
            if residual is not None:
                return run_stages(x, stages, None, checked) + residual
            return plain_stages(x, stages)
        if not torch.compiler.is_compiling() and len(checked) < KEPT_SHAPES:
            checked.add(x.shape)
    y = run_checked_chain(x, exact, residual)
    for stage, wide in zip(stages, exact, strict=True):
        if stage is not wide and stage.training:
            for running, moved in zip(stage.params[3:5], wide.params[3:5], strict=True):
                if running is not None and moved is not None:
                    running.copy_(moved)
    save_checkpoint_sentinel(y)
    return y


def plain_stages(x: Tensor, stages: Sequence[Stage]) -> Tensor:
    """The stages as PyTorch's functions."""
    for params, stride, padding, groups, act, training, momentum, eps in stages:
        x = F.conv2d(x, params.conv_weight, params.conv_bias, stride, padding, 1, groups)
        x = F.batch_norm(
            x, params.running_mean, params.running_var, params.bn_weight, params.bn_bias, training, momentum, eps
        )
        x = _IN_PLACE.get(act, ACTIVATIONS[act])(x)
    return x


def _norm_in_float32(stage: Stage) -> Stage:
    """The stage with its BatchNorm in float32, which the operator needs."""
    params = stage.params
    mean, var = (None if tensor is None else tensor.float() for tensor in (params.running_mean, params.running_var))
    affine = {"bn_weight": params.bn_weight.float(), "bn_bias": params.bn_bias.float()}
    return stage._replace(params=params._replace(**affine, running_mean=mean, running_var=var))
