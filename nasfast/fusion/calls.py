"""What the call of a PyTorch function is in a chain: a convolution or an activation that a stage can have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Conv(NamedTuple):
    """The arguments of F.conv2d behind its input for a convolution that a stage can have.

    One with a dilation can only be folded.
    """

    weight: Tensor
    bias: Tensor | None
    stride: int
    padding: int
    dilation: int
    groups: int

    @property
    def only_folded(self) -> bool:
        """Whether `conv_bn_act_chain` does not have it."""
        return self.dilation != 1


def activation_of(function: object, *args: Any, **kwargs: Any) -> str | None:
    """The value of `Stage.act` for a call of this function; None if no stage has this activation.

    Args:
        function: the function that is called.
        args, kwargs: its arguments without the input.
    """
    if function is F.hardtanh:
        return _hardtanh(*args, **kwargs)
    return ACTIVATION_FUNCTIONS.get(function)


def square_conv(
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Conv | None:
    """The convolution that F.conv2d computes with these arguments; None if no stage can have it."""
    step, pad, apart = _one(stride), _one(padding), _one(dilation)
    if step is None or pad is None or apart is None:
        return None
    return Conv(weight, bias, step, pad, apart, groups)


def _one(value: str | int | Sequence[int]) -> int | None:
    """The value of a convolution's setting if it is the same in both directions, else None."""
    if isinstance(value, str):
        return None
    if isinstance(value, int):
        return value
    return value[0] if len(set(value)) == 1 else None


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> str | None:
    return "relu6" if (min_val, max_val) == (0, 6) else None


ACTIVATION_FUNCTIONS: dict[object, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    Tensor.relu: "relu",
    Tensor.relu_: "relu",
    F.relu6: "relu6",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    Tensor.tanh: "tanh",
    Tensor.tanh_: "tanh",
    F.hardswish: "hswish",
    F.silu: "silu",
}

# the activations of stages, changing their input
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": torch.relu_,
    "relu6": partial(F.hardtanh, min_val=0.0, max_val=6.0, inplace=True),
    "tanh": torch.tanh_,
    "hswish": partial(F.hardswish, inplace=True),
    "silu": partial(F.silu, inplace=True),
}
