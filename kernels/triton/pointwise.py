"""Pointwise and few-channel dense convolutions as matrix products on rows of pixels.

Forward: BatchNorm and activation of the stage before ride in the prologue, this stage's statistics in the epilogue.
Backward is the product with the transposed weight: BatchNorm's backward formula in the prologue; the activation's mask
and the two reductions of the stage before in the epilogue. Products of 16-bit numbers are summed in float32.
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
def pointwise_forward_kernel(
    x, ldx, fold, weight, y, sums, M, K, N, H, W, OH, OW,
    XSTEP: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, FOLDED: tl.constexpr, ACT: tl.constexpr,
    STATISTICS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (M, N) = act(bn(x)) weight^T, weight (N, K), and fold (3, N) of the statistics of y.

    KERNEL 1: row m of x starts at m * ldx, its channels are XSTEP apart. Otherwise the stage is dense, with padding
    KERNEL // 2: K = channels * KERNEL^2, ordered as the weight's (channel, ky, kx).
    """
    blocks_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    pid_m = pid // blocks_n
    m = pid_m.to(tl.int64) * BM + tl.arange(0, BM)
    n = pid % blocks_n * BN + tl.arange(0, BN)
    valid = m < M
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        if KERNEL == 1:
            a = tl.load(x + m[:, None] * ldx + k[None, :] * XSTEP, mask=valid[:, None] & (k < K)[None, :], other=0.0)
        else:
            channel = k // (KERNEL * KERNEL)
            iy = (m // OW % OH)[:, None] * STRIDE - KERNEL // 2 + (k // KERNEL % KERNEL)[None, :]
            ix = (m % OW)[:, None] * STRIDE - KERNEL // 2 + (k % KERNEL)[None, :]
            inside = valid[:, None] & (k < K)[None, :] & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
            pixel = ((m // (OH * OW))[:, None] * H + iy) * W + ix
            a = tl.load(x + pixel * ldx + channel[None, :] * XSTEP, mask=inside, other=0.0)
        if FOLDED:
            center, scale, shift = forward_fold(fold, k, K)
            a = normalize(a, center, scale, shift, ACT).to(x.dtype.element_ty)
        w = tl.load(weight + n[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(a, w.to(a.dtype), acc, input_precision=PRECISION)
    stored = acc.to(y.dtype.element_ty)
    tl.store(y + m[:, None] * N + n[None, :], stored, mask=valid[:, None] & (n < N)[None, :])
    if STATISTICS:
        store_statistics(sums[0], sums[1], pid_m, stored.to(tl.float32), valid, n, N)
        finish_statistics(sums, pid_m, tl.cdiv(M, BM), pid % blocks_n, n, N)


@triton.jit
def pointwise_backward_kernel(
    grad, ldg, y, fold, back, weight, dx, ldx, before, fold_before, sums, added, M, K, N,
    XSTEP: tl.constexpr, ACT: tl.constexpr, FOLDED: tl.constexpr, ACT_BEFORE: tl.constexpr, ADDED: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gradient of a stage's input (M, N), from grad (M, K) of its result; weight is (K, N), rows of grad are ldg apart.

    FOLDED: dz of the stage before, whose convolution wrote `before` (M, N), and its affine gradients and back (2, N).
    Otherwise the input's gradient itself, plus `added` (M, N) if ADDED; dx has rows ldx apart and channels XSTEP apart.
    """
    blocks_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    pid_m = pid // blocks_n
    m = pid_m.to(tl.int64) * BM + tl.arange(0, BM)
    n = pid % blocks_n * BN + tl.arange(0, BN)
    valid = m < M
    mask = valid[:, None] & (n < N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        there = valid[:, None] & (k < K)[None, :]
        g = tl.load(grad + m[:, None] * ldg + k[None, :], mask=there, other=0.0)
        v = tl.load(y + m[:, None] * K + k[None, :], mask=there, other=0.0)
        center, scale, shift = forward_fold(fold, k, K)
        slope, offset = backward_fold(back, k, K)
        a = gradient_behind(g, v, center, scale, shift, slope, offset, ACT).to(y.dtype.element_ty)
        w = tl.load(weight + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, w.to(a.dtype), acc, input_precision=PRECISION)
    at = m[:, None] * ldx + n[None, :] * XSTEP
    if FOLDED:
        v = tl.load(before + m[:, None] * N + n[None, :], mask=mask, other=0.0)
        dz, d = gradient_before(acc, v, fold_before, n, N, ACT_BEFORE)
        tl.store(dx + at, dz.to(dx.dtype.element_ty), mask=mask)
        store_gradient_sums(sums[0], pid_m, dz, d, valid, n, N)
        finish_gradient(sums, pid_m, tl.cdiv(M, BM), pid % blocks_n, n, N)
    else:
        if ADDED:
            acc += tl.load(added + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, acc.to(dx.dtype.element_ty), mask=mask)
