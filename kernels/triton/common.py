"""What the kernels share: activations, the arithmetic of BatchNorm, and partial sums.

All tensors of pixels are rows of channels, as in NHWC: one row per pixel of the batch. The coefficients of BatchNorm
are float32: center, scale and shift of each channel in `fold` (3, C), and for backward slope and offset in `back` (2,
C). With d = y - center, which is computed first so that the mean may be large,

    z  = d * scale + shift                    normalised and scaled
    dy = dz * scale + d * slope + offset      gradient behind BatchNorm, from dz = grad * act'(z)

Sums over pixels: every program of a kernel stores one row of sums for its channels. The last program of these channels
to end adds the rows and computes `fold` or `back`, so this needs no other launch. It adds the rows in the same order
whichever program is last, so two runs agree bit for bit. There are two steps, each in float32: first the rows of each
group are added, as soon as the group is complete, then the groups. The argument `sums` has what both steps need; see
nasfast/ops/triton/bn.py.

The programs count themselves in int32 counters, which are zero before a launch and zero after it
(nasfast/ops/arrivals.py). A program may run twice, and programs may run in any order: a program always stores the same
row, and the last one reads all of them.
"""

import triton
import triton.language as tl

# Number of rows of sums in a group. Adding the groups is a second step, which takes longer than reading as many rows
# again. So up to twice as many rows are one group.
GROUP = tl.constexpr(64)


@triton.jit
def activate(z, ACT: tl.constexpr):
    """act(z); ACT is identity, relu, relu6, tanh, hswish or silu."""
    # a NaN must stay a NaN
    if ACT == "relu":
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu6":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.minimum(z, 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "tanh":
        return _tanh(z)
    elif ACT == "hswish":
        return z * tl.minimum(tl.maximum(z * (1.0 / 6.0) + 0.5, 0.0), 1.0)
    elif ACT == "silu":
        return z * _sigmoid(z)
    else:
        return z


@triton.jit
def activation_gradient(grad, z, ACT: tl.constexpr):
    """grad * act'(z), zero at the kinks."""
    if ACT == "relu":
        return tl.where(z > 0.0, grad, 0.0)
    elif ACT == "relu6":
        return tl.where((z > 0.0) & (z < 6.0), grad, 0.0)
    elif ACT == "tanh":
        y = _tanh(z)
        return grad * (1.0 - y * y)
    elif ACT == "hswish":
        inside = tl.where(z > -3.0, grad * (z * (1.0 / 3.0) + 0.5), 0.0)
        return tl.where(z < 3.0, inside, grad)
    elif ACT == "silu":
        s = _sigmoid(z)
        return grad * (s * (1.0 + z * (1.0 - s)))
    else:
        return grad


@triton.jit
def _sigmoid(z):
    # beyond -80 the result is below 2e-35, and exp(-z) would overflow
    return 1.0 / (1.0 + tl.exp(-tl.maximum(z, -80.0)))


@triton.jit
def _tanh(z):
    # the interpreter has no libdevice
    magnitude = tl.minimum(tl.abs(z), 10.0)  # beyond it tanh is 1 in float32
    square = z * z
    # a Chebyshev fit on |z| <= 0.55, where the quotient below loses digits
    near = -0.00661576 * square + 0.02131275
    near = near * square - 0.05391007
    near = near * square + 0.13333118
    near = near * square - 0.33333332
    near = z + z * square * near
    far = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    far = tl.where(z < 0.0, -far, far)
    return tl.where(magnitude < 0.55, near, tl.where(z == z, far, z))


@triton.jit
def forward_fold(fold, c, C):
    """(center, scale, shift) of the channels c, each [1, channels]; zero where c >= C."""
    center = tl.load(fold + c, mask=c < C, other=0.0)
    scale = tl.load(fold + C + c, mask=c < C, other=0.0)
    shift = tl.load(fold + 2 * C + c, mask=c < C, other=0.0)
    return center[None, :], scale[None, :], shift[None, :]


@triton.jit
def backward_fold(back, c, C):
    """(slope, offset), as forward_fold."""
    slope = tl.load(back + c, mask=c < C, other=0.0)
    offset = tl.load(back + C + c, mask=c < C, other=0.0)
    return slope[None, :], offset[None, :]


@triton.jit
def normalize(y, center, scale, shift, ACT: tl.constexpr):
    """act(bn(y)) of a tile [rows, channels]; zero where the coefficients are."""
    return activate((y.to(tl.float32) - center) * scale + shift, ACT)


@triton.jit
def gradient_behind(grad, y, center, scale, shift, slope, offset, ACT: tl.constexpr):
    """dy of a tile, from the gradient of act(bn(y)); zero where the coefficients are."""
    d = y.to(tl.float32) - center
    dz = activation_gradient(grad.to(tl.float32), d * scale + shift, ACT)
    return dz * scale + (d * slope + offset)


@triton.jit
def gradient_before(grad, y, fold, c, C, ACT: tl.constexpr):
    """(dz, d) of a tile: the gradient of act(bn(y)) taken through the activation, and y - center."""
    center, scale, shift = forward_fold(fold, c, C)
    return gradient_through(grad, y, center, scale, shift, ACT)


@triton.jit
def gradient_through(grad, y, center, scale, shift, ACT: tl.constexpr):
    """gradient_before for coefficients that are loaded already."""
    d = y.to(tl.float32) - center
    return activation_gradient(grad, d * scale + shift, ACT), d


@triton.jit
def _comes_last(counter, programs):
    """Whether this is the last of `programs` programs to come here. It can then read what the others have stored."""
    # wait until every thread of this program has stored
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _group(arrivals, index, programs, block):
    """The group that has row `index` of `programs` rows.

    Returns:
        Its number, first row and number of rows, the number of groups, and the counters of this block of channels: one
        for each group, and one for the groups.
    """
    few = programs <= 2 * GROUP
    groups = tl.where(few, 1, tl.cdiv(programs, GROUP))
    number = tl.where(few, 0, index // GROUP)
    first = number * GROUP
    rows = tl.where(few, programs, tl.minimum(GROUP, programs - first))
    return number, first, rows, groups, arrivals + block * (groups + 1)


@triton.jit
def mean_of(v, valid):
    """Mean of the valid rows of v [rows, channels]."""
    count = tl.maximum(tl.sum(valid.to(tl.float32), 0), 1.0)
    return tl.sum(tl.where(valid[:, None], v, 0.0), 0) / count


@triton.jit
def distances(v, pivot, valid):
    """v [rows, channels] - pivot [channels] where rows are valid, else 0."""
    return tl.where(valid[:, None], v - pivot[None, :], 0.0)


@triton.jit
def store_statistics(partial, counts, index, v, valid, c, C):
    """Store row `index` of partial (rows, 3, C) and of counts (rows,) from the valid rows of v [rows, channels].

    The row has two numbers whose sum is the mean, and the sum of squared distances from it; counts has the number of
    valid rows.
    """
    mean = mean_of(v, valid)
    d = distances(v, mean, valid)
    store_distances(partial, counts, index, mean, d, d * d, tl.sum(valid.to(tl.float32), 0), c, C)


@triton.jit
def store_distances(partial, counts, index, pivot, d, squares, count, c, C):
    """store_statistics for `count` rows in several tiles, the first of which has the mean `pivot`.

    d, squares [rows, channels]: sums over the tiles of the distances from pivot, and of the squares of these.
    """
    rows = tl.maximum(count, 1.0)
    # the mean of the distances is not 0, because pivot is rounded and is the mean of the first tile only
    rest = tl.sum(d, 0) / rows
    squares = tl.sum(squares, 0) - rows * rest * rest
    store_moments(partial, counts, index, pivot, rest, squares, count, c, C)


@triton.jit
def store_moments(partial, counts, index, mean, rest, squares, count, c, C):
    """Store row `index`, as in store_statistics."""
    at = partial + index.to(tl.int64) * 3 * C + c
    tl.store(at, mean, mask=c < C)
    tl.store(at + C, rest, mask=c < C)
    tl.store(at + 2 * C, tl.maximum(squares, 0.0, propagate_nan=tl.PropagateNan.ALL), mask=c < C)
    tl.store(counts + index, count)


@triton.jit
def _add_statistics(partial, counts, first, rows, c, C):
    """(mean, rest, squares, count) of the pixels of all these rows, from those of each row."""
    # rows that are added at once, so few that they need no more registers than the rest of the kernel
    AT_ONCE: tl.constexpr = 64 if c.shape[0] <= 64 else 4096 // c.shape[0]
    # distances from the first mean are added, so that the means may be large
    pivot = tl.load(partial + first * 3 * C + c, mask=c < C, other=0.0, cache_modifier=".cg")
    rest = tl.zeros_like(pivot)
    squares = tl.zeros_like(pivot)
    count = 0.0
    for start in range(0, rows, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        n = tl.load(counts + first + row, mask=row < rows, other=0.0, cache_modifier=".cg")
        at = partial + (first + row)[:, None] * 3 * C + c[None, :]
        there = (row < rows)[:, None] & (c < C)[None, :]
        mean = tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
        mean = (mean - pivot[None, :]) + tl.load(at + C, mask=there, other=0.0, cache_modifier=".cg")
        here = tl.sum(n, 0)
        mean_here = tl.sum(tl.where(there, n[:, None] * mean, 0.0), 0) / here
        distance = tl.where(there, mean - mean_here[None, :], 0.0)
        within = tl.load(at + 2 * C, mask=there, other=0.0, cache_modifier=".cg")
        # Chan's formula for the union of two sets: these rows, and the rows before
        share = here / (count + here)
        step = mean_here - rest
        squares += tl.sum(within + n[:, None] * distance * distance, 0) + step * step * (count * share)
        rest += step * share
        count += here
    return pivot, rest, squares, count


@triton.jit
def finish_statistics(sums, index, programs, block, c, C):
    """Compute the fold of the channels c in the last of the programs 0 <= index < programs, behind store_statistics.

    block: number of this block of channels; programs with the same block have the same c.
    """
    partial, counts, arrivals, statistics, gamma, beta, fold, eps = sums
    group, first, rows, groups, counters = _group(arrivals, index, programs, block)
    if _comes_last(counters + group, rows):
        mean, rest, squares, count = _add_statistics(partial, counts, first, rows, c, C)
        if groups == 1:
            _complete_fold(mean, rest, squares / count, statistics, gamma, beta, fold, eps, c, C)
        else:
            store_moments(partial, counts, programs + group, mean, rest, squares, count, c, C)
            if _comes_last(counters + groups, groups):
                mean, rest, squares, count = _add_statistics(partial, counts, programs, groups, c, C)
                _complete_fold(mean, rest, squares / count, statistics, gamma, beta, fold, eps, c, C)


@triton.jit
def _complete_fold(mean, rest, var, statistics, gamma, beta, fold, eps, c, C):
    """Store mean and biased variance in statistics (2, C), float64, and compute fold (3, C)."""
    exists = c < C
    var = tl.maximum(var, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # center + left is the exact sum of both parts: the mean in float32, and its rounding error
    center = mean + rest
    part = center - mean
    left = (mean - (center - part)) + (rest - part)
    tl.store(statistics + c, center.to(tl.float64) + left.to(tl.float64), mask=exists)
    tl.store(statistics + C + c, var.to(tl.float64), mask=exists)
    store_fold(center, left, var, gamma, beta, fold, eps, c, C)


@triton.jit
def store_fold(center, left, var, gamma, beta, fold, eps, c, C):
    """Store fold (3, C) for the mean center + left; the shift has the part of left, the rounding error of center."""
    exists = c < C
    scale = tl.div_rn(tl.load(gamma + c, mask=exists, other=0.0), tl.sqrt_rn(var + eps))
    tl.store(fold + c, center, mask=exists)
    tl.store(fold + C + c, scale, mask=exists)
    tl.store(fold + 2 * C + c, tl.load(beta + c, mask=exists, other=0.0) - left * scale, mask=exists)


@triton.jit
def store_gradient_sums(partial, index, dz, d, valid, c, C):
    """Store row `index` of partial (rows, 2, C): the sums of dz and of dz * d over the valid rows."""
    dz = tl.where(valid[:, None], dz, 0.0)
    store_sums(partial, index, tl.sum(dz, 0), tl.sum(dz * tl.where(valid[:, None], d, 0.0), 0), c, C)


@triton.jit
def store_sums(partial, index, sum_dz, sum_dz_d, c, C):
    """Store row `index`, as in store_gradient_sums."""
    at = partial + index.to(tl.int64) * 2 * C + c
    tl.store(at, sum_dz, mask=c < C)
    tl.store(at + C, sum_dz_d, mask=c < C)


@triton.jit
def _add_gradient_sums(partial, first, rows, c, C):
    """(sum of dz, sum of dz * d) over these rows."""
    AT_ONCE: tl.constexpr = 64 if c.shape[0] <= 64 else 4096 // c.shape[0]
    sum_dz = tl.zeros((c.shape[0],), tl.float32)
    sum_dz_d = tl.zeros((c.shape[0],), tl.float32)
    for start in range(0, rows, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        at = partial + (first + row)[:, None] * 2 * C + c[None, :]
        there = (row < rows)[:, None] & (c < C)[None, :]
        sum_dz += tl.sum(tl.load(at, mask=there, other=0.0, cache_modifier=".cg"), 0)
        sum_dz_d += tl.sum(tl.load(at + C, mask=there, other=0.0, cache_modifier=".cg"), 0)
    return sum_dz, sum_dz_d


@triton.jit
def finish_gradient(sums, index, programs, block, c, C):
    """Compute affine gradients and back of the channels c behind store_gradient_sums, as in finish_statistics."""
    partial, arrivals = sums[0], sums[1]
    group, first, rows, groups, counters = _group(arrivals, index, programs, block)
    if _comes_last(counters + group, rows):
        sum_dz, sum_dz_d = _add_gradient_sums(partial, first, rows, c, C)
        if groups == 1:
            _complete_back(sums, sum_dz, sum_dz_d, c, C)
        else:
            store_sums(partial, programs + group, sum_dz, sum_dz_d, c, C)
            if _comes_last(counters + groups, groups):
                sum_dz, sum_dz_d = _add_gradient_sums(partial, programs, groups, c, C)
                _complete_back(sums, sum_dz, sum_dz_d, c, C)


@triton.jit
def _complete_back(sums, sum_dz, sum_dz_d, c, C):
    """Store dgamma and dbeta, if they are not None, and back (2, C).

    R is None if mean and var do not depend on the pixels. If statistics is None, dgamma is the sum of dz * d, and
    back is not stored.
    """
    _, _, statistics, gamma, dgamma, dbeta, back, eps, R = sums
    exists = c < C
    if dbeta is not None:
        tl.store(dbeta + c, sum_dz, mask=exists)
    if statistics is None:
        tl.store(dgamma + c, sum_dz_d, mask=exists)
    else:
        mean = tl.load(statistics + c, mask=exists, other=0.0)
        var = tl.load(statistics + C + c, mask=exists, other=0.0).to(tl.float32)
        left = (mean - mean.to(tl.float32).to(tl.float64)).to(tl.float32)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(var + eps))
        sum_dz_xhat = (sum_dz_d - left * sum_dz) * rstd
        if dgamma is not None:
            tl.store(dgamma + c, sum_dz_xhat, mask=exists)
        slope = tl.zeros_like(sum_dz)
        offset = tl.zeros_like(sum_dz)
        if R is not None:
            # dy = scale * (dz - mean(dz) - xhat * mean(dz * xhat))
            scale = tl.load(gamma + c, mask=exists, other=0.0) * rstd
            slope = -scale * rstd * (sum_dz_xhat / R)
            offset = -scale * (sum_dz / R) - slope * left
        tl.store(back + c, slope, mask=exists)
        tl.store(back + C + c, offset, mask=exists)


# Triton 3.6 adds GROUP to the cache key of a kernel only if the functions that lead to it have their keys already. They
# get them here. Otherwise a key would depend on which kernel is compiled first, and a cache made elsewhere would miss.
for _function in (_group, finish_statistics, finish_gradient):
    getattr(_function, "cache_key", None)  # functions of the interpreter have no key
