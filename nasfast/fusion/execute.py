"""How a chain runs: on the operator, folded, or as PyTorch's own modules; and what decides that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nasfast.fusion import rule
from nasfast.fusion.chain import Members
from nasfast.fusion.fold import IN_PLACE, Folded, settings_of, sources_of
from nasfast.ops import checks
from nasfast.ops.conv import conv_bn_act_chain
from nasfast.ops.reference import Stage

# decisions that one chain keeps; one for each shape of its input
_KEPT_WAYS = 256


class Way(Enum):
    """How a chain runs."""

    OPERATOR = "operator"
    FOLDED = "folded"
    PLAIN = "PyTorch"


# decides in place of the rule while `fuse` measures an example: the executor, its input -> way
measuring: ContextVar[Callable[[Executor, Tensor], Way] | None] = ContextVar("measuring", default=None)


class Executor:
    """Runs one chain of one module, and keeps what it has decided and folded.

    Args:
        always: whether the chain always runs on the operator.
        measured: for a situation, how the chain was measured to run fastest in it.

    Attributes:
        members: modules of the chain; None if they can no longer be one, so that the chain runs on PyTorch.
    """

    def __init__(self, always: bool, measured: dict[tuple, Way]) -> None:
        self.members: Members | None = None
        self.measured = dict(measured)
        self._always = always
        self._ways: dict[tuple, Way] = {}
        self._folded: Folded | None = None

    def situation(self, x: Tensor) -> tuple:
        """All that the decision depends on besides the settings of the modules."""
        assert self.members is not None  # or nothing is decided
        gradients = torch.is_grad_enabled()
        trains = wanted = batch = False
        for conv, bn in zip(self.members.convs, self.members.norms, strict=True):
            batch = batch or bn.training or bn._buffers.get("running_mean") is None
            if gradients:
                weight: Any = conv._parameters["weight"]
                trains = trains or weight.requires_grad
                affine: dict[str, Any] = bn._parameters
                wanted = wanted or affine["weight"].requires_grad or affine["bias"].requires_grad
                bias = conv._parameters["bias"]
                wanted = wanted or (bias is not None and bias.requires_grad)
        wanted = gradients and (wanted or trains or x.requires_grad)
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return x.device, x.shape, x.dtype, autocast, batch, wanted, trains

    def way(self, x: Tensor) -> Way | None:
        """How the chain runs on x; None if x or the parameters are no ordinary tensors, so that PyTorch runs it."""
        if not plain(x) or x.dim() != 4 or not torch.amp.is_autocast_available(x.device.type):
            return None
        if self.members is None or not plain(*[t for t in self.members.tensors() if t is not None]):
            return None
        if self._always:
            return Way.OPERATOR
        situation = self.situation(x)
        way = self._ways.get(situation)
        if way is None:
            if len(self._ways) >= _KEPT_WAYS:
                self._ways.clear()
            way = self._ways[situation] = self._decide(x, situation)
        if way is not Way.FOLDED:
            self._folded = None
        return way

    def _decide(self, x: Tensor, situation: tuple) -> Way:
        assert self.members is not None
        *_, batch, wanted, trains = situation
        stages = self.members.stages()
        if not _fits(x, stages):
            return Way.PLAIN
        if not batch and not wanted and _can_fold(x, stages):
            return Way.FOLDED
        decide = measuring.get()
        if decide is not None:
            self.measured[situation] = decide(self, x)
        if situation in self.measured:
            return self.measured[situation]
        return Way.OPERATOR if rule.pays(x, _in_float32(stages), trains=trains) else Way.PLAIN

    def run_all(self, way: Way, x: Tensor, residual: Tensor | None) -> Tensor:
        """The result of the whole chain with its modules in their present modes, which count the batch."""
        assert self.members is not None  # or there would be no way
        folded = self._folded
        if way is Way.FOLDED and folded is not None:
            if folded.serves(self.members.tensors(), self.members.settings(), result_dtype(x)):
                return folded.run(x, residual)
        return self.run(way, x, self.members.begin(), residual)

    def run(self, way: Way, x: Tensor, stages: Sequence[Stage], residual: Tensor | None) -> Tensor:
        """The result of these stages, which are all or the first of the chain's."""
        if way is Way.FOLDED and not any([stage.training for stage in stages]):
            dtype = result_dtype(x)
            # another thread may drop it meanwhile
            folded = self._folded
            if folded is None or not folded.serves(sources_of(stages), settings_of(stages), dtype):
                # the tensors may be others than those for which the way was decided
                if not _fits(x, stages) or not _can_fold(x, stages):
                    return run_stages(x, stages, residual)
                folded = self._folded = Folded(stages, dtype, x.shape)
            return folded.run(x, residual)
        return run_stages(x, stages, residual)


def run_stages(x: Tensor, stages: Sequence[Stage], residual: Tensor | None) -> Tensor:
    """The stages on the operator, or on PyTorch where the operator refuses them."""
    exact = _in_float32(stages)
    try:
        # checks its arguments before it computes or changes anything
        y = conv_bn_act_chain(x, exact, residual=residual)
    except (TypeError, ValueError):
        # PyTorch may accept what the operator refuses, such as a residual that is broadcast. If PyTorch refuses it too,
        # its error is the one that users of the model know.
        if residual is not None:
            return run_stages(x, stages, None) + residual
        return plain_stages(x, stages)
    for given, used in zip(stages, exact, strict=True):
        if given is not used and given.training:
            for running, moved in zip(given.params[3:5], used.params[3:5], strict=True):
                if running is not None and moved is not None:
                    running.copy_(moved)
    return y


def plain_stages(x: Tensor, stages: Sequence[Stage]) -> Tensor:
    """The stages as PyTorch's functions."""
    for params, stride, padding, groups, act, training, momentum, eps in stages:
        x = F.conv2d(x, params.conv_weight, params.conv_bias, stride, padding, 1, groups)
        x = F.batch_norm(
            x, params.running_mean, params.running_var, params.bn_weight, params.bn_bias, training, momentum, eps
        )
        x = IN_PLACE[act](x)
    return x


def result_dtype(x: Tensor) -> torch.dtype:
    """Type of the result of convolution and BatchNorm on x."""
    device = x.device.type
    # autocast does not convert float64
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def plain(*tensors: Tensor) -> bool:
    """Whether these are ordinary tensors and not subclasses or functorch's wrappers, which follow other rules."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
            return False
    return {type(tensor) for tensor in tensors} <= _PLAIN


def _in_float32(stages: Sequence[Stage]) -> list[Stage]:
    """The stages with BatchNorms in float32, which the operator needs; a stage that has them is the same object."""
    return [_norm_in_float32(stage) if stage.params.bn_weight.dtype in _HALF else stage for stage in stages]


_PLAIN = {Tensor, nn.Parameter}
_HALF = (torch.bfloat16, torch.float16)


def _norm_in_float32(stage: Stage) -> Stage:
    params = stage.params
    mean, var = (None if tensor is None else tensor.float() for tensor in (params.running_mean, params.running_var))
    affine = {"bn_weight": params.bn_weight.float(), "bn_bias": params.bn_bias.float()}
    return stage._replace(params=params._replace(**affine, running_mean=mean, running_var=var))


def _fits(x: Tensor, stages: Sequence[Stage]) -> bool:
    try:
        checks.check_chain("conv_bn_act_chain", x, _in_float32(stages), None)
    except (TypeError, ValueError):
        return False
    return True


def _can_fold(x: Tensor, stages: Sequence[Stage]) -> bool:
    """Whether folding is exact and is seen to be outdated: inference tensors have no version counters."""
    if x.device.type != "cpu" or x.numel() == 0:
        return False
    return all(t.is_cpu and not t.is_inference() for t in sources_of(stages))
