"""What the nodes of a graph read and write, and which of them may run later than they do.

What replaces several nodes runs where the last of them is, so the others run later than before. That changes nothing
unless a node between them uses the same memory, and one of the two writes to it. Memory is that of the fake tensors in
`meta`, which views share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from nasfast.fusion.nodes import callee_name, example_value, norm_arguments

_OPERATORS = "add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
# functions of the module operator and methods
_IN_PLACE = {"setitem", "__setitem__", *(name for op in _OPERATORS for name in (f"i{op}", f"__i{op}__"))}


class Effects:
    """What the nodes of one graph read and write.

    Attributes:
        order: place of every node.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._nodes = list(self.order)
        self._inputs = _memory([node for node in self._nodes if node.op in ("placeholder", "get_attr")])

    def interrupted(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether something else would be computed if these nodes ran as one, where the last of them is, which reads
        what they read and then writes what they write.
        """
        own, places = {*nodes}, [self.order[node] for node in nodes]
        # of those of them that are moved behind the node that is looked at; what they give each other does not count
        read: set[int] = set()
        written: set[int] = set()
        for node in self._nodes[min(places) : max(places) + 1]:
            changed = _changed_nodes(node)
            if node not in own and not changed and node.op.startswith("call_") and example_value(node) is None:
                return True  # it changes a mode, such as autocast
            reads = _memory(n for n in node.all_input_nodes if node not in own or n not in own)
            writes = _memory(n for n in changed if node not in own or n not in own)
            if node not in own and node.target is not F.batch_norm and any(map(_is_floating, changed)):
                # inputs with memories of their own may share one in a later call, and no guard sees that
                writes |= set() if writes.isdisjoint(self._inputs) else self._inputs
            if not writes.isdisjoint(read | written) or not reads.isdisjoint(written):
                return True
            if node in own:
                read |= reads
                written |= writes
        return False

    def changes_later(self, value: fx.Node, node: fx.Node) -> bool:
        """Whether something behind the node changes a value; of results in a trace nothing is known."""
        example, memory = example_value(value), _memory([value])
        if not isinstance(example, Tensor) or example.is_meta:
            return False
        behind = self._nodes[self.order[node] + 1 :]
        return any(not memory.isdisjoint(_memory(_changed_nodes(each))) for each in behind)


def _memory(values: Iterable[Any]) -> set[int]:
    """Which memory tensors have, or those that nodes give."""
    tensors = [leaf for value in values for leaf in tree_leaves(example_value(value)) if isinstance(leaf, Tensor)]
    # a sparse tensor has no storage
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout == torch.strided}


def _is_floating(node: fx.Node) -> bool:
    """Whether a node gives numbers and no counter of batches."""
    value = example_value(node)
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def _changed_nodes(node: fx.Node) -> Sequence[fx.Node]:
    """The nodes whose tensors this one may change."""
    if node.op not in ("call_function", "call_method"):
        return ()
    target, name, inputs = node.target, callee_name(node), node.all_input_nodes
    if target is F.batch_norm:
        norm = norm_arguments(node)
        statistics = [norm.get(which) for which in ("running_mean", "running_var")]
        return [each for each in statistics if isinstance(each, fx.Node) and norm.get("training", False) is not False]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return inputs  # it calls a graph of its own
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        overloads = (
            [target] if isinstance(target, torch._ops.OpOverload) else map(target.__getattr__, target.overloads())
        )
        return inputs if any(overload._schema.is_mutable for overload in overloads) else ()
    if name.endswith(("batch_norm", "instance_norm")):
        return inputs
    first = [*node.args, *node.kwargs.values()][:1] if _changes_first(node, name) else []
    return [leaf for leaf in tree_leaves([first, node.kwargs.get("out")]) if isinstance(leaf, fx.Node)]


def _changes_first(node: fx.Node, name: str) -> bool:
    """Whether the node changes its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or _has_inplace(node)


def _has_inplace(node: fx.Node) -> bool:
    """Whether the function has an argument inplace that is true, which may be given without its name."""
    try:
        arguments = signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):  # builtin functions have no signatures
        arguments = dict(node.kwargs)
    return bool(arguments.get("inplace", False))
