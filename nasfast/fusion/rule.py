"""Which chains run faster on the operator than on PyTorch, by what each of them costs; nothing is timed while a model
runs.

PyTorch passes over the result of a convolution several times, for BatchNorm and for the activation, forward and
backward. The operator saves most of these passes, and its call has a price. What is saved is linear in what a chain
computes, with four constants for each type. Its sign decides about a chain, so another processor needs the same ratios
of the constants; in ns they are compared only with what guards cost.

`python -m benchmarks.fit_rule` measures chains of five networks and fits the constants
(`benchmarks/results/fit_rule_*.json`). Those below serve every instruction set: they choose about as well as fits on
AMD EPYCs with AVX2 (Zen 3, float32) and AVX-512 (Zen 4) and on an Intel Xeon with AMX. Their price of a call is above
that of the fits, because in a whole network the caches hold other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nasfast.ops.backends import resolve_backend
from nasfast.ops.chain.plan import Kind, stage_kind
from nasfast.ops.reference import Stage
from nasfast.ops.tensors import storage_dtype


class Costs(NamedTuple):
    """What the operator saves of each kind of work, in ns on one thread; negative where it takes longer.

    Attributes:
        passes: of one pass over one result of a convolution.
        strided: of one product of a depthwise convolution with a stride, backward, beside its passes.
        other: of one result of another convolution, which PyTorch runs; half where the operator gathers patches, as in
            a stem.
        call: of one call of the operator, forward or backward.
    """

    passes: float
    strided: float
    other: float
    call: float


COSTS = {
    torch.float32: Costs(0.22, 0.0, -2.0, -90_000),
    torch.bfloat16: Costs(0.16, 5.0, -1.0, -90_000),
}
"""The constants of each type, in ns of an Intel Xeon with AMX."""

# ns that guards of a module that was captured take for each of its BatchNorms: its forward is left to PyTorch where its
# chains save less
GUARDS_PER_NORM = 20_000


@dataclass(frozen=True)
class Saving:
    """What the operator saves of a chain, in ns on one thread.

    Attributes:
        per_pixel: of its input.
        per_call: with any input.
        results: elements of the outputs of its convolutions, per pixel of its input.
    """

    per_pixel: float
    per_call: float
    results: float

    def __call__(self, shape: torch.Size) -> float:
        """For an input of this shape, with the threads that there are."""
        batch, _, height, width = shape
        return batch * height * width / torch.get_num_threads() * self.per_pixel + self.per_call

    @property
    def least(self) -> int:
        """The results per thread from which there is a saving; 0 if there always is."""
        return 0 if self.per_call >= 0 else max(1, round(-self.per_call / self.per_pixel * self.results))


ALWAYS = Saving(0.0, 1e9, 1.0)


def expected_saving(x: Tensor, stages: Sequence[Stage], *, trains: bool, gradients: bool) -> Saving | None:
    """What the operator is expected to save of these stages; None if it is never faster.

    Args:
        x: a tensor of the type and device of the input; its shape does not count.
        stages: stages that the operator can run on x.
        trains: whether a convolution trains, which PyTorch then runs.
        gradients: whether anything has a gradient.

    Raises:
        RuntimeError: a backend was named that cannot serve x.
    """
    backend, dtype = resolve_backend("conv_bn_act_chain", x).name, storage_dtype(x)
    if backend != "cpu":
        # the reference is PyTorch itself, and on a GPU float32 is left to PyTorch
        return None if backend == "reference" or dtype == torch.float32 else ALWAYS
    if trains or dtype not in COSTS:
        return None
    results, *work = chain_work(stages, gradients=gradients)
    *saved, price = [amount * cost for amount, cost in zip(work, COSTS[dtype], strict=True)]
    return Saving(sum(saved), price, results) if sum(saved) > 0 else None


def chain_work(stages: Sequence[Stage], *, gradients: bool) -> tuple[float, ...]:
    """The results of a chain, and how much of each kind of work in `Costs` it has: per pixel of its input, and
    its calls.

    Images count as much larger than kernels.
    """
    kinds = [stage_kind(s.params.conv_weight.shape, s.stride, s.padding, s.groups) for s in stages]
    every = passes = strided = other = results = 0.0
    pixels, ways = 1.0, 1 + gradients
    for stage, kind in zip(stages, kinds, strict=True):
        pixels /= stage.stride**2
        results = pixels * stage.params.conv_weight.shape[0]
        every += results
        # PyTorch: two passes of an activation forward and three backward, two of BatchNorm, and one more for statistics
        passes += results * (ways * (2 + stage.training) + (2 + 3 * gradients) * (stage.act != "identity"))
        # PyTorch's pointwise convolutions alone are as fast
        if Kind.DEPTHWISE in kinds and (kind == Kind.DEPTHWISE or (kind == Kind.POINTWISE and stage.stride == 1)):
            if gradients and kind == Kind.DEPTHWISE and stage.stride > 1:
                strided += pixels * stage.params.conv_weight.numel()
        else:
            other += results / (2 if kind == Kind.DENSE else 1)
    # the operator has two passes of its own over the last result, if it needs statistics or keeps something
    passes -= results * 2 * ways * (gradients or stages[-1].training)
    return every, passes, strided, other, ways
