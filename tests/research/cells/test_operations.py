"""Every operation of an edge against its definition in plain PyTorch, written out here."""

from __future__ import annotations

import pytest
import torch
from pairs import pairwise
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.research.cells.costs import OPERATIONS
from nasfast.research.cells.operations import Operation, Style, make_operation, make_preprocess

C = 6
PLAIN = Style(fused=False)


def normalise(x: Tensor, norm: str, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Normalise over the batch, over an image, or over a channel of an image; eps 1e-5, biased variance."""
    over = {"batch": (0, 2, 3), "layer": (1, 2, 3), "instance": (2, 3)}[norm]
    y = (x - x.mean(over, keepdim=True)) / (x.var(over, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return y if weight is None else y * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


def reduce_half(x: Tensor, even: Tensor, odd: Tensor) -> Tensor:
    """Even pixels through one matrix, odd ones through another; a pixel beyond the border is 0."""
    n, c, h, w = x.shape
    padded = x.new_zeros(n, c, h + h % 2, w + w % 2)
    padded[:, :, :h, :w] = x
    halves = (padded[:, :, ::2, ::2], even), (padded[:, :, 1::2, 1::2], odd)
    return torch.cat([torch.einsum("oi,nihw->nohw", weight[:, :, 0, 0], half) for half, weight in halves], 1)


def mean_pool(x: Tensor, stride: int) -> Tensor:
    """3 x 3 sums over the number of pixels that are inside."""
    box = torch.ones(x.shape[1], 1, 3, 3, dtype=x.dtype)
    count = F.conv2d(torch.ones_like(x), box, None, stride, 1, 1, x.shape[1])
    return F.conv2d(x, box, None, stride, 1, 1, x.shape[1]) / count


def defined(op: str, x: Tensor, stride: int, module: Operation, order: str, norm: str) -> Tensor:
    """Section 2.2, with the module's weights in the order in which they are used."""
    weights = [m.weight for m in module.modules() if isinstance(m, nn.Conv2d)]
    if op == "skip_connect" and stride == 1:
        return x
    if op == "max_pool_3x3":
        padded = F.pad(x, (1, 1, 1, 1), value=-torch.inf).unfold(2, 3, stride).unfold(3, 3, stride)
        return normalise(padded.amax((-1, -2)), norm)
    if op == "avg_pool_3x3":
        return normalise(mean_pool(x, stride), norm)

    def unit(x: Tensor, convolve) -> Tensor:
        if order == "relu_conv_norm":
            return normalise(convolve(F.relu(x)), norm)
        if order == "conv_relu_norm":
            return normalise(F.relu(convolve(x)), norm)
        return F.relu(normalise(convolve(x), norm))

    if op == "skip_connect":
        return unit(x, lambda y: reduce_half(y, *weights))
    kernel, dilation = int(op[-1]), 2 if op.startswith("dil") else 1
    if op.startswith("conv"):
        return unit(x, lambda y: F.conv2d(y, weights[0], None, stride, kernel // 2))

    def separable(depthwise: Tensor, pointwise: Tensor, stride: int):
        padding = dilation * (kernel // 2)
        return lambda y: F.conv2d(F.conv2d(y, depthwise, None, stride, padding, dilation, C), pointwise)

    for i in range(0, len(weights), 2):
        x = unit(x, separable(*weights[i : i + 2], stride if i == 0 else 1))
    return x


def images(size: int = 8, channels: int = C) -> Tensor:
    return torch.randn(4, channels, size, size + 2)


@pytest.mark.parametrize(("op", "stride", "size"), pairwise(OPERATIONS[1:], [1, 2], [8, 7]), ids=str)
def test_operations_and_their_gradients_are_their_definitions(op, stride, size, fused):
    module = make_operation(op, C, stride, Style(fused=fused))
    x = images(size).contiguous(memory_format=torch.channels_last).requires_grad_()
    got = module(x)
    assert got.shape == (4, C, -(-size // stride), -(-(size + 2) // stride))
    probe = torch.randn(got.shape)
    gradients = torch.autograd.grad((got * probe).sum(), [x, *module.parameters()])
    module, y = module.double(), x.detach().double().requires_grad_()
    want = defined(op, y, stride, module, "relu_conv_norm", "batch")
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    wanted = torch.autograd.grad((want * probe).sum(), [y, *module.parameters()])
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("op", "order", "norm"),
    pairwise(
        ["skip_connect", "max_pool_3x3", "sep_conv_3x3", "dil_conv_5x5", "conv_3x3"],
        ["relu_conv_norm", "conv_relu_norm", "conv_norm_relu"],
        ["batch", "layer", "instance"],
    ),
)
def test_orders_and_norms(op, order, norm):
    module = make_operation(op, C, 2, Style(order=order, norm=norm, fused=False)).double()
    x = images().double()
    torch.testing.assert_close(module(x), defined(op, x, 2, module, order, norm), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("in_channels", "stride"), [(10, 1), (10, 2), (3, 2)])
@pytest.mark.parametrize("order", ["relu_conv_norm", "conv_norm_relu"])
def test_preprocessing(in_channels, stride, order):
    module = make_preprocess(in_channels, C, stride, Style(order=order, fused=False)).double()
    x = images(7, in_channels).double()
    weights = [m.weight for m in module.modules() if isinstance(m, nn.Conv2d)]
    inner = F.relu(x) if order == "relu_conv_norm" else x
    y = reduce_half(inner, *weights) if stride == 2 else F.conv2d(inner, *weights)
    want = normalise(y, "batch")
    torch.testing.assert_close(module(x), F.relu(want) if order == "conv_norm_relu" else want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("op", ["max_pool_3x3", "avg_pool_3x3"])
def test_pools_without_norm(op, fused):
    x = images()
    plain = F.max_pool2d(x, 3, 1, 1) if op == "max_pool_3x3" else mean_pool(x, 1)
    torch.testing.assert_close(make_operation(op, C, 1, Style(pool_norm=False, fused=fused))(x), plain)


def test_operations_that_cannot_be_made_are_named():
    with pytest.raises(ValueError, match="unknown operation 'conv_7x7'; valid: none, skip_connect, max_pool_3x3"):
        make_operation("conv_7x7", C, 1, PLAIN)
    with pytest.raises(ValueError, match="even number of channels, got 3"):
        make_operation("skip_connect", 3, 2, PLAIN)
