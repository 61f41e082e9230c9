"""BatchNorm on its own: statistics, application, and backward; and the coefficients of given statistics.

A tensor of pixels is addressed as (image, pixel, channel) with three strides, so NHWC, NCHW and every second channel
are the same code. R = images * pixels.
"""

import triton
import triton.language as tl

from .common import (
    backward_fold,
    finish_gradient,
    finish_statistics,
    forward_fold,
    gradient_before,
    gradient_behind,
    normalize,
    store_fold,
    store_gradient_sums,
    store_statistics,
)


@triton.jit
def _tile(R, PIXELS, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Image, pixel and channel of the elements of this program's tile, and which rows exist."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return r // PIXELS, r % PIXELS, c, r < R


@triton.jit
def bn_statistics_kernel(x, sxn, sxp, sxc, sums, R, PIXELS, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """fold (3, C) of the statistics of x."""
    n, p, c, valid = _tile(R, PIXELS, C, ROWS, CHANNELS)
    at = n[:, None] * sxn + p[:, None] * sxp + c[None, :].to(tl.int64) * sxc
    v = tl.load(x + at, mask=valid[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
    store_statistics(sums[0], sums[1], tl.program_id(0), v, valid, c, C)
    finish_statistics(sums, tl.program_id(0), tl.num_programs(0), tl.program_id(1), c, C)


@triton.jit
def bn_fold_kernel(
    running_mean, running_var, statistics, gamma, beta, eps, fold, C, RUNNING: tl.constexpr, CHANNELS: tl.constexpr
):
    """fold (3, C) of statistics (2, C), into which RUNNING copies the running statistics first."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = c < C
    if RUNNING:
        mean = tl.load(running_mean + c, mask=exists, other=0.0).to(tl.float64)
        var = tl.load(running_var + c, mask=exists, other=0.0)
        tl.store(statistics + c, mean, mask=exists)
        tl.store(statistics + C + c, var.to(tl.float64), mask=exists)
    else:
        mean = tl.load(statistics + c, mask=exists, other=0.0)
        var = tl.load(statistics + C + c, mask=exists, other=0.0).to(tl.float32)
    center = mean.to(tl.float32)
    left = (mean - center.to(tl.float64)).to(tl.float32)
    store_fold(center, left, var, gamma, beta, fold, eps, c, C)


@triton.jit
def bn_act_kernel(
    y, syn, syp, syc, fold, residual, srn, srp, src, out, son, sop, soc, even, R, PIXELS, C,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, SHUFFLE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out = act(bn(y)) (+ residual). SHUFFLE: the even channels of `even` (rows of 2 C) go C channels before out."""
    n, p, c, valid = _tile(R, PIXELS, C, ROWS, CHANNELS)
    mask = valid[:, None] & (c < C)[None, :]
    wide = c[None, :].to(tl.int64)
    v = tl.load(y + n[:, None] * syn + p[:, None] * syp + wide * syc, mask=mask, other=0.0)
    center, scale, shift = forward_fold(fold, c, C)
    z = normalize(v, center, scale, shift, ACT)
    if RESIDUAL:
        z += tl.load(residual + n[:, None] * srn + p[:, None] * srp + wide * src, mask=mask, other=0.0).to(tl.float32)
    at = n[:, None] * son + p[:, None] * sop + wide * soc
    tl.store(out + at, z.to(out.dtype.element_ty), mask=mask)
    if SHUFFLE:
        left = tl.load(even + (n[:, None] * PIXELS + p[:, None]) * 2 * C + 2 * wide, mask=mask)
        tl.store(out + at - C, left, mask=mask)


@triton.jit
def bn_act_reduce_kernel(
    grad, sgn, sgp, sgc, y, syn, syp, syc, fold, sums, R, PIXELS, C,
    ACT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Affine gradients and back (2, C), from the gradient of act(bn(y))."""
    n, p, c, valid = _tile(R, PIXELS, C, ROWS, CHANNELS)
    mask = valid[:, None] & (c < C)[None, :]
    wide = c[None, :].to(tl.int64)
    g = tl.load(grad + n[:, None] * sgn + p[:, None] * sgp + wide * sgc, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(y + n[:, None] * syn + p[:, None] * syp + wide * syc, mask=mask, other=0.0)
    dz, d = gradient_before(g, v, fold, c, C, ACT)
    store_gradient_sums(sums[0], tl.program_id(0), dz, d, valid, c, C)
    finish_gradient(sums, tl.program_id(0), tl.num_programs(0), tl.program_id(1), c, C)


@triton.jit
def bn_act_backward_kernel(
    grad, sgn, sgp, sgc, y, syn, syp, syc, fold, back, dx, sxn, sxp, sxc, R, PIXELS, C,
    ACT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx, the gradient behind BatchNorm."""
    n, p, c, valid = _tile(R, PIXELS, C, ROWS, CHANNELS)
    mask = valid[:, None] & (c < C)[None, :]
    wide = c[None, :].to(tl.int64)
    g = tl.load(grad + n[:, None] * sgn + p[:, None] * sgp + wide * sgc, mask=mask, other=0.0)
    v = tl.load(y + n[:, None] * syn + p[:, None] * syp + wide * syc, mask=mask, other=0.0)
    center, scale, shift = forward_fold(fold, c, C)
    slope, offset = backward_fold(back, c, C)
    dy = gradient_behind(g, v, center, scale, shift, slope, offset, ACT)
    tl.store(dx + n[:, None] * sxn + p[:, None] * sxp + wide * sxc, dy.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def shuffle_merge_kernel(grad, dx, R, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The even channels of dx (R, 2 C) from the first C of grad (R, 2 C); the first stage writes the odd ones."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (r < R)[:, None] & (c < C)[None, :]
    at = r[:, None] * 2 * C
    tl.store(dx + at + 2 * c[None, :], tl.load(grad + at + c[None, :], mask=mask), mask=mask)
