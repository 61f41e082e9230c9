"""One candidate of one layer on static buffers, which an engine captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.engine.capture import Replay
from nasfast.engine.eager import loss_and_gradient
from nasfast.ops import destinations
from nasfast.ops.rounded import Rounded


@dataclass
class Segment:
    """One candidate of one layer, from its input boundary to its output boundary and back.

    Operators that take offered memory write to the boundaries and gradients directly. The results of other operators
    are copied there. A segment may leave its output unmade, and the next one, captured for that, makes it in its first
    kernel, or in a launch of its own (nasfast/ops/destinations.py). In the same ways it begins the backward of what was
    left.

    Attributes:
        module: computes the output from the input.
        source, target: buffers of the input and of the output; the target is None if the output is in no buffer.
        unmade: what the source is made from, if the segment before leaves it unmade.
        makes: whether the first operator of the module may make the source, because nothing reads it before.
        remains: memory for what the last operator of the module may leave of the output, because nothing reads it
            behind; None if it must write the output.
        source_grad, target_grad: buffers of their gradients; None if nothing before them trains.
        parameters: the parameters of the module that train.
        autocast: makes the context in which forward runs.
        rounded: copies of frozen weights in the type of autocast; None without autocast.
        memory: memory for `gradients`, that of a segment with the same parameters; None for memory of its own.
        gradients: memory for the gradients of the parameters, one after another; backward writes those in `reached`.
        left: what the target is made from behind forward; None if it is there.
        reached: the gradients of the parameters that have one, in the layouts of the parameters; the first backward
            sets it.
        passes_on: whether backward computes a gradient of the source. If not, the segments before have none either.
        forward_replay, backward_replay: replays of the captured functions; None if there is nothing to do.
    """

    module: Callable[[Tensor], Tensor]
    source: Tensor
    target: Tensor | None
    unmade: destinations.Unmade | None
    makes: bool
    remains: destinations.Remains | None
    source_grad: Tensor | None
    target_grad: Tensor | None
    parameters: list[nn.Parameter]
    autocast: Callable[[], Any]
    rounded: Rounded | None
    memory: Tensor | None
    gradients: Tensor = field(init=False)
    left: destinations.Unmade | None = field(init=False, default=None)
    reached: dict[nn.Parameter, Tensor] = field(init=False, default_factory=dict)
    passes_on: bool = field(init=False, default=True)
    forward_replay: Replay | None = field(init=False, default=None)
    backward_replay: Replay | None = field(init=False, default=None)
    _slots: list[Tensor] = field(init=False)
    # whether the first operator that can take the target also computes the result of the module
    _direct: bool = field(init=False, default=True)
    _x: Tensor | None = field(init=False, default=None)
    _y: Tensor | None = field(init=False, default=None)
    _offer: destinations.Offer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        sizes = [p.numel() for p in self.parameters]
        self.gradients = torch.empty(sum(sizes), device=self.source.device) if self.memory is None else self.memory
        # with the strides of the parameters, like eager gradients
        self._slots = [
            piece.as_strided(p.shape, p.stride())
            for p, piece in zip(self.parameters, self.gradients.split(sizes), strict=True)
        ]

    def functions(self) -> list[Replay]:
        """The functions to capture, in this order; the last one is backward if the segment has one."""
        return [self.forward, self.backward] if self.has_backward else [self.forward]

    @property
    def has_backward(self) -> bool:
        return self.target_grad is not None and (self.source_grad is not None or bool(self.parameters))

    def set_replays(self, replays: list[Replay]) -> None:
        """Keep the replays of `functions`, and release the tensors of the capture."""
        self.forward_replay = replays[0]
        self.backward_replay = replays[1] if self.has_backward else None
        self.release()

    def forward(self) -> None:
        y = self.run(self.target if self._direct else None)
        if self.target is not None and not destinations.lies_in(y, self.target):
            if self._direct and self._offer is not None and self._offer.result_taken:
                # an operator inside the module took the target, and others may have kept what it wrote there
                self._direct = False
                return self.forward()
            self.target.copy_(y.detach())
        self.left = None if self._offer is None else self._offer.left
        self._y = y
        return None

    def run(self, target: Tensor | None) -> Tensor:
        """Run the module on the source; an operator may write the result to `target`, if that is not None."""
        if self.unmade is not None and not self.makes:
            self.unmade.make(self.source)
        self._x = self.source.detach().requires_grad_(self.source_grad is not None)
        slots = {p: s for p, s in zip(self.parameters, self._slots, strict=True) if s.is_contiguous()}
        self._offer = destinations.Offer(
            source=self.source,
            unmade=self.unmade if self.makes else None,
            result=target,
            input_gradient=self.source_grad,
            parameter_gradients=slots,
            remains=self.remains,
            rounded=self.rounded,
        )
        with self.autocast(), destinations.offered(self._offer):
            y = self.module(self._x)
        if self.unmade is not None and self.makes and not self._offer.made:
            # the operator cannot make the source, so it has read what was there
            self.makes = False
            return self.run(target)
        return y

    def backward(self) -> None:
        if self._y is None:
            raise RuntimeError("the backward of a segment needs the result of its forward: call forward first")
        self.differentiate(self._y, self.target_grad)
        self.release()

    def differentiate(self, y: Tensor, grad: Tensor | None) -> None:
        """Compute the gradients of y, and write them to source_grad and to the gradients of the parameters."""
        wanted = [*([self._x] if self._x is not None and self.source_grad is not None else []), *self.parameters]
        if not wanted:
            return
        computed: list[Tensor | None]
        if not y.requires_grad:
            computed = [None] * len(wanted)
        else:
            computed = list(torch.autograd.grad(y, wanted, grad, allow_unused=True))
        if self.source_grad is not None:
            dx = computed.pop(0)
            self.passes_on = dx is not None
            if dx is not None:
                self._take_source_gradient(dx)
        made = [(p, s, g) for p, s, g in zip(self.parameters, self._slots, computed, strict=True) if g is not None]
        self.reached = {p: slot for p, slot, _ in made}
        elsewhere = [(slot, gradient) for _, slot, gradient in made if not destinations.lies_in(gradient, slot)]
        if elsewhere:
            torch._foreach_copy_([slot for slot, _ in elsewhere], [gradient for _, gradient in elsewhere])

    def _take_source_gradient(self, dx: Tensor) -> None:
        assert self.source_grad is not None and self._offer is not None
        direct = destinations.lies_in(dx, self.source_grad)
        if not direct:
            self.source_grad.copy_(dx)
        # the chain that makes the source also begins the backward of what was left of it, or a launch of its own does
        if self.unmade is not None and not (direct and self._offer.begun):
            self.unmade.begin_backward(self.source_grad)

    def release(self) -> None:
        self._x = self._y = self._offer = None

    def replay_backward(self, *, adds: bool) -> None:
        """Replay backward; with `adds`, add to the gradients of an earlier path of this step."""
        if self.backward_replay is None:
            return
        before = self.gradients.clone() if adds else None
        self.backward_replay()
        if before is not None:
            self.gradients.add_(before)


@dataclass
class Head(Segment):
    """The last segment: head, classifier, loss, and their backward, in one graph.

    Attributes:
        labels: (N,).
        label_smoothing: label smoothing of the cross-entropy.
        outcome: result of the last replay, see `loss_and_gradient`.
    """

    labels: Tensor
    label_smoothing: float = 0.0
    outcome: Tensor = field(init=False, repr=False)

    def functions(self) -> list[Replay]:
        return [self.backward]

    def set_replays(self, replays: list[Replay]) -> None:
        (self.backward_replay,) = replays
        self.release()

    def backward(self) -> None:
        logits = self.run(None)
        # static too: a graph writes a result to the same memory at every replay, as long as someone holds the result
        self.outcome, gradient = loss_and_gradient(logits, self.labels, self.label_smoothing)
        self.differentiate(logits, gradient)
        self.release()
