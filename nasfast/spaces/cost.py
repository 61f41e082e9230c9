"""What costs are: MACs (multiply-accumulates of convolutions and classifier, per image) and parameters.

One MAC is one multiply and one add; `torch.utils.flop_counter` reports exactly twice these numbers. BatchNorm,
activations, biases, pooling, additions and the factors of squeeze-and-excitation are not counted as MACs (as in the
papers' tables). BatchNorm's gamma and beta and the biases are counted as parameters. Layer indicators exist only in the
supernet and cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Cost of a part of a network for one image."""

    macs: int = 0
    params: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.macs + other.macs, self.params + other.params)


@dataclass(frozen=True)
class Operator:
    """What one value of an architecture stands for, over all the places where the network has it.

    Attributes:
        cost: cost of all places together.
        inputs: per place, the elements C * H * W of its input for one image.
        works: whether it is more than an identity, a pooling or nothing. The strided convolution that stands for an
            identity on a layer that changes shapes does not count as work: it has weights and costs, but no depth.
    """

    cost: Cost
    inputs: tuple[int, ...]
    works: bool


def output_size(size: int, stride: int) -> int:
    """Height of the output of a padded (k // 2) convolution."""
    return -(-size // stride)


def conv_bn_cost(in_channels: int, out_channels: int, kernel: int, size_out: int, *, groups: int = 1) -> Cost:
    """Biasless convolution followed by BatchNorm; `size_out` is the height of its output."""
    weights = in_channels // groups * out_channels * kernel**2
    return Cost(macs=weights * size_out**2, params=weights + 2 * out_channels)


def linear_cost(in_features: int, out_features: int, *, bias: bool = True) -> Cost:
    """A linear layer, or a 1x1 convolution of one pixel."""
    weights = in_features * out_features
    return Cost(macs=weights, params=weights + out_features * bias)
