"""What the fake kernels and autograd formulas of the native operators share."""

import torch
from torch import Tensor


def check_device(*tensors: Tensor | None) -> None:
    """Refuse a fake kernel tensors of several devices, which PyTorch sends there when one of them is on `meta`.

    Raises:
        RuntimeError: they are not on one device.
    """
    devices = {str(tensor.device) for tensor in tensors if tensor is not None}
    torch._check(len(devices) <= 1, lambda: f"all tensors must be on one device, got {', '.join(sorted(devices))}")


def refuse_second_derivatives(op: str, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients, such that differentiating them raises; for the backward of a native operator under create_graph.

    Without it a second derivative would be silently wrong: what a native operator computes is a constant to autograd.
    """
    # ties the gradients to the graph even where all that they were computed from is constant
    tie = torch.zeros((), requires_grad=True)
    return _NoSecondDerivative.apply(op, tie, *gradients)


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op: str, tie: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return gradients

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{ctx.op}: second derivatives are not implemented in the native {ctx.op}: use backend='reference'"
        )
