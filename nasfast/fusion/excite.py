"""Squeeze-and-excitation in a graph of TorchDynamo: finds what computes it, and runs it as one operator.

It needs the means of all pixels before it changes the first one, so it ends a chain, and the next chain begins behind
it. PyTorch's operators read and write the tensor up to ten times in a step; the operator reads it four times and writes
two tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from nasfast.fusion.effects import Effects
from nasfast.fusion.match import match_activation, match_conv
from nasfast.fusion.nodes import callee, example_value
from nasfast.ops import squeeze
from nasfast.ops.reference import ACTIVATIONS, GATES

_GATE_FUNCTIONS: dict[object, str] = {
    F.hardsigmoid: "hsigmoid",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    torch.sigmoid_: "sigmoid",
    Tensor.sigmoid: "sigmoid",
    Tensor.sigmoid_: "sigmoid",
}
# ns that one operator saves where it is faster, at least
_SAVED = 40_000.0
# elements from which the operator gains more in inference than the guards of its region cost
_LEAST_WITHOUT_GRADIENT = 500_000
_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, operator.mul)


class TracedExcitation(NamedTuple):
    """x * gate(excite(act(squeeze(mean of x)))) in a graph.

    Attributes:
        nodes: all of its nodes, in order.
        x, weights: its input, and weight and bias of the two convolutions.
        act, gate: as in `nasfast.ops.squeeze_excite`.
    """

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    weights: tuple[Any, ...]
    act: str
    gate: str


def find_excitations(graph: fx.Graph, effects: Effects) -> list[TracedExcitation]:
    """Every squeeze-and-excitation of a graph, whatever modules compute it, that can run where its product is.

    Args:
        effects: those of the graph.
    """
    matched = [excitation for node in graph.nodes if (excitation := _match_excitation(node)) is not None]
    return [excitation for excitation in matched if not effects.interrupted(excitation.nodes)]


def _match_excitation(product: fx.Node) -> TracedExcitation | None:
    """The squeeze-and-excitation that ends with this node."""
    if callee(product) not in _PRODUCTS or len(product.args) != 2 or product.kwargs:
        return None
    pairs: list[tuple[Any, Any]] = [(product.args[0], product.args[1]), (product.args[1], product.args[0])]
    for x, gate in pairs:
        if not isinstance(x, fx.Node) or not _is_read_once(gate) or callee(gate) not in _GATE_FUNCTIONS:
            continue
        excite = _convolution(_input(gate))
        if excite is None:
            continue
        act_node = _input(excite[0])
        act = match_activation(act_node) if _is_read_once(act_node) else None
        squeezed = _convolution(_input(act_node)) if act is not None else None
        if act is None or squeezed is None:
            continue
        mean = _input(squeezed[0])
        if _is_read_once(mean) and _input(mean) is x and example_value(x).dim() == 4 and _is_mean(mean):
            nodes = (mean, squeezed[0], act_node, excite[0], gate, product)
            return TracedExcitation(nodes, x, (*squeezed[1:], *excite[1:]), act, _GATE_FUNCTIONS[callee(gate)])
    return None


def _input(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _is_read_once(node: Any) -> bool:
    return isinstance(node, fx.Node) and len(node.users) == 1


def _convolution(node: Any) -> tuple[fx.Node, Any, Any] | None:
    """The node, its weight and its bias, where it multiplies one pixel by a matrix and adds a bias."""
    conv = match_conv(node) if _is_read_once(node) else ""
    if isinstance(conv, str) or conv.bias is None or (conv.stride, conv.padding, conv.groups) != (1, 0, 1):
        return None
    # what the operator computes inside of it can be no weight, which is an input of its call
    if conv.x is conv.weight or conv.x is conv.bias:
        return None
    value = example_value(conv.weight)
    return (node, conv.weight, conv.bias) if isinstance(value, Tensor) and value.shape[2:] == (1, 1) else None


def _is_mean(node: fx.Node) -> bool:
    """Whether the node computes the mean of all pixels, with both dimensions kept."""
    function, rest = callee(node), [*node.args[1:], *node.kwargs.values()]
    if function is F.adaptive_avg_pool2d:
        return rest in ([1], [(1, 1)], [[1, 1]])
    dimensions = [argument for argument in rest if argument is not True]
    return function in (torch.mean, Tensor.mean) and True in rest and dimensions in ([(2, 3)], [[2, 3]], [(-2, -1)])


class ExcitationCall(nn.Module):
    """A squeeze-and-excitation on the operator where that is faster, which needs an x in channels_last on a CPU."""

    def __init__(self, act: str, gate: str, trains: bool) -> None:
        super().__init__()
        self._act, self._gate, self._trains = act, gate, trains

    def forward(self, x: Tensor, *weights: Tensor) -> Tensor:
        """The result for (N, C, H, W) and weight and bias of the two convolutions."""
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        right_type = autocast == torch.bfloat16 if autocast is not None else weights[0].dtype == x.dtype
        if right_type and self._pays(x):
            with suppress(TypeError, ValueError):  # it refuses before it computes; PyTorch may accept the same
                return squeeze.squeeze_excite(x, *weights, act=self._act, gate=self._gate, backend="cpu")
        squeeze_weight, squeeze_bias, excite_weight, excite_bias = weights
        squeezed = ACTIVATIONS[self._act](F.conv2d(x.mean((2, 3), keepdim=True), squeeze_weight, squeeze_bias))
        return x * GATES[self._gate](F.conv2d(squeezed, excite_weight, excite_bias))

    def _pays(self, x: Tensor) -> bool:
        gradient = torch.is_grad_enabled() and x.requires_grad
        return (gradient or x.numel() >= _LEAST_WITHOUT_GRADIENT) and squeeze.is_faster(x, trains=self._trains)

    def saving_function(self, example: Tensor) -> Callable[[torch.Size], float]:
        """A function of the shape of an input like this one, as `rule.Saving`."""
        dtype, gradient = example.dtype, example.requires_grad
        channels = example.stride(1) if example.is_cpu else 0
        nhwc = isinstance(channels, int) and channels == 1

        def saving(shape: torch.Size) -> float:
            # its values do not count
            return _SAVED if nhwc and self._pays(_empty(shape, dtype).requires_grad_(gradient)) else -1.0

        return saving


def _empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
