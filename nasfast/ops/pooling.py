"""pool_3x3: maximum and mean of 3 x 3 windows; fake kernels and autograd."""

import torch
from torch import Tensor

from nasfast.ops import checks, reference
from nasfast.ops.autograd import check_device, only_reference_serves
from nasfast.ops.backends import resolve_backend
from nasfast.ops.registry import operators, register


def pool_3x3(x: Tensor, *, kind: str, stride: int = 1, backend: str | None = None) -> Tensor:
    """Maximum or mean of each 3 x 3 window with padding 1; the padding does not count.

    The gradient of a maximum goes to the first of equal elements, row by row. For backward the native backend keeps one
    byte per element of a maximum, and nothing for a mean. Only the reference has second derivatives.

    Args:
        x: (N, C, H, W), channels_last (other strides are copied); float32 or bfloat16, and float16 or float64 on the
            reference.
        kind: max or avg.
        stride: 1 or 2.
        backend: one of `nasfast.ops.BACKENDS`; None lets context, environment and device decide.

    Returns:
        (N, C, ceil(H / stride), ceil(W / stride)) of the type of x, channels_last on the native backend.

    Raises:
        TypeError, ValueError: an argument does not fit.
        RuntimeError: the named backend cannot serve.
    """
    _check_pool_3x3(x, kind=kind, stride=stride)
    name = resolve_backend("pool_3x3", x, backend).name
    if name == "reference" or only_reference_serves(x):
        return reference.pool_3x3(x, kind=kind, stride=stride)
    keep = torch.is_grad_enabled() and x.requires_grad
    return operators(name).pool_3x3_fwd(x.contiguous(memory_format=torch.channels_last), kind, stride, keep)[0]


def _check_pool_3x3(x: Tensor, *, kind: str, stride: int) -> None:
    """Check the arguments of `nasfast.ops.pool_3x3`."""
    op = "pool_3x3"
    checks.check_map(op, x, stride)
    if kind not in ("max", "avg"):
        raise ValueError(f"{op}: kind must be max or avg, got {kind!r}")


def _fwd_fake(backend, x, kind, stride, keep):
    height, width = ((size - 1) // stride + 1 for size in x.shape[2:])
    y = torch.empty((*x.shape[:2], height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    index = torch.empty_like(y, dtype=torch.uint8) if keep and kind == "max" else x.new_empty(0, dtype=torch.uint8)
    return y, index


def _bwd_fake(grad, index, shape, kind, stride):
    check_device(grad, index)
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)


def _setup_context(ctx, inputs, output):
    x, ctx.kind, ctx.stride, keep = inputs
    _, index = output
    if not keep:
        raise RuntimeError("pool_3x3_fwd: a gradient is wanted, so `keep` must be true")
    ctx.shape = list(x.shape)
    ctx.save_for_backward(index)


def _backward(backward_operator, ctx, grad, wants):
    (index,) = ctx.saved_tensors
    grad = grad.contiguous(memory_format=torch.channels_last)
    return [backward_operator(grad, index, ctx.shape, ctx.kind, ctx.stride)]


register(
    "pool_3x3",
    forward_fake=_fwd_fake,
    backward_fake=_bwd_fake,
    setup_context=_setup_context,
    backward=_backward,
)
