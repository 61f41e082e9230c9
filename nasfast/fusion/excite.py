"""Squeeze-and-excitation: finds the modules that compute it, and runs each as one operator.

It needs the means of all pixels before it changes the first one, so it ends a chain, and the next chain begins behind
it. Its own forward reads and writes the tensor up to ten times in a step; the operator reads it four times and writes
two tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from nasfast.fusion import members
from nasfast.fusion.calls import ACTIVATION_FUNCTIONS
from nasfast.fusion.chain import Path, descendant
from nasfast.fusion.program import Frame
from nasfast.fusion.recognise import Unrecognised, frame_of
from nasfast.fusion.replaced import ReplacedForward, must_run_unfused
from nasfast.fusion.stages import plain
from nasfast.fusion.tracer import OURS
from nasfast.fusion.watch import Watch, hooks_of
from nasfast.ops import squeeze

_POOL, _CONV = "mean", "conv"
_GATE_FORWARDS = {nn.Sigmoid.forward: "sigmoid", nn.Hardsigmoid.forward: "hsigmoid"}
# timm's activations, by their forwards' qualified names
_TIMM_ACTIVATIONS = "timm.layers.activations"
_TIMM_GATES = {"Sigmoid.forward": "sigmoid", "HardSigmoid.forward": "hsigmoid"}
_GATE_FUNCTIONS: dict[object, str] = {
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    F.hardsigmoid: "hsigmoid",
    "sigmoid": "sigmoid",
}
_PRODUCTS = (operator.mul, torch.mul, "mul")


@dataclass(frozen=True)
class Excitation:
    """A module that computes squeeze-and-excitation, by names, so that it is right for every copy of the module.

    Attributes:
        squeeze, excite: paths of its two convolutions.
        act, gate: see `nasfast.ops.squeeze_excite`.
        kinds: for every other module that its forward calls, its path and what it must be.
        frames: the modules whose code was traced, itself first.
    """

    squeeze: Path
    excite: Path
    act: str
    gate: str
    kinds: tuple[tuple[Path, str], ...]
    frames: tuple[Frame, ...]

    def convolutions(self, module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
        """Its two convolutions in this module; None if the module may compute something else now, or has hooks."""
        try:
            if any(frame.problem(descendant(module, frame.path)) is not None for frame in self.frames):
                return None
            if any(_kind(descendant(module, path)) != kind for path, kind in self.kinds):
                return None
            convs = descendant(module, self.squeeze), descendant(module, self.excite)
        except (LookupError, Unrecognised):
            return None
        inner = [m for m in module.modules() if m is not module]
        if any(hooks for m in inner for hooks in hooks_of(m)) or any("forward" in vars(m) for m in inner):
            return None
        return convs if all(map(_is_product, convs)) else None


def find_excitations(model: nn.Module) -> dict[str, Excitation]:
    """The squeeze-and-excitations of a model by path, from traces; the outermost module that is one counts."""
    return dict(_search(model, ""))


def _search(module: nn.Module, path: str) -> Iterator[tuple[str, Excitation]]:
    if isinstance(module, OURS) or members.untouchable(module) is not None:
        return
    found = None
    with suppress(Exception):  # whatever the module's code raises for what is no tensor
        found = _excitation(module)
    if found is not None:
        yield path, found
        return
    for name, child in module.named_children():
        yield from _search(child, f"{path}.{name}" if path else name)


def _excitation(module: nn.Module) -> Excitation:
    """The module as a squeeze-and-excitation.

    Raises:
        Unrecognised: it is none.
    """
    convs = list(members.convolutions(module).values())
    if len(convs) != 2 or members.batch_norms(module) or not all(map(_is_product, convs)):
        raise Unrecognised("it has not just two 1x1 convolutions with biases")
    if convs[0].weight.shape[:2] != convs[1].weight.shape[1::-1]:
        raise Unrecognised("the second convolution does not undo what the first did to the channels")
    tracer = _Tracer()
    graph = tracer.trace(module)
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    kinds: dict[Path, str] = {}
    steps: list[tuple[str, fx.Node]] = []
    for node in calls:
        kind = _step(module, node)
        if node.op == "call_module":
            kinds[_path(node)] = kind
        if kind != "identity":
            steps.append((kind, node))
    names = [kind for kind, _ in steps]
    # a hard sigmoid that is spelled out
    if names[-4:-1] == ["+ 3", "relu6", "/ 6"]:
        names[-4:-1] = ["hsigmoid"]
    if len(names) == 5:
        names.insert(2, "identity")
    if len(names) != 6 or [names[i] for i in (0, 1, 3, 5)] != [_POOL, _CONV, _CONV, "product"]:
        raise Unrecognised(f"it computes {', '.join(names)}")
    _, _, act, _, gate, _ = names
    if act not in {*ACTIVATION_FUNCTIONS.values(), "identity", "relu6"} or gate not in squeeze.reference.GATES:
        raise Unrecognised(f"the operator has no {act} or {gate}")
    _check_line(graph, calls)
    first, second = (_path(node) for kind, node in steps if kind == _CONV)
    kinds.pop(first), kinds.pop(second)
    frames = tuple(frame_of(m, path, fused=False) for path, m in tracer.inside(module))
    return Excitation(first, second, act, gate, tuple(kinds.items()), frames)


class _Tracer(fx.Tracer):
    """Looks into all modules but those of PyTorch, and remembers which."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = _gate(m) is not None or super().is_leaf_module(m, module_qualified_name)
        if not leaf:
            self._inside.append(module_qualified_name)
        return leaf

    def inside(self, module: nn.Module) -> list[tuple[Path, nn.Module]]:
        """The modules that were looked into, the traced one first."""
        paths = [tuple(name.split(".")) for name in dict.fromkeys(self._inside)]
        return [((), module), *((path, descendant(module, path)) for path in paths)]


def _step(module: nn.Module, node: fx.Node) -> str:
    """What a node of the trace computes."""
    rest, kwargs = node.args[1:], node.kwargs
    if node.op == "call_module":
        return _kind(descendant(module, _path(node)))
    target: Any = node.target
    if target == "mean" and (rest, kwargs) == (((2, 3),), {"keepdim": True}):
        return _POOL
    if target is F.adaptive_avg_pool2d and rest in ((1,), ((1, 1),)) and not kwargs:
        return _POOL
    if target in _PRODUCTS and len(node.args) == 2 and not kwargs:
        return "product"
    if target in (operator.add, operator.truediv) and rest in ((3,), (6,)):
        return f"+ {rest[0]:g}" if target is operator.add else f"/ {rest[0]:g}"
    if target is F.relu6:
        return "relu6"
    settings = {name for name in kwargs if name != "inplace"}
    if not rest and not settings and (target in _GATE_FUNCTIONS or target in ACTIVATION_FUNCTIONS):
        return _GATE_FUNCTIONS.get(target) or ACTIVATION_FUNCTIONS[target]
    raise Unrecognised(f"it calls {target}")


def _check_line(graph: fx.Graph, calls: list[fx.Node]) -> None:
    """Check that each call reads the one before, and the last the input as well.

    Raises:
        Unrecognised: they do not.
    """
    (x,) = (node for node in graph.nodes if node.op == "placeholder")
    (output,) = (node for node in graph.nodes if node.op == "output")
    before = x
    for call in calls[:-1]:
        if call.all_input_nodes != [before]:
            raise Unrecognised("a call reads something else than the result of the one before")
        before = call
    if sorted(calls[-1].args, key=str) != sorted([x, before], key=str) or output.args != (calls[-1],):
        raise Unrecognised("it does not return its input times the factors")


def _kind(module: nn.Module) -> str:
    """What a module without submodules computes, in the words of `_step`."""
    if members.runs_conv(module):
        return _CONV
    if type(module) is nn.Identity:
        return "identity"
    if type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1)):
        return _POOL
    kind = _gate(module) or members.module_activation(module)
    if kind is None or module._modules:
        raise Unrecognised(f"it calls a {type(module).__name__}")
    return kind


def _gate(module: nn.Module) -> str | None:
    """The gate that a module computes, or None."""
    forward: Any = type(module).forward
    if getattr(forward, "__module__", "") == _TIMM_ACTIVATIONS:
        return _TIMM_GATES.get(forward.__qualname__)
    return _GATE_FORWARDS.get(forward)


def _is_product(conv: nn.Module) -> bool:
    """Whether this convolution multiplies one pixel by a matrix and adds a bias."""
    if not isinstance(conv, nn.Conv2d) or members.conv_problem(conv) is not None or conv.weight.shape[2:] != (1, 1):
        return False
    return conv.bias is not None and math.prod((*conv.stride, conv.groups)) == 1 and set(conv.padding) == {0}


def _path(node: fx.Node) -> Path:
    return tuple(str(node.target).split("."))


class ExcitationForward(ReplacedForward):
    """The forward of a squeeze-and-excitation: the operator where that is faster, else the module's own.

    The operator needs an x in channels_last on a CPU.

    Args:
        module: the module.
        excitation: what it computes.
    """

    def __init__(self, module: nn.Module, excitation: Excitation) -> None:
        super().__init__(module)
        self.excitation = excitation
        self._binding: _Binding | None = None

    def __reduce__(self) -> tuple:
        return ExcitationForward, (self.module, self.excitation)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if len(args) == 1 and not kwargs and not must_run_unfused():
            weights = self._weights(module, args[0])
            if weights is not None:
                with suppress(TypeError, ValueError):  # it refuses before it computes; PyTorch may accept the same
                    return squeeze.squeeze_excite(
                        args[0], *weights, act=self.excitation.act, gate=self.excitation.gate, backend="cpu"
                    )
        return type(module).forward(module, *args, **kwargs)

    def _weights(self, module: nn.Module, x: Any) -> list[Tensor] | None:
        """The weights and biases, if the operator can run on x now."""
        if type(x) is not Tensor or x.dim() != 4 or not squeeze.is_faster(x, trains=False):
            return None
        binding = self._binding
        if binding is None or not binding.same(module):
            binding = self._binding = _Binding(module, self.excitation)
        if binding.convs is None:
            return None
        weights: list[Tensor | None] = [conv._parameters.get(n) for conv in binding.convs for n in ("weight", "bias")]
        given = [weight for weight in weights if weight is not None]
        trains = any(weight.requires_grad for weight in given)
        if len(given) < 4 or not squeeze.is_faster(x, trains=trains) or not plain(x, *given):
            return None
        if torch.is_autocast_enabled("cpu"):
            return given if torch.get_autocast_dtype("cpu") == torch.bfloat16 else None
        return given if given[0].dtype == x.dtype else None


class _Binding:
    """The convolutions of a squeeze-and-excitation, and whether anything has changed since.

    Nothing here may keep the module alive: its forward has this.
    """

    def __init__(self, module: nn.Module, excitation: Excitation) -> None:
        inner = [m for m in module.modules() if m is not module]
        places = [(module._modules, name) for name in module._modules]
        places += [(vars(m), name) for m in inner for name in vars(m)]
        functions = [(type(m), "_conv_forward") for m in inner if isinstance(m, nn.Conv2d)]
        self._watch = Watch(places, inner, functions)
        self._own = _own(module)
        self.convs = excitation.convolutions(module)

    def same(self, module: nn.Module) -> bool:
        return _own(module) == self._own and self._watch.same()


def _own(module: nn.Module) -> tuple:
    """What may change in the module itself."""
    values = [(name, value) for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))]
    return type(module), type(module).forward, len(module._modules), values
