"""A chain of the CUDA kernels on buffers of the caller, forward and backward without autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nasfast.ops.chain.autograd import update_running
from nasfast.ops.chain.cuda import counters
from nasfast.ops.chain.deferred import DeferredNorm, DeferredResult
from nasfast.ops.chain.plan import ChainPlan, Kind
from nasfast.ops.low_precision import LowPrecisionWeights
from nasfast.ops.reference import Stage
from nasfast.ops.tensors import aligned


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
        deferred_input: what x is computed from, where nothing has written it: forward then writes x, and backward fills
            the rest of the deferred BatchNorm. None if x is written.
        deferred_norm: memory for the last BatchNorm, if its result is not written to y; no activation may follow it.
            None if y is written.
        copies: copies of frozen weights in the plan's type; None for none.
    """

    stages: Callable[[], Sequence[Stage]]
    plan: ChainPlan
    x: Tensor
    y: Tensor
    adds_input: bool = False
    dx: Tensor | None = None
    gradients: Mapping[Tensor, Tensor] = field(default_factory=dict)
    deferred_input: DeferredResult | None = None
    deferred_norm: DeferredNorm | None = None
    copies: LowPrecisionWeights | None = None
    # what forward keeps for backward: its stages, and the tensors `saved` and `statistics`
    _forward_stages: Sequence[Stage] = field(init=False, default=())
    _saved: tuple[Tensor, Tensor] | None = field(init=False, default=None)

    @property
    def result(self) -> DeferredResult | None:
        """What the result is computed from after forward; None if y is written."""
        if self.deferred_norm is None:
            return None
        return DeferredResult(self.deferred_norm, self.x if self.adds_input else None)

    def forward(self) -> None:
        """Run the chain on x, and keep what backward needs until `release`."""
        stages = self._forward_stages = self.stages()
        params = [stage.params for stage in stages]
        keeps = self.dx is not None or bool(self.gradients)
        saved_size = self.plan.saved_size
        if self.deferred_norm is not None:
            # the output of the last convolution is the last of what is saved, and a deferred BatchNorm has it
            last = self.plan.stages[-1].saved_at
            assert last is not None
            saved_size = last
        saved = self.x.new_empty(saved_size if keeps else 0)
        statistics = self.x.new_empty(self.plan.statistics_elements("cuda"), dtype=torch.float64)
        torch.ops.nasfast.conv_bn_act_chain_gpu_fwd(
            x=self.x,
            conv_weights=self._weights(),
            bn_weights=[p.bn_weight.contiguous() for p in params],
            bn_biases=[p.bn_bias.contiguous() for p in params],
            added=self.x if self.adds_input and self.deferred_norm is None else None,
            y=self.y,
            saved=saved,
            statistics=statistics,
            counters=counters(self.x, self.plan.numbers),
            deferred_input=[] if self.deferred_input is None else self.deferred_input.tensors(),
            deferred_norm=list(self.deferred_norm or ()),
            plan=self.plan.numbers,
            eps=[stage.eps for stage in stages],
        )
        update_running(stages, self.plan, statistics)
        self._saved = saved, statistics

    def backward(self, grad: Tensor) -> None:
        """Write dx and `gradients` from the gradient of the result, in the layout of y."""
        if self._saved is None:
            raise RuntimeError("the backward of a chain needs what its forward keeps: call forward first")
        saved, statistics = self._saved
        params = [stage.params for stage in self._forward_stages]
        unwanted = grad.new_empty(0, dtype=torch.float32)
        input_norm = self.deferred_input.norm if self.deferred_input is not None and self.dx is not None else ()
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
            input_norm=list(input_norm),
            deferred_norm=list(self.deferred_norm or ()),
            plan=self.plan.numbers,
            eps=[stage.eps for stage in self._forward_stages],
        )

    def release(self) -> None:
        """Free what forward keeps."""
        self._forward_stages, self._saved = (), None

    def _weights(self) -> list[Tensor]:
        """The weights, in 16 bits where the kernels would only round them and there are such copies."""
        weights = [aligned(stage.params.conv_weight.contiguous()) for stage in self._forward_stages]
        if self.copies is None or self.copies.dtype != self.x.dtype:
            return weights
        pairs = zip(weights, self.plan.stages, strict=True)
        return [self.copies.get(weight) if stage.kind == Kind.POINTWISE else weight for weight, stage in pairs]
