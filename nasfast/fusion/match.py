"""Chains of convolution, BatchNorm, activation and addition in one torch.fx graph.

Only one thing is taken from a graph: which operation reads which result, and in which order. What a node is, says a
subclass of `Matcher`: `find` reads traces of modules, and `dynamo` graphs of PyTorch's functions.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import signature

from torch import fx

from nasfast.fusion.members import ADDITIONS, called


@dataclass
class TracedStage:
    """One stage in a graph.

    Attributes:
        nodes: all of its nodes, in order.
        conv, norm: the nodes of its convolution and BatchNorm.
        act: name of its activation.
        tail: the node behind which the next stage may begin; None behind an activation that no stage can have.
    """

    nodes: list[fx.Node]
    conv: fx.Node
    norm: fx.Node
    act: str
    tail: fx.Node | None


class Matcher(ABC):
    """The chains of one graph.

    Attributes:
        order: place of every node.
        reasons: why no chain begins with a convolution that `chains` reached.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.reasons: dict[fx.Node, str] = {}
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        # an addition belongs to one chain, even if it adds the results of two
        self._taken: set[fx.Node] = set()
        self._in_place = [node for node in graph.nodes if self.changes_in_place(node)]

    @abstractmethod
    def is_conv(self, node: fx.Node) -> bool:
        """Whether the node is a convolution of any kind."""

    @abstractmethod
    def conv_problem(self, conv: fx.Node) -> str | None:
        """Why no stage can have this convolution; None if one can."""

    @abstractmethod
    def norm_problem(self, norm: fx.Node) -> str | None:
        """Why no stage can have what follows a convolution as its BatchNorm; None if one can."""

    @abstractmethod
    def activation(self, node: fx.Node) -> str | None:
        """The activation of a stage that the node computes, or None."""

    @abstractmethod
    def inside(self, path: str) -> frozenset:
        """The convolutions of a module, by its path in the stacks of modules; "" is around all others."""

    def is_identity(self, node: fx.Node) -> bool:
        """Whether the node's result is its input."""
        return False

    def belongs_elsewhere(self, conv: fx.Node) -> bool:
        """Whether a chain that was found before has this convolution."""
        return False

    def repeated(self, node: fx.Node) -> bool:
        """Whether what this convolution or BatchNorm changes is changed by another node, too."""
        return False

    def own_activation(self, norm: fx.Node) -> tuple[str, fx.Node | None] | None:
        """The result of `_activation` for a BatchNorm that has an activation itself; None if it has none."""
        return None

    def changes_in_place(self, node: fx.Node) -> bool:
        """Whether the node changes a tensor that others may read."""
        if node.op == "call_method":
            name = str(node.target)
            return name.endswith("_") and not name.endswith("__")
        if node.op != "call_function":
            return False
        name = getattr(node.target, "__name__", "")
        if getattr(node.target, "__module__", "") == "_operator":
            return name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__"))
        return name.endswith("_") or _inplace(node)

    def stack(self, node: fx.Node) -> list[tuple[str, str]]:
        """The modules in whose forward the node runs, outermost first; each is the key of the call and the path."""
        return [(key, path) for key, (path, _) in node.meta.get("nn_module_stack", {}).items()]

    def chains(self) -> Iterator[tuple[list[TracedStage], fx.Node | None]]:
        """The stages of each chain, and the addition behind them."""
        done: set[fx.Node] = set()
        for node in self.order:
            if node in done or not self.is_conv(node) or self.belongs_elsewhere(node):
                continue
            first = self.stage(node)
            if isinstance(first, str):
                self.reasons[node] = first
                continue
            stages, add = self.grow(first)
            done.update(n for stage in stages for n in stage.nodes)
            yield stages, add

    def stage(self, conv: fx.Node) -> TracedStage | str:
        """The stage that begins with this convolution, or why none does."""
        problem = self.conv_problem(conv)
        if problem is not None:
            return problem
        nodes = [conv]
        norm = self._reader(nodes)
        if norm is None:
            return "its result is used more than once" if nodes[-1].users else "its result is not used"
        problem = self.norm_problem(norm)
        if problem is not None:
            return problem
        if not self._together(conv, norm):
            return "its BatchNorm is in another block"
        if self.repeated(conv) or self.repeated(norm):
            return "is called several times in one forward"
        nodes.append(norm)
        act, tail = self.own_activation(norm) or self._activation(nodes)
        if self._interrupted(nodes):
            return "something is changed in place before its BatchNorm or activation"
        return TracedStage(nodes, conv, norm, act, tail)

    def _activation(self, nodes: list[fx.Node]) -> tuple[str, fx.Node | None]:
        """The activation behind the last of these nodes, a BatchNorm; its node is appended to them.

        Returns:
            Its name, and the node behind which the chain may continue, or None.
        """
        longer = list(nodes)
        reader = self._reader(longer)
        if reader is None or not self._together(nodes[-1], reader):
            return "identity", nodes[-1]
        act = self.activation(reader)
        if act is not None:
            nodes[:] = [*longer, reader]
            return act, reader
        return "identity", nodes[-1]

    def grow(self, first: TracedStage) -> tuple[list[TracedStage], fx.Node | None]:
        """The longest chain that begins with this stage, and the addition behind it."""
        stages = [first]
        nodes = list(first.nodes)
        while stages[-1].tail is not None:
            between = [stages[-1].tail]
            reader = self._reader(between)
            if reader is None or not self._together(stages[-1].tail, reader):
                break
            if self.is_conv(reader):
                stage = "" if self.belongs_elsewhere(reader) else self.stage(reader)
                if isinstance(stage, str) or self._interrupted([*nodes, *between, *stage.nodes]):
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

    def _reader(self, nodes: list[fx.Node]) -> fx.Node | None:
        """The only node that reads the last of these nodes, or None; appends identities in between to the nodes."""
        while len(nodes[-1].users) == 1:
            (reader,) = nodes[-1].users
            if not self.is_identity(reader):
                return reader
            nodes.append(reader)
        return None

    def _adds(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether the node adds another tensor to the value; not if it adds the value in place to the other tensor."""
        if len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
            return False
        in_place = ADDITIONS.get(called(node))
        if in_place is None or node in self._taken or node.args[0] is node.args[1]:
            return False
        return not in_place or node.args[0] is value

    def _interrupted(self, nodes: list[fx.Node]) -> bool:
        """Whether another node between these changes a tensor in place: the chain reads its input at its end."""
        places = [self.order[node] for node in nodes]
        return any(min(places) < self.order[node] < max(places) and node not in nodes for node in self._in_place)

    def _together(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether the two nodes are in the same block, so that one chain may have both.

        A block is a module with several convolutions, because users index, hook and checkpoint such modules. But a
        module that has all convolutions of its caller is the body of its caller and no block of its own, like the
        Sequential in torchvision's InvertedResidual.
        """
        stacks = self.stack(one), self.stack(other)
        around = common(stacks)
        whole = self.inside(around[-1][1] if around else "")
        crossed = [self.inside(path) for stack in stacks for _, path in stack[len(around) :]]
        return all(len(inside) <= 1 or inside == whole for inside in crossed)


def _inplace(call: fx.Node) -> bool:
    """The argument inplace of a function, which may be given without its name."""
    try:
        arguments = signature(call.target).bind(*call.args, **call.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):  # builtin functions have no signatures
        arguments = dict(call.kwargs)
    return bool(arguments.get("inplace", False))


def adds_in_place(add: fx.Node | None) -> bool:
    """Whether the addition behind a chain keeps the type of the chain's result."""
    return add is not None and ADDITIONS[called(add)]


def common(stacks: Iterable[list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """The levels with which all of these stacks begin."""
    found: list[tuple[str, str]] = []
    # zip to the shortest
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        found.append(level[0])
    return found
