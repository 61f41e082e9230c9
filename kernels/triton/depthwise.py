"""Depthwise convolutions, kernel 3, 5 or 7, stride 1 or 2, with the prologues and epilogues of pointwise.py.

A thread computes ROWS x COLUMNS pixels of a few channels, and keeps them in registers until the end. It goes down the
rows of its source. Each pixel of a row is loaded and normalised once, and its products are added to all results that
it reaches. The columns of a strip are elements of a tuple and not of a tensor, so the compiler knows which results
along the row a pixel reaches. So no lane computes products that are not needed, selects between results, or reads
from another lane.

Tensors are [STRIPS, CB]: the strips of a program are COLUMNS wide, may belong to different images, and have the same
rows of these.
"""

import triton
import triton.language as tl

from .common import (
    activation_gradient,
    backward_fold,
    finish_gradient,
    finish_statistics,
    forward_fold,
    gradient_behind,
    normalize,
    store_moments,
    store_sums,
)

# Triton would compile another kernel for each of these arguments that is 1 or a multiple of 16
SIZES = ("images", "H", "W", "OH", "OW")


@triton.jit
def _place(images, height, width, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr, CB: tl.constexpr):
    """What a program computes.

    Returns:
        Its index among the programs of the same channels, its first row, the images and the first columns of its
        strips, which strips exist, and its channels.
    """
    blocks_c = tl.cdiv(C, CB)
    pid = tl.program_id(0)
    index = pid // blocks_c
    blocks_y = tl.cdiv(height, ROWS)
    per_image = tl.cdiv(width, COLUMNS)
    strip = index // blocks_y * STRIPS + tl.arange(0, STRIPS)
    image = (strip // per_image).to(tl.int64)
    left = strip % per_image * COLUMNS
    c = pid % blocks_c * CB + tl.arange(0, CB)
    return index, index % blocks_y * ROWS, image, left, strip < images * per_image, c


@triton.jit
def _tap_major(weight, taps, c, C, TAPS: tl.constexpr, CB: tl.constexpr):
    """Copy weight (C, TAPS) of the channels c to this program's part of taps (programs, TAPS, CB); returns that part.

    A thread can then load its channels in one access. In the weight they are TAPS elements apart.
    """
    mine = taps + tl.program_id(0).to(tl.int64) * TAPS * CB
    tap = tl.arange(0, triton.next_power_of_2(TAPS))
    exists = (tap < TAPS)[:, None]
    w = tl.load(weight + c[None, :] * TAPS + tap[:, None], mask=exists & (c < C)[None, :], other=0.0)
    tl.store(mine + tap[:, None] * CB + tl.arange(0, CB)[None, :], w.to(tl.float32), mask=exists)
    # other threads of the program read what this one has stored
    tl.debug_barrier()
    return mine


@triton.jit
def _zeros(COUNT: tl.constexpr, STRIPS: tl.constexpr, CB: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (tl.zeros((STRIPS, CB), tl.float32),)
    return zeros


@triton.jit
def _add_row(
    acc, M: tl.constexpr, source, taps,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr, COLUMNS: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """acc with the products of the row `source` and the weights of one ky, which start at taps, added to its row M.

    acc: the results, COLUMNS of each row, one row after another.
    """
    weights = ()
    for kx in tl.static_range(KERNEL):
        weights = weights + (tl.load(taps + kx * CB + tl.arange(0, CB))[None, :],)
    out = ()
    for i in tl.static_range(len(acc)):
        a = acc[i]
        if i // COLUMNS == M:
            for kx in tl.static_range(KERNEL):
                if not TRANSPOSED:
                    a = tl.fma(source[i % COLUMNS * STRIDE + kx], weights[kx], a)
                elif (i % COLUMNS + KERNEL // 2 - kx) % STRIDE == 0:
                    a = tl.fma(
                        source[(i % COLUMNS + KERNEL // 2 - kx) // STRIDE + KERNEL // 2 // STRIDE], weights[kx], a
                    )
        out = out + (a,)
    return out


@triton.jit(do_not_specialize=SIZES)
def depthwise_forward_kernel(
    x, fold, weight, taps, y, sums, images, H, W, OH, OW,
    C: tl.constexpr, LDX: tl.constexpr, XSTEP: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    FOLDED: tl.constexpr, ACT: tl.constexpr, STATISTICS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """y (images * OH * OW, C) from act(bn(x)) and weight (C, KERNEL^2), and fold (3, C) of the statistics of y.

    Rows of x are LDX apart, its channels XSTEP. EVEN: OW is a multiple of COLUMNS, and W is OW * STRIDE. taps: see
    _tap_major.
    """
    PADDING: tl.constexpr = KERNEL // 2
    index, first, image, left, there, c = _place(images, OH, OW, C, ROWS, COLUMNS, STRIPS, CB)
    exists = there[:, None] & (c < C)[None, :]
    taps = _tap_major(weight, taps, c, C, KERNEL * KERNEL, CB)
    if FOLDED:
        center, scale, shift = forward_fold(fold, c, C)
    pitch = W.to(tl.int64) * LDX
    source = x + (image * H * pitch + (left * STRIDE - PADDING) * LDX)[:, None] + c[None, :] * XSTEP
    acc = _zeros(ROWS * COLUMNS, STRIPS, CB)
    top = first * STRIDE - PADDING
    for r in range(tl.maximum(top, 0), tl.minimum(top + (ROWS - 1) * STRIDE + KERNEL, H)):
        row = ()
        for j in tl.static_range((COLUMNS - 1) * STRIDE + KERNEL):
            column = (left * STRIDE + (j - PADDING))[:, None]
            inside = exists
            if j < PADDING:
                inside = exists & (column >= 0)
            elif j >= PADDING + COLUMNS * STRIDE or not EVEN:
                inside = exists & (column < W)
            v = tl.load(source + r * pitch + j * LDX, mask=inside, other=0.0).to(tl.float32)
            if FOLDED:
                v = normalize(v, center, scale, shift, ACT)
                if j < PADDING or j >= PADDING + COLUMNS * STRIDE or not EVEN:
                    # the padding is added behind the activation, so it is zero there
                    v = tl.where(inside, v, 0.0)
            row = row + (v,)
        for m in tl.static_range(ROWS):
            ky = r - top - m * STRIDE
            if (ky >= 0) & (ky < KERNEL):
                acc = _add_row(acc, m, row, taps + ky * (KERNEL * CB), KERNEL, STRIDE, False, COLUMNS, CB)
    target = y + ((image * OH + first) * OW + left)[:, None] * C + c[None, :]
    # a result of the strip, because distances from it are not much larger than the deviation
    pivot = acc[0].to(y.dtype.element_ty).to(tl.float32)
    total = tl.zeros((STRIPS, CB), tl.float32)
    squares = tl.zeros((STRIPS, CB), tl.float32)
    for m in tl.static_range(ROWS):
        if first + m < OH:
            for s in tl.static_range(COLUMNS):
                stored = acc[m * COLUMNS + s].to(y.dtype.element_ty)
                inside = exists
                if not EVEN:
                    inside = exists & (left + s < OW)[:, None]
                tl.store(target + (m * OW.to(tl.int64) + s) * C, stored, mask=inside)
                if STATISTICS:
                    d = stored.to(tl.float32) - pivot
                    if not EVEN:
                        d = tl.where(inside, d, 0.0)
                    total += d
                    squares = tl.fma(d, d, squares)
    if STATISTICS:
        pixels = tl.minimum(OW - left, COLUMNS) * tl.minimum(OH - first, ROWS)
        _store_statistics(sums, index, pivot, total, squares, tl.where(there, pixels, 0), c, C)
        finish_statistics(sums, index, tl.num_programs(0) // tl.cdiv(C, CB), tl.program_id(0) % tl.cdiv(C, CB), c, C)


@triton.jit
def _store_statistics(sums, index, pivot, total, squares, pixels, c, C):
    """store_statistics for strips with this number of pixels.

    total, squares [STRIPS, CB]: sums of the distances of the pixels from pivot, and of the squares of these.
    """
    n = pixels.to(tl.float32)[:, None]
    count = tl.sum(pixels, 0).to(tl.float32)
    rows = tl.maximum(count, 1.0)
    mean = tl.sum(pivot * n, 0) / rows
    own = total / tl.maximum(n, 1.0)
    # strips without pixels must not count
    within = tl.where(n > 0.0, squares - total * own, 0.0)
    d = tl.where(n > 0.0, (pivot - mean[None, :]) + own, 0.0)
    rest = tl.sum(n * d, 0) / rows
    squares = tl.sum(within + n * d * d, 0) - rows * rest * rest
    store_moments(sums[0], sums[1], index, mean, rest, squares, count, c, C)


@triton.jit(do_not_specialize=SIZES)
def depthwise_backward_kernel(
    grad, y, fold, back, weight, taps, dx, before, fold_before, sums, added, images, H, W, OH, OW,
    C: tl.constexpr, LDG: tl.constexpr, LDX: tl.constexpr, XSTEP: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, ACT: tl.constexpr, FOLDED: tl.constexpr, ACT_BEFORE: tl.constexpr,
    ADDED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """Gradient of a depthwise stage's input (images * H * W, C); arguments as in pointwise_backward_kernel.

    Input pixel i gets from output pixel o the weight at i + KERNEL // 2 - STRIDE * o. ROWS and COLUMNS are multiples of
    STRIDE. EVEN: W is a multiple of COLUMNS and of STRIDE.
    """
    # number of columns of the output to the left of a strip that its pixels reach
    HALO: tl.constexpr = KERNEL // 2 // STRIDE
    index, first, image, left, there, c = _place(images, H, W, C, ROWS, COLUMNS, STRIPS, CB)
    exists = there[:, None] & (c < C)[None, :]
    taps = _tap_major(weight, taps, c, C, KERNEL * KERNEL, CB)
    center, scale, shift = forward_fold(fold, c, C)
    slope, offset = backward_fold(back, c, C)
    pitch = OW.to(tl.int64)
    pixel = (image * OH * pitch + left // STRIDE - HALO)[:, None]
    grads = grad + pixel * LDG + c[None, :]
    outputs = y + pixel * C + c[None, :]
    acc = _zeros(ROWS * COLUMNS, STRIPS, CB)
    top = first // STRIDE - HALO
    for r in range(tl.maximum(top, 0), tl.minimum(top + HALO + (ROWS - 1 + KERNEL // 2) // STRIDE + 1, OH)):
        row = ()
        for j in tl.static_range(HALO + (COLUMNS - 1 + KERNEL // 2) // STRIDE + 1):
            column = (left // STRIDE + (j - HALO))[:, None]
            inside = exists
            if j < HALO:
                inside = exists & (column >= 0)
            elif j >= HALO + COLUMNS // STRIDE or not EVEN:
                inside = exists & (column < OW)
            g = tl.load(grads + (r * pitch * LDG + j * LDG), mask=inside, other=0.0)
            v = tl.load(outputs + (r * pitch * C + j * C), mask=inside, other=0.0)
            dy = gradient_behind(g, v, center, scale, shift, slope, offset, ACT)
            if j < HALO or j >= HALO + COLUMNS // STRIDE or not EVEN:
                dy = tl.where(inside, dy, 0.0)
            row = row + (dy,)
        for m in tl.static_range(ROWS):
            ky = first + m + KERNEL // 2 - r * STRIDE
            if (ky >= 0) & (ky < KERNEL):
                acc = _add_row(acc, m, row, taps + ky * (KERNEL * CB), KERNEL, STRIDE, True, COLUMNS, CB)
    pitch = W.to(tl.int64)
    pixel = ((image * H + first) * pitch + left)[:, None]
    beside = (before if FOLDED else added) + pixel * C + c[None, :]
    target = dx + pixel * LDX + c[None, :] * XSTEP
    if FOLDED:
        center, scale, shift = forward_fold(fold_before, c, C)
    total = tl.zeros((STRIPS, CB), tl.float32)
    products = tl.zeros((STRIPS, CB), tl.float32)
    for m in tl.static_range(ROWS):
        if first + m < H:
            # All loads come before the stores: the compiler does not know that a store leaves what is loaded unchanged,
            # so a load behind a store would wait for it.
            read = ()
            for s in tl.static_range(COLUMNS):
                if FOLDED or ADDED:
                    inside = exists if EVEN else exists & (left + s < W)[:, None]
                    read = read + (tl.load(beside + (m * pitch + s) * C, mask=inside, other=0.0).to(tl.float32),)
            for s in tl.static_range(COLUMNS):
                inside = exists if EVEN else exists & (left + s < W)[:, None]
                out = acc[m * COLUMNS + s]
                if FOLDED:
                    d = read[s] - center
                    out = activation_gradient(out, d * scale + shift, ACT_BEFORE)
                    if not EVEN:
                        out = tl.where(inside, out, 0.0)
                    total += out
                    products = tl.fma(out, d, products)
                elif ADDED:
                    out += read[s]
                tl.store(target + (m * pitch + s) * LDX, out.to(dx.dtype.element_ty), mask=inside)
    if FOLDED:
        total = tl.where(exists, total, 0.0)
        products = tl.where(exists, products, 0.0)
        store_sums(sums[0], index, tl.sum(total, 0), tl.sum(products, 0), c, C)
        finish_gradient(sums, index, tl.num_programs(0) // tl.cdiv(C, CB), tl.program_id(0) % tl.cdiv(C, CB), c, C)
