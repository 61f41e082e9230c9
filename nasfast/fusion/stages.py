"""Runs the stages of a chain on the operator or on PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from nasfast.fusion.members import IN_PLACE
from nasfast.ops.autograd import let_recomputation_reach
from nasfast.ops.conv import conv_bn_act_chain
from nasfast.ops.reference import Stage


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
        x = IN_PLACE[act](x)
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


def transformed() -> bool:
    """Whether tensors may have a tangent, or torch.func transforms what runs; our operators have no rule for either."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


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
