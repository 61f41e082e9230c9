"""What the call of a PyTorch function is in a chain: a convolution or an activation that a stage can have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Conv(NamedTuple):
    """A convolution that a stage can have."""

    weight: Tensor
    stride: int
    padding: int
    groups: int
    bias: Tensor | None


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
    """The convolution that F.conv2d computes with these arguments behind its input; None if no stage can have it."""
    step, pad = _one(stride), _one(padding)
    if step is None or pad is None or _one(dilation) != 1:
        return None
    return Conv(weight, step, pad, groups, bias)


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
