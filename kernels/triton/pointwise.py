"""Pointwise and few-channel dense convolutions as matrix products on rows of pixels.

Forward: BatchNorm and activation of the stage before ride in the prologue, this stage's statistics in the epilogue.
Backward is the product with the transposed weight: BatchNorm's backward formula in the prologue; the activation's mask
and the two reductions of the stage before in the epilogue. Products of 16-bit numbers are summed in float32.

A program makes TILES tiles of BM rows, one below the other, of the same BN columns. What all tiles need, it reads once:
the coefficients of its columns, and where the depth K fits one step, the weight and the coefficients of its depth. It
sums over the tiles in registers. Numbers of channels and strides are constants: only so does the compiler know which
addresses are multiples of 16 bytes, and where nothing overruns. Offsets from a program's first row have 32 bits.
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
    """Mask of a tile [rows, BLOCK] whose columns are i of SIZE."""
    if SIZE % BLOCK == 0:
        return valid[:, None]
    else:
        return valid[:, None] & (i < SIZE)[None, :]


@triton.jit
def _weight(weight, k, n, K_STEP: tl.constexpr, N_STEP: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """Tile [depth, columns] of a weight whose rows of depth and columns are so many elements apart."""
    there = (k < K)[:, None] & (n < N)[None, :]
    return tl.load(weight + k[:, None] * K_STEP + n[None, :] * N_STEP, mask=there, other=0.0)


@triton.jit
def _patches(
    x, first, m, valid, k, K: tl.constexpr, LDX: tl.constexpr, XSTEP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
):  # fmt: skip
    """Elements k, ordered (channel, ky, kx), of the patches under the output pixels first + m."""
    pixel = first + m
    top = (pixel // OW % OH) * STRIDE - KERNEL // 2
    left = (pixel % OW) * STRIDE - KERNEL // 2
    ky, kx = k // KERNEL % KERNEL, k % KERNEL
    iy, ix = top[:, None] + ky[None, :], left[:, None] + kx[None, :]
    inside = valid[:, None] & (k < K)[None, :] & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
    image = x + (pixel // (OH * OW)).to(tl.int64)[:, None] * (H * W * LDX)
    # the sum of a part of the row and a part of the column, each made once
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
    """The product of one tile, float32; whole, center, scale, shift: of the whole depth if that is one step."""
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

    KERNEL 1: row m of x starts at m * LDX, its channels are XSTEP apart; H, W, OH and OW do not matter. Otherwise the
    stage is dense, with padding KERNEL // 2: K = channels * KERNEL^2, ordered as the weight's (channel, ky, kx).
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
    """Gradient of a stage's input (M, N), from grad (M, K) of its result; weight is (K, N), rows of grad are LDG apart.

    FOLDED: dz of the stage before, whose convolution wrote `before` (M, N), and its affine gradients and back (2, N).
    Otherwise the input's gradient itself, plus `added` (M, N) if ADDED; dx has rows LDX apart and channels XSTEP apart.
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
            # rows that are not there have dy too, that of zeros
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
