"""Backward of an expansion (pointwise, BatchNorm, activation) and the depthwise stage behind it, in one pass.

The gradient dz of the expansion is wide, and BatchNorm's backward formula needs two sums over it before it can be
multiplied with the weight W. But that formula is linear. With d = W x - center, as in common.py,

    dx = W^T (dz * scale + d * slope + offset)
       = W^T (dz * scale)  +  A (x - pivot)  +  bias
    A = W^T diag(slope) W        bias = W^T (offset + slope * (W pivot - center))

for any pivot; one near the mean of x keeps the digits. (slope carries the minus of BatchNorm's formula.) So the first
term is taken while dz is on the chip, which is never written, and the rest is a small product on a narrow tensor.
Fact 3 of docs/method.md 6.
"""

import triton
import triton.language as tl

from .common import finish_gradient, gradient_before, store_gradient_sums
from .depthwise import _pixels, _place, _transposed


@triton.jit
def expansion_backward_kernel(
    grad, ldg, y, fold, back, depthwise_weight, before, fold_before, weight, product, sums, H, W, OH, OW, C, CIN,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, ACT: tl.constexpr, ACT_BEFORE: tl.constexpr, PRECISION: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, CB: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """product (images * H * W, CIN) = W^T (dz * scale), and affine gradients and back (2, C) of the expansion.

    A program makes a tile of pixels, of all channels in turn. grad, y, fold, back, depthwise_weight: as of
    depthwise_backward_kernel. before (images * H * W, C): what the expansion's convolution wrote; weight (C, CIN),
    CIN <= BN.
    """
    image, first, columns, channels, index = _place(H, W, CB, TH, TW, CB)
    pixel, valid = _pixels(image, first, columns, H, W, TH, TW)
    n = tl.arange(0, BN)
    acc = tl.zeros((TH * TW, BN), tl.float32)
    for c0 in range(0, C, CB):
        c = c0 + channels
        da = _transposed(
            grad, ldg, y, fold, back, depthwise_weight, image, first, columns, c, OH, OW, C,
            KERNEL, STRIDE, ACT, TH, TW, CB,
        )  # fmt: skip
        v = tl.load(before + pixel[:, None] * C + c[None, :], mask=valid[:, None] & (c < C)[None, :], other=0.0)
        dz, d = gradient_before(da, v, fold_before, c, C, ACT_BEFORE)
        store_gradient_sums(sums[0], index, dz, d, valid, c, C)
        finish_gradient(sums, index, tl.num_programs(0), c0 // CB, c, C)
        scale = tl.load(fold_before + C + c, mask=c < C, other=0.0)[None, :]
        w = tl.load(weight + c[:, None] * CIN + n[None, :], mask=(c < C)[:, None] & (n < CIN)[None, :], other=0.0)
        a = (dz * scale).to(y.dtype.element_ty)
        acc = tl.dot(a, w.to(a.dtype), acc, input_precision=PRECISION)
    mask = valid[:, None] & (n < CIN)[None, :]
    tl.store(product + pixel[:, None] * CIN + n[None, :], acc.to(product.dtype.element_ty), mask=mask)


@triton.jit
def expansion_terms_kernel(
    x, fold, back, weight, terms, M, C, CIN,
    SAMPLES: tl.constexpr, CB: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """terms (CIN + 2, CIN): A, then the pivot, then bias; a program makes COLUMNS columns.

    The pivot is the mean of SAMPLES rows spread over x (M, CIN). Products are of full float32: A is small.
    """
    k = tl.arange(0, BN)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.arange(0, SAMPLES).to(tl.int64) * M // SAMPLES)[:, None]
    sample = tl.load(x + row * CIN + k[None, :], mask=(k < CIN)[None, :], other=0.0).to(tl.float32)
    pivot = tl.sum(sample, 0) / SAMPLES
    sample = tl.load(x + row * CIN + n[None, :], mask=(n < CIN)[None, :], other=0.0).to(tl.float32)
    pivot_n = tl.sum(sample, 0) / SAMPLES
    acc = tl.zeros((BN, COLUMNS), tl.float32)
    bias = tl.zeros((COLUMNS,), tl.float32)
    for c0 in range(0, C, CB):
        c = c0 + tl.arange(0, CB)
        exists = (c < C)[:, None]
        w = tl.load(weight + c[:, None] * CIN + k[None, :], mask=exists & (k < CIN)[None, :], other=0.0).to(tl.float32)
        w_n = tl.load(weight + c[:, None] * CIN + n[None, :], mask=exists & (n < CIN)[None, :], other=0.0)
        w_n = w_n.to(tl.float32)
        center = tl.load(fold + c, mask=c < C, other=0.0)
        slope = tl.load(back + c, mask=c < C, other=0.0)
        offset = tl.load(back + C + c, mask=c < C, other=0.0)
        acc = tl.dot(tl.trans(w), w_n * slope[:, None], acc, input_precision="ieee")
        at_pivot = tl.sum(w * pivot[None, :], 1) - center
        bias += tl.sum(w_n * (offset + slope * at_pivot)[:, None], 0)
    tl.store(terms + k[:, None] * CIN + n[None, :], acc, mask=(k < CIN)[:, None] & (n < CIN)[None, :])
    tl.store(terms + CIN * CIN + n, pivot_n, mask=n < CIN)
    tl.store(terms + CIN * CIN + CIN + n, bias, mask=n < CIN)


@triton.jit
def expansion_finish_kernel(
    product, x, terms, added, dx, M, CIN,
    ADDED: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dx (M, CIN) = product + A (x - pivot) + bias, plus added (M, CIN) if ADDED; terms of expansion_terms_kernel."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    there = n < CIN
    mask = (m < M)[:, None] & there[None, :]
    at = m[:, None] * CIN + n[None, :]
    bias = tl.load(terms + CIN * CIN + CIN + n, mask=there, other=0.0)
    out = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, CIN, BK):
        k = k0 + tl.arange(0, BK)
        pivot = tl.load(terms + CIN * CIN + k, mask=k < CIN, other=0.0)
        a = tl.load(terms + k[:, None] * CIN + n[None, :], mask=(k < CIN)[:, None] & there[None, :], other=0.0)
        v = tl.load(x + m[:, None] * CIN + k[None, :], mask=(m < M)[:, None] & (k < CIN)[None, :], other=0.0)
        v = (v.to(tl.float32) - pivot[None, :]).to(x.dtype.element_ty)
        out = tl.dot(v, a.to(v.dtype), out, input_precision=PRECISION)
    out += bias[None, :] + tl.load(product + at, mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        out += tl.load(added + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
