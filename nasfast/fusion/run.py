"""Runs the chains of a fused model inside the forwards of its own modules.

The module's own forward runs, so it makes its decisions in Python at each call. Meanwhile the first convolution of a
chain returns a placeholder instead of its result. BatchNorm, activation and the next convolution then record their
arguments in the placeholder instead of running, and the last one runs the chain as one `conv_bn_act_chain`. Any other
operation on a placeholder first computes its value. So a forward that differs from the one that `fuse` traced may be
slower, but is never wrong.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_state
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from nasfast.ops import checks, reference
from nasfast.ops.conv import conv_bn_act_chain
from nasfast.ops.reference import ConvBNParams, Stage

Path = tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """One chain of a module. It holds names, so it is also right for every copy of the module.

    Attributes:
        start: path of its first convolution below the module.
        acts: activation of each stage.
        residual: whether the forward adds something to its result; the operator then makes the addition.
        watched: paths of the modules whose hooks would get a placeholder.
    """

    start: Path
    acts: tuple[str, ...]
    residual: bool
    watched: tuple[Path, ...]

    def start_weight(self, module: nn.Module) -> Tensor | None:
        """Weight of the first convolution; None if a watched module has a hook or no longer exists."""
        try:
            if self.hooked(module):
                return None
            return _descendant(module, self.start)._parameters["weight"]
        except KeyError:
            return None

    def hooked(self, module: nn.Module) -> list[str]:
        """Paths of the watched modules that have hooks now."""
        return [".".join(path) for path in self.watched if _has_hooks(_descendant(module, path))]


class ChainForward:
    """Replaces the forward of a module that owns chains; an object, so that it is copied and pickled with the module.

    It has a weak reference to the module: a cycle would keep the memory of a deleted model until the next garbage
    collection.
    """

    def __init__(self, module: nn.Module, chains: Sequence[Chain]) -> None:
        self._module = weakref.ref(module)
        self.chains = tuple(chains)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                "the module of this fused forward was deleted; keep the model while its forward is used"
            )
        return module

    def __reduce__(self) -> tuple:
        return ChainForward, (self.module, self.chains)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(partial(type(self.module).forward, self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        # compilers fuse by themselves, tracers need the plain operators, and global hooks see every module
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or module_state._has_any_global_hook():
            return forward(self.module, *args, **kwargs)
        weights = [(chain, chain.start_weight(self.module)) for chain in self.chains]
        starts = _Starts({id(weight): chain for chain, weight in weights if weight is not None})
        if not starts.chains:
            return forward(self.module, *args, **kwargs)
        with starts:
            result = forward(self.module, *args, **kwargs)
        return starts.finish(result)


def activation_of(function: object, *args: Any, **kwargs: Any) -> str | None:
    """The value of `Stage.act` for a call of this function; None if no stage has this activation.

    Args:
        function: the function that is called.
        args, kwargs: its arguments without the input.
    """
    if function is F.hardtanh:
        return _hardtanh(*args, **kwargs)
    return _ACTIVATIONS.get(function)


def square_conv(
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> _Conv | None:
    """The convolution that F.conv2d computes with these arguments behind its input; None if no stage can have it."""
    step, pad = _one(stride), _one(padding)
    if bias is not None or step is None or pad is None or _one(dilation) != 1:
        return None
    return _Conv(weight, step, pad, groups)


class _Conv(NamedTuple):
    """A convolution whose BatchNorm has not been called yet."""

    weight: Tensor
    stride: int
    padding: int
    groups: int


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

    def __init__(self, chain: Chain, source: Tensor) -> None:
        self.chain = chain
        self.source = source
        # inference tensors have no version counter
        self.version = None if source.is_inference() else source._version
        self.context = _Context.now(source.device.type)
        self.stages: tuple[Stage, ...] = ()
        # number of first stages whose running statistics are updated; they must be updated only once
        self.moved = 0

    def compute(self, stages: tuple[Stage, ...], conv: _Conv | None = None, residual: Tensor | None = None) -> Tensor:
        """The value behind these stages, with the settings under which the chain began."""
        if self.version is not None and self.source._version != self.version:
            raise RuntimeError(
                f"the input of the fused chain that starts at {'.'.join(self.chain.start)} was changed in place before "
                "the chain ran; call nasfast.unfuse on the module whose forward does that"
            )
        # the operators must see neither placeholders nor the function modes of an outer forward
        with torch._C.DisableTorchFunction():
            if _Context.now(self.context.device) == self.context:
                return self._compute(stages, conv, residual)
            _, gradients, autocast, dtype = self.context
            with torch.set_grad_enabled(gradients), torch.autocast(self.context.device, dtype, enabled=autocast):
                return self._compute(stages, conv, residual)

    def _compute(self, stages: tuple[Stage, ...], conv: _Conv | None, residual: Tensor | None) -> Tensor:
        value = self.source
        if stages:
            value = _run_stages(value, [_still(s) if i < self.moved else s for i, s in enumerate(stages)], residual)
            self.moved = max(self.moved, len(stages))
        if conv is not None:
            value = F.conv2d(value, conv.weight, None, conv.stride, conv.padding, 1, conv.groups)
        return value


class _Starts(TorchFunctionMode):
    """While active, the convolutions that start a chain return a placeholder."""

    def __init__(self, chains: dict[int, Chain]) -> None:
        super().__init__()
        self.chains = chains
        self.runs: list[_Run] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.conv2d:
            started = self._start(*args, **kwargs)
            if started is not None:
                return started
        return func(*args, **kwargs)

    def _start(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> _Placeholder | None:
        chain = self.chains.get(id(weight))
        if chain is None or not _plain(input, weight) or input.dim() != 4:
            return None
        if not torch.amp.is_autocast_available(input.device.type):
            return None
        conv = square_conv(weight, *args, **kwargs)
        if conv is None:
            return None
        self.runs.append(_Run(chain, input))
        return _Placeholder(self.runs[-1], (), conv)

    def finish(self, result: Any) -> Any:
        """The result of the forward without placeholders; updates the statistics of all BatchNorms that were called."""
        if type(result) is not Tensor:
            result = pytree.tree_map_only(_Placeholder, _value, result)
        for run in self.runs:
            if run.moved < len(run.stages):
                run.compute(run.stages)
        return result


class _Placeholder(Tensor):
    """Stands for the result of the first part of a chain: some stages, then perhaps a convolution."""

    run: _Run
    stages: tuple[Stage, ...]
    conv: _Conv | None
    value: Tensor | None

    @staticmethod
    def __new__(cls, run: _Run, stages: tuple[Stage, ...], conv: _Conv | None) -> _Placeholder:
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


def _extend_conv(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    if not isinstance(input, _Placeholder) or input.conv is not None or not input.open or not _plain(weight):
        return None
    conv = square_conv(weight, *args, **kwargs)
    if conv is None or len(input.stages) == len(input.run.chain.acts):
        return None
    return _Placeholder(input.run, input.stages, conv)


def _extend_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not isinstance(input, _Placeholder) or input.conv is None or not input.open:
        return None
    if weight is None or bias is None or not _plain(weight, bias):
        return None
    conv_weight, stride, padding, groups = input.conv
    params = ConvBNParams(conv_weight, weight, bias, running_mean, running_var)
    return input.extended((*input.stages, Stage(params, stride, padding, groups, "identity", training, momentum, eps)))


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
    if not isinstance(residual, Tensor) or not _plain(residual):
        return None
    result = run.compute(stages, residual=residual)
    # in place the result keeps its type whatever is added
    return result.to(_result_dtype(run)) if in_place else result


def _result_dtype(run: _Run) -> torch.dtype:
    """Type of the result of convolution and BatchNorm on the source."""
    # autocast does not convert float64
    if run.context.autocast and run.source.dtype != torch.float64:
        return run.context.autocast_dtype
    return run.source.dtype


def _run_stages(x: Tensor, stages: list[Stage], residual: Tensor | None) -> Tensor:
    try:
        checks.check_chain("conv_bn_act_chain", x, stages, residual)
    except (TypeError, ValueError):
        # PyTorch may accept what the operator refuses, such as a residual that is broadcast, or BatchNorms in half
        # precision. If PyTorch refuses it too, its error is the one that users of the model know.
        if residual is not None:
            return _run_stages(x, stages, None) + residual
        return _plain_stages(x, stages)
    return conv_bn_act_chain(x, stages, residual=residual)


def _plain_stages(x: Tensor, stages: list[Stage]) -> Tensor:
    for params, stride, padding, groups, act, training, momentum, eps in stages:
        x = F.conv2d(x, params.conv_weight, None, stride, padding, 1, groups)
        x = F.batch_norm(
            x, params.running_mean, params.running_var, params.bn_weight, params.bn_bias, training, momentum, eps
        )
        x = reference.ACTIVATIONS[act](x)
    return x


def _still(stage: Stage) -> Stage:
    """The stage without its running statistics, so that it does not update them."""
    if not stage.training:
        return stage
    return stage._replace(params=stage.params._replace(running_mean=None, running_var=None))


def _plain(*tensors: Tensor) -> bool:
    """Whether these are ordinary tensors and not subclasses or functorch's wrappers, which follow other rules."""
    return all(
        type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


def _one(value: str | int | Sequence[int]) -> int | None:
    """The value of a convolution's setting if it is the same in both directions, else None."""
    if isinstance(value, str):
        return None
    if isinstance(value, int):
        return value
    return value[0] if len(set(value)) == 1 else None


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> str | None:
    return "relu6" if (min_val, max_val) == (0, 6) else None


def _descendant(module: nn.Module, path: Path) -> nn.Module:
    for name in path:
        child = module._modules[name]
        if child is None:
            raise KeyError(name)
        module = child
    return module


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


_DIMENSIONS = {Tensor.dim, Tensor.ndim.__get__}  # type: ignore[attr-defined]  # ndim of the class is a property
_ACTIVATIONS: dict[object, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    Tensor.relu: "relu",
    Tensor.relu_: "relu",
    F.relu6: "relu6",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    Tensor.tanh: "tanh",
    Tensor.tanh_: "tanh",
    F.hardswish: "hswish",
    F.silu: "silu",
}
_ADDITIONS = {torch.add: False, Tensor.add: False, Tensor.__add__: False, Tensor.add_: True, Tensor.__iadd__: True}
_EXTENSIONS: dict[object, Callable[..., Tensor | None]] = {
    torch.conv2d: _extend_conv,
    F.batch_norm: _extend_batch_norm,
    **{function: partial(_extend_activation, function) for function in (*_ACTIVATIONS, F.hardtanh)},
    **{function: partial(_extend_add, in_place) for function, in_place in _ADDITIONS.items()},
}
