"""Launcher of chains of convolution, BatchNorm and activation on Triton: the counterpart of csrc/cpu/conv_bn_act.cpp.

Every convolution's output is written once and read once forward. BatchNorm and activation of a stage are applied by the
next one while it reads, statistics are summed by the stage that writes; backward likewise (schedule b of docs/method.md
6). An expansion and its gradient are always stored: the plan `one_pass` is for the CPU, and false here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nasfast._triton import depthwise, pointwise
from nasfast._triton.configs import (
    GATHERED,
    MIN_PROGRAMS,
    NORMALIZED,
    READ,
    STENCIL_REGISTERS,
    Config,
    product_tiles,
    stencil_tile,
)
from nasfast.ops import tuning
from nasfast.ops.destinations import new_image, new_parameter_gradient
from nasfast.ops.triton import bn as bn_triton
from nasfast.ops.triton.bn import Norm, NormGradient, cdiv, on_device_of, options, rows_of


class _Geometry(NamedTuple):
    """One stage: what it does to pixels, and where its numbers are."""

    depthwise: bool
    images: int
    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    size: tuple[int, int]  # of the input
    out_size: tuple[int, int]
    in_rows: int
    rows: int
    saved_at: int  # element of the saved tensor
    statistics_at: int


def _geometries(
    shape: list[int], weights: list[Tensor], strides: list[int], shuffle: bool
) -> tuple[list[_Geometry], int]:
    """The stages, and the number of elements they keep."""
    batch, channels, *size = shape
    channels = channels // 2 if shuffle else channels
    stages, saved, statistics = [], 0, 0
    for weight, stride in zip(weights, strides, strict=True):
        out, per_group, kernel, _ = weight.shape
        out_size = tuple((length - 1) // stride + 1 for length in size)
        is_depthwise = per_group == 1 and out == channels and kernel > 1
        in_rows, rows = batch * size[0] * size[1], batch * out_size[0] * out_size[1]
        stages.append(
            _Geometry(
                is_depthwise,
                batch,
                channels,
                out,
                kernel,
                stride,
                tuple(size),
                out_size,
                in_rows,
                rows,
                saved,
                statistics,
            )
        )
        saved += (rows * out + 63) // 64 * 64
        statistics += 2 * out
        channels, size = out, out_size
    return stages, saved


class _Rows(NamedTuple):
    """Rows that a stage reads or writes: `ld` elements apart, their channels `step`."""

    data: Tensor
    ld: int
    step: int = 1


def _precision() -> str:
    # the same switch as for torch.matmul: float32 products are exact unless it is moved
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _family(name: str, dtype: torch.dtype) -> str:
    return f"{name}_fp32" if dtype == torch.float32 else name


def _run(direction: str, stage: _Geometry, y: Tensor, launch: Callable[[Config], None]) -> None:
    """Launch a stage's kernel with the tile sizes for it."""
    if stage.depthwise:
        family = "depthwise"
    elif stage.kernel > 1:
        family = "dense"
    else:
        family = _family("pointwise" if direction == "forward" else "pointwise_backward", y.dtype)
    kernel = f"{'depthwise' if stage.depthwise else 'pointwise'}_{direction}"
    shape = (str(y.dtype), stage.rows, stage.in_channels, stage.out_channels, stage.kernel, stage.stride)
    tuning.run(family, kernel, shape, y.device, launch)


def _product_programs(config: Config, rows: int, columns: int) -> tuple[int, int]:
    """Programs one below the other, and blocks of columns."""
    tile = config.tile
    return cdiv(rows, tile["BM"] * tile["TILES"]), cdiv(columns, tile["BN"])


def _forward_stage(
    stage: _Geometry, weight: Tensor, x: _Rows, fold: Tensor | None, act: str, y: Tensor, norm: Norm | None
) -> None:
    """Launch one convolution; norm: of its result, if that has batch statistics."""
    some = y if fold is None else fold

    def pointwise_launch(config: Config) -> None:
        depth, columns, size = weight[0].numel(), stage.out_channels, dict.fromkeys(("H", "W", "OH", "OW"), 0)
        if stage.kernel > 1:
            size = dict(zip(size, (*stage.size, *stage.out_size), strict=True))
        element = GATHERED if stage.kernel > 1 else READ if fold is None else NORMALIZED
        config = product_tiles(config, stage.rows, depth, columns, element)
        programs = _product_programs(config, stage.rows, columns)
        pointwise.pointwise_forward_kernel[(math.prod(programs),)](
            x.data, some, weight, y, norm and norm.sums(*programs), stage.rows,
            K=depth, N=columns, LDX=x.ld, XSTEP=x.step, KERNEL=stage.kernel, STRIDE=stage.stride, **size,
            FOLDED=fold is not None, ACT=act, STATISTICS=norm is not None, PRECISION=_precision(), **options(config),
        )  # fmt: skip

    def depthwise_launch(config: Config) -> None:
        cut = _stencil(stage, 0, config, y)
        depthwise.depthwise_forward_kernel[(cut.tiles * cut.blocks,)](
            x.data, some, weight, cut.taps, y, norm and norm.sums(cut.tiles, cut.blocks),
            stage.images, *stage.size, *stage.out_size,
            LDX=x.ld, XSTEP=x.step, FOLDED=fold is not None, ACT=act, STATISTICS=norm is not None, **cut.constants,
        )  # fmt: skip

    _run("forward", stage, y, depthwise_launch if stage.depthwise else pointwise_launch)


class _Before(NamedTuple):
    """The stage before the one whose gradient is taken: its convolution's output, BatchNorm and activation."""

    y: Tensor
    fold: Tensor
    act: str
    gradient: NormGradient


def _backward_stage(
    stage: _Geometry,
    weight: Tensor,
    grad: _Rows,
    y: Tensor,
    fold: Tensor,
    back: Tensor,
    act: str,
    dx: _Rows,
    *,
    before: _Before | None,
    added: Tensor | None,
) -> None:
    """Launch the input gradient of one convolution; dx is dz of `before`, where there is one."""
    before_y, before_fold, before_act = (y, fold, "identity") if before is None else before[:3]
    other = y if added is None else added

    def pointwise_launch(config: Config) -> None:
        depth, columns = stage.out_channels, stage.in_channels
        config = product_tiles(config, stage.rows, depth, columns, NORMALIZED)
        programs = _product_programs(config, stage.rows, columns)
        pointwise.pointwise_backward_kernel[(math.prod(programs),)](
            grad.data, y, fold, back, weight, dx.data, before_y, before_fold,
            before and before.gradient.sums(*programs), other, stage.rows,
            K=depth, N=columns, LDG=grad.ld, LDX=dx.ld, XSTEP=dx.step, ACT=act, FOLDED=before is not None,
            ACT_BEFORE=before_act, ADDED=added is not None, PRECISION=_precision(), **options(config),
        )  # fmt: skip

    def depthwise_launch(config: Config) -> None:
        cut = _stencil(stage, stage.stride, config, y)
        depthwise.depthwise_backward_kernel[(cut.tiles * cut.blocks,)](
            grad.data, y, fold, back, weight, cut.taps, dx.data, before_y, before_fold,
            before and before.gradient.sums(cut.tiles, cut.blocks), other,
            stage.images, *stage.size, *stage.out_size,
            LDG=grad.ld, LDX=dx.ld, XSTEP=dx.step, ACT=act, FOLDED=before is not None, ACT_BEFORE=before_act,
            ADDED=added is not None, **cut.constants,
        )  # fmt: skip

    _run("backward", stage, y, depthwise_launch if stage.depthwise else pointwise_launch)


class _Stencil(NamedTuple):
    """How a depthwise kernel cuts maps, for its launch and its compilation.

    Attributes:
        tiles, blocks: of pixels and of channels; a program makes one of each.
        taps: memory for every program's weights.
        constants: what the kernel is compiled for.
    """

    tiles: int
    blocks: int
    taps: Tensor
    constants: dict[str, int]


def _stencil(stage: _Geometry, back: int, config: Config, like: Tensor) -> _Stencil:
    """Cut the maps of the result, or of the gradient; back: see STRIPS."""
    height, width = stage.size if back else stage.out_size
    tile = stencil_tile(config, width, stage.in_channels, back)
    blocks = cdiv(stage.in_channels, tile["CB"])
    wide = cdiv(stage.images * cdiv(width, tile["COLUMNS"]), tile["STRIPS"])
    # fewer rows each where there would be too few programs
    while wide * cdiv(height, tile["ROWS"]) * blocks < MIN_PROGRAMS and tile["ROWS"] > 2:
        tile["ROWS"] = cdiv(tile["ROWS"], 2)
    tiles = wide * cdiv(height, tile["ROWS"])
    constants = {
        "C": stage.in_channels, "KERNEL": stage.kernel, "STRIDE": stage.stride,
        "EVEN": width % tile["COLUMNS"] == 0 and stage.size[1] == stage.out_size[1] * stage.stride,
        **options(config._replace(tile=tile, registers=STENCIL_REGISTERS[back] if like.element_size() == 2 else None)),
    }  # fmt: skip
    taps = like.new_empty(tiles * blocks * stage.kernel**2 * tile["CB"], dtype=torch.float32)
    return _Stencil(tiles, blocks, taps, constants)


def _piece(saved: Tensor, stage: _Geometry) -> Tensor:
    return saved[stage.saved_at : stage.saved_at + stage.rows * stage.out_channels]


def _statistics(statistics: Tensor, stage: _Geometry) -> Tensor:
    return statistics[stage.statistics_at : stage.statistics_at + 2 * stage.out_channels]


def _fold(folds: Tensor, stage: _Geometry) -> Tensor:
    """fold (3, C) of a stage in the float64 memory that follows the statistics."""
    first = stage.statistics_at // 2 * 3
    return folds.view(torch.float32)[first : first + 3 * stage.out_channels].view(3, stage.out_channels)


def conv_bn_act_fwd(
    x: Tensor,
    conv_weights: list[Tensor],
    bn_weights: list[Tensor],
    bn_biases: list[Tensor],
    running_means: list[Tensor],
    running_vars: list[Tensor],
    residual: Tensor | None,
    strides: list[int],
    acts: str,
    eps: list[float],
    add_input: bool,
    one_pass: bool,
    shuffle: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, saved, statistics; see csrc/library.cpp."""
    stages, size = _geometries(list(x.shape), conv_weights, strides, shuffle)
    last = stages[-1]
    names = acts.split(",")
    saved = x.new_empty(size if keep else 0)
    count = sum(s.out_channels for s in stages)
    statistics = torch.empty(2 * count + cdiv(3 * count, 2), dtype=torch.float64, device=x.device)
    out = new_image("result", (x.shape[0], last.out_channels * (2 if shuffle else 1), *last.out_size), x)
    rows = rows_of(x)
    given = _Rows(rows[:, 1:], x.shape[1], 2) if shuffle else _Rows(rows, x.shape[1])
    fold, act, y = None, "identity", None
    with on_device_of(x):
        for i, stage in enumerate(stages):
            y = _piece(saved, stage) if keep else x.new_empty(stage.rows * stage.out_channels)
            norm = Norm(
                bn_weights[i], bn_biases[i], eps[i], _statistics(statistics, stage),
                _fold(statistics[2 * count :], stage),
            )  # fmt: skip
            batch = running_means[i].numel() == 0
            _forward_stage(stage, conv_weights[i], given, fold, act, y, norm if batch else None)
            if not batch:
                bn_triton.fold_known(norm, (running_means[i], running_vars[i]))
            fold = norm.fold
            given, act = _Rows(y, stage.out_channels), names[i]
        added = x if add_input else residual
        target = rows_of(out)
        bn_triton.apply(
            y.view(last.rows, last.out_channels), fold, act, target[:, last.out_channels :] if shuffle else target,
            residual=None if added is None else rows_of(added), even=rows if shuffle else None,
        )  # fmt: skip
    return out, saved, statistics


def conv_bn_act_bwd(
    grad: Tensor,
    x: Tensor | None,
    shape: list[int],
    saved: Tensor,
    statistics: Tensor,
    conv_weights: list[Tensor],
    bn_weights: list[Tensor],
    bn_biases: list[Tensor],
    batch_statistics: list[bool],
    strides: list[int],
    acts: str,
    eps: list[float],
    add_input: bool,
    one_pass: bool,
    shuffle: bool,
    wants: list[bool],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """dx, dweights, dbiases; see csrc/library.cpp."""
    stages, _ = _geometries(shape, conv_weights, strides, shuffle)
    names = acts.split(",")
    want_x, want_weights, want_biases = wants[0], wants[1::2], wants[2::2]
    dx = new_image("input_gradient", shape, saved) if want_x else saved.new_empty(0)
    dweights = [new_parameter_gradient(w, wanted=want) for w, want in zip(bn_weights, want_weights, strict=True)]
    dbiases = [new_parameter_gradient(b, wanted=want) for b, want in zip(bn_biases, want_biases, strict=True)]
    # the first stage whose BatchNorm backward has to reach
    reached = [i for i, pair in enumerate(zip(want_weights, want_biases, strict=True)) if any(pair)]
    stop = 0 if want_x else reached[0] if reached else len(stages)
    if stop == len(stages):
        return dx, dweights, dbiases
    ys = [_piece(saved, stage) for stage in stages]
    channels = stages[-1].out_channels
    grads = rows_of(grad)
    count = sum(s.out_channels for s in stages)
    folds = [_fold(statistics[2 * count :], stage) for stage in stages]
    backs = [saved.new_empty((2, stage.out_channels), dtype=torch.float32) for stage in stages]
    gradients = [
        NormGradient(
            _statistics(statistics, stage), bn_weights[i], eps[i], dweights[i], dbiases[i], backs[i],
            stage.rows if batch_statistics[i] else None,
        )
        for i, stage in enumerate(stages)
    ]  # fmt: skip
    with on_device_of(saved):
        result_grad = grads[:, channels:] if shuffle else grads
        last = ys[-1].view(-1, channels)
        bn_triton.reduce_gradient(result_grad, last, folds[-1], names[-1], gradients[-1])
        gradient, act = _Rows(result_grad, grad.shape[1]), names[-1]
        # the first stage's own convolution is only in the way of x
        for i in range(len(stages) - 1, -1 if want_x else stop, -1):
            stage = stages[i]
            if i == 0:
                rows = rows_of(dx)
                target = _Rows(rows[:, 1:], shape[1], 2) if shuffle else _Rows(rows, shape[1])
                before = None
            else:
                target = _Rows(saved.new_empty(stage.in_rows * stage.in_channels), stage.in_channels)
                before = _Before(ys[i - 1], folds[i - 1], names[i - 1], gradients[i - 1])
            _backward_stage(
                stage, conv_weights[i], gradient, ys[i], folds[i], backs[i], act, target,
                before=before, added=grads if add_input and i == 0 else None,
            )  # fmt: skip
            # what follows is dz itself
            gradient, act = target, "identity"
        if want_x and shuffle:
            bn_triton.merge_shuffled(grads, rows_of(dx), stages[0].in_channels)
    return dx, dweights, dbiases
