"""Functions between chains whose results and gradients are written once, in channels_last.

PyTorch's own write the gradient of a mean and of strided pixels twice, and in fresh pages of memory. On a CPU, results
here have memory of the pool that the operators use (docs/method.md 6, Memory).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nasfast.ops import _native  # noqa: F401  # it loads the extension, which defines the operator
from nasfast.ops.autograd import once_per_gradient, transformed

# false without the extension
HAS_POOL = hasattr(torch.ops.nasfast, "empty_nhwc")


def empty_nhwc(shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised tensor (N, C, H, W) in channels_last, of the type and on the device of `like`."""
    if HAS_POOL and like.device.type == "cpu" and like.dtype in (torch.float32, torch.bfloat16):
        return torch.ops.nasfast.empty_nhwc(like, shape)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def pixel_mean(x: Tensor) -> Tensor:
    """The mean over the pixels: (N, C, H, W) -> (N, C), equal to `x.mean((2, 3))` in value and gradient."""
    return x.mean((2, 3)) if transformed() else _PixelMean.apply(x)


def subsample(x: Tensor, stride: int) -> Tensor:
    """Every stride-th pixel of x in both directions: (N, C, H, W) -> (N, C, ceil(H / stride), ceil(W / stride))."""
    return x[:, :, ::stride, ::stride] if transformed() else _Subsample.apply(x, stride)


def concatenate(a: Tensor, b: Tensor) -> Tensor:
    """The channels of a, then those of b: two of (N, *, H, W), of one type."""
    if a.dtype != b.dtype:
        raise TypeError(f"concatenate: two tensors of one type, got {a.dtype} and {b.dtype}")
    return torch.cat((a, b), 1) if transformed() else _Concatenate.apply(a, b)


class _PixelMean(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.mean((2, 3))

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.shape = x.shape
        ctx.nhwc = x.is_contiguous(memory_format=torch.channels_last)

    @staticmethod
    @once_per_gradient
    def backward(ctx, grad):
        pixels = ctx.shape[2] * ctx.shape[3]
        wide = grad[:, :, None, None].expand(ctx.shape)
        if torch.is_grad_enabled() or not ctx.nhwc or transformed():  # under create_graph the gradient has a history
            return wide / pixels
        return torch.div(wide, pixels, out=empty_nhwc(ctx.shape, grad))


class _Subsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stride):
        ctx.shape, ctx.stride = x.shape, stride
        return x[:, :, ::stride, ::stride].clone(memory_format=torch.channels_last)

    @staticmethod
    @once_per_gradient
    def backward(ctx, grad):
        dx = empty_nhwc(ctx.shape, grad).zero_()
        dx[:, :, :: ctx.stride, :: ctx.stride] = grad
        return dx, None


class _Concatenate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.channels = a.shape[1], b.shape[1]
        y = empty_nhwc((a.shape[0], sum(ctx.channels), *a.shape[2:]), a)
        return torch.cat((a, b), 1, out=y)

    @staticmethod
    def backward(ctx, grad):
        return grad.split(ctx.channels, 1)


if HAS_POOL:
    torch.library.register_fake(
        "nasfast::empty_nhwc",
        lambda like, shape: like.new_empty(shape).to(memory_format=torch.channels_last),
    )
