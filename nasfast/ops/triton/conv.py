"""Launchers of chains of convolution, BatchNorm and activation on Triton: the counterpart of csrc/cpu/conv_bn_act.cpp.

Forward writes every convolution's output once and reads it once. The kernel that writes an output sums its statistics,
and the kernel of the next stage applies BatchNorm and activation while it reads. Backward does the same (schedule b of
docs/method.md 6). Plans for Triton compute nothing again in backward: an expansion and its gradient are always stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nasfast._triton import depthwise, pointwise
from nasfast._triton.configs import (
    FAMILIES,
    GATHERED,
    MIN_PROGRAMS,
    NORMALIZED,
    READ,
    STENCIL_REGISTERS,
    Config,
    product_tiles,
    stencil_tile,
)
from nasfast.ops.autograd import empty_gradients
from nasfast.ops.plan import ChainPlan, Kind, StagePlan, read_plan
from nasfast.ops.triton import bn as bn_triton
from nasfast.ops.triton.bn import Norm, NormGradient, cdiv, on_device_of, options, rows_of


class _Rows(NamedTuple):
    """Rows that a stage reads or writes: `ld` elements from row to row, `step` from channel to channel."""

    data: Tensor
    ld: int
    step: int = 1


def _precision() -> str:
    # the setting of torch.matmul: products of float32 are exact unless the user changes it
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _family(name: str, dtype: torch.dtype) -> str:
    return f"{name}_fp32" if dtype == torch.float32 else name


def _run(direction: str, stage: StagePlan, y: Tensor, launch: Callable[[Config], None]) -> None:
    """Launch the kernel of a stage with the tile sizes for it."""
    if stage.kind == Kind.DEPTHWISE:
        family = "depthwise"
    elif stage.kind == Kind.DENSE:
        family = "dense"
    else:
        family = _family("pointwise" if direction == "forward" else "pointwise_backward", y.dtype)
    launch(FAMILIES[family])


def _product_programs(config: Config, rows: int, columns: int) -> tuple[int, int]:
    """Number of programs along the rows, and of blocks of columns."""
    tile = config.tile
    return cdiv(rows, tile["BM"] * tile["TILES"]), cdiv(columns, tile["BN"])


def _forward_stage(
    stage: StagePlan,
    weight: Tensor,
    x: _Rows,
    fold: Tensor | None,
    y: Tensor,
    *,
    norm: Norm | None,
    act_before: str,
) -> None:
    """Launch one convolution.

    Args:
        x: its input; fold and act_before are the BatchNorm and activation through which the input is read, None and
            identity for the input of the chain.
        y: memory of the result.
        norm: BatchNorm of the result, if that uses the statistics of the batch.
    """
    some = y if fold is None else fold

    def pointwise_launch(config: Config) -> None:
        depth, columns, size = weight[0].numel(), stage.out_channels, dict.fromkeys(("H", "W", "OH", "OW"), 0)
        dense = stage.kind == Kind.DENSE
        if dense:
            size = dict(zip(size, (*stage.size, *stage.out_size), strict=True))
        element = GATHERED if dense else READ if fold is None else NORMALIZED
        config = product_tiles(config, stage.rows, depth, columns, element)
        programs = _product_programs(config, stage.rows, columns)
        pointwise.pointwise_forward_kernel[(math.prod(programs),)](
            x=x.data,
            fold=some,
            weight=weight,
            y=y,
            sums=norm and norm.sums(*programs),
            M=stage.rows,
            K=depth,
            N=columns,
            LDX=x.ld,
            XSTEP=x.step,
            KERNEL=stage.kernel,
            STRIDE=stage.stride,
            **size,
            FOLDED=fold is not None,
            ACT=act_before,
            STATISTICS=norm is not None,
            PRECISION=_precision(),
            **options(config),
        )

    def depthwise_launch(config: Config) -> None:
        cut = _stencil(stage, 0, config, y)
        depthwise.depthwise_forward_kernel[(cut.tiles * cut.blocks,)](
            x=x.data,
            fold=some,
            weight=weight,
            taps=cut.taps,
            y=y,
            sums=norm and norm.sums(cut.tiles, cut.blocks),
            images=stage.batch,
            H=stage.size[0],
            W=stage.size[1],
            OH=stage.out_size[0],
            OW=stage.out_size[1],
            LDX=x.ld,
            XSTEP=x.step,
            FOLDED=fold is not None,
            ACT=act_before,
            STATISTICS=norm is not None,
            **cut.constants,
        )

    _run("forward", stage, y, depthwise_launch if stage.kind == Kind.DEPTHWISE else pointwise_launch)


class _Output(NamedTuple):
    """Output of a stage's convolution, and how the gradient reaches it: through activation and BatchNorm.

    Attributes:
        y: the convolution's output.
        fold, back: coefficients of BatchNorm, see kernels/triton/common.py.
        act: activation through which the gradient has to go: that of the stage, or identity where the gradient is dz.
    """

    y: Tensor
    fold: Tensor
    back: Tensor
    act: str


class _Before(NamedTuple):
    """Output, BatchNorm and activation of the stage before the one whose input gradient is computed."""

    y: Tensor
    fold: Tensor
    act: str
    gradient: NormGradient


def _backward_stage(
    stage: StagePlan,
    weight: Tensor,
    grad: _Rows,
    output: _Output,
    dx: _Rows,
    *,
    before: _Before | None,
    added: Tensor | None,
) -> None:
    """Launch the input gradient of one convolution.

    Args:
        grad: gradient of the stage's result, or dz of the stage.
        dx: memory of the input gradient; with `before` it gets dz of that stage.
        before: None for the first stage of the chain.
        added: what is added to the gradient of the chain's input, or None.
    """
    y = output.y
    before_y, before_fold, before_act = (y, output.fold, "identity") if before is None else before[:3]
    # what both kernels get
    common = dict(
        grad=grad.data,
        y=y,
        fold=output.fold,
        back=output.back,
        weight=weight,
        dx=dx.data,
        before=before_y,
        fold_before=before_fold,
        added=y if added is None else added,
        LDG=grad.ld,
        LDX=dx.ld,
        XSTEP=dx.step,
        ACT=output.act,
        FOLDED=before is not None,
        ACT_BEFORE=before_act,
        ADDED=added is not None,
    )

    def pointwise_launch(config: Config) -> None:
        depth, columns = stage.out_channels, stage.in_channels
        config = product_tiles(config, stage.rows, depth, columns, NORMALIZED)
        programs = _product_programs(config, stage.rows, columns)
        pointwise.pointwise_backward_kernel[(math.prod(programs),)](
            sums=before and before.gradient.sums(*programs),
            M=stage.rows,
            K=depth,
            N=columns,
            PRECISION=_precision(),
            **common,
            **options(config),
        )

    def depthwise_launch(config: Config) -> None:
        cut = _stencil(stage, stage.stride, config, y)
        depthwise.depthwise_backward_kernel[(cut.tiles * cut.blocks,)](
            taps=cut.taps,
            sums=before and before.gradient.sums(cut.tiles, cut.blocks),
            images=stage.batch,
            H=stage.size[0],
            W=stage.size[1],
            OH=stage.out_size[0],
            OW=stage.out_size[1],
            **common,
            **cut.constants,
        )

    _run("backward", stage, y, depthwise_launch if stage.kind == Kind.DEPTHWISE else pointwise_launch)


class _Stencil(NamedTuple):
    """How a depthwise kernel cuts images, for its launch and its compilation.

    Attributes:
        tiles: number of tiles of pixels.
        blocks: number of blocks of channels; every pair of a tile and a block has one program.
        taps: memory for the weights of every program.
        constants: constexpr arguments of the kernel.
    """

    tiles: int
    blocks: int
    taps: Tensor
    constants: dict[str, int | None]


def _stencil(stage: StagePlan, back: int, config: Config, like: Tensor) -> _Stencil:
    """Cut the images of the output, or in backward those of the input; back: see stencil_tile."""
    height, width = stage.size if back else stage.out_size
    tile = stencil_tile(config, width, stage.in_channels, back)
    blocks = cdiv(stage.in_channels, tile["CB"])
    wide = cdiv(stage.batch * cdiv(width, tile["COLUMNS"]), tile["STRIPS"])
    # with too few programs, every program gets fewer rows
    while wide * cdiv(height, tile["ROWS"]) * blocks < MIN_PROGRAMS and tile["ROWS"] > 2:
        tile["ROWS"] = cdiv(tile["ROWS"], 2)
    tiles = wide * cdiv(height, tile["ROWS"])
    constants = {
        "C": stage.in_channels,
        "KERNEL": stage.kernel,
        "STRIDE": stage.stride,
        "EVEN": width % tile["COLUMNS"] == 0 and stage.size[1] == stage.out_size[1] * stage.stride,
        **options(config._replace(tile=tile, registers=STENCIL_REGISTERS[back] if like.element_size() == 2 else None)),
    }
    taps = like.new_empty(tiles * blocks * stage.kernel**2 * tile["CB"], dtype=torch.float32)
    return _Stencil(tiles, blocks, taps, constants)


def _piece(saved: Tensor, stage: StagePlan) -> Tensor:
    if stage.saved_at is None:
        raise ValueError("conv_bn_act_chain: Triton needs a plan that saves the output of every stage")
    return saved[stage.saved_at : stage.saved_at + stage.rows * stage.out_channels]


def _statistics(statistics: Tensor, stage: StagePlan) -> Tensor:
    return statistics[stage.statistics_at : stage.statistics_at + 2 * stage.out_channels]


def _fold(folds: Tensor, stage: StagePlan) -> Tensor:
    """fold (3, C) of a stage, in the float64 memory behind the statistics."""
    first = stage.statistics_at // 2 * 3
    return folds.view(torch.float32)[first : first + 3 * stage.out_channels].view(3, stage.out_channels)


def _check(
    chain: ChainPlan, tensors: Mapping[str, tuple[Tensor, tuple[int, ...]]], *weights: list[Tensor], add_input: bool
) -> None:
    """Refuse tensors that are not those of the plan, because the kernels would read and write beyond their ends.

    Args:
        tensors: with the shapes that they must have.
        weights: of the convolutions, then weights and biases of the BatchNorms.

    Raises:
        ValueError: a shape is not that of the plan.
    """
    for name, (tensor, shape) in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"conv_bn_act_chain: this plan needs {name} of shape {shape}, got {tuple(tensor.shape)}")
    if add_input and (chain.shuffle or chain.in_shape != chain.out_shape):
        raise ValueError("conv_bn_act_chain: this plan needs add_input=False, as its result has not the shape of x")
    for i, (stage, conv, *norm) in enumerate(zip(chain.stages, *weights, strict=True)):
        per_group = 1 if stage.kind == Kind.DEPTHWISE else stage.in_channels
        weight = stage.out_channels, per_group, stage.kernel, stage.kernel
        if conv.shape != weight or any(vector.shape != (stage.out_channels,) for vector in norm):
            raise ValueError(
                f"conv_bn_act_chain, stage {i}: this plan needs conv_weight of shape {weight}, and a BatchNorm of "
                f"{stage.out_channels} channels; got {tuple(conv.shape)} and {[tuple(v.shape) for v in norm]}"
            )


def conv_bn_act_chain_fwd(
    x: Tensor,
    conv_weights: list[Tensor],
    bn_weights: list[Tensor],
    bn_biases: list[Tensor],
    running_means: list[Tensor],
    running_vars: list[Tensor],
    residual: Tensor | None,
    plan: list[int],
    eps: list[float],
    add_input: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, saved, statistics; see csrc/library.cpp."""
    chain = read_plan(plan)
    images = {"x": (x, chain.in_shape)} | ({} if residual is None else {"residual": (residual, chain.out_shape)})
    _check(chain, images, conv_weights, bn_weights, bn_biases, add_input=add_input)
    last = chain.stages[-1]
    saved = x.new_empty(chain.saved_size if keep else 0)
    size = chain.statistics_size
    statistics = x.new_empty(chain.statistics_elements("triton"), dtype=torch.float64)
    out = torch.empty(chain.out_shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows = rows_of(x)
    given = _Rows(rows[:, 1:], x.shape[1], 2) if chain.shuffle else _Rows(rows, x.shape[1])
    fold, act = None, "identity"
    with on_device_of(x):
        for i, stage in enumerate(chain.stages):
            y = _piece(saved, stage) if keep else x.new_empty(stage.rows * stage.out_channels)
            norm = Norm(
                gamma=bn_weights[i],
                beta=bn_biases[i],
                eps=eps[i],
                statistics=_statistics(statistics, stage),
                fold=_fold(statistics[size:], stage),
            )
            batch = running_means[i].numel() == 0
            _forward_stage(stage, conv_weights[i], given, fold, y, norm=norm if batch else None, act_before=act)
            if not batch:
                bn_triton.fold_known(norm, (running_means[i], running_vars[i]))
            fold = norm.fold
            given, act = _Rows(y, stage.out_channels), stage.act
        added = x if add_input else residual
        target = rows_of(out)
        bn_triton.apply(
            y.view(last.rows, last.out_channels),
            norm.fold,
            act,
            target[:, last.out_channels :] if chain.shuffle else target,
            residual=None if added is None else rows_of(added),
            even=rows if chain.shuffle else None,
        )
    return out, saved, statistics


def conv_bn_act_chain_bwd(
    grad: Tensor,
    x: Tensor | None,
    saved: Tensor,
    statistics: Tensor,
    conv_weights: list[Tensor],
    bn_weights: list[Tensor],
    bn_biases: list[Tensor],
    batch_statistics: list[bool],
    plan: list[int],
    eps: list[float],
    add_input: bool,
    wants: list[bool],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """dx, dweights, dbiases; see csrc/library.cpp."""
    chain = read_plan(plan)
    images = {"grad": (grad, chain.out_shape), "saved": (saved, (chain.saved_size,))}
    _check(chain, images, conv_weights, bn_weights, bn_biases, add_input=add_input)
    stages = chain.stages
    want_x, want_weights, want_biases = wants[0], wants[1::2], wants[2::2]
    dx, dweights, dbiases = empty_gradients(chain, saved, bn_weights, bn_biases, wants)
    # the first stage whose BatchNorm backward has to reach
    reached = [i for i, pair in enumerate(zip(want_weights, want_biases, strict=True)) if any(pair)]
    stop = 0 if want_x else reached[0] if reached else len(stages)
    if stop == len(stages):
        return dx, dweights, dbiases
    ys = [_piece(saved, stage) for stage in stages]
    channels = stages[-1].out_channels
    grads = rows_of(grad)
    folds = [_fold(statistics[chain.statistics_size :], stage) for stage in stages]
    backs = [saved.new_empty((2, stage.out_channels), dtype=torch.float32) for stage in stages]
    gradients = [
        NormGradient(
            statistics=_statistics(statistics, stage),
            gamma=bn_weights[i],
            eps=eps[i],
            dgamma=dweights[i],
            dbeta=dbiases[i],
            back=backs[i],
            rows=stage.rows if batch_statistics[i] else None,
        )
        for i, stage in enumerate(stages)
    ]
    with on_device_of(saved):
        result_grad = grads[:, channels:] if chain.shuffle else grads
        last = ys[-1].view(-1, channels)
        bn_triton.reduce_gradient(result_grad, last, folds[-1], stages[-1].act, gradients[-1])
        gradient, act = _Rows(result_grad, grad.shape[1]), stages[-1].act
        # without want_x, nothing needs the gradient behind the convolution of the stage `stop`
        for i in range(len(stages) - 1, -1 if want_x else stop, -1):
            stage = stages[i]
            if i == 0:
                rows = rows_of(dx)
                target = _Rows(rows[:, 1:], dx.shape[1], 2) if chain.shuffle else _Rows(rows, dx.shape[1])
                before = None
            else:
                target = _Rows(saved.new_empty(stage.in_rows * stage.in_channels), stage.in_channels)
                before = _Before(ys[i - 1], folds[i - 1], stages[i - 1].act, gradients[i - 1])
            _backward_stage(
                stage,
                conv_weights[i],
                gradient,
                _Output(ys[i], folds[i], backs[i], act),
                target,
                before=before,
                added=grads if add_input and i == 0 else None,
            )
            # the next stage gets dz, which is behind its activation
            gradient, act = target, "identity"
        if want_x and chain.shuffle:
            bn_triton.merge_shuffled(grads, rows_of(dx), stages[0].in_channels)
    return dx, dweights, dbiases
