"""Depthwise convolutions, kernel 3, 5 or 7, stride 1 or 2, with the prologues and epilogues of pointwise.py.

A program makes a tile of TH x TW pixels of CB channels. It goes down the rows of its source: a row is read once for
each kx, normalised, and multiplied into all rows of the tile at once, with the weight of ky = the distance of the two
rows, which is zero where the stencil does not reach. So a pixel is read and normalised about KERNEL * (TH + KERNEL - 1)
/ TH times, from the caches, where a program of single outputs would do it KERNEL^2 times.
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
    store_gradient_sums,
    store_statistics,
)


@triton.jit
def _place(HEIGHT, WIDTH, C, TH: tl.constexpr, TW: tl.constexpr, CB: tl.constexpr):
    """(image, first row, columns, channels, index among the programs of one channel block) of this program."""
    blocks_c = tl.cdiv(C, CB)
    pid = tl.program_id(0)
    index = pid // blocks_c
    tiles_x = tl.cdiv(WIDTH, TW)
    tiles_y = tl.cdiv(HEIGHT, TH)
    image = (index // (tiles_x * tiles_y)).to(tl.int64)
    first = index // tiles_x % tiles_y * TH
    columns = index % tiles_x * TW + tl.arange(0, TW)
    return image, first, columns, pid % blocks_c * CB + tl.arange(0, CB), index


@triton.jit
def _pixels(image, first, columns, HEIGHT, WIDTH, TH: tl.constexpr, TW: tl.constexpr):
    """(rows of pixels of the tile [TH * TW], which of them exist)."""
    row = (first + tl.arange(0, TH))[:, None]
    column = columns[None, :]
    pixel = (image * HEIGHT + row) * WIDTH + column
    exists = (row < HEIGHT) & (column < WIDTH)
    return tl.reshape(pixel, (TH * TW,)), tl.reshape(exists, (TH * TW,))


@triton.jit
def depthwise_forward_kernel(
    x, ldx, fold, weight, y, sums, H, W, OH, OW, C,
    XSTEP: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, FOLDED: tl.constexpr, ACT: tl.constexpr,
    STATISTICS: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """y (images * OH * OW, C) of act(bn(x)), weight (C, KERNEL^2), and fold (3, C) of the statistics of y."""
    image, first, columns, c, index = _place(OH, OW, C, TH, TW, CB)
    exists = c < C
    if FOLDED:
        center, scale, shift = forward_fold(fold, c, C)
    acc = tl.zeros((TH, TW, CB), tl.float32)
    for r in range((TH - 1) * STRIDE + KERNEL):
        # a vector: under the interpreter a mask made of scalars is none
        iy = first * STRIDE - KERNEL // 2 + r + tl.zeros_like(columns)
        ky = r - tl.arange(0, TH) * STRIDE
        reaches = (ky >= 0) & (ky < KERNEL)
        for kx in tl.static_range(KERNEL):
            ix = columns * STRIDE - KERNEL // 2 + kx
            inside = ((iy >= 0) & (iy < H) & (ix >= 0) & (ix < W))[:, None] & exists[None, :]
            pixel = (image * H + iy) * W + ix
            v = tl.load(x + pixel[:, None] * ldx + c[None, :] * XSTEP, mask=inside, other=0.0).to(tl.float32)
            if FOLDED:
                # the padding is zero behind the activation
                v = tl.where(inside, normalize(v, center, scale, shift, ACT), 0.0)
            tap = (c * KERNEL * KERNEL + kx)[None, :] + (ky * KERNEL)[:, None]
            w = tl.load(weight + tap, mask=reaches[:, None] & exists[None, :], other=0.0).to(tl.float32)
            # where the stencil does not reach, not even NaN
            acc += tl.where(reaches[:, None, None], v[None, :, :] * w[:, None, :], 0.0)
    pixel, valid = _pixels(image, first, columns, OH, OW, TH, TW)
    stored = tl.reshape(acc, (TH * TW, CB)).to(y.dtype.element_ty)
    tl.store(y + pixel[:, None] * C + c[None, :], stored, mask=valid[:, None] & exists[None, :])
    if STATISTICS:
        store_statistics(sums[0], sums[1], index, stored.to(tl.float32), valid, c, C)
        blocks_c = tl.cdiv(C, CB)
        finish_statistics(sums, index, tl.num_programs(0) // blocks_c, tl.program_id(0) % blocks_c, c, C)


@triton.jit
def _transposed(
    grad, ldg, y, fold, back, weight, image, first, columns, c, OH, OW, C,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, ACT: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """Gradient [TH * TW, CB] of the stage's input at the tile: dy behind BatchNorm, through the transposed stencil.

    Input pixel i gets from output pixel o the weight at i + KERNEL // 2 - STRIDE * o. TH must be a multiple of STRIDE.
    """
    exists = c < C
    center, scale, shift = forward_fold(fold, c, C)
    slope, offset = backward_fold(back, c, C)
    acc = tl.zeros((TH, TW, CB), tl.float32)
    # the smallest row of the output that reaches the tile; may be negative
    lowest = first // STRIDE - KERNEL // 2 // STRIDE
    for r in range((TH - 1 + KERNEL // 2) // STRIDE + KERNEL // 2 // STRIDE + 1):
        oy = lowest + r + tl.zeros_like(columns)
        ky = first + tl.arange(0, TH) + KERNEL // 2 - STRIDE * (lowest + r)
        reaches = (ky >= 0) & (ky < KERNEL)
        for kx in tl.static_range(KERNEL):
            t = columns + KERNEL // 2 - kx
            ox = t // STRIDE
            inside = (oy >= 0) & (oy < OH) & (t >= 0) & (t % STRIDE == 0) & (ox < OW)
            inside = inside[:, None] & exists[None, :]
            pixel = (image * OH + oy) * OW + ox
            g = tl.load(grad + pixel[:, None] * ldg + c[None, :], mask=inside, other=0.0)
            v = tl.load(y + pixel[:, None] * C + c[None, :], mask=inside, other=0.0)
            dy = tl.where(inside, gradient_behind(g, v, center, scale, shift, slope, offset, ACT), 0.0)
            tap = (c * KERNEL * KERNEL + kx)[None, :] + (ky * KERNEL)[:, None]
            w = tl.load(weight + tap, mask=reaches[:, None] & exists[None, :], other=0.0).to(tl.float32)
            # a gradient that is not finite may reach all rows of the tile: a select here would cost registers
            acc += dy[None, :, :] * w[:, None, :]
    return tl.reshape(acc, (TH * TW, CB))


@triton.jit
def depthwise_backward_kernel(
    grad, ldg, y, fold, back, weight, dx, ldx, before, fold_before, sums, added, H, W, OH, OW, C,
    XSTEP: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, ACT: tl.constexpr, FOLDED: tl.constexpr,
    ACT_BEFORE: tl.constexpr, ADDED: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """Gradient of a depthwise stage's input (images * H * W, C); arguments as of pointwise_backward_kernel."""
    image, first, columns, c, index = _place(H, W, C, TH, TW, CB)
    out = _transposed(
        grad, ldg, y, fold, back, weight, image, first, columns, c, OH, OW, C, KERNEL, STRIDE, ACT, TH, TW, CB
    )
    pixel, valid = _pixels(image, first, columns, H, W, TH, TW)
    mask = valid[:, None] & (c < C)[None, :]
    at = pixel[:, None] * ldx + c[None, :] * XSTEP
    if FOLDED:
        v = tl.load(before + pixel[:, None] * C + c[None, :], mask=mask, other=0.0)
        dz, d = gradient_before(out, v, fold_before, c, C, ACT_BEFORE)
        tl.store(dx + at, dz.to(dx.dtype.element_ty), mask=mask)
        store_gradient_sums(sums[0], index, dz, d, valid, c, C)
        blocks_c = tl.cdiv(C, CB)
        finish_gradient(sums, index, tl.num_programs(0) // blocks_c, tl.program_id(0) % blocks_c, c, C)
    else:
        if ADDED:
            out += tl.load(added + pixel[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
