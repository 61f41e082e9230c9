"""Every operator in plain PyTorch: the specification, the test oracle, the benchmark baseline and the fallback.

These functions compute in float32 (in float64 for a float64 input) for every storage type, and cast the result once at
the end. Tests compare every other backend with them in float64. In float32 they are as accurate as the PyTorch
functions that they call.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": F.relu,
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "hswish": F.hardswish,  # z * min(max(z + 3, 0), 6) / 6
    "silu": F.silu,  # z / (1 + exp(-z))
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "hsigmoid": F.hardsigmoid,  # min(max(z + 3, 0), 6) / 6
    "sigmoid": torch.sigmoid,
}


class ConvBNParams(NamedTuple):
    """Parameters of one convolution and the BatchNorm behind it.

    conv_weight is (out, in / groups, k, k) and the others are (out,). Running statistics may be None in training, and
    conv_bias is None for a convolution without bias.
    """

    conv_weight: Tensor
    bn_weight: Tensor
    bn_bias: Tensor
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    conv_bias: Tensor | None = None


class Stage(NamedTuple):
    """One convolution, BatchNorm and activation of a chain, with the settings of `conv_bn_act`."""

    params: ConvBNParams
    stride: int = 1
    padding: int = 0
    groups: int = 1
    act: str = "relu6"
    training: bool = True
    momentum: float = 0.1
    eps: float = 1e-5


def norm_arguments(stage: Stage) -> dict[str, Any]:
    """The arguments of `bn_act` that a stage has."""
    params = stage.params
    return {
        "weight": params.bn_weight,
        "bias": params.bn_bias,
        "running_mean": params.running_mean,
        "running_var": params.running_var,
        "act": stage.act,
        "training": stage.training,
        "momentum": stage.momentum,
        "eps": stage.eps,
    }


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
) -> Tensor:
    """Normalise each channel, scale, shift, activate, and add the residual.

    y[n,c,h,w] = act((x[n,c,h,w] - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c]) + residual[n,c,h,w]

    In training mean and var (biased) are those of the batch, and given running statistics move by
    running = (1 - momentum) * running + momentum * batch, with the unbiased variance. Otherwise they are the running
    ones.

    Args:
        x: (N, C, H, W), any floating type.
        weight, bias, running_mean, running_var: (C,).
        residual: (N, C, H, W); the result has the promoted type of x and residual.
        act: a key of ACTIVATIONS.

    Returns:
        (N, C, H, W).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    # PyTorch updates the running statistics in place
    mean, var = (None if running is None else running.to(dtype) for running in (running_mean, running_var))
    # On a GPU this is what PyTorch's modules run, without passes that convert; elsewhere it rounds once.
    exact = x if x.is_cuda else x.to(dtype)
    z = F.batch_norm(exact, mean, var, weight.to(dtype), bias.to(dtype), training, momentum, eps)
    if training:
        with torch.no_grad():
            for running, moved in ((running_mean, mean), (running_var, var)):
                if running is not None and moved is not None and running is not moved:
                    running.data.copy_(moved)
    y = ACTIVATIONS[act](z)
    if residual is None:
        return y.to(x.dtype)
    return (y + residual).to(torch.promote_types(x.dtype, residual.dtype))


def mixed_bn(xs: Sequence[Tensor], gates: Tensor, *, normalize: Sequence[bool], eps: float = 1e-5) -> Tensor:
    """Normalise each channel of the tensors that are flagged, multiply all tensors by their gates, and add them.

    y[n,c,h,w] = sum_k gates[k] * (normalize[k] ? (x_k[n,c,h,w] - mean_k[c]) / sqrt(var_k[c] + eps) : x_k[n,c,h,w])

    mean and var (biased) are those of the batch.

    Args:
        xs: at least one, (N, C, H, W), any floating type.
        gates: (len(xs),).
        normalize: one flag per tensor.

    Returns:
        (N, C, H, W).
    """
    dtype = torch.promote_types(xs[0].dtype, torch.float32)
    terms = []
    for x, gate, normal in zip(xs, gates.to(dtype).unbind(), normalize, strict=True):
        x = x.to(dtype)
        terms.append(gate * (F.batch_norm(x, None, None, None, None, True, 0.0, eps) if normal else x))
    return sum(terms[1:], terms[0]).to(xs[0].dtype)


@torch.no_grad()
def update_running(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, count: int, momentum: float
) -> None:
    """Move the running statistics in place towards mean and biased var, (C,), of a batch with count values.

    Like PyTorch's BatchNorm, it counts no version, hence `data`: a call before in the same forward has saved them.
    """
    if running_mean is not None:
        running_mean.data.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.data.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)


def conv_bn_act_chain(
    x: Tensor, stages: Sequence[Stage], *, residual: Tensor | None = None, shuffle: bool = False
) -> Tensor:
    """Run stages one after another, and add the residual to the result of the last.

    A stage is bn_act(conv2d(x, conv_weight, conv_bias; stride, padding, groups), bn_weight, bn_bias, ...).
    With shuffle: out = cat(even channels of x, chain(odd channels of x)), as in ShuffleNetV2.

    Args:
        x: (N, C, H, W), the input of the first stage.
        stages: at least one stage.
        residual: a tensor of the shape of the result.

    Returns:
        The result of the last stage.
    """
    if shuffle:
        return torch.cat((x[:, 0::2], conv_bn_act_chain(x[:, 1::2], stages)), dim=1)
    for i_stage, stage in enumerate(stages):
        weight, bias = stage.params.conv_weight, stage.params.conv_bias
        y = F.conv2d(x, weight, bias, stage.stride, stage.padding, 1, stage.groups)
        x = bn_act(y, **norm_arguments(stage), residual=residual if i_stage == len(stages) - 1 else None)
    return x


def depthwise_conv2d(x: Tensor, weight: Tensor, *, stride: int = 1, dilation: int = 1) -> Tensor:
    """Convolve each channel of x with its own filter, without bias, padded to keep the size at stride 1.

    y[n,c,h,w] = sum over i, j of weight[c,0,i,j] * x[n,c, stride*h + dilation*(i-k//2), stride*w + dilation*(j-k//2)]

    Args:
        x: (N, C, H, W), any floating type.
        weight: (C, 1, k, k), k odd.

    Returns:
        (N, C, ceil(H / stride), ceil(W / stride)).
    """
    padding = dilation * (weight.shape[2] // 2)
    return F.conv2d(x, weight.to(x.dtype), None, stride, padding, dilation, weight.shape[0])


def pool_3x3(x: Tensor, *, kind: str, stride: int = 1) -> Tensor:
    """Maximum or mean of 3 x 3 windows with padding 1, which does not count. Ties go to the first element.

    Args:
        x: (N, C, H, W), any floating type.
        kind: max or avg.

    Returns:
        (N, C, ceil(H / stride), ceil(W / stride)).
    """
    if kind == "max":
        return F.max_pool2d(x, 3, stride, 1)
    return F.avg_pool2d(x, 3, stride, 1, count_include_pad=False)


def squeeze_excite(
    x: Tensor,
    squeeze_weight: Tensor,
    squeeze_bias: Tensor,
    excite_weight: Tensor,
    excite_bias: Tensor,
    *,
    act: str = "relu",
    gate: str = "hsigmoid",
) -> Tensor:
    """x times one factor per image and channel: gate(W2 act(W1 mean(x) + b1) + b2), with the mean over all pixels.

    Hu et al. 2018 (squeeze-and-excitation).

    Args:
        x: (N, C, H, W), any floating type.
        squeeze_weight, squeeze_bias: W1 (S, C, 1, 1) and b1 (S,).
        excite_weight, excite_bias: W2 (C, S, 1, 1) and b2 (C,).
        act: a key of `ACTIVATIONS`.
        gate: a key of `GATES`.

    Returns:
        (N, C, H, W).
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    w1, b1, w2, b2 = (t.to(exact.dtype) for t in (squeeze_weight, squeeze_bias, excite_weight, excite_bias))
    hidden = ACTIVATIONS[act](F.conv2d(exact.mean((2, 3), keepdim=True), w1, b1))
    return (exact * GATES[gate](F.conv2d(hidden, w2, b2))).to(x.dtype)


def orthogonalize(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Turn Gaussian matrices into Haar-distributed (semi-)orthogonal ones.

    Z = Q R (reduced QR, in float64), and the result is Q diag(s) with s_k = sign(R_kk), sign(0) = +1. Without the signs
    it would not be Haar-distributed, because LAPACK fixes the signs on the diagonal of R. A wide matrix is transposed
    before and after.

    Args:
        matrices: floating tensors (..., m_i, n_i); shapes may differ, and batches and empty tensors are allowed.

    Returns:
        One tensor per input, same shape, dtype and device: orthonormal columns if m_i >= n_i, else orthonormal rows.
    """
    return [orthogonal_factor(z.to(torch.float64)).to(z.dtype).contiguous() for z in matrices]


def orthogonal_factor(z: Tensor) -> Tensor:
    """What `orthogonalize` makes of one entry, computed in its type, float32 or float64; of any strides."""
    tall = z if z.shape[-2] >= z.shape[-1] else z.mT
    q, r = torch.linalg.qr(scale_columns(tall))
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype).unsqueeze(-2)
    return q if tall is z else q.mT


def scale_columns(z: Tensor) -> Tensor:
    """Multiply the columns by powers of two, which does not change Q.

    Without it the norms of very large columns would overflow, and denormal columns would lose bits.
    """
    if z.numel() == 0:
        return z
    exponents = torch.frexp(z.detach().abs().amax(-2, keepdim=True)).exponent
    most = -math.frexp(torch.finfo(z.dtype).tiny)[1]  # a power of two as large as its inverse
    return z * torch.exp2(-exponents.clamp(-most, most).to(z.dtype))
