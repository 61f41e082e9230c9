"""A module of a fused model whose forward TorchDynamo captures.

`fuse` puts a `FusedForward` on each module that owns chains. Its first call captures the module's forward with what it
calls, and the guards of TorchDynamo then see every change. What cannot be captured runs PyTorch's own code.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.modules import module as module_state

from nasfast.fusion.dynamo import GraphFacts, fuse_graph
from nasfast.fusion.modules import has_patched_classes
from nasfast.fusion.stages import SERVED
from nasfast.ops.autograd import transformed

# Captures of one module. TorchDynamo compares their guards one after another, and its own limit is the same.
_MAX_CAPTURES = 8
# Captures for calls that look the same from outside. There are some for what may change, such as what trains; a forward
# with more takes a new way at every call.
_MAX_ALIKE = 3
# Calls in which a region that gains too little runs PyTorch's own code: the first number at first, then twice as many
# each time, up to the second, because what trains may have changed. And the kinds of calls that are kept.
_FIRST_REST, _LONGEST_REST, _KEPT_KINDS = 8, 512, 256

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Settings:
    """How a module runs.

    Attributes:
        always: whether every chain always runs on the operator.
        inner: the backend for the rest.
        least_gain: the gain from which its graphs pay, as in `rule.gain_function`.
    """

    always: bool
    inner: str | Callable[..., Any]
    least_gain: float


class Region:
    """What was captured of a forward; a copy of the module uses it, too, because guards compare and do not identify.

    Attributes:
        facts: of the last graph; None before the first one.
        captures: the number of graphs.
        problem: why nothing more is captured, or nothing in one mode; "" if nothing stands against it.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.facts: GraphFacts | None = None
        self.captures, self.problem, self._stopped = 0, "", False
        self._alike: Counter[tuple] = Counter()
        # by the kind of call, how often PyTorch's own code runs before the next look, and how often it did in all
        self._rests: dict[tuple, tuple[int, int]] = {}
        # modes in which a capture failed
        self._refused: set[tuple[bool, bool]] = set()
        # TorchDynamo keeps what it compiled by code objects, and what changed by their names: each region has its own
        code = _forward.__code__.replace(co_name=f"forward_of_region_{next(_NUMBERS)}")
        function = FunctionType(code, _forward.__globals__)
        self._run: Callable[..., Any] = torch.compile(function, backend=_capture, fullgraph=True)
        # only where the guards of a capture hold
        self._run_known: Callable[..., Any] = torch._dynamo.run(self._run)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The result of the module's forward."""
        # a meta tensor has no numbers, so nothing is faster
        shapes_only = any(isinstance(arg, Tensor) and arg.is_meta for arg in args)
        if shapes_only or _RESTS.get() or _must_run_unfused() or _has_hooks_below(module):
            return _forward(module, *args, **kwargs)
        kind = _call_kind(module, args)
        remaining, rest = self._rests.get(kind, (0, _FIRST_REST // 2))
        if remaining:
            self._rests[kind] = remaining - 1, rest
            token = _RESTS.set(True)
            try:
                return _forward(module, *args, **kwargs)
            finally:
                _RESTS.reset(token)
        before = SERVED.gain
        result = self._captured(module, args, kwargs)
        if SERVED.gain - before < self.settings.least_gain and self.settings.inner == "eager":
            if len(self._rests) >= _KEPT_KINDS:
                self._rests.clear()
            rest = min(2 * rest, _LONGEST_REST)
            self._rests[kind] = rest, rest
        return result

    def _captured(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        mode = module.training, torch.is_grad_enabled()
        if self._stopped or mode in self._refused:
            return (self._run_known if self.captures else _forward)(module, *args, **kwargs)
        token = _CURRENT.set((self, module, args))
        try:
            with ExitStack() as around:
                if not self.captures and self.settings.inner == "eager":
                    around.enter_context(_DynamicSizes(args))
                if dynamo_config.use_recursive_dict_tags_for_guards:
                    # until torch 2.13: with it, guards see no new type of a parameter (pytorch 163064)
                    around.enter_context(dynamo_config.patch(use_recursive_dict_tags_for_guards=False))
                return self._run(module, *args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            # nothing of the forward has run yet
            problem = f"it cannot be captured in {'training' if mode[0] else 'eval'} mode ({first_line(error)})"
        finally:
            _CURRENT.reset(token)
        # what the forward itself refuses is no problem of the capture
        result = _forward(module, *args, **kwargs)
        self._refused.add(mode)
        self.problem = problem
        return result

    def capture(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], module: nn.Module, args: Any) -> Any:
        """Compile a graph of the forward.

        Raises:
            NotImplementedError: it checkpoints a part of itself, or has another operator of whole graphs, for which
                what they change, such as a counter of batches, is an input that must stay.
        """
        for node in graph_module.graph.nodes:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise NotImplementedError(f"it calls {node.target.name()} on a part of itself")
        self.facts = fuse_graph(graph_module, always=self.settings.always, keep_layouts=self.settings.inner != "eager")
        self.captures += 1
        self._alike[_call_signature(module, args)] += 1
        if max(self._alike.values()) > _MAX_ALIKE:
            self._stopped, self.problem = True, "it takes other ways for the same input"
        elif self.captures >= _MAX_CAPTURES:
            self._stopped, self.problem = True, f"it was captured {self.captures} times"
        return torch._dynamo.lookup_backend(self.settings.inner)(graph_module, list(example_inputs))


class FusedForward:
    """Replaces the forward of a module; an object, so that it is copied and pickled with the module.

    It has a weak reference to the module: a cycle would keep the memory of a deleted model until the next garbage
    collection.
    """

    def __init__(self, module: nn.Module, region: Region) -> None:
        self._module, self.region = weakref.ref(module), region

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                "the module of this fused forward was deleted; keep the model while its forward is used"
            )
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, region = self._module() or self.module, self.region
        if torch.compiler.is_compiling():
            return _forward(module, *args, **kwargs)
        return region.call(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        copied = FusedForward.__new__(FusedForward)
        memo[id(self)] = copied
        copied._module, copied.region = weakref.ref(memo[id(self.module)]), self.region
        return copied

    def __reduce__(self) -> tuple:
        return _fused_again, (self.module, self.region.settings)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(partial(type(self.module).forward, self.module))

    def __getattr__(self, name: str) -> Any:
        # torch.export says with it where a model comes from
        if name == "__code__":
            return type(self.module).forward.__code__
        # torch.jit.script reads these of every forward that it compiles
        if name in ("__globals__", "__closure__"):
            raise AttributeError(
                "torch.jit.script cannot compile a module that runs fused: call nasfast.unfuse(model) before, or use "
                "torch.jit.trace, which records the unfused model"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _fused_again(module: nn.Module, settings: Settings) -> FusedForward:
    return FusedForward(module, Region(settings))


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


_NUMBERS = count()
_CURRENT: ContextVar[tuple[Region, nn.Module, Sequence[Any]]] = ContextVar("the region that is called")
# whether a module around the one that is called runs PyTorch's own code, because too little pays
_RESTS: ContextVar[bool] = ContextVar("PyTorch's own code runs", default=False)


# registered, because TorchDynamo then lets go of the parameters, which torch.utils.swap_tensors needs
@torch._dynamo.register_backend(name="nasfast_region", tags=("experimental",))
def _capture(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """The backend of every region: TorchDynamo keeps each backend for ever."""
    region, module, args = _CURRENT.get()
    return region.capture(graph_module, example_inputs, module, args)


class _DynamicSizes:
    """While a forward is captured, its images have any batch, height and width, so that one graph serves all."""

    def __init__(self, args: Sequence[Any]) -> None:
        images = [arg for arg in args if type(arg) is Tensor and arg.dim() == 4]
        self._images = [(image, set(vars(image))) for image in images]

    def __enter__(self) -> None:
        for image, _ in self._images:
            torch._dynamo.maybe_mark_dynamic(image, [0, 2, 3])

    def __exit__(self, *_: object) -> None:
        for image, before in self._images:
            for name in vars(image).keys() - before:
                delattr(image, name)


def _call_signature(module: nn.Module, args: Sequence[Any]) -> tuple:
    """What may well need a graph of its own: modes, types and sizes."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    autocast = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in {tensor.device.type for tensor in tensors}
    ]
    images = [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors]
    return module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, *images


def _call_kind(module: nn.Module, args: Sequence[Any]) -> tuple:
    """What decides, with the module, whether chains pay in a call.

    Of the size it is the order, so that images of changing sizes are of few kinds.
    """
    x = args[0] if args else None
    where = module.training, torch.is_grad_enabled(), torch.get_num_threads()
    if type(x) is not Tensor:
        return where
    autocast = torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type)
    return (*where, int(4 * math.log2(x.numel() or 1)), x.dtype, x.requires_grad, autocast)


def _must_run_unfused() -> bool:
    """Whether tracers, modes or torch.func need PyTorch's operators now, or global hooks or patches concern them."""
    return (
        torch.jit.is_tracing()
        or module_state._has_any_global_hook()
        or torch._C._len_torch_dispatch_stack() > 0
        or transformed()
        or has_patched_classes()
    )


def _has_hooks_below(module: nn.Module) -> bool:
    """Whether a module inside of this one has hooks, which must see their usual arguments; no guard sees new ones."""
    for child in module._modules.values():
        if child is None:
            continue
        state = vars(child)
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or (child._modules and _has_hooks_below(child))
        ):
            return True
    return False


def first_line(error: Exception) -> str:
    """The first line of its message, or its type."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
