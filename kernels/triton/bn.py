"""BatchNorm on its own: statistics, their finalisation, application, and backward.

A tensor of pixels is addressed as (image, pixel, channel) with three strides, so NHWC, NCHW and every second channel
are the same code. R = images * pixels.
"""

import triton
import triton.language as tl

from .common import (
    backward_fold,
    forward_fold,
    gradient_before,
    gradient_behind,
    normalize,
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
def bn_statistics_kernel(x, sxn, sxp, sxc, partial, R, PIXELS, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """partial (row blocks, 4, C) of x."""
    n, p, c, valid = _tile(R, PIXELS, C, ROWS, CHANNELS)
    at = n[:, None] * sxn + p[:, None] * sxp + c[None, :].to(tl.int64) * sxc
    v = tl.load(x + at, mask=valid[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
    store_statistics(partial, tl.program_id(0), v, valid, c, C)


@triton.jit
def _mean_of(at, C, there):
    """Means of partial statistics, from their two parts."""
    large = tl.load(at, mask=there, other=0.0).to(tl.float64)
    return large + tl.load(at + C, mask=there, other=0.0).to(tl.float64)


@triton.jit
def bn_finalize_kernel(
    partial, programs, statistics, running_mean, running_var, gamma, beta, eps, fold, C,
    BATCH: tl.constexpr, PROGRAMS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Mean and biased variance into statistics (2, C), float64, and fold with its backward rows zero.

    BATCH is "partial" (from partial (programs, 4, C)), "running" (the running statistics are copied), or "known"
    (statistics are there already).
    """
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = c < C
    if BATCH == "partial":
        count = tl.zeros((CHANNELS,), tl.float64)
        total = tl.zeros((CHANNELS,), tl.float64)
        for first in range(0, programs, PROGRAMS):
            index = first + tl.arange(0, PROGRAMS)
            at = partial + index[:, None] * 4 * C + c[None, :]
            there = (index < programs)[:, None] & exists[None, :]
            here = tl.load(at + 3 * C, mask=there, other=0.0).to(tl.float64)
            total += tl.sum(here * _mean_of(at, C, there), 0)
            count += tl.sum(here, 0)
        count = tl.where(exists, count, 1.0)
        mean = total / count
        squares = tl.zeros((CHANNELS,), tl.float64)
        for first in range(0, programs, PROGRAMS):
            index = first + tl.arange(0, PROGRAMS)
            at = partial + index[:, None] * 4 * C + c[None, :]
            there = (index < programs)[:, None] & exists[None, :]
            here = tl.load(at + 3 * C, mask=there, other=0.0).to(tl.float64)
            distance = _mean_of(at, C, there) - mean[None, :]
            m2 = tl.load(at + 2 * C, mask=there, other=0.0).to(tl.float64)
            squares += tl.sum(m2 + tl.where(there, here * distance * distance, 0.0), 0)
        var = squares / count
    elif BATCH == "running":
        mean = tl.load(running_mean + c, mask=exists, other=0.0).to(tl.float64)
        var = tl.load(running_var + c, mask=exists, other=0.0).to(tl.float64)
    else:
        mean = tl.load(statistics + c, mask=exists, other=0.0)
        var = tl.load(statistics + C + c, mask=exists, other=0.0)
    if BATCH != "known":
        tl.store(statistics + c, mean, mask=exists)
        tl.store(statistics + C + c, var, mask=exists)
    scale = tl.load(gamma + c, mask=exists, other=0.0).to(tl.float64) / tl.sqrt(var + eps)
    center = mean.to(tl.float32)
    # what rounding the mean left out goes into the shift
    shift = tl.load(beta + c, mask=exists, other=0.0).to(tl.float64) - (mean - center.to(tl.float64)) * scale
    tl.store(fold + c, center, mask=exists)
    tl.store(fold + C + c, scale.to(tl.float32), mask=exists)
    tl.store(fold + 2 * C + c, shift.to(tl.float32), mask=exists)
    tl.store(fold + 3 * C + c, tl.zeros_like(center), mask=exists)
    tl.store(fold + 4 * C + c, tl.zeros_like(center), mask=exists)


@triton.jit
def bn_backward_finalize_kernel(
    partial, programs, statistics, gamma, eps, dgamma, dbeta, fold, R, C,
    BATCH: tl.constexpr, WANT_GAMMA: tl.constexpr, WANT_BETA: tl.constexpr,
    PROGRAMS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Affine gradients from partial (programs, 2, C) of dz and dz * (y - center), and the backward rows of fold.

    BATCH: whether mean and variance are those of the R rows, and so depend on them.
    """
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = c < C
    sum_dz = tl.zeros((CHANNELS,), tl.float64)
    sum_dz_d = tl.zeros((CHANNELS,), tl.float64)
    for first in range(0, programs, PROGRAMS):
        index = first + tl.arange(0, PROGRAMS)
        at = partial + index[:, None] * 2 * C + c[None, :]
        there = (index < programs)[:, None] & exists[None, :]
        sum_dz += tl.sum(tl.load(at, mask=there, other=0.0).to(tl.float64), 0)
        sum_dz_d += tl.sum(tl.load(at + C, mask=there, other=0.0).to(tl.float64), 0)
    mean = tl.load(statistics + c, mask=exists, other=0.0)
    var = tl.load(statistics + C + c, mask=exists, other=0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    rest = mean - mean.to(tl.float32).to(tl.float64)
    sum_dz_xhat = (sum_dz_d - rest * sum_dz) * rstd
    if WANT_GAMMA:
        tl.store(dgamma + c, sum_dz_xhat.to(tl.float32), mask=exists)
    if WANT_BETA:
        tl.store(dbeta + c, sum_dz.to(tl.float32), mask=exists)
    slope = tl.zeros((CHANNELS,), tl.float64)
    offset = tl.zeros((CHANNELS,), tl.float64)
    if BATCH:
        # dy = scale * (dz - mean(dz) - xhat * mean(dz * xhat))
        scale = tl.load(gamma + c, mask=exists, other=0.0).to(tl.float64) * rstd
        slope = -scale * rstd * sum_dz_xhat / R
        offset = -scale * sum_dz / R - slope * rest
    tl.store(fold + 3 * C + c, slope.to(tl.float32), mask=exists)
    tl.store(fold + 4 * C + c, offset.to(tl.float32), mask=exists)


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
    grad, sgn, sgp, sgc, y, syn, syp, syc, fold, partial, R, PIXELS, C,
    ACT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """partial (row blocks, 2, C): sums of dz and dz * (y - center), from the gradient of act(bn(y))."""
    n, p, c, valid = _tile(R, PIXELS, C, ROWS, CHANNELS)
    mask = valid[:, None] & (c < C)[None, :]
    wide = c[None, :].to(tl.int64)
    g = tl.load(grad + n[:, None] * sgn + p[:, None] * sgp + wide * sgc, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(y + n[:, None] * syn + p[:, None] * syp + wide * syc, mask=mask, other=0.0)
    dz, d = gradient_before(g, v, fold, c, C, ACT)
    store_gradient_sums(partial, tl.program_id(0), dz, d, valid, c, C)


@triton.jit
def bn_act_backward_kernel(
    grad, sgn, sgp, sgc, y, syn, syp, syc, fold, dx, sxn, sxp, sxc, R, PIXELS, C,
    ACT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx, the gradient behind BatchNorm."""
    n, p, c, valid = _tile(R, PIXELS, C, ROWS, CHANNELS)
    mask = valid[:, None] & (c < C)[None, :]
    wide = c[None, :].to(tl.int64)
    g = tl.load(grad + n[:, None] * sgn + p[:, None] * sgp + wide * sgc, mask=mask, other=0.0)
    v = tl.load(y + n[:, None] * syn + p[:, None] * syp + wide * syc, mask=mask, other=0.0)
    center, scale, shift = forward_fold(fold, c, C)
    slope, offset = backward_fold(fold, c, C)
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
