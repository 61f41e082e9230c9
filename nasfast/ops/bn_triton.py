"""Launchers of the Triton kernels of bn_act, and of BatchNorm between the stages of a chain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nasfast._triton import bn
from nasfast._triton.configs import Config
from nasfast.ops import tuning
from nasfast.ops.destinations import new_image, new_parameter_gradient


def rows_of(image: Tensor) -> Tensor:
    """(N * H * W, C) view of a channels_last image tensor."""
    n, channels, height, width = image.shape
    return image.as_strided((n * height * width, channels), (channels, 1))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@contextmanager
def on_device_of(x: Tensor) -> Iterator[None]:
    """Triton launches on the current device, whatever its arguments are on."""
    if x.is_cuda:
        with torch.cuda.device(x.device):
            yield
    else:
        yield


def _geometry(x: Tensor) -> tuple[int, int, int]:
    """(R, PIXELS, C) of an image or of rows."""
    if x.ndim == 2:
        return x.shape[0], x.shape[0], x.shape[1]
    return x.shape[0] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[1]


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of image, pixel and channel; x is rows, or a dense image."""
    if x.ndim == 2:
        return 0, x.stride(0), x.stride(1)
    pixels = x.shape[2] * x.shape[3]
    if x.is_contiguous():
        return x.shape[1] * pixels, 1, pixels
    return x.shape[1] * pixels, x.shape[1], 1


def _layout(x: Tensor) -> torch.memory_format:
    """Of a dense image."""
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def _grid(config: Config, rows: int, channels: int) -> tuple[int, int]:
    return cdiv(rows, config.tile["ROWS"]), cdiv(channels, config.tile["CHANNELS"])


def options(config: Config) -> dict[str, int]:
    """Keyword arguments of a launch with these tiles."""
    return {**config.tile, "num_warps": config.num_warps, "num_stages": config.num_stages}


def statistics_of(x: Tensor) -> Tensor:
    """Partial statistics (programs, 4, C) of rows or an image."""
    r, pixels, channels = _geometry(x)

    def launch(config: Config) -> Tensor:
        grid = _grid(config, r, channels)
        partial = x.new_empty((grid[0], 4, channels), dtype=torch.float32)
        bn.bn_statistics_kernel[grid](x, *_strides(x), partial, r, pixels, channels, **options(config))
        return partial

    return tuning.run("batch_norm", "bn_statistics", (str(x.dtype), r, channels), x.device, launch)


def finalize(
    statistics: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    *,
    partial: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
    fold: Tensor | None = None,
) -> Tensor:
    """Mean and variance into statistics (2, C), unless they are there already; returns fold (5, C), given or new."""
    channels = gamma.shape[0]
    if fold is None:
        fold = torch.empty((5, channels), dtype=torch.float32, device=gamma.device)
    source = "partial" if partial is not None else "running" if running is not None else "known"
    partial = fold if partial is None else partial
    mean, var = running or (fold, fold)

    def launch(config: Config) -> None:
        bn.bn_finalize_kernel[(cdiv(channels, config.tile["CHANNELS"]),)](
            partial, partial.shape[0], statistics, mean, var, gamma, beta, eps, fold, channels,
            BATCH=source, **options(config),
        )  # fmt: skip

    tuning.run("finalize", "bn_finalize", (channels,), gamma.device, launch)
    return fold


def backward_finalize(
    partial: Tensor,
    statistics: Tensor,
    gamma: Tensor,
    eps: float,
    fold: Tensor,
    rows: int,
    *,
    batch_statistics: bool,
    dweight: Tensor,
    dbias: Tensor,
) -> None:
    """Affine gradients into dweight and dbias (empty if not wanted) from partial (programs, 2, C); completes fold."""
    channels = gamma.shape[0]

    def launch(config: Config) -> None:
        bn.bn_backward_finalize_kernel[(cdiv(channels, config.tile["CHANNELS"]),)](
            partial, partial.shape[0], statistics, gamma, eps, dweight, dbias, fold, rows, channels,
            BATCH=batch_statistics, WANT_GAMMA=dweight.numel() > 0, WANT_BETA=dbias.numel() > 0, **options(config),
        )  # fmt: skip

    tuning.run("finalize", "bn_backward_finalize", (channels,), gamma.device, launch)


def apply(
    y: Tensor, fold: Tensor, act: str, out: Tensor, *, residual: Tensor | None = None, even: Tensor | None = None
) -> None:
    """out = act(bn(y)) (+ residual), all rows or all images; even: see bn_act_kernel."""
    r, pixels, channels = _geometry(y)
    added = y if residual is None else residual

    def launch(config: Config) -> None:
        bn.bn_act_kernel[_grid(config, r, channels)](
            y, *_strides(y), fold, added, *_strides(added), out, *_strides(out), y if even is None else even,
            r, pixels, channels,
            ACT=act, RESIDUAL=residual is not None, SHUFFLE=even is not None, **options(config),
        )  # fmt: skip

    tuning.run("batch_norm", "bn_act", (str(y.dtype), r, channels), y.device, launch)


def reduce_gradient(grad: Tensor, y: Tensor, fold: Tensor, act: str) -> Tensor:
    """Partial sums (programs, 2, C) of dz and dz * (y - center)."""
    r, pixels, channels = _geometry(y)

    def launch(config: Config) -> Tensor:
        grid = _grid(config, r, channels)
        partial = y.new_empty((grid[0], 2, channels), dtype=torch.float32)
        bn.bn_act_reduce_kernel[grid](
            grad, *_strides(grad), y, *_strides(y), fold, partial, r, pixels, channels, ACT=act, **options(config)
        )
        return partial

    return tuning.run("batch_norm", "bn_act_reduce", (str(y.dtype), r, channels), y.device, launch)


def _backward_apply(grad: Tensor, y: Tensor, fold: Tensor, act: str, dx: Tensor) -> None:
    r, pixels, channels = _geometry(y)

    def launch(config: Config) -> None:
        bn.bn_act_backward_kernel[_grid(config, r, channels)](
            grad, *_strides(grad), y, *_strides(y), fold, dx, *_strides(dx), r, pixels, channels,
            ACT=act, **options(config),
        )  # fmt: skip

    tuning.run("batch_norm", "bn_act_backward", (str(y.dtype), r, channels), y.device, launch)


def merge_shuffled(grad: Tensor, dx: Tensor, channels: int) -> None:
    """Even channels of the rows dx (R, 2 C) from the first C of grad."""
    r = dx.shape[0]

    def launch(config: Config) -> None:
        bn.shuffle_merge_kernel[_grid(config, r, channels)](grad, dx, r, channels, **options(config))

    tuning.run("batch_norm", "shuffle_merge", (str(dx.dtype), r, channels), dx.device, launch)


# ---- the operators of the registry: schemas as in csrc/library.cpp


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
    """y, mean, var; see csrc/library.cpp."""
    batch = running_mean is None
    statistics = torch.empty((2, x.shape[1]), dtype=torch.float64, device=x.device)
    y = new_image("result", x.shape, x, _layout(x))
    with on_device_of(x):
        if batch:
            fold = finalize(statistics, weight, bias, eps, partial=statistics_of(x))
        else:
            fold = finalize(statistics, weight, bias, eps, running=(running_mean, running_var))
        apply(x, fold, act, y, residual=residual)
    nothing = statistics.new_empty(0)
    return (y, statistics[0].clone(), statistics[1].clone()) if batch else (y, nothing, nothing.clone())


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
    """dx, dweight, dbias; see csrc/library.cpp."""
    statistics = torch.stack((mean.double(), var.double()))
    dx = new_image("input_gradient", x.shape, x, _layout(x)) if want_x else x.new_empty(0)
    dweight = new_parameter_gradient(weight, wanted=want_weight)
    dbias = new_parameter_gradient(bias, wanted=want_bias)
    with on_device_of(x):
        fold = finalize(statistics, weight, bias, eps)
        backward_finalize(
            reduce_gradient(grad, x, fold, act), statistics, weight, eps, fold, x.numel() // x.shape[1],
            batch_statistics=batch_statistics, dweight=dweight, dbias=dbias,
        )  # fmt: skip
        if want_x:
            _backward_apply(grad, x, fold, act, dx)
    return dx, dweight, dbias
