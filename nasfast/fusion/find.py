"""Finds the modules of a model that own chains, from traces of its modules' forwards, before the model runs.

`match` has the rules. A trace never runs, because it has frozen the choices that the forward makes in Python; it tells
which modules are worth a capture by TorchDynamo, and what the report says until then.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from nasfast.fusion import members
from nasfast.fusion.match import Matcher, TracedStage, common
from nasfast.fusion.region import HOOKS, FusedForward, first_line
from nasfast.ops.modules import FusedConvBNAct, FusedInvertedResidual


@dataclass(frozen=True)
class FoundChain:
    """A chain in a trace: paths in the model of its convolutions and BatchNorms, and the activations of its stages.

    residual: whether the forward adds something to its result.
    """

    convolutions: tuple[str, ...]
    batch_norms: tuple[str, ...]
    acts: tuple[str, ...]
    residual: bool


@dataclass
class Findings:
    """Result of `find_chains`.

    Attributes:
        chains: for the path of each module that owns chains, these.
        reasons: by path, why a convolution is in no chain, and why a BatchNorm cannot be in one. A BatchNorm that could
            be in a chain has no reason here.
    """

    chains: dict[str, list[FoundChain]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def find_chains(model: nn.Module) -> Findings:
    """Search traces of a copy of the model that shares its parameters; the model itself is not touched."""
    try:
        twin = _twin_of(model)
    except Exception as error:
        reason = f"the model cannot be copied, so that nothing was traced ({first_line(error)})"
        return Findings(reasons=dict.fromkeys(members.convolutions(model), reason))
    search = _Search(twin)
    reasons = search.findings.reasons
    for name, bn in members.batch_norms(model).items():
        problem = members.norm_problem(bn)
        if problem is not None:
            reasons[name] = problem
    with _unchanged_surroundings():
        search.visit(twin)
    for name in members.convolutions(model):
        reasons.setdefault(name, "no traced forward reaches it")
    for name in search.in_chains:
        reasons.pop(name, None)
    return search.findings


_OURS = (FusedConvBNAct, FusedInvertedResidual)


class _Tracer(fx.Tracer):
    """Traces into every module that contains convolutions or BatchNorms, and into small wrappers of functions.

    Args:
        opaque: modules that it does not look into.
    """

    def __init__(self, opaque: set[nn.Module]) -> None:
        super().__init__()
        self._opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self._opaque or isinstance(m, (_ConvNd, _NormBase, *_OURS)) or members.untouchable(m) is not None:
            return True
        if any(isinstance(inner, (_ConvNd, _NormBase)) for inner in m.modules()):
            return False
        if super().is_leaf_module(m, module_qualified_name):
            return True
        return not isinstance(m, nn.Sequential) and not members.wraps_functions(m)


class _Search:
    """Visits the modules from the top and traces those that contain convolutions which no earlier trace reached."""

    def __init__(self, model: nn.Module) -> None:
        self.findings = Findings()
        # one name for each module, even if it is registered under several
        self.names = {m: name for name, m in model.named_modules()}
        self.weights = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
        # modules that no trace looks into, because their own trace failed or because they must not be changed
        self.opaque: set[nn.Module] = set()
        # the convolutions and BatchNorms of chains
        self.in_chains: set[str] = set()

    def visit(self, module: nn.Module) -> None:
        inside = [self.names[conv] for conv in members.convolutions(module).values()]
        if not inside or isinstance(module, _ConvNd) or module in self.opaque:
            return
        if isinstance(module, _OURS):
            self._close(module, f"fused already ({type(module).__name__})")
            return
        problem = members.untouchable(module)
        if problem is not None:
            self._close(module, f"inside {problem}")
            return
        graph = self._trace(module)
        if isinstance(graph, str):
            closed = len(self.opaque)
            for child in module.children():
                self.visit(child)
            # perhaps only a child that is opaque now stopped the first trace
            if len(self.opaque) > closed:
                graph = self._trace(module)
        if isinstance(graph, str):
            # lists and dicts of modules have no forward that could fail
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                self._close(module, f"the forward of {self.names[module] or 'the model'} cannot be traced ({graph})")
            return
        self._visit_unreached(module, _Trace(self, module, graph).search())

    def _visit_unreached(self, module: nn.Module, reached: set[nn.Module]) -> None:
        for child in module.children():
            inside = set(members.convolutions(child).values())
            if inside and not inside & reached:
                self.visit(child)
            elif not inside <= reached:
                self._visit_unreached(child, reached)

    def _close(self, module: nn.Module, reason: str) -> None:
        self.opaque.add(module)
        for member in (*members.convolutions(module).values(), *members.batch_norms(module).values()):
            self.findings.reasons.setdefault(self.names[member], reason)

    def _trace(self, module: nn.Module) -> fx.Graph | str:
        """The trace of the module's forward without its optional arguments, or the first line of the error."""
        try:
            # the first parameter is self
            _, *parameters = signature(type(module).forward).parameters.values()
            defaults = {p.name: p.default for p in parameters if p.default is not Parameter.empty}
            return _Tracer(self.opaque).trace(module, concrete_args=defaults or None)
        except Exception as error:
            return first_line(error)

    def conv_problem(self, conv: _ConvNd) -> str | None:
        problem = members.conv_problem(conv)
        if problem is None and self.weights[id(conv.weight)] > 1:
            return "shares its weight with another module"
        return problem


class _Trace(Matcher):
    """The trace of one module and the chains in it."""

    def __init__(self, search: _Search, root: nn.Module, graph: fx.Graph) -> None:
        self._search = search
        self._modules = dict(root.named_modules())
        self._inside = {name: frozenset(members.convolutions(m).values()) for name, m in self._modules.items()}
        super().__init__(graph)

    def search(self) -> set[nn.Module]:
        """Add chains and reasons to the findings; return the convolutions that the trace reaches."""
        self._reached: set[nn.Module] = {conv for node in self.order if isinstance(conv := self._module(node), _ConvNd)}
        for stages, add in self.chains():
            self._record(stages, add)
        for node, reason in self.reasons.items():
            self._search.findings.reasons.setdefault(self._name(node), reason)
        return self._reached

    def is_conv(self, node: fx.Node) -> bool:
        return isinstance(self._module(node), _ConvNd)

    def conv_problem(self, conv: fx.Node) -> str | None:
        return self._search.conv_problem(self._modules[conv.target])

    def norm_problem(self, norm: fx.Node) -> str | None:
        module = self._module(norm)
        if not isinstance(module, _BatchNorm):
            return f"followed by {type(module).__name__ if module else _name(norm)}, not by BatchNorm2d"
        problem = members.norm_problem(module)
        return None if problem is None else f"its BatchNorm {problem}"

    def activation(self, node: fx.Node) -> str | None:
        module = self._module(node)
        return members.function_activation(node) if module is None else members.module_activation(module)

    def inside(self, path: str) -> frozenset:
        return self._inside[path]

    def is_identity(self, node: fx.Node) -> bool:
        return type(self._module(node)) is nn.Identity

    def belongs_elsewhere(self, conv: fx.Node) -> bool:
        return self._name(conv) in self._search.in_chains

    def repeated(self, node: fx.Node) -> bool:
        """Whether the module that contains the module of this node calls it several times in one forward."""
        around = self.stack(node)
        calls = [other for other in self.order if other.op == "call_module" and other.target == node.target]
        return sum(self.stack(other)[: len(around)] == around for other in calls) > 1

    def own_activation(self, norm: fx.Node) -> tuple[str, fx.Node | None] | None:
        act = members.own_activation(self._modules[norm.target])
        if act == "identity":
            return None
        return ("identity", None) if act is None else (act, norm)

    def changes_in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self._module(node), "inplace", False))
        return super().changes_in_place(node)

    def stack(self, node: fx.Node) -> list[tuple[str, str]]:
        stack = super().stack(node)
        return stack[:-1] if node.op == "call_module" else stack

    def _record(self, stages: list[TracedStage], add: fx.Node | None) -> None:
        nodes = [node for stage in stages for node in stage.nodes]
        around = common([self.stack(node) for node in (*nodes, *([] if add is None else [add]))])
        owner = self._modules[around[-1][1] if around else ""]
        inside = set(owner.modules())
        problem = ""
        if any(self._modules[node.target] not in inside for node in nodes if node.op == "call_module"):
            problem = "is no submodule of the module that calls it"
        elif not set(members.convolutions(owner).values()) <= self._reached:
            problem = "is called by a forward whose trace does not reach all of its convolutions"
        if problem:
            self.reasons |= {stage.conv: problem for stage in stages}
            return
        convs, norms = (
            tuple(map(self._name, calls)) for calls in zip(*((s.conv, s.norm) for s in stages), strict=True)
        )
        chain = FoundChain(convs, norms, tuple(stage.act for stage in stages), add is not None)
        self._search.in_chains.update((*convs, *norms))
        self._search.findings.chains.setdefault(self._search.names[owner], []).append(chain)

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self._modules[node.target] if node.op == "call_module" else None

    def _name(self, node: fx.Node) -> str:
        """Name in the model of the module that a node calls."""
        return self._search.names[self._modules[node.target]]


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _twin_of(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and its own buffers, without hooks and without the forwards of `fuse`."""
    memo: dict[int, object] = {}
    # tensors that are not copied: they may be large, and a result that a forward has stored cannot be copied
    shared = []
    for module in model.modules():
        values = (*module._parameters.values(), *vars(module).values())
        shared += [value for value in values if isinstance(value, torch.Tensor)]
        for name in HOOKS:
            memo[id(getattr(module, name))] = OrderedDict()
        if isinstance(vars(module).get("forward"), FusedForward):
            memo[id(module.forward)] = None
    memo.update((id(tensor), tensor) for tensor in shared)
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        if vars(module).get("forward", ...) is None:
            del module.forward
    return twin


@contextmanager
def _unchanged_surroundings() -> Iterator[None]:
    """Restore the random generators that a traced forward may use, and suppress its warnings."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
