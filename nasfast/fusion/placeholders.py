"""Runs the chains of a fused model inside the forwards of its own modules.

The module's own forward runs, so it makes its decisions in Python at each call. Meanwhile the first convolution of a
chain returns a placeholder instead of its result. BatchNorm, activation and the next convolution then record their
arguments in the placeholder instead of running, and the last one runs the chain as one `conv_bn_act_chain`. Any other
operation on a placeholder first computes its value. So a forward that differs from the one that `fuse` traced may be
slower, but is never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nasfast.fusion.chain import BoundChain
from nasfast.fusion.members import ACTIVATION_FUNCTIONS, ADDITIONS, Conv, activation_of, square_conv, stage_of
from nasfast.fusion.replaced import ReplacedForward
from nasfast.fusion.stages import Way, plain, result_dtype
from nasfast.ops.reference import Stage


class StartForward(ReplacedForward):
    """Replaces the forward of the convolution that starts a chain which is recorded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            recording = _RECORDING.get()
            while recording is not None and module not in recording.chains:
                recording = recording.outer
            started = None if recording is None else recording.start(module, args[0])
            if started is not None:
                return started
        return type(module).forward(module, *args, **kwargs)


class _Context(NamedTuple):
    """The settings of PyTorch that decide, besides the arguments, how an operation runs."""

    device: str
    gradients: bool
    autocast: bool
    autocast_dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> _Context:
        return cls(device, torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


class _Run:
    """One pass through a chain: its input, the stages called so far, and which of them have been computed."""

    def __init__(self, bound: BoundChain, way: Way, source: Tensor) -> None:
        self.bound, self.chain = bound, bound.chain
        self.way, self.source = way, source
        # inference tensors have no version counter
        self.version = None if source.is_inference() else source._version
        self.context = _Context.now(source.device.type)
        self.stages: tuple[Stage, ...] = ()
        # number of first stages whose running statistics are updated; they must be updated only once
        self.moved = 0

    def compute(self, stages: tuple[Stage, ...], conv: Conv | None = None, residual: Tensor | None = None) -> Tensor:
        """The value behind these stages, with the settings under which the chain began."""
        if self.version is not None and self.source._version != self.version:
            raise RuntimeError(
                f"the input of the fused chain that starts at {self.chain.start} was changed in place before "
                "the chain ran; call nasfast.unfuse on the module whose forward does that"
            )
        if _Context.now(self.context.device) == self.context:
            return self._compute(stages, conv, residual)
        _, gradients, autocast, dtype = self.context
        with torch.set_grad_enabled(gradients), torch.autocast(self.context.device, dtype, enabled=autocast):
            return self._compute(stages, conv, residual)

    def _compute(self, stages: tuple[Stage, ...], conv: Conv | None, residual: Tensor | None) -> Tensor:
        value = self.source
        if stages:
            still = [_still(s) if i < self.moved else s for i, s in enumerate(stages)]
            value = self.bound.run(self.way, value, still, residual)
            self.moved = max(self.moved, len(stages))
        if conv is not None:
            value = F.conv2d(value, *conv)
        return value


class Recording:
    """One run of a module's own forward: its chains, those that began, and the recording in which the forward runs.

    Args:
        chains: the chains by their first convolutions, which have a `StartForward`.
    """

    def __init__(self, chains: Mapping[nn.Module, BoundChain]) -> None:
        self.chains, self.outer = chains, _RECORDING.get()
        self.runs: list[_Run] = []

    def start(self, module: nn.Module, input: Any) -> _Placeholder | None:
        """What the convolution returns; None if the chain runs on PyTorch."""
        found, weight = self.chains[module], module._parameters.get("weight")
        way = found.way(input, recorded=True)
        if weight is None or way is Way.PLAIN or module.padding_mode != "zeros":
            return None
        settings: Any = module.stride, module.padding, module.dilation, module.groups
        conv = square_conv(weight, module.bias, *settings)  # type: ignore[arg-type]
        if conv is None or not _plain_conv(conv):
            return None
        self.runs.append(_Run(found, way, input))
        return _Placeholder(self.runs[-1], (), conv)

    def run(self, forward: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of the forward without placeholders; updates the statistics of all BatchNorms that were called."""
        token = _RECORDING.set(self)
        try:
            result = forward(*args, **kwargs)
        finally:
            _RECORDING.reset(token)
        if self.runs and type(result) is not Tensor:
            result = pytree.tree_map_only(_Placeholder, _value, result)
        for run in self.runs:
            if run.moved < len(run.stages):
                run.compute(run.stages)
        return result


_RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)


class _Placeholder(Tensor):
    """Stands for the result of the first part of a chain: some stages, then perhaps a convolution."""

    run: _Run
    stages: tuple[Stage, ...]
    conv: Conv | None
    value: Tensor | None

    @staticmethod
    def __new__(cls, run: _Run, stages: tuple[Stage, ...], conv: Conv | None) -> _Placeholder:
        placeholder = Tensor._make_wrapper_subclass(cls, (), dtype=run.source.dtype, device=run.source.device)
        placeholder.run, placeholder.stages, placeholder.conv, placeholder.value = run, stages, conv, None
        if len(stages) > len(run.stages):
            run.stages = stages
        return placeholder

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # BatchNorm modules read the number of dimensions of their input
        if func in _DIMENSIONS:
            return 4
        if func in _EXTENSIONS:
            extended = _EXTENSIONS[func](*args, **kwargs)
            if extended is not None:
                return extended
        return func(*pytree.tree_map_only(cls, _value, args), **pytree.tree_map_only(cls, _value, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(
            f"{func}: a value inside a fused chain was used where PyTorch does not announce it; "
            "call nasfast.unfuse on the module whose forward does that"
        )

    @property
    def open(self) -> bool:
        """Whether the chain may continue: it has no value yet, and the settings are those under which it began."""
        return self.value is None and _Context.now(self.run.context.device) == self.run.context

    def extended(self, stages: tuple[Stage, ...]) -> Tensor:
        """The placeholder of these stages; the value if they are the whole chain and nothing is to be added."""
        chain = self.run.chain
        placeholder = _Placeholder(self.run, stages, None)
        if len(stages) == len(chain.acts) and stages[-1].act == chain.acts[-1] and not chain.residual:
            return _value(placeholder)
        return placeholder


def _value(placeholder: _Placeholder) -> Tensor:
    if placeholder.value is None:
        placeholder.value = placeholder.run.compute(placeholder.stages, placeholder.conv)
    return placeholder.value


def _plain_conv(conv: Conv) -> bool:
    return plain(conv.weight) if conv.bias is None else plain(conv.weight, conv.bias)


def _extend_conv(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    if not isinstance(input, _Placeholder) or input.conv is not None or not input.open:
        return None
    conv = square_conv(weight, *args, **kwargs)
    if conv is None or not _plain_conv(conv) or len(input.stages) == len(input.run.chain.acts):
        return None
    return _Placeholder(input.run, input.stages, conv)


def _extend_batch_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    if not isinstance(input, _Placeholder) or input.conv is None or not input.open:
        return None
    stage = stage_of(input.conv, "identity", *args, **kwargs)
    if stage is None or not plain(stage.params.bn_weight, stage.params.bn_bias):
        return None
    return input.extended((*input.stages, stage))


def _extend_activation(function: object, input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    if not isinstance(input, _Placeholder) or input.conv is not None or not input.open:
        return None
    act, last = activation_of(function, *args, **kwargs), input.stages[-1]
    # the chain has neither a second activation of a stage nor another one than was traced
    if last.act != "identity" or input.run.chain.acts[len(input.stages) - 1] != act:
        return None
    return input.extended((*input.stages[:-1], last._replace(act=act)))


def _extend_add(in_place: bool, input: Tensor, other: Tensor, *scale: Any, **options: Any) -> Tensor | None:
    placeholder, residual = (input, other) if isinstance(input, _Placeholder) else (other, input)
    # an addition in place to the other tensor changes it for everyone who holds it
    if not isinstance(placeholder, _Placeholder) or (in_place and placeholder is not input):
        return None
    run, stages = placeholder.run, placeholder.stages
    if scale or options or not run.chain.residual or placeholder.conv is not None or not placeholder.open:
        return None
    if len(stages) < len(run.chain.acts) or stages[-1].act != run.chain.acts[-1]:
        return None
    if isinstance(residual, _Placeholder):
        residual = _value(residual)
    if not isinstance(residual, Tensor) or not plain(residual):
        return None
    result = run.compute(stages, residual=residual)
    # in place the result keeps its type whatever is added
    return result.to(result_dtype(run.source)) if in_place else result


def _still(stage: Stage) -> Stage:
    """The stage without its running statistics, so that it does not update them."""
    if not stage.training:
        return stage
    return stage._replace(params=stage.params._replace(running_mean=None, running_var=None))


_DIMENSIONS = {Tensor.dim, Tensor.ndim.__get__}  # type: ignore[attr-defined]  # ndim of the class is a property
_EXTENSIONS: dict[object, Callable[..., Tensor | None]] = {
    torch.conv2d: _extend_conv,
    F.batch_norm: _extend_batch_norm,
    **{function: partial(_extend_activation, function) for function in (*ACTIVATION_FUNCTIONS, F.hardtanh)},
    **{function: partial(_extend_add, in_place) for function, in_place in ADDITIONS.items()},
}
