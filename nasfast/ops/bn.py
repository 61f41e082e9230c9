"""bn_act: BatchNorm, activation and residual in one operator; fake kernels and autograd."""

import torch
from torch import Tensor

from nasfast.ops import _native, checks, reference
from nasfast.ops.autograd import check_device, only_reference_serves, save_checkpoint_sentinel
from nasfast.ops.backends import resolve_backend
from nasfast.ops.reference import Stage
from nasfast.ops.registry import operators, register


def bn_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    residual: Tensor | None = None,
    act: str = "relu6",
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Normalise each channel, scale, shift, activate, and add the residual.

    y[n,c,h,w] = act((x[n,c,h,w] - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c]) + residual[n,c,h,w]

    In training mean and var (biased) are those of the batch, and given running statistics move by
    running = (1 - momentum) * running + momentum * batch, with the unbiased variance. Otherwise they are the running
    ones.
    For backward the native backends save only x and two numbers per channel, and nothing if no gradient is needed. Only
    the reference has second derivatives.

    Args:
        x: (N, C, H, W), contiguous or channels_last (other strides are copied); float32 or bfloat16, and float16 or
            float64 on the reference.
        weight, bias, running_mean, running_var: (C,), float32 (float64 allowed with a float64 x).
        residual: (N, C, H, W), added after the activation; the result has the promoted type of x and residual.
        act: identity, relu, relu6, tanh, hswish or silu.
        training: batch statistics (True) or running statistics (False).
        momentum: weight of the new batch in the running statistics.
        eps: added to the variance, positive.
        backend: one of `nasfast.ops.BACKENDS`; None lets context, environment and device decide.

    Returns:
        (N, C, H, W), in the memory format of x; channels_last from Triton.

    Raises:
        TypeError, ValueError: an argument does not fit; in training also an empty batch or one value per channel.
        RuntimeError: the named backend cannot serve.
    """
    norm = weight, bias, running_mean, running_var
    _check_bn_act(x, norm, residual, act=act, training=training, eps=eps)
    name = resolve_backend("bn_act", x, backend).name
    if name == "reference" or only_reference_serves(x):
        return reference.bn_act(
            x,
            weight,
            bias,
            running_mean=running_mean,
            running_var=running_var,
            residual=residual,
            act=act,
            training=training,
            momentum=momentum,
            eps=eps,
        )
    if name == "triton" or not x.is_contiguous():  # the Triton kernels know one layout
        x = x.contiguous(memory_format=torch.channels_last)
    # A kernel has one storage type. PyTorch adds a residual of another type, with its promotion rules.
    fused = residual if residual is not None and residual.dtype == x.dtype else None
    y, mean, var = operators(name).bn_act_fwd(
        x,
        weight.contiguous(),
        bias.contiguous(),
        None if fused is None else _same_layout(fused, x),
        None if training or running_mean is None else running_mean.contiguous(),
        None if training or running_var is None else running_var.contiguous(),
        eps,
        act,
    )
    if training and running_mean is not None:
        reference.update_running(running_mean, running_var, mean, var, x.numel() // x.shape[1], momentum)
        save_checkpoint_sentinel(y)
    return y if residual is fused else y + residual


def _check_bn_act(
    x: Tensor, norm: checks.Norm, residual: Tensor | None, *, act: str, training: bool, eps: float
) -> None:
    """Check the arguments of `nasfast.ops.bn_act`."""
    op = "bn_act"
    checks.check_input(op, x)
    checks.check_settings(op, act, eps)
    checks.check_bn(op, "", x, x.shape[1], norm, training)
    checks.check_result(op, x, tuple(x.shape), residual, training)


def overwrite_with_bn_act(x: Tensor, stage: Stage, residual: Tensor | None) -> Tensor:
    """bn_act with running statistics on the CPU, without gradients, written over x, the output of the convolution.

    Args:
        x: (N, C, H, W), contiguous or channels_last, float32 or bfloat16.
        stage: its BatchNorm and activation.
        residual: of the shape of x.
    """
    _, weight, bias, mean, var, _ = stage.params
    assert mean is not None and var is not None  # checked: the stage has running statistics
    fused = residual if residual is not None and residual.dtype == x.dtype else None
    torch.ops.nasfast.bn_act_running_(
        x,
        weight.contiguous(),
        bias.contiguous(),
        None if fused is None else _same_layout(fused, x),
        mean.contiguous(),
        var.contiguous(),
        stage.eps,
        stage.act,
    )
    return x if residual is None or fused is not None else x + residual


def _same_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the memory format of `like`, which is dense."""
    if like.is_contiguous():
        return tensor.contiguous()
    return tensor.contiguous(memory_format=torch.channels_last)


def _fwd_fake(backend, x, weight, bias, residual, running_mean, running_var, eps, act):
    check_device(x, weight, bias, residual, running_mean, running_var)
    statistics = x.shape[1] if running_mean is None else 0
    mean = x.new_empty(statistics, dtype=torch.float64)
    return torch.empty_like(x), mean, torch.empty_like(mean)


def _bwd_fake(grad, x, weight, bias, mean, var, eps, act, batch_statistics, want_x, want_weight, want_bias):
    check_device(grad, x, weight, bias, mean, var)
    channels = x.shape[1]
    return (
        torch.empty_like(x) if want_x else x.new_empty(0),
        weight.new_empty(channels if want_weight else 0),
        bias.new_empty(channels if want_bias else 0),
    )


def _setup_context(ctx, inputs, output):
    x, weight, bias, _, running_mean, running_var, ctx.eps, ctx.act = inputs
    _, mean, var = output
    ctx.batch_statistics = running_mean is None
    if any(ctx.needs_input_grad[:3]):
        statistics = (mean, var) if ctx.batch_statistics else (running_mean, running_var)
        ctx.save_for_backward(x, weight, bias, *statistics)


def _backward(backward_operator, ctx, grad, wants):
    gradients = [None] * 3
    if any(wants[:3]):
        x, *norm = ctx.saved_tensors
        settings = ctx.eps, ctx.act, ctx.batch_statistics
        gradients = backward_operator(_same_layout(grad, x), x, *norm, *settings, *wants[:3])
    return *gradients, grad


register(
    "bn_act",
    forward_fake=_fwd_fake,
    backward_fake=_bwd_fake,
    setup_context=_setup_context,
    backward=_backward,
)

if _native.extension is not None:

    @torch.library.register_fake("nasfast::bn_act_running_")
    def _running_fake(x, weight, bias, residual, running_mean, running_var, eps, act):
        check_device(x, weight, bias, residual, running_mean, running_var)
