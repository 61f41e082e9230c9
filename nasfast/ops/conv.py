"""Chains of convolution, BatchNorm and activation; conv_bn_act and inverted_residual are such chains."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.ops import checks, conv_native, reference
from nasfast.ops.backends import resolve_backend
from nasfast.ops.bn import bn_act
from nasfast.ops.reference import ConvBNParams, Stage

# Products per output of a dense convolution that is multiplied as gathered patches (a stem's 3 x 3 x 3). Gathering
# copies every input kernel^2 times, which is little only for a few channels; beyond it PyTorch's convolution runs.
_MAX_PATCH = 64


def conv_bn_act(
    x: Tensor,
    conv_weight: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    residual: Tensor | None = None,
    act: str = "relu6",
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Convolve without bias, normalise, activate, and add the residual.

    out = act(bn(conv2d(x, conv_weight; stride, padding, groups))) + residual, bn as in `nasfast.ops.bn_act`.

    Only the gradients asked for are computed: none for a frozen convolution weight, whose input is not kept either. The
    native backend has pointwise, depthwise (k 3, 5, 7, stride 1 or 2, padding k // 2) and few-channel stem convolutions
    of its own; others, and trainable ones, are PyTorch's with the native `bn_act` behind them.

    Args:
        x: (N, Cin, H, W); types and layouts as in `nasfast.ops.bn_act`.
        conv_weight: (Cout, Cin / groups, k, k), of the type of x (autocast may convert both).
        bn_weight, bn_bias, running_mean, running_var: (Cout,), float32.
        stride, padding, groups: of the convolution, one number for both directions.
        residual: (N, Cout, Ho, Wo), added after the activation.
        act, training, momentum, eps, backend: as in `nasfast.ops.bn_act`.

    Returns:
        (N, Cout, Ho, Wo).

    Raises:
        TypeError, ValueError: an argument does not fit; in training also an empty batch or one value per channel.
        RuntimeError: the named backend cannot serve.
    """
    params = ConvBNParams(conv_weight, bn_weight, bn_bias, running_mean, running_var)
    stage = Stage(params, stride, padding, groups, act, training, momentum, eps)
    checks.check_conv_bn_act("conv_bn_act", x, stage, residual)
    return _run("conv_bn_act", x, [stage], residual, backend)


def inverted_residual(
    x: Tensor,
    expand: ConvBNParams | None,
    depthwise: ConvBNParams,
    project: ConvBNParams,
    *,
    stride: int = 1,
    act: str = "relu6",
    residual: bool = False,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Run the MobileNetV2 block: pointwise expansion, depthwise k x k, linear projection, each with BatchNorm.

    a1 = act(bn1(W1 x)) (or x without expand);  a2 = act(bn2(dw(a1; stride, k // 2)));  out = bn3(W3 a2) (+ x)

    Args:
        x: (N, Cin, H, W); types and layouts as in `nasfast.ops.bn_act`.
        expand: conv_weight (hidden, Cin, 1, 1), or None for hidden = Cin.
        depthwise: conv_weight (hidden, 1, k, k), k odd.
        project: conv_weight (Cout, hidden, 1, 1).
        stride: of the depthwise convolution.
        residual: add x; needs stride 1 and Cin == Cout.
        act, training, momentum, eps, backend: as in `nasfast.ops.bn_act`, for all three BatchNorms.

    Returns:
        (N, Cout, ceil(H / stride), ceil(W / stride)).

    Raises:
        TypeError, ValueError: an argument does not fit; in training also an empty batch or one value per channel.
        RuntimeError: the named backend cannot serve.
    """
    checks.check_inverted_residual(
        x, expand, depthwise, project, stride=stride, act=act, residual=residual, training=training, eps=eps
    )
    stages = reference.block_stages(
        expand, depthwise, project, stride=stride, act=act, training=training, momentum=momentum, eps=eps
    )
    return _run("inverted_residual", x, stages, x if residual else None, backend)


def conv_bn_act_chain(
    x: Tensor,
    stages: Sequence[Stage],
    *,
    residual: Tensor | None = None,
    shuffle: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Run conv_bn_act stages one after another, and add the residual to the result of the last.

    With shuffle the stages see the odd channels of x only, and the even ones go in front of their result: the channel
    shuffle, split and concatenation of ShuffleNetV2's unit of stride 1.

    The native backend normalises and activates the result of each stage while the next one reads it, so that every
    convolution's output is written once, and nothing else between the stages is.

    Args:
        x: (N, C, H, W), the input of the first stage; types and layouts as in `nasfast.ops.bn_act`.
        stages: at least one; each says its parameters, stride, padding, groups, act, training, momentum and eps.
        residual: of the shape of the result, added after the last activation.
        shuffle: run on the odd channels; the stages must keep the shape of their input, and there is no residual.
        backend: as in `nasfast.ops.bn_act`.

    Returns:
        The result of the last stage, with shuffle (N, C, H, W): the even channels of x, then that result.

    Raises:
        TypeError, ValueError: an argument does not fit; the message says which stage.
        RuntimeError: the named backend cannot serve.
    """
    checks.check_chain("conv_bn_act_chain", x, stages, residual, shuffle)
    return _run("conv_bn_act_chain", x, stages, residual, backend, shuffle=shuffle)


def _run(
    op: str,
    x: Tensor,
    stages: Sequence[Stage],
    residual: Tensor | None,
    backend: str | None,
    *,
    shuffle: bool = False,
) -> Tensor:
    name = resolve_backend(op, x, backend).name
    if name == "reference":
        return reference.conv_bn_act_chain(x, stages, residual=residual, shuffle=shuffle)
    if shuffle:
        odd = x[:, 1::2]
        if _native_count(name, odd, stages) == len(stages):
            return conv_native.conv_bn_act(x, stages, residual=None, shuffle=True, backend=name)
        return torch.cat((x[:, 0::2], _run(op, odd, stages, None, backend)), dim=1)
    while stages:
        count = _native_count(name, x, stages)
        here = stages[: max(count, 1)]
        added = residual if len(here) == len(stages) else None
        if count:
            x = conv_native.conv_bn_act(x, here, residual=added, backend=name)
        else:
            # the convolution's type may be one that only another backend has
            x = _by_torch_conv(x, here, residual=added, backend=backend)
        stages = stages[len(here) :]
    return x


def _native_count(backend: str, x: Tensor, stages: Sequence[Stage]) -> int:
    """How many of the stages the backend's operator can run on x as one chain."""
    if x.numel() == 0:
        return 0
    for i_stage, stage in enumerate(stages):
        if not _is_native(backend, x, stage, first=i_stage == 0):
            return i_stage
    return len(stages)


def _is_native(backend: str, x: Tensor, stage: Stage, *, first: bool) -> bool:
    """Whether the backend's operator has the stage, as the first of a chain on x or behind others."""
    weight = stage.params.conv_weight
    grads = torch.is_grad_enabled()
    if weight.requires_grad and grads:
        return False
    if not {conv_native.storage_dtype(x), weight.dtype} <= conv_native.DTYPES[backend]:
        return False
    place = native_place(weight, stage.stride, stage.padding, stage.groups)
    if place == "first":
        # a strided pointwise stage runs on the pixels it keeps; a stem does not need the input gradient that the native
        # dense one lacks
        return first and (weight.shape[2] == 1 or not (x.requires_grad and grads))
    return place == "any"


def native_place(weight: Tensor, stride: int, padding: int, groups: int) -> str | None:
    """Where in a chain the native operator has this convolution: any place, only first, or none (None)."""
    out_channels, per_group, kernel, kernel_width = weight.shape
    if kernel != kernel_width or kernel % 2 == 0 or padding != kernel // 2:
        return None
    if groups == out_channels and per_group == 1 and (groups > 1 or kernel > 1):
        return "any" if kernel in (3, 5, 7) and stride in (1, 2) else None
    if groups > 1:
        return None
    if kernel == 1:
        return "any" if stride == 1 else "first"
    return "first" if weight[0].numel() <= _MAX_PATCH else None


def _by_torch_conv(x: Tensor, stages: Sequence[Stage], *, residual: Tensor | None, backend: str | None) -> Tensor:
    """One stage on PyTorch's convolution and `bn_act`."""
    (stage,) = stages
    params = stage.params
    y = _conv2d(x, stage)
    return bn_act(
        y, params.bn_weight, params.bn_bias,
        running_mean=params.running_mean, running_var=params.running_var, residual=residual,
        act=stage.act, training=stage.training, momentum=stage.momentum, eps=stage.eps, backend=backend,
    )  # fmt: skip


def _conv2d(x: Tensor, stage: Stage) -> Tensor:
    weight = stage.params.conv_weight
    if weight.requires_grad or not (x.requires_grad and torch.is_grad_enabled()):
        return F.conv2d(x, weight, None, stage.stride, stage.padding, 1, stage.groups)
    dtype = conv_native.storage_dtype(x)
    return _FrozenConv2d.apply(x.to(dtype), weight.to(dtype), stage.stride, stage.padding, stage.groups)


class _FrozenConv2d(torch.autograd.Function):
    """F.conv2d with a frozen weight, which does not keep its input as PyTorch's does (pytorch issue 133566).

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
        # rows and columns at the far edge that no output of the forward reached by a whole stride
        missing = [
            size - ((out - 1) * stride - 2 * padding + kernel)
            for size, out, kernel in zip(ctx.size, grad.shape[2:], weight.shape[2:], strict=True)
        ]
        with torch.autocast(grad.device.type, enabled=False):
            dx = F.conv_transpose2d(grad, weight, None, stride, padding, missing, groups)
        return dx, None, None, None, None
