"""BatchNorm alone: statistics, application and backward, and the coefficients from given statistics.

A tensor of pixels is addressed by (image, pixel, channel) with three strides, so the same code serves NHWC, NCHW and
every second channel. R = images * pixels. If channels are next to each other, as in NHWC, the constant ROW is the
number of elements from row to row, and tells the compiler which addresses are multiples of 16 bytes. Otherwise it is
0.

A program computes TILES tiles of ROWS consecutive rows of the same channels, and reads their coefficients once.
"""

import triton
import triton.language as tl

from .common import (
    backward_fold,
    distances,
    finish_gradient,
    finish_statistics,
    forward_fold,
    gradient_behind,
    gradient_through,
    mean_of,
    normalize,
    store_distances,
    store_fold,
    store_sums,
)


@triton.jit
def _place(R, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr):
    """(first row, number of rows, channels) of this program."""
    first = tl.program_id(0) * (ROWS * TILES)
    return first, tl.minimum(R - first, ROWS * TILES), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def _at(x, first, r, c, PIXELS, sn, sp, sc, ROW: tl.constexpr):
    """Addresses [rows, channels] of the rows first + r."""
    if ROW > 0:
        return x + first.to(tl.int64) * ROW + (r[:, None] * ROW + c[None, :])
    else:
        row = first + r
        image, pixel = (row // PIXELS).to(tl.int64), (row % PIXELS).to(tl.int64)
        return x + (image[:, None] * sn + pixel[:, None] * sp + c[None, :].to(tl.int64) * sc)


@triton.jit
def _mask(valid, c, C: tl.constexpr, CHANNELS: tl.constexpr):
    if C % CHANNELS == 0:
        return valid[:, None]
    else:
        return valid[:, None] & (c < C)[None, :]


@triton.jit(do_not_specialize=["R", "PIXELS", "sxn"])
def bn_statistics_kernel(
    x, sxn, sxp, sxc, sums, R, PIXELS,
    C: tl.constexpr, X_ROW: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of x and their fold (3, C)."""
    first, rows, c = _place(R, ROWS, CHANNELS, TILES)
    r = tl.arange(0, ROWS)
    at = _at(x, first, r, c, PIXELS, sxn, sxp, sxc, X_ROW)
    v = tl.load(at, mask=_mask(r < rows, c, C, CHANNELS), other=0.0).to(tl.float32)
    pivot = mean_of(v, r < rows)
    d = distances(v, pivot, r < rows)
    squares = d * d
    for tile in range(1, TILES):
        r = tile * ROWS + tl.arange(0, ROWS)
        at = _at(x, first, r, c, PIXELS, sxn, sxp, sxc, X_ROW)
        v = tl.load(at, mask=_mask(r < rows, c, C, CHANNELS), other=0.0).to(tl.float32)
        here = distances(v, pivot, r < rows)
        d += here
        squares += here * here
    index = tl.program_id(0)
    store_distances(sums[0], sums[1], index, pivot, d, squares, rows.to(tl.float32), c, C)
    finish_statistics(sums, index, tl.num_programs(0), tl.program_id(1), c, C)


@triton.jit
def bn_fold_kernel(
    running_mean, running_var, statistics, gamma, beta, eps, fold, C, RUNNING: tl.constexpr, CHANNELS: tl.constexpr
):
    """Compute fold (3, C) from statistics (2, C); with RUNNING, first copy the running statistics there."""
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


@triton.jit(do_not_specialize=["R", "PIXELS", "syn", "srn", "son"])
def bn_act_kernel(
    y, syn, syp, syc, fold, residual, srn, srp, src, out, son, sop, soc, even, R, PIXELS,
    C: tl.constexpr, Y_ROW: tl.constexpr, RESIDUAL_ROW: tl.constexpr, OUT_ROW: tl.constexpr, ACT: tl.constexpr,
    RESIDUAL: tl.constexpr, SHUFFLE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """out = act(bn(y)) (+ residual). SHUFFLE: copy even channels of `even` (rows of 2 C) to C channels before out."""
    first, rows, c = _place(R, ROWS, CHANNELS, TILES)
    center, scale, shift = forward_fold(fold, c, C)
    for tile in range(TILES):
        r = tile * ROWS + tl.arange(0, ROWS)
        mask = _mask(r < rows, c, C, CHANNELS)
        v = tl.load(_at(y, first, r, c, PIXELS, syn, syp, syc, Y_ROW), mask=mask, other=0.0)
        z = normalize(v, center, scale, shift, ACT)
        if RESIDUAL:
            at = _at(residual, first, r, c, PIXELS, srn, srp, src, RESIDUAL_ROW)
            z += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at = _at(out, first, r, c, PIXELS, son, sop, soc, OUT_ROW)
        tl.store(at, z.to(out.dtype.element_ty), mask=mask)
        if SHUFFLE:
            left = tl.load(even + first.to(tl.int64) * (2 * C) + (r[:, None] * (2 * C) + 2 * c[None, :]), mask=mask)
            tl.store(at - C, left, mask=mask)


@triton.jit(do_not_specialize=["R", "PIXELS", "sgn", "syn"])
def bn_act_reduce_kernel(
    grad, sgn, sgp, sgc, y, syn, syp, syc, fold, sums, R, PIXELS,
    C: tl.constexpr, GRAD_ROW: tl.constexpr, Y_ROW: tl.constexpr, ACT: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute the affine gradients and back (2, C) from the gradient of act(bn(y))."""
    first, rows, c = _place(R, ROWS, CHANNELS, TILES)
    center, scale, shift = forward_fold(fold, c, C)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    total_d = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tile in range(TILES):
        r = tile * ROWS + tl.arange(0, ROWS)
        mask = _mask(r < rows, c, C, CHANNELS)
        g = tl.load(_at(grad, first, r, c, PIXELS, sgn, sgp, sgc, GRAD_ROW), mask=mask, other=0.0).to(tl.float32)
        v = tl.load(_at(y, first, r, c, PIXELS, syn, syp, syc, Y_ROW), mask=mask, other=0.0)
        # rows beyond the end add nothing, because their gradient is 0 and d is finite
        dz, d = gradient_through(g, v, center, scale, shift, ACT)
        total += dz
        total_d += dz * d
    store_sums(sums[0], tl.program_id(0), tl.sum(total, 0), tl.sum(total_d, 0), c, C)
    finish_gradient(sums, tl.program_id(0), tl.num_programs(0), tl.program_id(1), c, C)


@triton.jit(do_not_specialize=["R", "PIXELS", "sgn", "syn", "sxn"])
def bn_act_backward_kernel(
    grad, sgn, sgp, sgc, y, syn, syp, syc, fold, back, dx, sxn, sxp, sxc, R, PIXELS,
    C: tl.constexpr, GRAD_ROW: tl.constexpr, Y_ROW: tl.constexpr, X_ROW: tl.constexpr, ACT: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute dx, the gradient behind BatchNorm."""
    first, rows, c = _place(R, ROWS, CHANNELS, TILES)
    center, scale, shift = forward_fold(fold, c, C)
    slope, offset = backward_fold(back, c, C)
    for tile in range(TILES):
        r = tile * ROWS + tl.arange(0, ROWS)
        mask = _mask(r < rows, c, C, CHANNELS)
        g = tl.load(_at(grad, first, r, c, PIXELS, sgn, sgp, sgc, GRAD_ROW), mask=mask, other=0.0)
        v = tl.load(_at(y, first, r, c, PIXELS, syn, syp, syc, Y_ROW), mask=mask, other=0.0)
        dy = gradient_behind(g, v, center, scale, shift, slope, offset, ACT)
        at = _at(dx, first, r, c, PIXELS, sxn, sxp, sxc, X_ROW)
        tl.store(at, dy.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def shuffle_merge_kernel(grad, dx, R, C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr):
    """Copy the first C channels of grad (R, 2 C) to the even ones of dx (R, 2 C); a stage writes the odd ones."""
    first, rows, c = _place(R, ROWS, CHANNELS, TILES)
    grad += first.to(tl.int64) * (2 * C)
    dx += first.to(tl.int64) * (2 * C)
    for tile in range(TILES):
        r = tile * ROWS + tl.arange(0, ROWS)
        mask = _mask(r < rows, c, C, CHANNELS)
        at = r[:, None] * (2 * C)
        tl.store(dx + at + 2 * c[None, :], tl.load(grad + at + c[None, :], mask=mask), mask=mask)
