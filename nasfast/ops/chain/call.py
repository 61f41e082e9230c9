"""Chains of convolution, BatchNorm and activation; conv_bn_act is such a chain."""

import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.ops import checks, reference
from nasfast.ops.autograd import only_reference_serves, save_checkpoint_sentinel
from nasfast.ops.backends import resolve_backend
from nasfast.ops.bn import bn_act, overwrite_with_bn_act
from nasfast.ops.chain.autograd import run_chain
from nasfast.ops.chain.limits import served_stages
from nasfast.ops.chain.plan import ChainPlan, plan_chain, stage_fields
from nasfast.ops.reference import ConvBNParams, Stage
from nasfast.ops.refusal import Refusal
from nasfast.ops.tensors import autocasts, storage_dtype


def conv_bn_act(
    x: Tensor,
    conv_weight: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    conv_bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: str = "relu6",
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Convolve, normalise, activate, and add the residual.

    out = act(bn(conv2d(x, conv_weight, conv_bias; stride, padding, groups))) + residual, bn as in `nasfast.ops.bn_act`.

    Only the gradients that are needed are computed. A frozen convolution weight needs none, and its input is not kept.
    The native backends have their own pointwise and depthwise (k 3, 5, 7, stride 1 or 2, padding k // 2) convolutions,
    and their own dense ones for the few channels of a stem. Other convolutions, and trainable ones, run on PyTorch,
    with the native `bn_act` behind them. A bias of a convolution costs one small operation per channel vector, because
    BatchNorm subtracts it again. With batch statistics its gradient is exactly zero.

    Args:
        x: (N, Cin, H, W); types and layouts as in `nasfast.ops.bn_act`.
        conv_weight: (Cout, Cin / groups, k, k), of the type of x (autocast may convert both).
        bn_weight, bn_bias, running_mean, running_var: (Cout,), float32.
        stride, padding, groups: arguments of the convolution, one number for both directions.
        conv_bias: (Cout,), of the type of conv_weight; None for a convolution without bias.
        residual: (N, Cout, Ho, Wo), added after the activation.
        act, training, momentum, eps, backend: as in `nasfast.ops.bn_act`.

    Returns:
        (N, Cout, Ho, Wo).

    Raises:
        TypeError, ValueError: an argument does not fit; in training also an empty batch or one value per channel.
        RuntimeError: the named backend cannot serve.
    """
    params = ConvBNParams(conv_weight, bn_weight, bn_bias, running_mean, running_var, conv_bias)
    stage = Stage(params, stride, padding, groups, act, training, momentum, eps)
    check_conv_bn_act("conv_bn_act", x, stage, residual)
    return run_checked_chain(x, [stage], residual, backend=backend, op="conv_bn_act")


def conv_bn_act_chain(
    x: Tensor,
    stages: Sequence[Stage],
    *,
    residual: Tensor | None = None,
    shuffle: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Run conv_bn_act stages one after another, and add the residual to the result of the last.

    With shuffle, the stages run on the odd channels of x, and their result follows the even channels. This is the
    channel shuffle, split and concatenation in ShuffleNetV2's unit of stride 1.

    The native backends normalise and activate the output of each convolution while the next stage reads it. So they
    write every convolution's output once, and nothing else between the stages.

    Args:
        x: (N, C, H, W), the input of the first stage; types and layouts as in `nasfast.ops.bn_act`.
        stages: at least one stage.
        residual: a tensor of the shape of the result, added after the last activation.
        shuffle: run on the odd channels; the stages must keep the shape of their input, and there is no residual.
        backend: as in `nasfast.ops.bn_act`.

    Returns:
        The result of the last stage; with shuffle (N, C, H, W), the even channels of x and then that result.

    Raises:
        TypeError, ValueError: an argument does not fit; the message says which stage.
        RuntimeError: the named backend cannot serve.
    """
    check_chain("conv_bn_act_chain", x, stages, residual, shuffle)
    return run_checked_chain(x, stages, residual, shuffle=shuffle, backend=backend)


def check_conv_bn_act(op: str, x: Tensor, stage: Stage, residual: Tensor | None) -> None:
    """Check the arguments of `nasfast.ops.conv_bn_act`."""
    checks.check_input(op, x)
    shape = _check_stage(op, x, tuple(x.shape), stage)
    checks.check_result(op, x, shape, residual, stage.training)


def check_chain(op: str, x: Tensor, stages: Sequence[Stage], residual: Tensor | None, shuffle: bool = False) -> None:
    """Check the arguments of `nasfast.ops.conv_bn_act_chain`: every stage and how they fit together."""
    if not stages:
        raise ValueError(f"{op}: needs at least one stage, got none")
    checks.check_input(op, x)
    shape = tuple(x.shape)
    if shuffle:
        if shape[1] % 2:
            raise ValueError(f"{op}: shuffle=True splits an even number of channels, got x of shape {shape}")
        if residual is not None:
            raise ValueError(f"{op}: shuffle=True takes no residual; add it to the result")
        shape = (shape[0], shape[1] // 2, *shape[2:])
    begin = shape
    for i_stage, stage in enumerate(stages):
        where = f"{op}, stages[{i_stage}]"
        if not isinstance(stage, Stage):
            raise TypeError(f"{where}: must be a Stage, got {type(stage).__name__}")
        shape = _check_stage(where, x, shape, stage)
        checks.check_result(where, x, shape, residual if i_stage == len(stages) - 1 else None, stage.training)
    if shuffle and shape != begin:
        raise ValueError(f"{op}: shuffle=True needs stages that keep the shape of their input, got {begin} -> {shape}")


def _check_stage(op: str, x: Tensor, shape: tuple[int, ...], stage: Stage) -> tuple[int, ...]:
    """Check one stage against the shape of its input; return the shape of its result."""
    weight, bias = stage.params.conv_weight, stage.params.conv_bias
    checks.check_settings(op, stage.act, stage.eps)
    shape = _check_conv(op, x, shape, weight, stage)
    if bias is not None:
        checks.check_like(
            f"{op}: conv_bias",
            bias,
            weight,
            weight.shape[:1],
            (weight.dtype,),
            "conv_weight",
            why="the type of conv_weight",
        )
    checks.check_bn(op, "bn_", x, shape[1], stage.params[1:5], stage.training)
    return shape


def _check_conv(op: str, x: Tensor, shape: tuple[int, ...], weight: Tensor, stage: Stage) -> tuple[int, ...]:
    """Check the convolution of a tensor of this shape on the device of x; return the shape of its result."""
    checks.check_tensor(f"{op}: conv_weight", weight)
    if weight.ndim != 4:
        raise ValueError(f"{op}: conv_weight must be 4-d (out, in / groups, k, k), got shape {tuple(weight.shape)}")
    stride, padding, groups = stage.stride, stage.padding, stage.groups
    try:
        stride, padding, groups = operator.index(stride), operator.index(padding), operator.index(groups)
    except TypeError as error:
        raise TypeError(
            f"{op}: stride, padding and groups must be one integer each, for both directions, "
            f"got stride={stride!r}, padding={padding!r}, groups={groups!r}"
        ) from error
    if stride < 1 or padding < 0 or groups < 1:
        raise ValueError(
            f"{op}: stride and groups must be at least 1 and padding at least 0, "
            f"got stride={stride}, padding={padding}, groups={groups}"
        )
    out_channels, per_group, *kernel = weight.shape
    if weight.numel() < 1:
        raise ValueError(f"{op}: conv_weight must be at least 1 in every dimension, got shape {tuple(weight.shape)}")
    if per_group * groups != shape[1] or out_channels % groups:
        raise ValueError(
            f"{op}: conv_weight of shape {tuple(weight.shape)} with groups={groups} takes {per_group * groups} "
            f"channels and gives a multiple of {groups}, got an input of {shape[1]} channels"
        )
    if weight.dtype != x.dtype and not autocasts(x):
        raise TypeError(
            f"{op}: conv_weight must have the type of x, {x.dtype}, got {weight.dtype}; convert one, or use autocast"
        )
    checks.check_device(f"{op}: conv_weight", weight, x)
    height, width = ((size + 2 * padding - k) // stride + 1 for size, k in zip(shape[2:], kernel, strict=True))
    if height < 1 or width < 1:
        raise ValueError(
            f"{op}: a {kernel[0]}x{kernel[1]} kernel with padding={padding} does not fit into an input of shape {shape}"
        )
    return shape[0], out_channels, height, width


def cuda_plan(x: Tensor, stages: Sequence[Stage]) -> ChainPlan | None:
    """The plan by which `conv_bn_act_chain` runs all of these stages as one chain of the CUDA kernels; None if not."""
    fields = stage_fields(stages)
    name = _resolve("conv_bn_act_chain", x, stages, fields)
    whole = name == "cuda" and served_stages(x, stages, fields)[0] == len(stages)
    return plan_chain(name, x, fields) if whole else None


def run_checked_chain(
    x: Tensor,
    stages: Sequence[Stage],
    residual: Tensor | None,
    *,
    shuffle: bool = False,
    backend: str | None = None,
    op: str = "conv_bn_act_chain",
    strict: bool = True,
) -> Tensor:
    """`conv_bn_act_chain` of arguments that `check_chain` has checked.

    Args:
        op: the operator that was called.
        strict: as in `resolve_backend`.
    """
    fields = stage_fields(stages)
    name = _resolve(op, x, stages, fields, backend, shuffle=shuffle, strict=strict)
    if name == "reference" or only_reference_serves(x):
        return reference.conv_bn_act_chain(x, stages, residual=residual, shuffle=shuffle)
    biased = [stage for stage in stages if stage.params.conv_bias is not None]
    if biased:
        stages = [_without_bias(stage) for stage in stages]
    count = served_stages(x, stages, fields)[0] if name == "cuda" else len(stages)
    if count < len(stages):
        y = _run(name, x, stages[:count], fields[:count], None, backend)
        y = run_checked_chain(y, stages[count:], residual, op=op, strict=False)
    elif shuffle:
        y = _run_shuffled(name, x, stages, fields, backend)
    else:
        y = _run(name, x, stages, fields, residual, backend)
    if biased:
        _add_biases_to_running_means(biased)
        save_checkpoint_sentinel(y)
    return y


def _resolve(
    op: str,
    x: Tensor,
    stages: Sequence[Stage],
    fields: tuple[tuple, ...],
    backend: str | None = None,
    *,
    shuffle: bool = False,
    strict: bool = True,
) -> str:
    """The backend that runs the first of these stages; only `cuda` has no way around what its operator lacks."""

    def refusal(name: str) -> Refusal | None:
        return served_stages(x, stages, fields, shuffle=shuffle)[1] if name == "cuda" else None

    return resolve_backend(op, x, backend, refusal, strict=strict).name


def _run_shuffled(
    name: str, x: Tensor, stages: Sequence[Stage], fields: tuple[tuple, ...], backend: str | None
) -> Tensor:
    """The even channels of x, and the result of the stages on the odd ones."""
    plan = plan_chain(name, x, fields, shuffle=True)
    if plan is not None and len(plan.stages) == len(stages):
        return run_chain(x, stages, plan, residual=None, backend=name)
    return torch.cat((x[:, 0::2], _run(name, x[:, 1::2], stages, fields, None, backend)), dim=1)


def _run(
    name: str,
    x: Tensor,
    stages: Sequence[Stage],
    fields: tuple[tuple, ...],
    residual: Tensor | None,
    backend: str | None,
) -> Tensor:
    """The stages on the backend of this name; PyTorch convolves where its operator cannot.

    backend: the one that the caller named, if any.
    """
    while stages:
        plan = plan_chain(name, x, fields)
        count = 1 if plan is None else len(plan.stages)
        part, stages, fields = stages[:count], stages[count:], fields[count:]
        added = None if stages else residual
        if plan is not None:
            x = run_chain(x, part, plan, residual=added, backend=name)
            continue
        stage = part[0]
        y = _conv2d(x, stage)
        learning = y, stage.params.bn_weight, stage.params.bn_bias
        grads = torch.is_grad_enabled() and any([t.requires_grad for t in learning])
        # the convolution may have a type that only another backend serves, so `backend` is resolved again
        if not stage.training and not grads and resolve_backend("bn_act", y, backend).name == "cpu":
            x = overwrite_with_bn_act(y, stage, added)
        else:
            x = bn_act(y, **reference.norm_arguments(stage), residual=added, backend=backend)
    return x


def _without_bias(stage: Stage) -> Stage:
    """A stage with the same result and gradients, whose convolution has no bias.

    With batch statistics, the mean that BatchNorm subtracts contains the bias, so it cancels. With running statistics,
    it can be subtracted from the running mean instead of being added to the convolution.
    """
    _, bn_weight, bn_bias, mean, var, bias = params = stage.params
    if bias is None:
        return stage
    value = bias.detach().to(bn_bias.dtype)
    if torch.is_grad_enabled() and bias.requires_grad:
        # what is added is zero and brings the gradient: that of bn_bias times this slope
        slope = 0.0 if stage.training or var is None else (bn_weight * torch.rsqrt(var + stage.eps)).detach()
        bn_bias = bn_bias + (bias.to(bn_bias.dtype) - value) * slope
    if not stage.training and mean is not None:
        mean = mean - value
    return stage._replace(params=params._replace(bn_bias=bn_bias, running_mean=mean, conv_bias=None))


@torch.no_grad()
def _add_biases_to_running_means(stages: Sequence[Stage]) -> None:
    """Complete the running means that moved towards the means of convolutions without their biases."""
    for stage in stages:
        _, _, _, mean, _, bias = stage.params
        if stage.training and mean is not None and bias is not None:
            mean.data.add_(bias.to(mean.dtype), alpha=stage.momentum)


def _conv2d(x: Tensor, stage: Stage) -> Tensor:
    weight = stage.params.conv_weight
    if weight.requires_grad or not (x.requires_grad and torch.is_grad_enabled()):
        return F.conv2d(x, weight, None, stage.stride, stage.padding, 1, stage.groups)
    dtype = storage_dtype(x)
    return FrozenConv2d.apply(x.to(dtype), weight.to(dtype), stage.stride, stage.padding, stage.groups)


class FrozenConv2d(torch.autograd.Function):
    """F.conv2d with a frozen weight, without keeping its input; PyTorch's keeps it (pytorch issue 133566).

    The gradient of the input is the transposed convolution of the gradient of the result.
    """

    @staticmethod
    def forward(ctx, x, weight, stride, padding, groups):
        ctx.save_for_backward(weight)
        ctx.settings = stride, padding, groups
        ctx.size = x.shape[2:]
        with torch.autocast(x.device.type, enabled=False):
            return F.conv2d(x, weight, None, stride, padding, 1, groups)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        stride, padding, groups = ctx.settings
        # rows and columns at the far edge of the input that the last stride did not reach
        missing = [
            size - ((out - 1) * stride - 2 * padding + kernel)
            for size, out, kernel in zip(ctx.size, grad.shape[2:], weight.shape[2:], strict=True)
        ]
        with torch.autocast(grad.device.type, enabled=False):
            dx = F.conv_transpose2d(grad, weight, None, stride, padding, missing, groups)
        return dx, None, None, None, None
