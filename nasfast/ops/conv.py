"""conv_bn_act and inverted_residual: convolutions with their BatchNorm as one operator each."""

import torch.nn.functional as F
from torch import Tensor

from nasfast.ops import checks, reference
from nasfast.ops.backends import resolve_backend
from nasfast.ops.bn import bn_act
from nasfast.ops.reference import ConvBNParams


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
    settings = {
        "running_mean": running_mean, "running_var": running_var, "residual": residual,
        "act": act, "training": training, "eps": eps,
    }  # fmt: skip
    checks.check_conv_bn_act(
        x, conv_weight, bn_weight, bn_bias, stride=stride, padding=padding, groups=groups, **settings
    )
    settings["momentum"] = momentum
    if resolve_backend("conv_bn_act", x, backend).name == "reference":
        return reference.conv_bn_act(
            x, conv_weight, bn_weight, bn_bias, stride=stride, padding=padding, groups=groups, **settings
        )
    y = F.conv2d(x, conv_weight, None, stride, padding, 1, groups)
    return bn_act(y, bn_weight, bn_bias, backend=backend, **settings)


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
    settings = {"act": act, "training": training, "momentum": momentum, "eps": eps}
    if resolve_backend("inverted_residual", x, backend).name == "reference":
        return reference.inverted_residual(x, expand, depthwise, project, stride=stride, residual=residual, **settings)
    hidden = x
    if expand is not None:
        hidden = _unit(x, expand, backend=backend, **settings)
    hidden = _unit(hidden, depthwise, stride=stride, groups=hidden.shape[1], backend=backend, **settings)
    settings["act"] = "identity"
    return _unit(hidden, project, residual=x if residual else None, backend=backend, **settings)


def _unit(x: Tensor, params: ConvBNParams, **settings) -> Tensor:
    return conv_bn_act(
        x, params.conv_weight, params.bn_weight, params.bn_bias,
        padding=params.conv_weight.shape[-1] // 2,
        running_mean=params.running_mean, running_var=params.running_var, **settings,
    )  # fmt: skip
