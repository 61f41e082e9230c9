"""Launchers of the Triton kernels of bn_act (kernels/triton/bn.py).

Only `nasfast.ops.registry` imports them, and only where a call names Triton.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nasfast._triton import bn
from nasfast.ops.cuda.conv import aligned

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


@contextmanager
def _on_device_of(x: Tensor) -> Iterator[None]:
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
        blocks, tiles_of_rows = -(-columns // bn.COLUMNS), -(-rows // bn.ROWS)
        tiles = max(1, tiles_of_rows * blocks // _PROGRAMS)
        unit = _UNIT if columns % _UNIT == 0 else 1
        self.grid = max(1, -(-tiles_of_rows // tiles)), blocks
        self.sizes: dict[str, Any] = {"rows": rows, "units": columns // unit, "C": channels, "tiles": tiles}
        self.sizes |= {"UNIT": unit, "ROWS": bn.ROWS, "COLUMNS": bn.COLUMNS}

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
        return columns % _UNIT > 0, -(-columns // bn.COLUMNS) * bn.COLUMNS / columns, repeat

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
    with _on_device_of(x):
        if running_mean is None or running_var is None:
            pixels, partial = passes.pixels, passes.partial(x)
            bn.statistics_kernel[passes.grid](x, partial, **passes.sizes)
            sums = passes.total(partial)
        else:
            # the sums of one pixel
            sums = torch.stack((running_mean, running_var)).double()
            sums[1].addcmul_(sums[0], sums[0])
        bn.apply_kernel[passes.grid](
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
    kept = statistics if running_mean is None else statistics[:, :0]
    # results of an operator may not share memory
    return y, kept[0].clone(), kept[1].clone()


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
    with _on_device_of(x):
        partial = passes.partial(x)
        bn.reduce_kernel[passes.grid](partial=partial, **shared, **passes.sizes)
        bn.backward_kernel[passes.grid if want_x else (1, passes.grid[1])](
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
