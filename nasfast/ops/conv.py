"""Chains of convolution, BatchNorm and activation; conv_bn_act and inverted_residual are such chains."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from nasfast.ops import checks, reference
from nasfast.ops.backends import resolve_backend
from nasfast.ops.bn import bn_act
from nasfast.ops.reference import ConvBNParams, Stage


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

    Only the gradients asked for are computed: none for a frozen convolution weight.

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
    x: Tensor, stages: Sequence[Stage], *, residual: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Run conv_bn_act stages one after another, and add the residual to the result of the last.

    The native backend normalises and activates the result of each stage while the next one reads it, so that every
    convolution's output is written once, and nothing else between the stages is.

    Args:
        x: (N, C, H, W), the input of the first stage; types and layouts as in `nasfast.ops.bn_act`.
        stages: at least one; each says its parameters, stride, padding, groups, act, training, momentum and eps.
        residual: of the shape of the result, added after the last activation.
        backend: as in `nasfast.ops.bn_act`.

    Returns:
        The result of the last stage.

    Raises:
        TypeError, ValueError: an argument does not fit; the message says which stage.
        RuntimeError: the named backend cannot serve.
    """
    checks.check_chain("conv_bn_act_chain", x, stages, residual)
    return _run("conv_bn_act_chain", x, stages, residual, backend)


def _run(op: str, x: Tensor, stages: Sequence[Stage], residual: Tensor | None, backend: str | None) -> Tensor:
    if resolve_backend(op, x, backend).name == "reference":
        return reference.conv_bn_act_chain(x, stages, residual=residual)
    for i_stage, stage in enumerate(stages):
        x = _vendor(x, stage, residual if i_stage == len(stages) - 1 else None, backend)
    return x


def _vendor(x: Tensor, stage: Stage, residual: Tensor | None, backend: str | None) -> Tensor:
    """One stage by PyTorch's convolution and `bn_act`."""
    params = stage.params
    y = F.conv2d(x, params.conv_weight, None, stage.stride, stage.padding, 1, stage.groups)
    return bn_act(
        y, params.bn_weight, params.bn_bias,
        running_mean=params.running_mean, running_var=params.running_var, residual=residual,
        act=stage.act, training=stage.training, momentum=stage.momentum, eps=stage.eps, backend=backend,
    )  # fmt: skip
