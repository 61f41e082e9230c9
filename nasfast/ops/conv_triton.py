"""Launcher of chains of convolution, BatchNorm and activation on Triton: the counterpart of csrc/cpu/conv_bn_act.cpp.

Every convolution's output is written once and read once forward. BatchNorm and activation of a stage are applied by the
next one while it reads, statistics are summed by the stage that writes; backward likewise (schedule b of docs/method.md
6). An expansion is always stored: computing it again would need the stencil to read on-chip results, which Triton has
not. Its gradient is never written where `one_pass` says so (_triton/expansion.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nasfast._triton import depthwise, expansion, pointwise
from nasfast._triton.configs import Config, tile_width
from nasfast.ops import bn_triton, tuning
from nasfast.ops.bn_triton import cdiv, on_device_of, options, rows_of
from nasfast.ops.destinations import new_image, new_parameter_gradient


class _Geometry(NamedTuple):
    """One stage: what it does to pixels, and where its numbers are."""

    depthwise: bool
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
                is_depthwise, channels, out, kernel, stride, tuple(size), out_size, in_rows, rows, saved, statistics
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


def _run(direction: str, stage: _Geometry, y: Tensor, launch: Callable[[Config], Tensor]) -> Tensor:
    """Launch a stage's kernel with the tile sizes for it; returns its partial sums."""
    if stage.depthwise:
        family = "depthwise"
    elif stage.kernel > 1:
        family = "dense"
    else:
        family = _family("pointwise", y.dtype)
    kernel = f"{'depthwise' if stage.depthwise else 'pointwise'}_{direction}"
    shape = (str(y.dtype), stage.rows, stage.in_channels, stage.out_channels, stage.kernel, stage.stride)
    return tuning.run(family, kernel, shape, y.device, launch)


def _forward_stage(
    stage: _Geometry, weight: Tensor, x: _Rows, fold: Tensor | None, act: str, y: Tensor, *, statistics: bool
) -> Tensor:
    """Launch one convolution; returns its partial statistics, empty unless wanted."""
    some = y if fold is None else fold

    def pointwise_launch(config: Config) -> Tensor:
        blocks = cdiv(stage.rows, config.tile["BM"])
        partial = y.new_empty((blocks if statistics else 0, 4, stage.out_channels), dtype=torch.float32)
        pointwise.pointwise_forward_kernel[(blocks * cdiv(stage.out_channels, config.tile["BN"]),)](
            x.data, x.ld, some, weight, y, partial, stage.rows, weight[0].numel(), stage.out_channels,
            *stage.size, *stage.out_size,
            XSTEP=x.step, KERNEL=stage.kernel, STRIDE=stage.stride, FOLDED=fold is not None, ACT=act,
            STATISTICS=statistics, PRECISION=_precision(), **options(config),
        )  # fmt: skip
        return partial

    def depthwise_launch(config: Config) -> Tensor:
        tiles, tile = _tiles(stage.rows, stage.out_size, config)
        partial = y.new_empty((tiles if statistics else 0, 4, stage.out_channels), dtype=torch.float32)
        depthwise.depthwise_forward_kernel[(tiles * cdiv(stage.out_channels, config.tile["CB"]),)](
            x.data, x.ld, some, weight, y, partial, *stage.size, *stage.out_size, stage.out_channels,
            XSTEP=x.step, KERNEL=stage.kernel, STRIDE=stage.stride, FOLDED=fold is not None, ACT=act,
            STATISTICS=statistics, TW=tile, **options(config),
        )  # fmt: skip
        return partial

    return _run("forward", stage, y, depthwise_launch if stage.depthwise else pointwise_launch)


def _backward_stage(
    stage: _Geometry,
    weight: Tensor,
    grad: _Rows,
    y: Tensor,
    fold: Tensor,
    act: str,
    dx: _Rows,
    *,
    before: tuple[Tensor, Tensor, str] | None,
    added: Tensor | None,
) -> Tensor:
    """Launch the input gradient of one convolution.

    before: convolution output, fold and act of the stage before, of which dx then is dz; returns its partial sums, else
        empty.
    """
    before_y, before_fold, before_act = (y, fold, "identity") if before is None else before
    other = y if added is None else added

    def pointwise_launch(config: Config) -> Tensor:
        blocks = cdiv(stage.rows, config.tile["BM"])
        partial = y.new_empty((0 if before is None else blocks, 2, stage.in_channels), dtype=torch.float32)
        pointwise.pointwise_backward_kernel[(blocks * cdiv(stage.in_channels, config.tile["BN"]),)](
            grad.data, grad.ld, y, fold, weight, dx.data, dx.ld, before_y, before_fold, partial, other,
            stage.rows, stage.out_channels, stage.in_channels,
            XSTEP=dx.step, ACT=act, FOLDED=before is not None, ACT_BEFORE=before_act, ADDED=added is not None,
            PRECISION=_precision(), **options(config),
        )  # fmt: skip
        return partial

    def depthwise_launch(config: Config) -> Tensor:
        tiles, tile = _tiles(stage.in_rows, stage.size, config)
        partial = y.new_empty((0 if before is None else tiles, 2, stage.in_channels), dtype=torch.float32)
        depthwise.depthwise_backward_kernel[(tiles * cdiv(stage.in_channels, config.tile["CB"]),)](
            grad.data, grad.ld, y, fold, weight, dx.data, dx.ld, before_y, before_fold, partial, other,
            *stage.size, *stage.out_size, stage.in_channels,
            XSTEP=dx.step, KERNEL=stage.kernel, STRIDE=stage.stride, ACT=act, FOLDED=before is not None,
            ACT_BEFORE=before_act, ADDED=added is not None, TW=tile, **options(config),
        )  # fmt: skip
        return partial

    return _run("backward", stage, y, depthwise_launch if stage.depthwise else pointwise_launch)


def _expansion_backward(
    stages: list[_Geometry],
    weights: list[Tensor],
    grad: _Rows,
    ys: list[Tensor],
    folds: list[Tensor],
    acts: tuple[str, str],
    x: Tensor,
    dx: Tensor,
    *,
    finish: Callable[[int, Tensor, Tensor], None],
    added: Tensor | None,
) -> None:
    """dx of the first two stages, an expansion and a depthwise one, in one pass over their gradient.

    finish: takes the partial sums of the expansion's BatchNorm, and completes its fold.
    """
    first, second = stages[:2]
    hidden, channels = first.out_channels, first.in_channels
    columns = max(16, triton.next_power_of_2(channels))
    rows = rows_of(x)
    product = torch.empty_like(rows)
    shape = (str(dx.dtype), first.rows, channels, hidden, second.kernel, second.stride)

    def backward_launch(config: Config) -> Tensor:
        tiles, tile = _tiles(first.rows, second.size, config)
        partial = dx.new_empty((tiles, 2, hidden), dtype=torch.float32)
        expansion.expansion_backward_kernel[(tiles,)](
            grad.data, grad.ld, ys[1], folds[1], weights[1], ys[0], folds[0], weights[0], product, partial,
            *second.size, *second.out_size, hidden, channels,
            KERNEL=second.kernel, STRIDE=second.stride, ACT=acts[1], ACT_BEFORE=acts[0], PRECISION=_precision(),
            TW=tile, BN=columns, **options(config),
        )  # fmt: skip
        return partial

    def terms_launch(config: Config) -> Tensor:
        terms = dx.new_empty((channels + 2, channels), dtype=torch.float32)
        expansion.expansion_terms_kernel[(cdiv(channels, config.tile["COLUMNS"]),)](
            rows, folds[0], weights[0], terms, first.rows, hidden, channels, BN=columns, **options(config)
        )
        return terms

    def finish_launch(config: Config) -> None:
        expansion.expansion_finish_kernel[(cdiv(first.rows, config.tile["BM"]),)](
            product, rows, terms, product if added is None else added, rows_of(dx), first.rows, channels,
            ADDED=added is not None, PRECISION=_precision(), BN=columns, **options(config),
        )  # fmt: skip

    family = _family("expansion", dx.dtype)
    finish(0, tuning.run(family, "expansion_backward", shape, dx.device, backward_launch), folds[0])
    terms = tuning.run("expansion_terms", "expansion_terms", shape[1:4], dx.device, terms_launch)
    tuning.run("expansion_finish", "expansion_finish", shape[:3], dx.device, finish_launch)


def _tiles(rows: int, size: tuple[int, int], config: Config) -> tuple[int, int]:
    """Number of tiles of a batch of maps, and their width."""
    height, width = size
    tile = tile_width(width)
    return rows // (height * width) * cdiv(height, config.tile["TH"]) * cdiv(width, tile), tile


def _piece(saved: Tensor, stage: _Geometry) -> Tensor:
    return saved[stage.saved_at : stage.saved_at + stage.rows * stage.out_channels]


def _statistics(statistics: Tensor, stage: _Geometry) -> Tensor:
    return statistics[stage.statistics_at : stage.statistics_at + 2 * stage.out_channels]


def _fold(folds: Tensor, stage: _Geometry) -> Tensor:
    """fold (5, C) of a stage in the float64 memory that follows the statistics."""
    first = stage.statistics_at // 2 * 5
    return folds.view(torch.float32)[first : first + 5 * stage.out_channels].view(5, stage.out_channels)


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
    statistics = torch.empty(2 * count + cdiv(5 * count, 2), dtype=torch.float64, device=x.device)
    out = new_image("result", (x.shape[0], last.out_channels * (2 if shuffle else 1), *last.out_size), x)
    rows = rows_of(x)
    given = _Rows(rows[:, 1:], x.shape[1], 2) if shuffle else _Rows(rows, x.shape[1])
    fold, act, y = None, "identity", None
    with on_device_of(x):
        for i, stage in enumerate(stages):
            y = _piece(saved, stage) if keep else x.new_empty(stage.rows * stage.out_channels)
            batch = running_means[i].numel() == 0
            partial = _forward_stage(stage, conv_weights[i], given, fold, act, y, statistics=batch)
            running = None if batch else (running_means[i], running_vars[i])
            fold = bn_triton.finalize(
                _statistics(statistics, stage), bn_weights[i], bn_biases[i], eps[i],
                partial=partial if batch else None, running=running, fold=_fold(statistics[2 * count :], stage),
            )  # fmt: skip
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

    def finish(i: int, partial: Tensor, fold: Tensor) -> None:
        bn_triton.backward_finalize(
            partial, _statistics(statistics, stages[i]), bn_weights[i], eps[i], fold, stages[i].rows,
            batch_statistics=batch_statistics[i], dweight=dweights[i], dbias=dbiases[i],
        )  # fmt: skip

    with on_device_of(saved):
        # backward completes them, and may be called again
        copy = statistics[2 * sum(s.out_channels for s in stages) :].clone()
        folds = [_fold(copy, stage) for stage in stages]
        result_grad = grads[:, channels:] if shuffle else grads
        finish(
            len(stages) - 1,
            bn_triton.reduce_gradient(result_grad, ys[-1].view(-1, channels), folds[-1], names[-1]),
            folds[-1],
        )
        gradient, act = _Rows(result_grad, grad.shape[1]), names[-1]
        # the first stage's own convolution is only in the way of x
        for i in range(len(stages) - 1, -1 if want_x else stop, -1):
            stage = stages[i]
            if one_pass and want_x and i == 1:
                _expansion_backward(
                    stages, conv_weights, gradient, ys, folds, (names[0], act), x, dx,
                    finish=finish, added=grads if add_input else None,
                )  # fmt: skip
                break
            if i == 0:
                rows = rows_of(dx)
                target = _Rows(rows[:, 1:], shape[1], 2) if shuffle else _Rows(rows, shape[1])
                before = None
            else:
                target = _Rows(saved.new_empty(stage.in_rows * stage.in_channels), stage.in_channels)
                before = (ys[i - 1], folds[i - 1], names[i - 1])
            partial = _backward_stage(
                stage, conv_weights[i], gradient, ys[i], folds[i], act, target,
                before=before, added=grads if add_input and i == 0 else None,
            )  # fmt: skip
            if before is not None:
                finish(i - 1, partial, folds[i - 1])
            # what follows is dz itself
            gradient, act = target, "identity"
        if want_x and shuffle:
            bn_triton.merge_shuffled(grads, rows_of(dx), stages[0].in_channels)
    return dx, dweights, dbiases
