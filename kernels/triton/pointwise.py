"""Pointwise and few-channel dense convolutions as matrix products on rows of pixels.

The prologue of forward applies BatchNorm and activation of the stage before, and its epilogue sums the statistics of
this stage. Backward multiplies by the transposed weight. Its prologue applies the backward of BatchNorm; its epilogue
applies the gradient of the activation of the stage before, and computes the two sums of that stage's BatchNorm.
Products of 16-bit numbers are summed in float32.

A program computes TILES tiles of BM consecutive rows and the same BN columns. It reads once what all its tiles need:
the coefficients of its columns and, if the depth K fits into one step, the weight and the coefficients of the depth.
It sums over its tiles in registers. Channels and strides are constants, so that the compiler knows which addresses
are multiples of 16 bytes, and where no mask is needed. Offsets from the first row of a program have 32 bits.
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
    store_sums,
)


@triton.jit
def _tile_mask(valid, i, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of a tile [rows, BLOCK] whose columns i are those of a matrix with SIZE columns."""
    if SIZE % BLOCK == 0:
        return valid[:, None]
    else:
        return valid[:, None] & (i < SIZE)[None, :]


@triton.jit
def _weight(weight, k, n, K_STEP: tl.constexpr, N_STEP: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """Tile [depth, columns] of a weight; K_STEP and N_STEP are its strides in elements."""
    there = (k < K)[:, None] & (n < N)[None, :]
    return tl.load(weight + k[:, None] * K_STEP + n[None, :] * N_STEP, mask=there, other=0.0)


@triton.jit
def _patches(
    x, first, m, valid, k, K: tl.constexpr, LDX: tl.constexpr, XSTEP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
):  # fmt: skip
    """Elements k, ordered (channel, ky, kx), of the patches from which the output pixels first + m are computed."""
    pixel = first + m
    top = (pixel // OW % OH) * STRIDE - KERNEL // 2
    left = (pixel % OW) * STRIDE - KERNEL // 2
    ky, kx = k // KERNEL % KERNEL, k % KERNEL
    iy, ix = top[:, None] + ky[None, :], left[:, None] + kx[None, :]
    inside = valid[:, None] & (k < K)[None, :] & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
    image = x + (pixel // (OH * OW)).to(tl.int64)[:, None] * (H * W * LDX)
    # an address is the sum of a part for the row and a part for the column, each of which is computed once
    within = ((top * W + left) * LDX)[:, None]
    at = ((ky * W + kx) * LDX + k // (KERNEL * KERNEL) * XSTEP)[None, :]
    return tl.load(image + (within + at), mask=inside, other=0.0)


@triton.jit
def _forward_tile(
    x, fold, weight, whole, center, scale, shift, first, m, valid, n,
    K: tl.constexpr, N: tl.constexpr, LDX: tl.constexpr, XSTEP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    FOLDED: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The product of one tile, float32. whole, center, scale, shift: for the whole depth, if that is one step."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        if KERNEL == 1:
            there = _tile_mask(valid, k, K, BK)
            a = tl.load(x + m[:, None] * LDX + k[None, :] * XSTEP, mask=there, other=0.0)
        else:
            a = _patches(x, first, m, valid, k, K, LDX, XSTEP, KERNEL, STRIDE, H, W, OH, OW)
        w = whole if K <= BK else _weight(weight, k, n, 1, K, K, N)
        if FOLDED:
            if K <= BK:
                a = normalize(a, center, scale, shift, ACT).to(x.dtype.element_ty)
            else:
                center_k, scale_k, shift_k = forward_fold(fold, k, K)
                a = normalize(a, center_k, scale_k, shift_k, ACT).to(x.dtype.element_ty)
        acc = tl.dot(a, w.to(a.dtype), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["M"])
def pointwise_forward_kernel(
    x, fold, weight, y, sums, M,
    K: tl.constexpr, N: tl.constexpr, LDX: tl.constexpr, XSTEP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    FOLDED: tl.constexpr, ACT: tl.constexpr, STATISTICS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """y (M, N) = act(bn(x)) weight^T, weight (N, K), and fold (3, N) of the statistics of y.

    If KERNEL is 1, row m of x starts at m * LDX and its channels are XSTEP apart; H, W, OH and OW are not used.
    Otherwise the stage is dense, with padding KERNEL // 2 and K = channels * KERNEL^2, in the order (channel, ky, kx)
    of the weight.
    """
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    index = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    first = index * (BM * TILES)
    n = block * BN + tl.arange(0, BN)
    rows = tl.minimum(M - first, BM * TILES)
    y += first.to(tl.int64) * N
    if KERNEL == 1:
        x += first.to(tl.int64) * LDX
    whole = weight
    center, scale, shift = 0.0, 0.0, 0.0
    if K <= BK:
        whole = _weight(weight, tl.arange(0, BK), n, 1, K, K, N).to(x.dtype.element_ty)
        if FOLDED:
            center, scale, shift = forward_fold(fold, tl.arange(0, BK), K)
    m = tl.arange(0, BM)
    acc = _forward_tile(
        x, fold, weight, whole, center, scale, shift, first, m, m < rows, n,
        K, N, LDX, XSTEP, KERNEL, STRIDE, H, W, OH, OW, FOLDED, ACT, PRECISION, BM, BN, BK,
    )  # fmt: skip
    stored = acc.to(y.dtype.element_ty)
    tl.store(y + m[:, None] * N + n[None, :], stored, mask=_tile_mask(m < rows, n, N, BN))
    if STATISTICS:
        v = stored.to(tl.float32)
        pivot = mean_of(v, m < rows)
        d = distances(v, pivot, m < rows)
        squares = d * d
    for tile in range(1, TILES):
        m = tile * BM + tl.arange(0, BM)
        acc = _forward_tile(
            x, fold, weight, whole, center, scale, shift, first, m, m < rows, n,
            K, N, LDX, XSTEP, KERNEL, STRIDE, H, W, OH, OW, FOLDED, ACT, PRECISION, BM, BN, BK,
        )  # fmt: skip
        stored = acc.to(y.dtype.element_ty)
        tl.store(y + m[:, None] * N + n[None, :], stored, mask=_tile_mask(m < rows, n, N, BN))
        if STATISTICS:
            here = distances(stored.to(tl.float32), pivot, m < rows)
            d += here
            squares += here * here
    if STATISTICS:
        store_distances(sums[0], sums[1], index, pivot, d, squares, rows.to(tl.float32), n, N)
        finish_statistics(sums, index, tl.cdiv(M, BM * TILES), block, n, N)


@triton.jit(do_not_specialize=["M"])
def pointwise_backward_kernel(
    grad, y, fold, back, weight, dx, before, fold_before, sums, added, M,
    K: tl.constexpr, N: tl.constexpr, LDG: tl.constexpr, LDX: tl.constexpr, XSTEP: tl.constexpr,
    ACT: tl.constexpr, FOLDED: tl.constexpr, ACT_BEFORE: tl.constexpr, ADDED: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Gradient of a stage's input (M, N) from grad (M, K) of its result; weight is (K, N), rows of grad are LDG apart.

    With FOLDED, dx is dz of the stage before, whose convolution wrote `before` (M, N), and the kernel also computes the
    affine gradients and back (2, N) of that stage. Otherwise dx is the gradient of the input, plus `added` (M, N) if
    ADDED. Rows of dx are LDX apart, its channels XSTEP.
    """
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    index = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    first = (index * (BM * TILES)).to(tl.int64)
    n = block * BN + tl.arange(0, BN)
    rows = tl.minimum(M - index * (BM * TILES), BM * TILES)
    grad += first * LDG
    y += first * K
    dx += first * LDX
    before += first * N
    added += first * N
    if K <= BK:
        k = tl.arange(0, BK)
        w = _weight(weight, k, n, N, 1, K, N).to(y.dtype.element_ty)
        center, scale, shift = forward_fold(fold, k, K)
        slope, offset = backward_fold(back, k, K)
    if FOLDED:
        center_n, scale_n, shift_n = forward_fold(fold_before, n, N)
        total = tl.zeros((BM, BN), tl.float32)
        total_d = tl.zeros((BM, BN), tl.float32)
    for tile in range(TILES):
        m = tile * BM + tl.arange(0, BM)
        valid = m < rows
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            there = _tile_mask(valid, k, K, BK)
            g = tl.load(grad + m[:, None] * LDG + k[None, :], mask=there, other=0.0)
            v = tl.load(y + m[:, None] * K + k[None, :], mask=there, other=0.0)
            if K > BK:
                w = _weight(weight, k, n, N, 1, K, N)
                center, scale, shift = forward_fold(fold, k, K)
                slope, offset = backward_fold(back, k, K)
            a = gradient_behind(g, v, center, scale, shift, slope, offset, ACT).to(y.dtype.element_ty)
            acc = tl.dot(a, w.to(a.dtype), acc, input_precision=PRECISION)
        mask = _tile_mask(valid, n, N, BN)
        if FOLDED:
            v = tl.load(before + m[:, None] * N + n[None, :], mask=mask, other=0.0)
            dz, d = gradient_through(acc, v, center_n, scale_n, shift_n, ACT_BEFORE)
            # rows beyond the end have a dy too, because bn(0) is not 0
            dz = tl.where(valid[:, None], dz, 0.0)
            total += dz
            total_d += dz * d
            acc = dz
        elif ADDED:
            acc += tl.load(added + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + m[:, None] * LDX + n[None, :] * XSTEP, acc.to(dx.dtype.element_ty), mask=mask)
    if FOLDED:
        store_sums(sums[0], index, tl.sum(total, 0), tl.sum(total_d, 0), n, N)
        finish_gradient(sums, index, tl.cdiv(M, BM * TILES), block, n, N)
