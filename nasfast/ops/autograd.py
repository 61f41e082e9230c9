"""Functions that the fake kernels and the autograd of all registered operators use."""

import torch
from torch import Tensor


def check_device(*tensors: Tensor | None) -> None:
    """Check that the tensors of a fake kernel are on one device.

    PyTorch calls a fake kernel with tensors of several devices when one of them is on `meta`.

    Raises:
        RuntimeError: they are on several devices.
    """
    devices = {str(tensor.device) for tensor in tensors if tensor is not None}
    torch._check(len(devices) <= 1, lambda: f"all tensors must be on one device, got {', '.join(sorted(devices))}")


def refuse_second_derivatives(op: str, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same gradients, but with an autograd history that raises when they are differentiated.

    The backward of a native operator calls this under create_graph. Autograd sees what a native operator computes as a
    constant, so second derivatives would be wrong without an error.
    """
    # an input that requires a gradient, so that the gradients have a history even if they were computed from constants
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
