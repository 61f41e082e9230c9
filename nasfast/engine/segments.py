"""One candidate of one layer on static buffers, which an engine captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nasfast.engine.capture import Replay
from nasfast.engine.eager import StepResult, loss_and_gradient
from nasfast.ops.chain.deferred import DeferredResult
from nasfast.ops.chain.static import StaticChain


@dataclass(frozen=True)
class Boundary:
    """The static buffers between two layers.

    Attributes:
        x: the result of the layer in front, channels_last.
        grad: its gradient, alike; None if nothing in front trains.
    """

    x: Tensor
    grad: Tensor | None


@dataclass(frozen=True)
class SegmentBuffers:
    """The memory that a segment reads and writes at every step.

    Attributes:
        input, output: the boundaries; the output is None if nothing reads it.
        deferred_input: what the input is computed from, if the segment in front has not written it.
        gradients: memory for the gradients of the parameters that train, one after another.
        slots: the part of each parameter, in its layout.
    """

    input: Boundary
    output: Boundary | None
    deferred_input: DeferredResult | None
    gradients: Tensor
    slots: dict[Tensor, Tensor]


@dataclass(kw_only=True)
class Segment:
    """One candidate of one layer, from its input boundary to its output boundary and back.

    Autograd gives its gradients, and its results are copied to the boundaries.

    Attributes:
        module: computes the output from the input.
        buffers: its memory.
        autocast: makes the context in which forward runs.
        computed: the slots that backward writes; the first backward sets it.
        has_input_grad: whether backward computes a gradient of the input; if not, no segment in front has any.
        forward_replay, backward_replay: replays of the captured functions; None if there is nothing to do.
    """

    module: Callable[[Tensor], Tensor]
    buffers: SegmentBuffers
    autocast: Callable[[], Any]
    computed: dict[Tensor, Tensor] = field(init=False, default_factory=dict)
    has_input_grad: bool = field(init=False, default=True)
    forward_replay: Replay | None = field(init=False, default=None)
    backward_replay: Replay | None = field(init=False, default=None)
    _x: Tensor | None = field(init=False, default=None)
    # the result's place in the graph of autograd, without its memory, which is free once it is copied
    _edge: GradientEdge | None = field(init=False, default=None)

    def functions(self) -> list[Replay]:
        """The functions to capture, in this order; the last one is backward if the segment has one."""
        return [self.forward, self.backward] if self.has_backward else [self.forward]

    @property
    def has_backward(self) -> bool:
        buffers = self.buffers
        wants = buffers.input.grad is not None or bool(buffers.slots)
        return wants and buffers.output is not None and buffers.output.grad is not None

    @property
    def parts(self) -> list[Segment]:
        """Those whose gradients backward writes, each into memory of its own."""
        return [self]

    @property
    def result(self) -> DeferredResult | None:
        """What the output is computed from after forward; None if it is written."""
        return None

    def set_replays(self, replays: list[Replay]) -> None:
        """Keep the replays of `functions`, and release the tensors of the capture."""
        self.forward_replay = replays[0]
        self.backward_replay = replays[1] if self.has_backward else None
        self.release()

    def forward(self) -> None:
        assert self.buffers.output is not None
        y = self.run()
        self.buffers.output.x.copy_(y.detach())
        self._edge = get_gradient_edge(y) if y.requires_grad else None

    def run(self) -> Tensor:
        """Run the module on the input."""
        if self.buffers.deferred_input is not None:
            self.buffers.deferred_input.apply(self.buffers.input.x)
        self._x = self.module_input().requires_grad_(self.buffers.input.grad is not None)
        with self.autocast():
            return self.module(self._x)

    def module_input(self) -> Tensor:
        """What the module gets, outside of autograd."""
        return self.buffers.input.x.detach()

    def backward(self) -> None:
        if self._x is None:
            raise RuntimeError("the backward of a segment needs what its forward keeps: call forward first")
        assert self.buffers.output is not None
        self.differentiate(self._edge, self.buffers.output.grad)
        self.release()

    def differentiate(self, edge: GradientEdge | None, grad: Tensor | None) -> None:
        """Write the gradients of the input and of the parameters from that of the module's result.

        Args:
            edge: the result's place in the graph of autograd; None if nothing in front of it trains.
            grad: gradient of the result.
        """
        input_grad, slots = self.buffers.input.grad, self.buffers.slots
        leaves = [*([self._x] if self._x is not None and input_grad is not None else []), *slots]
        if not leaves:
            return
        gradients: list[Tensor | None] = [None] * len(leaves)
        if edge is not None:
            gradients = list(torch.autograd.grad(edge, leaves, grad, allow_unused=True))
        if input_grad is not None:
            dx = gradients.pop(0)
            self.has_input_grad = dx is not None
            if dx is not None:
                self.write_input_grad(input_grad, dx)
                if self.buffers.deferred_input is not None:
                    self.buffers.deferred_input.norm.reduce(input_grad)
        slot_gradients = {p: gradient for p, gradient in zip(slots, gradients, strict=True) if gradient is not None}
        self.computed = {p: slots[p] for p in slot_gradients}
        if self.computed:
            torch._foreach_copy_(list(self.computed.values()), list(slot_gradients.values()))

    def write_input_grad(self, input_grad: Tensor, dx: Tensor) -> None:
        """Write the gradient of the input from that of what the module gets."""
        input_grad.copy_(dx)

    def release(self) -> None:
        self._x = self._edge = None

    def replay_backward(self, *, adds: bool) -> None:
        """Replay backward; with `adds`, add to the gradients of an earlier path of this step."""
        if self.backward_replay is None:
            return
        earlier = [part.buffers.gradients.clone() for part in self.parts] if adds else []
        self.backward_replay()
        for part, gradients in zip(self.parts, earlier, strict=False):
            part.buffers.gradients.add_(gradients)


@dataclass(kw_only=True)
class ChainSegment(Segment):
    """A candidate that is one chain of the CUDA kernels, which read and write the boundaries and slots themselves.

    Attributes:
        chain: the chain on these buffers.
    """

    chain: StaticChain

    @property
    def result(self) -> DeferredResult | None:
        return self.chain.result

    def forward(self) -> None:
        self.chain.forward()

    def backward(self) -> None:
        assert self.buffers.output is not None and self.buffers.output.grad is not None
        self.chain.backward(self.buffers.output.grad)
        self.has_input_grad = self.buffers.input.grad is not None
        self.computed = self.buffers.slots
        self.release()

    def release(self) -> None:
        self.chain.release()


@dataclass(kw_only=True)
class Classifier(Segment):
    """The last segment: what follows the last choice, classifier, loss, and their backward, in one graph.

    Its module gets the mean over the pixels of the input.

    Attributes:
        head: what computes the input; None if a layer with choices does.
        labels: (N,).
        label_smoothing: label smoothing of the cross-entropy.
        outcome: result of the last replay, see `loss_and_gradient`.
    """

    head: Segment | None
    labels: Tensor
    label_smoothing: float = 0.0
    outcome: StepResult = field(init=False, repr=False)

    @property
    def parts(self) -> list[Segment]:
        return [self] if self.head is None else [self, self.head]

    def functions(self) -> list[Replay]:
        return [self.backward]

    def set_replays(self, replays: list[Replay]) -> None:
        (self.backward_replay,) = replays
        self.release()

    def backward(self) -> None:
        if self.head is not None:
            self.head.forward()
        logits = self.run()
        # static too: a graph writes a result to the same memory at every replay, as long as someone holds the result
        self.outcome, gradient = loss_and_gradient(logits, self.labels, self.label_smoothing)
        self.differentiate(get_gradient_edge(logits) if logits.requires_grad else None, gradient)
        if self.head is not None and self.has_input_grad and self.head.has_backward:
            self.head.backward()
            self.has_input_grad = self.head.has_input_grad
        self.release()

    def module_input(self) -> Tensor:
        return self.buffers.input.x.mean((2, 3))

    def write_input_grad(self, input_grad: Tensor, dx: Tensor) -> None:
        # as the backward of pixel_mean does, but for its copy
        torch.div(dx[:, :, None, None].expand_as(input_grad), input_grad[0, 0].numel(), out=input_grad)

    def release(self) -> None:
        super().release()
        if self.head is not None:
            self.head.release()
