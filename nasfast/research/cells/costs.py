"""Names and closed-form costs of the cell operations, whose modules are in `operations`. No torch."""

from __future__ import annotations

from typing import Literal

from nasfast.spaces.cost import Cost, conv_bn_cost

ReduceBy = Literal["cell", "conv", "residual"]
"""How a network of cells halves its maps, see `nasfast.research.cells.space.CellSpace`."""

NONE, SKIP_CONNECT = "none", "skip_connect"

OPERATIONS = (
    NONE,
    SKIP_CONNECT,
    "max_pool_3x3",
    "avg_pool_3x3",
    "sep_conv_3x3",
    "dil_conv_3x3",
    "dil_conv_5x5",
    "sep_conv_5x5",
    "conv_1x1",
    "conv_3x3",
)
"""Every operation; the first eight are DARTS's, in the order of the figures."""

KERNELS = {name: int(name[-1]) for name in OPERATIONS[2:]}
"""Kernel sizes of the operations that have one."""


def factorized_reduce_cost(in_channels: int, out_channels: int, size_out: int) -> Cost:
    """Two 1x1 convolutions of stride 2 on maps shifted by a pixel, joined, then a norm."""
    return conv_bn_cost(in_channels, out_channels, 1, size_out)


def transition_cost(reduce_by: ReduceBy, channels: int, size_out: int) -> Cost:
    """What stands before a cell that halves the maps; `channels` and `size_out` are those of its output."""
    if reduce_by == "cell":
        return Cost()
    strided = conv_bn_cost(channels // 2, channels, 3, size_out)
    if reduce_by == "conv":
        return strided
    weights = channels // 2 * channels
    return strided + conv_bn_cost(channels, channels, 3, size_out) + Cost(weights * size_out**2, weights)


def operation_cost(op: str, channels: int, stride: int, size_out: int, *, pool_norm: bool = True) -> Cost:
    """Cost of one operation whose output is `size_out` pixels high; norms count scale and shift as parameters."""
    if op == NONE:
        return Cost()
    if op == SKIP_CONNECT:
        return Cost() if stride == 1 else factorized_reduce_cost(channels, channels, size_out)
    kernel = KERNELS[op]
    if "pool" in op:
        return Cost(params=2 * channels * pool_norm)
    if op.startswith("conv"):
        return conv_bn_cost(channels, channels, kernel, size_out)
    depthwise = Cost(channels * kernel**2 * size_out**2, channels * kernel**2)
    separable = depthwise + conv_bn_cost(channels, channels, 1, size_out)
    return separable + separable if op.startswith("sep") else separable
