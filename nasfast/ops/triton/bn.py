"""Launchers of the Triton kernels of bn_act, and of BatchNorm between the stages of a chain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nasfast._triton import bn
from nasfast._triton.common import GROUP
from nasfast._triton.configs import FAMILIES, Config, pass_tiles
from nasfast.ops.arrivals import zeros


def rows_of(image: Tensor) -> Tensor:
    """(N * H * W, C) view of a channels_last image tensor."""
    n, channels, height, width = image.shape
    return image.as_strided((n * height * width, channels), (channels, 1))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@contextmanager
def on_device_of(x: Tensor) -> Iterator[None]:
    """Make the device of x the current one, because Triton launches on the current device."""
    if x.is_cuda:
        with torch.cuda.device(x.device):
            yield
    else:
        yield


def _geometry(x: Tensor) -> tuple[int, int, int]:
    """(R, PIXELS, C) of an image tensor or of rows; see kernels/triton/bn.py."""
    if x.ndim == 2:
        return x.shape[0], x.shape[0], x.shape[1]
    return x.shape[0] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[1]


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of image, pixel and channel; x is rows or a dense image tensor."""
    if x.ndim == 2:
        return 0, x.stride(0), x.stride(1)
    pixels = x.shape[2] * x.shape[3]
    if x.is_contiguous():
        return x.shape[1] * pixels, 1, pixels
    return x.shape[1] * pixels, x.shape[1], 1


def _named_strides(name: str, x: Tensor) -> dict[str, int]:
    """The strides of x as keyword arguments of a kernel, such as sxn, sxp and sxc for the name x."""
    return {f"s{name}{axis}": stride for axis, stride in zip("npc", _strides(x), strict=True)}


def _layout(x: Tensor) -> torch.memory_format:
    """Memory format of a dense image tensor."""
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def _row(x: Tensor) -> int:
    """Elements from row to row if both channels and images are next to each other, else 0; see kernels/triton/bn.py."""
    image, pixel, channel = _strides(x)
    return pixel if channel == 1 and (x.ndim == 2 or image == pixel * x.shape[2] * x.shape[3]) else 0


def _grid(config: Config, rows: int, channels: int) -> tuple[int, int]:
    return cdiv(rows, config.tile["ROWS"] * config.tile["TILES"]), cdiv(channels, config.tile["CHANNELS"])


def options(config: Config) -> dict[str, int | None]:
    """Keyword arguments of a launch with these tiles."""
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.registers}
    return {**config.tile, **launch}


class Norm(NamedTuple):
    """BatchNorm of C channels in forward; the kernels write statistics and fold.

    Attributes:
        gamma, beta: (C,), float32.
        statistics: (2, C) or (2 * C,), mean and biased variance, float64.
        fold: (3, C), float32; see kernels/triton/common.py.
    """

    gamma: Tensor
    beta: Tensor
    eps: float
    statistics: Tensor
    fold: Tensor

    def sums(self, programs: int, blocks: int) -> tuple[Any, ...]:
        """The argument `sums` of a kernel that ends with finish_statistics.

        Args:
            programs: programs of the launch for each block of channels.
            blocks: blocks of channels.
        """
        groups = cdiv(programs, GROUP.value)
        partial = self.fold.new_empty((programs + groups) * 3 * self.gamma.shape[0])
        counts = self.fold.new_empty(programs + groups)
        arrivals = zeros(blocks * (groups + 1), self.fold.device)
        return partial, counts, arrivals, self.statistics, self.gamma, self.beta, self.fold, self.eps


class NormGradient(NamedTuple):
    """BatchNorm of C channels in backward; the kernels write dgamma, dbeta and back.

    Attributes:
        statistics: as in Norm. If None, dgamma is the plain sum of dz * d, and back is not written.
        dgamma, dbeta: (C,), or empty if not wanted.
        back: (2, C), float32; see kernels/triton/common.py.
        rows: number of rows from which the statistics were computed; None for running statistics.
    """

    statistics: Tensor | None
    gamma: Tensor
    eps: float
    dgamma: Tensor
    dbeta: Tensor
    back: Tensor
    rows: int | None

    def sums(self, programs: int, blocks: int) -> tuple[Any, ...]:
        """The argument `sums` of a kernel that ends with finish_gradient; arguments as in Norm.sums."""
        groups = cdiv(programs, GROUP.value)
        partial = self.gamma.new_empty((programs + groups) * 2 * self.gamma.shape[0])
        arrivals = zeros(blocks * (groups + 1), self.gamma.device)
        dgamma, dbeta = (gradient if gradient.numel() else None for gradient in (self.dgamma, self.dbeta))
        return partial, arrivals, self.statistics, self.gamma, dgamma, dbeta, self.back, self.eps, self.rows


def measure(x: Tensor, norm: Norm) -> None:
    """Compute the statistics and the fold of rows or of an image tensor."""
    r, pixels, channels = _geometry(x)
    config = pass_tiles(FAMILIES["batch_norm"], r, channels)
    grid = _grid(config, r, channels)
    bn.bn_statistics_kernel[grid](
        x=x,
        **_named_strides("x", x),
        sums=norm.sums(*grid),
        R=r,
        PIXELS=pixels,
        C=channels,
        X_ROW=_row(x),
        **options(config),
    )


def fold_known(norm: Norm, running: tuple[Tensor, Tensor] | None = None) -> None:
    """Compute the fold from the statistics, or from running ones, which are first copied to the statistics."""
    channels = norm.gamma.shape[0]
    mean, var = running or (norm.fold, norm.fold)

    config = FAMILIES["fold"]
    bn.bn_fold_kernel[(cdiv(channels, config.tile["CHANNELS"]),)](
        running_mean=mean,
        running_var=var,
        statistics=norm.statistics,
        gamma=norm.gamma,
        beta=norm.beta,
        eps=norm.eps,
        fold=norm.fold,
        C=channels,
        RUNNING=running is not None,
        **options(config),
    )


def apply(
    y: Tensor, fold: Tensor, act: str, out: Tensor, *, residual: Tensor | None = None, even: Tensor | None = None
) -> None:
    """Compute out = act(bn(y)) (+ residual); all are rows, or all are image tensors. even: see bn_act_kernel."""
    r, pixels, channels = _geometry(y)
    added = y if residual is None else residual

    config = pass_tiles(FAMILIES["batch_norm"], r, channels)
    bn.bn_act_kernel[_grid(config, r, channels)](
        y=y,
        **_named_strides("y", y),
        fold=fold,
        residual=added,
        **_named_strides("r", added),
        out=out,
        **_named_strides("o", out),
        even=y if even is None else even,
        R=r,
        PIXELS=pixels,
        C=channels,
        Y_ROW=_row(y),
        RESIDUAL_ROW=_row(added),
        OUT_ROW=_row(out),
        ACT=act,
        RESIDUAL=residual is not None,
        SHUFFLE=even is not None,
        **options(config),
    )


def reduce_gradient(grad: Tensor, y: Tensor, fold: Tensor, act: str, gradient: NormGradient) -> None:
    """Compute the affine gradients and back from the gradient of act(bn(y))."""
    r, pixels, channels = _geometry(y)
    config = pass_tiles(FAMILIES["batch_norm"], r, channels)
    grid = _grid(config, r, channels)
    bn.bn_act_reduce_kernel[grid](
        grad=grad,
        **_named_strides("g", grad),
        y=y,
        **_named_strides("y", y),
        fold=fold,
        sums=gradient.sums(*grid),
        R=r,
        PIXELS=pixels,
        C=channels,
        GRAD_ROW=_row(grad),
        Y_ROW=_row(y),
        ACT=act,
        **options(config),
    )


def _backward_apply(grad: Tensor, y: Tensor, fold: Tensor, back: Tensor, act: str, dx: Tensor) -> None:
    """Compute dx, the gradient behind BatchNorm, from the gradient of act(bn(y))."""
    r, pixels, channels = _geometry(y)
    config = pass_tiles(FAMILIES["batch_norm"], r, channels)
    bn.bn_act_backward_kernel[_grid(config, r, channels)](
        grad=grad,
        **_named_strides("g", grad),
        y=y,
        **_named_strides("y", y),
        fold=fold,
        back=back,
        dx=dx,
        **_named_strides("x", dx),
        R=r,
        PIXELS=pixels,
        C=channels,
        GRAD_ROW=_row(grad),
        Y_ROW=_row(y),
        X_ROW=_row(dx),
        ACT=act,
        **options(config),
    )


def merge_shuffled(grad: Tensor, dx: Tensor, channels: int) -> None:
    """Write the even channels of the rows dx (R, 2 C) from the first C channels of grad."""
    r = dx.shape[0]

    config = pass_tiles(FAMILIES["batch_norm"], r, channels)
    bn.shuffle_merge_kernel[_grid(config, r, channels)](grad=grad, dx=dx, R=r, C=channels, **options(config))


# ---- the registered operators, with the schemas of csrc/library.cpp


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
    y = torch.empty_like(x, memory_format=_layout(x))
    norm = Norm(
        gamma=weight,
        beta=bias,
        eps=eps,
        statistics=torch.empty((2, x.shape[1]), dtype=torch.float64, device=x.device),
        fold=torch.empty((3, x.shape[1]), dtype=torch.float32, device=x.device),
    )
    with on_device_of(x):
        if running_mean is None or running_var is None:
            measure(x, norm)
        else:
            fold_known(norm, (running_mean, running_var))
        apply(x, norm.fold, act, y, residual=residual)
    nothing = norm.statistics.new_empty(0)
    return (y, norm.statistics[0].clone(), norm.statistics[1].clone()) if batch else (y, nothing, nothing.clone())


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
    channels = x.shape[1]
    fold = torch.empty((3, channels), dtype=torch.float32, device=x.device)
    statistics = torch.stack((mean.double(), var.double()))
    norm = Norm(gamma=weight, beta=bias, eps=eps, statistics=statistics, fold=fold)
    gradient = NormGradient(
        statistics=statistics,
        gamma=weight,
        eps=eps,
        dgamma=weight.new_empty(channels if want_weight else 0),
        dbeta=bias.new_empty(channels if want_bias else 0),
        back=fold.new_empty((2, channels)),
        rows=x.numel() // channels if batch_statistics else None,
    )
    dx = torch.empty_like(x, memory_format=_layout(x)) if want_x else x.new_empty(0)
    with on_device_of(x):
        fold_known(norm)
        reduce_gradient(grad, x, fold, act, gradient)
        if want_x:
            _backward_apply(grad, x, fold, gradient.back, act, dx)
    return dx, gradient.dgamma, gradient.dbeta
