"""What the autograd formulas of the native operators share."""

import torch
from torch import Tensor


class NoSecondDerivative(torch.autograd.Function):
    """Passes gradients on as functions of the tensors they were computed from, and refuses to differentiate them.

    Without it a second derivative would be silently wrong: what a native operator computes is a constant to autograd.
    """

    @staticmethod
    def forward(ctx, op: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The first `count` of the tensors, which are the gradients; the others are what they depend on."""
        ctx.op = op
        return tensors[:count]

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{ctx.op}: second derivatives are not implemented in the native {ctx.op}: use backend='reference'"
        )
