"""A module of a fused model, and who runs its forward.

`fuse` puts a `FusedForward` on each module that owns chains. One rule decides about each call: a graph that TorchDynamo
captured of the module's forward runs where there is one for the call, and is expected to be faster. In all other cases
the module's own forward runs, as it did before `fuse`: what a user, a tracer or a mode watches, what cannot be captured
for whatever reason, and calls in which too little pays. Until a graph has begun to run, nothing of the forward has run.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from threading import RLock
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.utils import get_traced_code
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental import _config as shape_config
from torch.nn.modules import module as module_state
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack, has_torch_function
from torch.utils._device import DeviceContext

from nasfast.fusion.dynamo import GraphFacts, fuse_graph
from nasfast.fusion.modules import catches_exceptions, has_patched_classes
from nasfast.fusion.shapes import known_sizes, numbers_of, symbols_of
from nasfast.ops.autograd import transformed

# Captures of one module. TorchDynamo compares their guards one after another, and its own limit is the same.
_MAX_CAPTURES = 8
# Captures for calls that look the same from outside. There are some for what may change, such as what trains; a forward
# with more takes a new way at every call.
_MAX_ALIKE = 3
# kinds of calls of which is kept what was decided
_KEPT_KINDS = 256

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Settings(NamedTuple):
    """How a module runs.

    Attributes:
        always: whether every chain always runs on the operator.
        inner: the backend for the rest.
        least_saving: the ns from which its graphs pay.
    """

    always: bool
    inner: str | Callable[..., Any]
    least_saving: float


class Region:
    """What was captured of a forward; a copy of the module uses it, too, because guards compare and do not identify.

    Attributes:
        graphs: every graph, in the order of their captures.
        own: why calls run the module's own forward: by `_mode` if a capture failed in it; of all calls that no graph
            serves if the key is None.
        function: the forward, as a function of the module, too.
        last: the graph of the last call, and the shapes of what went into it; None before the first one.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.graphs: list[Graph] = []
        self.own: dict[tuple[bool, bool] | None, str] = {}
        self.last: tuple[Graph, tuple[torch.Size, ...]] | None = None
        # calls in which too little pays
        self._alone: weakref.WeakKeyDictionary[nn.Module, _Alone] = weakref.WeakKeyDictionary()
        # TorchDynamo keeps what it compiled by code objects, and what changed by their names: each region has its own
        code = _captured_forward.__code__.replace(co_name=f"forward_of_region_{next(_NUMBERS)}")
        function = FunctionType(code, _captured_forward.__globals__)
        self._run: Callable[..., Any] = torch.compile(function, backend=_compile, fullgraph=True)
        # only where the guards of a graph hold
        self._run_known: Callable[..., Any] = torch._dynamo.run(self._run)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return _forward(module, *args, **kwargs)
            return self.call(module, *args, **kwargs)

        forward.region = self  # type: ignore[attr-defined]
        self.function = forward

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The result of the module's forward."""
        if _ALONE.get():
            return _forward(module, *args, **kwargs)
        values = (*args, *kwargs.values())
        alone = self._alone.get(module)
        if alone is not None and alone.kind(module, values) in alone.kinds:
            return alone.run(module, args, kwargs)
        if _is_watched(values) or _has_hooks_below(module):
            return _forward(module, *args, **kwargs)
        call, problem = _Call(self, module, values), ""
        for run in (self._run_known, self._capture):
            token = _CALL.set(call)
            try:
                return run(module, *args, **kwargs)
            except _NoGraph:
                pass
            except Exception as error:
                if call.started:
                    raise
                # what our backend raises has another error around it
                problem = first_line(getattr(error, "inner_exception", error))
                break
            finally:
                _CALL.reset(token)
        if call.too_small:
            if alone is None or len(alone.kinds) >= _KEPT_KINDS:
                alone = self._alone[module] = _Alone(module)
            alone.kinds.add(alone.kind(module, values))
            return alone.run(module, args, kwargs)
        result = _forward(module, *args, **kwargs)
        # what the forward itself refuses is no problem of the capture
        if problem:
            mode = "training" if module.training else "eval"
            self.own[_mode(module)] = f"it cannot be captured in {mode} mode ({problem})"
        return result

    def _capture(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a new graph.

        Raises:
            Exception: what TorchDynamo raises instead, and `_NoGraph` if there is to be no new one.
        """
        if {None, _mode(module)} & self.own.keys() or _compiles_otherwise():
            raise _NoGraph
        values = (*args, *kwargs.values())
        signature = _signature(module, values)
        # the last capture of its kind, before it is given up
        any_number = sum(signature == graph.signature for graph in self.graphs) == _MAX_ALIKE - 1
        with _capturing(values, any_size=self.settings.inner == "eager", any_number=any_number):
            return self._run(module, *args, **kwargs)

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], call: _Call) -> Graph:
        """Compile a graph of the forward.

        Raises:
            NotImplementedError: it checkpoints a part of itself, or has another operator of whole graphs, for which
                what they change, such as a counter of batches, is an input that must stay. Or its code catches
                exceptions, of which TorchDynamo knows neither all nor their types.
        """
        for code in get_traced_code() or ():
            if catches_exceptions(code):
                raise NotImplementedError(f"{code.co_qualname} catches exceptions")
        for node in graph_module.graph.nodes:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise NotImplementedError(f"it calls {node.target.name()} on a part of itself")
        inputs = [node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder")]
        facts = fuse_graph(graph_module, always=self.settings.always, keep_layouts=self.settings.inner != "eager")
        run = torch._dynamo.lookup_backend(self.settings.inner)(graph_module, list(example_inputs))
        graph = Graph(self, facts, run, inputs, _signature(call.module, call.values))
        self.graphs.append(graph)
        if sum(graph.signature == other.signature for other in self.graphs) > _MAX_ALIKE:
            self.own[None] = "it takes other ways for the same input"
        elif len(self.graphs) >= _MAX_CAPTURES:
            self.own[None] = f"it was captured {len(self.graphs)} times"
        return graph


class Graph:
    """A captured graph, which decides by the sizes of its inputs whether it pays to run it.

    Args:
        region: what it is a graph of.
        facts: what was found in it.
        run: the compiled graph.
        inputs: an example of each input, whose sizes may be symbols.
        signature: what its call looked like.
    """

    def __init__(
        self, region: Region, facts: GraphFacts, run: Callable[..., Any], inputs: Sequence[Any], signature: tuple
    ) -> None:
        self.facts, self.signature, self._run = facts, signature, run
        self._region, self._least = region, 0.0
        if region.settings.inner == "eager":
            self._least = region.settings.least_saving
        self._symbols = symbols_of(inputs)
        self._places = list(self._symbols)
        self._pays: dict[tuple[tuple[torch.Size, ...], int], bool] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Run it.

        Raises:
            _NoGraph: too little pays; nothing has run.
        """
        call = _CALL.get()
        shapes = tuple([inputs[place].shape for place in self._places])
        key = shapes, torch.get_num_threads()
        pays = self._pays.get(key)
        if pays is None:
            if len(self._pays) >= _KEPT_KINDS:
                self._pays.clear()
            pays = self._pays[key] = sum(max(saved, 0.0) for saved in self.savings(shapes)) >= self._least
        self._region.last = self, shapes
        if not pays:
            call.too_small = True
            raise _NoGraph
        call.started = True
        return self._run(*inputs)

    def savings(self, shapes: Sequence[torch.Size]) -> list[float]:
        """What each operator saves, in ns and the order of `facts.savings`, for inputs of these shapes."""
        numbers = {
            symbol: shape[dim]
            for shape, symbols in zip(shapes, self._symbols.values(), strict=True)
            for dim, symbol in symbols.items()
        }
        return [saved.function(torch.Size(numbers_of(saved.sizes, numbers))) for saved in self.facts.savings]

    @property
    def pays(self) -> bool:
        """Whether it ran when it was called last."""
        assert self._region.last is not None
        return self._pays.get((self._region.last[1], torch.get_num_threads()), True)


class FusedForward:
    """Replaces the forward of a module, as the bound method that it was; an object, so that it is copied and pickled
    with the module.

    It has a weak reference to the module: a cycle would keep the memory of a deleted model until the next garbage
    collection. What was unpickled keeps the module, and so does a deep copy without its module, a bound method.
    """

    def __init__(self, module: nn.Module, region: Region) -> None:
        self._module: Callable[[], nn.Module | None] = weakref.ref(module)
        self.region, self.__func__ = region, region.function
        self.__doc__, self.__module__ = type(module).forward.__doc__, type(module).forward.__module__

    @property
    def __self__(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                "the module of this fused forward was deleted; keep the model while its forward is used"
            )
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._module() or self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FusedForward) and (self._module(), self.region) == (other._module(), other.region)

    def __hash__(self) -> int:
        return hash((id(self._module()), id(self.region)))

    def __copy__(self) -> FusedForward:
        return FusedForward(self.__self__, self.region)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.__self__))
        if module is None:
            return MethodType(self.__func__, copy.deepcopy(self.__self__, memo))
        return FusedForward(module, self.region)

    def __reduce__(self) -> tuple:
        return _fused_again, (self.__self__, self.region.settings)

    @property
    def __wrapped__(self) -> MethodType:
        # inspect takes the signature of a call and the source from it
        return MethodType(type(self.__self__).forward, self.__self__)

    def __getattr__(self, name: str) -> Any:
        # torch.jit.script reads these of every forward that it compiles
        if name in ("__globals__", "__closure__"):
            raise AttributeError(
                "torch.jit.script cannot compile a module that runs fused: call nasfast.unfuse(model) before, or use "
                "torch.jit.trace, which records the unfused model"
            )
        # as a bound method has what its function has; torch.export says by __code__ where a model comes from
        return getattr(type(self.__self__).forward, name)


def is_fused(module: nn.Module) -> bool:
    """Whether `fuse` put a forward on the module, even if somebody has bound its function again."""
    return hasattr(getattr(vars(module).get("forward"), "__func__", None), "region")


def _fused_again(module: nn.Module, settings: Settings) -> FusedForward:
    fused = FusedForward(module, Region(settings))
    # who has pickled the forward alone has no other reference to the module
    fused._module = lambda: module
    return fused


class _Call:
    """A call of a region that may run a graph.

    Attributes:
        started: whether a graph has begun to run.
        too_small: whether its graph does not pay.
    """

    __slots__ = ("module", "region", "started", "too_small", "values")

    def __init__(self, region: Region, module: nn.Module, values: Sequence[Any]) -> None:
        self.region, self.module, self.values = region, module, values
        self.started = self.too_small = False


class _Alone:
    """Runs the own forward of a module where too little pays, with almost nothing in between.

    Two forwards leave nothing of the model's objects in the caches, so that each one that is asked takes microseconds:
    what is asked is looked up once.

    Attributes:
        kinds: the kinds of calls in which too little pays.
    """

    def __init__(self, module: nn.Module) -> None:
        # nothing of the module itself, which it would keep
        below = [child for child in module.modules() if child is not module]
        self._norms = [vars(child) for child in below if isinstance(child, _BatchNorm)]
        self._parameters = [child._parameters for child in below if child._parameters]
        # not what somebody has put around it
        self._fused = [
            (state, forward) for state in map(vars, below) if type(forward := state.get("forward")) is FusedForward
        ]
        self.kinds: set[tuple] = set()

    def kind(self, module: nn.Module, values: Sequence[Any]) -> tuple:
        """All of a call that decides whether chains pay in it."""
        decides = [norm["training"] for norm in self._norms]
        if torch.is_grad_enabled():
            decides += [
                parameter.requires_grad
                for parameters in (module._parameters, *self._parameters)
                for parameter in parameters.values()
                if parameter is not None
            ]
        return *_signature(module, values), torch.get_num_threads(), *decides

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The module's own forward, in which the modules inside of it have theirs, too."""
        taken = [(state, forward) for state, forward in self._fused if state.get("forward") is forward]
        # for what has its forward from elsewhere: another thread, which is ready earlier, or who has bound it again
        token = _ALONE.set(True)
        try:
            for state, _ in taken:
                state.pop("forward", None)
            return _forward(module, *args, **kwargs)
        finally:
            for state, forward in taken:
                state["forward"] = forward
            _ALONE.reset(token)


class _NoGraph(Exception):
    """No graph serves a call, and nothing of the forward has run."""


_NUMBERS = count()
# what a capture changes for its time concerns all threads
_CAPTURES = RLock()
_CALL: ContextVar[_Call] = ContextVar("the call of a region")
# whether a module around the one that is called runs its own forward, because too little pays
_ALONE: ContextVar[bool] = ContextVar("no region runs a graph", default=False)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _captured_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # what TorchDynamo captures has this branch left out: it runs where nothing was captured
    if not torch.compiler.is_compiling():
        raise _NoGraph
    return type(module).forward(module, *args, **kwargs)


# registered, because TorchDynamo then lets go of the parameters, which torch.utils.swap_tensors needs
@torch._dynamo.register_backend(name="nasfast_region", tags=("experimental",))
def _compile(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """The backend of every region: TorchDynamo keeps each backend for ever."""
    call = _CALL.get()
    return call.region.compile(graph_module, example_inputs, call)


@contextmanager
def _capturing(values: Sequence[Any], *, any_size: bool, any_number: bool) -> Iterator[None]:
    """While a forward is captured.

    Args:
        values: its arguments.
        any_size: whether the graph is to serve every batch, height and width, also 1, and every momentum.
        any_number: whether it is to serve all values of integers of modules that changed, such as counters of calls.
    """
    _CAPTURES.acquire()
    patches: dict[str, Any] = {
        # it cuts the graph at the buckets of DistributedDataParallel, in order to send them earlier
        "optimize_ddp": False,
        # an assert of numbers would raise another error, and on a GPU end the process's use of it
        "rewrite_assert_with_torch_assert": False,
        # it takes a tenth of the time
        "run_gc_after_compile": False,
        # until torch 2.13: with it, guards see no new type of a parameter (pytorch 163064)
        "use_recursive_dict_tags_for_guards": False,
        "allow_unspec_int_on_nn_module": any_number,
    }
    tensors = [value for value in values if type(value) is Tensor and value.dim()] if any_size else []
    marks = [(tensor, set(vars(tensor))) for tensor in tensors]
    collects = gc.isenabled()
    gc.disable()
    try:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, [0, 2, 3] if tensor.dim() == 4 else [0])
        with dynamo_config.patch(patches):
            if not any_size:
                yield
                return
            with shape_config.patch(backed_size_oblivious=True), known_sizes():  # type: ignore[attr-defined]
                yield
    finally:
        if collects:
            gc.enable()
        _CAPTURES.release()
        for tensor, before in marks:
            for name in vars(tensor).keys() - before:
                delattr(tensor, name)


def _compiles_otherwise() -> bool:
    """Whether the user has switched TorchDynamo off, or says when it compiles."""
    return dynamo_config.disable or eval_frame._stance.stance != "default"


def _mode(module: nn.Module) -> tuple[bool, bool]:
    return module.training, torch.is_grad_enabled()


def _signature(module: nn.Module, values: Sequence[Any]) -> tuple:
    """What may well need a graph of its own: modes, types and sizes."""
    autocast = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return *_mode(module), torch.is_inference_mode_enabled(), *autocast, *_described(values)


def _described(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.shape, value.stride(), value.dtype, value.device, value.requires_grad
        elif isinstance(value, (list, tuple)):
            yield from _described(value)
        elif isinstance(value, dict):
            yield from _described(value.values())
        elif isinstance(value, (bool, int, float, str)):
            yield value


def _is_watched(values: Sequence[Any]) -> bool:
    """Whether a tracer, a mode, a subclass of tensors or a hook on all modules must see the functions of the forward,
    or a patch of PyTorch's classes concerns them; a meta tensor has no numbers, so that nothing is faster.
    """
    if has_torch_function(values):  # also under a mode; that of torch.device changes no function of a tensor
        modes = _get_current_function_mode_stack()
        if not modes or not all(isinstance(mode, DeviceContext) for mode in modes):
            return True
    for value in values:
        if isinstance(value, Tensor) and (type(value) not in (Tensor, nn.Parameter) or value.is_meta):
            return True
    return (
        torch.jit.is_tracing()
        or is_fx_symbolic_tracing()
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
