"""bn_act in Triton, kernels and their launchers: BatchNorm, activation and residual in four passes.

They are statistics and application, sums of gradients and their use. Only `nasfast.ops.registry` imports this file, and
only where a call names Triton.

A tensor of pixels is rows of channels, (R, C), one row per pixel of the batch, as in NHWC. A kernel sees `repeat`
neighbouring rows as one of `units * UNIT` columns, so that few channels fill its tiles and 8 of them are read at a time
(`_Passes` chooses). Column k has the channel k % C.

Nothing but types, UNIT and the kind of the activation is known at compile time, so that a network needs few kernels. A
program reads `tiles` tiles of rows of its columns. Sums go to one row per program, in float64, which PyTorch adds up.

With mean = center + error, where center is float32 and error its rounding, and d = x - center, which is computed
first so that the mean may be large:

    z  = d * scale + shift                    normalised and scaled; scale = gamma * rstd, shift = beta - error * scale
    dx = dz * scale + d * slope + offset      from dz = grad * act'(z)
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nasfast.ops.tensors import aligned

# Columns and rows of a tile.
COLUMNS = 64
ROWS = 32
# Types alone tell the compiled kernels apart: not whether a number is 1 or a multiple of 16, nor where vectors begin.
_SIZES = ["rows", "units", "C", "tiles"]
_VECTORS = ["sums", "statistics", "gamma", "beta", "partial", "gradients"]
# Programs of a launch from which each reads several tiles, so that there are few rows of sums. The number is fixed, so
# that results do not depend on the GPU.
_PROGRAMS = 1024
# numbers that a kernel reads at a time, where the columns are multiples of it: 16 bytes in 16 bits
_UNIT = 8
# activations that are a clamp, by their bounds; NaN is none
_CLAMPS = {"identity": (math.nan, math.nan), "relu": (0.0, math.nan), "relu6": (0.0, 6.0)}

logging.getLogger(__name__).info(
    "Triton compiles the passes of bn_act at their first calls, once on this machine: a few seconds"
)


@triton.jit
def activate(z, lo, hi, ACT: tl.constexpr):
    """act(z); "clamp" is between lo and hi, where NaN is no bound. A NaN stays one."""
    if ACT == "clamp":
        z = tl.where(z < lo, lo, z)
        return tl.where(z > hi, hi, z)
    elif ACT == "hswish":
        return z * tl.minimum(tl.maximum(z * (1.0 / 6.0) + 0.5, 0.0), 1.0)
    elif ACT == "silu":
        return z * _sigmoid(z)
    else:
        tl.static_assert(ACT == "tanh")
        return _tanh(z)


@triton.jit
def activation_gradient(grad, z, lo, hi, ACT: tl.constexpr):
    """grad * act'(z), zero at the kinks."""
    if ACT == "clamp":
        return tl.where((z <= lo) | (z >= hi), 0.0, grad)
    elif ACT == "hswish":
        inside = tl.where(z <= -3.0, 0.0, grad * (z * (1.0 / 3.0) + 0.5))
        return tl.where(z >= 3.0, grad, inside)
    elif ACT == "silu":
        s = _sigmoid(z)
        return grad * (s * (1.0 + z * (1.0 - s)))
    else:
        y = _tanh(z)
        return grad * (1.0 - y * y)


@triton.jit
def _sigmoid(z):
    # where exp(-z) overflows, the result is 0
    return 1.0 / (1.0 + tl.exp(-z))


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
def _columns(units, C, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """(columns of this program, their channels, number of all columns)."""
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return k, k % C, units * UNIT


@triton.jit
def _tile(tile, tiles, rows, k, width, ROWS: tl.constexpr):
    """(offsets, mask) of a tile of this program, [ROWS, columns]."""
    r = (tl.program_id(0) * tiles + tile).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return r[:, None] * width + k[None, :], (r < rows)[:, None] & (k < width)[None, :]


@triton.jit
def _coefficients(mean, var, gamma, beta, eps, c):
    """(center, error, rstd, scale, shift) of the channels c, from their mean and biased variance in float64."""
    center = mean.to(tl.float32)
    error = (mean - center.to(tl.float64)).to(tl.float32)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(var.to(tl.float32) + eps))
    scale = tl.load(gamma + c) * rstd
    return center, error, rstd, scale, tl.load(beta + c) - error * scale


@triton.jit
def _store_sums(partial, first, second, k, width):
    """Store the row of this program in partial (programs, 2, columns)."""
    at = partial + tl.program_id(0).to(tl.int64) * 2 * width + k
    tl.store(at, first, mask=k < width)
    tl.store(at + width, second, mask=k < width)


@triton.jit(do_not_specialize=_SIZES + _VECTORS)
def statistics_kernel(x, partial, rows, units, C, tiles, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of x and of its squares."""
    k, _, width = _columns(units, C, UNIT, COLUMNS)
    # Distances from the first row of this program: squares of the numbers themselves would lose digits in float32.
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    pivot = tl.load(x + first * width + k, mask=k < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tiles):
        at, mask = _tile(tile, tiles, rows, k, width, ROWS)
        d = tl.where(mask, tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - pivot[None, :], 0.0)
        total += d
        squares += d * d
    count = tl.minimum(rows - first, tiles * ROWS).to(tl.float64)
    p, d = pivot.to(tl.float64), tl.sum(total, 0).to(tl.float64)
    _store_sums(partial, count * p + d, tl.sum(squares, 0).to(tl.float64) + p * (2.0 * d + count * p), k, width)


@triton.jit(do_not_specialize=_SIZES + _VECTORS + ["pixels", "added_rows"])
def apply_kernel(
    x, sums, statistics, gamma, beta, residual, y, rows, units, C, tiles, pixels, added_rows, eps, lo, hi,
    UNIT: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = act(bn(x)) + the first rows of residual; statistics (2, C), mean and variance, from sums over the pixels."""
    k, c, width = _columns(units, C, UNIT, COLUMNS)
    share = 1.0 / pixels.to(tl.float64)
    mean = tl.load(sums + c) * share
    var = tl.load(sums + C + c) * share - mean * mean
    var = tl.where(var < 0.0, 0.0, var)
    center, _, _, scale, shift = _coefficients(mean, var, gamma, beta, eps, c)
    for tile in range(tiles):
        at, mask = _tile(tile, tiles, rows, k, width, ROWS)
        d = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - center[None, :]
        z = activate(d * scale[None, :] + shift[None, :], lo, hi, ACT)
        same, added = _tile(tile, tiles, added_rows, k, width, ROWS)
        z += tl.load(residual + same, mask=added, other=0.0).to(tl.float32)
        tl.store(y + at, z.to(y.dtype.element_ty), mask=mask)
    once = k < tl.where(tl.program_id(0) == 0, C, 0)
    tl.store(statistics + c, mean, mask=once)
    tl.store(statistics + C + c, var, mask=once)


@triton.jit
def _gradient(grad, x, at, mask, center, scale, shift, lo, hi, ACT: tl.constexpr):
    """(dz, d) of a tile; dz is 0 where there are no pixels."""
    d = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - center[None, :]
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    return activation_gradient(g, d * scale[None, :] + shift[None, :], lo, hi, ACT), d


@triton.jit(do_not_specialize=_SIZES + _VECTORS)
def reduce_kernel(
    grad, x, statistics, gamma, beta, partial, rows, units, C, tiles, eps, lo, hi,
    UNIT: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of dz and of dz * d."""
    k, c, width = _columns(units, C, UNIT, COLUMNS)
    mean, var = tl.load(statistics + c), tl.load(statistics + C + c)
    center, _, _, scale, shift = _coefficients(mean, var, gamma, beta, eps, c)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    total_d = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tiles):
        at, mask = _tile(tile, tiles, rows, k, width, ROWS)
        dz, d = _gradient(grad, x, at, mask, center, scale, shift, lo, hi, ACT)
        total += dz
        total_d += tl.where(mask, dz * d, 0.0)
    _store_sums(partial, tl.sum(total, 0), tl.sum(total_d, 0), k, width)


@triton.jit(do_not_specialize=_SIZES + _VECTORS + ["pixels"])
def backward_kernel(
    grad, x, sums, statistics, gamma, beta, gradients, dx, rows, units, C, tiles, pixels, eps, lo, hi,
    UNIT: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx, and gradients (2, C) of gamma and beta; pixels is 0 if the statistics do not depend on x."""
    k, c, width = _columns(units, C, UNIT, COLUMNS)
    mean, var = tl.load(statistics + c), tl.load(statistics + C + c)
    center, error, rstd, scale, shift = _coefficients(mean, var, gamma, beta, eps, c)
    dbeta = tl.load(sums + c).to(tl.float32)
    dgamma = (tl.load(sums + C + c).to(tl.float32) - error * dbeta) * rstd
    share = tl.where(pixels > 0, 1.0 / pixels.to(tl.float32), 0.0)
    slope = -scale * rstd * (dgamma * share)
    offset = -scale * (dbeta * share) - slope * error
    for tile in range(tiles):
        at, mask = _tile(tile, tiles, rows, k, width, ROWS)
        dz, d = _gradient(grad, x, at, mask, center, scale, shift, lo, hi, ACT)
        result = dz * scale[None, :] + (d * slope[None, :] + offset[None, :])
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
    once = k < tl.where(tl.program_id(0) == 0, C, 0)
    tl.store(gradients + c, dgamma, mask=once)
    tl.store(gradients + C + c, dbeta, mask=once)


@contextmanager
def _device_guard(x: Tensor) -> Iterator[None]:
    """Make the device of x the current one, because Triton launches on the current device."""
    if x.is_cuda:
        with torch.cuda.device(x.device):
            yield
    else:
        yield


class _Passes:
    """How kernels pass over a dense channels_last tensor of the shape and type of x.

    Attributes:
        repeat: neighbouring pixels that a kernel sees as one row.
        grid: programs of a launch, by rows and by columns.
        sizes: the arguments of sizes that every kernel has.
    """

    def __init__(self, x: Tensor) -> None:
        channels = x.shape[1]
        self.pixels = x.numel() // channels
        self.repeat = _repeat(self.pixels, channels)
        rows, columns = self.pixels // self.repeat, self.repeat * channels
        blocks, tiles_of_rows = -(-columns // COLUMNS), -(-rows // ROWS)
        tiles = max(1, tiles_of_rows * blocks // _PROGRAMS)
        unit = _UNIT if columns % _UNIT == 0 else 1
        self.grid = max(1, -(-tiles_of_rows // tiles)), blocks
        self.sizes: dict[str, Any] = {"rows": rows, "units": columns // unit, "C": channels, "tiles": tiles}
        self.sizes |= {"UNIT": unit, "ROWS": ROWS, "COLUMNS": COLUMNS}

    def partial(self, x: Tensor) -> Tensor:
        """Memory for the sums of each program."""
        return x.new_empty((self.grid[0], 2, self.sizes["C"] * self.repeat), dtype=torch.float64)

    def total(self, partial: Tensor) -> Tensor:
        """Two sums for each channel, (2, C)."""
        return partial.view(-1, 2, self.repeat, self.sizes["C"]).sum((0, 2))


def _repeat(pixels: int, channels: int) -> int:
    """How many pixels are one row: so that columns are multiples of _UNIT, and few are left out in the last block."""

    def cost(repeat: int) -> tuple[bool, float, int]:
        columns = repeat * channels
        return columns % _UNIT > 0, -(-columns // COLUMNS) * COLUMNS / columns, repeat

    return min((repeat for repeat in (1, 2, 4, 8, 16, 32, 64) if pixels % repeat == 0), key=cost)


def _activation(act: str) -> dict[str, Any]:
    lo, hi = _CLAMPS.get(act, (0.0, 0.0))
    return {"ACT": "clamp" if act in _CLAMPS else act, "lo": lo, "hi": hi}


def bn_act_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    act: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean, var; see csrc/library.cpp. x and residual are channels_last."""
    x, passes = aligned(x), _Passes(x)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    statistics = x.new_empty((2, x.shape[1]), dtype=torch.float64)
    pixels = 1
    with _device_guard(x):
        if running_mean is None or running_var is None:
            pixels, partial = passes.pixels, passes.partial(x)
            statistics_kernel[passes.grid](x, partial, **passes.sizes)
            sums = passes.total(partial)
        else:
            # the sums of one pixel
            sums = torch.stack((running_mean, running_var)).double()
            sums[1].addcmul_(sums[0], sums[0])
        apply_kernel[passes.grid](
            x=x,
            sums=sums,
            statistics=statistics,
            gamma=weight,
            beta=bias,
            residual=x if residual is None else aligned(residual),
            y=y,
            pixels=pixels,
            added_rows=0 if residual is None else passes.sizes["rows"],
            eps=eps,
            **passes.sizes,
            **_activation(act),
        )
    batch_statistics = statistics if running_mean is None else statistics[:, :0]
    # results of an operator may not share memory
    return y, batch_statistics[0].clone(), batch_statistics[1].clone()


def bn_act_bwd(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    act: str,
    batch_statistics: bool,
    want_x: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias; see csrc/library.cpp. grad and x are channels_last."""
    grad, x = aligned(grad), aligned(x)
    passes = _Passes(x)
    dx = torch.empty_like(x, memory_format=torch.channels_last) if want_x else x.new_empty(0)
    gradients = weight.new_empty((2, x.shape[1]))
    shared: dict[str, Any] = {"grad": grad, "x": x, "gamma": weight, "beta": bias, "eps": eps, **_activation(act)}
    shared["statistics"] = torch.stack((mean.double(), var.double()))
    with _device_guard(x):
        partial = passes.partial(x)
        reduce_kernel[passes.grid](partial=partial, **shared, **passes.sizes)
        backward_kernel[passes.grid if want_x else (1, passes.grid[1])](
            sums=passes.total(partial),
            gradients=gradients,
            dx=dx,
            pixels=passes.pixels if batch_statistics else 0,
            **shared,
            **passes.sizes | ({} if want_x else {"tiles": 0}),
        )
    dweight, dbias = gradients.unbind()
    nothing = gradients.new_empty(0)
    return dx, dweight.clone() if want_weight else nothing, dbias.clone() if want_bias else nothing.clone()
