"""Memory that a caller has ready for what operators compute, so that nothing is copied there afterwards.

An engine with static buffers offers them around forward (`offered`). The Triton launchers ask here instead of
allocating. Other operators do not ask, so who offers memory must look whether a result lies in it (`lies_in`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

# forward keeps the offer for its backward, which may run in another thread
_here = threading.local()


class Offer:
    """Buffers for one forward and its backward; each is given away once.

    Args:
        result: taken by the first operator whose result has its shape, type and layout. That operator may turn out not
            to be the last one; then `result_taken` is set although the final result lies elsewhere, and later
            operators may have kept what is in the buffer for their backward: the buffer must not be written.
        input_gradient: taken alike, in backward, by a gradient of an operator's input. Nothing reads such a gradient
            after backward, so the buffer may be written then, whoever took it.
        parameter_gradients: by parameter, the buffer of its gradient, contiguous.
    """

    def __init__(
        self, *, result: Tensor | None, input_gradient: Tensor | None, parameter_gradients: Mapping[Tensor, Tensor]
    ) -> None:
        self._images = {"result": result, "input_gradient": input_gradient}
        # operators get a parameter as another object
        self._parameters = {p.data_ptr(): (p.shape, gradient) for p, gradient in parameter_gradients.items()}
        self.result_taken = False

    def image(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: torch.memory_format
    ) -> Tensor | None:
        """The buffer of this kind if it is there and fits."""
        buffer = self._images[kind]
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (torch.Size(shape), dtype, device):
            return None
        if not buffer.is_contiguous(memory_format=layout):
            return None
        self._images[kind] = None
        self.result_taken |= kind == "result"
        # what operators return gets a history of its own
        return buffer.detach()

    def parameter_gradient(self, parameter: Tensor) -> Tensor | None:
        """The buffer of this parameter's gradient."""
        shape, buffer = self._parameters.get(parameter.data_ptr(), (None, None))
        if shape != parameter.shape:
            return None
        del self._parameters[parameter.data_ptr()]
        return buffer.detach()


@contextmanager
def offered(offer: Offer | None) -> Iterator[None]:
    """Make the offer that of the operators called within, in this thread; None for no offer."""
    outer = current()
    _here.offer = offer
    try:
        yield
    finally:
        _here.offer = outer


def current() -> Offer | None:
    """The offer that holds here."""
    return getattr(_here, "offer", None)


def lies_in(tensor: Tensor, buffer: Tensor) -> bool:
    """Whether tensor is this very memory, with the same shape, layout and type."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) == (
        buffer.data_ptr(), buffer.shape, buffer.stride(), buffer.dtype,
    )  # fmt: skip


# ---- for the launchers: memory of a result, offered or new


def new_image(
    kind: str,
    shape: tuple[int, ...] | list[int],
    like: Tensor,
    layout: torch.memory_format = torch.channels_last,
) -> Tensor:
    """Uninitialised memory of type and device of `like`, for a `result` or an `input_gradient` (kind)."""
    offer = current()
    found = None if offer is None else offer.image(kind, tuple(shape), like.dtype, like.device, layout)
    if found is None:
        found = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)
    return found


def new_parameter_gradient(parameter: Tensor, *, wanted: bool) -> Tensor:
    """Uninitialised memory like the parameter (C,), empty if it is not wanted."""
    if not wanted:
        return parameter.new_empty(0)
    offer = current()
    found = None if offer is None else offer.parameter_gradient(parameter)
    return torch.empty_like(parameter) if found is None else found
