"""Results of chains whose last BatchNorm is deferred to what reads them.

A BatchNorm needs the statistics of all pixels, so the last one of a chain takes a launch of its own, unless the next
chain applies it while it reads its input. In backward, this BatchNorm needs two sums over all pixels of the gradient of
the result. The next chain adds them up with its last kernel, or a launch of its own does. csrc/gpu/call.cpp reads these
tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nasfast.ops.arrivals import zeros


class DeferredNorm(NamedTuple):
    """The BatchNorm that a chain with the result x, of C channels, defers. All are float32 where nothing else is said.

    Forward of the chain fills all but the last two.

    Attributes:
        y: the output of its last convolution; shape, type and layout of x.
        fold: (C, 2), scale and shift of the BatchNorm.
        interval: (C, 4), where the activation behind it lets the gradient through, and the mean of y.
        statistics: (2, C) float64, mean and biased variance + eps of y.
        weight: (C,), weight of the BatchNorm.
        back: (C, 4), the gradient of y from that of x: back[:, 0] dx + back[:, 1] y + back[:, 2]. What reads x fills it
            in backward, before backward of the chain itself.
        gradients: (2, C), those of the BatchNorm's weight and bias, filled together with `back`.
    """

    y: Tensor
    fold: Tensor
    interval: Tensor
    statistics: Tensor
    weight: Tensor
    back: Tensor
    gradients: Tensor

    @classmethod
    def empty(cls, x: Tensor) -> DeferredNorm:
        """Memory for a deferred BatchNorm whose result would be x."""
        channels, device = x.shape[1], x.device

        def numbers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(
            y=torch.empty_like(x),
            fold=numbers(channels, 2),
            interval=numbers(channels, 4),
            statistics=torch.empty(2, channels, dtype=torch.float64, device=device),
            weight=numbers(channels),
            back=numbers(channels, 4),
            gradients=numbers(2, channels),
        )

    def reduce(self, grad: Tensor) -> None:
        """Fill `back` and `gradients` by a launch of its own; grad: the whole gradient of x."""
        count = torch.ops.nasfast.conv_bn_act_chain_gpu_counters(grad, [])
        torch.ops.nasfast.conv_bn_act_chain_gpu_reduce(grad, list(self), zeros(count, grad.device))


class DeferredResult(NamedTuple):
    """A tensor x that no operator has written yet: x = norm.fold[:, 0] y + norm.fold[:, 1] + added, rounded once.

    Attributes:
        norm: the deferred BatchNorm.
        added: shape, type and layout of x; None for nothing.
    """

    norm: DeferredNorm
    added: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """What x is computed from, as the operators of the CUDA kernels get it."""
        return [self.norm.y, self.norm.fold, *([] if self.added is None else [self.added])]

    def apply(self, x: Tensor) -> None:
        """Apply the BatchNorm, and so write x, by a launch of its own."""
        torch.ops.nasfast.conv_bn_act_chain_gpu_apply(x, self.tensors())
