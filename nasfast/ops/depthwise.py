"""depthwise_conv2d: a depthwise convolution whose weight may train; fake kernels and autograd."""

import torch
from torch import Tensor

from nasfast.ops import checks, reference
from nasfast.ops.autograd import check_device, only_reference_serves
from nasfast.ops.backends import resolve_backend
from nasfast.ops.registry import operators, register
from nasfast.ops.tensors import storage_dtype

_DTYPES = (torch.float32, torch.bfloat16)


def depthwise_conv2d(
    x: Tensor, weight: Tensor, *, stride: int = 1, dilation: int = 1, backend: str | None = None
) -> Tensor:
    """Convolve each channel with its own filter; padding dilation * (k // 2), no bias.

    y[n,c,h,w] = sum over i, j of weight[c,0,i,j] * x[n,c, stride*h + dilation*(i-k//2), stride*w + dilation*(j-k//2)]

    The native backend sums in float32 for every storage type; it sums the gradient of the weight in float32 over blocks
    of about 64 pixels and in float64 over the blocks. For backward it keeps the weight, and x only when the weight
    requires a gradient. Only the reference has second derivatives. Autocast converts x, as for PyTorch's convolutions,
    but the native backend keeps the weight in float32.

    Args:
        x: (N, C, H, W), channels_last (other strides are copied); float32 or bfloat16, and float16 or float64 on the
            reference.
        weight: (C, 1, k, k), k 3, 5 or 7; float32, or of the type of x.
        stride: 1 or 2.
        dilation: 1 or 2.
        backend: one of `nasfast.ops.BACKENDS`; None lets context, environment and device decide.

    Returns:
        (N, C, ceil(H / stride), ceil(W / stride)), channels_last on the native backend.

    Raises:
        TypeError, ValueError: an argument does not fit.
        RuntimeError: the named backend cannot serve.
    """
    _check_depthwise_conv2d(x, weight, stride=stride, dilation=dilation)
    name = resolve_backend("depthwise_conv2d", x, backend).name
    dtype = storage_dtype(x)
    if name == "reference" or dtype not in _DTYPES or only_reference_serves(x):
        return reference.depthwise_conv2d(x, weight, stride=stride, dilation=dilation)
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    return operators(name).depthwise_conv2d_fwd(x, weight.float().contiguous(), stride, dilation)


def _check_depthwise_conv2d(x: Tensor, weight: Tensor, *, stride: int, dilation: int) -> None:
    """Check the arguments of `nasfast.ops.depthwise_conv2d`."""
    op = "depthwise_conv2d"
    checks.check_map(op, x, stride)
    if dilation not in (1, 2):
        raise ValueError(f"{op}: dilation must be 1 or 2, got {dilation}")
    where = f"{op}: weight"
    checks.check_tensor(where, weight)
    shapes = [(x.shape[1], 1, k, k) for k in (3, 5, 7)]
    if tuple(weight.shape) not in shapes:
        raise ValueError(f"{where} must be one of {shapes} for this x, got {tuple(weight.shape)}")
    checks.check_like(where, weight, x, weight.shape, (torch.float32, x.dtype))


def _fwd_fake(backend, x, weight, stride, dilation):
    check_device(x, weight)
    height, width = ((size - 1) // stride + 1 for size in x.shape[2:])
    return torch.empty((*x.shape[:2], height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _bwd_fake(grad, x, shape, weight, stride, dilation, want_x, want_weight):
    check_device(grad, x, weight)
    dx = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
    return dx if want_x else grad.new_empty(0), torch.empty_like(weight) if want_weight else weight.new_empty(0)


def _setup_context(ctx, inputs, output):
    x, weight, ctx.stride, ctx.dilation = inputs
    ctx.shape = list(x.shape)
    ctx.save_for_backward(weight, x if ctx.needs_input_grad[1] else None)


def _backward(backward_operator, ctx, grad, wants):
    weight, x = ctx.saved_tensors
    grad = grad.contiguous(memory_format=torch.channels_last)
    return backward_operator(grad, x, ctx.shape, weight, ctx.stride, ctx.dilation, *wants[:2])


register(
    "depthwise_conv2d",
    forward_fake=_fwd_fake,
    backward_fake=_bwd_fake,
    setup_context=_setup_context,
    backward=_backward,
)
