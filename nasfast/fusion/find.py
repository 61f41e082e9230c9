"""Finds the modules of a model that own chains, from traces of its modules' forwards, before the model runs.

`match` has the rules. A trace never runs, because it has frozen the choices that the forward makes in Python; it tells
which modules are worth a capture by TorchDynamo, and what the report says until then.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from nasfast.fusion import modules
from nasfast.fusion.match import GraphChain, Matcher, common_prefix, is_conv, join, module_path, module_stack
from nasfast.fusion.nodes import example_value
from nasfast.fusion.region import HOOKS, first_line, is_fused
from nasfast.ops.modules import ACTIVATION_MODULES


@dataclass
class Findings:
    """Result of `find_chains`.

    Attributes:
        chains: for the path of each module that owns chains, these, with tensors in their stages, and the path of the
            module that was traced.
        reasons: by path, why a convolution is in no chain, or a BatchNorm in no trace.
        whole: whether one trace reaches every convolution: the model's forward then chooses no path.
    """

    chains: dict[str, list[tuple[GraphChain, str]]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    whole: bool = False


def find_chains(model: nn.Module) -> Findings:
    """Search traces of a copy of the model that shares its parameters; the model itself is not touched."""
    try:
        twin = _shadow_copy(model)
    except Exception as error:
        reason = f"the model cannot be copied, so that nothing was traced ({first_line(error)})"
        return Findings(reasons=dict.fromkeys(modules.convolutions(model), reason))
    search = _Search(twin)
    with _unchanged_surroundings():
        search.visit(twin)
    reasons = search.findings.reasons
    for name in modules.convolutions(model):
        reasons.setdefault(name, "no traced forward reaches it")
    return search.findings


# those that a trace looks into, and that contain no other modules
_KNOWN = (*ACTIVATION_MODULES.values(), _ConvNd, nn.BatchNorm2d, nn.Hardtanh, nn.Sigmoid, nn.Hardsigmoid, nn.Identity)


class _Tracer(fx.Tracer):
    """Traces down to PyTorch's functions, as TorchDynamo does.

    Args:
        opaque: modules that it does not look into.
        sizes_fit: what conditions on sizes of images are. They choose no path: most pad or raise where they are true,
            and an assert where they are false.
    """

    proxy_buffer_attributes = True

    def __init__(self, opaque: set[nn.Module], sizes_fit: bool) -> None:
        super().__init__()
        self._opaque, self._sizes_fit = opaque, sizes_fit

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self._opaque or modules.why_opaque(m) is not None:
            return True
        return super().is_leaf_module(m, module_qualified_name) and not m._modules and not isinstance(m, _KNOWN)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self._sizes_fit if obj.node in _of_sizes(self.graph) else super().to_bool(obj)


def _of_sizes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that compute with sizes of tensors alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        asks = node.target in ("size", "dim") or (node.target is getattr and node.args[1] in ("shape", "ndim"))
        inputs = node.all_input_nodes
        if asks or (node.op == "call_function" and inputs and found.issuperset(inputs)):
            found.add(node)
    return found


# of results nothing is known
_UNKNOWN = torch.empty(0, device="meta")


class _Search:
    """Visits the modules from the top and traces those that contain convolutions which no earlier trace reached."""

    def __init__(self, model: nn.Module) -> None:
        self.findings, self._model = Findings(), model
        # one name for each module, even if it is registered under several
        self._names = {m: name for name, m in model.named_modules()}
        # modules that no trace looks into, because their own trace failed or because they must not be changed
        self._opaque: set[nn.Module] = set()

    def visit(self, module: nn.Module) -> None:
        if not modules.convolutions(module) or isinstance(module, _ConvNd) or module in self._opaque:
            return
        problem = modules.why_opaque(module)
        if problem is not None:
            self._close(module, f"inside {problem}")
            return
        graph = self._trace(module)
        if isinstance(graph, str):
            closed = len(self._opaque)
            for child in module.children():
                self.visit(child)
            # perhaps only a child that is opaque now stopped the first trace
            if len(self._opaque) > closed:
                graph = self._trace(module)
        if isinstance(graph, str):
            # lists and dicts of modules have no forward that could fail
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                self._close(module, f"the forward of {self._names[module] or 'the model'} cannot be traced ({graph})")
            return
        reached = self._search(module, graph)
        self.findings.whole |= {*modules.convolutions(self._model).values()} <= reached
        self._visit_unreached(module, reached)

    def _visit_unreached(self, module: nn.Module, reached: set[nn.Module]) -> None:
        for child in module.children():
            inside = {*modules.convolutions(child).values()}
            if inside and not inside & reached:
                self.visit(child)
            elif not inside <= reached:
                self._visit_unreached(child, reached)

    def _close(self, module: nn.Module, reason: str) -> None:
        self._opaque.add(module)
        for member in (*modules.convolutions(module).values(), *modules.batch_norms(module).values()):
            self.findings.reasons.setdefault(self._names[member], reason)

    def _trace(self, module: nn.Module, sizes_fit: bool = False) -> fx.Graph | str:
        """The trace of the module's forward without its optional arguments, or the first line of the error."""
        tracer = _Tracer(self._opaque, sizes_fit)
        try:
            # the first parameter is self
            _, *parameters = signature(type(module).forward).parameters.values()
            defaults = {p.name: p.default for p in parameters if p.default is not Parameter.empty}
            graph = tracer.trace(module, concrete_args=defaults or None)
        except Exception as error:
            again = isinstance(error, AssertionError) and not sizes_fit
            return self._trace(module, sizes_fit=True) if again else first_line(error)
        finally:
            # torch.fx leaves it in a cycle, which would keep a deleted model until the next garbage collection
            vars(tracer).clear()
        sizes = _of_sizes(graph)
        for node in reversed(graph.nodes):
            if not node.users and (node.target in (torch._assert, getattr) or node in sizes):  # a check of sizes
                graph.erase_node(node)
        tensors = dict(module.state_dict(keep_vars=True))
        for node in graph.nodes:
            # but that a method that changes a tensor returns it
            value = node.args[0].meta["example_value"] if node.op == "call_method" else _UNKNOWN
            node.meta["example_value"] = tensors.get(node.target, value) if node.op == "get_attr" else value
        return graph

    def _search(self, module: nn.Module, graph: fx.Graph) -> set[nn.Module]:
        """Add the chains of a trace to the findings; return the convolutions that the trace reaches."""
        top = self._names[module]
        leaves = {module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
        for leaf in leaves:
            if problem := modules.why_opaque(leaf):
                self._close(leaf, f"inside {problem}")
        reached = {module.get_submodule(module_path(node)) for node in graph.nodes if is_conv(node)}
        reached |= {leaf for leaf in leaves if isinstance(leaf, _ConvNd)}
        matcher = Matcher(graph)
        for chain in matcher.chains():
            around = common_prefix([module_stack(node) for node in chain.nodes])
            path = around[-1][1] if around else ""
            owner = module.get_submodule(path)
            if {*modules.convolutions(owner).values()} <= reached:
                chain = chain._replace(stages=fx.map_arg(chain.stages, example_value))
                self.findings.chains.setdefault(join(top, path), []).append((chain, top))
            else:
                reason = "is called by a forward whose trace does not reach all of its convolutions"
                self.findings.reasons |= {join(top, conv): reason for conv in chain.convolutions}
        for node, reason in matcher.reasons.items():
            self.findings.reasons.setdefault(join(top, module_path(node)), reason)
        for node in graph.nodes:
            node.meta.clear()  # as for the tracer
        return reached


def _shadow_copy(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and its own buffers, without hooks and without the forwards of `fuse`, whose
    BatchNorms read no sizes and no number of batches.
    """
    memo: dict[int, object] = {}
    # tensors that are not copied: they may be large, and a result that a forward has stored cannot be copied
    shared = []
    for module in model.modules():
        values = (*module._parameters.values(), *vars(module).values())
        shared += [value for value in values if isinstance(value, torch.Tensor)]
        for name in HOOKS:
            memo[id(getattr(module, name))] = OrderedDict()
    memo.update((id(tensor), tensor) for tensor in shared)
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        if is_fused(module):
            del vars(module)["forward"]
        if isinstance(module, _BatchNorm):
            module.momentum = module.momentum or 0.0
            vars(module)["_check_input_dim"] = lambda x: None
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
