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
from nasfast.ops.cuda.deferred import DeferredResult
from nasfast.ops.cuda.static import StaticChain


@dataclass(kw_only=True)
class Segment:
    """One candidate of one layer, from its input boundary to its output boundary and back.

    Autograd gives its gradients, and its results are copied to the boundaries.

    Attributes:
        module: computes the output from the input.
        source, target: buffers of the input and of the output; the target is None if nothing reads the output.
        made_from: what the source is made from, if the segment before has not written it.
        source_grad, target_grad: buffers of their gradients; None if nothing before them trains.
        gradients: memory for the gradients of the parameters that train, one after another.
        slots: the part of each parameter, in its layout.
        autocast: makes the context in which forward runs.
        reached: the slots that backward writes; the first backward sets it.
        passes_on: whether backward computes a gradient of the source. If not, the segments before have none either.
        forward_replay, backward_replay: replays of the captured functions; None if there is nothing to do.
    """

    module: Callable[[Tensor], Tensor]
    source: Tensor
    target: Tensor | None
    made_from: DeferredResult | None
    source_grad: Tensor | None
    target_grad: Tensor | None
    gradients: Tensor
    slots: dict[Tensor, Tensor]
    autocast: Callable[[], Any]
    reached: dict[Tensor, Tensor] = field(init=False, default_factory=dict)
    passes_on: bool = field(init=False, default=True)
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
        return self.target_grad is not None and (self.source_grad is not None or bool(self.slots))

    @property
    def parts(self) -> list[Segment]:
        """Those whose gradients backward writes, each into memory of its own."""
        return [self]

    @property
    def result(self) -> DeferredResult | None:
        """What the target is made from behind forward; None if it is written."""
        return None

    def set_replays(self, replays: list[Replay]) -> None:
        """Keep the replays of `functions`, and release the tensors of the capture."""
        self.forward_replay = replays[0]
        self.backward_replay = replays[1] if self.has_backward else None
        self.release()

    def forward(self) -> None:
        assert self.target is not None
        y = self.run()
        self.target.copy_(y.detach())
        self._edge = get_gradient_edge(y) if y.requires_grad else None

    def run(self) -> Tensor:
        """Run the module on the source."""
        if self.made_from is not None:
            self.made_from.write(self.source)
        self._x = self.given().requires_grad_(self.source_grad is not None)
        with self.autocast():
            return self.module(self._x)

    def given(self) -> Tensor:
        """What the module gets, outside of autograd."""
        return self.source.detach()

    def backward(self) -> None:
        if self._x is None:
            raise RuntimeError("the backward of a segment needs what its forward keeps: call forward first")
        self.differentiate(self._edge, self.target_grad)
        self.release()

    def differentiate(self, edge: GradientEdge | None, grad: Tensor | None) -> None:
        """Write the gradients of a result to source_grad and to the slots of the parameters.

        Args:
            edge: that of the result; None if nothing in front of it trains.
            grad: gradient of the result.
        """
        wanted = [*([self._x] if self._x is not None and self.source_grad is not None else []), *self.slots]
        if not wanted:
            return
        computed: list[Tensor | None] = [None] * len(wanted)
        if edge is not None:
            computed = list(torch.autograd.grad(edge, wanted, grad, allow_unused=True))
        if self.source_grad is not None:
            dx = computed.pop(0)
            self.passes_on = dx is not None
            if dx is not None:
                self.write(self.source_grad, dx)
                if self.made_from is not None:
                    self.made_from.norm.begin_backward(self.source_grad)
        found = {p: gradient for p, gradient in zip(self.slots, computed, strict=True) if gradient is not None}
        self.reached = {p: self.slots[p] for p in found}
        if found:
            torch._foreach_copy_(list(self.reached.values()), list(found.values()))

    def write(self, source_grad: Tensor, dx: Tensor) -> None:
        """Write the gradient of the source from that of what `run` differentiates by."""
        source_grad.copy_(dx)

    def release(self) -> None:
        self._x = self._edge = None

    def replay_backward(self, *, adds: bool) -> None:
        """Replay backward; with `adds`, add to the gradients of an earlier path of this step."""
        if self.backward_replay is None:
            return
        before = [part.gradients.clone() for part in self.parts] if adds else []
        self.backward_replay()
        for part, gradients in zip(self.parts, before, strict=False):
            part.gradients.add_(gradients)


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
        assert self.target_grad is not None
        self.chain.backward(self.target_grad)
        self.passes_on = self.source_grad is not None
        self.reached = self.slots
        self.release()

    def release(self) -> None:
        self.chain.release()


@dataclass(kw_only=True)
class Classifier(Segment):
    """The last segment: what follows the last choice, classifier, loss, and their backward, in one graph.

    Its module gets the mean over the pixels of the source.

    Attributes:
        head: what makes the source; None if a layer with choices does.
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
        if self.head is not None and self.passes_on and self.head.has_backward:
            self.head.backward()
            self.passes_on = self.head.passes_on
        self.release()

    def given(self) -> Tensor:
        return self.source.mean((2, 3))

    def write(self, source_grad: Tensor, dx: Tensor) -> None:
        # as the backward of pixel_mean does, but for its copy
        torch.div(dx[:, :, None, None].expand_as(source_grad), source_grad[0, 0].numel(), out=source_grad)

    def release(self) -> None:
        super().release()
        if self.head is not None:
            self.head.release()
