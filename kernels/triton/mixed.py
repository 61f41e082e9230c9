"""The gated sum of normalised tensors: statistics, sum and backward, for several tensors in one launch.

BatchNorm treats the channels of all normalised tensors, one tensor after the other, as those of one wide tensor whose
weights are the gates: sums, `fold` and `back` have COUNT * C channels. `k` is the place of the first tensor of a launch
among the COUNT tensors. The tensors are rows (R, C), channels_last.
"""

import triton
import triton.language as tl

from .common import (
    backward_fold,
    finish_gradient,
    finish_statistics,
    forward_fold,
    gradient_behind,
    store_gradient_sums,
    store_statistics,
)


@triton.jit
def _tile(R, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The tile of this program: which rows exist, its channels, and offsets and mask of its elements."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return r < R, c, r[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :]


@triton.jit(do_not_specialize=["k"])
def mixed_bn_statistics_kernel(xs, k, sums, R, C, COUNT, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Compute the statistics of the tensors xs and their part of fold (3, COUNT * C)."""
    valid, c, at, mask = _tile(R, C, ROWS, CHANNELS)
    for i in tl.static_range(len(xs)):
        v = tl.load(xs[i] + at, mask=mask, other=0.0).to(tl.float32)
        wide = tl.where(c < C, (k + i) * C + c, COUNT * C)
        store_statistics(sums[0], sums[1], tl.program_id(0), v, valid, wide, COUNT * C)
        block = (k + i) * tl.num_programs(1) + tl.program_id(1)
        finish_statistics(sums, tl.program_id(0), tl.num_programs(0), block, wide, COUNT * C)


@triton.jit(do_not_specialize=["k"])
def mixed_bn_kernel(
    xs, k, fold, gates, subtotal, out, R, C, COUNT,
    NORMALIZE: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out = subtotal (float32; 0 if FIRST) + the sum of the gated tensors xs, normalised by fold if NORMALIZE."""
    valid, c, at, mask = _tile(R, C, ROWS, CHANNELS)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    if not FIRST:
        total += tl.load(subtotal + at, mask=mask, other=0.0)
    for i in tl.static_range(len(xs)):
        v = tl.load(xs[i] + at, mask=mask, other=0.0).to(tl.float32)
        if NORMALIZE:
            center, scale, shift = forward_fold(fold, tl.where(c < C, (k + i) * C + c, COUNT * C), COUNT * C)
            total += (v - center) * scale + shift
        else:
            total += v * tl.load(gates + k + i)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["k"])
def mixed_bn_reduce_kernel(
    grad, xs, k, fold, sums, R, C, COUNT, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Compute affine gradients and back (2, COUNT * C); without NORMALIZE only the sums of grad * x."""
    valid, c, at, mask = _tile(R, C, ROWS, CHANNELS)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(len(xs)):
        d = tl.load(xs[i] + at, mask=mask, other=0.0).to(tl.float32)
        wide = tl.where(c < C, (k + i) * C + c, COUNT * C)
        if NORMALIZE:
            center, _, _ = forward_fold(fold, wide, COUNT * C)
            d -= center
        store_gradient_sums(sums[0], tl.program_id(0), g, d, valid, wide, COUNT * C)
        block = (k + i) * tl.num_programs(1) + tl.program_id(1)
        finish_gradient(sums, tl.program_id(0), tl.num_programs(0), block, wide, COUNT * C)


@triton.jit(do_not_specialize=["k"])
def mixed_bn_backward_kernel(
    grad,
    xs,
    k,
    fold,
    back,
    gates,
    dxs,
    R,
    C,
    COUNT,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute the gradients dxs of the tensors xs, which are read only with NORMALIZE."""
    valid, c, at, mask = _tile(R, C, ROWS, CHANNELS)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(len(dxs)):
        if NORMALIZE:
            wide = tl.where(c < C, (k + i) * C + c, COUNT * C)
            v = tl.load(xs[i] + at, mask=mask, other=0.0)
            center, scale, shift = forward_fold(fold, wide, COUNT * C)
            slope, offset = backward_fold(back, wide, COUNT * C)
            dx = gradient_behind(g, v, center, scale, shift, slope, offset, "identity")
        else:
            dx = g * tl.load(gates + k + i)
        tl.store(dxs[i] + at, dx.to(dxs[i].dtype.element_ty), mask=mask)
