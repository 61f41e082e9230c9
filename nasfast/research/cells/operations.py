"""The modules of the operations on an edge, and of the preprocessing of a cell's inputs.

The definitions and the order of their parts are those of DARTS (arXiv 1806.09055).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast import ops
from nasfast.research.cells.costs import KERNELS, NONE, SKIP_CONNECT, ReduceBy
from nasfast.research.cells.space import Norm, Order

NormLayer = nn.BatchNorm2d | nn.GroupNorm


@dataclass(frozen=True)
class Style:
    """How operations are built.

    Attributes:
        order: order of ReLU, convolution and norm.
        norm: kind of norm.
        affine: whether norms have scale and shift.
        pool_norm: whether a norm follows pooling.
        track_running_stats: whether batch norms keep running statistics, and use them in evaluation.
        fused: use the operators of `nasfast.ops`, which have no second derivatives; otherwise plain PyTorch.
    """

    order: Order = "relu_conv_norm"
    norm: Norm = "batch"
    affine: bool = False
    pool_norm: bool = True
    track_running_stats: bool = False
    fused: bool = True

    def make_norm(self, channels: int, *, affine: bool | None = None) -> NormLayer:
        """A norm of (N, channels, H, W)."""
        affine = self.affine if affine is None else affine
        if self.norm == "batch":
            return nn.BatchNorm2d(channels, affine=affine, track_running_stats=self.track_running_stats)
        return nn.GroupNorm(1 if self.norm == "layer" else channels, channels, affine=affine)


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution with trainable weights, "same" padding and no bias."""

    def __init__(self, channels: int, kernel: int, *, stride: int = 1, dilation: int = 1, fused: bool = True) -> None:
        super().__init__(
            channels, channels, kernel, stride, dilation * (kernel // 2), dilation, groups=channels, bias=False
        )
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            return super().forward(x)
        return ops.depthwise_conv2d(x, self.weight, stride=self.stride[0], dilation=self.dilation[0])


class Pool3x3(nn.Module):
    """3 x 3 pooling with padding 1; a mean does not count the padding.

    Args:
        kind: `max` or `avg`.
    """

    def __init__(self, kind: Literal["max", "avg"], *, stride: int, fused: bool) -> None:
        super().__init__()
        self.kind, self.stride, self.fused = kind, stride, fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return ops.pool_3x3(x, kind=self.kind, stride=self.stride)
        if self.kind == "max":
            return F.max_pool2d(x, 3, self.stride, 1)
        return F.avg_pool2d(x, 3, self.stride, 1, count_include_pad=False)


class FactorizedReduce(nn.Module):
    """Halves a map without skipping pixels: joins 1x1 convolutions of stride 2 of x and of x shifted by one pixel."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        if out_channels % 2:
            raise ValueError(f"FactorizedReduce needs an even number of channels, got {out_channels}")
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # padding at the far sides gives two halves of equal size even if the size of the map is odd
        return torch.cat([self.even(x), self.odd(F.pad(x, (-1, 1, -1, 1)))], 1)


class ResidualReduction(nn.Module):
    """NAS-Bench-201's block between stages: two 3 x 3 convolutions, beside average pooling and a 1 x 1 convolution.

    (N, channels / 2, H, W) -> (N, channels, H / 2, W / 2). Each 3 x 3 convolution stands between a ReLU and a norm;
    the path beside them has neither.

    Args:
        channels: channels of the output.
        style: how its norms are built; they have scale and shift.
    """

    def __init__(self, channels: int, style: Style) -> None:
        super().__init__()
        self.first = _relu_conv_norm(channels // 2, channels, 2, style)
        self.second = _relu_conv_norm(channels, channels, 1, style)
        pointwise = nn.Conv2d(channels // 2, channels, 1, bias=False)
        self.beside = nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), pointwise)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.beside(x)


def _relu_conv_norm(in_channels: int, channels: int, stride: int, style: Style) -> nn.Sequential:
    """ReLU, 3 x 3 convolution, and a norm with scale and shift."""
    convolution = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, style.make_norm(channels, affine=True))


def make_transition(reduce_by: ReduceBy, channels: int, style: Style) -> nn.Module:
    """What halves the maps before a cell and doubles their channels to `channels`; not for `reduce_by="cell"`."""
    if reduce_by == "conv":
        return _relu_conv_norm(channels // 2, channels, 2, style)
    return ResidualReduction(channels, style)


class Operation(nn.Module):
    """One candidate of an edge: (N, C, H, W) -> (N, C, H', W').

    Its parts are separate, so that the operations on one source can share the ReLU, and one operator can apply the last
    norms of all operations that end in a node.

    Attributes:
        relu_first: whether it starts with a ReLU, which `body` does not contain.
        body: everything before the last norm.
        norm: the last norm, or None.
        relu_last: whether a ReLU follows the norm.
        shared: whether it has no parameters, so that the same operation on the same source gives the same result.
    """

    def __init__(self, body: nn.Module, norm: NormLayer | None, *, relu_first: bool = False, relu_last: bool = False):
        super().__init__()
        self.relu_first, self.body, self.norm, self.relu_last = relu_first, body, norm, relu_last

    @property
    def shared(self) -> bool:
        return next(self.parameters(), None) is None

    def finish(self, x: Tensor) -> Tensor:
        """Apply what follows `body`."""
        x = x if self.norm is None else self.norm(x)
        return F.relu(x) if self.relu_last else x

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.body(F.relu(x) if self.relu_first else x))


class BatchNormReLU(nn.Module):
    """Batch norm by the batch's statistics, without scale and shift, and ReLU as one operator."""

    one: Tensor
    zero: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps = norm.eps
        self.register_buffer("one", torch.ones(norm.num_features), persistent=False)
        self.register_buffer("zero", torch.zeros(norm.num_features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return ops.bn_act(x, self.one, self.zero, act="relu", eps=self.eps)


def is_plain_batch_norm(norm: nn.Module | None) -> TypeGuard[nn.BatchNorm2d]:
    """Whether a norm is a batch norm that uses the batch's statistics alone: no scale, no shift, nothing running."""
    return isinstance(norm, nn.BatchNorm2d) and not norm.affine and not norm.track_running_stats


def _convolutions(groups: list[list[nn.Module]], channels: int, style: Style) -> Operation:
    """Groups of convolutions, each with a ReLU and a norm in the order of `style`."""
    body: list[nn.Module] = []
    for i, group in enumerate(groups):
        body += group
        if style.order == "conv_relu_norm":
            body.append(nn.ReLU())
        if i < len(groups) - 1:
            # in both other orders a ReLU follows the norm; it belongs to this group or to the next
            norm = style.make_norm(channels)
            if style.order == "conv_relu_norm":
                body.append(norm)
            elif style.fused and is_plain_batch_norm(norm):
                # the identity takes the place of the ReLU, so that state dicts have the same keys
                body += [BatchNormReLU(norm), nn.Identity()]
            else:
                body += [norm, nn.ReLU()]
    return Operation(
        nn.Sequential(*body),
        style.make_norm(channels),
        relu_first=style.order == "relu_conv_norm",
        relu_last=style.order == "conv_norm_relu",
    )


def make_operation(op: str, channels: int, stride: int, style: Style) -> Operation | None:
    """The module of an operation, or None for `none`, which adds nothing.

    Args:
        op: a name of `nasfast.research.cells.costs.OPERATIONS`.
        channels: channels of its input and of its output.
        stride: 1 or 2.
        style: how it is built.
    """
    if op == NONE:
        return None
    if op == SKIP_CONNECT:
        if stride == 1:
            return Operation(nn.Identity(), None)
        return _convolutions([[FactorizedReduce(channels, channels)]], channels, style)
    if op not in KERNELS:
        raise ValueError(f"unknown operation {op!r}; valid: {NONE}, {SKIP_CONNECT}, {', '.join(KERNELS)}")
    kernel = KERNELS[op]
    if "pool" in op:
        pool = Pool3x3("max" if op.startswith("max") else "avg", stride=stride, fused=style.fused)
        return Operation(pool, style.make_norm(channels) if style.pool_norm else None)
    if op.startswith("conv"):
        return _convolutions(
            [[nn.Conv2d(channels, channels, kernel, stride, kernel // 2, bias=False)]], channels, style
        )

    def separable(stride: int) -> list[nn.Module]:
        dilation = 2 if op.startswith("dil") else 1
        depthwise = DepthwiseConv2d(channels, kernel, stride=stride, dilation=dilation, fused=style.fused)
        return [depthwise, nn.Conv2d(channels, channels, 1, bias=False)]

    strides = (stride,) if op.startswith("dil") else (stride, 1)
    return _convolutions([separable(s) for s in strides], channels, style)


def make_preprocess(in_channels: int, channels: int, stride: int, style: Style) -> Operation:
    """ReLU, 1x1 convolution (a `FactorizedReduce` if strided) and norm, in the order of `style`."""
    convolution = (
        FactorizedReduce(in_channels, channels) if stride == 2 else nn.Conv2d(in_channels, channels, 1, bias=False)
    )
    return _convolutions([[convolution]], channels, style)
