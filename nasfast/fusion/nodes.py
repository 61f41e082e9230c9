"""What a node of a torch.fx graph calls, with which arguments, and what it gives."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

_NORM_ARGUMENTS = signature(F.batch_norm)


def callee(node: fx.Node) -> object:
    """The function or the method of tensors that a node calls; None for other nodes."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    return node.target if node.op == "call_function" else None


def callee_name(node: fx.Node) -> str:
    """The name of what a node calls."""
    if node.op == "call_module":
        return str([cls for _, cls in node.meta["nn_module_stack"].values()][-1].__name__)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def example_value(node: Any) -> Any:
    """What a node gives, if that is known; what is no node is itself."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def norm_arguments(norm: fx.Node) -> dict[str, Any]:
    """The arguments of a call of F.batch_norm behind its input, by their names."""
    _, *arguments = _NORM_ARGUMENTS.bind(*norm.args, **norm.kwargs).arguments.items()
    return dict(arguments)
