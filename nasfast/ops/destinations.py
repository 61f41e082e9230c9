"""Memory that a caller offers for the results of operators, so that no result has to be copied there afterwards.

An engine with static buffers offers them around its forward (`offered`). The Triton launchers take offered memory
instead of allocating. Other operators do not, so a caller that offers memory must check whether the result is in it
(`lies_in`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# An operator keeps the offer of its forward for its backward, because backward may run in another thread.
_here = threading.local()


class Offer:
    """Buffers for one forward and its backward. Each is taken once.

    Args:
        result: buffer for the result. The first operator whose result has its shape, type and layout takes it. If that
            operator is not the last one, `result_taken` is true although the final result is elsewhere. Later operators
            may then have kept the content of the buffer for their backward, so the caller must not write to it.
        input_gradient: buffer for the gradient of the input. The first gradient of an operator's input that fits takes
            it in backward. Nothing reads such a gradient after backward, so the caller may write to it then.
        parameter_gradients: a contiguous buffer for the gradient of each of these parameters.
    """

    def __init__(
        self,
        *,
        result: Tensor | None,
        input_gradient: Tensor | None,
        parameter_gradients: Mapping[nn.Parameter, Tensor],
    ) -> None:
        self._images = {"result": result, "input_gradient": input_gradient}
        # an operator gets another Python object for the same parameter
        self._parameters = {p.data_ptr(): (p.shape, gradient) for p, gradient in parameter_gradients.items()}
        self.result_taken = False

    def take_image(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: torch.memory_format
    ) -> Tensor | None:
        """Take the buffer of this kind; None if there is none or it does not fit."""
        buffer = self._images[kind]
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (torch.Size(shape), dtype, device):
            return None
        if not buffer.is_contiguous(memory_format=layout):
            return None
        self._images[kind] = None
        self.result_taken |= kind == "result"
        # autograd gives the result of an operator its own history
        return buffer.detach()

    def take_parameter_gradient(self, parameter: Tensor) -> Tensor | None:
        """Take the buffer for the gradient of this parameter; None if there is none."""
        offer = self._parameters.get(parameter.data_ptr())
        if offer is None or offer[0] != parameter.shape:
            return None
        del self._parameters[parameter.data_ptr()]
        return offer[1].detach()


@contextmanager
def offered(offer: Offer | None) -> Iterator[None]:
    """Make this offer to the operators that the calling thread calls inside the block; None makes no offer."""
    outer = current()
    _here.offer = offer
    try:
        yield
    finally:
        _here.offer = outer


def current() -> Offer | None:
    """The offer to this thread, or None."""
    return getattr(_here, "offer", None)


def lies_in(tensor: Tensor, buffer: Tensor) -> bool:
    """Whether the tensor is the buffer itself: the same memory, shape, layout and type."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) == (
        buffer.data_ptr(),
        buffer.shape,
        buffer.stride(),
        buffer.dtype,
    )


# ---- for the launchers: memory for a result, offered or new


def new_image(
    kind: str,
    shape: tuple[int, ...] | list[int],
    like: Tensor,
    layout: torch.memory_format = torch.channels_last,
) -> Tensor:
    """Uninitialised memory with the type and device of `like`.

    Args:
        kind: `result` or `input_gradient`.
    """
    offer = current()
    buffer = None if offer is None else offer.take_image(kind, tuple(shape), like.dtype, like.device, layout)
    if buffer is None:
        buffer = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)
    return buffer


def new_parameter_gradient(parameter: Tensor, *, wanted: bool) -> Tensor:
    """Uninitialised memory for the gradient of a parameter (C,); empty if the gradient is not wanted."""
    if not wanted:
        return parameter.new_empty(0)
    offer = current()
    buffer = None if offer is None else offer.take_parameter_gradient(parameter)
    return torch.empty_like(parameter) if buffer is None else buffer
