"""Cases of bn_act, mixed_bn, depthwise_conv2d, pool_3x3 and squeeze_excite."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.cases import BOTH, CHANNELS_LAST, CONTIGUOUS, Call, Case, Setting, Size
from nasfast import ops

Shape = tuple[int, int, int, int]

# (channels, height): expanded tensors of the MobileNetV2 space at 224 x 224 input
BN_ACT_BATCH = 32
BN_ACT_SHAPES = [(144, 112), (192, 56), (336, 28), (672, 14), (1536, 7)]

# (channels, height) of the nodes, or stages, of a search network of cells with 16 initial channels and 32 x 32 images
CELL_BATCH = 64
CELL_SHAPES = [(16, 32), (32, 16), (64, 8)]
# number of tensors that a node adds: seven operations on each of two or five edges
TENSORS = (14, 35)

# (kernel, stride, dilation); only reduction cells have stride 2
CONVS = [(3, 1, 1), (5, 1, 1), (7, 1, 1), (3, 1, 2), (5, 1, 2), (3, 2, 1), (5, 2, 1), (3, 2, 2), (5, 2, 2)]
# (channels, height, squeezed channels) of EfficientNet-B0 and MobileNetV3-Large at 224 x 224 input
EXCITATIONS = [(96, 56, 4), (144, 56, 6), (480, 14, 120), (960, 7, 240)]
POOLS = [("max", 1), ("avg", 1), ("max", 2), ("avg", 2)]


def cases(size: Size) -> list[Case]:
    expanded = _shapes(BN_ACT_BATCH, BN_ACT_SHAPES, size)
    cells = _shapes(CELL_BATCH, CELL_SHAPES, size)
    table = [Case("bn_act", "relu6", _text(shape), partial(_bn_act, shape)) for shape in expanded]
    for count in TENSORS:
        family = f"{count} tensors"
        table += [Case("mixed_bn", family, _text(shape), partial(_mixed_bn, count, shape)) for shape in cells]
    for conv in CONVS:
        table += [case for shape in cells for case in _depthwise_cases(shape, conv)]
    for kind, stride in POOLS:
        family = f"{kind} s{stride}"
        table += [Case("pool_3x3", family, _text(shape), partial(_pool, shape, kind, stride)) for shape in cells]
    for channels, height, squeezed in EXCITATIONS:
        (shape,) = _shapes(BN_ACT_BATCH, [(channels, height)], size)
        table.append(Case("squeeze_excite", f"to {squeezed}", _text(shape), partial(_excite, shape, squeezed)))
    return table


def _shapes(batch: int, shapes: list[tuple[int, int]], size: Size) -> list[Shape]:
    limited = [(channels, min(height, size.side)) for channels, height in shapes]
    return [(batch // size.divisor, channels, height, height) for channels, height in limited]


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _bn_act(shape: Shape, setting: Setting) -> Call:
    x = setting.images(shape)
    weight = torch.rand(shape[1]).add_(0.5).to(setting.device).requires_grad_()
    bias = torch.randn(shape[1]).to(setting.device).requires_grad_()

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.bn_act(x, weight, bias, act="relu6")

    def peer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.relu6(F.batch_norm(x, None, None, weight, bias, True))

    return Call(ours if setting.ours else peer, [x, weight, bias], [weight, bias])


def _mixed_bn(count: int, shape: Shape, setting: Setting) -> Call:
    xs = [setting.images(shape) for _ in range(count)]
    gates = torch.softmax(torch.randn(count // 7, 7), 1).view(-1).to(setting.device).requires_grad_()

    def ours(gates: Tensor, *xs: Tensor) -> Tensor:
        return ops.mixed_bn(xs, gates, normalize=[True] * len(xs))

    def peer(gates: Tensor, *xs: Tensor) -> Tensor:
        return sum(gate * F.batch_norm(x, None, None, None, None, True) for gate, x in zip(gates, xs, strict=True))

    return Call(ours if setting.ours else peer, [gates, *xs], [gates])


def _depthwise_cases(shape: Shape, conv: tuple[int, int, int]) -> list[Case]:
    """Cases with both gradients, with that of x alone, and with that of the weight alone."""
    family, text = "k{} s{} d{}".format(*conv), _text(shape)
    table = [Case("depthwise_conv2d", family, text, partial(_depthwise, shape, conv, (True, True)))]
    for name, wants in (("x", (True, False)), ("weight", (False, True))):
        table.append(
            Case(
                "depthwise_conv2d",
                f"{family} gradient of {name}",
                text,
                partial(_depthwise, shape, conv, wants),
                # a compiled backward computes all gradients, whichever are needed
                peers=(CONTIGUOUS, CHANNELS_LAST),
                passes=(BOTH,),
            )
        )
    return table


def _depthwise(shape: Shape, conv: tuple[int, int, int], wants: tuple[bool, bool], setting: Setting) -> Call:
    (kernel, stride, dilation), channels = conv, shape[1]
    x = setting.images(shape, grad=wants[0])
    weight = torch.randn(channels, 1, kernel, kernel).to(x).requires_grad_(wants[1])

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return ops.depthwise_conv2d(x, weight, stride=stride, dilation=dilation)

    def peer(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, None, stride, dilation * (kernel // 2), dilation, channels)

    return Call(ours if setting.ours else peer, [x, weight], [weight])


def _pool(shape: Shape, kind: str, stride: int, setting: Setting) -> Call:
    def ours(x: Tensor) -> Tensor:
        return ops.pool_3x3(x, kind=kind, stride=stride)

    def peer(x: Tensor) -> Tensor:
        if kind == "max":
            return F.max_pool2d(x, 3, stride, 1)
        return F.avg_pool2d(x, 3, stride, 1, count_include_pad=False)

    return Call(ours if setting.ours else peer, [setting.images(shape)])


def _excite(shape: Shape, squeezed: int, setting: Setting) -> Call:
    x = setting.images(shape)
    sizes = (squeezed, shape[1], 1, 1), (squeezed,), (shape[1], squeezed, 1, 1), (shape[1],)
    weights = [0.1 * torch.randn(size).to(setting.device, x.dtype) for size in sizes]

    def ours(x: Tensor) -> Tensor:
        return ops.squeeze_excite(x, *weights)

    def peer(x: Tensor) -> Tensor:
        w1, b1, w2, b2 = weights
        hidden = F.relu(F.conv2d(F.adaptive_avg_pool2d(x, 1), w1, b1))
        return x * F.hardsigmoid(F.conv2d(hidden, w2, b2))

    return Call(ours if setting.ours else peer, [x])
