"""A chain of the CUDA kernels on buffers of the caller, forward and backward without autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nasfast.ops.chain_operator import update_running
from nasfast.ops.cuda.conv import aligned, counters
from nasfast.ops.cuda.deferred import DeferredNorm, DeferredResult
from nasfast.ops.plan import ChainPlan, Kind
from nasfast.ops.reference import Stage
from nasfast.ops.rounded import Rounded


@dataclass
class StaticChain:
    """One chain whose kernels read and write the same memory at every call, as a CUDA graph needs it.

    Attributes:
        stages: gives the stages of the plan, and counts the batch; called once per forward. Weights of convolutions
            are frozen, BatchNorms use the statistics of the batch.
        plan: the chain's plan for the CUDA kernels.
        x: (N, C, H, W), the input, channels_last, of the plan's type.
        y: the result, alike.
        adds_input: whether x is added to the result.
        dx: buffer of the gradient of x; None if that is not wanted.
        gradients: a contiguous buffer for the gradient of each weight and bias of a BatchNorm that trains, by this
            tensor itself.
        made_from: what the chain makes x from, which nothing has written; it then begins the backward of what was
            deferred. None if x is there.
        deferred: memory for the last BatchNorm, if its result is not written to y; no activation may follow it. None
            if y is written.
        rounded: copies of frozen weights in the plan's type; None for none.
    """

    stages: Callable[[], Sequence[Stage]]
    plan: ChainPlan
    x: Tensor
    y: Tensor
    adds_input: bool = False
    dx: Tensor | None = None
    gradients: Mapping[Tensor, Tensor] = field(default_factory=dict)
    made_from: DeferredResult | None = None
    deferred: DeferredNorm | None = None
    rounded: Rounded | None = None
    _begun: Sequence[Stage] = field(init=False, default=())
    _kept: tuple[Tensor, Tensor] | None = field(init=False, default=None)

    @property
    def result(self) -> DeferredResult | None:
        """What the result is made from behind forward; None if y is written."""
        if self.deferred is None:
            return None
        return DeferredResult(self.deferred, self.x if self.adds_input else None)

    def forward(self) -> None:
        """Run the chain on x, and keep what backward needs until `release`."""
        stages = self._begun = self.stages()
        params = [stage.params for stage in stages]
        keeps = self.dx is not None or bool(self.gradients)
        saved = self.x.new_empty(self._saved_size() if keeps else 0)
        statistics = self.x.new_empty(self.plan.statistics_elements("cuda"), dtype=torch.float64)
        torch.ops.nasfast.conv_bn_act_chain_gpu_fwd(
            x=self.x,
            conv_weights=self._weights(),
            bn_weights=[p.bn_weight.contiguous() for p in params],
            bn_biases=[p.bn_bias.contiguous() for p in params],
            added=self.x if self.adds_input and self.deferred is None else None,
            y=self.y,
            saved=saved,
            statistics=statistics,
            counters=counters(self.x, self.plan.numbers),
            before=[] if self.made_from is None else self.made_from.tensors(),
            left=list(self.deferred or ()),
            plan=self.plan.numbers,
            eps=[stage.eps for stage in stages],
        )
        update_running(stages, self.plan, statistics)
        self._kept = saved, statistics

    def backward(self, grad: Tensor) -> None:
        """Write dx and `gradients` from the gradient of the result, in the layout of y."""
        if self._kept is None:
            raise RuntimeError("the backward of a chain needs what its forward keeps: call forward first")
        saved, statistics = self._kept
        params = [stage.params for stage in self._begun]
        unwanted = grad.new_empty(0, dtype=torch.float32)
        begins = self.made_from.norm if self.made_from is not None and self.dx is not None else ()
        torch.ops.nasfast.conv_bn_act_chain_gpu_bwd(
            grad=grad,
            saved=saved,
            statistics=statistics,
            conv_weights=self._weights(),
            bn_weights=[p.bn_weight.contiguous() for p in params],
            add_input=self.adds_input,
            dx=self.dx,
            dweights=[self.gradients.get(p.bn_weight, unwanted) for p in params],
            dbiases=[self.gradients.get(p.bn_bias, unwanted) for p in params],
            counters=counters(grad, self.plan.numbers),
            before=list(begins),
            left=list(self.deferred or ()),
            plan=self.plan.numbers,
            eps=[stage.eps for stage in self._begun],
        )

    def release(self) -> None:
        """Free what forward keeps."""
        self._begun, self._kept = (), None

    def _saved_size(self) -> int:
        if self.deferred is None:
            return self.plan.saved_size
        # the output of the last convolution is the last of what is saved, and a deferred BatchNorm has it
        last = self.plan.stages[-1].saved_at
        assert last is not None
        return last

    def _weights(self) -> list[Tensor]:
        """The weights, in 16 bits where the kernels would only round them and there are such copies."""
        weights = [aligned(stage.params.conv_weight.contiguous()) for stage in self._begun]
        if self.rounded is None or self.rounded.dtype != self.x.dtype:
            return weights
        pairs = zip(weights, self.plan.stages, strict=True)
        return [self.rounded.of(weight) if stage.kind == Kind.POINTWISE else weight for weight, stage in pairs]
