"""Finds the chains of convolution, BatchNorm and activation in a model, from traces of its modules' forwards.

Only one thing is taken from a trace: which operation reads which result. A trace never runs, because it has frozen the
choices that the forward makes in Python.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import Parameter, signature

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from nasfast.fusion import members
from nasfast.fusion.chain import Chain, Path, descendant
from nasfast.fusion.excite import find_excitations
from nasfast.fusion.program import Frame, Program, Unwritten, is_well_known, write
from nasfast.fusion.tracer import OURS, Tracer
from nasfast.fusion.twin import first_line, twin_of, unchanged_surroundings

_ADD_FUNCTIONS: dict[object, bool] = {torch.add: False, operator.add: False, operator.iadd: True}
_ADD_METHODS: dict[object, bool] = {"add": False, "add_": True}


@dataclass(frozen=True)
class LocatedChain:
    """A chain and its place in the model.

    Attributes:
        owner: path of the module whose forward runs it.
        chain: what that forward needs in order to run it.
        convolutions, norms: paths of the convolutions and BatchNorms, one of each per stage.
        then: type of an activation behind the chain that no stage can have, or "".
    """

    owner: str
    chain: Chain
    convolutions: tuple[str, ...]
    norms: tuple[str, ...]
    then: str


@dataclass
class Findings:
    """Result of `find_chains`.

    Attributes:
        chains: the chains, in no particular order.
        reasons: by path, why a convolution is in no chain, and why a BatchNorm cannot be in one. A BatchNorm that could
            be in a chain has no reason here.
        ours: paths of the convolutions in fused modules of nasfast.
        excitations: paths of the squeeze-and-excitations; their convolutions have no reason here.
        programs: by path, the programs of the modules that own chains and have a well-known forward.
    """

    chains: list[LocatedChain] = field(default_factory=list)
    programs: dict[str, Program] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    ours: set[str] = field(default_factory=set)
    excitations: list[str] = field(default_factory=list)


def find_chains(model: nn.Module, *, folding: bool) -> Findings:
    """Search traces of a copy of the model that shares its parameters; the model itself is not touched.

    Args:
        model: any module.
        folding: whether chains are wanted that the operator does not have and that can only be folded.
    """
    try:
        twin = twin_of(model)
    except Exception as error:
        reason = f"the model cannot be copied, so that nothing was traced ({first_line(error)})"
        return Findings(reasons=dict.fromkeys(members.convolutions(model), reason))
    search = _Search(twin, folding)
    reasons = search.findings.reasons
    for name, bn in members.batch_norms(model).items():
        problem = members.norm_problem(bn)
        if problem is not None:
            reasons[name] = problem
    with unchanged_surroundings():
        search.findings.excitations = list(find_excitations(twin))
        search.opaque.update(map(twin.get_submodule, search.findings.excitations))
        search.visit(twin)
        search.write_programs(twin)
    for name in members.convolutions(model):
        reasons.setdefault(name, "no traced forward reaches it")
    for located in search.findings.chains:
        for name in (*located.convolutions, *located.norms):
            reasons.pop(name, None)
    return search.findings


class _Search:
    """Visits the modules from the top and traces those that contain convolutions which no earlier trace reached."""

    def __init__(self, model: nn.Module, folding: bool) -> None:
        self.findings = Findings()
        self.folding = folding
        # one name for each module, even if it is registered under several
        self.names = {m: name for name, m in model.named_modules()}
        self.weights = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
        # modules that no trace looks into, because their own trace failed or because they must not be changed
        self.opaque: set[nn.Module] = set()
        self.in_chains: set[str] = set()

    def visit(self, module: nn.Module) -> None:
        inside = [self.names[conv] for conv in members.convolutions(module).values()]
        if not inside or isinstance(module, _ConvNd) or module in self.opaque:
            return
        if isinstance(module, OURS):
            self.findings.ours.update(inside)
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
            return Tracer(self.opaque).trace(module, concrete_args=defaults or None)
        except Exception as error:
            return first_line(error)

    def write_programs(self, model: nn.Module) -> None:
        """Write the programs of the modules that own chains; all chains have been found."""
        owned: dict[nn.Module, list[Chain]] = {}
        for located in self.findings.chains:
            owned.setdefault(model.get_submodule(located.owner), []).append(located.chain)
        self.in_chains = set()
        for owner in filter(is_well_known, owned):
            # without a program the module's own forward runs
            with suppress(Unwritten):
                self.findings.programs[self.names[owner]] = self._program(owner, owned)

    def _program(self, owner: nn.Module, owned: dict[nn.Module, list[Chain]]) -> Program:
        inside: dict[nn.Module, Path] = {owner: ()}
        # a chain may lie in modules inside of the owner, which may own chains too
        owners = [owner]
        for module in owners:
            watched = [below for chain in owned[module] for below in chain.watched]
            for path in sorted({below[:n] for below in watched for n in range(len(below))}):
                inner = descendant(module, path)
                if inner not in inside and is_well_known(inner):
                    inside[inner] = inside[module] + path
                    owners += [inner] if inner in owned else []
        tracer = Tracer(self.opaque, looked_into=set(inside))
        try:
            graph = tracer.trace(owner)
        except Exception as error:
            raise Unwritten(first_line(error)) from error
        trace = _Trace(self, owner, graph)
        chains = [trace.traced(chain.below(inside[module])) for module in owners for chain in owned[module]]
        frames = [Frame.of(module, path, fused=module in owned) for module, path in inside.items()]
        return write(graph, dict(owner.named_modules()), chains, frames)

    def conv_problem(self, conv: _ConvNd) -> str | None:
        problem = members.conv_problem(conv)
        if problem is None and self.weights[id(conv.weight)] > 1:
            return "shares its weight with another module"
        return problem if problem is not None or self.folding else members.only_folded(conv)


@dataclass
class _TracedStage:
    """Nodes and settings of one stage in a trace."""

    nodes: list[fx.Node]
    conv: str
    norm: str
    act: str
    # the node behind which the next stage may begin; None behind an activation that no stage can have
    tail: fx.Node | None
    then: str


class _Trace:
    """The trace of one module and the chains in it."""

    def __init__(self, search: _Search, root: nn.Module, graph: fx.Graph) -> None:
        self._search = search
        self._modules = dict(root.named_modules())
        self._inside = {name: frozenset(members.convolutions(m).values()) for name, m in self._modules.items()}
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        # an addition belongs to one chain, even if it adds the results of two
        self._taken: set[fx.Node] = set()
        self._in_place = [node for node in graph.nodes if self._changes_its_input(node)]

    def search(self) -> set[nn.Module]:
        """Add chains and reasons to the findings; return the convolutions that the trace reaches."""
        findings = self._search.findings
        convs = {node: conv for node in self._order if isinstance(conv := self._module(node), _ConvNd)}
        done: set[fx.Node] = set()
        for node, conv in convs.items():
            if node in done or self._search.names[conv] in self._search.in_chains:
                continue
            first = self._stage(node, conv)
            if isinstance(first, str):
                findings.reasons.setdefault(self._search.names[conv], first)
                continue
            stages, add = self._grow(first)
            done.update(n for stage in stages for n in stage.nodes)
            self._record(stages, add)
        return set(convs.values())

    def traced(self, chain: Chain) -> tuple[Chain, list[fx.Node], fx.Node | None]:
        """A chain of this module, the nodes of its stages, and the addition behind them.

        Raises:
            Unwritten: this trace does not have the chain.
        """
        name = ".".join(chain.convs[0])
        starts = [node for node in self._order if node.op == "call_module" and node.target == name]
        first = self._stage(starts[0], self._modules[name]) if len(starts) == 1 else ""
        if isinstance(first, str):
            raise Unwritten(f"{name} begins no chain in its own trace")
        stages, add = self._grow(first)
        if tuple(stage.act for stage in stages) != chain.acts or (add is not None) != chain.residual:
            raise Unwritten(f"the chain of {name} is another one in its own trace")
        return chain, [node for stage in stages for node in stage.nodes], add

    def _stage(self, node: fx.Node, conv: _ConvNd) -> _TracedStage | str:
        """The stage that begins with this convolution, which the node calls, or why none does."""
        problem = self._search.conv_problem(conv)
        if problem is not None:
            return problem
        nodes = [node]
        bn = self._reader(nodes)
        if bn is None:
            return "its result is used more than once" if nodes[-1].users else "its result is not used"
        module = self._module(bn)
        if not isinstance(module, _BatchNorm):
            return f"followed by {type(module).__name__ if module else _name(bn)}, not by BatchNorm2d"
        problem = members.norm_problem(module)
        if problem is not None:
            return f"its BatchNorm {problem}"
        if not self._together(node, bn):
            return "its BatchNorm is in another block"
        if self._calls(node) > 1 or self._calls(bn) > 1:
            return "is called several times in one forward"
        nodes.append(bn)
        act, tail, then = self._activation(nodes, module)
        if self._interrupted(nodes):
            return "something is changed in place before its BatchNorm or activation"
        return _TracedStage(nodes, str(node.target), str(bn.target), act, tail, then)

    def _activation(self, nodes: list[fx.Node], bn: _BatchNorm) -> tuple[str, fx.Node | None, str]:
        """The activation behind the BatchNorm that the last of these nodes calls.

        Returns:
            Its name; the node behind which the chain may continue, or None; the type of an activation that no stage can
            have, or "".
        """
        own = bn.get_submodule("act") if members.has_activation(bn) else None
        if own is not None and type(own) is not nn.Identity:
            act = members.module_activation(own)
            return ("identity", None, type(own).__name__) if act is None else (act, nodes[-1], "")
        longer = list(nodes)
        reader = self._reader(longer)
        if reader is None or not self._together(nodes[-1], reader):
            return "identity", nodes[-1], ""
        act = self._activation_name(reader)
        if act is not None:
            nodes[:] = [*longer, reader]
            return act, reader, ""
        module = self._module(reader)
        simple = module is not None and type(module).__module__ == "torch.nn.modules.activation"
        return "identity", nodes[-1], type(module).__name__ if simple else ""

    def _grow(self, first: _TracedStage) -> tuple[list[_TracedStage], fx.Node | None]:
        """The longest chain that begins with this stage, and the addition behind it."""
        stages = [first]
        nodes = list(first.nodes)
        while stages[-1].tail is not None:
            between = [stages[-1].tail]
            reader = self._reader(between)
            if reader is None or not self._together(stages[-1].tail, reader):
                break
            conv = self._module(reader)
            if isinstance(conv, _ConvNd):
                stage = self._stage(reader, conv) if self._search.names[conv] not in self._search.in_chains else ""
                if isinstance(stage, str) or self._interrupted([*nodes, *between, *stage.nodes]):
                    break
                # a chain that the operator has must not lose it
                if self._only_folded(stage) != self._only_folded(first):
                    break
                stage.nodes[:0] = between[1:]
                stages.append(stage)
                nodes += stage.nodes
                continue
            if self._adds(reader, between[-1]) and not self._interrupted([*nodes, *between, reader]):
                stages[-1].nodes += between[1:]
                self._taken.add(reader)
                return stages, reader
            break
        return stages, None

    def _record(self, stages: list[_TracedStage], add: fx.Node | None) -> None:
        nodes = [node for stage in stages for node in stage.nodes]
        stacks = [self._stack(node) for node in (*nodes, *([] if add is None else [add]))]
        common = _common(stacks)
        owner_path = common[-1][1] if common else ""
        owner = self._modules[owner_path]
        names = {id(m): tuple(name.split(".")) for name, m in owner.named_modules() if name}
        called = [self._modules[node.target] for node in nodes if node.op == "call_module"]
        # a BatchNorm of timm calls its own activation
        called += [inner for module in called if isinstance(module, _BatchNorm) for inner in module.children()]
        between = [self._modules[path] for stack in stacks for _, path in stack[len(common) :]]
        convs = tuple(self._name(stage.conv) for stage in stages)
        if any(id(m) not in names for m in (*called, *between)):
            for conv in convs:
                self._search.findings.reasons.setdefault(conv, "is no submodule of the module that calls it")
            return
        watched = dict.fromkeys(names[id(m)] for m in (*called, *between))
        chain = Chain(
            convs=tuple(names[id(self._modules[stage.conv])] for stage in stages),
            norms=tuple(names[id(self._modules[stage.norm])] for stage in stages),
            acts=tuple(stage.act for stage in stages),
            residual=add is not None,
            only_folded=self._only_folded(stages[0]),
            watched=tuple(watched),
        )
        norms = tuple(self._name(stage.norm) for stage in stages)
        self._search.in_chains.update(convs)
        self._search.findings.chains.append(
            LocatedChain(self._search.names[owner], chain, convs, norms, stages[-1].then)
        )

    def _reader(self, nodes: list[fx.Node]) -> fx.Node | None:
        """The only node that reads the last of these nodes, or None; appends nn.Identity in between to the nodes."""
        while len(nodes[-1].users) == 1:
            (reader,) = nodes[-1].users
            if type(self._module(reader)) is not nn.Identity:
                return reader
            nodes.append(reader)
        return None

    def _activation_name(self, node: fx.Node) -> str | None:
        module = self._module(node)
        return members.function_activation(node) if module is None else members.module_activation(module)

    def _adds(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether the node adds another tensor to the value; not if it adds the value in place to the other tensor."""
        if len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
            return False
        if node.op == "call_function":
            in_place = _ADD_FUNCTIONS.get(node.target)
        else:
            in_place = _ADD_METHODS.get(node.target) if node.op == "call_method" else None
        if in_place is None or node in self._taken or node.args[0] is node.args[1]:
            return False
        return not in_place or node.args[0] is value

    def _changes_its_input(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self._module(node), "inplace", False))
        if node.op == "call_method":
            name = str(node.target)
            return name.endswith("_") and not name.endswith("__")
        if node.op != "call_function":
            return False
        name = getattr(node.target, "__name__", "")
        if getattr(node.target, "__module__", "") == "_operator":
            return name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__"))
        return bool(node.kwargs.get("inplace", False)) or name.endswith("_")

    def _interrupted(self, nodes: list[fx.Node]) -> bool:
        """Whether another node between these changes a tensor in place: the chain reads its input at its end."""
        places = [self._order[node] for node in nodes]
        return any(min(places) < self._order[node] < max(places) and node not in nodes for node in self._in_place)

    def _together(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether the two nodes are in the same block, so that one chain may have both.

        A block is a module with several convolutions, because users index, hook and checkpoint such modules. But a
        module that has all convolutions of its caller is the body of its caller and no block of its own, like the
        Sequential in torchvision's InvertedResidual.
        """
        stacks = self._stack(one), self._stack(other)
        common = _common(stacks)
        whole = self._inside[common[-1][1] if common else ""]
        crossed = [self._inside[path] for stack in stacks for _, path in stack[len(common) :]]
        return all(len(inside) <= 1 or inside == whole for inside in crossed)

    def _calls(self, node: fx.Node) -> int:
        """How often the module that contains the module of this node calls it in one forward."""
        around = self._stack(node)
        return sum(
            other.op == "call_module" and other.target == node.target and self._stack(other)[: len(around)] == around
            for other in self._order
        )

    def _stack(self, node: fx.Node) -> list[tuple[str, str]]:
        """The modules in whose forward the node runs, outermost first; each is the key of the call and the path."""
        stack = [(key, path) for key, (path, _) in node.meta.get("nn_module_stack", {}).items()]
        return stack[:-1] if node.op == "call_module" else stack

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self._modules[node.target] if node.op == "call_module" else None

    def _only_folded(self, stage: _TracedStage) -> bool:
        return members.only_folded(self._modules[stage.conv]) is not None

    def _name(self, path: str) -> str:
        """Name in the model of a module below the root of the trace."""
        return self._search.names[self._modules[path]]


def _common(stacks: Iterable[list[tuple[str, str]]]) -> list[tuple[str, str]]:
    common: list[tuple[str, str]] = []
    # zip to the shortest
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return common


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
