"""What the kernels share: activations, BatchNorm seen from its producer and its consumer, partial sums.

All tensors of pixels are rows (a pixel of an image of the batch) of channels, as NHWC has them. BatchNorm's numbers
come as float32 rows of one (5, C) array, `fold`: center, scale, shift, slope, offset. With d = y - center, subtracted
first so that the mean may be large,

    z  = d * scale + shift                    normalised and scaled
    dy = dz * scale + d * slope + offset      gradient behind BatchNorm, from dz = grad * act'(z)

Only the first three rows are there in forward. A sum over pixels is made of one partial sum per program, in a fixed
order and without atomics, which bn.py adds: two runs agree bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def activate(z, ACT: tl.constexpr):
    """act(z); ACT is identity, relu, relu6 or tanh."""
    # NaN must show
    if ACT == "relu":
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu6":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.minimum(z, 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "tanh":
        return _tanh(z)
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
    else:
        return grad


@triton.jit
def _tanh(z):
    # libdevice's is not there under the interpreter
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
def backward_fold(fold, c, C):
    """(slope, offset), as forward_fold."""
    slope = tl.load(fold + 3 * C + c, mask=c < C, other=0.0)
    offset = tl.load(fold + 4 * C + c, mask=c < C, other=0.0)
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
    d = y.to(tl.float32) - center
    return activation_gradient(grad, d * scale + shift, ACT), d


@triton.jit
def store_statistics(partial, index, v, valid, c, C):
    """Row `index` of partial (programs, 4, C), of the valid rows of v [rows, channels].

    Mean in two parts, whose sum it is, squared distance to it, and count.
    """
    count = tl.sum(valid.to(tl.float32), 0)
    rows = tl.maximum(count, 1.0)
    mean = tl.sum(tl.where(valid[:, None], v, 0.0), 0) / rows
    d = tl.where(valid[:, None], v - mean[None, :], 0.0)
    # what rounding left of the mean, which shows where it is large beside the deviation
    rest = tl.sum(d, 0) / rows
    at = partial + index * 4 * C + c
    tl.store(at, mean, mask=c < C)
    tl.store(at + C, rest, mask=c < C)
    tl.store(at + 2 * C, tl.maximum(tl.sum(d * d, 0) - rows * rest * rest, 0.0), mask=c < C)
    tl.store(at + 3 * C, tl.zeros_like(mean) + count, mask=c < C)


@triton.jit
def store_gradient_sums(partial, index, dz, d, valid, c, C):
    """Row `index` of partial (programs, 2, C): sum of dz and of dz * d over the valid rows."""
    dz = tl.where(valid[:, None], dz, 0.0)
    at = partial + index * 2 * C + c
    tl.store(at, tl.sum(dz, 0), mask=c < C)
    tl.store(at + C, tl.sum(dz * tl.where(valid[:, None], d, 0.0), 0), mask=c < C)
