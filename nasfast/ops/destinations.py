"""Memory that a caller offers for the results of operators, so that no result has to be copied there afterwards.

An engine with static buffers offers them around its forward (`offered`). The launchers for GPUs take offered memory
instead of allocating. Other operators do not, so a caller that offers memory must check whether the result is in it
(`lies_in`).

A caller may also let an operator leave its result unmade: the last BatchNorm of a chain needs the statistics of all
pixels, so its result takes a launch of its own, unless the next chain makes it while it reads it. The chains of the
CUDA kernels can do both. In backward, the BatchNorm that was left needs two sums over all pixels of the gradient of the
result. Whoever made the result begins this: with its last kernel, or with a launch of its own.

With the memory, a caller may offer copies of frozen weights in 16 bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nasfast.ops.arrivals import zeros
from nasfast.ops.rounded import Rounded

# An operator keeps the offer of its forward for its backward, because backward may run in another thread.
_here = threading.local()


class Left(NamedTuple):
    """Memory for what an operator leaves of a result x of C channels. All are float32 where nothing else is said.

    Forward of the operator fills these:

    Attributes:
        y: the output of its last convolution; shape, type and layout of x.
        fold: (C, 2), scale and shift of the BatchNorm behind it.
        interval: (C, 4), where the activation behind it lets the gradient through, and the mean of y.
        statistics: (2, C) float64, mean and biased variance + eps of y.
        weight: (C,), weight of the BatchNorm.
        back: (C, 4), the gradient of y from that of x: back[:, 0] dx + back[:, 1] y + back[:, 2]. Whoever makes x fills
            it in backward, before backward of the operator itself.
        gradients: (2, C), those of the BatchNorm's weight and bias, filled together with `back`.
    """

    y: Tensor
    fold: Tensor
    interval: Tensor
    statistics: Tensor
    weight: Tensor
    back: Tensor
    gradients: Tensor


class Unmade(NamedTuple):
    """What a tensor x is made from that no operator has written: x = fold[:, 0] y + fold[:, 1] + added, rounded once.

    Attributes:
        left: what an operator has left of x.
        added: shape, type and layout of x; None for nothing.
    """

    left: Left
    added: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """What x is made from, as the operators of the CUDA kernels get it."""
        return [self.left.y, self.left.fold, *([] if self.added is None else [self.added])]

    def make(self, x: Tensor) -> None:
        """Write x by a launch of its own, where no chain makes it on the way."""
        torch.ops.nasfast.conv_bn_act_chain_gpu_make(x, self.tensors())

    def begin_backward(self, grad: Tensor) -> None:
        """Fill `back` and `gradients` of what was left by a launch of its own, where no chain does it on the way.

        Args:
            grad: the gradient of x.
        """
        count = torch.ops.nasfast.conv_bn_act_chain_gpu_counters(grad, [])
        torch.ops.nasfast.conv_bn_act_chain_gpu_reduce(grad, list(self.left), zeros(count, grad.device))


class Remains:
    """Static memory for what an operator leaves of a result x; it exists once an operator has left something."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self.tensors: Left | None = None

    def take(self) -> Left:
        """The memory."""
        if self.tensors is None:
            channels, device = self._x.shape[1], self._x.device

            def numbers(*shape: int) -> Tensor:
                return torch.empty(shape, dtype=torch.float32, device=device)

            self.tensors = Left(
                y=torch.empty_like(self._x),
                fold=numbers(channels, 2),
                interval=numbers(channels, 4),
                statistics=torch.empty(2, channels, dtype=torch.float64, device=device),
                weight=numbers(channels),
                back=numbers(channels, 4),
                gradients=numbers(2, channels),
            )
        return self.tensors


class Offer:
    """Buffers for one forward and its backward. Each is taken once.

    Args:
        source: the input; None if there is nothing else.
        unmade: what the input is made from, if an operator has to make it; None if the input is there.
        result: buffer for the result. The first operator whose result has its shape, type and layout takes it. If that
            operator is not the last one, `result_taken` is true although the final result is elsewhere. Later operators
            may then have kept the content of the buffer for their backward, so the caller must not write to it.
        input_gradient: buffer for the gradient of the input. The first gradient of an operator's input that fits takes
            it in backward. Nothing reads such a gradient after backward, so the caller may write to it then.
        parameter_gradients: a contiguous buffer for the gradient of each of these parameters.
        remains: memory for what the operator that takes `result` may leave instead of writing it; None if it must
            write it.
        rounded: copies of frozen weights in 16 bits; None for none.

    Attributes:
        result_taken: whether an operator has taken `result`.
        made: whether an operator has made the input.
        begun: whether the operator that computes `input_gradient` also begins the backward of what the input was made
            from. It does so from its own gradient of the input, so the caller must check whether that is the whole one.
        left: what an operator has left instead of the result.
    """

    def __init__(
        self,
        *,
        source: Tensor | None = None,
        unmade: Unmade | None = None,
        result: Tensor | None = None,
        input_gradient: Tensor | None = None,
        parameter_gradients: Mapping[nn.Parameter, Tensor] | None = None,
        remains: Remains | None = None,
        rounded: Rounded | None = None,
    ) -> None:
        self._rounded = rounded
        self._source, self._unmade, self._result, self._remains = source, unmade, result, remains
        self._input_gradient = input_gradient
        self._images = {"result": result, "input_gradient": input_gradient}
        # an operator gets another Python object for the same parameter
        self._parameters = {p.data_ptr(): (p.shape, gradient) for p, gradient in (parameter_gradients or {}).items()}
        self.result_taken = self.made = self.begun = False
        self.left: Unmade | None = None

    def take_image(self, kind: str, shape: Sequence[int], like: Tensor, layout: torch.memory_format) -> Tensor | None:
        """Take the buffer of this kind; None if there is none or it does not fit."""
        buffer = self._images[kind]
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (
            torch.Size(shape),
            like.dtype,
            like.device,
        ):
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

    def rounded_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A frozen weight in this type if the caller keeps it in this type, otherwise as it is."""
        return weight if self._rounded is None or self._rounded.dtype != dtype else self._rounded.of(weight)

    def take_unmade(self, x: Tensor) -> Unmade | None:
        """What x is made from, if the operator that reads x has to make it; this is for the first operator."""
        if self._unmade is None or self.made or not lies_in(x, self._source):
            return None
        self.made = True
        return self._unmade

    def leave(self, result: Tensor, added: Tensor | None) -> Left | None:
        """Memory to fill instead of this result, if the operator need not write it.

        Args:
            result: the memory of the result, which `new_image` gave.
            added: what the operator adds at the end; only the input can be left to others.
        """
        if self._remains is None or not lies_in(result, self._result):
            return None
        if added is not None and not lies_in(added, self._source):
            return None
        self.left = Unmade(self._remains.take(), None if added is None else self._source)
        return self.left.left

    def begin_backward(self, dx: Tensor) -> Left | None:
        """What the input was made from, if the operator that computes its gradient dx has to begin its backward."""
        if self._unmade is None or not self.made or not lies_in(dx, self._input_gradient):
            return None
        self.begun = True
        return self._unmade.left


_NOTHING = Offer()


@contextmanager
def offered(offer: Offer) -> Iterator[None]:
    """Make this offer to the operators that the calling thread calls inside the block."""
    outer = current()
    _here.offer = offer
    try:
        yield
    finally:
        _here.offer = outer


def current() -> Offer:
    """The offer to this thread, which may be of nothing."""
    return getattr(_here, "offer", _NOTHING)


def lies_in(tensor: Tensor, buffer: Tensor | None) -> bool:
    """Whether the tensor is the buffer itself: the same memory, shape, layout and type."""
    return buffer is not None and (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) == (
        buffer.data_ptr(),
        buffer.shape,
        buffer.stride(),
        buffer.dtype,
    )


def new_image(
    kind: str, shape: Sequence[int], like: Tensor, layout: torch.memory_format = torch.channels_last
) -> Tensor:
    """Uninitialised memory, offered or new, with the type and device of `like`; kind: `result` or `input_gradient`."""
    buffer = current().take_image(kind, shape, like, layout)
    if buffer is None:
        buffer = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)
    return buffer


def new_parameter_gradient(parameter: Tensor, *, wanted: bool) -> Tensor:
    """Uninitialised memory for the gradient of a parameter (C,); empty if the gradient is not wanted."""
    if not wanted:
        return parameter.new_empty(0)
    buffer = current().take_parameter_gradient(parameter)
    return torch.empty_like(parameter) if buffer is None else buffer


def new_gradients(
    shape: Sequence[int], like: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], wants: Sequence[bool]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Memory for dx of this shape, dweights and dbiases of a chain; empty where `wants` (csrc/library.cpp) is false."""
    dx = new_image("input_gradient", shape, like) if wants[0] else like.new_empty(0)
    dweights = [new_parameter_gradient(w, wanted=want) for w, want in zip(weights, wants[1::2], strict=True)]
    dbiases = [new_parameter_gradient(b, wanted=want) for b, want in zip(biases, wants[2::2], strict=True)]
    return dx, dweights, dbiases
